"""Networks: what is computed, of tensors whose shapes stand in the docstrings.

    gpt, bert, t5  whole models, or the part that a pipeline stage holds
    stack, block   their layers; a layer: `attention`, `cross_attention`, `mlp`, `norm`
    embedding      what comes before the layers, and `head` what comes after
    construct      from a run's flags to any of the models
    arithmetic     parameters and FLOPs without building one

Where a weight is split over processes, its layer's constructor says so (`parallel.layers.Linear`).
"""
