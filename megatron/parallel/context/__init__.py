"""Context parallelism: every process holds a shard of each sequence.

`split` defines the shards. `ring` computes attention between shards, by ring attention or Ulysses,
and `block` computes attention between two blocks of a ring.
"""
