"""Placement of tensors, and communication between processes.

    layout               the grid of processes, as one of them sees it
    collectives          communication with its backward
    build                what a layer is built in: layout, device, kernels
    layers, linear       layers whose weights are split; `products` multiply for them
    registry             what layers announce while a model is built
    parameter            which part of a whole tensor a parameter is, and its first values
    buckets              the plan of flat buffers, as data
    gradients, weights   carry it out: gradients averaged, updated weights gathered
    sharded              ZeRO stage 3 instead of these
    tied                 parameters that several pipeline stages hold
    pipeline             schedules as data, and what carries them out
    context              attention over sequences that are split
    journal              what a process is waiting for, for those who ask why it hangs

Layers run on one process with `layout.Layout.single()`.
"""
