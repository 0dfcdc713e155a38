"""Checks of flags against the device that a process computes on.

Not among `checks.RULES`: those hold for a dry run too, which may be of a run on other machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.run import RunOptions

if TYPE_CHECKING:  # it imports torch
    from megatron.device import Device

_OLDEST_FP8 = (8, 9)


def device(config: RunOptions, device: Device, neighbours: int) -> Iterator[str]:
    """One line for each flag that the device has nothing for.

    Args:
        config: of the run.
        device: of one of its processes.
        neighbours: processes of this one's machine, it among them.
    """
    if device.is_gpu:
        fp8 = config.precision.fp8_format
        if fp8 is not None and device.capability < _OLDEST_FP8:
            yield (
                f"--fp8-format {fp8}: {device.name} does not multiply in 8 bits (GPUs since Ada "
                "and Hopper do): drop the flag"
            )
        tensor = config.parallel.tensor_model_parallel_size
        if config.parallel.tp_comm_overlap and neighbours % tensor:
            yield (
                f"--tp-comm-overlap: --tensor-model-parallel-size {tensor} does not divide the "
                f"{neighbours} process(es) of a machine, and only GPUs of one machine map each "
                "other's memory: drop the flag"
            )
        return
    graphs = config.training.cuda_graph_impl
    for flag, is_given in (
        ("--use-flash-attn", config.model.use_flash_attn),
        (f"--cuda-graph-impl {graphs}", graphs != "none"),
    ):
        if is_given:
            yield f"{flag} needs a GPU, and this run is on {device.type}: drop it"
