"""Context parallelism: every process holds a part of each sequence.

`split` defines which part. `ring` computes attention between the parts in one of two ways, and
`block` computes the attention within one step of a ring.
"""
