"""Pipeline parallelism.

`schedule` says what every stage does in which order, as data; `check` proves that this can be
done, `simulate` foretells when; `executor` does it, and `p2p` carries tensors.
"""
