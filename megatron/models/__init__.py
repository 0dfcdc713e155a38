"""Networks: what is computed, on tensors whose shapes stand in the docstrings.

    plan                  a network as data: one record per layer, which everything else reads
    gpt, bert, t5         whole models, or the part that a pipeline stage holds; their plans
    block                 layers, and the tables of mixers (`attention`) and MLPs (`mlp`)
    norm, position_bias   normalizations; T5's relative positions
    embedding, head       what comes before the layers, and what comes after
    recompute             what is computed again in backward
    build                 from a run's flags to a plan and a model
    arithmetic            parameters and FLOPs of a plan without building anything

A constructor takes the layer's record and a `parallel.build.BuildContext`. If a weight is split
over processes, its layer's constructor says so (`parallel.layers.Linear`).
"""
