"""One process of a job: how it starts, connects to the others and ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from megatron.command import begin_command, prepare_streams, print_line
from megatron.config import RunConfig, rules_parallel
from megatron.config.parser import asks_for_mpi
from megatron.device import Device, gpu_count
from megatron.environment import gpus_are_chosen
from megatron.errors import ConfigError, UserError, shortage_of
from megatron.kernels.library import LibraryChoice, find_library
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis, Layout
from megatron.processes.crashes import CrashLog
from megatron.processes.ending import report
from megatron.processes.groups import process_group
from megatron.processes.hang_files import HangFiles
from megatron.processes.launch import (
    Launch,
    bare_task,
    prepare,
    read_launch,
    record_collectives,
    with_local_rank,
)
from megatron.processes.watchdog import ranks_text

_PRINT_SECONDS = 2.0  # the time for rank 0 to print an error before other ranks exit


def run_process(arguments: Sequence[str], work: Callable[[Launch], int]) -> int:
    """Read this process's ranks, run its work, and report any user error.

    Args:
        arguments: The command line, which may contain --use-mpi.
        work: The job, a function that returns an exit code.

    Returns:
        The exit code of the work, or of the `UserError` that ended it (a lack of memory counts as
        one); 130 if Ctrl-C interrupts the work. Only rank 0 prints the message of a
        `ConfigError`, because all processes have the same; other messages are printed by every
        process.

    Raises:
        SystemExit: One of several connected processes failed, and the reason has been printed.
        Exception: The work failed with any other error.
    """
    prepare_streams()
    launch = Launch()
    try:
        begin_command()
        launch = Launch(rank=bare_task())  # of several unconnected tasks, only one reports errors
        launch = read_launch(use_mpi=asks_for_mpi(arguments))
        return work(launch)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # before the processes connect, or with a single process
        reported = shortage_of(error) or error
        if not isinstance(reported, UserError):
            raise
        if launch.rank == 0 or not isinstance(reported, ConfigError):
            report(reported, launch)
        else:
            # torchrun ends all processes when the first exits: let rank 0 print.
            time.sleep(_PRINT_SECONDS)
        return reported.exit_code


def print_notices(
    notices: Iterable[str], launch: Launch, print_text: Callable[[str], None] = print_line
) -> None:
    """Print the notices of the command line on rank 0, one per line."""
    if launch.rank == 0:
        for notice in notices:
            print_text(f"note: {notice}")


@contextmanager
def processes(
    config: RunConfig,
    launch: Launch,
    before_end: ExitStack | None = None,
    crashes: CrashLog | None = None,
) -> Iterator[tuple[Device, Layout]]:
    """Yield this process's device, and the layout that all processes form. Collective.

    Args:
        config: The run's configuration.
        launch: The ranks of this process, from the launcher.
        before_end: Callbacks to run before the process groups are destroyed (see `process_group`).
        crashes: The log that records a failure of this process, if any.

    Raises:
        ConfigError: The device of a process does not support a flag, only some processes have a
            GPU, processes would share a GPU, or the launcher gave no valid address and port.
        HangError: The processes did not all connect in time, or one ended in the meantime.
        SystemExit: A process failed and has printed the reason.
    """
    launch = with_local_rank(launch, config.parallel.local_rank)
    prepare(launch, deterministic=config.training.deterministic_mode)
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
        # Filling buffers that are overwritten anyway costs time and changes nothing.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = Device.pick(launch.local_rank)
    unmet = list(rules_parallel.device(config, device, launch.local_world_size))
    if config.parallel.distributed_backend == "nccl":
        unmet += _shared_gpus(launch.local_world_size)
    kernels = None
    if not unmet:
        device.activate()
        # This may compile for a minute; no process group is waiting yet.
        kernels = find_library(device.torch_device)
    at_end = before_end or ExitStack()
    record = None if crashes is None else crashes.record
    faults = [
        fault
        for fault in config.reliability.faults
        if fault.rank == launch.rank and fault.attempt in (None, launch.restart_count)
    ]
    save, dump_folder = config.checkpoint.save, config.reliability.flight_recorder_dump_path
    hang_files = None if save is None else HangFiles(Path(save) / "hang", launch.rank)
    if dump_folder is not None:
        record_collectives(config.reliability.flight_recorder_trace_buffer_size)
        hang_files = HangFiles(Path(dump_folder), launch.rank)
    with process_group(
        config.parallel, launch, device, at_end, unmet, record, faults, hang_files
    ) as layout:
        assert kernels is not None, "a process with unmet requirements has no groups"
        expect_same_kernels(kernels, layout.world)
        yield device, layout


def _shared_gpus(processes: int) -> Iterator[str]:
    """Yield a line if the processes of this machine would share a GPU, which NCCL refuses.

    A single GPU that CUDA_VISIBLE_DEVICES selects counts as this process's own, because some
    launchers set the variable to a different GPU for each process.
    """
    gpus = gpu_count()
    if 0 < gpus < processes and (gpus > 1 or not gpus_are_chosen()):
        yield (
            f"{processes} processes on this machine would share {gpus} GPU{'s' * (gpus > 1)}: "
            f"start one per GPU (--nproc-per-node {gpus}), or use the CPU (CUDA_VISIBLE_DEVICES=)"
        )


def expect_same_kernels(kernels: LibraryChoice, world: Axis) -> None:
    """Check that either all processes have the fused kernels or none does. Collective.

    Args:
        kernels: The kernels of this process.
        world: The axis of all processes.

    Raises:
        ConfigError: Only some processes have the fused kernels. Plain and fused kernels draw
            different dropout masks from the same seed, so replicated values would differ.
    """
    fused = torch.zeros(world.size, dtype=torch.int32)
    fused[world.rank] = kernels.library is not None
    unfused_ranks = all_reduce(fused, world).logical_not().nonzero().flatten().tolist()
    if 0 < len(unfused_ranks) < world.size:
        raise ConfigError(
            f"{ranks_text(unfused_ranks)} of {world.size} cannot use the fused kernels, but the "
            "other ranks can, so dropout masks would differ: the log line that begins with `fused "
            "kernels: off` names what is missing (docs/kernels.md, Compiling)"
        )
