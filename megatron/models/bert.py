"""BERT: an encoder that fills in masked tokens (Devlin et al., 2018; Shoeybi et al., 2019).

Shapes: s sequence, b micro-batch, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.stages import ModelPart, whole_model
from megatron.kernels.attention import Mask, Segments, flash_misfit
from megatron.models.embedding import Embedding, RotaryTable, new_embedding
from megatron.models.head import Output, TokenLoss
from megatron.models.initial import weight_init
from megatron.models.norm import Stream, new_norm
from megatron.models.recompute import RecomputePlan
from megatron.models.sizes import sizes_of
from megatron.models.stack import LayerStack
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import reduce_from
from megatron.parallel.layers import Linear
from megatron.parallel.products import PLAIN, Plain, Products

TOKEN_TYPES = 2  # the two segments of a sample
SHORTEST_IN_ONE = 256  # tokens of a sample; at 128 the flash kernel is the slower one


class BertResult(NamedTuple):
    """What the end of a BERT gives.

    Attributes:
        tokens: with labels the loss of each token, fp32 [b, s]; else logits [b, s, v/t].
        order: logits of the two segments standing as in the text (0) or the other way round (1),
            [b, 2]; None without a binary head.
    """

    tokens: Tensor
    order: Tensor | None


class BertModel(nn.Module):
    """Embedding, layers, final normalization, heads.

    Parameters are as those of a GPT, and

        embedding.token_type.weight   [2, h]   segments    (these three with a pooler)
        pooler.dense.weight, .bias    [h, h]
        binary_head.weight, .bias     [2, h]   are the segments in order?
        head.dense.weight, .bias      [h, h]   of the masked tokens, before their scores
        head.norm.weight, .bias       [h]
        output.bias                   [v]

    Args:
        model: network flags, resolved (no None among the sizes).
        precision: number formats.
        context: what it is built in.
        padded_vocab_size: v.
        part: the layers that this process holds, and whether it begins or ends the model; None:
            the whole model.
        recompute: what to compute again in backward; None: nothing.
        pretraining_heads: False leaves out what only pretraining needs: `head`, `output` and
            `binary_head`.
    """

    def __init__(
        self,
        model: ModelConfig,
        precision: PrecisionConfig,
        context: BuildContext,
        *,
        padded_vocab_size: int,
        part: ModelPart | None = None,
        recompute: RecomputePlan | None = None,
        pretraining_heads: bool = True,
    ) -> None:
        super().__init__()
        self.part = part or whole_model(sizes_of(model).layers)
        self.attention_choice = context.kernels.attention
        in_one = self._may_go_in_one(model, context)
        self.shortest_in_one = SHORTEST_IN_ONE if in_one else None
        has_pooler = model.bert_binary_head
        types = TOKEN_TYPES if has_pooler else 0
        self.embedding = new_embedding(
            model,
            precision,
            context,
            self.part,
            padded_vocab_size=padded_vocab_size,
            token_types=types,
            has_output=pretraining_heads,
        )
        has_rope = model.position_embedding_type == "rope"
        self.rotary = RotaryTable(model, device=context.device) if has_rope else None
        self.layers = LayerStack(
            model,
            context,
            self.part.layers,
            causal=False,
            recompute=recompute,
        )
        self.final_norm = self.head = self.output = self.pooler = self.binary_head = None
        if self.part.head:
            self.final_norm = new_norm(model, context)
            self.pooler = Pooler(model, context) if has_pooler else None
        if self.part.head and pretraining_heads:
            self.head = MaskedTokenHead(model, context)
            token_loss = TokenLoss.from_config(precision, context.device)
            self.output = Output(
                model,
                context,
                token_loss,
                self.embedding,
                padded_vocab_size=padded_vocab_size,
                has_bias=True,
            )
            if has_pooler:
                self.binary_head = whole_linear(model, context, outputs=2)

    def _may_go_in_one(self, model: ModelConfig, context: BuildContext) -> bool:
        """Whether layers take long samples one after the other, as one: no mask is needed then, and
        the flash kernel reads no padding. Without dropout cuDNN's with a mask is the faster one."""
        return (
            self.attention_choice.name != "plain"
            and model.attention_dropout > 0
            and model.position_embedding_type != "rope"
            and not context.layout.sequence_parallel
            and not flash_misfit(sizes_of(model).head_size, context.dtype, context.device)
        )

    def forward(
        self,
        tokens: Tensor,
        padding: Tensor,
        token_types: Tensor | None = None,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor | BertResult:
        """One pass through the layers held here.

        Args:
            tokens: [b, s].
            padding: bool [b, s], True where there is a token; padding is behind the tokens.
            token_types: [b, s], the segment of each token; None: all are of the first.
            labels: [b, s], the token that belongs in each place.
            hidden: [s, b, h], from the part before; None where this part begins the model.
            loss_mask: [b, s], by what each loss will count, see `Output`.

        Returns:
            What the heads say at the end of the model; elsewhere, and without heads, hidden states
            [s, b, h] ([s/t, b, h] with sequence parallelism), normalized where the model ends.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotation = None if self.rotary is None else self.rotary(positions)
        if hidden is None:
            assert isinstance(self.embedding, Embedding), "this part takes hidden states"
            hidden = self.embedding(tokens, positions.expand_as(tokens), token_types)
        shortest = self.shortest_in_one
        in_one = self.training and shortest is not None and tokens.shape[1] >= shortest
        if in_one:
            hidden = _joined(hidden)
        mask: Mask = Segments.of_padded(padding) if in_one else padding_mask(padding)
        stream = self.layers.run(Stream(hidden), mask, rotation)
        x: Tensor = stream.join() if self.final_norm is None else self.final_norm(stream)[1]
        if in_one:
            x = _apart(x, samples=len(tokens))
        if self.final_norm is None:
            return x
        if self.head is None or self.output is None:
            return x
        order = None
        if self.pooler is not None and self.binary_head is not None:
            order = self.binary_head(self.pooler(x)[None])[0]
        return BertResult(self.output(self.head(x), labels, loss_mask), order)


def _joined(x: Tensor) -> Tensor:
    """[s, b, h] -> [b s, 1, h]."""
    return x.transpose(0, 1).flatten(0, 1).unsqueeze(1)


def _apart(x: Tensor, samples: int) -> Tensor:
    """[b s, 1, h] -> [s, b, h]."""
    return x.squeeze(1).unflatten(0, (samples, -1)).transpose(0, 1).contiguous()


def padding_mask(padding: Tensor) -> Tensor:
    """Bool [b, s], True for a token -> which keys may be attended to, [b, 1, 1, s].

    Padding attends too: nobody reads what becomes of it.
    """
    return padding[:, None, None, :]


def whole_linear(
    model: ModelConfig, context: BuildContext, *, outputs: int, products: Products = PLAIN
) -> Linear:
    """A layer over vectors of whole samples, which every tensor rank holds and computes."""
    hidden = sizes_of(model).hidden
    whole = replace(context, layout=replace(context.layout, sequence_parallel=False))
    return Linear(
        hidden,
        outputs,
        whole.multiplying_by(lambda: products),
        split=None,
        init=weight_init(model, hidden, outputs),
    )


class Pooler(nn.Module):
    """A vector of the whole sample: tanh of a layer over its first token."""

    def __init__(self, model: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.sequence = context.layout.sequence
        self.dense = whole_linear(model, context, outputs=sizes_of(model).hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h], or with sequence parallelism [s/t, b, h] -> [b, h] on every rank."""
        first = x[:1]
        if self.sequence.size > 1:
            # The others' count for nothing, but backward passes through them on every rank.
            first = reduce_from(first * int(self.sequence.is_first), self.sequence)
        return torch.tanh(self.dense(first)).squeeze(0)


class MaskedTokenHead(nn.Module):
    """What stands between BERT's last layer and the scores of the vocabulary."""

    def __init__(self, model: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        hidden = sizes_of(model).hidden
        self.approximate = "tanh" if model.openai_gelu else "none"
        self.dense = Linear(
            hidden,
            hidden,
            context.multiplying_by(Plain),
            split=None,
            init=weight_init(model, hidden, hidden),
        )
        self.norm = new_norm(model, context)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; [s/t, b, h] with sequence parallelism."""
        _, normal = self.norm(Stream(F.gelu(self.dense(x), approximate=self.approximate)))
        result: Tensor = normal
        return result
