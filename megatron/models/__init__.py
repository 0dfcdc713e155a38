"""Networks. Docstrings state the shape of every tensor.

    plan, plans           a network described as data: one plan per layer; plans from flags
    mixture_plan          plans of mixtures of experts and their routers
    network               base class of all models: plan, embedding, positions
    gpt, bert, t5, retro  models, whole or only the part held by a pipeline stage
    biencoder             two BERTs that turn queries and contexts into vectors
    block                 layers, and the tables of mixers (`attention`) and MLPs (`mlp`)
    mixture, router       mixtures of experts, which replace the MLP
    mamba, recurrence     Mamba-2, alone or parallel to attention; code shared by recurrent mixers
    recurrent_plan        plans of recurrent mixers, with the states that inference keeps for them
    delta_net             gated delta nets (Qwen3-Next)
    latent_attention      multi-head latent attention (DeepSeek-V2)
    retrieval             Retro's cross-attention to neighbors
    norm, position_bias   normalizations; T5's relative position bias
    multi_token           layers after the last one, which predict additional tokens
    embedding, head       embeddings before the layers; output and loss after them
    recompute             recomputation of activations in the backward pass
    adapters              adapters for linear layers, selected by name
    freezing              frozen weights
    build                 functions that build the model a run's flags describe
    arithmetic, costs     parameters, FLOPs and activations counted from a plan

A layer's constructor takes the layer's plan and a `parallel.build.BuildContext`. It also says how
each weight is split over processes (`parallel.layers.Linear`).
"""
