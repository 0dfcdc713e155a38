"""The Mamba-2 mixer (Dao and Gu, "Transformers are SSMs", 2024, arXiv:2405.21060).

Each head keeps a state [p, n]. Each token multiplies the state by a decay between 0 and 1 and adds
the outer product of its input x [p] and its vector B [n]. Its output is the product of the state
and its vector C [n]. Sequences are computed in chunks: within a chunk as a masked product of the C
and B vectors, like attention, and between chunks through the state. States and sums are fp32.

Shapes: s sequence, b micro-batch, h hidden, g groups, r heads per group, p channels per head, n
state size, c chunks, l tokens of a chunk, t tensor-parallel size, C context-parallel size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.kernels.amax import NO_FUSED_AMAXES
from megatron.kernels.rope import Rotation
from megatron.kernels.segments import Mask
from megatron.models.attention import KeyValueCache, SelfAttention
from megatron.models.costs import Flops, MicroBatch, WeightSplit
from megatron.models.norm import outer_amaxes, output_projection
from megatron.models.recurrence import CausalConvolution, RecurrentMixer, local_slice
from megatron.models.recurrent_plan import MambaPlan, ParallelMambaPlan
from megatron.parallel.adapter import WHOLE
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear, Projections
from megatron.parallel.layout import Axis
from megatron.parallel.parameter import ONES, Init

# Initial decay rates are uniform in this range, and initial time steps log-uniform.
_DECAY = (1.0, 16.0)
_TIME_STEP = (0.001, 0.1)
_FP32 = 4  # bytes


class Mamba(RecurrentMixer):
    """Input projection, causal convolution, scan, gated normalization and output projection.

    The rows of the input projection are ordered by group: the group's gate z, its input x, its
    vectors B and C, and the time steps of its heads. Channels of the convolution (x, B and C) are
    also ordered by group.

    Args:
        plan: The plan of this layer.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: MambaPlan, context: BuildContext) -> None:
        """Allocate the projections, the convolution and the parameters of heads."""
        super().__init__(context, group=sum(plan.widths) // plan.groups)
        self.plan, self.recompute = plan, "core_attn" in context.recomputed
        self.input = Linear(
            plan.hidden,
            sum(plan.widths),
            context,
            split="column",
            init=plan.init.weight(plan.hidden, sum(plan.widths)),
            bias=plan.bias,
            projections=Projections(("z", "x", "b", "c", "time_step"), plan.widths, plan.groups),
            adapted_as=Projections((WHOLE,), (sum(plan.widths),), plan.groups),
        )
        self.convolution = CausalConvolution(plan.convolved, plan.convolution, context)
        of_heads = partial(context.new_parameter, (plan.heads,), split_dim=0)
        self.decay = of_heads(init=Init("log_uniform", *_DECAY))
        self.skip = of_heads(init=ONES)
        self.time_step = of_heads(init=Init("time_step", *_TIME_STEP))
        self.norm = None
        if plan.normalizes:
            self.norm = context.new_parameter((plan.inner,), init=ONES, split_dim=0)
        factors: Tensor | None = None  # one for each output of a group's projections
        if plan.factors:
            blocks = [
                torch.full((width // plan.groups,), factor, device=context.device)
                for width, factor in zip(plan.widths, plan.factors, strict=True)
            ]
            factors = torch.cat(blocks)
        self.register_buffer("factors", factors, persistent=False)
        self.factors: Tensor | None
        self.output = output_projection(plan, plan.inner, context)
        self.fused_amaxes = outer_amaxes(self.input, self.output)

    @staticmethod
    def matrices(plan: MambaPlan, split: WeightSplit) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each weight matrix on one process."""
        tensor = split.tensor
        return [(sum(plan.widths) // tensor, plan.hidden), (plan.hidden, plan.inner // tensor)]

    @staticmethod
    def vectors(plan: MambaPlan, split: WeightSplit) -> int:
        """Count the convolution, head, normalization and bias parameters on one process."""
        count = plan.convolved * (plan.convolution + 1) + 3 * plan.heads
        count += plan.inner if plan.normalizes else 0
        count += sum(plan.widths) if plan.bias else 0
        return count // split.tensor + (plan.hidden if plan.bias else 0)

    @staticmethod
    def flops(plan: MambaPlan, length: int, encoder_length: int) -> Flops:
        """Count the FLOPs of the projections as products, and those of the scan as scores.

        Within a chunk, the causal mask halves the products of C with B and their products with x.
        Writing to the state and reading from it take one multiplication each per state element and
        token.
        """
        shapes = Mamba.matrices(plan, WeightSplit())
        products = 6 * length * sum(outputs * inputs for outputs, inputs in shapes)
        chunk = min(plan.chunk, length)
        intra_chunk = chunk * (plan.groups * plan.state + plan.inner)
        return Flops(products, 3 * length * (intra_chunk + 4 * plan.inner * plan.state))

    @staticmethod
    def activation_bytes(plan: MambaPlan, batch: MicroBatch) -> int:
        """Count the bytes of the projections, and of the scan's intermediates if they are kept."""
        # In fp32 the gate is a view of the whole projection.
        gate = sum(plan.widths) if batch.width == _FP32 else plan.inner
        # Input and result of the convolution, before and after SiLU; the gated normalization.
        outside_scan = gate + 3 * plan.convolved + 4 * plan.inner + 2 * plan.heads
        total = batch.tokens * (_FP32 * outside_scan + batch.width * plan.inner) // batch.tensor
        if "core_attn" in batch.recomputed:
            return total
        chunk = min(plan.chunk, batch.length)
        pairs = chunk * (2 * plan.heads + plan.groups)
        # Four tensors like x, two copies of B and C, and two of the states before each chunk.
        inside_scan = 4 * plan.inner + 4 * plan.groups * plan.state + 4 * plan.heads
        states = 2 * plan.inner * plan.state // chunk
        return total + _FP32 * batch.tokens * (pairs + inside_scan + states) // batch.tensor

    def mix(
        self,
        projected: Tensor,
        states: tuple[Tensor, ...] | None,
        documents: Tensor | None,
        axis: Axis,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute everything between the two projections for this rank's groups.

        Args:
            projected: [s, b, g, (z, x, B, C, time steps of a group)].
            states: The states of the convolution and of the heads; `None` means zeros.
            documents: The index of each token's document, [s, b]; `None` for a single document.
            axis: The context ranks, which divide the groups of a tensor rank; a single rank in
                inference.

        Returns:
            The gated outputs [s, b, g, r p], normalized if the plan says so, in the dtype of
            `projected`, and new states.
        """
        plan, groups = self.plan, projected.shape[2]
        if self.factors is not None:
            projected = (projected * self.factors).to(projected.dtype)
        inner, _, vector, _, heads = (width // plan.groups for width in plan.widths)
        gate, channels, steps = projected.split((inner, inner + 2 * vector, heads), dim=3)
        part = partial(local_slice, axis=axis)
        kernels = self.kernels_for(projected, states)
        convolved, conv_state = self.convolution(
            channels.flatten(2),
            None if states is None else states[0],
            documents,
            part(len(self.convolution.weight)),
            kernels,
        )
        if kernels is not None and len(projected) > 1:
            convolved = convolved.to(projected.dtype)
        convolved = convolved.unflatten(2, (groups, -1))
        inputs, b, c = convolved.split((inner, vector, vector), dim=3)
        of_heads = part(len(self.decay))
        decay, bias, skip = (
            vector[of_heads].float().view(groups, heads)
            for vector in (self.decay, self.time_step, self.skip)
        )
        x = inputs.unflatten(3, (heads, -1))
        steps = F.softplus(steps.float() + bias)
        initial_state = None
        if states is not None:
            initial_state = states[1].unflatten(1, (groups, heads))
        if len(x) == 1 and initial_state is not None:
            step_function = step if kernels is None else kernels.step
            out, final_state = step_function(x, steps, -decay.exp(), b, c, initial_state)
        else:
            scan_function: Callable[..., tuple[Tensor, Tensor]]
            scan_function = partial(scan, chunk=plan.chunk) if kernels is None else kernels.scan
            scan_inputs = b, c, initial_state, documents
            if self.recompute and torch.is_grad_enabled():
                out, final_state = checkpoint(
                    scan_function, x, steps, -decay.exp(), *scan_inputs, use_reentrant=False
                )
            else:
                out, final_state = scan_function(x, steps, -decay.exp(), *scan_inputs)
        new_states = (conv_state, final_state.flatten(1, 2))
        weight = None
        if self.norm is not None:
            weight = self.norm[part(len(self.norm))].view(groups, inner)
        if weight is not None and kernels is not None and len(x) > 1:
            # One pass over memory for the sum, and one for gate and normalization.
            out = torch.addcmul(out, x, skip.to(x.dtype).unsqueeze(-1)).flatten(3)
            out = kernels.gated_norm(out, gate, weight, plan.epsilon, gate_first=True)
            return out, new_states
        out = (out.float() + x * skip.unsqueeze(-1)).flatten(3) * F.silu(gate.float())
        if weight is not None:
            out = out * (out.square().mean(3, keepdim=True) + plan.epsilon).rsqrt()
            out = out * weight.float()
        return out.to(projected.dtype), new_states


class AttentionWithMamba(SelfAttention):
    """Self-attention and Mamba-2 that read the same input, and the weighted sum of their outputs.

    The linear layers have no biases, so `bias_to_add` is `None`.

    Args:
        plan: The plan of both mixers.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: ParallelMambaPlan, context: BuildContext) -> None:
        """Build both mixers."""
        super().__init__(plan, context)
        self.mamba = Mamba(plan.mamba, context)
        self.output_factors = plan.attention_factor, plan.mamba_factor
        self.fused_amaxes = NO_FUSED_AMAXES

    @staticmethod
    def matrices(plan: ParallelMambaPlan, split: WeightSplit) -> list[tuple[int, int]]:  # type: ignore[override]
        """Return (outputs, inputs) of each weight matrix on one process."""
        return SelfAttention.matrices(plan, split) + Mamba.matrices(plan.mamba, split)

    @staticmethod
    def vectors(plan: ParallelMambaPlan, split: WeightSplit) -> int:  # type: ignore[override]
        """Count the parameters on one process that are not in `matrices`."""
        return SelfAttention.vectors(plan, split) + Mamba.vectors(plan.mamba, split)

    @staticmethod
    def flops(plan: ParallelMambaPlan, length: int, encoder_length: int) -> Flops:  # type: ignore[override]
        """Count the FLOPs of both mixers."""
        products, scores = SelfAttention.flops(plan, length, encoder_length)
        mamba_flops = Mamba.flops(plan.mamba, length, encoder_length)
        return Flops(products + mamba_flops.products, scores + mamba_flops.scores)

    @staticmethod
    def activation_bytes(plan: ParallelMambaPlan, batch: MicroBatch) -> int:  # type: ignore[override]
        """Count the bytes that both mixers keep for the backward pass."""
        mamba_bytes = Mamba.activation_bytes(plan.mamba, batch)
        return SelfAttention.activation_bytes(plan, batch) + mamba_bytes

    def forward(
        self,
        x: Tensor,
        mask: Mask | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return the scaled sum of both mixers' outputs; see `SelfAttention.forward` for shapes."""
        attention_factor, mamba_factor = self.output_factors
        attended = super().forward(x, mask, rotation, cache)
        return attended * attention_factor + self.mamba(x, mask, rotation, cache) * mamba_factor


def step(
    x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance each sequence by a single token, with the same recurrence as `scan`.

    Elementwise products and sums, instead of matrix products, give each sequence the same result in
    any batch.

    Args:
        x: Inputs, [1, b, g, r, p].
        steps: Time steps, [1, b, g, r].
        rates: Negative decay rates, [g, r].
        b: Vectors B, [1, b, g, n].
        c: Vectors C, [1, b, g, n].
        state: States before the token, [b, g, r, p, n].

    Returns:
        The outputs [1, b, g, r, p] and the states after the token.
    """
    x, steps, b, c = x[0], steps[0], b[0][:, :, None, None], c[0][:, :, None, None]
    state = state * (steps * rates).exp()[..., None, None] + (x * steps[..., None])[..., None] * b
    return (state * c).sum(4).unsqueeze(0), state


def scan(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None,
    documents: Tensor | None,
    *,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence state = exp(step * rate) * state + step * outer(x, B); output = state @ C.

    Args:
        x: Inputs, fp32 [s, b, g, r, p].
        steps: Time steps, fp32 [s, b, g, r].
        rates: Negative decay rates, fp32 [g, r].
        b: Vectors B, fp32 [s, b, g, n].
        c: Vectors C, fp32 [s, b, g, n].
        state: States before the first token, fp32 [b, g, r, p, n]; `None` means zeros.
        documents: The index of each token's document, [s, b]. States start at zero in each
            document. `None` for a single document.
        chunk: Number of tokens that are computed together.

    Returns:
        The outputs, fp32 [s, b, g, r, p], and the states after the last token.
    """
    length = len(x)
    chunk = min(chunk, length)
    x, steps, b, c = (_chunks(part, chunk) for part in (x, steps, b, c))
    masks = None if documents is None else _DocumentMasks(documents, chunk)
    log_decay = (steps * rates).cumsum(1)  # logarithm of the decay since the chunk's start
    weighted = x * steps.unsqueeze(-1)

    # Pairs of tokens within a chunk: [c, b, g, r, l, l].
    # The logarithm of the decay from token m to token l is the sum of the terms after m, up to l.
    # The difference of two sums from the chunk's start would be less accurate.
    pairs = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    terms = (steps * rates).movedim(1, 4).unsqueeze(5).expand(*[-1] * 5, chunk)
    logarithms = terms.masked_fill(~pairs.tril(-1), 0).cumsum(4)
    if masks is not None:
        pairs = pairs & masks.same[:, :, None, None]
    decay = logarithms.masked_fill(~pairs, -math.inf).exp()
    scores = torch.einsum("clbgn,cmbgn->cbglm", c, b).unsqueeze(3)
    out = torch.einsum("cbgrlm,cmbgrp->clbgrp", scores * decay, weighted)

    # The update of the state by each chunk, and the decay of the previous state.
    decay_to_end = (log_decay[:, -1:] - log_decay).exp()
    chunk_decay, decay_from_start = log_decay[:, -1].exp(), log_decay.exp()
    if masks is not None:
        decay_to_end, decay_from_start = (
            decay_to_end * masks.reaches_end,
            decay_from_start * masks.reaches_start,
        )
        chunk_decay = chunk_decay * masks.reaches_through
    chunk_updates = torch.einsum("cmbgrp,cmbgn->cbgrpn", weighted * decay_to_end.unsqueeze(-1), b)
    state = torch.zeros_like(chunk_updates[0]) if state is None else state
    initial_states = []
    for state_decay, update in zip(
        chunk_decay[..., None, None].unbind(), chunk_updates.unbind(), strict=True
    ):
        initial_states.append(state)
        state = state * state_decay + update
    from_states = torch.einsum("clbgn,cbgrpn->clbgrp", c, torch.stack(initial_states))
    return (out + from_states * decay_from_start.unsqueeze(-1)).flatten(0, 1)[:length], state


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Reshape [s, ...] to [c, l, ...], padding the end with zeros, which change no state."""
    padding = -len(x) % chunk
    if padding:
        x = F.pad(x, (*[0, 0] * (x.dim() - 1), 0, padding))
    return x.unflatten(0, (-1, chunk))


class _DocumentMasks:
    """Masks that say which tokens of a chunk are in the same document.

    Attributes:
        same: Pairs of tokens within a chunk, bool [c, b, l, l].
        reaches_end: Whether a token's document is that of the chunk's last token, [c, l, b, 1, 1].
        reaches_start: Whether a token's document began before the chunk, [c, l, b, 1, 1].
        reaches_through: Whether a document fills the chunk and began before it, [c, b, 1, 1].
    """

    def __init__(self, documents: Tensor, chunk: int) -> None:
        """Compare the tokens' document indices, [s, b]."""
        padding = -len(documents) % chunk
        if padding:
            documents = torch.cat((documents, documents[-1:].expand(padding, -1)))
        indices = documents.unflatten(0, (-1, chunk))  # [c, l, b]
        by_sample = indices.transpose(1, 2)
        self.same = by_sample.unsqueeze(3) == by_sample.unsqueeze(2)
        last = indices[:, -1:]
        previous = F.pad(last[:-1], (0, 0, 0, 0, 1, 0), value=-1)
        self.reaches_end = (indices == last)[..., None, None]
        self.reaches_start = (indices == previous)[..., None, None]
        self.reaches_through = (last == previous)[:, 0, :, None, None]
