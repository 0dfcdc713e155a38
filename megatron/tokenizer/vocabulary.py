"""Sizes of vocabularies."""

from __future__ import annotations

import math
from collections.abc import Mapping


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Rows of the word embedding: the least common multiple of `divisible_by` and the
    tensor-parallel size that holds `vocab_size` entries.

    With the usual 128 that is the same number for every tensor-parallel size that divides it, so
    losses do not depend on the layout: padding rows take part in the softmax. Megatron-LM pads to
    a multiple of the product instead; its checkpoints are read all the same
    (`checkpoint.vocabulary`).
    """
    multiple = math.lcm(divisible_by, tensor_parallel_size)
    return -(-vocab_size // multiple) * multiple


def append_entries(vocab: dict[str, int], entries: list[str]) -> None:
    """Give each of `entries` that `vocab` lacks the next free id, in order."""
    for entry in entries:
        vocab.setdefault(entry, len(vocab))


def extra_ids(count: int) -> list[str]:
    """Sentinel entries of `--vocab-extra-ids`."""
    return [f"<extra_id_{i}>" for i in range(count)]


def find_sentinels(vocab: Mapping[str, int]) -> list[int]:
    """Ids of `<extra_id_0>`, `<extra_id_1>` ..., up to the first that `vocab` lacks.

    Some models (mT5's) have U+2581, which stands for a space, before each.
    """
    ids: list[int] = []
    while True:
        entry = f"<extra_id_{len(ids)}>"
        index = vocab.get(entry, vocab.get(f"\u2581{entry}"))
        if index is None:
            return ids
        ids.append(index)
