"""Pipeline parallelism.

`schedule` lists, as data, what every stage does in which order; `check` proves that this can run,
`simulate` predicts its timing, `executor` runs it, and `p2p` carries tensors.
"""
