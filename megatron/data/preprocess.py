"""Conversion of text to indexed datasets: blocks of lines -> documents -> ids -> `.bin`/`.idx`.

    read_blocks  ->  BlockEncoder, in several processes  ->  one builder per key

Blocks are returned in the order of the input, so the output does not depend on the number of
workers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.config.arguments import MAX_LINE_MB
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import DocumentTokens, IndexedDatasetBuilder, best_dtype
from megatron.data.text_input import (
    PACKED_SUFFIXES,
    BadLine,
    TextBlock,
    Value,
    parse_block,
    read_blocks,
)
from megatron.environment import usable_cores
from megatron.errors import (
    ConfigError,
    DataError,
    ShortageError,
    UserError,
    print_to_stderr,
    shortage_errors,
    shortage_of,
    warn,
)
from megatron.tokenizer import Tokenizer, build_tokenizer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Task = TypeVar("Task")
Result = TypeVar("Result")

MEMORY_REMEDY = "To reduce memory, use fewer --workers or a smaller --max-line-mb"
# Starting a worker costs about as much as encoding this many bytes.
_BYTES_PER_WORKER = 8 << 20
# The number of characters passed to Punkt at a time. Its memory use grows with this number.
_SLICE = 1_000_000
_END_SECONDS = 60.0  # in which a process that has closed its pipes exits, on a busy machine too


# The languages of NLTK's punkt_tab.
_PUNKT_LANGUAGES = (
    *("czech", "danish", "dutch", "english", "estonian", "finnish", "french", "german", "greek"),
    *("italian", "malayalam", "norwegian", "polish", "portuguese", "russian", "slovene"),
    *("spanish", "swedish", "turkish"),
)

Splitter = Callable[[str], list[str]]  # returns the sentences of a text in order


def split_lines(text: str) -> list[str]:
    """Return the non-blank lines of a text that has one sentence per line."""
    return [line for line in text.split("\n") if line and not line.isspace()]


@dataclass(frozen=True)
class SentenceSplitter:
    """A `Splitter` that uses NLTK's Punkt.

    Attributes:
        punkt: An NLTK Punkt tokenizer.
        keep_newlines: Whether a sentence includes the whitespace that follows it.
    """

    punkt: Any
    keep_newlines: bool

    def __call__(self, text: str) -> list[str]:
        """Return the sentences of `text` in order."""
        sentences: list[str] = []
        for first in range(0, len(text), _SLICE):
            part = text[first : first + _SLICE]
            spans = list(self.punkt.span_tokenize(part))
            if self.keep_newlines:  # a sentence then extends to the start of the next
                spans = list(itertools.pairwise([*(start for start, _ in spans), len(part)]))
            sentences += [part[start:end] for start, end in spans]
        return sentences


def installed_punkt(language: str) -> Any | None:
    """Return NLTK's trained Punkt for `language`, or `None` if its data is not installed."""
    import nltk
    from nltk.tokenize.punkt import PunktTokenizer

    if not language:  # otherwise NLTK finds the folder of all languages
        return None
    try:
        nltk.data.find(f"tokenizers/punkt_tab/{language}/")
    except LookupError:
        return None
    return PunktTokenizer(language)


def train_punkt(texts: Iterable[str], characters: int = 10_000_000) -> Any:
    """Train Punkt on the first `characters` characters of `texts`, which needs no download.

    Punkt learns abbreviations and the beginnings of sentences from the text itself.

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
        raise ConfigError(
            "--split-sentences: the input has no text from which to learn sentence boundaries: "
            "give text"
        )
    trainer.finalize_training()
    return PunktSentenceTokenizer(trainer.get_params())


def find_punkt(
    paths: Sequence[str], keys: Sequence[str], language: str, max_line_mb: int = MAX_LINE_MB
) -> Any:
    """Return NLTK's Punkt for `language`, or train Punkt on the beginning of the input.

    A line on stderr says so if Punkt is trained.

    Args:
        paths: The input files.
        keys: The keys of a JSON line whose texts Punkt is trained on.
        language: The language, such as "english".
        max_line_mb: The size of the longest line to read, in MiB.

    Raises:
        ConfigError: There is no text to learn from.
        DataError: The input cannot be read, or it has no text but a bad line.
    """
    punkt = installed_punkt(language)
    if punkt is not None:
        return punkt
    instead = "training Punkt on the beginning of the input"
    if language in _PUNKT_LANGUAGES:
        print_to_stderr(f"NLTK's Punkt for {language} is not installed: {instead}")
    else:
        languages = ", ".join(_PUNKT_LANGUAGES)
        warn(f"--lang {language!r}: NLTK's Punkt exists only for {languages}: {instead}")
    bad: list[str] = []

    def texts() -> Iterator[str]:
        for block in read_blocks(paths, keys, max_line_mb=max_line_mb):
            documents = parse_block(block, keys)
            for line in documents.bad[: not bad]:
                at = block.offset + line.offset
                bad.append(f"{block.path}: {line.reason} (line starts at byte {at})")
            for value in itertools.chain.from_iterable(documents.values):
                yield value if isinstance(value, str) else "\n".join(value)

    try:
        return train_punkt(texts())
    except ConfigError:
        if bad:
            raise DataError(f"{bad[0]}: fix the line; no other line has text") from None
        raise


class EncodingOptions(NamedTuple):
    """The settings that determine the token ids of a document.

    Attributes:
        tokenizer: The tokenizer's flags.
        keys: The keys of a JSON line to encode, each into its own dataset.
        append_eod: Whether each document that has ids ends with the end-of-document id.
        splitter: The function that splits documents into sentences. Without it, a text is a single
            sequence, and a list of texts is a document with a sequence for each.
    """

    tokenizer: TokenizerConfig
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    splitter: Splitter | None = None


class EncodedBlock(NamedTuple):
    """The result of encoding a block of lines.

    Attributes:
        block: The block, without its text.
        columns: The documents, for each key.
        lines: The number of lines in the block.
        bad: The lines without a document.
    """

    block: TextBlock
    columns: list[DocumentTokens]
    lines: int
    bad: list[BadLine]


@dataclass
class Counts:
    """The amount of work done so far.

    Attributes:
        documents: The number of encoded documents.
        bad_lines: The number of skipped lines.
        text_bytes: The size of the text that was read, in bytes.
        tokens: The number of tokens per key, which is known only at the end.
    """

    documents: int = 0
    bad_lines: int = 0
    text_bytes: int = 0
    tokens: list[int] = field(default_factory=list)


class BlockEncoder:
    """A callable that reads, parses and encodes a block of lines.

    It is rebuilt in each process to which it is sent.

    Args:
        options: The settings that determine the ids.
        tokenizer: The tokenizer of `options`. By default it is built from the flags.
    """

    def __init__(self, options: EncodingOptions, tokenizer: Tokenizer | None = None) -> None:
        """Build the tokenizer if needed, and determine how documents end."""
        self.options = options
        self.tokenizer = tokenizer or build_tokenizer(options.tokenizer)
        self.dtype = best_dtype(self.tokenizer.vocab_size)
        eod = [self.tokenizer.eod] if options.append_eod else []
        self._end = np.array(eod, self.dtype)
        # T5's own tokenizer already ends every text with </s>, but not single sentences.
        self._ends_texts = list(self.tokenizer.appended_ids[-1:]) == eod

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the options, from which another process builds the encoder."""
        return BlockEncoder, (self.options,)

    def __call__(self, block: TextBlock) -> EncodedBlock:
        """Encode the documents of a block. A text that the tokenizer rejects is a bad line."""
        documents = parse_block(block, self.options.keys)
        try:
            columns = self._encode(documents.values)
        except DataError:
            # A text that the tokenizer rejects must not make its neighbors fail.
            accepted = []
            for value, location in zip(documents.values, documents.locations, strict=True):
                try:
                    self._encode([value])
                    accepted.append(value)
                except DataError as error:
                    documents.bad.append(BadLine(*location, str(error)))
            columns = self._encode(accepted)
        without_text = block._replace(data=None)
        return EncodedBlock(without_text, columns, documents.lines, sorted(documents.bad))

    def _encode(self, values: Sequence[Sequence[Value]]) -> list[DocumentTokens]:
        keys = range(len(self.options.keys))
        return [self._encode_column([value[i] for value in values]) for i in keys]

    def _encode_column(self, values: Sequence[Value]) -> DocumentTokens:
        splitter = self.options.splitter
        # The texts of each document. Whole texts and sentences are encoded separately, because the
        # tokenizer adds special tokens to texts but not to sentences.
        documents: list[tuple[bool, list[str]]] = []
        for value in values:
            texts = [value] if isinstance(value, str) else value
            if splitter is not None:
                texts = [sentence for text in texts for sentence in splitter(text)]
            documents.append((splitter is None and isinstance(value, str), texts))
        whole = [text for is_whole, texts in documents if is_whole for text in texts]
        sentences = [text for is_whole, texts in documents if not is_whole for text in texts]
        encoded_whole = iter(self.tokenizer.tokenize_batch(whole))
        encoded_sentences = iter(self.tokenizer.tokenize_sentences(sentences))
        pieces: list[NDArray[Any]] = [np.empty(0, self.dtype)]
        lengths: list[int] = []
        counts: list[int] = []
        for is_whole, texts in documents:
            encoded = itertools.islice(encoded_whole if is_whole else encoded_sentences, len(texts))
            # A sentence without ids is dropped. A document without ids is kept as an empty one.
            sequences = [ids for ids in encoded if len(ids)]
            pieces += sequences
            lengths += map(len, sequences)
            counts.append(len(sequences))
            if sequences and len(self._end) and not (self._ends_texts and is_whole):
                pieces.append(self._end)
                lengths[-1] += 1
        # The cast is safe, because best_dtype can represent every id of the vocabulary.
        tokens = np.concatenate(pieces, dtype=self.dtype, casting="unsafe")
        return DocumentTokens(tokens, np.array(lengths, np.int32), np.array(counts, np.int64))


def preprocess(
    paths: Sequence[str],
    prefixes: Sequence[str],
    encoder: BlockEncoder,
    *,
    workers: int,
    max_line_mb: int = MAX_LINE_MB,
    on_block: Callable[[Counts, TextBlock], None],
    on_bad_line: Callable[[str], None] | None,
) -> Counts:
    """Encode text files and write one dataset for each key.

    Args:
        paths: The input files, in order.
        prefixes: The prefix of each key's dataset, in the order of the encoder's keys.
        encoder: The encoder, which turns lines into ids.
        workers: The number of processes that encode (see `map_in_order`).
        max_line_mb: The size of the longest line to read, in MiB.
        on_block: A function that is called after each block with the work done so far.
        on_bad_line: A function that is called with `file:line: reason` for each bad line before the
            line is skipped. If it is `None`, the first bad line is an error.

    Raises:
        DataError: A file is damaged, or a line is bad and `on_bad_line` is `None`. No files are
            left behind.
        ShortageError: Memory is short, or a worker could not be started or was killed.
        StorageError: The output cannot be written.
    """
    counts = Counts()
    blocks = partial(read_blocks, paths, encoder.options.keys, max_line_mb=max_line_mb)
    with (
        shortage_errors(MEMORY_REMEDY),
        map_in_order(encoder, blocks, workers, MEMORY_REMEDY) as results,
        contextlib.ExitStack() as stack,
    ):
        builders = [
            stack.enter_context(IndexedDatasetBuilder(prefix, encoder.dtype)) for prefix in prefixes
        ]
        lines: Counter[str] = Counter()  # the number of lines before the block, by file
        for encoded in results:
            block = encoded.block
            for bad in encoded.bad:
                where = f"{block.path}:{lines[block.path] + 1 + bad.line}"
                message = f"{where}: {bad.reason} (line starts at byte {block.offset + bad.offset})"
                if on_bad_line is None:
                    remedy = "raise --max-line-mb" if block.problem else "fix the line"
                    remedy += ", or skip bad lines with --on-error skip"
                    raise DataError(f"{message}; {remedy}")
                on_bad_line(message)
            for builder, column in zip(builders, encoded.columns, strict=True):
                builder.add_documents(*column)
            counts.documents += len(encoded.columns[0].sequences_per_document)
            counts.bad_lines += len(encoded.bad)
            counts.text_bytes += block.size
            on_block(counts, block)
            lines[block.path] += encoded.lines
    counts.tokens = [builder.num_tokens for builder in builders]
    return counts


def choose_workers(paths: Sequence[str]) -> int:
    """Return the number of workers: one per usable core, but fewer for small inputs.

    The number is 0 for the smallest inputs, unless a file is compressed or parquet.
    """
    size = sum(os.path.getsize(path) for path in paths)
    # A small file in one of these formats may hold any amount of text.
    min_workers = int(any(path.lower().endswith((*PACKED_SUFFIXES, ".parquet")) for path in paths))
    return max(min_workers, min(usable_cores(), size // _BYTES_PER_WORKER))


@contextlib.contextmanager
def map_in_order(
    function: Callable[[Task], Result],
    tasks: Callable[[], Iterable[Task]],
    workers: int,
    remedy: str,
) -> Iterator[Iterator[Result]]:
    """Yield `function(task)` for each of `tasks()`, in order, computed by `workers` processes.

    This is a context manager. Workers exit while the caller processes the last results, and leaving
    the context ends any that remain. Without workers, everything happens in this process, which
    ends without a message if a library that `function` calls aborts for lack of memory.

    With workers, an additional process, the reader, calls `tasks` and distributes them in turn:

        reader  ->  a pipe per worker  ->  workers  ->  a pipe per worker  ->  this process

    Processes only ever wait for pipes, and a process that ends for any reason closes its
    pipes. So if one process fails, the others do not wait forever, as threads might. A full pipe
    blocks its writer, so neither tasks nor results accumulate. If processes cannot be forked,
    `function` and `tasks` are pickled. No task may be `None`.

    Args:
        function: The work. It must not depend on earlier tasks.
        tasks: The source of the arguments of `function`.
        workers: The number of processes.
        remedy: A sentence that says what to change if memory is short.

    Raises:
        UserError: `function` or `tasks` raised it.
        ShortageError: A process could not be started, was killed, or ran out of memory.
        RuntimeError: `function` or `tasks` failed in another way. Without workers, the original
            error is raised instead.
    """
    if workers == 0:
        yield map(function, tasks())
        return
    import multiprocessing  # takes 25 ms, which a run without workers saves

    # Forking shares the modules that are loaded. It is not safe with the system libraries of macOS.
    is_forked = sys.platform == "linux"
    context: Any = multiprocessing.get_context("fork" if is_forked else "spawn")
    processes: list[Any] = []
    local_ends: list[Connection] = []  # the pipe ends that only this process and the reader need

    def start(work: Callable[..., None], ends: Sequence[Connection], *arguments: object) -> None:
        """Start a process that receives the `ends` of pipes, which are then closed here."""
        # A forked process must not keep the pipe ends of other processes open. Otherwise nobody
        # would notice when those processes end.
        unused = [end for end in local_ends if end not in ends] if is_forked else []
        process = context.Process(
            target=_run_child, args=(work, ends, unused, *arguments, remedy), daemon=True
        )
        try:
            process.start()
        except OSError as error:
            message = f"cannot start a worker process ({error.strerror}). {remedy}"
            raise ShortageError(message) from error
        processes.append(process)
        for end in ends:
            end.close()

    def results() -> Iterator[Result]:
        for process, answers in itertools.cycle(zip(processes[:-1], results_ends, strict=True)):
            try:
                answer = answers.recv()
            except (EOFError, OSError):  # the worker ended before or during an answer
                raise _worker_error(process, processes[-1], report, remedy) from None
            if answer is None:
                return
            result, error = answer
            if error is not None:
                raise error if isinstance(error, UserError) else RuntimeError(error)
            yield result

    tasks_ends: list[Connection] = []
    results_ends: list[Connection] = []
    try:
        for _ in range(workers):
            tasks_end, reader_end = context.Pipe(duplex=False)
            results_end, worker_end = context.Pipe(duplex=False)
            local_ends += [reader_end, results_end]
            tasks_ends.append(reader_end)
            results_ends.append(results_end)
            start(_worker_loop, [tasks_end, worker_end], function)
        report, reader_end = context.Pipe(duplex=False)
        local_ends.append(report)
        start(_reader_loop, [*tasks_ends, reader_end], tasks, os.getpid())
        yield results()
    finally:
        for process in processes:
            # Processes have nothing to save. SIGTERM would not work, because a process that has
            # just started still has its parent's SIGTERM handler.
            process.kill()
        for process in processes:
            process.join()
        for end in local_ends:
            end.close()


def _worker_error(worker: Any, reader: Any, report: Connection, remedy: str) -> Exception:
    """Return the error to raise for a worker that ended before it answered."""
    worker.join(timeout=_END_SECONDS)
    code = worker.exitcode
    if code == 0:  # the worker got no more tasks, because the reader had ended
        try:
            error = report.recv()
            return error if isinstance(error, UserError) else RuntimeError(error)
        except (EOFError, OSError):
            reader.join(timeout=_END_SECONDS)
            code = reader.exitcode
    return ShortageError(
        f"a worker process ended with exit code {code} (-9: killed, -6: aborted), usually because "
        f"memory ran out. {remedy}"
    )


def _run_child(
    work: Callable[..., None],
    ends: Sequence[Connection],
    unused: Sequence[Connection],
    *arguments: object,
) -> None:
    """Run the work of a child process, and end silently if a pipe closes."""
    try:
        # Ctrl-C reaches every process of the terminal, but the parent decides how to react.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for end in unused:
            end.close()
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            work(ends, *arguments)
    except MemoryError:  # there is too little memory even to send an answer
        os._exit(ShortageError.exit_code)


def _worker_loop(ends: Sequence[Connection], function: Callable[[Any], Any], remedy: str) -> None:
    """Answer each task with its result and error, and send `None` after the last task."""
    tasks, answers = ends
    while (task := tasks.recv()) is not None:
        answer: tuple[Any, UserError | str | None]
        try:
            answer = function(task), None
        except Exception as error:
            answer = None, _picklable_error(error, remedy)
        answers.send(answer)
    answers.send(None)


def _reader_loop(
    ends: Sequence[Connection], tasks: Callable[[], Iterable[Any]], parent: int, remedy: str
) -> None:
    """Send tasks to the workers in turn, then `None` to each. Report any error in `tasks`."""
    *workers, report = ends

    def end_with_parent(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    # Reading may block forever, for example on a FIFO, and then no pipe shows that the parent was
    # killed. So check regularly.
    signal.signal(signal.SIGALRM, end_with_parent)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    turns = itertools.cycle(workers)
    try:
        for task, worker in zip(tasks(), turns, strict=False):
            worker.send(task)
    except (BrokenPipeError, ConnectionResetError):
        return  # a worker has ended, which the parent will notice
    except Exception as error:
        report.send(_picklable_error(error, remedy))
        return
    for worker in workers:
        worker.send(None)


def _picklable_error(error: Exception, remedy: str) -> UserError | str:
    """Return a user error unchanged, and any other error as its traceback."""
    shortage = shortage_of(error, remedy)
    return shortage or (error if isinstance(error, UserError) else traceback.format_exc())
