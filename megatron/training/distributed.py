"""Starting and ending the process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.device import Device
from megatron.environment import Launch
from megatron.parallel.layout import Layout


@contextmanager
def process_group(config: ParallelConfig, launch: Launch, device: Device) -> Iterator[Layout]:
    """The layout of this run, its process groups alive inside the block.

    A world of one starts no process group. On GPUs, tensors on the CPU (checkpoint receipts,
    timers) travel over gloo through the same groups.
    """
    sizes = {
        "tensor": config.tensor_model_parallel_size,
        "context": config.context_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
    }
    if launch.world_size == 1:
        yield Layout.at(0, 1, **sizes)
        return
    backend = device.backend(config.distributed_backend)
    dist.init_process_group(
        backend if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(minutes=config.distributed_timeout_minutes),
    )
    try:
        yield Layout.create(device.type, launch.rank, launch.world_size, **sizes)
    finally:
        dist.destroy_process_group()
