"""FlashAttention 4 (https://github.com/Dao-AILab/flash-attention, package `flash-attn-4`), where it
is installed. Its kernels, for Hopper and later GPUs, are compiled when they are first needed: 15 s
with the package's own start, so it is asked for (--use-flash-attn) and not taken by itself.

They are faster than cuDNN's on tensors [b, s, n, d] in order (docs/benchmarks/kernels.md), and far
slower on ours, [s, b, n, d] turned, unless b is 1, where the two are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from megatron.config.model import flash_head_misfit
from megatron.device import Device
from megatron.kernels.segments import Mask

_DISTRIBUTION = "flash-attn-4"
_LARGEST_HEAD = 128  # that the kernels of all these GPUs take
_WITHOUT_DETERMINISM = (12, 0)  # GPUs whose backward the package has in no repeatable form

logger = logging.getLogger(__name__)


class FlashPackage:
    """Attention by the package.

    Args:
        function: its `flash_attn_func`.
        release: of the package.
    """

    def __init__(self, function: Callable[..., Any], release: str) -> None:
        self._function = function
        self.release = release

    def takes(self, query: Tensor, mask: Mask | None, dropout: float) -> bool:
        """Whether it has a kernel, and a fast one: 16 bits, one sample, no dropout and no mask."""
        return (
            query.dtype in (torch.float16, torch.bfloat16)
            and not flash_head_misfit(query.shape[-1], largest=_LARGEST_HEAD)
            and query.shape[1] == 1
            and dropout == 0
            and mask is None
        )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None
    ) -> Tensor:
        """Attend; shapes and meaning are those of `attention.AttentionFunction`."""
        result = self._function(
            *(x.transpose(0, 1) for x in (query, key, value)),  # [b, s, n or g, d]
            causal=causal,
            softmax_scale=scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        # Some releases give the logarithms of the sums as well.
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(0, 1).flatten(2)  # [s, b, n d]


def find_flash_package(device: torch.device) -> FlashPackage | None:
    """The package, where it is installed and has kernels for the device, and for
    --deterministic-mode where that is on."""
    capability = Device(device).capability
    if capability < (9, 0):
        return None
    if capability >= _WITHOUT_DETERMINISM and torch.are_deterministic_algorithms_enabled():
        return None
    try:
        release = version(_DISTRIBUTION)
    except PackageNotFoundError:
        return None
    try:
        return FlashPackage(import_module("flash_attn.cute").flash_attn_func, release)
    except (ImportError, AttributeError) as error:
        logger.warning("--use-flash-attn: %s %s is not used: %s", _DISTRIBUTION, release, error)
        return None
