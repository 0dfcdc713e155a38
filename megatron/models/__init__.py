"""Networks. Docstrings state the shape of every tensor.

    plan, mixture_plan    a network as data: one record per layer, which everything else reads
    network               base class of all models: plan, embedding, positions
    gpt, bert, t5, retro  models, whole or only the part held by a pipeline stage
    biencoder             two BERTs that turn queries and contexts into vectors
    block                 layers, and the tables of mixers (`attention`) and MLPs (`mlp`)
    mamba, recurrence     Mamba-2, alone or parallel to attention; code shared by mixers with states
    recurrent_plan        their plans, which name the states that the engine keeps
    delta_net             gated delta nets (Qwen3-Next)
    latent_attention      multi-head latent attention (DeepSeek-V2)
    norm, position_bias   normalizations; T5's relative positions
    multi_token           layers after the last one, which predict additional tokens
    embedding, head       embeddings before the layers; output and loss after them
    recompute             recomputation of activations in the backward pass
    adapters              adapters for linear layers, selected by name
    freezing              frozen weights
    build                 functions that build the model a run's flags describe
    arithmetic            parameters, FLOPs and activations counted from a plan

A layer's constructor takes the layer's record and a `parallel.build.BuildContext`. It also says how
each weight is split over processes (`parallel.layers.Linear`).
"""
