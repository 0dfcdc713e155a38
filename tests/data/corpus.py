"""Small indexed datasets for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.data.indexed import IndexedDatasetBuilder


def write_corpus(
    prefix: Path, *, documents: int = 100, longest: int = 40, vocab_size: int = 1000, seed: int = 0
) -> Path:
    """A dataset of random one-sequence documents, some of them empty; returns its prefix."""
    random = np.random.RandomState(seed)
    lengths = random.randint(0, longest, documents)
    tokens = random.randint(0, vocab_size, lengths.sum())
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(tokens, lengths, np.ones(documents, int))
    return prefix
