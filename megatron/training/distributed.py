"""Starting and ending the process group."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.device import Device
from megatron.environment import Launch, check_meeting_place
from megatron.errors import ConfigError, HangError
from megatron.parallel.journal import Journal
from megatron.parallel.layout import Layout
from megatron.training.devices import refuse_together
from megatron.training.failure import end_run
from megatron.training.watchdog import Watchdog

# What the communication library waits longer than we do: it aborts without saying for whom.
BACKSTOP = timedelta(minutes=1)


@contextmanager
def process_group(
    config: ParallelConfig,
    launch: Launch,
    device: Device,
    before_end: ExitStack,
    misfits: Sequence[str] = (),
) -> Iterator[Layout]:
    """The layout of this run, its process groups alive inside the block.

    A world of one starts no process group. On GPUs, tensors on the CPU (checkpoint receipts,
    timers) travel over gloo through the same groups.

    Args:
        before_end: what it holds when the block ends is done before the groups end, and after the
            others have been told of an error.
        misfits: what this process's device has nothing for: see `refuse_together`.

    Raises:
        ConfigError: the device of a process lacks what the run needs.
        HangError: the processes did not come together.
        RunEndedError: a process failed. It has said why.
    """
    sizes = {
        "tensor": config.tensor_model_parallel_size,
        "context": config.context_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
    }
    if launch.world_size == 1:
        if misfits:
            raise ConfigError(list(misfits))
        yield Layout.at(0, 1, **sizes)
        return
    backend = device.backend(config.distributed_backend)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    store = _meet(launch, timeout)
    attempt = _of_this_attempt(store, launch)
    with _coming_together(launch, timeout):
        refuse_together(attempt, launch, device, misfits)
    dist.init_process_group(
        backend if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}",
        store=attempt,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout + BACKSTOP,
    )
    journal = Journal(device.marks())
    watchdog = Watchdog(
        dist.PrefixStore(f"watchdog/{_token(launch)}", _connect_again(store, timeout)),
        launch.rank,
        launch.world_size,
        machine=_machine(launch),
        journal=journal,
        seconds=timeout.total_seconds(),
    )
    try:
        yield Layout.create(device.type, launch.rank, launch.world_size, journal=journal, **sizes)
    except Exception as error:
        raise end_run(error, launch, journal, watchdog) from error
    finally:
        try:
            before_end.close()
        finally:
            dist.destroy_process_group()
            watchdog.stop()


def _meet(launch: Launch, timeout: timedelta) -> dist.TCPStore:
    """The launcher's store, once all processes are there."""
    check_meeting_place(launch.world_size)
    with _coming_together(launch, timeout):
        store, _, _ = next(
            dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout)
        )
        return store


@contextmanager
def _coming_together(launch: Launch, timeout: timedelta) -> Iterator[None]:
    """Raises HangError where a process has not come, or the store does not answer."""
    try:
        yield
    except dist.DistError as error:
        raise HangError(
            f"the {launch.world_size} processes did not come together within "
            f"--distributed-timeout-minutes {timeout.total_seconds() / 60:g} ({error}): is the "
            "command running on every machine, and does each reach the first one's address and "
            "port?"
        ) from error


def _of_this_attempt(store: dist.Store, launch: Launch) -> dist.Store:
    """A part of the store that no earlier attempt has written to.

    torchrun keeps its store when it restarts the processes, and with it the addresses of those
    that are gone. Machines count restarts each for itself: there it must make a new store, see
    docs/several-machines.md.
    """
    if launch.local_world_size < launch.world_size:
        return store
    return dist.PrefixStore(f"attempt/{launch.restart_count}", store)


def _machine(launch: Launch) -> range:
    """The ranks on this machine; where the launcher does not tell how many, as far as this one."""
    first = launch.rank - launch.local_rank
    return range(first, first + max(launch.local_world_size, launch.local_rank + 1))


def _token(launch: Launch) -> int:
    """A number that no other attempt has. Collective."""
    token = torch.tensor([secrets.randbits(62) if launch.rank == 0 else 0])
    dist.all_reduce(token)
    return int(token.item())


def _connect_again(store: dist.TCPStore, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore(
        store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
