"""Arithmetic about a run before it starts: its memory, its time, and the best layout.

Nothing here touches a GPU or needs `torch.distributed`.

    memory              the memory of a process
    pipeline_balance    the bubble of a pipeline, and a layout of its layers with a smaller one
"""
