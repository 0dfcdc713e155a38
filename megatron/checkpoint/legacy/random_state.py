"""Random states as Megatron's files hold them.

Our own dropout is drawn from the seed and the place in the sample order, so there is no generator
whose state could be saved. Written is what Megatron's generators have after it seeded them, each
iteration with numbers of its own.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_STAGE_STRIDE = 100  # of seeds, as in Megatron
_TENSOR_OFFSET = 2718
_NUMBERS_PER_ITERATION = 1 << 32  # of a device's generator; a multiple of 4, as it wants


def random_states(seed: int, iteration: int, *, stage: int, tensor_rank: int) -> dict[str, Any]:
    """One entry of `rng_state`.

    Args:
        seed: of the run.
        iteration: training steps taken.
        stage: pipeline stage of the file.
        tensor_rank: tensor-parallel rank of the file.
    """
    base = seed + _STAGE_STRIDE * stage
    kind, keys, place, has_normal, normal = np.random.RandomState(base).get_state(legacy=True)
    return {
        "random_rng_state": random.Random(base).getstate(),
        # Numbers, not an array: every version of numpy reads them.
        "np_rng_state": (kind, tuple(int(key) for key in keys), place, has_normal, normal),
        "torch_rng_state": torch.Generator().manual_seed(base).get_state(),
        "cuda_rng_state": _device_state(base, iteration),
        "rng_tracker_states": {
            "model-parallel-rng": _device_state(base + _TENSOR_OFFSET + tensor_rank, iteration)
        },
    }


def _device_state(seed: int, iteration: int) -> torch.Tensor:
    """A GPU generator's state: its seed and how many numbers were drawn, 8 bytes each."""
    drawn = iteration * _NUMBERS_PER_ITERATION
    data = seed.to_bytes(8, "little") + (drawn % (1 << 63)).to_bytes(8, "little")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
