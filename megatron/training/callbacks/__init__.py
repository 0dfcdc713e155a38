"""Side tasks of a run, which the training loop calls around each update.

    base           the hooks that a callback may have
    logging        the log line, timers and memory report on the terminal
    scalars        numbers for TensorBoard, Weights & Biases and JSON lines files
    checkpoints    saving, and background saves
    profiling      traces, and the pipeline bubble
    samples        answers of the model to a few prompts
    small          non-finite losses, garbage, unused memory, sample ids, the progress bar

To add one, subclass `base.Callback`: see docs/tour.md.
"""
