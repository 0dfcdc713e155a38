"""What each process finds its device to lack, before they form groups: all learn of it.

A rule about the device is checked where the device is. A process that left by itself would say
nothing of it, or not be heard, and the others would wait for it.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch.distributed as dist

from megatron.device import Device
from megatron.environment import Launch
from megatron.errors import ConfigError
from megatron.training.hang import ranks_text

_LINGER = 0.5  # seconds until rank 0 leaves, and perhaps the store with it: the others read it
_SHOWN = 4  # machines in a message


@dataclass(frozen=True)
class Found:
    """What a process says of its device.

    Attributes:
        type: "cuda" or "cpu".
        machine: its name.
        misfits: lines of `config.rules_device`.
    """

    type: str
    machine: str
    misfits: Sequence[str]


def refuse_together(
    store: dist.Store, launch: Launch, device: Device, misfits: Sequence[str]
) -> None:
    """Collective over the processes of the store, each with its own `misfits`.

    Raises:
        ConfigError: on all of them, where one has any, or some have a GPU and some have none.
        torch.distributed.DistError: a process does not come, or the store is gone.
    """
    mine = Found(device.type, platform.node(), misfits)
    store.set(f"device/{launch.rank}", json.dumps(astuple(mine)))
    if launch.rank == 0:
        found = [
            Found(*json.loads(store.get(f"device/{rank}"))) for rank in range(launch.world_size)
        ]
        store.set("misfits", json.dumps(problems_of(found)))
    problems = json.loads(store.get("misfits"))
    if problems:
        if launch.rank == 0:
            time.sleep(_LINGER)
        raise ConfigError(problems)


def problems_of(found: Sequence[Found]) -> list[str]:
    """A line for each misfit, with the ranks that have it where not all do; from all ranks in
    their order. Devices of several kinds come first: what a CPU cannot do follows from that."""
    cpus = [rank for rank, each in enumerate(found) if each.type == "cpu"]
    if 0 < len(cpus) < len(found):
        return [
            f"{_where(cpus, found)} found no GPU, and the others did: look there with nvidia-smi, "
            "and whether CUDA_VISIBLE_DEVICES hides them; or launch as many processes as there are "
            "GPUs"
        ]
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(found):
        for line in each.misfits:
            ranks.setdefault(line, []).append(rank)
    return [
        line if len(those) == len(found) else f"{_where(those, found)}: {line}"
        for line, those in ranks.items()
    ]


def _where(ranks: Sequence[int], found: Sequence[Found]) -> str:
    """ "ranks 8-15 of 16 (on gpu-07)"."""
    machines = list(dict.fromkeys(found[rank].machine for rank in ranks))
    more = ", ..." if len(machines) > _SHOWN else ""
    return f"{ranks_text(ranks)} of {len(found)} (on {', '.join(machines[:_SHOWN])}{more})"
