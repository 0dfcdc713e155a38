"""Conversion of checkpoints. `util` is the command.

    util             the command line: what to read and what to write
    formats          the tables of loaders and savers
    verify           compares the outputs of two models, for --verify and on its own

Inspection is in `megatron.checkpoint.inspection`.
"""
