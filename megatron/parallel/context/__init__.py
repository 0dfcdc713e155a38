"""Context parallelism: every process holds a part of each sequence.

`split` defines which part, `ring` has two ways for the parts to attend to each other, and `block`
has the computation that a ring runs between two transfers.
"""
