"""One training run, from its configuration to its last checkpoint.

The modules, in the order in which a run uses them:

    pretrain       the run as a whole: build, show the panel, train, evaluate
    build          builds `run.Run`, which all modules below use
    loop           repeats updates and calls the callbacks around them, in order
    step           one update: accumulates and averages gradients, changes weights, reads losses
    spikes         finds losses and gradient norms that are far too large
    rerun          computes suspicious updates again
    passes         runs micro-batches through the model in the order of a pipeline schedule
    callbacks      side tasks of a run: logging, saving, profiling
    generation     the model's answers to prompts during training
    health         tests the machines of a run
    find_lr        finds a learning rate by short training
    checkpointing  saves the state of a run and restores it
    fast_state     the run's identity, and its newest checkpoint, durable or non-persistent
    branches       starts a run that branches off another one for its final decay
    from_bert      starts a bi-encoder from a BERT model

`recipe` defines what a `pretrain_*.py` supplies. `megatron.processes` starts and ends processes.
"""
