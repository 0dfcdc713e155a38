"""Finetuning examples: the token ids of conversations, and which of them to train on.

    read_blocks  ->  ConversationEncoder, in several processes  ->  TokenizedExamples, cached

Files are read when a run starts, without a preprocessing step. The ids are cached like an index
(`data.cache`) and reused only if the files, the template, the tokenizer and the options are the
same. The chat template comes with the model and may be malicious, so it is rendered in processes
with limited time and memory.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import TokenizerConfig
from megatron.data.cache import ArraySpec, IndexCache
from megatron.data.conversation_records import (
    COLUMNS,
    Example,
    PlainText,
    for_template,
    format_of,
    parse_record,
    read_examples,
    read_labeled,
)
from megatron.data.indexed import map_file
from megatron.data.preprocess import choose_workers, map_in_order
from megatron.data.text_input import BadLine, TextBlock, find_inputs, parquet_columns, read_blocks
from megatron.durable import writing_to
from megatron.errors import ConfigError, DataError, shortage_errors, warn
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.chat_template import (
    TRAINING_DATE,
    ChatTemplate,
    added_tokens,
    encode,
    special_tokens,
    trained_text,
)

_VERSION = 1  # the version of this module's encoding; a new version invalidates caches
_FORMATS = ("messages", "sharegpt", "completion", "preference", "text")
_COUNTS = ("records", "bad", "too_long", "cut", "untrained", "tokens", "trained", *_FORMATS)
_RENDER_SECONDS = 10.0  # the processor time for rendering one record
_MEMORY = 2 << 30  # bytes that a process may use in addition to those of the loaded libraries
_MEMORY_REMEDY = "Shorten records of many megabytes, or use a machine with more memory"
_BLOCK_BYTES = 1 << 19
_MAX_REPORTED = 3  # the number of bad lines of each file that are reported individually


Encoded = tuple[NDArray[np.int32], NDArray[np.bool_]]  # ids, and which of them to train on


class ConversationOptions(NamedTuple):
    """The settings that determine which examples a file yields.

    Attributes:
        tokenizer: The tokenizer's flags.
        template: The text of the chat template, or `None` if there is none.
        max_length: The maximum number of tokens in an example.
        truncation: What to do with a longer example, one of config.finetuning's `TRUNCATIONS`.
        train_on_inputs: Whether to train on every token rather than only on the assistant's.
        last_turn_only: Whether to train only on the assistant's last turn of a conversation.
        preferences: Whether records are preferences, each of which becomes two examples.
        labels: Whether records say which answers are desirable. In an example, this is stored as
            the loss mask of the first token, which is never a label.
        special: The special tokens that the template may write, as pairs of name and text. `None`
            reads them from the tokenizer_config.json next to the tokenizer.
    """

    tokenizer: TokenizerConfig
    template: str | None
    max_length: int
    truncation: str = "error"
    train_on_inputs: bool = False
    last_turn_only: bool = False
    preferences: bool = False
    labels: bool = False
    special: tuple[tuple[str, str], ...] | None = None


class EncodedExamples(NamedTuple):
    """The examples of a block of lines.

    Attributes:
        block: The block, without its text.
        tokens: The ids of all examples, one after the other, `[tokens]`.
        trained: Whether to train on each token, `[tokens]`.
        lengths: The number of tokens in each example, `[examples]`.
        lines: The number of lines.
        bad: The lines that are not valid records.
        counts: The number of records with each outcome in `_COUNTS`.
    """

    block: TextBlock
    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    lines: int
    bad: list[BadLine]
    counts: Counter[str]


class _TooSlowError(Exception):
    """Raised when a template takes too long to render a record."""


class ConversationEncoder:
    """A callable that reads, parses, renders and encodes a block of lines.

    It is rebuilt in each process to which it is sent.

    Args:
        options: The settings that determine the examples.
        tokenizer: The tokenizer of `options`. By default it is built from the flags.

    Raises:
        ConfigError: The template or the tokenizer cannot be used, or answers that are compared
            would be split.
    """

    def __init__(self, options: ConversationOptions, tokenizer: Tokenizer | None = None) -> None:
        """Build the tokenizer if needed, and compile the template."""
        self.options = options
        self.tokenizer = tokenizer or build_tokenizer(options.tokenizer)
        special = options.special
        if special is None:
            special = tuple(sorted(special_tokens(options.tokenizer.tokenizer_model).items()))
        self.special = special
        self._template = None
        if options.template is not None:
            self._template = ChatTemplate(options.template, dict(special), TRAINING_DATE)
            if "eos_token" in options.template and "eos_token" not in dict(special):
                raise ConfigError(
                    "the chat template writes eos_token, but the tokenizer does not define it, so "
                    "answers would not end: define it in tokenizer_config.json next to "
                    "--tokenizer-model, or write the token itself in the file of --chat-template"
                )
            self._check_special_tokens(options.template)
        ends = self.tokenizer.special_ids("eos") or self.tokenizer.special_ids("eod")
        self._end = next(iter(ends), None)
        self._is_limited = False
        if (options.preferences or options.labels) and options.truncation == "split":
            raise ConfigError(
                "--truncation split would cut answers that are compared as a whole: use "
                "keep-start, keep-end or drop"
            )

    def _check_special_tokens(self, template: str) -> None:
        """Raise a ConfigError if the template writes a special token that the tokenizer lacks."""
        added = added_tokens(self.options.tokenizer.tokenizer_model)
        named = {text for name, text in self.special if name in template}
        for token in sorted(named | {text for text in added if text in template}):
            try:
                is_known = len(self.tokenizer.tokenize_with_special(token)) == 1
            except DataError:  # e.g. NullTokenizer, used for records without messages
                continue
            if not is_known:
                raise ConfigError(
                    f"the chat template writes the special token {token!r}, which --tokenizer-type "
                    f"{self.tokenizer.kind} splits into several tokens: give the template's own "
                    "tokenizer.json with --tokenizer-type HuggingFaceTokenizer, or another "
                    "template with --chat-template"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the options, from which another process builds the encoder."""
        return ConversationEncoder, (self.options,)

    def fingerprint(self) -> str:
        """Return a string that identifies all settings that determine the examples of a file."""
        options = self.options._replace(tokenizer=TokenizerConfig(), special=None)
        tokenizer = (self.tokenizer.fingerprint(), self.tokenizer.special_spacing)
        settings = (_VERSION, tuple(options)[1:], self.special, *tokenizer)
        return repr(settings)

    def __call__(self, block: TextBlock) -> EncodedExamples:
        """Encode the records of a block of lines.

        Call this only in a dedicated process, because the first call limits the process's memory.
        """
        if not self._is_limited:
            _limit_process()
            self._is_limited = True
        if block.problem:
            too_long = BadLine(0, 0, f"{block.problem}: remove the line")
            return _concatenated(block, [], 1, [too_long], Counter())
        lines = block.read().removesuffix(b"\n").split(b"\n")
        encoded: list[Encoded] = []
        bad: list[BadLine] = []
        counts: Counter[str] = Counter()
        offset = 0
        for number, line in enumerate(lines):
            if line and not line.isspace():
                try:
                    encoded += self.encode_record(line, counts)
                except (ValueError, DataError, _TooSlowError) as error:
                    bad.append(BadLine(number, offset, str(error)))
                except MemoryError:
                    reason = (
                        "the chat template needs too much memory for this record: shorten the "
                        "record, or give another template with --chat-template"
                    )
                    bad.append(BadLine(number, offset, reason))
            offset += len(line) + 1
        return _concatenated(block, encoded, len(lines), bad, counts)

    def encode_record(self, line: bytes, counts: Counter[str]) -> list[Encoded]:
        """Return the examples of a record: two for a preference, none if dropped, several if split.

        Args:
            line: The line that holds the record.
            counts: The number of records with each outcome, to which this record is added.

        Raises:
            ValueError: The record is malformed.
            DataError: The template or the tokenizer rejects the record, or an example is too long
                and --truncation is error.
        """
        record, preferences = parse_record(line), self.options.preferences
        labels: list[bool] = []
        if self.options.labels:
            labeled = read_labeled(record)
            examples, labels = [example for example, _ in labeled], [label for _, label in labeled]
        else:
            examples = read_examples(record, preferences=preferences)
        encoded = [self._encode(example) for example in examples]
        if preferences:  # both answers must follow the same tokens
            first = min(len(trained) - int(trained.sum()) for _, trained in encoded)
            encoded = [(tokens, np.arange(len(tokens)) >= first) for tokens, _ in encoded]
        truncated: list[Encoded] = []
        outcome: Counter[str] = Counter(records=1)
        for index, (tokens, trained) in enumerate(encoded):
            parts = self._truncate(tokens, trained, outcome)
            if labels:
                parts = [(ids, np.append(labels[index], mask[1:])) for ids, mask in parts]
            truncated += parts
        # The first token of an example is never a label.
        useful = [pair for pair in truncated if pair[1][1:].any()]
        outcome["untrained"] += len(truncated) - len(useful)
        if preferences and len(useful) < 2:
            useful = []
        counts += outcome
        counts[format_of(record)] += 1
        return useful

    def _encode(self, example: Example) -> Encoded:
        """Return the ids of an example, and which of them to train on."""
        if isinstance(example, PlainText):
            ids = list(self.tokenizer.tokenize(example.prompt + example.completion))
            if self._end is not None and (not ids or ids[-1] != self._end):
                ids.append(self._end)
            prompt = self.tokenizer.tokenize(example.prompt) if example.prompt else ()
            tokens, trained = _completion_mask(prompt, ids)
        else:
            if self._template is None:
                raise DataError(
                    "messages need a chat template, and the tokenizer has none: give one with "
                    "--chat-template"
                )
            assert self.options.template is not None
            chat = for_template(example, knows_developers="developer" in self.options.template)
            with _limited_time(_RENDER_SECONDS) if self._is_limited else nullcontext():
                text, spans = trained_text(
                    self._template, chat, last_only=self.options.last_turn_only
                )
            if example.prompt is None:
                tokens, trained = encode(self.tokenizer, text, spans)
            else:
                ((start, _),) = spans
                tokenize = self.tokenizer.tokenize_with_special
                tokens, trained = _completion_mask(tokenize(text[:start]), tokenize(text))
        if self.options.train_on_inputs:
            trained = np.ones(len(tokens), np.bool_)
        if len(tokens) and (tokens.max() >= self.tokenizer.vocab_size or tokens.min() < 0):
            invalid = tokens[(tokens >= self.tokenizer.vocab_size) | (tokens < 0)][0]
            raise DataError(
                f"token id {invalid} is outside the vocabulary (0 to "
                f"{self.tokenizer.vocab_size - 1}): change the text, or give the tokenizer for "
                "which it was written"
            )
        return tokens, trained

    def _truncate(
        self, tokens: NDArray[np.int32], trained: NDArray[np.bool_], counts: Counter[str]
    ) -> list[Encoded]:
        """Apply --truncation to an example, and return parts of at most `max_length` tokens."""
        max_length, truncation = self.options.max_length, self.options.truncation
        if len(tokens) <= max_length:
            return [(tokens, trained)]
        if truncation == "error":
            raise DataError(
                f"the example has {len(tokens):,} tokens, more than --seq-length {max_length}: "
                "raise --seq-length, or choose with --truncation how to shorten examples"
            )
        if truncation == "drop":
            counts["too_long"] += 1
            return []
        counts["cut"] += 1
        if truncation == "keep-start":
            return [(tokens[:max_length], trained[:max_length])]
        if truncation == "keep-end":
            return [(tokens[-max_length:], trained[-max_length:])]
        # The last token of a part also begins the next part, whose first label would otherwise be
        # lost.
        starts = range(0, len(tokens) - 1, max_length - 1)
        return [
            (tokens[start : start + max_length], trained[start : start + max_length])
            for start in starts
        ]


def _completion_mask(prompt: Sequence[int], tokens: Sequence[int]) -> Encoded:
    """Return the ids of a prompt and its completion, and which of them belong to the completion.

    The completion begins at the first token that differs from the ids of the prompt alone. This may
    be before the end of the prompt, because a token can extend across it.
    """
    pairs = enumerate(zip(prompt, tokens, strict=False))
    shorter = min(len(prompt), len(tokens))
    first = next((position for position, (token, other) in pairs if token != other), shorter)
    return np.array(tokens, np.int32), np.arange(len(tokens)) >= first


def _concatenated(
    block: TextBlock,
    encoded: Sequence[Encoded],
    lines: int,
    bad: list[BadLine],
    counts: Counter[str],
) -> EncodedExamples:
    counts["bad"] = len(bad)
    return EncodedExamples(
        block._replace(data=None),
        np.concatenate([np.empty(0, np.int32), *(tokens for tokens, _ in encoded)]),
        np.concatenate([np.empty(0, np.bool_), *(trained for _, trained in encoded)]),
        np.array([len(tokens) for tokens, _ in encoded], np.int64),
        lines,
        bad,
        counts,
    )


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    """Interrupt the block after `seconds` of processor time, however busy the machine is.

    `_limit_process` must have been called before.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_process() -> None:
    """Limit the memory of this process, and make its timer interrupt a template."""

    def stop(*_: object) -> None:
        raise _TooSlowError(
            f"the chat template takes longer than {_RENDER_SECONDS:.0f} s for this record and may "
            "loop forever: give another one with --chat-template"
        )

    signal.signal(signal.SIGPROF, stop)
    statm = Path("/proc/self/statm")
    if statm.exists():  # systems without /proc do not limit address spaces
        pages = int(statm.read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + _MEMORY
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@dataclass(frozen=True)
class TokenizedExamples:
    """The examples of one dataset.

    Attributes:
        name: The file, folder or glob that holds the examples.
        tokens: The ids of all examples, one after the other, int32 `[tokens]`.
        trained: Whether to train on each token, `[tokens]`. An example's first token is never a
            label.
        lengths: The number of tokens in each example, int64 `[examples]`.
        starts: The index of each example's first token, int64 `[examples]`.
        counts: The number of records with each outcome.
    """

    name: str
    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: Counter[str]

    def __len__(self) -> int:
        """Return the number of examples. A preference counts as two: chosen and rejected."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the ids of an example, and whether to train on each, `[tokens]`."""
        start = int(self.starts[index])
        end = start + int(self.lengths[index])
        return self.tokens[start:end], self.trained[start:end]

    def summary(self) -> str:
        """Return one line with the numbers of records, examples, tokens and skipped lines."""
        counts = self.counts
        kinds = ", ".join(f"{counts[kind]:,} {kind}" for kind in _FORMATS if counts[kind])
        trained = counts["trained"] / max(counts["tokens"], 1)
        parts = [
            f"{self.name}: {counts['records']:,} records ({kinds})",
            f"{len(self):,} examples of {counts['tokens']:,} tokens ({trained:.1%} trained)",
        ]
        labels = {
            "cut": "cut to --seq-length",
            "too_long": "dropped because longer than --seq-length",
            "untrained": "dropped because no token is trained",
            "bad": "bad lines skipped",
        }
        parts += [f"{label}: {counts[key]:,}" for key, label in labels.items() if counts[key]]
        return "; ".join(parts)


def load_examples(
    name: str,
    encoder: ConversationEncoder,
    cache: IndexCache,
    *,
    flag: str = "--data-path",
    workers: int | None = None,
    skip_bad_lines: bool = False,
) -> TokenizedExamples:
    """Return the examples of a dataset, from the cache or newly tokenized.

    Call this within `cache.builder_first`, so that one process writes the cache for all others.

    Args:
        name: A file, folder or glob of JSON lines (also with .gz, .bz2 or .zst) or parquet.
        encoder: The encoder for the records.
        cache: The cache for the ids.
        flag: The flag that names the dataset, for messages.
        workers: The number of processes that encode. The default is one per core, or fewer for
            small files.
        skip_bad_lines: Whether to skip malformed records instead of raising an error.

    Raises:
        DataError: A file is missing or damaged, a record is malformed and bad lines are not
            skipped, or no example is left.
        ShortageError: Memory is short, or a worker could not be started or was killed.
        StorageError: The files that collect the ids cannot be written.
    """
    try:
        files = find_inputs([name])
        for file in files:
            if file.lower().endswith(".txt"):
                raise DataError(
                    f"--input {file}: conversations must be JSON lines or parquet: write one JSON "
                    "object per line, and name the file .jsonl"
                )
            if not os.path.getsize(file):
                raise DataError(f"--input {file}: the file is empty: give conversations")

        def build() -> tuple[NDArray[Any], ...]:
            folder = None
            with suppress(OSError):
                for cache_folder in cache.folders[-1:]:
                    cache_folder.mkdir(parents=True, exist_ok=True)
                    folder = cache_folder if os.access(cache_folder, os.W_OK) else None
            return _build(files, encoder, workers, skip_bad_lines, flag, folder)

        specs = [
            ArraySpec("tokens", np.dtype(np.int32), (0,)),
            ArraySpec("trained", np.dtype(np.bool_), (0,)),
            ArraySpec("lengths", np.dtype(np.int64), (0,)),
            ArraySpec("counts", np.dtype(np.int64), (len(_COUNTS),)),
        ]
        content = [map_file(Path(file), np.dtype(np.uint8)) for file in files]
        description = "\n".join(
            ("conversations", *map(os.path.abspath, files), str(skip_bad_lines))
        )
        tokens, trained, lengths, counted = cache.load_or_build(
            f"{description}\n{encoder.fingerprint()}",
            specs,
            build,
            inputs=content,
            source=Path(max(files, key=os.path.getmtime)),
        )
    except DataError as error:
        raise DataError(str(error).replace("--input ", f"{flag} ")) from error
    counts = Counter(dict(zip(_COUNTS, counted.tolist(), strict=True)))
    starts = np.cumsum(lengths) - lengths
    examples = TokenizedExamples(name, tokens, trained, lengths, starts, counts)
    if not len(examples):
        remedy = "give other data"
        if examples.counts["untrained"]:
            remedy += ", or another --chat-template if this one does not write the answers"
        raise DataError(f"{flag} {examples.summary()}; no examples are left: {remedy}")
    return examples


def _blocks(files: Sequence[str]) -> Iterator[TextBlock]:
    """Yield the blocks of lines of all files. A row of a parquet file counts as a line."""
    for file in files:
        columns = list(COLUMNS)
        if file.lower().endswith(".parquet"):
            available = parquet_columns(file)
            columns = [name for name in COLUMNS if name in available] or available
        yield from read_blocks([file], columns, _BLOCK_BYTES)


def _build(
    files: Sequence[str],
    encoder: ConversationEncoder,
    workers: int | None,
    skip_bad_lines: bool,
    flag: str,
    folder: Path | None,
) -> tuple[NDArray[Any], ...]:
    """Tokenize the files; return ids, whether to train on each, lengths of examples, and counts.

    Ids are collected in files in `folder`, because they may not fit in memory.
    """
    counts: Counter[str] = Counter()
    lines: Counter[str] = Counter()  # the number of lines before the block, by file
    reported: Counter[str] = Counter()
    num_workers = max(1, choose_workers(files) if workers is None else workers)
    with (
        shortage_errors(_MEMORY_REMEDY),
        map_in_order(encoder, partial(_blocks, files), num_workers, _MEMORY_REMEDY) as results,
        writing_to("--data-cache-path", folder or tempfile.gettempdir()),
        _GrowingArray(np.int32, folder) as tokens,
        _GrowingArray(np.bool_, folder) as trained,
        _GrowingArray(np.int64, folder) as lengths,
    ):
        for encoded in results:
            path = encoded.block.path
            for bad in encoded.bad:
                message = f"{flag} {path}:{lines[path] + 1 + bad.line}: {bad.reason}"
                if not skip_bad_lines:
                    raise DataError(f"{message} (or skip bad lines with --skip-bad-lines)")
                reported[path] += 1
                if reported[path] <= _MAX_REPORTED:
                    is_last = reported[path] == _MAX_REPORTED
                    last = "; further bad lines are only counted" if is_last else ""
                    warn(f"{message}; line skipped{last}")
            tokens.add(encoded.tokens)
            trained.add(encoded.trained)
            lengths.add(encoded.lengths)
            counts["tokens"] += len(encoded.tokens)
            counts["trained"] += int(encoded.trained.sum())
            counts += encoded.counts
            lines[path] += encoded.lines
        counted = np.array([counts[name] for name in _COUNTS], np.int64)
        return tokens.finish(), trained.finish(), lengths.finish(), counted


class _GrowingArray:
    """An array that grows in an unnamed file, which exists as long as any view of the array.

    Args:
        dtype: The type of the items.
        folder: The file's folder, or `None` for the default folder of temporary files.
    """

    def __init__(self, dtype: type[np.generic], folder: Path | None) -> None:
        """Start with no items."""
        self._dtype = np.dtype(dtype)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - see __exit__

    def __enter__(self) -> _GrowingArray:
        """Return the array."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file. The array remains usable."""
        self._file.close()

    def add(self, items: NDArray[Any]) -> None:
        """Append items."""
        self._file.write(np.ascontiguousarray(items, self._dtype).data)

    def finish(self) -> NDArray[Any]:
        """Return all items as a memory-mapped array."""
        self._file.flush()
        if not self._file.tell():
            return np.empty(0, self._dtype)
        return np.memmap(self._file, self._dtype, "r").view(np.ndarray)
