"""Distribution of tensors over processes, and communication between processes.

    layout               the grid of processes and this process's position in it
    collectives          communication, each operation with its backward pass
    build                the context that a layer is built in: layout, device, kernels
    layers, linear       layers whose weights may be split over ranks
    products, fp8        the matrix products of a linear layer in each number format
    exchange, symmetric_memory  messages between ranks during a product
    quantized            frozen weights in 8 or 4 bits
    adapter              low-rank adapters for layers with frozen weights (LoRA)
    expert_linear, expert_exchange, routing  expert weights, their tokens and router statistics
    registry             gradient slots and products that layers register while a model is built
    offload              activations kept in host memory until the backward pass
    parameter, random    a parameter's shard of the whole tensor, its initial values, seeds
    buckets              the plan of flat buffers (data only)
    gradients, weights   execute this plan: average gradients, gather weights
    sharded              ZeRO stage 3, used instead of `gradients` and `weights`
    replicas             the interface of `gradients` and `sharded`
    tied                 parameters shared by several pipeline stages
    pipeline             schedules as data, and their execution
    context              attention over split sequences
    cross_entropy, distillation  losses over a split vocabulary
    journal              a record of the communication that a process waits for, to explain hangs

With `layout.Layout.single()`, layers run on a single process.
"""
