"""Context parallelism: every process holds a part of each sequence.

`split` says which part, `ring` has two ways for the parts to attend to each other,
`block` is what a ring computes between two transfers.
"""
