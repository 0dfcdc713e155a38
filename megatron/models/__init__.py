"""Networks. Docstrings state the shape of every tensor.

    plan                  a network as data: one record per layer, which everything else reads
    network               what all models share: the embedding, positions, the part held here
    gpt, bert, t5         models, whole or the part that a pipeline stage holds
    biencoder             two BERTs that turn queries and contexts into vectors
    block                 layers, and the tables of mixers (`attention`) and MLPs (`mlp`)
    latent_attention      the mixer that computes keys and values from short vectors
    norm, position_bias   normalizations; T5's relative positions
    embedding, head       embeddings before the layers; output and loss after them
    recompute             recomputation of activations in the backward pass
    adapters              adapters of linear layers, by name
    freezing              the weights that are not trained
    build                 builders of the model that a run's flags describe
    arithmetic            parameters, FLOPs and activations counted from a plan

A constructor takes the layer's record and a `parallel.build.BuildContext`. The constructor also
says whether a weight is split over processes (`parallel.layers.Linear`).
"""
