"""Words and n-grams of whole batches of documents, as 64-bit hashes in numpy arrays.

Hashed word n-grams are used to find both near-duplicates and overlaps with task files. Splitting
and hashing word by word in Python processes about 5 MB/s. NumPy on batches of UTF-8 bytes processes
about 100 MB/s.

A word is a sequence of ASCII letters, digits, underscores and two-byte characters. ASCII letters
are compared in lower case. A character of three or four bytes (Chinese, Japanese, Korean, Thai,
...) is a word by itself, because those scripts do not separate words with spaces. Characters from
U+2000 to U+2FFF (such as dashes and curly quotes) are exceptions: they separate words, like ASCII
punctuation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)
_STRIDE = 0xD6E8FEB86659FD93  # n-gram hash: the sum of hash(word i) * _STRIDE ** i
_BATCH_BYTES = 1 << 18  # arrays with 8 bytes per byte of text fit in a core's cache

_PUNCTUATION, _WIDE, _WORD = 1, 2, 4


def _classes() -> NDArray[np.uint8]:
    """Return the class of each byte. Bytes of class 0 separate words."""
    table = np.full(256, 0, np.uint8)
    for byte in (*range(0x30, 0x3A), *range(0x41, 0x5B), *range(0x61, 0x7B), 0x5F):
        table[byte] = _WORD
    table[0x80:0xE0] = _WORD
    table[0xE0:] = _WIDE
    table[0xE2] = _PUNCTUATION
    return table


def _powers(base: int, count: int) -> U64:
    """Return `base ** i` modulo 2**64 for each i below `count`."""
    powers = np.empty(count, np.uint64)
    powers[0] = 1
    done = 1
    while done < count:  # doubling: the second half is the first half times base ** done
        more = min(done, count - done)
        powers[done : done + more] = powers[:more] * np.uint64(pow(base, done, 1 << 64))
        done += more
    return powers


_CLASSES = _classes()
# The value of each byte, in lower case. Values begin at 1, so that every byte changes the hash.
_LOWER = np.arange(1, 257, dtype=np.uint64)
_LOWER[0x41:0x5B] += 0x20
_POWERS, _INVERSE_POWERS = _powers(_BASE, _BATCH_BYTES), _powers(_INVERSE, _BATCH_BYTES)


class Words(NamedTuple):
    """The words of a batch of documents, in order.

    Attributes:
        hashes: The hash of each word, `[words]`.
        starts: The byte offset of each word's start in its document, `[words]`.
        ends: The byte offset of each word's end in its document, exclusive, `[words]`.
        documents: For each word, the index of its document in the batch, `[words]`.
        batch: The number of documents, including those without words.
    """

    hashes: U64
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    documents: NDArray[np.int64]
    batch: int


def batches(texts: Sequence[bytes]) -> list[tuple[int, int]]:
    """Divide a sequence of documents into batches of about `_BATCH_BYTES`.

    Returns:
        The index of the first document of each batch, and the index after its last document.
    """
    cuts, size = [0], 0
    for i, text in enumerate(texts):
        size += len(text) + 1
        if size > _BATCH_BYTES and i > cuts[-1]:
            cuts.append(i)
            size = len(text) + 1
    return [(a, b) for a, b in zip(cuts, [*cuts[1:], len(texts)], strict=True) if b > a]


def split_words(texts: Sequence[bytes]) -> Words:
    """Split UTF-8 documents into words and hash them.

    The hash of a word is the sum of `byte * _BASE ** position` over its bytes. It is computed as
    the difference of two running sums over the whole batch, divided by `_BASE ** start`.
    """
    data = np.frombuffer(b"\n".join([*texts, b""]), np.uint8)
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    offsets = np.cumsum(sizes + 1) - (sizes + 1)
    classes = _CLASSES[data]
    (marks,) = np.nonzero(classes == _PUNCTUATION)
    for distance in (1, 2):
        classes[np.minimum(marks + distance, len(classes) - 1)] = 0
    in_word = classes >= _WIDE
    is_start = in_word.copy()
    is_start[1:] &= ~in_word[:-1] | (classes[1:] == _WIDE)
    # A wide character is a whole word, so the byte after it begins another word.
    (wide,) = np.nonzero(classes == _WIDE)
    if len(wide):
        after = wide + np.where(data[wide] >= 0xF0, 4, 3)
        after = after[after < len(data)]
        is_start[after] |= in_word[after]
    (starts,) = np.nonzero(is_start)
    # A word ends after a byte that is not followed by another byte of the same word.
    (ends,) = np.nonzero(np.append(in_word[:-1] & (~in_word[1:] | is_start[1:]), in_word[-1:]))
    ends += 1
    hashes = _hash_words(data, starts, ends)
    bounds = np.searchsorted(starts, [*offsets, len(data)])
    documents = np.repeat(np.arange(len(texts)), np.diff(bounds))
    document_offsets = offsets[documents]
    return Words(hashes, starts - document_offsets, ends - document_offsets, documents, len(texts))


def _hash_words(data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> U64:
    values = _LOWER[data]
    if len(data) <= _BATCH_BYTES:
        powers, inverse_powers = _POWERS[: len(data)], _INVERSE_POWERS
    else:  # a single document larger than a batch
        powers = _powers(_BASE, len(data))
        inverse_powers = _powers(_INVERSE, len(data))
    running = np.empty(len(data) + 1, np.uint64)
    running[0] = 0
    np.cumsum(values * powers, out=running[1:])
    return mix((running[ends] - running[starts]) * inverse_powers[starts])


def count_words(texts: Sequence[bytes]) -> NDArray[np.int64]:
    """Return the number of words in each document, `[documents]`."""
    counts = [np.empty(0, np.int64)]
    for first, last in batches(texts):
        words = split_words(texts[first:last])
        counts.append(np.bincount(words.documents, minlength=words.batch))
    return np.concatenate(counts)


def mix(values: U64) -> U64:
    """Spread every bit of 64-bit values over all bits (the finalizer of MurmurHash3)."""
    values = values ^ (values >> np.uint64(33))
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(33)
    return values


def hash_ngrams(words: Words, size: int) -> tuple[U64, NDArray[np.bool_]]:
    """Hash the n-gram that begins at each word.

    N-grams do not cross document boundaries, so the last n-grams of each document are shorter.

    Args:
        words: The words of a batch.
        size: The number of words in an n-gram.

    Returns:
        The hash of the n-gram at each word, and whether it has the full size, `[words]` each.
    """
    return next(hash_ngrams_of(words, [size]))


def hash_ngrams_of(words: Words, sizes: Sequence[int]) -> Iterator[tuple[U64, NDArray[np.bool_]]]:
    """Yield the result of `hash_ngrams` for each of several ascending sizes in a single pass."""
    total = words.hashes.copy()
    is_full = np.ones(len(total), np.bool_)
    for size in range(1, max(sizes) + 1):
        if size > 1:
            step, count = size - 1, max(len(total) - size + 1, 0)
            is_full[count:] = False
            is_full[:count] = words.documents[step:] == words.documents[:count]
            factor = np.uint64(pow(_STRIDE, step, 1 << 64))
            total[:count] += np.where(is_full[:count], words.hashes[step:] * factor, np.uint64(0))
        if size in sizes:
            yield mix(total), is_full.copy()
