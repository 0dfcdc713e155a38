"""Callbacks: the side tasks of a run, which the training loop calls around each update.

    base                the hooks that a callback may have
    logging             the log line, timers and memory report on the terminal
    scalars             values and events for the writers: TensorBoard, Weights & Biases, JSON lines
    checkpoints         saving, and background saves
    non_persistent      non-persistent checkpoints, and goodput
    skipped_updates     non-finite losses and spikes: skips, rewinds, the end of the run
    suspicious_updates  updates computed twice, to tell whether a machine or the data is at fault
    replica_hashes      copies of weights and moments that differ between replicas
    stragglers          slow ranks
    profiling           traces, and the pipeline bubble
    samples             the model's answers to a few prompts
    small               garbage collection, unused memory, bad lines, sample ids, health, progress

To add one, subclass `base.Callback`: see docs/tour.md.
"""
