"""One training run, from its configuration to its last checkpoint.

In the order of a run:

    pretrain       the run as a whole: build, show the panel, train, evaluate
    build          builds `run.Run`, which everything below is given
    loop           updates, and the callbacks around them in their order
    step           one update: gradients added up and averaged, weights changed, losses read
    passes         its micro-batches through the model, in the order of a pipeline schedule
    callbacks      what else a run does: logs, saves, profiles
    checkpointing  what of a run is saved, and how it comes back

`recipe` says what a `pretrain_*.py` supplies; `processes` starts and ends the processes.
"""
