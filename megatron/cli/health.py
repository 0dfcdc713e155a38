"""`megatron health`: test the machines before a run, and name those that stand out.

    megatron health --save checkpoints              # one process for each GPU of this machine
    torchrun --nproc-per-node 8 -m megatron health  # or under any launcher, on several machines
    megatron health --hang checkpoints              # what every rank of a run was waiting for

Without a launcher, the command replaces itself with one. With --hang, nothing is tested.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.command import print_line, run_command
from megatron.config.arguments import ToolParser
from megatron.config.reliability import HEALTH_FACTOR
from megatron.environment import module_command
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.processes.launch import Launch

_STANDS_OUT = 1  # the exit code if a rank stands out


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("megatron health", __doc__)
    add = parser.add_argument
    add("--processes", type=int, help="Processes on this machine (default: one for each GPU).")
    add("--save", type=Path, help="A folder whose disk is tested.")
    text = "Report ranks below this fraction of the others' speed (default: %(default)s)."
    add("--factor", type=_share, default=HEALTH_FACTOR, metavar="SHARE", help=text)
    text = "Show the report of a hang that a run wrote to this folder: its --save, or "
    add("--hang", type=Path, metavar="FOLDER", help=f"{text}--flight-recorder-dump-path.")
    add("--stacks", action="store_true", help="With --hang, also show all stacks.")
    return parser


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0.0 < (fraction := float(text)) < 1.0:
            return fraction
    raise argparse.ArgumentTypeError(f"{text}: give a number between 0 and 1, such as 0.7")


def main(argv: Sequence[str]) -> int:
    """Test the machines or show a hang, and return the exit code: 1 if a rank stands out.

    Without a launcher, --processes 1 or --hang, this process is replaced with a launcher.
    """
    options = build_parser().read(argv)
    if options.hang is not None:
        from megatron.processes.hang_files import hang_view

        return run_command(lambda: print(hang_view(options.hang, stacks=options.stacks)))
    from megatron.processes.launch import is_launched

    if not is_launched() and options.processes != 1:
        return run_command(lambda: _exec_launcher(options.processes, argv))
    from megatron.processes.process import run_process

    return run_process(argv, lambda launch: _test(launch, options.save, options.factor))


def _exec_launcher(count: int | None, argv: Sequence[str]) -> None:
    """Replace this process with a launcher that starts one process per GPU, or `count` processes.

    Raises:
        ConfigError: The count is below 1.
    """
    from megatron.device import gpu_count

    processes = max(1, gpu_count()) if count is None else count
    if processes < 1:
        raise ConfigError(f"--processes {processes}: give at least 1")
    launcher = module_command("megatron.processes.torchrun")
    flags = ["--standalone", "--nproc-per-node", str(processes), "--no-python"]
    command = [*launcher, *flags, *module_command("megatron.cli.main"), "health", *argv]
    os.execv(command[0], command)


def _test(launch: Launch, folder: Path | None, factor: float) -> int:
    """Test this process's device while all other ranks test theirs, and return the exit code."""
    from megatron.config.parallel import ParallelConfig
    from megatron.device import Device
    from megatron.processes.groups import process_group
    from megatron.processes.launch import prepare, write_error_file
    from megatron.training.health import check_health, health_table, problems_of

    prepare(launch, deterministic=False)
    device = Device.pick(launch.local_rank)
    device.activate()
    with process_group(ParallelConfig(), launch, device, ExitStack(), []) as layout:
        rows = check_health(layout, device, folder)
    problems = problems_of(rows, factor)
    if launch.rank == 0:
        print_line(health_table(rows))
        for problem in problems:
            print_line(f"WARNING: {problem}")
        if not problems:
            print_line("nothing stands out")
    if problems:
        write_error_file("; ".join(problems))  # for torchrun's report
    return _STANDS_OUT if problems else 0
