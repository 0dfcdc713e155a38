"""The run of a language model task: load, read, score, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from megatron.command import say
from megatron.config import ParsedRun
from megatron.config.run import RunOptions
from megatron.config.tasks import LanguageModelTaskConfig, TaskConfig
from megatron.device import Device
from megatron.inference.load import load_gpt
from megatron.inference.score import Scorer
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from tasks import zero_shot
from tasks.evaluation import parse_evaluation, publish, run_evaluation, say_start
from tasks.files import find_missing, find_repeated
from tasks.progress import Progress
from tasks.results import Numbers, megatron_line

PREPARE: dict[str, Callable[..., zero_shot.Prepared]] = {
    "WIKITEXT103": zero_shot.prepare_wikitext,
    "LAMBADA": zero_shot.prepare_lambada,
    "PERPLEXITY": zero_shot.prepare_perplexity,
}


def parse(
    task: str,
    arguments: list[str],
    world_size: int,
    find_start: Callable[[Mapping[str, Any]], RunOptions] | None = None,
) -> ParsedRun:
    """The checked command line; see `parse_evaluation`."""

    def check(options: TaskConfig, own: LanguageModelTaskConfig) -> Iterator[str]:
        if not options.valid_data:
            yield f"--task {task} needs --valid-data: give the file to evaluate on"
        elif task == "WIKITEXT103" and len(options.valid_data) > 1:
            yield f"--task {task} reads one text, --valid-data names {len(options.valid_data)}"
        yield from find_missing("--valid-data", options.valid_data)
        yield from find_repeated("--valid-data", options.valid_data)
        if own.strict_lambada and task != "LAMBADA":
            yield f"--strict-lambada belongs to --task LAMBADA, not {task}: drop it"
        if own.overlapping_eval < 1:
            yield f"--overlapping-eval {own.overlapping_eval}: must be at least 1"

    return parse_evaluation(
        task,
        arguments,
        world_size=world_size,
        options=LanguageModelTaskConfig,
        check=check,
        find_start=find_start,
    )


def run(task: str, arguments: list[str], launch: Launch) -> int:
    """Evaluate; the exit code. Collective.

    Raises:
        UserError: a flag, the checkpoint or the data need mending.
    """
    parsed = parse(task, arguments, launch.world_size)
    return run_evaluation(parsed, launch, partial(evaluate, task, parsed))


def evaluate(task: str, parsed: ParsedRun, device: Device, layout: Layout) -> Numbers:
    """Load, read, score and report; the task's numbers, on every process. Collective."""
    config = parsed.config
    options, own = parsed.extra
    assert config.checkpoint.load is not None
    loaded = load_gpt(config.checkpoint.load, device, layout, config=config, row_by_row=False)
    window = config.data.seq_length
    prepared = PREPARE[task](options.valid_data, own, loaded.tokenizer, window)
    say_start(task, loaded, device, prepared.data)
    scorer = Scorer(loaded, device, config.training.micro_batch_size)
    is_main = layout.world.rank == 0
    started = time.monotonic()
    scores = scorer.score(
        prepared.samples, Progress(shown=is_main, log_interval=config.logging.log_interval)
    )
    seconds = time.monotonic() - started
    numbers = prepared.summarize(scores)
    if is_main:
        say(megatron_line(task, prepared.headline, numbers))
    details = {"options": asdict(own), "seconds": round(seconds, 3)}
    publish(task, loaded, options, numbers, details)
    return numbers
