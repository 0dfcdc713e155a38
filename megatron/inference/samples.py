"""Many texts by one model: prompts in, JSON lines out, in their order, and on from where an
earlier run was stopped."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from megatron.data.text_input import load_line
from megatron.durable import storage_errors
from megatron.errors import DataError, StorageError
from megatron.inference.messages import Add, Command, Shutdown
from megatron.inference.request import (
    EngineLimits,
    Event,
    Finished,
    Request,
    RequestError,
    Sampling,
    Token,
)
from megatron.inference.text import Detokenizer
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """A line of the result.

    Attributes:
        prompt: None: the text has none.
        text: what follows it.
        length: tokens of the text.
        finished: the model has ended it, by its end-of-document token.
        error: why there is no text; "" else.
    """

    prompt: str | None
    text: str
    length: int
    finished: bool
    error: str = ""


class Writes(Protocol):
    """Where samples go."""

    def put(self, index: int, sample: Sample) -> None:
        """Take the sample of this index; every index once, in any order."""
        ...


class SampleInbox:
    """Asks for texts, so many at a time, and hands them on: a `worker.Inbox`.

    Args:
        prompts: with their indices; None: no prompt.
        tokenizer: of the model.
        sampling: for all of them; an answer ends with the end of a document too.
        limits: of the engine; longer prompts are an error, answers are cut.
        output: of the samples.
        at_a_time: requests under way.
    """

    def __init__(
        self,
        prompts: Iterable[tuple[int, str | None]],
        tokenizer: Tokenizer,
        sampling: Callable[[int], Sampling],
        limits: EngineLimits,
        output: Writes,
        at_a_time: int,
    ) -> None:
        self._prompts = iter(prompts)
        self._tokenizer, self._sampling, self._limits = tokenizer, sampling, limits
        self._output = output
        self._at_a_time = at_a_time
        self._under_way: dict[str, _Answer] = {}
        self.failed = 0

    def poll(self, wait: float) -> list[Command]:
        """See `worker.Inbox`."""
        commands: list[Command] = []
        while len(self._under_way) < self._at_a_time:
            index, prompt = next(self._prompts, (None, None))
            if index is None:
                return commands if self._under_way else [Shutdown()]
            try:
                commands.append(Add(self._ask(index, prompt)))
            except RequestError as error:
                self._fail(index, prompt, str(error))
        return commands

    def send(self, events: Sequence[Event]) -> None:
        """See `worker.Inbox`."""
        for event in events:
            answer = self._under_way[event.request]
            match event:
                case Token():
                    answer.tokens.append(event.token)
                case Finished():
                    del self._under_way[event.request]
                    self._end(answer, event)

    def _ask(self, index: int, prompt: str | None) -> Request:
        """
        Raises:
            RequestError: the prompt has no tokens, or leaves no room for an answer.
        """
        eod = self._tokenizer.eod
        tokens = (eod,) if prompt is None else tuple(self._tokenizer.tokenize_open(prompt))
        longest = min(self._limits.max_length, self._limits.cache_tokens)
        room = longest - len(tokens)
        if room < 1:
            what = "the model's" if longest == self._limits.max_length else "the cache's"
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, and {what} {longest} positions leave no "
                "room for an answer: shorten it"
            )
        request = Request(str(index), tokens, self._sampling(room))
        self._under_way[request.id] = _Answer(index, prompt, tokens, [])
        return request

    def _end(self, answer: _Answer, event: Finished) -> None:
        if event.reason not in ("stop", "length"):
            self._fail(answer.index, answer.prompt, event.message)
            return
        tokens = answer.tokens
        ended = event.reason == "stop"
        text = text_of(self._tokenizer, answer.prompt_tokens, tokens[:-1] if ended else tokens)
        self._output.put(answer.index, Sample(answer.prompt, text, len(tokens) - ended, ended))

    def _fail(self, index: int, prompt: str | None, why: str) -> None:
        self.failed += 1
        self._output.put(index, Sample(prompt, "", 0, finished=False, error=why))


@dataclass(frozen=True)
class _Answer:
    index: int
    prompt: str | None
    prompt_tokens: tuple[int, ...]
    tokens: list[int]


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Of an answer, as it stands behind the prompt."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join([*(detokenizer.add(token) for token in tokens), detokenizer.rest()])


_BEGINNING = b'{"prompt": '  # of every line: the first field of a Sample


class SampleFile:
    """JSON lines, in the order of the indices.

    A file that is there is gone on with: `done` samples are in it, `failed` of them are errors. A
    last line that was not written to its end is taken off.

    Args:
        path: of the file.

    Raises:
        StorageError: it holds something else, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors(path):
            self._file = path.open("a+b")
            # A device would be read for ever.
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            torn = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
            samples = [_sample_of(path, number, line) for number, line in enumerate(lines, 1)]
            if torn[: len(_BEGINNING)] != _BEGINNING[: len(torn)]:
                raise _no_sample(path, len(lines) + 1)
            if torn:  # only now: a file of something else stays as it is
                self._file.truncate(sum(map(len, lines)))
        self._prompts = [sample["prompt"] for sample in samples]
        self.failed = sum("error" in sample for sample in samples)
        self.done = len(lines)
        self._next = self.done
        self._early: dict[int, Sample] = {}

    def rest(self, prompts: Iterable[str | None]) -> Iterator[tuple[int, str | None]]:
        """Those that the file has no samples of yet.

        Raises:
            StorageError: its samples are of other prompts.
        """
        count = 0
        for index, prompt in enumerate(prompts):
            count += 1
            if index >= self.done:
                yield index, prompt
            elif self._prompts[index] != prompt:
                raise StorageError(
                    f"{self.path}: line {index + 1} is of another prompt: name another file, or "
                    "remove this one"
                )
        if count < self.done:
            raise StorageError(
                f"{self.path} has {self.done} samples, and {count} are asked for: name another "
                "file, or remove this one"
            )

    def put(self, index: int, sample: Sample) -> None:
        """See `Writes`."""
        self._early[index] = sample
        with storage_errors(self.path):
            while self._next in self._early:
                fields = asdict(self._early.pop(self._next))
                if not fields["error"]:
                    del fields["error"]
                self._file.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")
                self._next += 1
            self._file.flush()

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # Of a full disk, what was not written fails once more.
            with contextlib.suppress(OSError):
                self._file.close()
            return
        with storage_errors(self.path):
            self._file.close()


def _no_sample(path: Path, number: int) -> StorageError:
    return StorageError(f"{path}: line {number} is no sample: name another file for the samples")


def _sample_of(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or "prompt" not in fields:
        raise _no_sample(path, number)
    return fields


def read_prompts(path: Path) -> list[str]:
    """One a line; of *.jsonl the "prompt" or else the "text" of each object.

    Raises:
        DataError: the file is missing, or a line is no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--sample-input-file {path}: {error}") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    if path.suffix != ".jsonl":
        return lines
    return [_prompt_in(path, number, line) for number, line in enumerate(lines, 1)]


def _prompt_in(path: Path, number: int, line: str) -> str:
    try:
        fields = load_line(line.encode())
        prompt = fields.get("prompt", fields.get("text"))
    except (ValueError, AttributeError):
        prompt = None
    if not isinstance(prompt, str):
        raise DataError(
            f'--sample-input-file {path}: line {number} is no object with a "prompt" or a "text": '
            "mend it, or give the file another ending, for plain lines"
        )
    return prompt
