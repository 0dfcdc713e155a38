"""Side tasks of a run, which the training loop calls around each update.

    base           the hooks that a callback may have
    logging        the log line, timers and memory report on the terminal
    scalars        numbers for TensorBoard, Weights & Biases and JSON lines files
    checkpoints    saving, and background saves
    nonfinite      what happens if a loss or a gradient is not finite
    profiling      traces, and the pipeline bubble
    small          garbage collection, unused memory, sample ids, the progress bar

To add one, subclass `base.Callback`: see docs/tour.md.
"""
