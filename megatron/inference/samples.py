"""Generation of many texts with one model: it reads prompts and writes JSON lines in their order.

A file that a stopped run left behind is continued. `FILE.settings.json` beside it records how its
samples were drawn, as one JSON object from flag to value, so that the rest are drawn the same way.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron.command import format_panel
from megatron.config.generation import SamplesConfig, find_sample_notices, sample_problems
from megatron.data.text_input import load_line
from megatron.durable import replace_file, storage_errors
from megatron.errors import EXIT_OK, DataError, StorageError, UserError, say_on_stderr
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.load import Loaded, engine_rows, load_gpt, parse_generation
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
from megatron.inference.worker import serve
from megatron.processes.launch import Launch
from megatron.processes.process import processes, run_process, show_notices
from megatron.tokenizer import Tokenizer

_BEGINNING = b'{"prompt": '  # how every line begins: with the first field of a GeneratedText

DrawSettings = Mapping[str, str | int | float]


def main(program: str, arguments: Sequence[str]) -> int:
    """Run one process of `tools/generate_samples_gpt.py`, and return the exit code.

    Args:
        program: Name of the program.
        arguments: Command line of the program.
    """
    return run_process(arguments, lambda launch: _run(program, arguments, launch))


def _run(program: str, arguments: Sequence[str], launch: Launch) -> int:
    parsed = parse_generation(
        arguments,
        world_size=launch.world_size,
        program=program,
        extra=(SamplesConfig,),
        check_extra=sample_problems,
    )
    samples: SamplesConfig
    (samples,) = parsed.extra
    # On stderr like the panel, because the samples on stdout may be piped on.
    show_notices((*parsed.notices, *find_sample_notices(samples)), launch, say_on_stderr)
    prompts: list[str] = []
    if samples.sample_input_file is not None and launch.rank == 0:
        prompts = read_prompts(Path(samples.sample_input_file))
    seed = parsed.config.training.seed
    options = EngineOptions(
        max_sequences=samples.max_batch_size,
        max_step_tokens=max(EngineOptions.max_step_tokens, samples.max_batch_size),
        seed=seed,
    )
    with processes(parsed.config, launch) as (device, layout):
        assert parsed.config.checkpoint.load is not None
        loaded = load_gpt(parsed.config.checkpoint.load, device, layout, config=parsed.config)
        engine = build_engine(loaded, device, options)
        if layout.world.rank:
            serve(engine, None, layout.world, device=device.torch_device)
            return EXIT_OK
        settings = settings_of(samples, loaded, seed)
        answers = [  # without the model's settings, which have a row of their own
            f"{name} {value}"
            for name, value in settings.items()
            if name not in ("--load", "iteration")
        ]
        rows = [("answers", ", ".join(answers)), *engine_rows(loaded, engine, device)]
        say_on_stderr(format_panel(program, rows))

        def sampling(room: int) -> Sampling:
            return Sampling(
                max_new_tokens=min(samples.out_seq_length, room),
                temperature=0.0 if samples.greedy else samples.temperature,
                top_k=samples.top_k,
                top_p=samples.top_p,
                stop_tokens=(loaded.tokenizer.eod,),
            )

        def write(prompts: Iterable[tuple[int, str | None]], output: OrderedOutput) -> int:
            """Answer all prompts, and return how many could not be answered."""
            inbox = SampleInbox(
                prompts,
                loaded.tokenizer,
                sampling,
                engine.limits,
                output,
                # More than are computed at a time, so that others are ready when some end.
                at_a_time=2 * samples.max_batch_size,
            )
            serve(engine, inbox, layout.world, device=device.torch_device)
            return inbox.failed

        path = None  # the terminal
        if samples.sample_input_file is not None:
            path = Path(samples.sample_output_file or f"{samples.sample_input_file}.out")
        elif samples.genfile is not None:
            path = Path(samples.genfile)
        if path is None:
            copies = [samples.prompt] * max(1, samples.num_samples)
            failed = write(enumerate(copies), Printer(len(copies)))
        else:
            everything: list[str | None] = [*prompts, *[None] * samples.num_samples]
            with SampleFile(path) as file:
                rest = list(file.rest(everything))
                print(f"{path}: {file.done} samples exist, {len(rest)} to generate", flush=True)
                warning = keep_settings(path, file.done, settings)
                if warning:
                    print(warning, flush=True)
                failed = file.failed + write(rest, file)
            print(f"{path}: {len(rest)} samples written, {len(everything)} in all", flush=True)
    if failed:
        where = "above" if path is None else f"in {path}"
        raise UserError(f'{failed} prompt(s) got no answer: see "error" {where}')
    return EXIT_OK


@dataclass(frozen=True)
class GeneratedText:
    """A line of the result.

    Attributes:
        prompt: The prompt, or `None` if there is none.
        text: The text generated after the prompt.
        length: Number of tokens in the text.
        finished: Whether the model ended the text, with its end-of-document token.
        error: Reason why there is no text, or "" if there is one.
    """

    prompt: str | None
    text: str
    length: int
    finished: bool
    error: str = ""


@dataclass(frozen=True)
class _UnfinishedText:
    """A prompt under way, and the tokens of its text so far."""

    index: int
    prompt: str | None
    prompt_tokens: tuple[int, ...]
    tokens: list[int]


class SampleInbox:
    """A `worker.Inbox` that requests texts, a limited number at a time, and outputs them.

    Attributes:
        failed: Number of prompts that could not be answered.
    """

    def __init__(
        self,
        prompts: Iterable[tuple[int, str | None]],
        tokenizer: Tokenizer,
        sampling: Callable[[int], Sampling],
        limits: EngineLimits,
        output: OrderedOutput,
        at_a_time: int,
    ) -> None:
        """Start with no requests under way.

        Args:
            prompts: Pairs of index and prompt. `None` is no prompt.
            tokenizer: Tokenizer of the model.
            sampling: Returns the sampling settings for the number of tokens that there is room for.
            limits: Limits of the engine. Longer prompts are errors, and longer answers are cut.
            output: Destination of the texts.
            at_a_time: Number of requests to keep under way.
        """
        self._prompts = iter(prompts)
        self._tokenizer, self._sampling, self._limits = tokenizer, sampling, limits
        self._output = output
        self._at_a_time = at_a_time
        self._under_way: dict[str, _UnfinishedText] = {}
        self.failed = 0

    def poll(self, wait: float) -> list[Command]:
        """Return the next requests, or the command to shut down once all are answered."""
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
        """Collect tokens, and output the texts that are complete."""
        for event in events:
            unfinished = self._under_way[event.request]
            if isinstance(event, Token):
                unfinished.tokens.append(event.token)
            elif isinstance(event, Finished):
                del self._under_way[event.request]
                self._end(unfinished, event)

    def _ask(self, index: int, prompt: str | None) -> Request:
        """Return the request for a prompt.

        Raises:
            RequestError: The prompt has no tokens, or leaves no room for an answer.
        """
        eod = self._tokenizer.eod
        tokens = (eod,) if prompt is None else tuple(self._tokenizer.tokenize_open(prompt))
        longest = min(self._limits.max_length, self._limits.cache_tokens)
        room = longest - len(tokens)
        if room < 1:
            what = "model's" if longest == self._limits.max_length else "cache's"
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, and the {what} {longest} positions leave no "
                "room for an answer: shorten the prompt"
            )
        request = Request(str(index), tokens, self._sampling(room))
        self._under_way[request.id] = _UnfinishedText(index, prompt, tokens, [])
        return request

    def _end(self, unfinished: _UnfinishedText, event: Finished) -> None:
        if event.reason not in ("stop", "length"):
            self._fail(unfinished.index, unfinished.prompt, event.message)
            return
        ended = event.reason == "stop"
        tokens = unfinished.tokens[:-1] if ended else unfinished.tokens
        detokenizer = Detokenizer(self._tokenizer, unfinished.prompt_tokens)
        text = "".join([*map(detokenizer.add, tokens), detokenizer.rest()])
        sample = GeneratedText(unfinished.prompt, text, len(tokens), ended)
        self._output.put(unfinished.index, sample)

    def _fail(self, index: int, prompt: str | None, why: str) -> None:
        self.failed += 1
        self._output.put(index, GeneratedText(prompt, "", 0, finished=False, error=why))


class OrderedOutput(ABC):
    """An output that writes texts in the order of their indices, whatever order they arrive in."""

    def __init__(self, start: int = 0) -> None:
        """Start with no texts.

        Args:
            start: The first index.
        """
        self._next = start
        self._early: dict[int, GeneratedText] = {}

    def put(self, index: int, sample: GeneratedText) -> None:
        """Write the text of an index once all earlier ones are written. Each index comes once."""
        self._early[index] = sample
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        self._write(ready)

    @abstractmethod
    def _write(self, samples: Sequence[GeneratedText]) -> None:
        """Write the next texts in order."""


class Printer(OrderedOutput):
    """An output to the terminal."""

    def __init__(self, count: int) -> None:
        """Start with no texts.

        Args:
            count: Number of texts that will come. A single text gets no heading.
        """
        super().__init__()
        self._count = count

    def _write(self, samples: Sequence[GeneratedText]) -> None:
        for number, sample in enumerate(samples, self._next - len(samples) + 1):
            if self._count > 1:
                print(f"----- sample {number}")
            text = f'"error": {sample.error}' if sample.error else sample.text
            print((sample.prompt or "") + text, flush=True)


class SampleFile(OrderedOutput):
    """An output to a file of JSON lines, which is continued if it exists.

    Attributes:
        done: Number of texts that were already in the file.
        failed: Number of errors among these texts.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and remove a last line that was not completely written.

        Args:
            path: Path of the file.

        Raises:
            StorageError: The file holds something else, or cannot be written.
        """
        self.path = path
        with storage_errors(path):
            self._file = path.open("a+b")
            # Reading a device such as /dev/zero would never end.
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            torn = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
            samples = [self._read(line, number) for number, line in enumerate(lines, 1)]
            if torn[: len(_BEGINNING)] != _BEGINNING[: len(torn)]:
                raise self._foreign(len(lines) + 1)
            if torn:  # removed only now, so that a file with other contents stays as it is
                self._file.truncate(sum(map(len, lines)))
        self._prompts = [sample["prompt"] for sample in samples]
        self.failed = sum("error" in sample for sample in samples)
        self.done = len(lines)
        super().__init__(self.done)

    def rest(self, prompts: Iterable[str | None]) -> Iterator[tuple[int, str | None]]:
        """Yield the prompts that the file has no texts for yet, with their indices.

        Raises:
            StorageError: The file's texts belong to other prompts.
        """
        count = 0
        for index, prompt in enumerate(prompts):
            count += 1
            if index >= self.done:
                yield index, prompt
            elif self._prompts[index] != prompt:
                raise StorageError(
                    f"{self.path}: line {index + 1} is for another prompt: name another file, or "
                    "remove this one"
                )
        if count < self.done:
            raise StorageError(
                f"{self.path} has {self.done} samples, but only {count} are requested: name "
                "another file, or remove this one"
            )

    def __enter__(self) -> SampleFile:
        """Return the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        if error is not None:
            # On a full disk, closing tries to write the rest and fails once more.
            with contextlib.suppress(OSError):
                self._file.close()
            return
        with storage_errors(self.path):
            self._file.close()

    def _write(self, samples: Sequence[GeneratedText]) -> None:
        with storage_errors(self.path):
            for sample in samples:
                fields = asdict(sample)
                if not fields["error"]:
                    del fields["error"]
                self._file.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")
            self._file.flush()

    def _read(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if not isinstance(fields, dict) or "prompt" not in fields:
            raise self._foreign(number)
        return fields

    def _foreign(self, number: int) -> StorageError:
        return StorageError(
            f"{self.path}: line {number} is not a sample: name another file for the samples"
        )


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file, one per line.

    In a *.jsonl file, each line is an object with a "prompt", or otherwise a "text".

    Raises:
        DataError: The file is missing, or a line is not a prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--sample-input-file {path}: {error}") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            fields = load_line(line.encode())
            prompt = fields.get("prompt", fields.get("text"))
        except (ValueError, AttributeError):
            prompt = None
        if not isinstance(prompt, str):
            raise DataError(
                f"--sample-input-file {path}: line {number} is not an object with a "
                '"prompt" or a "text": fix it, or rename the file if its lines are plain text'
            )
        prompts.append(prompt)
    return prompts


def settings_of(samples: SamplesConfig, loaded: Loaded, seed: int) -> DrawSettings:
    """Return the settings that determine the text after a prompt.

    Greedy decoding draws nothing, so it leaves the seed out.
    """
    temperature = 0.0 if samples.greedy else samples.temperature
    found: dict[str, str | int | float] = {
        "--load": str(Path(loaded.config.checkpoint.load or "").resolve()),
        "iteration": loaded.iteration,
        "--out-seq-length": samples.out_seq_length,
        "--temperature": temperature,
    }
    if temperature:
        found |= {"--top_k": samples.top_k, "--top_p": samples.top_p, "--seed": seed}
    return found


def keep_settings(path: Path, done: int, settings: DrawSettings) -> str:
    """Save the settings beside a new file of samples, or compare them with a continued file's.

    Args:
        path: File of the samples. If it is not a plain file, nothing is saved beside it.
        done: Number of samples in the file.
        settings: Settings with which the rest will be drawn.

    Returns:
        A warning if there are samples but no record of how they were drawn, otherwise "".

    Raises:
        StorageError: The samples were drawn with other settings. The message lists the flags and
            both values.
    """
    if not path.is_file():  # nothing can be saved beside /dev/null
        return ""
    beside = path.with_name(f"{path.name}.settings.json")
    with storage_errors(beside):
        if not done:
            replace_file(beside, json.dumps(settings, indent=2).encode() + b"\n")
            return ""
        if not beside.exists():
            return (
                f"WARNING: {beside} is missing: cannot check that these samples were drawn with "
                "the same settings"
            )
        data = beside.read_bytes()
    try:
        before = json.loads(data)
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise StorageError(
            f"{beside} does not hold the settings of samples: remove it, or name another file"
        )
    differing = [
        f"{name} is {settings.get(name, 'not used')} now and was {before.get(name, 'not used')}"
        for name in (*settings, *(name for name in before if name not in settings))
        if settings.get(name) != before.get(name)
    ]
    if differing:
        raise StorageError(
            f"{path}: its {done} samples were drawn with other settings:\n  "
            + "\n  ".join(differing)
            + "\ngive the earlier values, name another file, or remove this one (to continue "
            f"regardless, remove only {beside.name})"
        )
    return ""
