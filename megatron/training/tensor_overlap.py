"""Setup for `--tp-comm-overlap`: the exchange between tensor ranks."""

from __future__ import annotations

from megatron.config import RunConfig
from megatron.device import Device
from megatron.parallel.exchange import Exchange, GroupExchange
from megatron.parallel.layout import Layout
from megatron.planner.memory import largest_message
from megatron.processes.groups import BACKSTOP


def new_exchange(config: RunConfig, layout: Layout, device: Device, texts: int) -> Exchange | None:
    """Return the exchange that overlaps tensor-parallel communication with matrix products.

    Collective over the tensor ranks, which are on one machine. `None` if overlap is off or there is
    only one rank.

    Args:
        config: The run's configuration.
        layout: The grid of processes as this process sees it.
        device: The device on which this process computes.
        texts: The number of sequences in a sample.

    Raises:
        ConfigError: The ranks' GPUs cannot map each other's memory.
    """
    if not config.parallel.tp_comm_overlap or layout.tensor.size == 1:
        return None
    if not device.is_gpu:
        return GroupExchange(layout.tensor)
    from megatron.parallel.symmetric_memory import SymmetricExchange  # imports much

    # The same limit as the communication library's, which also ends without naming the missing
    # rank.
    seconds = 60 * config.parallel.distributed_timeout_minutes + BACKSTOP.total_seconds()
    message = largest_message(config, layout, texts)
    return SymmetricExchange(layout.tensor, device.torch_device, message, seconds=seconds)
