"""The residual stream, the normalization before each sublayer, and the projection at its end.

A normalization also adds the previous sublayer's output to the stream, so that a single pass over
memory does both.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.kernels.amax import FusedAmax, FusedAmaxes
from megatron.kernels.norm import choose_add_norm
from megatron.models.plan import NormPlan, SublayerPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import copy_to, reduce_from
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Axis
from megatron.parallel.parameter import ONES, ZEROS


class Stream(NamedTuple):
    """Hidden states between two sublayers, stored as a sum that is not yet computed.

    Attributes:
        residual: The hidden states before the last sublayer, [s, b, h].
        update: The output of the last sublayer, [s, b, h]; `None` at the start of a part of the
            model, or if it has already been added.
        fused_amax: The object that passes the amax of the update's gradient, in the backward pass,
            to the layer that computed the update. `None` if that layer does not need it.
    """

    residual: Tensor
    update: Tensor | None = None
    fused_amax: FusedAmax | None = None

    def join(self) -> Tensor:
        """Return the hidden states."""
        return self.residual if self.update is None else self.residual + self.update


def output_projection(plan: SublayerPlan, inputs: int, context: BuildContext) -> Linear:
    """Build the last linear layer of a sublayer, whose output is added to the residual stream.

    Args:
        plan: The plan of the sublayer.
        inputs: Number of inputs of the layer.
        context: Layout, device, kernels and number formats.
    """
    return Linear(
        inputs,
        plan.hidden,
        context,
        split="row",
        init=plan.init.weight(inputs, plan.hidden, into_residual=True),
        bias=plan.bias,
        adds_bias=not plan.defers_bias,
    )


def outer_amaxes(first: Linear, last: Linear) -> FusedAmaxes:
    """Return where to store the amaxes of a sublayer's input and of its output's gradient.

    Args:
        first: The linear layer that reads the sublayer's input.
        last: The linear layer that computes its output.
    """
    return FusedAmaxes(first.products.fused_amaxes.forward, last.products.fused_amaxes.backward)


class Norm(nn.Module):
    """A normalization over the last dimension, LayerNorm or RMSNorm according to its plan.

    Args:
        plan: The plan of the normalization.
        width: The size of the last dimension.
        context: Layout, device, kernels and number formats.
        partial_gradient: Whether tensor ranks normalize different tensors, so that the gradients of
            the weights must be summed over the ranks.
    """

    def __init__(
        self, plan: NormPlan, width: int, context: BuildContext, *, partial_gradient: bool
    ) -> None:
        """Allocate the weight and the bias, if the plan has them."""
        super().__init__()
        self.add_norm = choose_add_norm(context.kernels.library)
        self.epsilon, self.offset = plan.epsilon, plan.offset
        new_vector = partial(context.new_parameter, (width,), partial_gradient=partial_gradient)
        if plan.weight:
            self.weight = new_vector(init=ZEROS if plan.offset else ONES)
        else:
            ones = torch.ones(width, dtype=context.compute_dtype, device=context.device)
            self.register_buffer("weight", ones, persistent=False)
        if plan.kind == "LayerNorm" and not plan.bias:
            # The kernels treat a normalization with a bias as a LayerNorm, and one without as an
            # RMSNorm.
            zeros = torch.zeros(width, dtype=context.compute_dtype, device=context.device)
            self.register_buffer("bias", zeros, persistent=False)
        else:
            self.bias = new_vector(init=ZEROS) if plan.bias else None

    @staticmethod
    def parameter_count(plan: NormPlan, width: int) -> int:
        """Count the parameters of a normalization over `width` channels."""
        return width * (plan.weight + plan.bias)

    def forward(self, stream: Stream, fused_amax: FusedAmax | None = None) -> tuple[Tensor, Tensor]:
        """Return the joined stream [s, b, h], and the normalized stream in the weight's dtype.

        Args:
            stream: The residual stream.
            fused_amax: The object that passes the amax of the result to the next layer; `None` if
                that layer does not need it.
        """
        weight = self.weight + 1 if self.offset else self.weight
        fused_amaxes = FusedAmaxes(fused_amax, stream.fused_amax)
        return self.add_norm(*stream[:2], weight, self.bias, self.epsilon, fused_amaxes)


def new_norm(plan: NormPlan, hidden: int, context: BuildContext) -> Norm:
    """Build a normalization of hidden states, or of this rank's part with sequence parallelism."""
    return Norm(plan, hidden, context, partial_gradient=context.layout.sequence.size > 1)


class Joining(nn.Module):
    """A module that joins the residual stream before a sublayer whose input is not normalized.

    It takes the place of a `Norm`.

    Args:
        context: The context, which has the number format of the sublayer's weights.
    """

    def __init__(self, context: BuildContext) -> None:
        """Store the number format."""
        super().__init__()
        self.dtype = context.compute_dtype

    def forward(self, stream: Stream, fused_amax: FusedAmax | None = None) -> tuple[Tensor, Tensor]:
        """Return the joined stream [s, b, h], and the same values in the dtype of the weights.

        Args:
            stream: The residual stream.
            fused_amax: Not used, because no kernel measures an amax.
        """
        x = stream.join()
        return x, x.to(self.dtype)


def new_query_norm(plan: NormPlan, size: int, context: BuildContext) -> Norm:
    """Build a normalization of queries or keys. Each tensor rank applies it to its own heads.

    Every rank holds the weights of all heads, even if they differ between heads. There are few
    weights, and ranks that share a key need the same ones.

    Args:
        plan: The plan of the normalization.
        size: Number of channels that have weights.
        context: Layout, device, kernels and number formats.
    """
    return Norm(plan, size, context, partial_gradient=context.layout.tensor.size > 1)


def normalize_projections(
    parts: tuple[Tensor, Tensor], norms: tuple[Norm, Norm], axis: Axis, *, by_head: bool
) -> list[Tensor]:
    """Normalize queries and keys with weights that differ between heads.

    Args:
        parts: Queries [s, b, n/t, d] and keys [s, b, g/t (at least 1), d] of this rank.
        norms: Normalizations with weights for n d and for g d channels.
        axis: The tensor ranks, which hold different heads, in order.
        by_head: Whether each head is normalized separately. Otherwise all queries are normalized
            together, and so are all keys.

    Returns:
        The normalized queries and keys, in the shapes of `parts` and the dtype of the weights.
    """
    if axis.size == 1 and not by_head:
        return [
            norm(Stream(part.flatten(2)))[1].view_as(part)
            for part, norm in zip(parts, norms, strict=True)
        ]
    # An fp64 sum rounded to fp32 hardly ever depends on the order of its terms, so generated text
    # does not depend on the batch.
    dtype = torch.float32 if torch.is_grad_enabled() else torch.float64

    def mean(values: list[Tensor]) -> list[Tensor] | Tensor:
        if by_head:
            return [value.mean(3, keepdim=True) for value in values]
        # All ranks have the same number of channels. A key counts once for each rank that holds it.
        local = torch.stack([value.mean((2, 3), keepdim=True) for value in values])
        return copy_to(reduce_from(local, axis), axis) / axis.size  # all ranks use the mean

    values = [part.to(dtype) for part in parts]
    if norms[0].bias is not None:
        values = [part - average for part, average in zip(values, mean(values), strict=True)]
    variances = mean([part.square() for part in values])
    results = []
    for part, variance, norm in zip(values, variances, norms, strict=True):
        weight = _head_slice(norm.weight, part, axis) + norm.offset
        normal = part * (variance + norm.epsilon).rsqrt() * weight
        if norm.bias is not None:
            normal = normal + _head_slice(norm.bias, part, axis)
        results.append(normal.to(norm.weight.dtype))
    return results


def _head_slice(vector: Tensor, part: Tensor, axis: Axis) -> Tensor:
    """Return the entries of `vector` for this rank's heads, [heads, d], in the dtype of `part`."""
    heads, size = part.shape[2:]
    first = axis.rank * len(vector) // (axis.size * size)
    return vector.unflatten(0, (-1, size))[first : first + heads].to(part.dtype)
