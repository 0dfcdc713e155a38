"""Process groups. Processes check their devices together before they form groups."""

from __future__ import annotations

import json
import platform
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.config.reliability import Fault
from megatron.device import Device, StreamMarks
from megatron.errors import ConfigError, HangError
from megatron.parallel.journal import Journal
from megatron.parallel.layout import Layout
from megatron.processes.ending import end_run, exit_code_of, first_line
from megatron.processes.hang_files import HangFiles
from megatron.processes.launch import Launch, check_rendezvous_address
from megatron.processes.watchdog import GRACE, Verdict, Watchdog, ranks_text

# The communication library waits this much longer than we do, because it aborts without naming the
# missing rank.
BACKSTOP = timedelta(minutes=1)
_LINGER = 5.0  # seconds that rank 0 stays at most, so that others can still read the store
_SHOWN = 4  # the number of machines that a message names


@contextmanager
def process_group(
    config: ParallelConfig,
    launch: Launch,
    device: Device,
    before_end: ExitStack,
    unmet: list[str],
    record: Callable[[Verdict], None] | None = None,
    faults: Sequence[Fault] = (),
    hang_files: HangFiles | None = None,
) -> Iterator[Layout]:
    """Yield the layout of this run, with its process groups alive inside the block.

    A single process starts no process group. On GPUs, tensors on the CPU (JSON values, timers)
    travel over gloo through the same groups.

    Args:
        config: The sizes of the layout, the backend and the timeout.
        launch: The ranks of this process, from the launcher.
        device: The device of this process.
        before_end: Callbacks that run before the groups are destroyed, after the other processes
            have been notified of any error. A single process, without groups, skips them.
        unmet: The requirements that this device does not meet (see `check_devices`).
        record: A function that is called with the reason for a failure, in one of the processes.
        faults: The faults to inject into this process.
        hang_files: The files in which a hang is recorded, if any.

    Raises:
        ConfigError: A device does not meet a requirement, or the address or port is not valid.
        HangError: The processes did not all connect in time, or one ended in the meantime.
        SystemExit: A process failed and has printed the reason.
    """
    if launch.world_size == 1:
        if unmet:
            raise ConfigError(unmet)
        layout = Layout.at(0, 1, **config.grid)
        layout = layout.connect(device.type, _new_journal(None, faults))
        try:
            yield layout
        except Exception as error:
            if record is not None:
                iteration = layout.journal.position.iteration
                record(Verdict(exit_code_of(error), 0, first_line(error), iteration))
            raise
        return
    backend = config.distributed_backend if device.is_gpu else "gloo"
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    unconnected = (
        f"the {launch.world_size} processes did not all connect within "
        f"--distributed-timeout-minutes {config.distributed_timeout_minutes:g} ({{}}): is the "
        "command running on every machine, and can each machine reach the address and port of "
        "the first one?"
    )
    watchdog = Watchdog(launch, timeout.total_seconds(), record, hang_files)
    store_problem = unconnected.format("the launcher's store does not answer")
    watchdog.end_within(
        timeout.total_seconds() + GRACE,
        HangError.exit_code,
        f"[rank {launch.rank}] error: {store_problem}",
    )
    with ExitStack() as at_end:
        try:
            store = _rendezvous(launch, timeout)
            attempt = _store_of_attempt(store, launch)
            check_devices(attempt, launch, device, unmet)
            own_connection = dist.TCPStore(
                store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout
            )
        except dist.DistError as error:
            raise HangError(unconnected.format(error)) from error
        marks = StreamMarks(device.torch_device) if device.is_gpu else None
        journal = _new_journal(marks, faults)
        watchdog.begin(journal)
        try:
            dist.init_process_group(
                backend if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}",
                store=attempt,
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timeout + BACKSTOP,
            )
            for step in (dist.destroy_process_group, before_end.close, watchdog.begin_end):
                at_end.callback(step)  # runs in reverse order
            # A number that is unique to this attempt separates its entries from those of earlier
            # attempts.
            token = torch.tensor([secrets.randbits(62) if launch.rank == 0 else 0])
            dist.all_reduce(token)
        except RuntimeError as error:
            raise HangError(
                f"the {launch.world_size} processes connected but could not form their groups: has "
                f"one of them ended, or can the machines not reach each other? {error}"
            ) from error
        watchdog.connect(dist.PrefixStore(f"watchdog/{token.item()}", own_connection))
        try:
            grid = Layout.at(launch.rank, launch.world_size, **config.grid)
            yield grid.connect(device.type, journal)
        except Exception as error:
            raise end_run(error, launch, journal, watchdog) from error
    # After an error, the watchdog keeps running, because the process may be unable to print the
    # error.
    watchdog.stop()


def _new_journal(marks: StreamMarks | None, faults: Sequence[Fault]) -> Journal:
    """Return this process's journal, which injects faults if there are any."""
    if not faults:
        return Journal(marks)
    from megatron.processes.faults import FaultyJournal  # other runs do not load this code

    return FaultyJournal(marks, faults)


def job_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Return a store of small values that all processes of a running job share.

    Call this while the process groups are alive. A single process gets its own store.

    Args:
        launch: The ranks of this process, from the launcher.
        timeout: How long to wait for a value that has not been set yet.
    """
    if launch.world_size == 1:
        return dist.HashStore()
    return dist.PrefixStore("job", _store_of_attempt(_rendezvous(launch, timeout), launch))


def _rendezvous(launch: Launch, timeout: timedelta) -> dist.TCPStore:
    """Return the launcher's store, once all processes have connected to it."""
    check_rendezvous_address(launch.world_size)
    return next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))[0]


def _store_of_attempt(store: dist.Store, launch: Launch) -> dist.Store:
    """Return a namespace of the store that no earlier attempt has written to.

    When torchrun restarts the processes, it keeps its store, which still holds the addresses of the
    previous processes. Each machine counts its own restarts, so runs on several machines need a new
    store instead (docs/clusters.md).
    """
    if launch.is_multi_node:
        return store
    return dist.PrefixStore(f"attempt/{launch.restart_count}", store)


class DeviceReport(NamedTuple):
    """One process's description of its device.

    Attributes:
        type: "cuda" or "cpu".
        machine: The machine's name.
        unmet: The requirements that the device does not meet, one line each.
    """

    type: str
    machine: str
    unmet: Sequence[str]


def check_devices(store: dist.Store, launch: Launch, device: Device, unmet: Sequence[str]) -> None:
    """End the run on all processes if any device does not meet a requirement. Collective.

    Each process checks the rules about its own device. If it then exited alone, the others would
    wait for it, and its message might be lost.

    Args:
        store: The store that all processes share.
        launch: The ranks of this process, from the launcher.
        device: The device of this process.
        unmet: The requirements that the device does not meet, one line each.

    Raises:
        ConfigError: A process has unmet requirements, or only some have a GPU. All processes
            raise this.
        torch.distributed.DistError: A process does not connect, or the store is gone.
    """
    own_report = DeviceReport(device.type, platform.node(), unmet)
    store.set(f"device/{launch.rank}", json.dumps(own_report))
    if launch.rank == 0:
        reports = [
            DeviceReport(*json.loads(store.get(f"device/{rank}")))
            for rank in range(launch.world_size)
        ]
        store.set("unmet", json.dumps(device_problems(reports)))
    problems = json.loads(store.get("unmet"))
    if problems:
        if launch.rank == 0:
            others = [f"heard/{rank}" for rank in range(1, launch.world_size)]
            with suppress(dist.DistError):  # one of them has ended
                store.wait(others, timedelta(seconds=_LINGER))
        else:
            store.set(f"heard/{launch.rank}", "")
        raise ConfigError(problems)


def device_problems(reports: Sequence[DeviceReport]) -> list[str]:
    """Return one line per unmet requirement, naming the ranks that fail it unless all do.

    If only some processes have a GPU, return a single line that says so, because the other problems
    follow from it.

    Args:
        reports: The reports of all ranks, in rank order.
    """

    def describe_ranks(ranks: Sequence[int]) -> str:
        machines = list(dict.fromkeys(reports[rank].machine for rank in ranks))
        more = ", ..." if len(machines) > _SHOWN else ""
        return f"{ranks_text(ranks)} of {len(reports)} (on {', '.join(machines[:_SHOWN])}{more})"

    cpus = [rank for rank, report in enumerate(reports) if report.type == "cpu"]
    if 0 < len(cpus) < len(reports):
        return [
            f"{describe_ranks(cpus)} found no GPU, but the other ranks did: check nvidia-smi there "
            "and whether CUDA_VISIBLE_DEVICES hides the GPUs, or launch only as many processes "
            "as there are GPUs"
        ]
    lines = dict.fromkeys(line for report in reports for line in report.unmet)
    ranks = {
        line: [rank for rank, report in enumerate(reports) if line in report.unmet]
        for line in lines
    }
    return [
        line if len(failing) == len(reports) else f"{describe_ranks(failing)}: {line}"
        for line, failing in ranks.items()
    ]
