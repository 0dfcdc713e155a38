"""Estimates for a run before it starts: its memory, its time, and the best layout.

Nothing here touches a GPU or needs `torch.distributed`.

    machine             the rates and links of a machine: built in, or read from a file
    memory              the memory of a process
    cost                the time of a micro-batch in a layer, and of messages
    pipeline_balance    the bubble of a pipeline, and a distribution of layers that shrinks it
    prediction          the time of a whole update with a breakdown, its memory, and the time that
                        failures and checkpoints cost
    search              all sensible layouts on a given number of GPUs, and the fastest of them
    command             `megatron plan`
"""
