"""Generation of many texts with one model, written as JSON lines in the order of the prompts.

A file that an interrupted run left behind is continued. `FILE.settings.json` next to the file
records how its samples were drawn, as a JSON object from flag to value, so that the remaining
samples are drawn in the same way.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import count
from pathlib import Path

from megatron.command import format_panel
from megatron.config import ParsedRun
from megatron.config.generation import (
    SamplesConfig,
    find_sample_notices,
    read_speculation,
    sample_problems,
)
from megatron.config.parser import Program
from megatron.data.json_lines import Setting, json_object, save_or_check_settings
from megatron.durable import check_writable, writing_to
from megatron.errors import (
    EXIT_OK,
    ConfigError,
    DataError,
    StorageError,
    UserError,
    print_to_stderr,
)
from megatron.inference.adapters import OpenedAdapter, add_to, open_adapters
from megatron.inference.build import EngineOptions, check_speculation, replica_ranks
from megatron.inference.engine import BatchEngine
from megatron.inference.load import engine_rows, load_gpt, parse_generation
from megatron.inference.messages import Add, Command, Shutdown
from megatron.inference.request import (
    EngineLimits,
    Event,
    Finished,
    NeighborPassage,
    Request,
    RequestError,
    Retrieved,
    Sampling,
    Token,
)
from megatron.inference.retrieval import ARCHITECTURES, build_any_engine, check_retrieval
from megatron.inference.sharing import GeneratedText, SharedPrompts
from megatron.inference.speculation import describe_drafts
from megatron.inference.text import Detokenizer
from megatron.inference.worker import serve
from megatron.processes.groups import job_store
from megatron.processes.launch import Launch
from megatron.processes.process import print_notices, processes, run_process
from megatron.tokenizer import Tokenizer

_MAX_PRINTED = 300  # characters of a passage that are printed
_LINE_START = b'{"prompt": '  # the start of every line, with the first field of GeneratedText

DrawSettings = dict[str, Setting]
NumberedPrompts = Iterator[tuple[int, str | None]]  # `None` stands for no prompt


def main(program: str, arguments: Sequence[str]) -> int:
    """Run one process of `tools/generate_samples_gpt.py`, and return the exit code.

    Args:
        program: Name of the program.
        arguments: Command line of the program.
    """
    return run_process(arguments, lambda launch: _run(program, arguments, launch))


def _run(program: str, arguments: Sequence[str], launch: Launch) -> int:
    definition = Program(name=program, extra=(SamplesConfig,), check_extra=sample_problems)
    parsed = parse_generation(
        arguments, launch.world_size, definition, has_replicas=True, kinds=ARCHITECTURES
    )
    return _generate(program, parsed, launch)


def _generate(program: str, parsed: ParsedRun, launch: Launch) -> int:
    samples: SamplesConfig
    (samples,) = parsed.extra
    config, embedder = parsed.config, samples.bert_embedder_load
    folder = config.checkpoint.load or ""  # a rule requires it
    check_retrieval(config, embedder)
    speculation = read_speculation(samples.speculative_config)
    check_speculation(config.model, speculation)
    adapters = open_adapters(samples.serve_adapter, config)
    # On stderr like the panel, because the samples on stdout may be piped into another program.
    print_notices((*parsed.notices, *find_sample_notices(samples)), launch, print_to_stderr)
    prompts = _prompts_of(samples) if launch.rank == 0 else []  # finds mistakes early
    flag, target = _output_of(samples, launch)
    seed, workdir = config.training.seed, config.data.retro_workdir
    options = EngineOptions(
        max_sequences=samples.max_batch_size, seed=seed, speculation=speculation
    )
    with processes(config, launch) as (device, layout), ExitStack() as stack:
        loaded = add_to(
            load_gpt(folder, device, layout, config=config, kinds=ARCHITECTURES), adapters, device
        )
        replica = replica_ranks(layout)
        engine = build_any_engine(loaded, device, options, embedder=embedder, replica=replica)
        if replica.rank:
            serve(engine, None)
            return EXIT_OK
        sampling = Sampling(
            max_new_tokens=samples.out_seq_length,
            temperature=0.0 if samples.greedy else samples.temperature,
            top_k=samples.top_k,
            top_p=samples.top_p,
            stop_tokens=(loaded.tokenizer.eod,),
        )
        store = job_store(launch, timedelta(minutes=config.parallel.distributed_timeout_minutes))
        done = failed = 0
        if layout.world.rank:
            shared = SharedPrompts(store, _prompts_of(samples))
        else:
            settings = settings_of(sampling, seed) | _sources_of(workdir, adapters)
            answers = ", ".join(f"{name} {value}" for name, value in settings.items())
            panel = [("answers", answers), *engine_rows(loaded, engine, device)]
            print_to_stderr(format_panel(program, panel))
            write = printer(len(prompts))
            if target is not None:
                file = stack.enter_context(closing(SampleFile(Path(target), flag)))
                remaining = len(file.remaining(prompts))
                done, failed = file.done, file.failed
                print(f"{target}: {done} samples exist, {remaining} to generate", flush=True)
                model = str(Path(folder).resolve())
                file.keep_settings({"--load": model, "iteration": loaded.iteration, **settings})
                write = file.write
            shared = SharedPrompts(store, prompts, done, write)
        inbox = SampleInbox(
            shared.claim(),
            loaded.tokenizer,
            sampling,
            engine.limits,
            shared.put,
            # More requests than are computed at once, so that others are ready when some finish.
            max_in_progress=2 * samples.max_batch_size,
            adapter=len(adapters),
        )
        _serve_and_report(engine, inbox, has_drafts=speculation is not None)
        shared.finish()
    if layout.world.rank:
        return EXIT_OK
    if target is not None:
        print(f"{target}: {len(prompts) - done} samples written, {len(prompts)} in all", flush=True)
    failed += shared.failed
    if failed:
        where = "above" if target is None else f"in {target}"
        raise UserError(f'{failed} prompt{"s" * (failed > 1)} got no answer: see "error" {where}')
    return EXIT_OK


def _output_of(samples: SamplesConfig, launch: Launch) -> tuple[str, str | None]:
    """Return the flag that names the output file, and its path, or `None` to print the texts.

    Rank 0 checks that the file can be written, before the model is loaded.

    Raises:
        ConfigError: The output file is also the input.
        StorageError: The file cannot be written.
    """
    flag, target, source = "--genfile", samples.genfile, samples.sample_input_file
    if source:
        flag, target = "--sample-output-file", samples.sample_output_file or f"{source}.out"
    if target is not None and launch.rank == 0:
        check_writable(flag, Path(target))
        if source and os.path.exists(target) and os.path.samefile(source, target):
            raise ConfigError(f"{flag} {target} is also the input: give another name")
    return flag, target


def _serve_and_report(engine: BatchEngine, inbox: SampleInbox, *, has_drafts: bool) -> None:
    """Generate all texts of this copy of the model, and print the throughput."""
    start = time.perf_counter()
    serve(engine, inbox)
    seconds, new = time.perf_counter() - start, engine.stats.new_tokens
    if new:
        print_to_stderr(f"{new:,} tokens in {seconds:.1f} s: {new / seconds:,.0f} tokens/s")
    if has_drafts:
        print_to_stderr(describe_drafts(engine.stats))


def _prompts_of(samples: SamplesConfig) -> list[str | None]:
    """Return the prompt of every text to generate. `None` stands for no prompt.

    Raises:
        ConfigError: More texts are requested than the file of prompts allows.
        DataError: The file of prompts cannot be read.
    """
    if samples.sample_input_file is None:
        return [samples.prompt] * max(1, samples.num_samples)
    lines = read_prompts(Path(samples.sample_input_file))
    prompts = [prompt for prompt in lines for _ in range(samples.samples_per_prompt)]
    if samples.num_samples > len(prompts):
        raise ConfigError(
            f"--num-samples {samples.num_samples}: --sample-input-file "
            f"{samples.sample_input_file} has prompts for {len(prompts)} texts: give at most that "
            "many, or raise --samples-per-prompt"
        )
    return [*prompts[: samples.num_samples or None]]


def settings_of(sampling: Sampling, seed: int) -> DrawSettings:
    """Return the flags, with their values, that determine how a model continues a prompt.

    Greedy decoding (temperature 0) draws no random numbers, so --top_k, --top_p and --seed are left
    out.

    Args:
        sampling: Settings for continuing a prompt.
        seed: Seed of the run.
    """
    settings: DrawSettings = {
        "--out-seq-length": sampling.max_new_tokens,
        "--temperature": sampling.temperature,
    }
    if sampling.temperature:
        settings |= {"--top_k": sampling.top_k, "--top_p": sampling.top_p, "--seed": seed}
    return settings


def _sources_of(workdir: str | None, adapters: Sequence[OpenedAdapter]) -> DrawSettings:
    """Return the flags, with their values, that name inputs other than the model and the prompt."""
    settings: DrawSettings = {}
    if workdir:
        settings["--retro-workdir"] = str(Path(workdir).resolve())
    for adapter in adapters:
        reader = adapter.files.reader
        settings["--serve-adapter"] = f"{reader.path.resolve()}, iteration {reader.iteration}"
    return settings


@dataclass(frozen=True)
class _UnfinishedText:
    """A prompt in progress, and the tokens and passages of its text so far."""

    index: int
    prompt: str | None
    prompt_tokens: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    passages: list[NeighborPassage] = field(default_factory=list)


@dataclass
class SampleInbox:
    """A `worker.Inbox` that requests texts, a limited number at a time.

    Attributes:
        prompts: Pairs of index and prompt.
        tokenizer: Tokenizer of the model.
        sampling: Settings for continuing a prompt.
        limits: Limits of the engine. Longer prompts are errors, and longer answers are cut off.
        put: Function that is called with the index of a prompt and its text.
        max_in_progress: Maximum number of requests in progress.
        adapter: Index of the adapter to use, counted from 1; 0 is the base model.
    """

    prompts: NumberedPrompts
    tokenizer: Tokenizer
    sampling: Sampling
    limits: EngineLimits
    put: Callable[[int, GeneratedText], None]
    max_in_progress: int
    adapter: int = 0

    def __post_init__(self) -> None:
        """Start with no requests in progress."""
        self._in_progress: dict[str, _UnfinishedText] = {}

    def poll(self, wait: float) -> list[Command]:
        """Return the next requests, or the command to shut down once all are answered.

        Store an error for each prompt that cannot be answered.

        Args:
            wait: Not used, because prompts need not be waited for.
        """
        commands: list[Command] = []
        while len(self._in_progress) < self.max_in_progress:
            index, prompt = next(self.prompts, (None, None))
            if index is None:
                return commands if self._in_progress else [Shutdown()]
            try:
                commands.append(Add(self._new_request(index, prompt)))
            except RequestError as error:
                self._fail(index, prompt, str(error))
        return commands

    def send(self, events: Sequence[Event]) -> None:
        """Collect tokens and passages, and store the texts that are complete."""
        for event in events:
            unfinished = self._in_progress[event.request]
            if isinstance(event, Token):
                unfinished.tokens.append(event.token)
            elif isinstance(event, Retrieved):
                unfinished.passages.extend(event.passages)
            elif isinstance(event, Finished):
                del self._in_progress[event.request]
                self._end(unfinished, event)

    def _new_request(self, index: int, prompt: str | None) -> Request:
        """Return the request for a prompt.

        Raises:
            RequestError: The prompt has no tokens, or leaves no room for an answer.
        """
        eod = self.tokenizer.eod
        tokens = (eod,) if prompt is None else tuple(self.tokenizer.tokenize_unterminated(prompt))
        longest = min(self.limits.max_length, self.limits.cache_tokens)
        room = longest - len(tokens)
        if room < 1:
            owner = "model's" if longest == self.limits.max_length else "cache's"
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, and the {owner} {longest} positions leave "
                "no room for an answer: shorten the prompt"
            )
        max_new_tokens = min(self.sampling.max_new_tokens, room)
        sampling = replace(self.sampling, max_new_tokens=max_new_tokens)
        request = Request(str(index), tokens, sampling, self.adapter)
        self._in_progress[request.id] = _UnfinishedText(index, prompt, tokens)
        return request

    def _end(self, unfinished: _UnfinishedText, event: Finished) -> None:
        index, prompt, tokens = unfinished.index, unfinished.prompt, unfinished.tokens
        if event.reason not in ("stop", "length"):
            self._fail(index, prompt, event.message)
            return
        is_finished = event.reason == "stop"
        if is_finished:
            tokens.pop()
        detokenizer = Detokenizer(self.tokenizer, unfinished.prompt_tokens)
        text = "".join([*map(detokenizer.add, tokens), detokenizer.flush()])
        passages = [*map(asdict, unfinished.passages)] or None
        sample = GeneratedText(prompt, text, len(tokens), is_finished, passages=passages)
        self.put(index, sample)

    def _fail(self, index: int, prompt: str | None, why: str) -> None:
        self.put(index, GeneratedText(prompt, "", 0, finished=False, error=why))


def printer(total: int) -> Callable[[GeneratedText], None]:
    """Return a function that prints texts, each under a heading if there are several.

    With a Retro model, the function then prints the start of each passage that the model has read.

    Args:
        total: Number of texts in all.
    """
    sample_numbers = count(1)

    def write(sample: GeneratedText) -> None:
        if total > 1:
            print(f"----- sample {next(sample_numbers)}")
        text = f'"error": {sample.error}' if sample.error else sample.text
        print((sample.prompt or "") + text, flush=True)
        for passage in sample.passages or ():
            excerpt = passage["text"][:_MAX_PRINTED].replace("\n", " ")
            print(
                f"----- chunk {passage['chunk'] + 1} read document {passage['document']} of corpus "
                f"{passage['corpus']}: {excerpt}"
            )

    return write


class SampleFile:
    """A file of samples as JSON lines, which is continued if it exists.

    The file stays unchanged until the first `write`, which also removes the incomplete last line of
    an interrupted run.

    Attributes:
        path: Path of the file.
        flag: The flag that names the file, for error messages.
        done: Number of texts that were already in the file.
        failed: Number of errors among these texts.
    """

    def __init__(self, path: Path, flag: str = "--sample-output-file") -> None:
        """Open or create the file, and read its samples.

        Args:
            path: Path of the file.
            flag: The flag that names the file, for error messages.

        Raises:
            StorageError: The file does not contain samples, or cannot be written.
        """
        self.path, self.flag = path, flag
        with writing_to(flag, path):
            self._file = path.open("a+b")
            # Reading a device such as /dev/zero would never end.
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            partial = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        samples = list(map(json_object, lines))
        invalid = [number for number, sample in enumerate(samples, 1) if "prompt" not in sample]
        if partial[: len(_LINE_START)] != _LINE_START[: len(partial)]:
            invalid.append(len(lines) + 1)
        if invalid:
            raise StorageError(
                f"{path}: line {invalid[0]} is not a sample: name another file for the samples"
            )
        self._partial, self._size = partial, sum(map(len, lines))
        self._prompts = [sample["prompt"] for sample in samples]
        self.failed = sum("error" in sample for sample in samples)
        self.done = len(lines)

    def remaining(self, prompts: Sequence[str | None]) -> Sequence[str | None]:
        """Return the prompts for which the file has no texts yet.

        Raises:
            StorageError: The file's texts belong to different prompts, or are more than `prompts`.
        """
        pairs = enumerate(zip(self._prompts, prompts, strict=False), 1)
        differing = [number for number, (written, prompt) in pairs if written != prompt]
        for prompt in prompts[self.done : self.done + 1]:
            start = _LINE_START + json.dumps(prompt, ensure_ascii=False).encode() + b', "text": "'
            if self._partial[: len(start)] != start[: len(self._partial)]:
                differing.append(self.done + 1)
        if differing:
            raise StorageError(
                f"{self.path}: line {differing[0]} is for a different prompt: name another file, "
                "or remove this one"
            )
        if len(prompts) < self.done:
            raise StorageError(
                f"{self.path} has {self.done} samples, but only {len(prompts)} are requested: name "
                "another file, or remove this one"
            )
        return prompts[self.done :]

    def write(self, sample: GeneratedText) -> None:
        """Append a text.

        Raises:
            StorageError: The file cannot be written.
        """
        fields = asdict(sample)
        if not sample.error:
            del fields["error"]
        if sample.passages is None:
            del fields["passages"]
        with writing_to(self.flag, self.path):
            if self._partial:
                self._file.truncate(self._size)
                self._partial = b""
            self._file.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file.

        Raises:
            StorageError: The last lines cannot be written.
        """
        with writing_to(self.flag, self.path):
            self._file.close()

    def keep_settings(self, settings: DrawSettings) -> None:
        """Save the settings next to a new file, or compare them with those of a continued file.

        Raises:
            StorageError: The samples were drawn with different settings, or the settings cannot be
                read or written.
        """
        save_or_check_settings(self.path, settings, self.done, "samples were drawn")


def read_prompts(path: Path, flag: str = "--sample-input-file") -> list[str]:
    """Return the prompts of a file, one per line.

    In a *.jsonl file, each line is an object with a "prompt" or, if it has none, a "text". A prompt
    may be an object with a "text", as in RealToxicityPrompts.

    Args:
        path: The file of prompts.
        flag: The flag that names the file, for error messages.

    Raises:
        DataError: The file cannot be read, is not UTF-8, or has a line that is not a prompt.
    """
    try:
        data = path.read_bytes()
        text = data.decode()
    except OSError as error:
        raise DataError(
            f"{flag} {path} cannot be read: {error.strerror}: give a file with one prompt per line"
        ) from error
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{flag} {path}: line {number} is not UTF-8 text: fix the line, or convert the file"
        ) from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.removesuffix("\n").split("\n") if text else []
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        fields = json_object(line.encode())
        prompt = fields.get("prompt", fields.get("text"))
        if isinstance(prompt, dict):
            prompt = prompt.get("text")
        if not isinstance(prompt, str):
            raise DataError(
                f"{flag} {path}: line {number} is not an object with a "
                '"prompt" or a "text": fix it, or rename the file if its lines are plain text'
            )
        prompts.append(prompt)
    return prompts
