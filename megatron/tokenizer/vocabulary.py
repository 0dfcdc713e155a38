"""Sizes of vocabularies."""

from __future__ import annotations


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Rows of the word embedding: the least multiple of `divisible_by * tensor_parallel_size` that
    holds `vocab_size` entries, so that every tensor-parallel rank gets equally many.
    """
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def append_entries(vocab: dict[str, int], entries: list[str]) -> None:
    """Give each of `entries` that `vocab` lacks the next free id, in order."""
    for entry in entries:
        vocab.setdefault(entry, len(vocab))


def extra_ids(count: int) -> list[str]:
    """Sentinel entries of `--vocab-extra-ids`."""
    return [f"<extra_id_{i}>" for i in range(count)]
