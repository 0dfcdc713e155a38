"""FlashAttention 4 (https://github.com/Dao-AILab/flash-attention, package `flash-attn-4`), where it
is installed. Its kernels, for Hopper and later GPUs, are compiled when they are first needed: 15 s
with the package's own start, so it is asked for (--use-flash-attn) and not taken by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from megatron.device import Device
from megatron.kernels.segments import Mask, Segments

_DISTRIBUTION = "flash-attn-4"
_LARGEST_HEAD = 128  # that the kernels of all these GPUs take

logger = logging.getLogger(__name__)


class FlashPackage:
    """Attention by the package.

    Args:
        whole: its `flash_attn_func`.
        stretches: its `flash_attn_varlen_func`.
        release: of the package.
    """

    def __init__(
        self, whole: Callable[..., Any], stretches: Callable[..., Any], release: str
    ) -> None:
        self._whole, self._stretches = whole, stretches
        self.release = release

    def takes(self, query: Tensor, mask: Mask | None, dropout: float) -> bool:
        """Whether it has a kernel: 16 bits, no dropout, and no mask in memory."""
        size = query.shape[-1]
        return (
            query.dtype in (torch.float16, torch.bfloat16)
            and size % 8 == 0
            and size <= _LARGEST_HEAD
            and dropout == 0
            and (mask is None or isinstance(mask, Segments))
        )

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask | None,
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        """Attend; shapes and meaning are those of `attention.AttentionFunction`."""
        options = {
            "softmax_scale": scale,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if mask is None and causal and query.shape[0] != key.shape[0]:
            raise ValueError(
                f"{query.shape[0]} queries of {key.shape[0]} keys: which are the last?"
            )
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))  # [b, s, n or g, d]
        if not isinstance(mask, Segments):
            out = _first(self._whole(query, key, value, causal=causal, **options))
        else:
            length = query.shape[1]
            tokens = (x.flatten(0, 1) for x in (query, key, value))  # [b s, n or g, d]
            places = {"cu_seqlens_q": mask.ends, "cu_seqlens_k": mask.ends}
            longest = {"max_seqlen_q": length, "max_seqlen_k": length}
            out = self._stretches(*tokens, **places, **longest, causal=True, **options)
            out = _first(out).view_as(query)
        return out.transpose(0, 1).flatten(2)  # [s, b, n d]


def find_flash_package(device: torch.device) -> FlashPackage | None:
    """The package, where it is installed and has kernels for the device."""
    if Device(device).capability < (9, 0):
        return None
    try:
        release = version(_DISTRIBUTION)
    except PackageNotFoundError:
        return None
    try:
        package = import_module("flash_attn.cute")
        return FlashPackage(package.flash_attn_func, package.flash_attn_varlen_func, release)
    except (ImportError, AttributeError) as error:
        logger.warning("--use-flash-attn: %s %s is not used: %s", _DISTRIBUTION, release, error)
        return None


def _first(result: Any) -> Tensor:
    """Some releases give the logarithms of the sums as well."""
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, Tensor)
    return out
