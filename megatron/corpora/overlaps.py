"""Overlaps between a corpus and the files of evaluation tasks, found by hashing word n-grams."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.corpora.plan import TasksStep
from megatron.corpora.words import batches, hash_ngrams_of, split_words
from megatron.data.text_input import load_line
from megatron.errors import DataError

_SENTENCE_ENDS = ".!?"
_SENTENCE_END = re.compile(f"[{_SENTENCE_ENDS}]")


class Overlap(NamedTuple):
    """A sequence of words that also occurs in a task.

    Attributes:
        start: The character offset at which it starts in the text.
        end: The character offset at which it ends, exclusive.
        ngram: The hash of the words.
    """

    start: int
    end: int
    ngram: int


class TaskNgrams:
    """The n-grams of task files.

    Args:
        hashes: The sorted hashes of the n-grams, `[n]`, by the number of words in an n-gram.
    """

    def __init__(self, hashes: dict[int, NDArray[np.uint64]]) -> None:
        """Build a table that rejects most n-grams of other texts with a single lookup."""
        self.hashes = dict(sorted(hashes.items()))
        self.count = sum(map(len, hashes.values()))
        self._shift = np.uint64(64 - max(16, (16 * self.count).bit_length()))
        self._filter = np.zeros(1 << int(64 - self._shift), np.bool_)
        for ngrams in hashes.values():
            self._filter[ngrams >> self._shift] = True

    @classmethod
    def of_texts(cls, texts: Sequence[str], longest: int, shortest: int) -> TaskNgrams:
        """Collect all n-grams of `longest` words, and each shorter text as a single n-gram.

        Args:
            texts: The texts of the tasks.
            longest: The number of words in an n-gram.
            shortest: The minimum number of words in a text. Shorter texts are ignored.
        """
        sizes = range(shortest, longest + 1)
        collected: dict[int, list[NDArray[np.uint64]]] = {size: [] for size in sizes}
        data = [text.encode() for text in texts]
        for first, last in batches(data):
            words = split_words(data[first:last])
            lengths = np.bincount(words.documents, minlength=words.batch)[words.documents]
            is_first = np.append(True, words.documents[1:] != words.documents[:-1])
            for size, (hashes, is_full) in zip(sizes, hash_ngrams_of(words, sizes), strict=True):
                is_selected = (
                    is_full if size == longest else is_first[: len(is_full)] & (lengths == size)
                )
                collected[size].append(hashes[is_selected])
        unique = {
            size: np.unique(np.concatenate(parts)) for size, parts in collected.items() if parts
        }
        return cls({size: hashes for size, hashes in unique.items() if len(hashes)})

    def find(self, texts: Sequence[str]) -> list[list[Overlap]]:
        """Return the overlaps of each text with the tasks, sorted by offset."""
        by_text: list[list[Overlap]] = [[] for _ in texts]
        if not self.hashes:
            return by_text
        data = [text.encode() for text in texts]
        for first, last in batches(data):
            words = split_words(data[first:last])
            sizes = list(self.hashes)
            for size, (hashes, is_full) in zip(sizes, hash_ngrams_of(words, sizes), strict=True):
                (candidates,) = np.nonzero(is_full & self._filter[hashes >> self._shift])
                ngrams = self.hashes[size]
                positions = np.minimum(np.searchsorted(ngrams, hashes[candidates]), len(ngrams) - 1)
                for word in candidates[ngrams[positions] == hashes[candidates]].tolist():
                    i = first + int(words.documents[word])
                    start, end = int(words.starts[word]), int(words.ends[word + size - 1])
                    by_text[i].append(Overlap(start, end, int(hashes[word])))
        for i, text in enumerate(data):
            if by_text[i] and not text.isascii():  # convert bytes to characters
                is_start = (np.frombuffer(text, np.uint8) & 0xC0) != 0x80
                character_offsets = np.concatenate([[0], np.cumsum(is_start)])
                by_text[i] = [
                    Overlap(int(character_offsets[a]), int(character_offsets[b]), ngram)
                    for a, b, ngram in by_text[i]
                ]
        return [sorted(overlaps) for overlaps in by_text]


def cut_out(text: str, overlaps: Sequence[Overlap], step: TasksStep) -> list[str]:
    """Return the parts of a text that remain when its overlaps are cut out.

    Each cut includes a margin on both sides and is extended outward to the nearest sentence
    boundary. Cuts that touch are merged. Parts of at most `min_characters` characters are dropped,
    unless nothing was cut.

    Args:
        text: The text.
        overlaps: The overlaps of the text, sorted by offset.
        step: The margin and the minimum length of a part, in characters.
    """
    if not overlaps:
        return [text]
    parts, start = [], 0
    for overlap in overlaps:
        if overlap.start >= start:  # cut after the last sentence that ends before the margin
            last = max(overlap.start - step.margin + 1, start)
            parts.append(text[start : max(text.rfind(e, start, last) for e in _SENTENCE_ENDS) + 1])
        if overlap.end + step.margin >= start:
            sentence_end = _SENTENCE_END.search(text, overlap.end + step.margin)
            start = len(text) if sentence_end is None else sentence_end.end()
    parts.append(text[start:])
    return [part for part in parts if len(part) > step.min_characters]


def read_tasks(files: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the texts of task files: JSON lines, TSV, or text with one paragraph per line.

    Args:
        files: The files, which may end in .gz.
        keys: The keys or columns to read. If empty, all text is read. Plain text has no keys, so
            all of it is always read.

    Raises:
        DataError: A file cannot be read, is malformed, or has none of the keys.
    """
    return [text for file in files for text in _read_task(file, keys)]


def _read_task(path: str, keys: Sequence[str]) -> list[str]:
    name = path.removesuffix(".gz")
    try:
        with (gzip.open if name != path else open)(path, "rb") as file:
            lines = file.read().decode("utf-8-sig").split("\n")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(
            f"task file {path}: cannot be read as UTF-8 text ({error}): give a readable file"
        ) from None
    if not name.endswith((".jsonl", ".json", ".ndjson", ".tsv")):
        return lines
    records: list[Any] = []
    if name.endswith(".tsv"):
        rows = (line.removesuffix("\r").split("\t") for line in lines if line.strip())
        header = next(rows, [])
        records = [dict(zip(header, row, strict=False)) for row in rows]
    else:
        for number, line in enumerate(lines, 1):
            try:
                records += [load_line(line.encode())] if line.strip() else []
            except ValueError as error:
                raise DataError(f"task file {path}:{number}: {error}: fix the line") from None
    texts = [text for record in records for text in _texts(record, keys)]
    if keys and not texts:
        raise DataError(f"task file {path}: no line has {' or '.join(keys)}: fix the keys")
    return texts


def _texts(value: Any, keys: Sequence[str]) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not keys or key in keys:
                yield from _texts(inner, ())
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, keys)
