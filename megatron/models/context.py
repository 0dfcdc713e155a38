"""The attention core of a model whose sequences are split over context ranks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.errors import ConfigError
from megatron.kernels.attention import AttentionChoice, AttentionFunction, flash_misfit
from megatron.kernels.segments import Mask
from megatron.models.sizes import sizes_of
from megatron.parallel.context.block import (
    BlockAttention,
    choose_block,
    reference_backward,
    reference_forward,
)
from megatron.parallel.context.ring import ring_attention
from megatron.parallel.context.ulysses import ulysses_attention
from megatron.parallel.layout import Axis


def over_context(
    choice: AttentionChoice,
    comm_type: str,
    axis: Axis,
    model: ModelConfig,
    precision: PrecisionConfig,
    device: torch.device,
) -> AttentionChoice:
    """The form that attends over the whole sequence from parts of it; `choice` on one rank.

    Args:
        choice: form of the core on one process.
        comm_type: "p2p": ring attention; "a2a": Ulysses around `choice`.
        axis: the context axis.
        model: network flags, resolved.
        precision: number formats.
        device: where it runs.

    Raises:
        ConfigError: --use-flash-attn with a ring, where the flash kernel cannot run.
    """
    if axis.size == 1:
        return choice
    if comm_type == "a2a":
        reason = f"{choice.reason}; all-to-all over {axis.size} context ranks"
        function = partial(_all_to_all, axis=axis, attend=choice.function)
        return AttentionChoice(choice.name, reason, function)
    block = _ring_block(model, precision, device)
    reason = f"{block.reason}; ring of {axis.size} context ranks"
    return AttentionChoice(block.name, reason, partial(_ring, axis=axis, block=block))


def _ring_block(
    model: ModelConfig, precision: PrecisionConfig, device: torch.device
) -> BlockAttention:
    head_size = sizes_of(model).head_size
    dtype = precision.weight_dtype
    if model.use_flash_attn:
        misfit = flash_misfit(head_size, dtype, device)
        if misfit:
            raise ConfigError(f"--use-flash-attn: {misfit}: drop the flag")
    elif not model.masked_softmax_fusion:
        reason = "--no-masked-softmax-fusion"
        return BlockAttention("plain", reason, reference_forward, reference_backward)
    return choose_block(head_size, dtype, device)


def _ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None,
    causal: bool,
    dropout: float,
    layer_number: int,
    axis: Axis,
    block: BlockAttention,
) -> Tensor:
    """Scores stay in fp32, so layer scaling has nothing to do."""
    assert mask is None, "a rule refuses masks with context parallelism"
    return ring_attention(query, key, value, axis=axis, block=block, causal=causal, dropout=dropout)


def _all_to_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None,
    causal: bool,
    dropout: float,
    layer_number: int,
    axis: Axis,
    attend: AttentionFunction,
) -> Tensor:
    assert mask is None, "a rule refuses masks with context parallelism"
    local = partial(attend, mask=None, causal=causal, dropout=dropout, layer_number=layer_number)
    return ulysses_attention(query, key, value, axis=axis, attend=local)
