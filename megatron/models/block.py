"""Transformer layers: one `Block` for each `LayerPlan`, and the stack that runs them.

Each mixer and each MLP is a class, registered in `MIXERS` or `MLPS` under the `kind` of its plan.
The class also states its costs: `matrices`, `vectors`, `flops` and `activation_bytes` are functions
of the plan, so counting needs no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.kernels.amax import NO_FUSED_AMAXES
from megatron.kernels.rope import Rotation
from megatron.kernels.segments import Mask
from megatron.models.attention import CrossAttention, EncoderOutput, KeyValueCache, SelfAttention
from megatron.models.costs import Flops, MicroBatch, WeightSplit
from megatron.models.delta_net import GatedDeltaNet
from megatron.models.latent_attention import LatentAttention
from megatron.models.mamba import AttentionWithMamba, Mamba
from megatron.models.mixture import Mixture
from megatron.models.mlp import MLP
from megatron.models.norm import Joining, Norm, Stream, new_norm
from megatron.models.plan import LayerPlan, SublayerPlan, rotaries
from megatron.models.recompute import (
    RecomputePlan,
    checkpointed,
    discarding_output,
    layer_groups,
    recompute,
)
from megatron.models.retrieval import (
    ChunkedCrossAttention,
    NeighborCrossAttention,
    Neighbors,
)
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Axis
from megatron.parallel.random import split_region


class Sublayer(Protocol):
    """The costs that the class of a mixer or an MLP computes from its plan alone."""

    def matrices(self, plan: Any, split: WeightSplit, /) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each weight matrix on one process.

        Args:
            plan: The sublayer's plan.
            split: The numbers of processes over which weights are split.
        """
        ...

    def vectors(self, plan: Any, split: WeightSplit, /) -> int:
        """Count the parameters on one process that are not in `matrices`.

        Args:
            plan: The sublayer's plan.
            split: The numbers of processes over which weights are split.
        """
        ...

    def flops(self, plan: Any, length: int, encoder_length: int, /) -> Flops:
        """Count the FLOPs of the forward and backward passes for one sample.

        Args:
            plan: The sublayer's plan.
            length: Number of tokens in the sequence.
            encoder_length: Number of tokens in the encoder output that a decoder layer attends to.
        """
        ...

    def activation_bytes(self, plan: Any, batch: MicroBatch, /) -> int:
        """Count the bytes kept on one process for the backward pass of a micro-batch.

        Args:
            plan: The sublayer's plan.
            batch: The micro-batch.
        """
        ...


# A mixer is constructed with (plan, context) and called with (x, mask, rotation, cache), or for
# cross-attention with (x, encoder). The residual sum adds its `bias_to_add`. If it has
# `fused_amaxes`, the normalizations before and after it store the amaxes of x and of the result's
# gradient there.
MIXERS: dict[str, Any] = {
    "attention": SelfAttention,
    "latent_attention": LatentAttention,
    "cross_attention": CrossAttention,
    "chunked_cross_attention": ChunkedCrossAttention,
    "neighbor_cross_attention": NeighborCrossAttention,
    "mamba": Mamba,
    "parallel_mamba": AttentionWithMamba,
    "gated_delta_net": GatedDeltaNet,
}
# An MLP is called with x. Otherwise it is like a mixer.
MLPS: dict[str, Any] = {"dense": MLP, "mixture": Mixture}
# The name of each kind of MLP in --recompute-modules.
_RECOMPUTE_NAMES = {"dense": "mlp", "mixture": "moe"}


def class_of(plan: SublayerPlan) -> Sublayer:
    """Return the class that implements a mixer or an MLP."""
    tables: Mapping[str, Sublayer] = {**MIXERS, **MLPS}
    return tables[plan.kind]


class Block(nn.Module):
    """A layer: a mixer, then an MLP, each with a normalization before it, after it or both.

    A layer of a hybrid model has either a mixer or an MLP.

    A decoder layer has a third sublayer between mixer and MLP: cross-attention to an encoder's
    output, or to Retro's neighbors. The first layer that reads neighbors also contains their
    encoder.

    A normalization after a sublayer applies to the sublayer's output, before the residual is added.
    The residual of a sublayer is its input, or its normalized input with
    --apply-residual-connection-post-layernorm. With dropout, the dropout kernel adds the sublayer's
    output to the residual. Without dropout, the next normalization does (see `Stream`). An fp32
    residual stream stays fp32: 16-bit outputs are added to it. With sequence parallelism,
    everything except the split layers runs on this rank's part of the sequence.

    Args:
        plan: The plan of the layer.
        context: Layout, device, kernels and number formats.
        layer_number: Index of the layer in the model, from 1.
    """

    def __init__(self, plan: LayerPlan, context: BuildContext, layer_number: int) -> None:
        """Build the sublayers and their normalizations."""
        super().__init__()
        context = context.for_layer(layer_number)
        self.residual_after_norm, self.is_parallel = plan.residual_after_norm, plan.parallel
        self.dropout = plan.dropout
        self.bias_dropout_add = context.kernels.bias_dropout_add
        self.sequence = context.layout.sequence
        self.layer_number = layer_number
        self.attention = None
        if plan.mixer is not None:
            self.attention_norm, self.attention_output_norm = _new_norms(plan, context)
            self.attention = MIXERS[plan.mixer.kind](plan.mixer, context)
        self.cross_norm = self.cross_attention = None
        if plan.cross_attention is not None:
            self.cross_norm = new_norm(plan.norm, plan.hidden, context)
            mixer = MIXERS[plan.cross_attention.kind]
            self.cross_attention = mixer(plan.cross_attention, context)
        self.retriever = None
        if plan.retriever is not None:
            layers, layer_offset = plan.retriever.layers, plan.retriever.layer_offset
            self.retriever = LayerStack(
                layers, context.within_rank(), range(len(layers)), layer_offset=layer_offset
            )
        self.mlp = None
        kind = "" if plan.mlp is None else plan.mlp.kind
        self.recomputes_mlp = _RECOMPUTE_NAMES.get(kind) in context.recomputed
        if plan.mlp is not None:
            self.mlp_norm, self.mlp_output_norm = None, None
            if not plan.shares_norm:
                self.mlp_norm, self.mlp_output_norm = _new_norms(plan, context)
            # Parts of a recomputed MLP must not be recomputed separately, because the tensors kept
            # for their recomputation would outlive the MLP's forward pass.
            parts = frozenset() if self.recomputes_mlp else context.recomputed
            self.mlp = MLPS[kind](plan.mlp, replace(context, recomputed=parts))
        self.keeps_norms = "layernorm" not in context.recomputed or not _recomputes_norms(plan)
        self.routers = context.registry.routers
        self.offloading_mlp = context.offloading("mlp") if kind == "dense" else nullcontext
        self.offloading_norm = {
            "attention output": context.offloading("attn_norm"),
            "mlp output": context.offloading("mlp_norm"),
        }
        self.stops_early = not (context.gathers_weights and kind == "mixture")

    @staticmethod
    def matrix_parameters(plan: LayerPlan, split: WeightSplit) -> int:
        """Count the elements of a layer's matrices on one process."""
        count = sum(
            outputs * inputs
            for sublayer in plan.sublayers
            for outputs, inputs in class_of(sublayer).matrices(sublayer, split)
        )
        return count + sum(Block.matrix_parameters(layer, split) for layer in plan.encoding)

    @staticmethod
    def parameter_count(plan: LayerPlan, split: WeightSplit) -> int:
        """Count the parameters that one process holds."""
        norm = Norm.parameter_count(plan.norm, plan.hidden)
        layers = (plan, *plan.encoding)
        sublayers = [sublayer for layer in layers for sublayer in layer.sublayers]
        norms = (plan.norms_input + plan.norms_output) * len(sublayers) - plan.shares_norm
        vectors = (
            sum(class_of(sublayer).vectors(sublayer, split) for sublayer in sublayers)
            + norms * norm
        )
        return Block.matrix_parameters(plan, split) + vectors

    @staticmethod
    def flops(plan: LayerPlan, length: int, encoder_length: int = 0) -> Flops:
        """Count the FLOPs of the forward and backward passes for one sample.

        Args:
            plan: The plan of the layer.
            length: Number of tokens in the sequence.
            encoder_length: Number of tokens in the encoder output that a decoder layer attends to.
        """
        sublayer_flops = [
            class_of(sublayer).flops(sublayer, length, encoder_length)
            for sublayer in plan.sublayers
        ]
        if plan.retriever is not None:
            sizes = plan.retriever.retrieval
            neighbors = length // sizes.chunk * sizes.neighbors
            for layer in plan.encoding:
                products, scores = Block.flops(layer, sizes.retrieved)
                sublayer_flops.append(Flops(neighbors * products, neighbors * scores))
        return Flops(
            sum(flops.products for flops in sublayer_flops),
            sum(flops.scores for flops in sublayer_flops),
        )

    @staticmethod
    def activation_bytes(plan: LayerPlan, batch: MicroBatch) -> int:
        """Count the bytes kept for the backward pass, including those of the normalizations."""
        # Dropout adds one byte for each entry of its mask.
        element_bytes = 2 * batch.width + (1 if plan.dropout > 0 else 0)
        element_bytes += (plan.norms_input + plan.norms_output - 1) * batch.width
        elements = batch.tokens * plan.hidden // batch.sequence
        total = 0
        for sublayer in plan.sublayers:
            if _RECOMPUTE_NAMES.get(sublayer.kind) in batch.recomputed:  # keeps only its input
                total += element_bytes * elements
                continue
            recomputes = "layernorm" in batch.recomputed and _recomputes_norms(plan)
            total += (element_bytes - batch.width * recomputes) * elements
            total += class_of(sublayer).activation_bytes(sublayer, batch)
        if plan.shares_norm:
            total -= batch.width * elements
        if plan.retriever is not None:
            sizes = plan.retriever.retrieval
            neighbors = batch.sequences * (batch.length // sizes.chunk) * sizes.neighbors
            neighbor_batch = replace(batch, sequences=neighbors, length=sizes.retrieved)
            total += sum(Block.activation_bytes(layer, neighbor_batch) for layer in plan.encoding)
        return total

    def forward(
        self,
        stream: Stream,
        mask: Mask | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None = None,
        encoder: EncoderOutput | Neighbors | Tensor | None = None,
    ) -> Stream:
        """Run the layer once.

        Args:
            stream: [s, b, h]; [s/t, b, h] with sequence parallelism.
            mask: Which keys a query of the mixer may attend to (`AttentionOptions`).
            rotation: Rotation of the mixer's queries and keys, if the model has rotary embeddings.
            cache: Keys and values of earlier tokens, in inference.
            encoder: The input of the cross-attention: an encoder's output, Retro's neighbors or, in
                the encoder of neighbors, the sequences' hidden states [s, b, h].

        Returns:
            The stream after the layer, in the shape of `stream`.
        """
        inputs = (mask, rotation, cache)
        if self.is_parallel:
            return self._add_parallel(stream, inputs)
        if self.attention is not None:
            norms = self.attention_norm, self.attention_output_norm
            stream = self._add(stream, norms, self.attention, inputs, "attention output")
        if self.cross_norm is not None:
            assert encoder is not None, "a decoder's layer reads the encoder's output"
            norms, cross = (self.cross_norm, None), self.cross_attention
            cross_inputs = (encoder,) if self.retriever is None else (encoder, self.retriever)
            stream = self._add(stream, norms, cross, cross_inputs, "cross output")
        if self.mlp is not None:
            assert self.mlp_norm is not None, "only parallel layers share their normalization"
            norms = self.mlp_norm, self.mlp_output_norm
            stream = self._add(stream, norms, self.mlp, (), "mlp output")
        return stream

    def _compute(
        self, norm: nn.Module, sublayer: Any, joined: Tensor, normal: Tensor, *inputs: Any
    ) -> Tensor:
        """Return a sublayer's output, parts of which the backward pass may recompute."""
        if not torch.is_grad_enabled():
            return sublayer(normal, *inputs)
        if self.mlp is not None and sublayer is self.mlp and self.recomputes_mlp:
            return checkpointed(
                sublayer,
                normal,
                recompute_context=self.routers.paused,
                stops_early=self.stops_early,
            )
        if self.keeps_norms:
            with self.offloading_mlp() if sublayer is self.mlp else nullcontext():
                return sublayer(normal, *inputs)
        kept = joined.detach()
        with discarding_output(normal, lambda: norm(Stream(kept))[1]):
            return sublayer(normal, *inputs)

    def _add_parallel(self, stream: Stream, inputs: tuple[Any, ...]) -> Stream:
        """Add the outputs of mixer and MLP, which both read the residual, to the residual."""
        assert self.attention is not None, "a rule refuses parallel residuals in hybrid models"
        assert self.mlp is not None, "a rule refuses parallel residuals in hybrid models"
        forward = [
            getattr(x, "fused_amaxes", NO_FUSED_AMAXES).forward for x in (self.attention, self.mlp)
        ]
        with self.offloading_norm["attention output"]():
            joined, normal = self.attention_norm(stream, forward[0])
        mixed = self._compute(self.attention_norm, self.attention, joined, normal, *inputs)
        norm = self.attention_norm if self.mlp_norm is None else self.mlp_norm
        if self.mlp_norm is not None:
            with self.offloading_norm["mlp output"]():
                _, normal = self.mlp_norm(Stream(joined), forward[1])
        updates = {
            "attention output": (mixed, self.attention.bias_to_add),
            "mlp output": (
                self._compute(norm, self.mlp, joined, normal),
                self.mlp.bias_to_add,
            ),
        }
        if not self.training or self.dropout == 0:
            parts = [x if bias is None else x + bias for x, bias in updates.values()]
            return Stream(joined, parts[0] + parts[1])
        for site, (update, bias) in updates.items():
            with split_region(self.sequence, update.device, self.layer_number, site):
                joined = self.bias_dropout_add(update, bias, joined, self.dropout)
        return Stream(joined)

    def _add(
        self,
        stream: Stream,
        norms: tuple[nn.Module, Norm | None],
        sublayer: Any,
        inputs: tuple[Any, ...],
        site: str,
    ) -> Stream:
        """Return residual + dropout(output_norm(sublayer(norm(stream), *inputs) + bias)).

        Without dropout, the sum is left to the next normalization.
        """
        norm, output_norm = norms
        fused_amaxes = getattr(sublayer, "fused_amaxes", NO_FUSED_AMAXES)
        with self.offloading_norm.get(site, nullcontext)():
            joined, normal = norm(stream, fused_amaxes.forward)
        residual = normal if self.residual_after_norm else joined
        update = self._compute(norm, sublayer, joined, normal, *inputs)
        bias, fused_amax = sublayer.bias_to_add, fused_amaxes.backward
        if output_norm is not None:
            _, update = output_norm(Stream(update if bias is None else update + bias))
            bias, fused_amax = None, None  # the next kernel sees the gradient of another tensor
        if not self.training or self.dropout == 0:
            update = update if bias is None else update + bias
            return Stream(residual, update, fused_amax)
        with split_region(self.sequence, update.device, self.layer_number, site):
            return Stream(self.bias_dropout_add(update, bias, residual, self.dropout))


def _new_norms(plan: LayerPlan, context: BuildContext) -> tuple[nn.Module, Norm | None]:
    """Build the normalizations before and after a sublayer, if the plan has them."""
    hidden = plan.hidden
    before = new_norm(plan.norm, hidden, context) if plan.norms_input else Joining(context)
    return before, new_norm(plan.norm, hidden, context) if plan.norms_output else None


def _recomputes_norms(plan: LayerPlan) -> bool:
    """Return whether the results of the normalizations before sublayers can be recomputed."""
    return plan.norms_input and not plan.residual_after_norm


class LayerStack(nn.ModuleDict):
    """Consecutive layers of a stack, keyed by their index in the whole stack.

    It has a method `run` instead of `forward`, so that `parallel.weights` makes each layer wait
    only for its own gathered weights. With a `forward`, the whole stack would wait for all of them.

    Args:
        plans: Plans of all layers of the stack.
        context: Layout, device, kernels and number formats.
        layers: Indices, from 0, of the layers that this process holds.
        layer_offset: Number of the model's layers before this stack, for example those of an
            encoder.
        recompute: Activations to recompute in the backward pass; `None` keeps all of them.
    """

    def __init__(
        self,
        plans: tuple[LayerPlan, ...],
        context: BuildContext,
        layers: range,
        *,
        layer_offset: int = 0,
        recompute: RecomputePlan | None = None,
    ) -> None:
        """Build the layers that this process holds, and decide which are recomputed."""
        super().__init__()
        if recompute is not None:
            context = replace(context, recomputed=recompute.parts)
        for index in layers:
            self[str(index)] = Block(plans[index], context, layer_offset + index + 1)
        kinds = rotaries(plans)
        self.rotaries = {
            index: kinds.index(rotary)
            for index in layers
            if (rotary := plans[index].rotary) is not None
        }
        self.groups = layer_groups(recompute, layers)
        layout = context.layout
        splits = recompute is not None and recompute.split_inputs and layout.sequence.size == 1
        self.saved_input_axis = layout.tensor if splits else Axis()
        self.host_activations = context.host_activations
        self.routers = context.registry.routers
        # Experts gather their own weights, so recomputation must not stop inside their forward
        # pass.
        self.stops_early = not (context.gathers_weights and self.routers.states)

    def run(self, stream: Stream, *inputs: Any) -> Stream:
        """Run the layers and return the stream after them.

        Args:
            stream: The residual stream, [s, b, h]; [s/t, b, h] with sequence parallelism.
            *inputs: Further arguments of each layer. The second one is a tuple of rotations, one
                for each of `rotaries(plans)`; each layer gets its own.
        """
        if self.host_activations is not None:
            self.host_activations.begin_pass(self.parameters())
        for group in self.groups:
            if group.recomputed and torch.is_grad_enabled():
                # Join the stream, so that a group keeps a single tensor.
                x = recompute(
                    lambda layers, x, *inputs: self._run(layers, Stream(x), *inputs).join(),
                    group.layers,
                    stream.join(),
                    *inputs,
                    split_over=self.saved_input_axis,
                    recompute_context=self.routers.paused,
                    stops_early=self.stops_early,
                )
                stream = Stream(x)
            else:
                stream = self._run(group.layers, stream, *inputs)
        return stream

    def _run(self, layers: range, stream: Stream, *inputs: Any) -> Stream:
        mask, rotations, *extra = inputs
        for index in layers:
            rotary = self.rotaries.get(index)
            rotation = None if rotary is None or not rotations else rotations[rotary]
            stream = self[str(index)](stream, mask, rotation, *extra)
        return stream
