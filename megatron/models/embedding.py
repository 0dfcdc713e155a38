"""Embeddings (words, learned positions, token types) and the table of rotary embeddings."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.stages import ModelPart
from megatron.kernels.rope import Rotation, rotation_table
from megatron.models.norm import Norm, Stream, new_norm
from megatron.models.plan import (
    EmbeddingPlan,
    InitPlan,
    ModelPlan,
    RotaryPlan,
)
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import VocabularyEmbedding
from megatron.parallel.parameter import spec_of
from megatron.parallel.random import split_region


class VectorTable(nn.Module):
    """A table of learned vectors for positions or token types, replicated on every rank.

    Args:
        entries: Number of rows.
        hidden: Width of a vector.
        init: Distribution of the initial table.
        context: Layout, device and number formats.
    """

    def __init__(self, entries: int, hidden: int, init: InitPlan, context: BuildContext) -> None:
        """Allocate the table."""
        super().__init__()
        self.sequence = context.layout.sequence
        self.weight = context.new_parameter(
            (entries, hidden),
            init=init.weight(hidden, entries),
            partial_gradient=self.sequence.size > 1,
        )

    def forward(self, indices: Tensor) -> Tensor:
        """Look up indices [s, b]; return [s, b, h], or [s/t, b, h] with sequence parallelism."""
        part = indices.chunk(self.sequence.size)[self.sequence.rank]
        return F.embedding(part, self.weight)


class Embedding(nn.Module):
    """The sum of the plan's word, position and token type embeddings, with dropout.

    Args:
        plan: The plan of this layer.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: EmbeddingPlan, context: BuildContext) -> None:
        """Allocate the tables that the plan describes."""
        super().__init__()
        self.dropout, self.scale = plan.dropout, plan.scale
        self.sequence = context.layout.sequence
        self.fp32_residual = context.precision.fp32_residual_connection
        self.word = VocabularyEmbedding(
            plan.vocabulary,
            plan.hidden,
            context,
            init=plan.init.weight(plan.hidden, plan.vocabulary),
            lookup_in_fp32=context.precision.embedding_weights_in_fp32,
            calls=plan.calls,
        )
        self.position = self.token_type = self.norm = None
        if plan.norm is not None:
            self.norm = new_norm(plan.norm, plan.hidden, context)
        if plan.positions:
            self.position = VectorTable(plan.positions, plan.hidden, plan.init, context)
        if plan.token_types:
            self.token_type = VectorTable(plan.token_types, plan.hidden, plan.init, context)

    @staticmethod
    def parameter_count(plan: EmbeddingPlan, tensor: int) -> int:
        """Count the parameters that one of `tensor` ranks holds."""
        rows = plan.vocabulary // tensor + plan.positions + plan.token_types
        norm = 0 if plan.norm is None else Norm.parameter_count(plan.norm, plan.hidden)
        return rows * plan.hidden + norm

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        token_types: Tensor | None = None,
        *,
        site: str = "embedding",
    ) -> Tensor:
        """Return the embeddings of whole sequences.

        Args:
            tokens: [b, s].
            position_ids: [b, s].
            token_types: [b, s], for a model that has them; `None` means all are 0.
            site: Name that gives this call its own dropout mask within the pass.

        Returns:
            The embeddings, [s, b, h]; [s/t, b, h] with sequence parallelism.
        """
        x = self.word(tokens.t())
        if self.scale is not None:  # rounded to the embeddings' dtype, as when Gemma was trained
            x = x * torch.tensor(self.scale, dtype=x.dtype).item()
        if self.norm is not None:
            x = self.norm(Stream(x))[1]
        if self.position is not None:
            x = x + self.position(position_ids.t())
        if self.token_type is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            x = x + self.token_type(types.t())
        if self.fp32_residual:
            x = x.float()
        if not self.training or self.dropout == 0:
            return x
        with split_region(self.sequence, x.device, site):
            return F.dropout(x, self.dropout)


def vocabulary_matrix(
    vocabulary: int, hidden: int, init: InitPlan, context: BuildContext
) -> nn.Parameter:
    """Allocate the matrix [v, h], one row per vocabulary entry, split by rows over tensor ranks."""
    return context.new_parameter(
        (vocabulary, hidden),
        init=init.weight(hidden, vocabulary),
        split_dim=0,
        is_vocabulary=True,
    )


class TiedWordEmbedding(nn.Module):
    """The last pipeline stage's copy of the word embedding [v, h], for the output layer.

    The copy has the same name as the original, so both start with the same values. The training
    step keeps them equal by adding their gradients (`parallel.tied`).

    Args:
        plan: The plan of the embedding.
        context: Layout, device and number formats.
    """

    def __init__(self, plan: EmbeddingPlan, context: BuildContext) -> None:
        """Allocate the copy."""
        super().__init__()
        self.word = nn.Module()  # has no `forward`, so the whole model waits for its weight
        weight = vocabulary_matrix(plan.vocabulary, plan.hidden, plan.init, context)
        weight.spec = replace(spec_of(weight), is_copy=True)  # type: ignore[attr-defined]
        self.word.weight = weight


def new_embedding(
    plan: ModelPlan, context: BuildContext, part: ModelPart
) -> Embedding | TiedWordEmbedding | None:
    """Build the embedding of a part of the model, or return `None` if the part needs none."""
    if part.head and plan.embedding.ahead:
        lookups = plan.embedding.calls * part.embedding + plan.embedding.ahead
        embedding = Embedding(replace(plan.embedding, calls=lookups), context)
        if not part.embedding:
            for weight in embedding.parameters():
                weight.spec = replace(spec_of(weight), is_copy=True)  # type: ignore[attr-defined]
        return embedding
    if part.embedding:
        return Embedding(plan.embedding, context)
    return TiedWordEmbedding(plan.embedding, context) if part.head and plan.ties_words else None


class RotaryTable(nn.Module):
    """Cosines and sines for all positions, which all layers share and checkpoints omit.

    With dynamic NTK, they also depend on the length of a sequence and are computed when needed.

    Args:
        plan: The plan of the rotary embeddings.
        device: Device of the table.
    """

    def __init__(self, plan: RotaryPlan, device: torch.device) -> None:
        """Compute the table on the device, unless it depends on the length of a sequence."""
        super().__init__()
        self.plan = plan
        if plan.dynamic is not None:
            return
        table = rotation_table(
            plan.positions,
            plan.channels,
            base=plan.base,
            interpolation=plan.interpolation,
            planes=plan.planes,
            scaling=plan.scaling,
            yarn=plan.yarn,
            long_rope=plan.long_rope,
            device=device,
        )
        self.register_buffer("table", table[:, :, None, None], persistent=False)
        self.table: Tensor

    def forward(self, positions: Tensor, length: int | Tensor) -> Rotation:
        """Return the rotation of positions [s]: cosines and sines, [s, 1, 1, r] each.

        Args:
            positions: The positions, int64 [s].
            length: The length of the sequence, or of each position's sequence, int64 [s]. Only
                dynamic NTK and LongRoPE depend on it.
        """
        plan = self.plan
        if plan.dynamic is not None:
            return plan.dynamic.rotation(positions, length, plan.channels, plan.base)
        if plan.long_rope is not None:
            positions = positions + plan.positions * (length > plan.long_rope.original)
        cosine, sine = self.table[:, positions]
        return cosine, sine
