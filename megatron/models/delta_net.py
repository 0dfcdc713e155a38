"""The gated delta net (Yang et al., 2024, arXiv:2412.06464), as in Qwen3-Next.

Every head keeps a matrix that maps keys to values. Each token decays the matrix, replaces the value
that the matrix returns for the token's key, and reads the matrix with the token's query. The size
of the matrix does not grow with the sequence.

Shapes: s sequence, b micro-batch, h hidden, m key heads, n value heads, e key channels, d value
channels, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.kernels.delta_rule import chunked_delta_rule, delta_rule_step
from megatron.models.costs import Flops, MicroBatch, WeightSplit
from megatron.models.norm import Norm, Stream, outer_amaxes, output_projection
from megatron.models.plan import NormPlan
from megatron.models.recurrence import CausalConvolution, RecurrentMixer, local_slice
from megatron.models.recurrent_plan import GatedDeltaNetPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear, Projections
from megatron.parallel.layout import Axis
from megatron.parallel.parameter import ONES, Init

# The logarithm of a head's decay is minus its rate times the softplus of a projection of the token.
# This is the range of initial rates.
_DECAY = (1.0, 16.0)
_FP32 = 4  # bytes


class GatedDeltaNet(RecurrentMixer):
    """Input projection, causal convolution, gated delta rule, gated norm and output projection.

    The rows of the input projection are ordered by key head: the query, the key, and the values,
    gates, rates and decays of the value heads that share this key. Channels of the convolution
    (queries, keys and values) are also ordered by key head.

    Args:
        plan: The plan of this layer.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: GatedDeltaNetPlan, context: BuildContext) -> None:
        """Allocate the projections, the convolution and the parameters of the heads."""
        super().__init__(context, group=sum(plan.widths) // plan.key_heads)
        self.plan, self.recompute = plan, "core_attn" in context.recomputed
        *wide, rates, decays = plan.widths
        self.input = Linear(
            plan.hidden,
            sum(plan.widths),
            context,
            split="column",
            init=plan.init.weight(plan.hidden, sum(plan.widths)),
            bias=False,
            projections=Projections(
                ("query", "key", "value", "gate", "rate", "decay"), plan.widths, plan.key_heads
            ),
            adapted_as=Projections(("qkvz", "ba"), (sum(wide), rates + decays), plan.key_heads),
        )
        self.convolution = CausalConvolution(plan.convolved, plan.convolution, context, bias=False)
        of_heads = partial(context.new_parameter, (plan.value_heads,), split_dim=0)
        self.decay = of_heads(init=Init("log_uniform", *_DECAY))
        self.time_step = of_heads(init=ONES)
        # Each rank normalizes its own heads.
        is_split = context.layout.tensor.size > 1
        self.norm = Norm(
            NormPlan("RMSNorm", plan.epsilon), plan.value_size, context, partial_gradient=is_split
        )
        self.output = output_projection(plan, plan.values, context)
        self.fused_amaxes = outer_amaxes(self.input, self.output)

    @staticmethod
    def matrices(plan: GatedDeltaNetPlan, split: WeightSplit) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each weight matrix on one process."""
        tensor = split.tensor
        return [(sum(plan.widths) // tensor, plan.hidden), (plan.hidden, plan.values // tensor)]

    @staticmethod
    def vectors(plan: GatedDeltaNetPlan, split: WeightSplit) -> int:
        """Count the parameters of the convolution, heads and normalization on one process."""
        count = plan.convolved * plan.convolution + 2 * plan.value_heads
        return count // split.tensor + plan.value_size

    @staticmethod
    def flops(plan: GatedDeltaNetPlan, length: int, encoder_length: int) -> Flops:
        """Count the FLOPs of the projections, and of the delta rule in chunks."""
        shapes = GatedDeltaNet.matrices(plan, WeightSplit())
        products = 6 * length * sum(outputs * inputs for outputs, inputs in shapes)
        keys, values, chunk = plan.key_size, plan.value_size, min(plan.chunk, length)
        # For each token: its row of the triangular system and of the scores, and three products
        # with the state.
        head = chunk * (keys + values) + 2 * chunk * values + 6 * keys * values
        token = plan.value_heads * head + plan.key_heads * 4 * chunk * keys
        return Flops(products, 3 * length * (token + 2 * plan.convolved * plan.convolution))

    @staticmethod
    def activation_bytes(plan: GatedDeltaNetPlan, batch: MicroBatch) -> int:
        """Count the bytes that projections, convolution and delta rule keep, mostly in fp32."""
        fp32_elements = 0
        if "core_attn" not in batch.recomputed:
            keys, values, chunk = plan.key_size, plan.value_size, min(plan.chunk, batch.length)
            # For each value head: three tensors of decays and the scores; two scalings of the key;
            # both sides of the triangular system; updates; a state for each chunk; four tensors of
            # the gated normalization; scalars. For each key head: products of queries and keys,
            # three tensors each of queries and keys, and their lengths.
            head = 4 * chunk + 2 * keys + 2 * (keys + values) + values + keys * values / chunk
            head += 4 * values + 5
            fp32_elements = int(plan.value_heads * head)
            fp32_elements += plan.key_heads * (2 * chunk + 6 * keys + 2)
            # Inputs and results of the convolution and of its SiLU.
            fp32_elements += 3 * plan.convolved
        projected = batch.width * (sum(plan.widths) + plan.values)
        return batch.tokens * (projected + _FP32 * fp32_elements) // batch.tensor

    def mix(
        self,
        projected: Tensor,
        states: tuple[Tensor, ...] | None,
        documents: Tensor | None,
        axis: Axis,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute everything between the projections, which the backward pass may recompute."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._mix, projected, states, documents, axis, use_reentrant=False)
        return self._mix(projected, states, documents, axis)

    def _mix(
        self,
        projected: Tensor,
        states: tuple[Tensor, ...] | None,
        documents: Tensor | None,
        axis: Axis,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute everything between the two projections for this rank's heads.

        Args:
            projected: [s, b, m, (query, key, values, gates, rates and decays of a key head)].
            states: The last inputs of the convolution and the matrices of the heads; `None` means
                zeros.
            documents: The index of each token's document, [s, b]; `None` for a single document.
            axis: The context ranks, which divide the heads of a tensor rank; a single rank in
                inference.

        Returns:
            The normalized outputs [s, b, m, (n / m) d] in the dtype of `projected`, and new states.
        """
        plan, heads = self.plan, projected.shape[2]
        keys, _, values, _, values_per_key, _ = (width // plan.key_heads for width in plan.widths)
        channels, gate, rate, decay = projected.split(
            (2 * keys + values, values, values_per_key, values_per_key), dim=3
        )
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
        query, key, value = convolved.unflatten(2, (heads, -1)).split((keys, keys, values), dim=3)
        value = value.unflatten(3, (values_per_key, -1)).flatten(2, 3)  # [s, b, n, d]
        of_heads = part(len(self.decay))
        log_rate, bias = (vector[of_heads].float() for vector in (self.decay, self.time_step))
        decay = -log_rate.exp() * F.softplus(decay.flatten(2).float() + bias)
        inputs = (query, key, value, decay, rate.flatten(2).float().sigmoid())
        matrices = None if states is None else states[1]
        if len(projected) == 1 and matrices is not None:
            step = delta_rule_step if kernels is None else kernels.delta_rule_step
            out, matrices = step(*inputs, state=matrices)
        else:
            rule: Callable[..., tuple[Tensor, Tensor]]
            rule = partial(chunked_delta_rule, chunk=plan.chunk)
            if kernels is not None:
                rule = kernels.delta_rule
            out, matrices = rule(*inputs, documents=documents, state=matrices)
        if kernels is not None and len(projected) > 1:
            gate = gate.reshape(out.shape)
            out = kernels.gated_norm(out, gate, self.norm.weight, plan.epsilon, gate_first=False)
            return out.unflatten(2, (heads, -1)).flatten(3), (conv_state, matrices)
        _, normal = self.norm(Stream(out))
        gated = normal.view_as(out).float().unflatten(2, (heads, -1)).flatten(3)
        gated = gated * F.silu(gate.float())
        return gated.to(projected.dtype), (conv_state, matrices)
