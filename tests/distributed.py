"""Run a function in several processes on this machine.

On CPUs they communicate over gloo or shared memory. With MEGATRON_TEST_DEVICE=gpu the toy
trainings of all tests run on GPUs instead, with kernels, and communicate over NCCL:

    MEGATRON_TEST_DEVICE=gpu python -m pytest tests/parity

If there are more processes than GPUs, they share them. Results are correct, but slow.
"""

from __future__ import annotations

import gc
import importlib
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron.config import RunConfig
from megatron.device import Device, gpu_count
from megatron.kernels.library import find_library
from megatron.parallel.layout import Layout
from tests.shared_memory import Memory, register

TIMEOUT = timedelta(seconds=60)
DEVICE_ENV = "MEGATRON_TEST_DEVICE"


def toy_device(rank: int = 0) -> Device:
    """Return the device of a rank of a toy training (see above).

    Raises:
        ValueError: The variable asks for a device that is not available.
    """
    requested = os.environ.get(DEVICE_ENV, "cpu")
    if requested == "cpu":
        return Device.cpu()
    if requested != "gpu" or not gpu_count():
        raise ValueError(f"{DEVICE_ENV}={requested}: cpu, or gpu where there is one")
    # Parallel processes of pytest-xdist (gw0, gw1 ...) start at different GPUs.
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    device = Device.pick(first + rank)
    if find_library(device.torch_device).library is None:
        raise ValueError(f"{DEVICE_ENV}={requested}: there are no kernels to be tried")
    return device


def as_given(layout: Layout, config: RunConfig) -> Layout:
    """Return a test's layout with the sequence split as the flags of its run say."""
    return replace(layout, sequence_parallel=config.parallel.sequence_parallel)


def run_distributed(
    world_size: int, function: Callable[..., Any], *args: Any, **sizes: int
) -> list[Any]:
    """Call `function(layout, *args)` in `world_size` gloo processes; return results in rank order.

    `sizes` are `Layout.at`'s tensor, context and pipeline sizes. Results must be picklable.
    Raises RuntimeError with the traceback of the first rank that failed.
    """
    return _run(world_size, None, function, args, sizes)


def run_sharing_memory(
    world_size: int, function: Callable[..., Any], *args: Any, **sizes: int
) -> list[Any]:
    """Do the same in processes that communicate through shared memory (`tests.shared_memory`).

    Use this in tests of what is computed rather than how it is sent: with four or more processes,
    gloo takes several times as long as a toy model. It falls back to gloo where memory cannot be
    shared.
    """
    if toy_device().is_gpu or not can_share_memory():
        return run_distributed(world_size, function, *args, **sizes)
    memory = Memory(world_size, start_method().Lock())
    try:
        return _run(world_size, memory, function, args, sizes)
    finally:
        memory.close()


def runner_of(flags: str) -> Callable[..., list[Any]]:
    """Return `run_sharing_memory`, or `run_distributed` if a training with these flags needs gloo.

    Some operations on the DTensors of ZeRO stage 3, and PyTorch's own wrapper, do.
    """
    needs_gloo = "--zero-stage 3" in flags or "--DDP-impl torch" in flags
    return run_distributed if needs_gloo else run_sharing_memory


def _run(
    world_size: int,
    memory: Memory | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sizes: dict[str, int],
) -> list[Any]:
    context = start_method()
    results: Any = context.SimpleQueue()
    received: Any = context.Event()  # a result's tensors die with the process that sent them
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        shared_args = (world_size, store, memory, function, args, sizes, results, received)
        workers = [context.Process(target=_work, args=(r, *shared_args)) for r in range(world_size)]
        for worker in workers:
            worker.start()
        outcomes = [results.get() for _ in workers]
        received.set()
        for worker in workers:
            worker.join()
    failures = [text for _, ok, text in outcomes if not ok]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [value for _, _, value in sorted(outcomes, key=lambda answer: answer[0])]


def can_share_memory() -> bool:
    """Return whether processes are forked here and the system is Linux."""
    return start_method().get_start_method() == "fork" and hasattr(os, "eventfd")


# `fully_shard` and pipelines import for seconds: do it once, not in every process.
_SLOW_IMPORTS = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")


@cache
def start_method() -> Any:
    """Return "fork" if possible: everything is loaded already, so children start in milliseconds.

    On machines with a GPU, autograd leaves threads that do not survive a fork. There, fork from a
    server process that has only loaded torch.
    """
    if torch.cuda.is_available():
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed", "tests.training.toy", *_SLOW_IMPORTS])
        return context
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    return mp.get_context("fork")


def freeze_inherited() -> None:
    """Exclude inherited objects from garbage collection. Call this first in a forked process.

    A collection writes to every object that it visits, which would copy the parent's memory. If
    the parent has run many tests, that takes seconds.
    """
    gc.freeze()


def _share_gpus(rank: int, world_size: int) -> None:
    """Let several processes share one GPU, each as if it were alone on its machine.

    NCCL refuses to share a GPU within one machine, but identifies machines by this name. It then
    communicates over sockets.
    """
    if world_size > gpu_count():
        os.environ |= {"NCCL_HOSTID": f"toy {rank}", "NCCL_NET": "Socket"}
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


def _work(
    rank: int,
    world_size: int,
    store: str,
    memory: Memory | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sizes: dict[str, int],
    results: Any,
    received: Any,
) -> None:
    freeze_inherited()
    torch.set_num_threads(1)
    device = toy_device(rank)
    try:
        backend = "gloo" if memory is None else register(memory, rank)
        if device.is_gpu:
            backend = "cpu:gloo,cuda:nccl"
            device.activate()
            _share_gpus(rank, world_size)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
        layout = Layout.at(rank, world_size, **sizes).connect(device.type)
        value = function(layout, *args)
        dist.barrier()
        results.put((rank, True, value))
        received.wait(TIMEOUT.total_seconds())
    except BaseException:
        if memory is not None:
            memory.failed[0] = 1
        results.put((rank, False, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
