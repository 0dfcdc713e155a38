"""Distribution of tensors over processes, and communication between processes.

    layout               the grid of processes and this process's position in it
    collectives          communication, each operation with its backward pass
    build                the context that a layer is built in: layout, device, kernels
    layers, linear       layers with split weights, which multiply by `products`
    quantized            frozen weights in 8 or 4 bits
    adapter              low-rank adapters for layers with frozen weights (LoRA)
    registry             what layers request while a model is built
    offload              activations kept in host memory until the backward pass
    parameter            the part of a tensor that a parameter holds, and its initial values
    buckets              the plan of flat buffers (data only)
    gradients, weights   carry out that plan: average gradients, gather weights
    sharded              ZeRO stage 3, which replaces gradients and weights
    tied                 parameters shared by several pipeline stages
    pipeline             schedules as data, and their execution
    context              attention over split sequences
    cross_entropy, distillation  losses over a split vocabulary
    journal              a record of what a process waits for, used to explain hangs

With `layout.Layout.single()`, layers run on one process.
"""
