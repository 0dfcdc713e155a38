"""One process of `tools/generate_samples_gpt.py`: from its command line to its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.config.samples import SamplesConfig, find_sample_notices, problems_of
from megatron.device import Device
from megatron.errors import EXIT_OK, UserError, say_on_stderr
from megatron.inference.arguments import parse_generation
from megatron.inference.build import EngineOptions, engine_of
from megatron.inference.engine import BatchEngine
from megatron.inference.load import Loaded, load_gpt
from megatron.inference.panel import engine_rows
from megatron.inference.request import Sampling
from megatron.inference.sample_settings import Settings, keep_settings, settings_of
from megatron.inference.samples import Sample, SampleFile, SampleInbox, Writes, read_prompts
from megatron.inference.worker import serve
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.processes.process import processes, run_process, show_notices
from megatron.training.panel import format_panel


def main(program: str, arguments: Sequence[str]) -> int:
    """Generate and write; the exit code."""
    return run_process(arguments, lambda launch: _run(program, arguments, launch))


def _run(program: str, arguments: Sequence[str], launch: Launch) -> int:
    parsed = parse_generation(
        arguments,
        world_size=launch.world_size,
        program=program,
        extra=(SamplesConfig,),
        check_extra=problems_of,
    )
    (samples,) = parsed.extra
    # As the panel: not among the samples, which may be piped on.
    show_notices((*parsed.notices, *find_sample_notices(samples)), launch, say_on_stderr)
    prompts: list[str] = []
    if samples.sample_input_file is not None and launch.rank == 0:
        prompts = read_prompts(Path(samples.sample_input_file))
    with processes(parsed.config, launch) as (device, layout):
        assert parsed.config.checkpoint.load is not None
        loaded = load_gpt(parsed.config.checkpoint.load, device, layout, config=parsed.config)
        options = EngineOptions(
            max_sequences=samples.max_batch_size,
            max_step_tokens=max(EngineOptions.max_step_tokens, samples.max_batch_size),
            seed=parsed.config.training.seed,
        )
        engine = engine_of(loaded, device, options)
        if layout.world.rank:
            serve(engine, None, layout.world, device=device.torch_device)
            return EXIT_OK
        path, seed = _output_of(samples), parsed.config.training.seed
        settings = settings_of(samples, loaded, seed)
        say_on_stderr(_panel(program, settings, loaded, engine, device))
        if path is None:
            asked = [samples.prompt] * max(1, samples.num_samples)
            failed = _write(samples, enumerate(asked), Printer(len(asked)), engine, loaded, layout)
        else:
            everything: list[str | None] = [*prompts, *[None] * samples.num_samples]
            with SampleFile(path) as file:
                rest = list(file.rest(everything))
                print(f"{path}: {file.done} samples are there, {len(rest)} to come", flush=True)
                told = keep_settings(path, file.done, settings)
                if told:
                    print(told, flush=True)
                failed = file.failed + _write(samples, rest, file, engine, loaded, layout)
            print(f"{path}: {len(rest)} samples written, {len(everything)} in all", flush=True)
    if failed:
        where = "above" if path is None else f"in {path}"
        raise UserError(f'{failed} prompt(s) got no answer: see "error" {where}')
    return EXIT_OK


def _panel(
    program: str, settings: Settings, loaded: Loaded, engine: BatchEngine, device: Device
) -> str:
    is_of_model = ("--load", "iteration")  # which has a row of its own
    drawn = [f"{name} {value}" for name, value in settings.items() if name not in is_of_model]
    return format_panel(
        program, [("answers", ", ".join(drawn)), *engine_rows(loaded, engine, device)]
    )


def _output_of(samples: SamplesConfig) -> Path | None:
    """The file for the samples; None: the terminal."""
    if samples.sample_input_file is not None:
        return Path(samples.sample_output_file or f"{samples.sample_input_file}.out")
    return None if samples.genfile is None else Path(samples.genfile)


def _write(
    samples: SamplesConfig,
    prompts: Iterable[tuple[int, str | None]],
    output: Writes,
    engine: BatchEngine,
    loaded: Loaded,
    layout: Layout,
) -> int:
    """Answer all of them, on rank 0; how many could not be."""

    def sampling(room: int) -> Sampling:
        return Sampling(
            max_new_tokens=min(samples.out_seq_length, room),
            temperature=0.0 if samples.greedy else samples.temperature,
            top_k=samples.top_k,
            top_p=samples.top_p,
            stop_tokens=(loaded.tokenizer.eod,),
        )

    # More than are computed at a time, so that the next ones wait when some end.
    at_a_time = 2 * samples.max_batch_size
    inbox = SampleInbox(prompts, loaded.tokenizer, sampling, engine.limits, output, at_a_time)
    serve(engine, inbox, layout.world, device=next(loaded.model.parameters()).device)
    return inbox.failed


class Printer:
    """Samples to the terminal, in their order.

    Args:
        count: how many there will be; with one there is no heading.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._early: dict[int, Sample] = {}
        self._next = 0

    def put(self, index: int, sample: Sample) -> None:
        """See `samples.Writes`."""
        self._early[index] = sample
        while self._next in self._early:
            sample = self._early.pop(self._next)
            self._next += 1
            if self._count > 1:
                print(f"----- sample {self._next}")
            said = f'"error": {sample.error}' if sample.error else sample.text
            print((sample.prompt or "") + said, flush=True)
