"""Parameters and FLOPs of a network, summed over its plan: nothing is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.config.stages import ModelPart, whole_model
from megatron.models.bert import Classifier, MaskedTokenHead, Pooler
from megatron.models.block import Block
from megatron.models.embedding import Embedding
from megatron.models.head import Output
from megatron.models.norm import norm_parameters
from megatron.models.plan import HeadPlan, ModelPlan
from megatron.models.position_bias import PositionBias

# Which class carries out the record of a head, and states what it costs.
HEADS: dict[str, Any] = {
    "output": Output,
    "masked_token": MaskedTokenHead,
    "pooler": Pooler,
    "binary_head": Classifier,
    "task_head": Classifier,
}


def heads_of(plan: ModelPlan) -> Iterator[tuple[Any, HeadPlan]]:
    """Yield the heads of a network, each with its class."""
    for head in plan.heads:
        yield HEADS[head.kind], head


def count_parameters(plan: ModelPlan) -> int:
    """Count the parameters of the whole model, tied ones once."""
    return count_part_parameters(plan, whole_model(len(plan.layers)), tensor=1)


def count_part_parameters(plan: ModelPlan, part: ModelPart, *, tensor: int) -> int:
    """Count the parameters that one of `tensor` ranks holds of a part of the model.

    The last part of a tied model cut in several holds a second copy of the word embeddings, and
    every part with layers of a stack one of its table of relative positions.
    """
    norm = norm_parameters(plan.final_norm, plan.hidden)
    count = sum(Block.parameter_count(plan.layers[i], tensor) for i in part.layers)
    if part.embedding:
        count += Embedding.parameter_count(plan.embedding, tensor)
    if part.head:
        count += norm + sum(kind.parameter_count(head, tensor) for kind, head in heads_of(plan))
        if plan.ties_words and not part.embedding:
            count += plan.embedding.vocabulary // tensor * plan.hidden
    if plan.encoder_layers - 1 in part.layers:
        count += norm  # the encoder's last
    if plan.position_bias is not None:
        table = PositionBias.parameter_count(plan.position_bias, tensor)
        count += len(plan.stacks(part)) * table
    return count


def count_part_matrices(plan: ModelPlan, part: ModelPart, *, tensor: int) -> int:
    """Count those of them that are matrices of layers."""
    return sum(Block.matrix_parameters(plan.layers[i]) for i in part.layers) // tensor


def flops_per_token(plan: ModelPlan, seq_length: int, decoder_seq_length: int | None = None) -> int:
    """Count the floating-point operations of forward and backward for one token.

    GPT: 6 x (parameters in matrix products: layers and output head, not the input embedding)
    + 6 x layers x sequence x query size (causal attention: half of the square). BERT: its heads
    too, and the whole square. T5: of a sample, divided by its tokens in encoder and decoder; keys
    and values of the decoder's attention to the encoder are products over the encoder's tokens. A
    task's head: of one vector of a sequence, divided by its tokens. Recomputation never counts.

    Args:
        plan: the whole network.
        seq_length: tokens of a sequence, or of the encoder's.
        decoder_seq_length: tokens of the decoder's, if there is one.
    """
    total = 0
    for index, layer in enumerate(plan.layers):
        total += sum(Block.work(layer, *plan.lengths(index, seq_length, decoder_seq_length)))
    last = decoder_seq_length or seq_length
    total += sum(kind.flops(head, last) for kind, head in heads_of(plan))
    return total // (seq_length + (decoder_seq_length or 0))
