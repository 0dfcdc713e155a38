"""The attention core: softmax(Q K^T / sqrt(d)) V, plain or by PyTorch's fused kernels.

A model may have another factor of the scores than 1 / sqrt(d).

Queries are [s, b, n, d]; keys and values [s, b, g, d], where each of the g groups serves n / g
consecutive query heads; there may be fewer or more keys than queries. A mask is boolean, True where
a query may attend, or of numbers that are added to the scores (a bias that learns, such as that of
T5's positions); either replaces `causal`. That of padding has one row for all queries of a sample.
PyTorch's fused kernels take it as it is. `Segments` stand for a mask; the flash kernel goes through
them without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.config.model import ModelConfig, flash_head_misfit
from megatron.config.precision import PrecisionConfig
from megatron.device import Device
from megatron.kernels.flash_package import FlashPackage, find_flash_package
from megatron.kernels.segments import Mask, Segments
from megatron.kernels.softmax import masked_softmax

# Fastest first where more than one applies. cuDNN steps aside in deterministic mode.
_GPU_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Of those, the ones that give a bias of the scores its gradient.
_BIAS_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# And those that never hold all scores; a mask is not for the second.
_FLASH_KERNELS = _GPU_KERNELS[:-1]


class AttentionOptions(NamedTuple):
    """How queries attend to keys, beside the tensors themselves.

    Attributes:
        mask: bool [b or 1, 1, s or 1, keys], True where a query may attend; or numbers
            [b or 1, n, s, keys] that are added to the scores; or `Segments`, with as many keys as
            queries. `None` leaves the choice to `causal`.
        causal: without a mask, attend to the past and oneself only.
        dropout: probability of dropping an attention weight.
        layer_number: from 1, for query-key layer scaling.
        scale: factor of the scores; `None` stands for 1 / sqrt(d).
    """

    mask: Mask | None = None
    causal: bool = True
    dropout: float = 0.0
    layer_number: int = 1
    scale: float | None = None


class AttentionFunction(Protocol):
    """One form of the attention core."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, /
    ) -> Tensor:
        """Attend.

        Args:
            query: [s, b, n, d].
            key: [s, b, g, d].
            value: [s, b, g, d].
            options: mask, dropout and scale.

        Returns:
            [s, b, n * d].
        """


@dataclass(frozen=True)
class AttentionChoice:
    """Which form runs, and why."""

    name: str
    reason: str
    function: AttentionFunction


def choose_attention(
    model: ModelConfig, precision: PrecisionConfig, device: torch.device
) -> AttentionChoice:
    """Pick the form once, when a model is built."""
    if not model.masked_softmax_fusion and not model.use_flash_attn:
        by_layer = precision.apply_query_key_layer_scaling
        function = partial(
            attention_reference,
            scale_by_layer=by_layer,
            softmax_in_fp32=by_layer or precision.attention_softmax_in_fp32,
        )
        return AttentionChoice("plain", "--no-masked-softmax-fusion", function)
    name, reason, fused = "fused", "scaled_dot_product_attention on CPU", fused_attention
    repeats = torch.are_deterministic_algorithms_enabled()
    first = f"first of {'' if repeats else 'cuDNN, '}flash, efficient that fits"
    if model.use_flash_attn:
        assert Device(device).is_gpu, "a rule refuses a CPU"
        package = find_flash_package(device)
        name, reason = "flash", f"--use-flash-attn: {first}"
        if package is not None:
            reason = f"--use-flash-attn: FlashAttention {package.release} where it fits"
        fused = partial(flash_attention, package=package)
    elif Device(device).is_gpu:
        reason, fused = first, gpu_attention
    return AttentionChoice(name, reason, fused)


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    scale_by_layer: bool = False,
    softmax_in_fp32: bool = True,
) -> Tensor:
    """Compute the formula, with every score in memory.

    With `scale_by_layer` scores are divided by the layer number before they are rounded to 16
    bits, and multiplied back in fp32.
    """
    mask, causal, dropout, layer_number, scale = options
    mask = _as_tensor(mask)
    layer = layer_number if scale_by_layer else 1
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, n or g, s, d]
    key, value = _expand_groups(query, key, value)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _scaled_product(query, key, factor / layer)  # [b, n, s, s]
    if softmax_in_fp32:
        scores = scores.float()
    if mask is not None and mask.is_floating_point():
        scores, mask, causal = scores + mask / layer, None, False
    weights = masked_softmax(scores, mask, causal=causal, factor=layer, dtype=value.dtype)
    weights = F.dropout(weights, dropout)
    return (weights @ value).permute(2, 0, 1, 3).flatten(2)


def _scaled_product(query: Tensor, key: Tensor, factor: float) -> Tensor:
    """factor * Q K^T, multiplied before the result is rounded to the inputs' type."""
    heads = query.shape[:2]
    query, key = query.flatten(0, 1), key.flatten(0, 1)
    nothing = query.new_zeros(1)  # unused with beta 0
    product = torch.baddbmm(nothing, query, key.transpose(1, 2), beta=0, alpha=factor)
    return product.unflatten(0, heads)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Run PyTorch's fused attention, whose scores stay in fp32 and need no scaling by layer."""
    mask = _as_tensor(options.mask)
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    # The kernels that take a mask or fp32 do not take groups; copies of keys cost them little.
    share = mask is None and query.dtype != torch.float32
    if not share:
        key, value = _expand_groups(query, key, value)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=options.causal and mask is None,
        scale=options.scale,
        enable_gqa=share and key.shape[1] != query.shape[1],
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def gpu_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Run PyTorch's fused attention on a GPU, by the fastest kernel that fits."""
    mask = options.mask
    if isinstance(mask, Segments) and _flash_takes(query):
        return _segment_attention(query, key, value, mask, options)
    with sdpa_kernel(_BIAS_KERNELS if _has_bias(mask) else _GPU_KERNELS, set_priority=True):
        return fused_attention(query, key, value, options)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    package: FlashPackage | None = None,
) -> Tensor:
    """Attend block by block, never holding all scores.

    FlashAttention's own package runs where it fits; otherwise those of PyTorch's kernels that work
    in the same way.
    """
    mask = options.mask
    if package is not None and package.takes(query, mask, options.dropout):
        return package(query, key, value, causal=options.causal, scale=options.scale)
    if isinstance(mask, Segments) and _flash_takes(query):
        return _segment_attention(query, key, value, mask, options)
    kernels = [SDPBackend.EFFICIENT_ATTENTION] if _has_bias(mask) else _FLASH_KERNELS
    with sdpa_kernel(kernels, set_priority=True):
        return fused_attention(query, key, value, options)


def flash_misfit(head_size: int, dtype: torch.dtype, device: torch.device) -> str:
    """Why the flash kernel cannot run; empty if it can."""
    if not Device(device).has_flash:
        return f"no flash kernel on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "flash kernels compute in 16 bits"
    return flash_head_misfit(head_size)


def _flash_takes(query: Tensor) -> bool:
    return not flash_misfit(query.shape[-1], query.dtype, query.device)


def _has_bias(mask: Mask | None) -> bool:
    return isinstance(mask, Tensor) and mask.is_floating_point()


def _segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: AttentionOptions
) -> Tensor:
    """Attend within each stretch by itself, by the flash kernel, which reads no mask.

    PyTorch has a public form of it (`torch.nn.attention.varlen`), but that has no dropout.
    """
    length, samples = query.shape[:2]
    query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    ends, longest, debug = segments.ends, segments.longest or length, False
    places = (ends, ends, longest, longest)  # of queries and keys, and the longest of each
    out = torch.ops.aten._flash_attention_forward(
        *(query, key, value),
        *places,
        options.dropout,
        segments.causal,
        debug,
        scale=options.scale,
    )[0]  # [b s, n, d]
    return out.unflatten(0, (samples, length)).transpose(0, 1).flatten(2)  # [s, b, n d]


def _as_tensor(mask: Mask | None) -> Tensor | None:
    return mask.mask if isinstance(mask, Segments) else mask


def _expand_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat each key-value head [b, g, s, d] for the query heads that share it."""
    times = query.shape[1] // key.shape[1]
    if times == 1:
        return key, value
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
