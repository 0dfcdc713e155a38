"""BERT: an encoder that fills in masked tokens (Devlin et al., 2018; Shoeybi et al., 2019).

Shapes: s sequence, b micro-batch, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.stages import ModelPart
from megatron.kernels.attention import flash_problem
from megatron.kernels.segments import Mask, Segments
from megatron.models.block import LayerStack
from megatron.models.costs import MicroBatch
from megatron.models.head import Output
from megatron.models.network import Network
from megatron.models.norm import Norm, Stream, new_norm
from megatron.models.plan import (
    AttentionPlan,
    ClassifierPlan,
    MaskedTokenPlan,
    ModelPlan,
    OutputPlan,
)
from megatron.models.recompute import RecomputePlan
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import reduce_from
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Axis
from megatron.parallel.products import InFp32, Products

MIN_PACKED_LENGTH = 256  # tokens per sample; with 128 the flash kernel is slower


class BertResult(NamedTuple):
    """The results of BERT's heads.

    Attributes:
        tokens: With labels, the loss of each token, fp32 [b, s]; with labels and a loss mask, the
            weighted sum of the losses; without labels, logits [b, s, v/t].
        order: Logits [b, 2] for two segments in the text's order (0) or swapped (1); `None` without
            a binary head.
    """

    tokens: Tensor
    order: Tensor | None


class BertModel(Network):
    """A BERT model: embedding, layers, final normalization, heads.

    Its parameters are those of a GPT model plus the following:

        embedding.token_type.weight   [2, h]   segments, if the plan has token types
        pooler.dense.weight, .bias    [h, h]
        binary_head.weight, .bias     [2, h]   whether the segments are in order
        head.dense.weight, .bias      [h, h]   transform before the masked tokens' scores
        head.norm.weight, .bias       [h]
        output.bias                   [v]

    A model without one of these heads does not have its parameters.

    Args:
        plan: The whole network.
        context: Layout, device, kernels and number formats.
        part: The layers that this process holds, and whether it has the embedding and the heads;
            `None` builds the whole model.
        recompute: Activations to recompute in the backward pass; `None` keeps all of them.
    """

    def __init__(
        self,
        plan: ModelPlan,
        context: BuildContext,
        part: ModelPart | None = None,
        recompute: RecomputePlan | None = None,
    ) -> None:
        """Build the modules of the part that this process holds."""
        super().__init__(plan, context, part)
        self.min_packed_length = MIN_PACKED_LENGTH if _can_pack_samples(plan, context) else None
        self.layers = LayerStack(plan.layers, context, self.part.layers, recompute=recompute)
        self.final_norm = self.head = self.output = self.pooler = self.binary_head = None
        if not self.part.head:
            return
        self.final_norm = new_norm(plan.final_norm, plan.hidden, context)
        for head in plan.heads:
            match head:
                case OutputPlan():
                    self.output = Output(head, context, self.embedding)
                case MaskedTokenPlan():
                    self.head = MaskedTokenHead(head, context)
                case ClassifierPlan(kind="binary_head"):
                    self.binary_head = Classifier(head, context)
                case ClassifierPlan(kind="pooler"):
                    self.pooler = Pooler(head, context)

    def forward(
        self,
        tokens: Tensor,
        is_token: Tensor,
        token_types: Tensor | None = None,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor | BertResult:
        """Run the layers of this part once.

        Args:
            tokens: [b, s].
            is_token: bool [b, s], False for padding, which comes after the tokens.
            token_types: [b, s], the segment of each token; `None` puts all tokens in the first one.
            labels: [b, s], the correct token at each position.
            hidden: [s, b, h], the previous part's output; `None` in the first part of the model.
            loss_mask: [b, s], the weight of each token's loss (`Output`).

        Returns:
            The results of the heads, from the last part of a model with pretraining heads.
            Otherwise hidden states [s, b, h] ([s/t, b, h] with sequence parallelism). Those of the
            last part are normalized.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if hidden is None:
            hidden = self.embed(tokens, positions, token_types)
        min_length = self.min_packed_length
        is_packed = self.training and min_length is not None and tokens.shape[1] >= min_length
        if is_packed:
            hidden = hidden.transpose(0, 1).flatten(0, 1).unsqueeze(1)  # [b s, 1, h]
        mask: Mask = Segments.of_padded(is_token) if is_packed else key_mask(is_token)
        stream = self.layers.run(Stream(hidden), mask, self.rotation(positions))
        x: Tensor = stream.join() if self.final_norm is None else self.final_norm(stream)[1]
        if is_packed:
            x = x.squeeze(1).unflatten(0, (len(tokens), -1)).transpose(0, 1).contiguous()
        if self.head is None or self.output is None:
            return x
        order = None
        if self.pooler is not None and self.binary_head is not None:
            order = self.binary_head(self.pooler(x)[None])[0]
        return BertResult(self.output(self.head(x), labels, loss_mask), order)


def _can_pack_samples(plan: ModelPlan, context: BuildContext) -> bool:
    """Return whether the samples of a batch may be packed into one long sequence.

    Packed samples need no mask, and the flash kernel skips padding. Without dropout, cuDNN's kernel
    with a mask is faster.
    """
    return (
        context.kernels.attention.name != "plain"
        and not context.layout.sequence_parallel
        and all(
            isinstance(layer.mixer, AttentionPlan)
            and layer.mixer.dropout > 0
            and layer.mixer.rotary is None
            and not flash_problem(layer.mixer.head_size, context.dtype, context.device)
            for layer in plan.layers
        )
    )


def key_mask(is_token: Tensor) -> Tensor:
    """Return a mask, bool [b, 1, 1, s], that hides padding from all queries.

    Padding tokens also attend to other tokens, but nothing reads their results.
    """
    return is_token[:, None, None, :]


class Classifier(Linear):
    """A linear layer over one vector per sample, replicated on every tensor rank.

    Args:
        plan: The plan of the head.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: ClassifierPlan, context: BuildContext) -> None:
        """Allocate the whole layer on every tensor rank."""
        whole = replace(context, layout=replace(context.layout, sequence_parallel=False))
        super().__init__(
            plan.hidden,
            plan.outputs,
            whole.multiplying_by(InFp32 if plan.in_fp32 else Products),
            split=None,
            init=plan.init.weight(plan.hidden, plan.outputs),
        )

    @staticmethod
    def parameter_count(plan: ClassifierPlan, tensor: int) -> int:
        """Count the parameters of the weight and the bias."""
        return plan.outputs * (plan.hidden + 1)

    @staticmethod
    def flops(plan: ClassifierPlan, length: int) -> int:
        """Count the FLOPs of the forward and backward passes for one vector per sequence."""
        return 6 * plan.outputs * plan.hidden

    @staticmethod
    def activation_bytes(plan: ClassifierPlan, batch: MicroBatch) -> int:
        """Return 0: a few vectors per sequence are negligible next to the layers' activations."""
        return 0


class Pooler(nn.Module):
    """The head that computes one vector per sample: tanh of a linear layer on the first token.

    Args:
        plan: The plan of the head.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: ClassifierPlan, context: BuildContext) -> None:
        """Allocate the linear layer."""
        super().__init__()
        self.sequence = context.layout.sequence
        self.dense = Classifier(plan, context)

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, h], or [s/t, b, h] with sequence parallelism, to [b, h] on every rank."""
        return torch.tanh(self.dense(first_token(x, self.sequence))).squeeze(0)


def first_token(x: Tensor, sequence: Axis) -> Tensor:
    """Return the hidden states of each sample's first token, [1, b, h], on every rank.

    Args:
        x: [s, b, h], or [s/t, b, h] with sequence parallelism.
        sequence: The ranks that share a sequence.
    """
    first = x[:1]
    if sequence.size > 1:
        # Other ranks multiply their first token by 0, so that every rank has a gradient for x.
        first = reduce_from(first * int(sequence.is_first), sequence)
    return first


class MaskedTokenHead(nn.Module):
    """The layer between BERT's last transformer layer and its output layer.

    Args:
        plan: The plan of the head.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: MaskedTokenPlan, context: BuildContext) -> None:
        """Allocate the layer and its normalization."""
        super().__init__()
        self.approximate = "tanh" if plan.tanh else "none"
        self.dense = Linear(
            plan.hidden,
            plan.hidden,
            context.multiplying_by(Products),
            split=None,
            init=plan.init.weight(plan.hidden, plan.hidden),
        )
        self.norm = new_norm(plan.norm, plan.hidden, context)

    @staticmethod
    def parameter_count(plan: MaskedTokenPlan, tensor: int) -> int:
        """Count the parameters of the dense layer and the normalization."""
        return plan.hidden * (plan.hidden + 1) + Norm.parameter_count(plan.norm, plan.hidden)

    @staticmethod
    def flops(plan: MaskedTokenPlan, length: int) -> int:
        """Count the FLOPs of the forward and backward passes for a sequence."""
        return 6 * length * plan.hidden * plan.hidden

    @staticmethod
    def activation_bytes(plan: MaskedTokenPlan, batch: MicroBatch) -> int:
        """Count the bytes of the outputs of the dense layer, activation and normalization."""
        return batch.losses * 3 * batch.width * batch.tokens * plan.hidden // batch.sequence

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]; both are [s/t, b, h] with sequence parallelism."""
        _, normal = self.norm(Stream(F.gelu(self.dense(x), approximate=self.approximate)))
        result: Tensor = normal
        return result


class BertTaskModel(BertModel):
    """A BERT model with a task head that chooses among classes or among several texts.

    It has BERT's layers and pooler, then dropout and a linear layer, but no pretraining heads. Its
    parameters are BERT's plus `HEAD.weight` [outputs, h] and `HEAD.bias` [outputs].

    Args:
        plan: The whole network, with a task head.
        context: Layout, device, kernels and number formats.
        part: The layers that this process holds, and whether it has the embedding and the heads;
            `None` builds the whole model.
        recompute: Activations to recompute in the backward pass; `None` keeps all of them.
        head_name: Megatron's name for the head (HEAD): "classification_head" or "multichoice_head".
    """

    def __init__(
        self,
        plan: ModelPlan,
        context: BuildContext,
        part: ModelPart | None = None,
        recompute: RecomputePlan | None = None,
        *,
        head_name: str,
    ) -> None:
        """Build a BERT model and the task head."""
        super().__init__(plan, context, part, recompute)
        self.head_name = head_name
        self.dropout = plan.embedding.dropout
        if self.part.head:
            task = plan.head("task_head")
            assert isinstance(task, ClassifierPlan), "the plan has no task head"
            self.add_module(head_name, Classifier(task, context))

    def score(
        self, tokens: Tensor, is_token: Tensor, token_types: Tensor, hidden: Tensor | None = None
    ) -> Tensor:
        """Score each of a sample's c texts. For classification, c is 1.

        Args:
            tokens: [b, c, s].
            is_token: bool [b, c, s], False for padding.
            token_types: [b, c, s].
            hidden: [s, b c, h], the previous part's output; `None` in the first part of the model.

        Returns:
            Hidden states for the next part, [s, b c, h]. The last part returns scores instead, fp32
            [b, c outputs].
        """
        flat = (tokens.flatten(0, 1), is_token.flatten(0, 1), token_types.flatten(0, 1))
        x = self(*flat, hidden=hidden)
        if self.pooler is None:
            return x
        pooled = F.dropout(self.pooler(x), self.dropout, self.training)
        scores: Tensor = self.get_submodule(self.head_name)(pooled[None])[0]
        return scores.view(len(tokens), -1)
