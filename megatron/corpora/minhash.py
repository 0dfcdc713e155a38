"""Near-duplicate detection: MinHash signatures of documents and the search for matching bands.

A signature has one value per bin. A single hash assigns each n-gram to a bin, and each bin keeps
the smallest value ("one permutation hashing"). A signature therefore costs one operation per n-gram
instead of one per n-gram and bin. Empty bins of short documents borrow values from other bins in an
order that depends only on the seed ("optimal densification"). As in plain MinHash, the fraction of
equal values estimates the Jaccard similarity of two documents' n-grams.

Two documents are compared if all values of at least one band agree. They are near-duplicates if the
fraction of equal values reaches the threshold. The groups are the connected components of
near-duplicates, and the first document of each group is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from megatron.corpora.words import batches, hash_ngrams, mix, split_words
from megatron.errors import ConfigError

_EMPTY = np.uint32(0xFFFFFFFF)
NO_WORDS = np.uint16(0)  # the value in all bins of a document without words, which matches no other


@dataclass(frozen=True)
class MinHash:
    """Settings for computing and comparing signatures.

    With the defaults, 72% of the pairs with similarity 0.5 become candidates, 96% of those with 0.6
    and 99.9% of those with 0.7. The similarity of each candidate pair is then estimated from all
    200 values, with a standard deviation of at most 0.035.

    Attributes:
        ngram: The number of words in an n-gram.
        bands: The number of bands. Two documents are compared if they agree in a whole band.
        rows: The number of values in a band.
        similarity: The minimum fraction of equal values for two documents to be near-duplicates.
        seed: The seed of the hash, and of the order in which empty bins borrow values.
    """

    ngram: int = 5
    bands: int = 40
    rows: int = 5
    similarity: float = 0.6
    seed: int = 1234

    def __post_init__(self) -> None:
        """Check that `ngram`, `bands` and `rows` are at least 1.

        Raises:
            ConfigError: One of them is less than 1.
        """
        for name in ("ngram", "bands", "rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"steps.duplicates.{name} {getattr(self, name)}: give at least 1")

    @property
    def values(self) -> int:
        """The number of values in a signature."""
        return self.bands * self.rows


def sign(texts: Sequence[bytes], settings: MinHash) -> NDArray[np.uint16]:
    """Return the signatures of UTF-8 documents, `[values, documents]`."""
    lenders = _lenders(settings)
    parts = [_sign_batch(texts[a:b], settings, lenders) for a, b in batches(texts)]
    return np.concatenate([np.empty((settings.values, 0), np.uint16), *parts], axis=1)


@cache
def _lenders(settings: MinHash) -> NDArray[np.intp]:
    """Return the bins from which each empty bin borrows, in order, `[values - 1, values]`."""
    generator = np.random.default_rng(settings.seed)
    bins = settings.values
    shifts = np.arange(1, bins)
    return (
        np.arange(bins) + np.stack([generator.permutation(shifts) for _ in range(bins)]).T
    ) % bins


def _sign_batch(
    texts: Sequence[bytes], settings: MinHash, lenders: NDArray[np.intp]
) -> NDArray[np.uint16]:
    words = split_words(texts)
    grams, _ = hash_ngrams(words, settings.ngram)
    grams = mix(grams ^ np.uint64(settings.seed * 0x9E3779B97F4A7C15 & ((1 << 64) - 1)))
    bins = settings.values
    # The upper half of the hash selects the bin, and the lower half is the value.
    bin_indices = (grams >> np.uint64(32)) * np.uint64(bins) >> np.uint64(32)
    minima = np.full(words.batch * bins, _EMPTY, np.uint32)
    slots = words.documents * bins + bin_indices.astype(np.int64)
    np.minimum.at(minima, slots, np.minimum(grams.astype(np.uint32), _EMPTY - np.uint32(1)))
    signatures = minima.reshape(words.batch, bins)
    has_words = (signatures != _EMPTY).any(axis=1)
    (sparse,) = np.nonzero((signatures == _EMPTY).any(axis=1) & has_words)
    original = signatures[sparse]
    filled = original.copy()
    unfilled = np.arange(len(sparse))
    for lender in lenders:
        if not len(unfilled):
            break
        empty = filled[unfilled] == _EMPTY
        filled[unfilled] = np.where(empty, original[unfilled][:, lender], filled[unfilled])
        unfilled = unfilled[(filled[unfilled] == _EMPTY).any(axis=1)]
    signatures[sparse] = filled
    short = (signatures % np.uint32(0xFFFF)).astype(np.uint16) + np.uint16(1)
    short[~has_words] = NO_WORDS
    return np.ascontiguousarray(short.T)


def group_duplicates(signatures: NDArray[np.uint16], settings: MinHash) -> NDArray[np.int64]:
    """Return, for each document, the index of the first document in its group, `[documents]`.

    Args:
        signatures: The signatures of all documents in order, `[values, documents]`.
        settings: The settings of the signatures.
    """
    roots = np.arange(signatures.shape[1])
    for first, second in _pairs_by_band(signatures, settings):
        differs = roots[first] != roots[second]
        first, second = first[differs], second[differs]  # noqa: PLW2901 - the pairs still to compare
        is_similar = similarity(signatures, first, second) >= settings.similarity
        roots = join(roots, first[is_similar], second[is_similar])
    return roots


def similar_pairs(
    signatures: NDArray[np.uint16], settings: MinHash
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find pairs of near-duplicates, enough to connect all documents of each group.

    Args:
        signatures: The signatures of all documents in order, `[values, documents]`.
        settings: The settings of the signatures.

    Returns:
        The indices of the first and the second document of each pair, `[pairs]` each, sorted.
    """
    pairs_by_band = [np.empty((0, 2), np.int64)]
    for first, second in _pairs_by_band(signatures, settings):
        is_similar = similarity(signatures, first, second) >= settings.similarity
        pairs = np.stack([first[is_similar], second[is_similar]], axis=1)
        pairs_by_band.append(np.unique(np.sort(pairs, axis=1), axis=0))
    pairs = np.unique(np.concatenate(pairs_by_band), axis=0)
    return pairs[:, 0], pairs[:, 1]


def _pairs_by_band(
    signatures: NDArray[np.uint16], settings: MinHash
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the pairs to compare, one band at a time."""
    (usable,) = np.nonzero(signatures[0] != NO_WORDS)
    for band in range(settings.bands):
        keys = np.zeros(signatures.shape[1], np.uint64)
        for row in signatures[band * settings.rows : (band + 1) * settings.rows]:
            keys = mix(keys * np.uint64(0x100000001B3) + row)
        first, second = _candidates(keys[usable])
        yield usable[first], usable[second]


def _candidates(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pair each document with the first and the previous document that have the same key.

    Args:
        keys: The key of each document, `[documents]`.

    Returns:
        The indices of the first and the second document of each pair, `[pairs]` each.
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    same = np.zeros(len(keys), np.bool_)
    same[1:] = ordered[1:] == ordered[:-1]
    (later,) = np.nonzero(same)
    heads = np.maximum.accumulate(np.where(same, 0, np.arange(len(keys))))
    first = np.concatenate([order[heads[later]], order[later - 1]])
    second = np.concatenate([order[later], order[later]])
    return first, second


def similarity(
    signatures: NDArray[np.uint16], first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the fraction of equal signature values for each pair, `[pairs]`.

    Args:
        signatures: The signatures of all documents in order, `[values, documents]`.
        first: The index of the first document of each pair, `[pairs]`.
        second: The index of the second document of each pair, `[pairs]`.
    """
    equal = np.zeros(len(first), np.int64)
    for row in signatures:
        equal += row[first] == row[second]
    return equal / len(signatures)


def join(
    roots: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Merge the groups of the two documents of each pair.

    Args:
        roots: The first document of each document's group, `[documents]`. It is modified in place.
        first: The index of the first document of each pair, `[pairs]`.
        second: The index of the second document of each pair, `[pairs]`.

    Returns:
        The first document of each document's group after merging, `[documents]`.
    """
    while len(first):
        low = np.minimum(roots[first], roots[second])
        np.minimum.at(roots, roots[first], low)
        np.minimum.at(roots, roots[second], low)
        while True:  # point every document at the root of its root
            higher = roots[roots]
            if (higher == roots).all():
                break
            roots = higher
        differs = roots[first] != roots[second]
        first, second = first[differs], second[differs]
    return roots
