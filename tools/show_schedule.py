r"""Draw or print the timeline of every pipeline stage and the share of time spent waiting.

    python tools/show_schedule.py --schedule 1f1b --stages 4 --micro-batches 8
    python tools/show_schedule.py --schedule interleaved --stages 4 --virtual-stages 2 \
        --micro-batches 8 --forward-time 1 --backward-time 2 --output schedule.png

Times may be in any unit, as long as it is the same for all. No GPU and no display are needed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import run_command
from megatron.config.arguments import ToolParser
from megatron.durable import expect_no_file, plot_name_problems
from megatron.errors import ConfigError
from megatron.parallel.pipeline.check import check, check_bounds
from megatron.parallel.pipeline.draw import as_text, draw
from megatron.parallel.pipeline.schedule import (
    SCHEDULE_KINDS,
    ScheduleKind,
    make_schedule,
)
from megatron.parallel.pipeline.simulate import (
    Timeline,
    Times,
    check_times,
    simulate,
    time_table,
)

_MAX_PASSES = 100_000  # limit on passes through stages; printing this many takes a few seconds


def check_sizes(kind: str, stages: int, chunks: int, micro_batches: int) -> None:
    """Check that there is a schedule of this kind with these sizes.

    Raises:
        ConfigError: A number is out of range, or the kind is unknown or does not support this
            number of chunks.
    """
    sizes = {"--stages": stages, "--virtual-stages": chunks, "--micro-batches": micro_batches}
    problems = [f"{flag} {value}: must be at least 1" for flag, value in sizes.items() if value < 1]
    if kind not in SCHEDULE_KINDS:
        problems.append(f"--schedule {kind}: use one of {', '.join(SCHEDULE_KINDS)}")
    elif kind == "interleaved" and chunks == 1:
        problems.append(
            "--schedule interleaved with --virtual-stages 1: use 2 or more, or --schedule 1f1b"
        )
    elif kind in {"1f1b", "zero-bubble"} and chunks > 1:
        problems.append(
            f"--schedule {kind} with --virtual-stages {chunks}: use 1, or --schedule interleaved "
            "or gpipe"
        )
    if problems:
        raise ConfigError(problems)


def make_times(arguments: argparse.Namespace) -> Times:
    """Return the times of all operations, from the flags.

    By default, the backward pass takes twice as long as the forward pass, and half of it is for
    weight gradients.

    Raises:
        ConfigError: The number of values does not match the stages or chunks, a value is not a
            valid time, or weight gradients take longer than the whole backward pass.
    """
    stages, chunks = arguments.stages, arguments.virtual_stages
    check_times("--communication-time", [arguments.communication_time])
    forward = arguments.forward_time
    backward = arguments.backward_time or [2 * value for value in forward]
    weight = arguments.weight_time or [value / 2 for value in backward]
    tables = [
        time_table(flag, values, stages, chunks)
        for flag, values in (
            ("--forward-time", forward),
            ("--backward-time", backward),
            ("--weight-time", weight),
        )
    ]
    inputs = tuple(
        tuple(whole - part for whole, part in zip(*rows, strict=True))
        for rows in zip(tables[1], tables[2], strict=True)
    )
    if min(min(row) for row in inputs) < 0:
        raise ConfigError("--weight-time is a part of --backward-time and must not exceed it")
    return Times(tables[0], inputs, tables[2], arguments.communication_time)


def headline(arguments: argparse.Namespace, timeline: Timeline) -> str:
    """Return a one-line description of the schedule, with its total time and bubble."""
    virtual = f" x {arguments.virtual_stages} virtual" if arguments.virtual_stages > 1 else ""
    return (
        f"{arguments.schedule}: {arguments.stages} stages{virtual}, {arguments.micro_batches} "
        f"micro-batches; time {timeline.total:.4g}, bubble {timeline.bubble:.1%}"
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = ToolParser("show_schedule.py", __doc__)
    values = "one value, one per stage, or one per chunk of the model in order"
    add = parser.add_argument
    add(
        "--schedule",
        choices=SCHEDULE_KINDS,
        default="1f1b",
        help="Pipeline schedule (default: 1f1b).",
    )
    add("--stages", type=int, default=4, help="Pipeline-parallel size (default: 4).")
    add("--virtual-stages", type=int, default=1, help="Model chunks per stage (default: 1).")
    add("--micro-batches", type=int, default=8, help="Micro-batches per update (default: 8).")
    add("--forward-time", type=float, nargs="+", default=[1.0], metavar="T",
        help=f"Time of a forward pass through a whole stage: {values} (default: 1).")  # fmt: skip
    add(
        "--backward-time",
        type=float,
        nargs="+",
        metavar="T",
        help="Time of a backward pass, given in the same way (default: 2 x forward).",
    )
    add("--weight-time", type=float, nargs="+", metavar="T",
        help="Part of the backward time that weight gradients take (default: half).")  # fmt: skip
    add("--communication-time", type=float, default=0.0, metavar="T",
        help="Time of a message, during which stages compute (default: 0).")  # fmt: skip
    add("--output", type=Path, metavar="FILE.png", help="Picture to draw. Without it, print text.")
    add("--overwrite", action="store_true", help="Replace an existing picture.")
    add("--check-all", action="store_true",
        help="Check all schedules up to 16 stages x 8 chunks x 64 micro-batches.")  # fmt: skip
    return parser.read(argv)


def check_can_show(arguments: argparse.Namespace) -> None:
    """Reject schedules that are too large to show, and pictures that cannot be written.

    Raises:
        ConfigError: The schedule is too large, the format is unknown or the picture exists.
    """
    passes = arguments.stages * arguments.virtual_stages * arguments.micro_batches
    if passes > _MAX_PASSES:
        raise ConfigError(
            f"--stages {arguments.stages} x --virtual-stages {arguments.virtual_stages} x "
            f"--micro-batches {arguments.micro_batches} = {passes} passes: at most {_MAX_PASSES} "
            "can be shown; use fewer micro-batches"
        )
    if arguments.output is None:
        return
    if problems := plot_name_problems("--output", arguments.output):
        raise ConfigError(problems)
    expect_no_file("--output", [arguments.output], overwrite=arguments.overwrite)


def layouts(
    stages: int, chunks: int, micro_batches: int
) -> Iterator[tuple[ScheduleKind, int, int, int]]:
    """Yield all valid arguments of `make_schedule` up to the given sizes."""
    for kind in SCHEDULE_KINDS:
        min_chunks, max_chunks = {"gpipe": (1, chunks), "interleaved": (2, chunks)}.get(
            kind, (1, 1)
        )
        ranges = (
            range(1, stages + 1),
            range(min_chunks, max_chunks + 1),
            range(1, micro_batches + 1),
        )
        for p, v, m in product(*ranges):
            yield kind, p, v, m


def _check_one(arguments: tuple[ScheduleKind, int, int, int]) -> int:
    return sum(len(operations) for operations in check_bounds(*arguments))


def check_all(stages: int, chunks: int, micro_batches: int) -> tuple[int, int]:
    """Check every layout up to the given sizes, with one process per core.

    Returns:
        The number of schedules, and the number of operations in them.

    Raises:
        ScheduleError: A schedule is wrong. The message describes the first one.
    """
    # multiprocessing.Pool is not used, because it ends its workers with SIGTERM and then waits for
    # them, which takes forever if a worker has a handler for that signal.
    with ProcessPoolExecutor() as pool:
        all_layouts = layouts(stages, chunks, micro_batches)
        counts = list(pool.map(_check_one, all_layouts, chunksize=16))
    return len(counts), sum(counts)


def prove_all(*, stages: int, chunks: int, micro_batches: int) -> None:
    """Check every schedule up to the given sizes, and print how many were checked."""
    start = time.perf_counter()
    schedules, operations = check_all(stages, chunks, micro_batches)
    print(
        f"{schedules} schedules, {operations} operations: all finish within their memory bounds "
        f"({time.perf_counter() - start:.0f} s)"
    )


def main(argv: Sequence[str]) -> None:
    """Show the schedule that the command line describes, or check all schedules."""
    arguments = parse(argv)
    if arguments.check_all:
        prove_all(stages=16, chunks=8, micro_batches=64)
        return
    check_can_show(arguments)
    sizes = (arguments.stages, arguments.virtual_stages, arguments.micro_batches)
    check_sizes(arguments.schedule, *sizes)
    schedule = make_schedule(arguments.schedule, *sizes)
    activations = check(schedule)
    timeline = simulate(schedule, make_times(arguments))
    title = headline(arguments, timeline)
    print(title)
    print(f"peak number of activations, by stage: {' '.join(map(str, activations))}")
    if arguments.output is None:
        print(as_text(timeline))
    else:
        draw(timeline, title, arguments.virtual_stages, arguments.output)
        print(f"wrote {arguments.output}")


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
