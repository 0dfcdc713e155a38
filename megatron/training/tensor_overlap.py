"""What `--tp-comm-overlap` needs: the exchange between tensor ranks, and its memory."""

from __future__ import annotations

from megatron.config import RunConfig
from megatron.config.run import known
from megatron.device import Device
from megatron.environment import Launch
from megatron.errors import ConfigError
from megatron.parallel.exchange import Exchange, GroupExchange
from megatron.parallel.layout import Layout
from megatron.parallel.ledger import SLOTS
from megatron.training.distributed import BACKSTOP


def largest_message(config: RunConfig, layout: Layout) -> int:
    """Bytes of the longest rows that a split layer sends to one tensor rank: its part of a
    micro-batch's hidden states."""
    width = 2 if config.precision.fp16 or config.precision.bf16 else 4
    data = config.data
    sequence = max(known(data.seq_length), data.decoder_seq_length or 0)
    rows = sequence // layout.context.size // layout.tensor.size
    micro_batch = known(config.training.micro_batch_size)
    return width * rows * micro_batch * known(config.model.hidden_size)


def exchange_bytes(config: RunConfig, layout: Layout) -> int:
    """Memory that a process keeps for it on a GPU."""
    if not config.parallel.tp_comm_overlap or layout.tensor.size == 1:
        return 0
    return SLOTS * layout.tensor.size * largest_message(config, layout)


def new_exchange(config: RunConfig, launch: Launch, layout: Layout, device: Device) -> Exchange:
    """Of this process with its tensor ranks. Collective over them.

    Raises:
        ConfigError: they are not on one machine, or their GPUs cannot map each other's memory.
    """
    if not device.is_gpu:
        return GroupExchange(layout.tensor)
    if launch.local_world_size % layout.tensor.size:
        raise ConfigError(
            f"--tp-comm-overlap: --tensor-model-parallel-size {layout.tensor.size} does not divide "
            f"the {launch.local_world_size} process(es) of a machine, and only GPUs of one machine "
            "map each other's memory: drop the flag"
        )
    from megatron.parallel.symmetric_memory import SymmetricExchange  # imports much

    # As long as the communication library waits: it, too, ends without saying for whom.
    seconds = 60 * config.parallel.distributed_timeout_minutes + BACKSTOP.total_seconds()
    return SymmetricExchange(
        layout.tensor, device.torch_device, largest_message(config, layout), seconds=seconds
    )
