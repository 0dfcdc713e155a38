"""Context parallelism: every process holds a part of each sequence.

`split` defines which part. `ring` lets the parts attend to each other, in one of two ways, and
`block` computes what a ring needs between two transfers.
"""
