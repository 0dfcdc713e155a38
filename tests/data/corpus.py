"""Small indexed datasets for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.config.data import DataConfig
from megatron.data.datasets import DataRequest
from megatron.data.indexed import IndexedDatasetBuilder


def request_for(config: DataConfig, arguments: dict) -> DataRequest:
    """Return a request for `config`, with the fields that it takes out of `arguments`."""
    names = ("seed", "samples", "is_builder", "barrier")
    return DataRequest(config, **{name: arguments.pop(name) for name in names if name in arguments})


def write_corpus(
    prefix: Path, *, documents: int = 100, longest: int = 40, vocab_size: int = 1000, seed: int = 0
) -> Path:
    """Write a dataset of random one-sequence documents, some of them empty; return its prefix."""
    random = np.random.RandomState(seed)
    lengths = random.randint(0, longest, documents)
    tokens = random.randint(0, vocab_size, lengths.sum())
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(tokens, lengths, np.ones(documents, int))
    return prefix


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_vocabulary(path: Path, words: int = 200) -> Path:
    """Write a WordPiece vocabulary: special entries, `words` words and as many continuations."""
    entries = [*VOCABULARY, *(f"w{i}" for i in range(words)), *(f"##p{i}" for i in range(words))]
    path.write_text("\n".join(entries) + "\n")
    return path


def write_sentences(
    prefix: Path, *, documents: int = 40, vocab_size: int = 405, seed: int = 0
) -> Path:
    """Write a dataset of documents with 0 to 8 sentences of 1 to 30 tokens; return its prefix."""
    random = np.random.RandomState(seed)
    counts = random.randint(0, 9, documents)
    lengths = random.randint(1, 31, counts.sum())
    tokens = random.randint(len(VOCABULARY), vocab_size, lengths.sum())
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(tokens, lengths, counts)
    return prefix
