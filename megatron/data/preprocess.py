"""Text corpora to indexed datasets: blocks of lines -> documents -> ids -> `.bin`/`.idx`.

    read_blocks  ->  BlockEncoder, in several processes  ->  one builder per key

Blocks come back in the order of the input, so the output does not depend on the workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDatasetBuilder, best_dtype
from megatron.data.text_input import BadLine, TextBlock, Value, parse_lines, read_blocks
from megatron.data.worker_pool import map_in_order
from megatron.environment import usable_cores
from megatron.errors import ConfigError, DataError
from megatron.tokenizer import Tokenizer, build_tokenizer

# A worker's start costs about as much as encoding this many bytes.
_BYTES_PER_WORKER = 8 << 20
# Punkt takes text in slices of this many characters; its memory grows with the slice.
_SLICE = 1_000_000


class SentenceSplitter:
    """Cuts text at the ends of sentences.

    Args:
        punkt: An NLTK Punkt tokenizer.
        keep_newlines: Whether the white space after a sentence stays with it.
    """

    def __init__(self, punkt: Any, *, keep_newlines: bool) -> None:
        self._punkt = punkt
        self._keep_newlines = keep_newlines

    def split(self, text: str) -> list[str]:
        """Return the sentences of `text` in order."""
        sentences: list[str] = []
        for first in range(0, len(text), _SLICE):
            part = text[first : first + _SLICE]
            spans = list(self._punkt.span_tokenize(part))
            if self._keep_newlines:  # a sentence then reaches to the start of the next
                starts = [start for start, _ in spans]
                spans = list(zip(starts, [*starts[1:], len(part)], strict=True))
            sentences += [part[start:end] for start, end in spans]
        return sentences


def installed_punkt(language: str) -> Any | None:
    """Return NLTK's trained Punkt of `language`, or `None` if its data is not installed."""
    import nltk
    from nltk.tokenize.punkt import PunktTokenizer

    try:
        nltk.data.find(f"tokenizers/punkt_tab/{language}/")
    except LookupError:
        return None
    return PunktTokenizer(language)


def train_punkt(texts: Iterable[str], characters: int = 10_000_000) -> Any:
    """Train Punkt on the first `characters` of `texts`, without a download.

    It learns abbreviations and how sentences start from the text itself.

    Raises:
        ConfigError: There is no text to learn from.
    """
    from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTrainer

    trainer = PunktTrainer()
    seen = 0
    for text in texts:
        if seen >= characters:
            break
        trainer.train(text[: characters - seen], finalize=False)
        seen += len(text)
    if not seen:
        raise ConfigError("--split-sentences: the input holds no text to learn sentences from")
    trainer.finalize_training()
    return PunktSentenceTokenizer(trainer.get_params())


@dataclass(frozen=True)
class EncodingOptions:
    """What decides the ids of a document.

    Attributes:
        tokenizer: The tokenizer's flags.
        keys: Keys of a JSON line to encode, one dataset each.
        append_eod: Whether each document ends with the end-of-document id.
        splitter: Cuts documents into sentences; if `None`, a document is one sequence.
    """

    tokenizer: TokenizerConfig
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    splitter: SentenceSplitter | None = None


@dataclass(frozen=True)
class Column:
    """The documents of one key.

    Attributes:
        tokens: Ids of all documents back to back, `[tokens]`.
        lengths: Tokens of each sequence, `[sequences]`.
        sequences_per_document: Sequences of each document, `[documents]`.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    sequences_per_document: NDArray[np.int64]


@dataclass(frozen=True)
class EncodedBlock:
    """What a block of lines became: one column per key."""

    block: TextBlock
    columns: list[Column]
    lines: int
    bad: list[BadLine]


@dataclass
class Counts:
    """What a run has done so far."""

    documents: int = 0
    bad_lines: int = 0
    text_bytes: int = 0
    tokens: dict[str, int] = field(default_factory=dict)


class BlockEncoder:
    """Reads, parses and encodes blocks. When sent to another process, it is built again there.

    Args:
        options: What decides the ids.
        tokenizer: The tokenizer of `options`; built from its flags if not given.
    """

    def __init__(self, options: EncodingOptions, tokenizer: Tokenizer | None = None) -> None:
        self.options = options
        self.tokenizer = tokenizer or build_tokenizer(options.tokenizer)
        self.dtype = best_dtype(self.tokenizer.vocab_size)
        eod = [self.tokenizer.eod] if options.append_eod else []
        self._end = np.array(eod, self.dtype)
        # T5's own tokenizer ends every text with </s> already; it does not end single sentences.
        self._ends_texts = options.append_eod and list(self.tokenizer.appended_ids[-1:]) == eod

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockEncoder, (self.options,)

    def __call__(self, block: TextBlock) -> EncodedBlock:
        """Encode the documents of a block; refused texts become bad lines."""
        documents = parse_lines(block.read(), self.options.keys)
        values, bad = documents.values, documents.bad
        try:
            columns = self._encode(values)
        except DataError:
            # A text that the tokenizer refuses must not take its neighbors along.
            values = []
            for value, place in zip(documents.values, documents.places, strict=True):
                try:
                    self._encode([value])
                    values.append(value)
                except DataError as error:
                    bad = [*bad, BadLine(*place, str(error))]
            columns = self._encode(values)
        light = TextBlock(block.path, block.offset, block.size, block.done)
        return EncodedBlock(light, columns, documents.lines, sorted(bad))

    def _encode(self, values: Sequence[Sequence[Value]]) -> list[Column]:
        keys = range(len(self.options.keys))
        return [self._encode_column([value[i] for value in values]) for i in keys]

    def _encode_column(self, values: Sequence[Value]) -> Column:
        splitter = self.options.splitter
        # Whether a document becomes sentences, which get no special tokens of their own.
        is_cut = [splitter is not None or isinstance(value, list) for value in values]
        documents = [[value] if isinstance(value, str) else value for value in values]
        if splitter is not None:
            split = splitter.split
            documents = [[s for text in texts for s in split(text)] for texts in documents]
        texts: dict[bool, list[str]] = {False: [], True: []}
        for cut, document in zip(is_cut, documents, strict=True):
            texts[cut] += document
        encoded = {
            False: iter(self.tokenizer.tokenize_batch(texts[False])),
            True: iter(self.tokenizer.tokenize_sentences(texts[True])),
        }
        pieces: list[NDArray[Any]] = [np.empty(0, self.dtype)]
        lengths: list[int] = []
        counts: list[int] = []
        for cut, document in zip(is_cut, documents, strict=True):
            before = len(lengths)
            for ids in (next(encoded[cut]) for _ in document):
                # A sentence without ids leaves no trace, a document without ids an empty one.
                if len(ids):
                    pieces.append(ids)
                    lengths.append(len(ids))
            is_ended = self._ends_texts and not cut
            if len(self._end) and len(lengths) > before and not is_ended:
                pieces.append(self._end)
                lengths[-1] += 1
            counts.append(len(lengths) - before)
        # Safe: best_dtype holds every id of the vocabulary.
        tokens = np.concatenate(pieces, dtype=self.dtype, casting="unsafe")
        return Column(tokens, np.array(lengths, np.int32), np.array(counts, np.int64))


def preprocess(
    paths: Sequence[str],
    output_prefix: str,
    encoder: BlockEncoder,
    *,
    workers: int,
    skip_bad_lines: bool,
    on_block: Callable[[Counts, TextBlock], None],
    on_bad_line: Callable[[str], None],
) -> Counts:
    """Write `<prefix>_<key>_document` (or `_sentence`) `.bin` and `.idx` for each key.

    Args:
        paths: Input files in order.
        output_prefix: Start of the names of the output files.
        encoder: Turns lines into ids.
        workers: Processes that encode.
        skip_bad_lines: Whether to leave bad lines out, instead of stopping at the first.
        on_block: Called after each block with what was done so far.
        on_bad_line: Called with `file:line: reason` for each bad line that is left out.

    Raises:
        DataError: A file is damaged, or a line is bad and `skip_bad_lines` is off; nothing is
            left behind.
        StorageError: The output cannot be written.
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
            block = encoded.block
            for bad in encoded.bad:
                where = f"{block.path}:{first_line + bad.line}"
                what = f"{bad.reason} (line starts at byte {block.offset + bad.offset})"
                if not skip_bad_lines:
                    raise DataError(
                        f"{where}: {what}; fix the line, or leave bad lines out with "
                        "--on-error skip"
                    )
                on_bad_line(f"{where}: {what}")
            for builder, column in zip(builders, encoded.columns, strict=True):
                builder.add_documents(column.tokens, column.lengths, column.sequences_per_document)
            counts.documents += len(encoded.columns[0].sequences_per_document)
            counts.bad_lines += len(encoded.bad)
            counts.text_bytes += block.size
            on_block(counts, block)
    counts.tokens = {key: b.num_tokens for key, b in zip(keys, builders, strict=True)}
    return counts


def choose_workers(paths: Sequence[str]) -> int:
    """Return the number of usable cores, or fewer for small inputs."""
    size = sum(os.path.getsize(path) for path in paths)
    return max(1, min(usable_cores(), size // _BYTES_PER_WORKER))


def _with_line_numbers(results: Iterator[EncodedBlock]) -> Iterator[tuple[EncodedBlock, int]]:
    """Yield each block with the number of its first line in its file, from 1."""
    path, line = None, 1
    for encoded in results:
        if encoded.block.path != path:
            path, line = encoded.block.path, 1
        yield encoded, line
        line += encoded.lines
