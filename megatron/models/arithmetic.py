"""Parameters, FLOPs and activation bytes, counted from a plan without building a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.config.stages import ModelPart, whole_model
from megatron.models.bert import Classifier, MaskedTokenHead
from megatron.models.block import Block, class_of
from megatron.models.costs import MicroBatch, WeightSplit
from megatron.models.embedding import Embedding
from megatron.models.head import Output, TokenScore
from megatron.models.mixture import Mixture
from megatron.models.mixture_plan import MixturePlan
from megatron.models.multi_token import (
    Depth,
    MultiToken,
    copies_words,
    layers_of,
)
from megatron.models.norm import Norm
from megatron.models.plan import HeadPlan, ModelPlan, multi_token_plan
from megatron.models.position_bias import PositionBias
from megatron.models.recompute import RecomputePlan

# The class that implements each kind of head and states its costs.
HEADS: dict[str, Any] = {
    "output": Output,
    "masked_token": MaskedTokenHead,
    "pooler": Classifier,
    "binary_head": Classifier,
    "task_head": Classifier,
    "projection": Classifier,
    "score": TokenScore,
    "multi_token": MultiToken,
}


def heads_of(plan: ModelPlan) -> Iterator[tuple[Any, HeadPlan]]:
    """Yield the class and the plan of each of a network's heads."""
    for head in plan.heads:
        yield HEADS[head.kind], head


def count_parameters(plan: ModelPlan) -> int:
    """Count the parameters of the whole model, counting tied parameters once."""
    return count_part_parameters(plan, whole_model(len(plan.layers)), WeightSplit())


def count_active_parameters(plan: ModelPlan) -> int:
    """Count the parameters that a token uses, including only the experts chosen for it."""
    idle = 0
    for layer in layers_of(plan, whole_model(len(plan.layers))):
        if isinstance(layer.mlp, MixturePlan):
            per_expert = (
                Mixture.expert_parameters(layer.mlp, WeightSplit()) // layer.mlp.router.experts
            )
            idle += per_expert * (layer.mlp.router.experts - layer.mlp.router.chosen)
    return count_parameters(plan) - idle


def count_part_parameters(plan: ModelPlan, part: ModelPart, split: WeightSplit) -> int:
    """Count the parameters of a model part on one process.

    If a model with tied embeddings or multi-token prediction is split into several parts, the last
    part holds a second copy of the word embedding. Every part that holds layers of a stack also
    holds a copy of that stack's relative position bias.
    """
    tensor = split.tensor
    norm = Norm.parameter_count(plan.final_norm, plan.hidden)
    count = sum(Block.parameter_count(layer, split) for layer in layers_of(plan, part))
    if part.embedding:
        count += Embedding.parameter_count(plan.embedding, tensor)
    if part.head:
        count += norm + sum(kind.parameter_count(head, tensor) for kind, head in heads_of(plan))
        if copies_words(plan) and not part.embedding:
            count += plan.embedding.vocabulary // tensor * plan.hidden
    if plan.encoder_layers - 1 in part.layers:
        count += norm  # the encoder's final normalization
    if plan.position_bias is not None:
        table = PositionBias.parameter_count(plan.position_bias, tensor)
        count += len(plan.stacks(part)) * table
    return count * plan.towers


def count_depth_parameters(plan: ModelPlan, split: WeightSplit) -> int:
    """Count the parameters of the multi-token prediction layers on one process."""
    mtp = multi_token_plan(plan)
    if mtp is None:
        return 0
    layers = sum(Block.parameter_count(layer, split) for layer in mtp.layers)
    return layers + MultiToken.parameter_count(mtp, split.tensor)


def count_part_experts(plan: ModelPlan, part: ModelPart, split: WeightSplit) -> int:
    """Count the parameters of a model part's experts on one process."""
    mlps = [layer.mlp for layer in layers_of(plan, part)]
    mixtures = [mlp for mlp in mlps if isinstance(mlp, MixturePlan)]
    return plan.towers * sum(Mixture.expert_parameters(mixture, split) for mixture in mixtures)


def count_part_matrices(plan: ModelPlan, part: ModelPart, split: WeightSplit) -> int:
    """Count the elements of a model part's layer matrices on one process."""
    count = sum(Block.matrix_parameters(layer, split) for layer in layers_of(plan, part))
    mtp = multi_token_plan(plan)
    return plan.towers * count + (MultiToken.matrix_parameters(mtp) if mtp and part.head else 0)


def largest_layer(plan: ModelPlan, split: WeightSplit) -> tuple[int, int]:
    """Count the parameters of the largest layer on one process, and those of its experts."""
    single_layers = (
        ModelPart(range(i, i + 1), embedding=False, head=False) for i in range(len(plan.layers))
    )
    plan, mtp = replace(plan, towers=1), multi_token_plan(plan)
    counts = [
        (count_part_parameters(plan, part, split), count_part_experts(plan, part, split))
        for part in single_layers
    ]
    if mtp is not None:  # a depth also has a projection
        counts.append((count_depth_parameters(plan, split) // mtp.depths, counts[-1][1]))
    return max(counts)


def largest_matrix(plan: ModelPlan, split: WeightSplit) -> int:
    """Count the elements of the largest matrix that one process may hold."""
    return max(
        plan.embedding.vocabulary * plan.hidden // split.tensor, largest_layer_matrix(plan, split)
    )


def largest_layer_matrix(plan: ModelPlan, split: WeightSplit) -> int:
    """Count the elements of the largest matrix of a layer that one process may hold."""
    sublayers = {sublayer for layer in plan.layers for sublayer in layer.sublayers}
    matrices = (
        shape for sublayer in sublayers for shape in class_of(sublayer).matrices(sublayer, split)
    )
    return max(outputs * inputs for outputs, inputs in matrices)


def part_activations(
    plan: ModelPlan,
    part: ModelPart,
    batch: MicroBatch,
    recompute: RecomputePlan | None,
    seq_length: int,
    decoder_seq_length: int | None = None,
) -> int:
    """Count the bytes that a part keeps for the backward pass of one micro-batch.

    Args:
        plan: The whole network.
        part: The part of the model.
        batch: The micro-batch. Its lengths are ignored; the last two arguments replace them.
        recompute: Activations that are recomputed instead of kept; `None` keeps all of them.
        seq_length: Number of tokens in a sequence, or in the encoder's sequence.
        decoder_seq_length: Number of tokens in the decoder's sequence, if there is one.
    """
    message = replace(batch, length=seq_length + (decoder_seq_length or 0))  # T5 sends both states
    boundary = batch.width * message.tokens * plan.hidden // batch.sequence
    counted: dict[tuple[int, int, int], tuple[int, int]] = {}  # most layers are identical
    per_layer, recomputed = [], [0]
    for index in part.layers:
        layer = plan.layers[index]
        length, encoder_length = plan.lengths(index, seq_length, decoder_seq_length)
        key = (id(layer), length, encoder_length)
        if key not in counted:
            layer_batch = replace(batch, length=length, encoder_length=encoder_length)
            kept = Block.activation_bytes(layer, layer_batch)
            without_recompute = Block.activation_bytes(
                layer, replace(layer_batch, recomputed=frozenset())
            )
            counted[key] = kept, without_recompute - kept
        per_layer.append(counted[key][0])
        recomputed.append(counted[key][1])
    total = sum(per_layer)
    if recompute is not None:
        total = recompute.bytes_kept(per_layer, boundary, batch) + max(recomputed)
    mtp = multi_token_plan(plan)
    if part.head and mtp is not None and not Depth.recomputes_all(recompute):
        layer_batch = replace(batch, length=seq_length)
        total += sum(Block.activation_bytes(layer, layer_batch) for layer in mtp.layers)
    if plan.position_bias is not None:
        for stack in plan.stacks(part):
            length, encoder_length = plan.lengths(stack.start, seq_length, decoder_seq_length)
            total += PositionBias.activation_bytes(
                plan.position_bias, replace(batch, length=length), bidirectional=encoder_length == 0
            )
    return total + (int(part.embedding) + int(part.head)) * boundary


def head_activations(plan: ModelPlan, batch: MicroBatch) -> int:
    """Count the bytes that the heads keep until the backward pass of their losses."""
    return sum(kind.activation_bytes(head, batch) for kind, head in heads_of(plan))


def flops_per_token(
    plan: ModelPlan,
    seq_length: int,
    decoder_seq_length: int | None = None,
    *,
    trains_adapters: bool = False,
) -> int:
    """Count the floating-point operations of the forward and backward passes for one token.

    For GPT this is 6 x (parameters in matrix products: layers and output layer, not the input
    embedding) + 6 x layers x sequence x query size (causal attention counts half of the score
    matrix). BERT adds its heads and counts the whole matrix. The FLOPs of a T5 sample are divided
    by the total of its encoder and decoder tokens. Cross-attention computes keys and values for the
    encoder's tokens. A task head processes one vector per sequence, so its FLOPs are divided by the
    sequence's tokens. Recomputation is never counted.

    Args:
        plan: The whole network.
        seq_length: Number of tokens in a sequence, or in the encoder's sequence.
        decoder_seq_length: Number of tokens in the decoder's sequence, if there is one.
        trains_adapters: Whether only adapters are trained. Frozen weights need no gradients, so
            only two thirds of their FLOPs are counted. The adapters' own FLOPs are not counted.
    """
    decoder_length, mtp = decoder_seq_length or seq_length, multi_token_plan(plan)
    products, scores = sum(kind.flops(head, decoder_length) for kind, head in heads_of(plan)), 0
    layer_flops = [
        Block.flops(layer, *plan.lengths(index, seq_length, decoder_seq_length))
        for index, layer in enumerate(plan.layers)
    ]
    layer_flops += [Block.flops(layer, seq_length) for layer in (mtp.layers if mtp else ())]
    for flops in layer_flops:
        products, scores = products + flops.products, scores + flops.scores
    total = (products * 2 // 3 if trains_adapters else products) + scores
    return total // (seq_length + (decoder_seq_length or 0))
