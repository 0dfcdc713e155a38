"""What enters the first layer: word vectors, positions, dropout; and the rotary table."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.stages import ModelPart
from megatron.kernels.rope import Rotation, rotation_table
from megatron.models.initial import weight_init
from megatron.models.sizes import sizes_of
from megatron.parallel.build import BuildContext
from megatron.parallel.gradients import GradientBuffer
from megatron.parallel.layers import VocabularyEmbedding
from megatron.parallel.parameter import spec_of
from megatron.parallel.random import split_region


class VectorTable(nn.Module):
    """A learned vector for each of a few numbers, such as positions; whole on every rank."""

    def __init__(
        self,
        entries: int,
        model: ModelConfig,
        context: BuildContext,
    ) -> None:
        super().__init__()
        self.sequence = context.layout.sequence
        hidden = sizes_of(model).hidden
        self.weight = context.new_parameter(
            (entries, hidden),
            init=weight_init(model, hidden, entries),
            partial_gradient=self.sequence.size > 1,
        )

    def forward(self, numbers: Tensor) -> Tensor:
        """[s, b] -> [s, b, h]; with sequence parallelism of this rank's part: [s/t, b, h]."""
        part = numbers.chunk(self.sequence.size)[self.sequence.rank]
        return F.embedding(part, self.weight)


class Embedding(nn.Module):
    """Words plus learned positions and token types (where the model has them), with dropout.

    Args:
        token_types: how many there are.
        calls: of one pass: an encoder and a decoder have one each.
    """

    def __init__(
        self,
        model: ModelConfig,
        precision: PrecisionConfig,
        context: BuildContext,
        *,
        padded_vocab_size: int,
        token_types: int = 0,
        calls: int = 1,
    ) -> None:
        super().__init__()
        self.calls = calls
        hidden = sizes_of(model).hidden
        self.sequence = context.layout.sequence
        self.dropout = model.hidden_dropout
        self.fp32_residual = precision.fp32_residual_connection
        self.word = VocabularyEmbedding(
            padded_vocab_size,
            hidden,
            context,
            init=weight_init(model, hidden, padded_vocab_size),
            lookup_in_fp32=precision.embedding_weights_in_fp32,
        )
        self.position = self.token_type = None
        if model.position_embedding_type == "learned_absolute":
            self.position = VectorTable(sizes_of(model).positions, model, context)
        if token_types:
            self.token_type = VectorTable(token_types, model, context)

    def take_slots(self, gradients: GradientBuffer) -> None:
        """See `parallel.every_layer.attach_slots`."""
        for _ in range(self.calls):  # each call is a use, after which the gradient is waited for
            self.word.slot = gradients.slot(self.word.weight)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        token_types: Tensor | None = None,
        *,
        site: str = "embedding",
    ) -> Tensor:
        """Vectors of whole sequences.

        Args:
            tokens: [b, s].
            position_ids: [b, s].
            token_types: [b, s], for a model that has them; None: all are 0.
            site: tells one call from another in a pass, for dropout.

        Returns:
            [s, b, h]; [s/t, b, h] with sequence parallelism.
        """
        x = self.word(tokens.t())
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
    model: ModelConfig, context: BuildContext, padded_vocab_size: int
) -> nn.Parameter:
    """A row for every vocabulary entry, [v, h]; rows are split over tensor ranks."""
    hidden = sizes_of(model).hidden
    return context.new_parameter(
        (padded_vocab_size, hidden),
        init=weight_init(model, hidden, padded_vocab_size),
        split_dim=0,
        is_vocabulary=True,
    )


class TiedWordEmbedding(nn.Module):
    """The last pipeline stage's copy of the word vectors [v, h], for the output layer.

    It has the original's name, so both start with the same values, and the training step keeps
    them equal by adding their gradients (`parallel.tied`).
    """

    def __init__(
        self, model: ModelConfig, context: BuildContext, *, padded_vocab_size: int
    ) -> None:
        super().__init__()
        self.word = nn.Module()  # never called: who waits for its weight is the model
        weight = vocabulary_matrix(model, context, padded_vocab_size)
        weight.spec = replace(spec_of(weight), is_copy=True)  # type: ignore[attr-defined]
        self.word.weight = weight


def new_embedding(
    model: ModelConfig,
    precision: PrecisionConfig,
    context: BuildContext,
    part: ModelPart,
    *,
    padded_vocab_size: int,
    token_types: int = 0,
    calls: int = 1,
    has_output: bool = True,
) -> Embedding | TiedWordEmbedding | None:
    """What a part of a model needs of the embeddings; None: nothing.

    Args:
        has_output: the model ends in scores of the words.
    """
    if part.embedding:
        return Embedding(
            model,
            precision,
            context,
            padded_vocab_size=padded_vocab_size,
            token_types=token_types,
            calls=calls,
        )
    if part.head and has_output and not model.untie_embeddings_and_output_weights:
        return TiedWordEmbedding(model, context, padded_vocab_size=padded_vocab_size)
    return None


class RotaryTable(nn.Module):
    """Cosines and sines up to the longest sequence: made once, shared by all layers, not saved."""

    def __init__(self, model: ModelConfig, *, device: torch.device | None = None) -> None:
        super().__init__()
        sizes = sizes_of(model)
        table = rotation_table(
            sizes.positions,
            int(sizes.head_size * model.rotary_percent),
            base=model.rotary_base,
            interpolation=model.rotary_seq_len_interpolation_factor,
            scaling=model.rope_scaling_factor if model.use_rope_scaling else None,
            device=device,
        )
        self.register_buffer("table", table[:, :, None, None], persistent=False)
        self.table: Tensor

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation of these positions [s]: cosines and sines [s, 1, 1, r]."""
        cosine, sine = self.table[:, positions]
        return cosine, sine
