"""The residual stream, and the normalization in front of each half of a block.

What a half of a block computes is added to the stream by the normalization that reads it next: one
pass over memory does both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.norm import AddNorm, add_norm, choose_add_norm
from megatron.models.kernels import PLAIN_KERNELS, Kernels
from megatron.models.sizes import sizes_of
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import ONES, ZEROS, new_parameter


class Stream(NamedTuple):
    """Hidden states between two halves of blocks: their sum, not taken yet.

    Attributes:
        residual: [s, b, h].
        update: what the last half has computed, [s, b, h]; None at the start of a part, and where
            dropout has added it already.
    """

    residual: Tensor
    update: Tensor | None = None

    def join(self) -> Tensor:
        """The hidden states."""
        return self.residual if self.update is None else self.residual + self.update


class LayerNorm(nn.Module):
    """LayerNorm over h. With `offset` the stored weight is the distance from one (LayerNorm-1p)."""

    def __init__(
        self,
        hidden: int,
        epsilon: float,
        *,
        offset: bool = False,
        form: AddNorm = add_norm,
        partial_gradient: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.form = form
        self.offset = offset
        init = ZEROS if offset else ONES
        self.weight = new_parameter(
            (hidden,), init=init, partial_gradient=partial_gradient, device=device, dtype=dtype
        )
        self.bias = new_parameter(
            (hidden,), init=ZEROS, partial_gradient=partial_gradient, device=device, dtype=dtype
        )

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """The joined stream [s, b, h], and the same normalized, in the weight's type."""
        weight = self.weight + 1 if self.offset else self.weight
        return self.form(*stream, weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """RMSNorm over h."""

    def __init__(
        self,
        hidden: int,
        epsilon: float,
        *,
        form: AddNorm = add_norm,
        partial_gradient: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.form = form
        self.weight = new_parameter(
            (hidden,), init=ONES, partial_gradient=partial_gradient, device=device, dtype=dtype
        )

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """The joined stream [s, b, h], and the same normalized, in the weight's type."""
        return self.form(*stream, self.weight, None, self.epsilon)


def new_norm(
    model: ModelConfig,
    layout: Layout,
    kernels: Kernels = PLAIN_KERNELS,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LayerNorm | RMSNorm:
    """The normalization that the flags ask for, of whole sequences or parts, as the layout is.

    Args:
        kernels: what to compute with.
    """
    form = choose_add_norm(kernels.library, kernels.amaxes)
    is_partial = layout.sequence.size > 1
    return _norm(model, sizes_of(model).hidden, form, is_partial, device, dtype)


def new_head_norm(
    model: ModelConfig,
    layout: Layout,
    kernels: Kernels = PLAIN_KERNELS,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LayerNorm | RMSNorm:
    """The same over the channels of a head; every tensor rank has it for its own heads."""
    form = choose_add_norm(kernels.library)  # no product reads the result
    return _norm(model, sizes_of(model).head_size, form, layout.tensor.size > 1, device, dtype)


def _norm(
    model: ModelConfig,
    size: int,
    form: AddNorm,
    is_partial: bool,
    device: torch.device | None,
    dtype: torch.dtype,
) -> LayerNorm | RMSNorm:
    options: dict[str, Any] = {
        "form": form,
        "partial_gradient": is_partial,
        "device": device,
        "dtype": dtype,
    }
    if model.normalization == "RMSNorm":
        return RMSNorm(size, model.norm_epsilon, **options)
    return LayerNorm(size, model.norm_epsilon, offset=model.apply_layernorm_1p, **options)
