"""Placement of tensors, and communication between processes.

    layout               the grid of processes, as one of them sees it
    collectives          communication, each operation with its backward pass
    build                the context that a layer is built in: layout, device, kernels
    layers, linear       layers whose weights are split; `products` multiply for them
    quantized            frozen weights in 8 or 4 bits
    adapter              low-rank adapters of layers whose weights are frozen (LoRA)
    registry             the needs that layers announce while a model is built
    parameter            the part of a whole tensor that a parameter holds, and its initial values
    buckets              the plan of flat buffers, as data
    gradients, weights   carry out that plan: gradients averaged, updated weights gathered
    sharded              ZeRO stage 3, which replaces these
    tied                 parameters that several pipeline stages hold
    pipeline             schedules as data, and their execution
    context              attention over sequences that are split
    cross_entropy, distillation  losses over a vocabulary that is split
    journal              a record of what a process is waiting for, to explain a hang

Layers run on one process with `layout.Layout.single()`.
"""
