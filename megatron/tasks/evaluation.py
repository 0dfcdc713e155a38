"""Code that all evaluations of a trained language model share: flags, panel and report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from megatron import __version__
from megatron.command import format_panel, print_line
from megatron.config import ParsedRun, Program, parse_config
from megatron.config.tasks import TaskConfig
from megatron.device import Device
from megatron.errors import EXIT_OK, StorageError
from megatron.inference.load import (
    SAVED_MODEL_READS,
    SAVED_MODEL_RULES,
    Loaded,
    model_rows,
    saved_run,
)
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.processes.process import print_notices, processes
from megatron.tasks.results import (
    Metrics,
    by_json_key,
    check_results,
    metrics_table,
    report_results,
    results_path,
)
from megatron.tasks.table import PROGRAM, flags_of_other_tasks

_MICRO_BATCH = 8  # the default micro-batch size
_READS = {"training.micro_batch_size", "data.seq_length", "logging.log_interval"}
# Additional fields that evaluations with --retro-workdir read.
_DATA_READS = frozenset(
    f"data.{name}" for name in ("data_path", "split", "split_rounding", "data_cache_path")
)


def parse_evaluation(
    task: str,
    arguments: list[str],
    *,
    world_size: int,
    options: type,
    check: Callable[[TaskConfig, Any], Iterable[str]],
    unread: Collection[str] = (),
    kinds: Sequence[str] = ("gpt",),
) -> ParsedRun:
    """Parse and check a command line, which overrides the settings of the checkpoint.

    Args:
        task: The task's name.
        arguments: The command line.
        world_size: The number of processes.
        options: The dataclass of the task's own flags.
        check: A function that yields the errors in the task's flags.
        unread: Fields that other evaluations read but this one does not, as "section.field".
        kinds: The architectures that the task can evaluate.

    Raises:
        ConfigError: One or more flags are wrong. The message names all of them.
        CheckpointError: --load does not name a checkpoint of one of these architectures.
    """

    def reads(given: Mapping[str, Any]) -> Collection[str]:
        data_reads = _DATA_READS if "retro_workdir" in given else frozenset()
        return (SAVED_MODEL_READS | _READS | data_reads) - {*unread}

    return parse_config(
        arguments,
        world_size=world_size,
        program=Program(
            name=PROGRAM,
            extra=(TaskConfig, options),
            find_start=partial(saved_run, micro_batch=_MICRO_BATCH, kinds=kinds),
            rules=SAVED_MODEL_RULES,
            reads=reads,
            check_extra=check,
            flags_of_other_tasks=flags_of_other_tasks(task),
        ),
    )


def run_evaluation(
    parsed: ParsedRun, launch: Launch, evaluate: Callable[[Device, Layout], object]
) -> int:
    """Evaluate as one of the launched processes, and return the exit code.

    Raises:
        UserError: A flag, the checkpoint or the data is invalid.
    """
    print_notices(parsed.notices, launch)
    if launch.rank == 0:
        check_results(parsed.extra[0], parsed.extra[0].valid_data or ())
    with processes(parsed.config, launch) as (device, layout):
        evaluate(device, layout)
    return EXIT_OK


def print_start(task: str, loaded: Loaded, device: Device, data: str) -> None:
    """Print the model, the data and the device of an evaluation on the first process."""
    if loaded.layout.world.rank:
        return
    window = f"{loaded.config.data.seq_length:,} tokens"
    rows = [("data", data), ("window", window), *model_rows(loaded, device)]
    print_line(format_panel(f"{PROGRAM}: {task}", rows))


def publish(
    task: str, loaded: Loaded, options: TaskConfig, metrics: Metrics, details: Mapping[str, Any]
) -> None:
    """Print the metrics and write the results file, on the first process only.

    Raises:
        StorageError: `--results` cannot be written. Without the flag, this is only a warning.
    """
    if loaded.layout.world.rank:
        return
    print_line(metrics_table(task, metrics))
    load = loaded.config.checkpoint.load
    assert load is not None
    path = results_path(options.results, load, task, loaded.iteration)
    content = {
        "task": task,
        "results": by_json_key(metrics),
        **details,
        "data": list(options.valid_data or ()),
        "checkpoint": {"folder": load, "iteration": loaded.iteration},
        "tokenizer": loaded.tokenizer.fingerprint(),
        "window": loaded.config.data.seq_length,
        "layout": loaded.layout.describe(),
        "version": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        report_results(path, content)
    except StorageError as error:
        if options.results is not None:
            raise
        print_line(f"WARNING: {error}: the results are not saved: give --results FILE to save them")
