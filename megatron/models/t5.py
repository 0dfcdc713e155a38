"""T5: an encoder and a decoder that reads its output (Raffel et al., 2019).

In Megatron's version, positions are learned (or rotary) and shared by encoder and decoder, and the
output uses the word embedding table. In the paper's version, encoder and decoder each have a
relative position bias. Shapes: e the encoder's sequence, d the decoder's, b micro-batch, h hidden,
v padded vocabulary, t tensor-parallel size.

In a pipeline, stages send the encoder's and the decoder's hidden states together, [e + d, b, h].
The first stage embeds both, the encoder's stages pass on the decoder's embeddings, and the
decoder's stages pass on the encoder's output. Every message therefore has the same shape wherever
the decoder begins, and only the first stage needs the embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.stages import ModelPart
from megatron.models.attention import EncoderOutput
from megatron.models.bert import key_mask
from megatron.models.block import LayerStack
from megatron.models.head import Output
from megatron.models.network import Network
from megatron.models.norm import Stream, new_norm
from megatron.models.plan import ModelPlan
from megatron.models.position_bias import PositionBias
from megatron.models.recompute import RecomputePlan
from megatron.parallel.build import BuildContext


class T5Stack(nn.Module):
    """The layers of an encoder or a decoder, and the normalization after the last of them.

    Args:
        layers: The layers that this process holds.
        final_norm: The final normalization, if this process holds the end of the stack.
        position_bias: The relative position bias; `None` if the plan has none, or if this process
            holds no layers.
    """

    def __init__(
        self,
        layers: LayerStack,
        final_norm: nn.Module | None,
        position_bias: PositionBias | None,
    ) -> None:
        """Store the modules."""
        super().__init__()
        self.position_bias = position_bias
        self.layers = layers
        self.final_norm = final_norm

    def run(self, hidden: Tensor, length: int, mask: Tensor | None, *inputs: Any) -> Tensor:
        """Run this part's layers, and the final normalization if this part has it.

        Args:
            hidden: [s, b, h]; [s/t, b, h] with sequence parallelism.
            length: Length of the sequence, s.
            mask: bool [b, 1, 1, s], True for a token; `None` without padding. A decoder's attention
                is then causal.
            *inputs: Further arguments of every layer.

        Returns:
            Hidden states in the shape of `hidden`.
        """
        if self.position_bias is not None:
            mask = self.position_bias(length, mask)
        stream = self.layers.run(Stream(hidden), mask, *inputs)
        if self.final_norm is None:
            return stream.join()
        x: Tensor = self.final_norm(stream)[1]
        return x


class T5Model(Network):
    """A T5 model: shared embedding, encoder, decoder, output layer.

    Parameters are allocated but not initialized; `parallel.parameter.initialize` does that. Their
    names are global, regardless of which part of the model this process holds:

        embedding.word.weight, embedding.position.weight            [v, h], [positions, h]
        encoder.position_bias, decoder.position_bias                [buckets, n] (relative)
        encoder.layers.0.attention_norm, .attention.qkv, .attention.output,
            .mlp_norm, .mlp.up, .mlp.down                           .weight and .bias each
        encoder.final_norm
        decoder.layers.0.attention_norm, .attention.qkv, .attention.output,
            .cross_norm, .cross_attention.query, .cross_attention.key_value,
            .cross_attention.output, .mlp_norm, .mlp.up, .mlp.down
        decoder.final_norm
        output.bias, output.weight (if the plan has them)           [v], [v, h]

    Args:
        plan: The whole network.
        context: Layout, device, kernels and number formats.
        part: The layers that this process holds, with the decoder's counted after the encoder's,
            and whether it has the embedding and the head; `None` builds the whole model.
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
        first = plan.encoder_layers  # index of the decoder's first layer

        def new_stack(layers: range, *, is_decoder: bool, ends: bool) -> T5Stack | None:
            if not layers and not ends:
                return None
            stack = LayerStack(
                plan.layers[first:] if is_decoder else plan.layers[:first],
                context,
                layers,
                layer_offset=first if is_decoder else 0,
                recompute=recompute,
            )
            bias = None
            if plan.position_bias is not None and layers:
                bias = PositionBias(
                    plan.position_bias,
                    context,
                    bidirectional=not is_decoder,
                    is_copy=layers.start > 0,
                )
            return T5Stack(
                stack, new_norm(plan.final_norm, plan.hidden, context) if ends else None, bias
            )

        encoder_layers, decoder_layers = self.part.halves(first)
        self.encoder = new_stack(encoder_layers, is_decoder=False, ends=first - 1 in encoder_layers)
        self.decoder = new_stack(decoder_layers, is_decoder=True, ends=self.part.head)
        self.output = None
        if self.part.head:
            assert plan.output is not None
            self.output = Output(plan.output, context, self.embedding)

    def forward(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor,
        is_token: Tensor,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Run the layers of this part once.

        The decoder's sequences may also end in padding, because no earlier token attends to it.

        Args:
            tokens: [b, e], the encoder's tokens.
            decoder_tokens: [b, d].
            is_token: bool [b, e], False for padding of the encoder.
            labels: [b, d], the token that follows each decoder token.
            hidden: [e + d, b, h], the previous part's output; `None` in the first part of the
                model.
            loss_mask: [b, d], the weight of each loss (`Output`).

        Returns:
            The encoder's and the decoder's hidden states [e + d, b, h] unless this is the last part
            of the model. With labels, the last part returns the loss of each token, fp32 [b, d], or
            the weighted sum of the losses if there is a loss mask. Without labels it returns logits
            [b, d, v/t].
        """
        states, x = self.states(tokens, decoder_tokens, is_token, hidden)
        if self.output is None:
            return torch.cat((states.to(x.dtype), x))
        scores: Tensor = self.output(x, labels, loss_mask)
        return scores

    def states(
        self, tokens: Tensor, decoder_tokens: Tensor, is_token: Tensor, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the encoder's and the decoder's hidden states after the layers of this part.

        The arguments are those of `forward`. The shapes are [e, b, h] and [d, b, h]; with sequence
        parallelism each is this rank's part.
        """
        lengths = (tokens.shape[1], decoder_tokens.shape[1])
        positions = torch.arange(max(lengths), device=tokens.device)
        encoder_positions, decoder_positions = (positions[:length] for length in lengths)
        if hidden is None:
            states = self.embed(tokens, encoder_positions)
            x = self.embed(decoder_tokens, decoder_positions, site="decoder embedding")
        else:
            parts = [length // self.layout.sequence.size for length in lengths]
            states, x = hidden.split(parts)
        mask = key_mask(is_token)
        if self.encoder is not None:
            states = self.encoder.run(states, lengths[0], mask, self.rotation(encoder_positions))
        if self.decoder is not None:
            encoder = EncoderOutput(states, mask)
            rotation = self.rotation(decoder_positions)
            x = self.decoder.run(x, lengths[1], None, rotation, None, encoder)
        return states, x
