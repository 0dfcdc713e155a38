"""Context parallelism: every process holds a part of each sequence.

`split` defines which part, `ring` contains two ways for the parts to attend to each other, and
`block` contains the computation that a ring runs between two transfers.
"""
