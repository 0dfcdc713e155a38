"""Conversion of checkpoints. `util` is the command.

    util             the command line: what to read and what to write
    formats          the tables of loaders and savers
    verify           the comparison of two models' outputs, for --verify or as a command of its own

Inspection is in `megatron.checkpoint.inspection`.
"""
