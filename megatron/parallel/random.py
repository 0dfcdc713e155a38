"""Seeds that are pure functions of their purpose, so no generator state has to be saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron.device import Device
from megatron.parallel.layout import Axis


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is a pure function of the arguments.

    Args:
        parts: The purpose of the seed, from general to specific: run seed, purpose, index.
    """
    return int.from_bytes(_digest(*parts)[:8], "big") >> 1


def derive_key(*parts: int | str) -> tuple[int, int]:
    """Return the key of a counter-based generator, two 32-bit words, derived from the arguments."""
    digest = _digest(*parts)
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")


def uniform(shape: Sequence[int], device: torch.device, *purpose: int | str) -> torch.Tensor:
    """Draw uniform fp32 numbers in [0, 1) that depend only on their purpose and position.

    Args:
        shape: The shape of the result.
        device: The device that draws the numbers. Devices of different kinds draw different
            numbers.
        purpose: The purpose of the numbers, as in `derive_seed`.
    """
    generator = torch.Generator(device)
    generator.manual_seed(derive_seed(*purpose))
    return torch.rand(tuple(shape), generator=generator, device=device)


def micro_batch_seed(seed: int, first_sample: int) -> int:
    """Return the seed for the dropout masks of one micro-batch.

    Neither a restart nor a different number of data-parallel processes changes the result.

    Args:
        seed: The run's seed.
        first_sample: The index of the micro-batch's first sample in the run's sample order.
    """
    return derive_seed(seed, "micro batch", first_sample)


@contextmanager
def split_region(axis: Axis, device: torch.device, *site: int | str) -> Iterator[None]:
    """Draw different random numbers on every rank of the axis.

    Inside the block, the device's default generator is seeded from its current seed (the
    micro-batch's), the rank and the site. Afterwards it continues from its previous state, which is
    the same on all ranks. No state has to be tracked or saved, and recomputation draws the same
    numbers again. With a single rank nothing changes.

    Args:
        axis: The ranks that hold different shards of the tensor for which numbers are drawn.
        device: The device that draws the numbers.
        site: Values that identify the position in the model, for example the layer number and
            "attention".
    """
    if axis.size == 1:
        yield
        return
    generator = Device(device).default_generator
    state = generator.get_state()
    generator.manual_seed(derive_seed(generator.initial_seed(), "tensor", axis.rank, *site))
    try:
        yield
    finally:
        generator.set_state(state)


def _digest(*parts: int | str) -> bytes:
    # JSON keeps the parts apart: (1, 23) and (12, 3), or 1 and "1", give different strings.
    return hashlib.sha256(json.dumps(parts).encode()).digest()
