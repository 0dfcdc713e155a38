"""One training run, from its configuration to its last checkpoint.

The modules, in the order in which a run uses them:

    recipe                   the model, data and loss that a `pretrain_*.py` supplies
    pretrain                 the run as a whole: build, show the panel, train, evaluate
    build, gradient_sharing  construction of `run.Run`, which all modules below use
    batches, curriculum      the number and the length of the samples in each update
    panel, expert_plan       the start-up panel
    loop                     repeats updates and calls the callbacks around them, in order
    step                     one update: averages gradients, changes weights, reads losses
    spikes                   finds losses and gradient norms that are far too large
    rerun                    computes suspicious updates again
    passes                   passes of micro-batches through the model, ordered by a schedule
    forward                  runs a micro-batch through a part of the model
    recorded_passes          does the same with CUDA graphs
    expert_load              the number of tokens that each expert received
    timers                   clocks for updates, pipeline operations and saves
    evaluation               the loss on held-out samples
    log_line                 log lines in Megatron's format
    writers                  TensorBoard, Weights & Biases and files of JSON lines
    callbacks                side tasks of a run: logging, saving, profiling
    generation               the model's answers to prompts during training
    health                   tests the machines of a run
    find_lr                  finds a learning rate in a short training run
    checkpointing            the state of a run in a checkpoint, and saving it
    restoring                opens the checkpoint that a run starts from, and restores the run
    changed_settings         settings and data that have changed since the checkpoint
    run_record               the run's identity, and its newest checkpoint
    branches                 starts a run that branches off another one for its final decay
    from_bert                starts a bi-encoder from a BERT model

`megatron.processes` starts and ends processes.
"""
