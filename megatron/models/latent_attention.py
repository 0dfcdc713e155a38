"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

Each token has a short latent vector, from which the keys and values of all heads are computed, and
a rotary key that all heads share. Queries may come from a second latent vector.

Text generation caches the latent vector and the rotary key. When one token is added to a sequence,
the token's queries are multiplied by the matrix that computes keys, and attend to the latent
vectors; the result is multiplied by the matrix that computes values. Keys and values are never
computed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.rope import Rotation
from megatron.kernels.segments import Mask
from megatron.models.attention import (
    AttentionCore,
    KeyValueCache,
    count_sinks,
    new_sinks,
    score_bytes,
)
from megatron.models.costs import Flops, MicroBatch, WeightSplit
from megatron.models.norm import Norm, Stream, new_norm, output_projection
from megatron.models.plan import LatentAttentionPlan
from megatron.models.recompute import checkpointed, discarding_outputs
from megatron.parallel.adapter import WHOLE, Adapter
from megatron.parallel.adapter_stack import AdapterStack, TokenAdapters
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import copy_to, gather_rows_to
from megatron.parallel.layers import Linear, Projections, Split


class LatentAttention(nn.Module):
    """Projections to latent vectors and on to heads, the attention core, and the output projection.

    Every tensor rank computes all latent vectors (with sequence parallelism, those of its part of
    the sequence), and from them its own heads. Rows of the key-value weight are ordered by head:
    the head's key without rotary channels, then its value. The channels of a query that never
    rotate come before those that do.

    Args:
        plan: The plan of this layer.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: LatentAttentionPlan, context: BuildContext) -> None:
        """Allocate the projections and the normalizations of latent vectors."""
        super().__init__()
        self.plan, self.layout, self.rank = plan, context.layout, plan.rank
        self.rotate = context.kernels.rotate
        self.query_down = self.query_norm = self.latent_norm = None
        if plan.query_rank is not None:
            self.query_down = _linear(plan, context, plan.hidden, plan.query_rank, None)
        self.query_up = _linear(
            plan, context, plan.query_rank or plan.hidden, plan.heads * plan.key_size, "column"
        )
        self.latent_down = _linear(plan, context, plan.hidden, plan.rank + plan.rope_size, None)
        widths = (plan.heads * plan.nope_size, plan.heads * plan.value_size)
        self.latent_up = _linear(
            plan,
            context,
            plan.rank,
            sum(widths),
            "column",
            Projections(("key", "value"), widths, plan.heads),
            adapted_as=Projections((WHOLE,), (sum(widths),), plan.heads),
        )
        if plan.qk_norm is not None:
            if plan.query_rank is not None:
                self.query_norm = new_norm(plan.qk_norm, plan.query_rank, context)
            self.latent_norm = new_norm(plan.qk_norm, plan.rank, context)
        # A recomputed core must keep its inputs. Recomputed heads are not kept, so they are then
        # recomputed together with the core.
        self.recomputes_heads = "mla_up_proj" in context.recomputed
        self.recomputes_core = self.recomputes_heads and "core_attn" in context.recomputed
        parts = context.recomputed - {"core_attn"} if self.recomputes_core else context.recomputed
        self.core = AttentionCore(plan, replace(context, recomputed=parts), site="attention")
        self.output = output_projection(plan, plan.heads * plan.value_size, context)
        self.sinks = new_sinks(plan, context)
        self.offloading_input = context.offloading("qkv_linear")
        self.offloading_output = context.offloading("attn_proj")

    @staticmethod
    def matrices(plan: LatentAttentionPlan, split: WeightSplit) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each weight matrix on one process."""
        heads, down = plan.heads // split.tensor, []
        if plan.query_rank is not None:
            down = [(plan.query_rank, plan.hidden)]
        return [
            *down,
            (heads * plan.key_size, plan.query_rank or plan.hidden),
            (plan.rank + plan.rope_size, plan.hidden),
            (heads * (plan.nope_size + plan.value_size), plan.rank),
            (plan.hidden, heads * plan.value_size),
        ]

    @staticmethod
    def vectors(plan: LatentAttentionPlan, split: WeightSplit) -> int:
        """Count the parameters of the bias, normalizations and sinks on one process."""
        count = (plan.hidden if plan.bias else 0) + count_sinks(plan, split)
        if plan.qk_norm is not None:
            sizes = (plan.query_rank, plan.rank)
            count += sum(Norm.parameter_count(plan.qk_norm, size) for size in sizes if size)
        return count

    @staticmethod
    def flops(plan: LatentAttentionPlan, length: int, encoder_length: int) -> Flops:
        """Count the FLOPs. A causal mask halves the scores; a window reduces them further."""
        shapes = LatentAttention.matrices(plan, WeightSplit())
        products = 6 * length * sum(outputs * inputs for outputs, inputs in shapes)
        width = plan.heads * (plan.key_size + plan.value_size)
        return Flops(products, (3 if plan.causal else 6) * plan.pairs(length) * width)

    @staticmethod
    def share_of_heads(plan: LatentAttentionPlan) -> float:
        """Return the share of `query_up` and `latent_up` in the FLOPs of all projections."""
        sizes = [a * b for a, b in LatentAttention.matrices(plan, WeightSplit())]
        *_, query_up, _, latent_up, _ = sizes
        return (query_up + latent_up) / sum(sizes)

    @staticmethod
    def activation_bytes(plan: LatentAttentionPlan, batch: MicroBatch) -> int:
        """Count the bytes of latent vectors, heads and output, and of the scores if kept."""
        latent = plan.rank + plan.rope_size + (plan.query_rank or 0)
        if plan.qk_norm is not None:  # input and result of the norms
            latent += plan.rank + (plan.query_rank or 0)
        # The core's query, key, value and output, and the parts they are assembled from.
        heads = 4 * plan.head_size + 2 * plan.key_size + plan.value_size
        if "mla_up_proj" in batch.recomputed:
            heads = plan.head_size + plan.value_size
        elements = latent // batch.sequence + plan.heads * heads // batch.tensor
        return batch.width * batch.tokens * elements + score_bytes(plan, batch, batch.length)

    def forward(
        self,
        x: Tensor,
        mask: Mask | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend from each token to the tokens of its sequence, or to the cache.

        Args:
            x: [s, b, h]; [s/t, b, h] with sequence parallelism.
            mask: Which keys a query may attend to (`AttentionOptions`).
            rotation: Rotation of the rotary channels.
            cache: The vectors of earlier tokens, in inference.

        Returns:
            The output in the shape of x; the caller adds `bias_to_add`.
        """
        plan = self.plan
        rotation = None if plan.rotary is None else rotation
        with self.offloading_input():
            source, (latent, rope_key) = self._query_source(x), self._latent(x, rotation)
            if self.recomputes_heads and torch.is_grad_enabled():
                context = self._without_heads((source, latent, rope_key), rotation, mask)
                return self._projected(context)
            query = self._query(source, rotation)
        if cache is not None:
            options = self.core.options(None, self.sinks)
            options = options._replace(scale=plan.scale or plan.head_size**-0.5)
            vectors = torch.cat((latent, rope_key.squeeze(2)), dim=2)
            context = cache.attend_latent(query, vectors, self, options)
        else:
            context = self.core(query, *self._heads(latent, rope_key), mask, self.sinks)
        return self._projected(context)

    def expanded(self, latent: Tensor, tokens: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values [l, n/t, d] of cached vectors [l, rank + rope].

        Args:
            latent: The cached vectors.
            tokens: A function that returns, for each vector, the index of a new token of the same
                sequence, int64 [l].
        """
        vector, rope_key = latent.unsqueeze(1).split((self.plan.rank, self.plan.rope_size), dim=2)
        stack = self.latent_up.adapter
        with stack.reading(tokens) if isinstance(stack, AdapterStack) else nullcontext():
            key, value = self._heads(vector, rope_key.unsqueeze(2))
        return key.squeeze(1), value.squeeze(1)

    def absorbed(self, query: Tensor) -> Tensor:
        """Map queries so that their products with cached vectors equal their products with keys.

        Args:
            query: Queries of the first s tokens of the step, [s, n/t, d].

        Returns:
            The mapped queries, [s, n/t, rank + rope].
        """
        nope, rope, _ = query.tensor_split((self.plan.nope_size, self.plan.key_size), dim=2)
        factors = self._adapter_factors(len(query))
        if factors is not None and factors.ratios is not None:
            nope = nope * self._by_head(factors.ratios, dim=1)[0]
        to_key, _ = self._by_head(self._merged_weight())  # [n/t, nope, rank]
        absorbed = torch.bmm(nope.transpose(0, 1), to_key)  # [n/t, s, rank]
        if factors is not None:
            up, _ = self._by_head(factors.b)  # [n/t, nope, ranks]
            low_rank = torch.bmm(nope.transpose(0, 1), up) * factors.mask
            absorbed = absorbed + low_rank @ factors.a
        return torch.cat((absorbed.transpose(0, 1), rope), dim=2)

    def values(self, mixed: Tensor) -> Tensor:
        """Map weighted sums of latent vectors to weighted sums of values.

        Args:
            mixed: Sums of vectors for the first s tokens of the step, [s, n/t, rank].

        Returns:
            The sums of values, [s, n/t, d].
        """
        _, to_value = self._by_head(self._merged_weight())  # [n/t, value_size, rank]
        by_head = mixed.transpose(0, 1)
        out = torch.bmm(by_head, to_value.transpose(1, 2))  # [n/t, s, value_size]
        factors = self._adapter_factors(len(mixed))
        if factors is not None:
            _, up = self._by_head(factors.b)  # [n/t, value_size, ranks]
            low_rank = (by_head @ factors.a.t()) * factors.mask
            out = out + torch.bmm(low_rank, up.transpose(1, 2))
        out = out.transpose(0, 1)
        if factors is not None and factors.ratios is not None:
            out = out * self._by_head(factors.ratios, dim=1)[1]
        return self._padded(out)

    @property
    def bias_to_add(self) -> Tensor | None:
        """Bias [h] to be added in the residual sum; `None` if there is none."""
        return self.output.bias_to_add

    def _heads(self, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's keys and values [s, b, n/t, d].

        Args:
            latent: [s, b, rank], or this rank's part with sequence parallelism.
            rope_key: The rotary keys of all tokens, [s, b, 1, rope].
        """
        key_value = self.latent_up(latent).unflatten(
            2, (-1, self.plan.nope_size + self.plan.value_size)
        )
        nope, value = key_value.split((self.plan.nope_size, self.plan.value_size), dim=3)
        key = torch.cat((nope, rope_key.expand(-1, -1, nope.shape[2], -1)), dim=3)
        return self._padded(key), self._padded(value)

    def _without_heads(
        self,
        sources: tuple[Tensor, Tensor, Tensor],
        rotation: Rotation | None,
        mask: Mask | None,
    ) -> Tensor:
        """Run the core so that the backward pass recomputes its queries, keys and values.

        Args:
            sources: The input of `query_up`, the latent vectors and the rotary keys.
            rotation: Rotation of the rotary channels.
            mask: Which keys a query may attend to.
        """

        def heads(source: Tensor, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, ...]:
            return self._query(source, rotation), *self._heads(latent, rope_key)

        if self.recomputes_core:
            return checkpointed(lambda *kept: self.core(*heads(*kept), mask, self.sinks), *sources)
        results, kept = heads(*sources), [source.detach() for source in sources]
        with discarding_outputs(results, lambda: heads(*kept)):
            out: Tensor = self.core(*results, mask, self.sinks)
        return out

    def _projected(self, context: Tensor) -> Tensor:
        """Return the output projection of the core's result, whose heads may be padded."""
        values = context.unflatten(2, (-1, self.plan.head_size))[..., : self.plan.value_size]
        with self.offloading_output():
            out: Tensor = self.output(values.flatten(2))
        return out

    def _merged_weight(self) -> Tensor:
        """Return the matrix that computes keys and values, with a single adapter merged into it."""
        weight, adapter = self.latent_up.weight, self.latent_up.adapter
        return adapter.merged(weight).to(weight.dtype) if isinstance(adapter, Adapter) else weight

    def _adapter_factors(self, tokens: int) -> TokenAdapters | None:
        """Return the adapter factors of the step's first tokens; `None` if they use no adapter."""
        stack = self.latent_up.adapter
        return stack.for_tokens(tokens) if isinstance(stack, AdapterStack) else None

    def _by_head(self, rows: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
        """Split a dimension, laid out like the rows of `latent_up`, into keys and values by head.

        Returns:
            The keys and the values. In place of the dimension, they have the dimensions [n/t, nope]
            and [n/t, value_size].
        """
        sizes = self.plan.nope_size, self.plan.value_size
        keys, values = rows.unflatten(dim, (-1, sum(sizes))).split(sizes, dim + 1)
        return keys, values

    def _padded(self, heads: Tensor) -> Tensor:
        """Pad heads to `head_size` with zeros, which change neither scores nor other channels."""
        padding = self.plan.head_size - heads.shape[-1]
        return F.pad(heads, (0, padding)) if padding else heads

    def _query_source(self, x: Tensor) -> Tensor:
        """Return the input of `query_up`: the normalized latent vectors of queries, or `x`."""
        if self.query_down is not None:
            x = self.query_down(x)
        if self.query_norm is not None:
            _, x = self.query_norm(Stream(x))
        return x

    def _query(self, source: Tensor, rotation: Rotation | None) -> Tensor:
        """Return this rank's scaled queries [s, b, n/t, d]."""
        plan = self.plan
        query = self.query_up(source).unflatten(2, (-1, plan.key_size))
        if rotation is not None:
            nope, rope = query.split((plan.nope_size, plan.rope_size), dim=3)
            query = torch.cat((nope, self.rotate(rope, rotation)), dim=3)
        return self._padded(query * plan.query_scale if plan.query_scale != 1 else query)

    def _latent(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Return latent vectors [s, b, rank], or this rank's part of them, and the shared keys.

        The keys cover all tokens, [s, b, 1, rope], and are already rotated.
        """
        latent, rope_key = self.latent_down(x).split((self.plan.rank, self.plan.rope_size), dim=2)
        if self.latent_norm is not None:
            _, latent = self.latent_norm(Stream(latent))
        # The gradient of these keys is the sum of the contributions of all ranks' heads.
        collect = gather_rows_to if self.layout.sequence_parallel else copy_to
        rope_key = collect(rope_key.contiguous(), self.layout.tensor).unsqueeze(2)
        return latent, rope_key if rotation is None else self.rotate(rope_key, rotation)


def _linear(
    plan: LatentAttentionPlan,
    context: BuildContext,
    inputs: int,
    outputs: int,
    split: Split | None,
    projections: Projections | None = None,
    adapted_as: Projections | None = None,
) -> Linear:
    """Build a projection without a bias."""
    init = plan.init.weight(inputs, outputs)
    return Linear(
        inputs,
        outputs,
        context,
        split=split,
        init=init,
        bias=False,
        projections=projections,
        adapted_as=adapted_as,
    )
