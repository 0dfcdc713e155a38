"""T5: an encoder and a decoder that reads its output (Raffel et al., 2019).

As Megatron has it, positions are learned (or rotary) and shared by both halves, and the output
shares the words' matrix. As the paper has it, each half has a table of relative positions. Shapes:
e the encoder's sequence, d the decoder's, b micro-batch, h hidden, v padded vocabulary, t
tensor-parallel size.

Under a pipeline the two halves travel together, [e + d, b, h]: the first part embeds both; in the
encoder's parts the decoder's embedding rides along, in the decoder's parts the encoder's output.
So every message has one shape, wherever the decoder begins, and the embeddings are in one place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.stages import ModelPart, whole_model
from megatron.kernels.rope import Rotation
from megatron.models.bert import padding_mask
from megatron.models.cross_attention import Memory
from megatron.models.embedding import Embedding, RotaryTable, new_embedding
from megatron.models.head import Output, TokenLoss
from megatron.models.norm import Stream, new_norm
from megatron.models.position_bias import PositionBias
from megatron.models.recompute import RecomputePlan
from megatron.models.sizes import sizes_of
from megatron.models.stack import LayerStack
from megatron.parallel.build import BuildContext


class Half(nn.Module):
    """Layers of the encoder or of the decoder, and the normalization after the last of them.

    Args:
        position_bias: with relative positions, where there are layers.
    """

    def __init__(
        self,
        layers: LayerStack,
        final_norm: nn.Module | None,
        position_bias: PositionBias | None,
    ) -> None:
        super().__init__()
        self.position_bias = position_bias
        self.layers = layers
        self.final_norm = final_norm

    def run(self, hidden: Tensor, length: int, mask: Tensor | None, *inputs: Any) -> Tensor:
        """[s, b, h] -> [s, b, h], normalized where the half ends.

        Args:
            hidden: [s, b, h]; [s/t, b, h] with sequence parallelism.
            length: s.
            mask: bool [b, 1, 1, s], True where there is a token; None: see `LayerStack`.
            inputs: what every layer is given besides.
        """
        if self.position_bias is not None:
            mask = self.position_bias(length, mask)
        stream = self.layers.run(Stream(hidden), mask, *inputs)
        if self.final_norm is None:
            return stream.join()
        x: Tensor = self.final_norm(stream)[1]
        return x


class T5Model(nn.Module):
    """Embeddings of both halves, encoder, decoder, output.

    Parameters are allocated on `device`, not filled: see `parallel.initialization.initialize`.
    Their names are global, whatever part of the model this process holds:

        embedding.word.weight, embedding.position.weight            [v, h], [positions, h]
        encoder.position_bias, decoder.position_bias                [buckets, n], relative ones
        encoder.layers.0.attention_norm, .attention.qkv, .attention.output,
            .mlp_norm, .mlp.up, .mlp.down                           .weight and .bias each
        encoder.final_norm
        decoder.layers.0.attention_norm, .attention.qkv, .attention.output,
            .cross_norm, .cross_attention.query, .cross_attention.key_value,
            .cross_attention.output, .mlp_norm, .mlp.up, .mlp.down
        decoder.final_norm
        output.bias, output.weight where it has them                [v], [v, h]

    Args:
        model: network flags, resolved (no None among the sizes).
        precision: number formats.
        context: what it is built in.
        padded_vocab_size: v.
        part: the layers that this process holds, the decoder's counted after the encoder's, and
            whether it begins or ends the model; None: the whole model.
        recompute: what to compute again in backward; None: nothing.
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
    ) -> None:
        super().__init__()
        first = sizes_of(model).layers  # of the decoder
        self.part = part or whole_model(model.all_layers)
        self.layout = context.layout
        self.attention_choice = context.kernels.attention
        self.embedding = new_embedding(
            model, precision, context, self.part, padded_vocab_size=padded_vocab_size, calls=2
        )
        has_rope = model.position_embedding_type == "rope"
        self.rotary = RotaryTable(model, device=context.device) if has_rope else None

        def new_half(layers: range, ends: bool, **options: Any) -> Half | None:
            if not layers and not ends:
                return None
            stack = LayerStack(model, context, layers, recompute=recompute, **options)
            norm = new_norm(model, context) if ends else None
            bias = None
            if model.position_embedding_type == "relative" and layers:
                bias = PositionBias(
                    model,
                    context,
                    both_ways=not options["causal"],
                    is_copy=layers.start > 0,
                )
            return Half(stack, norm, bias)

        of_encoder, of_decoder = self.part.halves(first)
        self.encoder = new_half(of_encoder, ends=first - 1 in of_encoder, causal=False)
        self.decoder = new_half(
            of_decoder, ends=self.part.head, causal=True, reads_memory=True, numbered_after=first
        )
        self.output = None
        hidden_size = sizes_of(model).hidden
        self.output_scale = hidden_size**-0.5 if model.scale_decoder_outputs else None
        if self.part.head:
            self.output = Output(
                model,
                context,
                TokenLoss.from_config(precision, context.device),
                self.embedding,
                padded_vocab_size=padded_vocab_size,
                has_bias=model.add_output_bias,
            )

    def forward(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor,
        padding: Tensor,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """One pass through the layers held here.

        Padding may stand at the end of the decoder's sequences too: no token before it sees it.

        Args:
            tokens: the encoder's, [b, e].
            decoder_tokens: [b, d].
            padding: bool [b, e], True where there is a token of the encoder's and not only padding.
            labels: [b, d], the token that follows each of the decoder's.
            hidden: [e + d, b, h], from the part before; None where this part begins the model.
            loss_mask: [b, d], by what each loss will count, see `Output`.

        Returns:
            Where the model goes on in another part: both halves' hidden states [e + d, b, h]. At
            its end, with labels the loss of each token, fp32 [b, d]; else logits [b, d, v/t].
        """
        states, x = self.states(tokens, decoder_tokens, padding, hidden)
        if self.output is None:
            return torch.cat((states.to(x.dtype), x))
        if self.output_scale is not None:
            x = x * self.output_scale
        scores: Tensor = self.output(x, labels, loss_mask)
        return scores

    def states(
        self, tokens: Tensor, decoder_tokens: Tensor, padding: Tensor, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both halves' hidden states behind the layers held here, [e, b, h] and [d, b, h].

        See `forward`; with sequence parallelism this rank's part of each.
        """
        states, x = self._halves(tokens, decoder_tokens, hidden)
        mask = padding_mask(padding)
        if self.encoder is not None:
            states = self.encoder.run(states, tokens.shape[1], mask, self._rotation(tokens))
        if self.decoder is not None:
            memory = Memory(states, mask)
            rotation = self._rotation(decoder_tokens)
            x = self.decoder.run(x, decoder_tokens.shape[1], None, rotation, None, memory)
        return states, x

    def _halves(
        self, tokens: Tensor, decoder_tokens: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What goes into the layers held here, [e, b, h] and [d, b, h]; with sequence parallelism
        this rank's part of each."""
        if hidden is not None:
            lengths = [
                ids.shape[1] // self.layout.sequence.size for ids in (tokens, decoder_tokens)
            ]
            states, x = hidden.split(lengths)
            return states, x
        assert isinstance(self.embedding, Embedding), "this part takes hidden states"
        places = torch.arange(max(tokens.shape[1], decoder_tokens.shape[1]), device=tokens.device)
        states = self.embedding(tokens, places[: tokens.shape[1]].expand_as(tokens))
        positions = places[: decoder_tokens.shape[1]].expand_as(decoder_tokens)
        return states, self.embedding(decoder_tokens, positions, site="decoder embedding")

    def _rotation(self, tokens: Tensor) -> Rotation | None:
        if self.rotary is None:
            return None
        rotation: Rotation = self.rotary(torch.arange(tokens.shape[1], device=tokens.device))
        return rotation
