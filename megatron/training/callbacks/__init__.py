"""Callbacks: the side tasks of a run, which the training loop calls around each update.

    base                the hooks that a callback may have
    logging             the terminal: log line, timers, memory report, progress bar
    scalars             values and events for the writers: TensorBoard, Weights & Biases, JSON lines
    checkpoints         saving, and background saves
    non_persistent      non-persistent checkpoints, and goodput
    skipped_updates     non-finite losses and spikes: skips, rewinds, the end of the run
    suspicious_updates  updates computed twice, to tell whether a machine or the data is at fault
    replica_hashes      copies of weights and moments that differ between replicas
    stragglers          slow ranks
    profiling           traces, and the pipeline bubble
    samples             the model's answers to a few prompts
    data                sample ids, and skipped lines of text
    health              tests of the machines
    memory              garbage collection, and unused GPU memory

To add one, subclass `base.Callback`: see docs/tour.md.
"""
