"""Text corpora to indexed datasets: blocks of lines -> documents -> ids -> `.bin`/`.idx`.

    read_blocks  ->  BlockEncoder, in several processes  ->  one builder a key

Blocks come back in the order of the input, so the output does not depend on the workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import TokenizerConfig
from megatron.data.documents import BadLine, parse_lines
from megatron.data.indexed import IndexedDatasetBuilder, best_dtype
from megatron.data.sentences import SentenceSplitter
from megatron.data.text_input import Block, read_blocks
from megatron.data.worker_pool import map_in_order
from megatron.environment import usable_cores
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer, build_tokenizer

# A worker's start costs about as much as encoding this many bytes.
_BYTES_PER_WORKER = 8 << 20


@dataclass(frozen=True)
class EncodingOptions:
    """What decides the ids of a document.

    Attributes:
        tokenizer: the tokenizer's flags.
        keys: keys of a JSON line to encode, a dataset each.
        append_eod: end each document with the end-of-document id.
        splitter: cuts documents into sentences; None: a document is one sequence.
    """

    tokenizer: TokenizerConfig
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    splitter: SentenceSplitter | None = None


@dataclass(frozen=True)
class Column:
    """Documents of one key: ids `[tokens]`, their lengths `[sequences]`, and how many sequences
    each document has `[documents]`.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    sequences_per_document: NDArray[np.int64]


@dataclass(frozen=True)
class EncodedBlock:
    """What a block of lines became: a column a key."""

    block: Block
    columns: list[Column]
    lines: int
    bad: list[BadLine]


@dataclass
class Counts:
    """What a run did so far."""

    documents: int = 0
    bad_lines: int = 0
    text_bytes: int = 0
    tokens: dict[str, int] = field(default_factory=dict)


class BlockEncoder:
    """Reads, parses and encodes blocks. Sent to another process, it is built there again.

    Args:
        options: what decides the ids.
        tokenizer: built from `options.tokenizer`.
    """

    def __init__(self, options: EncodingOptions, tokenizer: Tokenizer) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.dtype = best_dtype(tokenizer.vocab_size)
        self._end = np.array([tokenizer.eod] if options.append_eod else [], self.dtype)
        # T5's own tokenizer ends every text with </s> already; it does not end single sentences.
        self._ends_texts = options.append_eod and tokenizer.appended_ids[-1:] == (tokenizer.eod,)

    def __reduce__(self) -> tuple[Any, ...]:
        return _build_block_encoder, (self.options,)

    def __call__(self, block: Block) -> EncodedBlock:
        documents = parse_lines(block.read(), self.options.keys)
        values, bad = documents.values, documents.bad
        try:
            columns = self._encode(values)
        except DataError:
            # One text that the tokenizer refuses must not take its neighbours along.
            values, refused = self._refuse_one_by_one(values, documents.places)
            columns = self._encode(values)
            bad = sorted([*bad, *refused])
        light = Block(block.path, block.offset, block.size, block.done)
        return EncodedBlock(light, columns, documents.lines, bad)

    def _encode(self, values: Sequence[Sequence[str | list[str]]]) -> list[Column]:
        return [
            self._encode_column([value[i] for value in values])
            for i in range(len(self.options.keys))
        ]

    def _encode_column(self, values: Sequence[str | list[str]]) -> Column:
        documents = [self._sentences(value) for value in values]
        encoded = self._encode_texts(values, documents)
        pieces: list[NDArray[Any]] = [np.empty(0, self.dtype)]
        lengths: list[int] = []
        counts: list[int] = []
        for value, document in zip(values, documents, strict=True):
            before = len(lengths)
            for ids in (next(encoded) for _ in document):
                # A sentence without ids leaves no trace, a document without ids an empty one.
                if len(ids):
                    pieces.append(ids)
                    lengths.append(len(ids))
            is_ended = self._ends_texts and not self._is_cut(value)
            if len(self._end) and len(lengths) > before and not is_ended:
                pieces.append(self._end)
                lengths[-1] += 1
            counts.append(len(lengths) - before)
        # Safe: best_dtype holds every id of the vocabulary.
        tokens = np.concatenate(pieces, dtype=self.dtype, casting="unsafe")
        return Column(tokens, np.array(lengths, np.int32), np.array(counts, np.int64))

    def _encode_texts(
        self, values: Sequence[str | list[str]], documents: Sequence[list[str]]
    ) -> Iterator[NDArray[Any]]:
        """Ids of each text of each document; of one that is cut into sentences, as parts."""
        is_cut = [self._is_cut(value) for value in values]
        texts: dict[bool, list[str]] = {False: [], True: []}
        for cut, document in zip(is_cut, documents, strict=True):
            texts[cut] += document
        encoded = {
            False: iter(self.tokenizer.tokenize_batch(texts[False])),
            True: iter(self.tokenizer.tokenize_sentences(texts[True])),
        }
        for cut, document in zip(is_cut, documents, strict=True):
            for _ in document:
                yield next(encoded[cut])

    def _is_cut(self, value: str | list[str]) -> bool:
        """Return whether a document becomes sentences, which get no special tokens."""
        return self.options.splitter is not None or isinstance(value, list)

    def _sentences(self, value: str | list[str]) -> list[str]:
        splitter = self.options.splitter
        texts = [value] if isinstance(value, str) else value
        if splitter is None:
            return texts
        return [sentence for text in texts for sentence in splitter.split(text)]

    def _refuse_one_by_one(
        self, values: list[list[str | list[str]]], places: list[tuple[int, int]]
    ) -> tuple[list[list[str | list[str]]], list[BadLine]]:
        kept, refused = [], []
        for value, place in zip(values, places, strict=True):
            try:
                self._encode([value])
                kept.append(value)
            except DataError as error:
                refused.append(BadLine(*place, str(error)))
        return kept, refused


def _build_block_encoder(options: EncodingOptions) -> BlockEncoder:
    return BlockEncoder(options, build_tokenizer(options.tokenizer))


def preprocess(
    paths: Sequence[str],
    output_prefix: str,
    encoder: BlockEncoder,
    *,
    workers: int,
    skip_bad_lines: bool,
    on_block: Callable[[Counts, Block], None],
    on_bad_line: Callable[[str], None],
) -> Counts:
    """Write `<prefix>_<key>_document` (or `_sentence`) `.bin` and `.idx` for each key.

    Args:
        paths: input files in order.
        output_prefix: begins the names of the output files.
        encoder: turns lines into ids.
        workers: processes that encode.
        skip_bad_lines: leave bad lines out, instead of stopping at the first.
        on_block: called after each block with what was done so far.
        on_bad_line: called with `file:line: reason` for each bad line that is left out.

    Raises:
        DataError: a file is damaged, or a line is bad and `skip_bad_lines` is off; nothing is
            left behind.
        StorageError: the output cannot be written.
    """
    counts = Counts()
    keys = encoder.options.keys
    level = "document" if encoder.options.splitter is None else "sentence"
    with (
        map_in_order(encoder, read_blocks(paths, keys), workers) as results,
        contextlib.ExitStack() as stack,
    ):
        builders = [
            stack.enter_context(
                IndexedDatasetBuilder(f"{output_prefix}_{key}_{level}", encoder.dtype)
            )
            for key in keys
        ]
        for encoded, first_line in _with_line_numbers(results):
            for bad in encoded.bad:
                _report(encoded.block, first_line, bad, skip_bad_lines, on_bad_line)
            for builder, column in zip(builders, encoded.columns, strict=True):
                builder.add_documents(column.tokens, column.lengths, column.sequences_per_document)
            counts.documents += len(encoded.columns[0].sequences_per_document)
            counts.bad_lines += len(encoded.bad)
            counts.text_bytes += encoded.block.size
            on_block(counts, encoded.block)
    counts.tokens = {key: b.num_tokens for key, b in zip(keys, builders, strict=True)}
    return counts


def choose_workers(paths: Sequence[str]) -> int:
    """As many processes as this one may use cores, fewer for small inputs."""
    size = sum(os.path.getsize(path) for path in paths)
    return max(1, min(usable_cores(), size // _BYTES_PER_WORKER))


def _with_line_numbers(results: Iterator[EncodedBlock]) -> Iterator[tuple[EncodedBlock, int]]:
    """Each block with the number of its first line in its file, from 1."""
    path, line = None, 1
    for encoded in results:
        if encoded.block.path != path:
            path, line = encoded.block.path, 1
        yield encoded, line
        line += encoded.lines


def _report(
    block: Block, first_line: int, bad: BadLine, skip: bool, on_bad_line: Callable[[str], None]
) -> None:
    where = f"{block.path}:{first_line + bad.line}"
    what = f"{bad.reason} (line starts at byte {block.offset + bad.offset})"
    if not skip:
        raise DataError(
            f"{where}: {what}; mend the line, or leave bad lines out with --on-error skip"
        )
    on_bad_line(f"{where}: {what}")
