"""GPT: a decoder-only transformer language model (Radford et al., 2019; Shoeybi et al., 2019).

Shapes: s sequence, b micro-batch, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.stages import ModelPart, whole_model
from megatron.kernels.attention import Mask
from megatron.models.cache import KeyValueCache
from megatron.models.embedding import Embedding, RotaryTable, new_embedding
from megatron.models.head import Output, TokenLoss
from megatron.models.norm import Stream, new_norm
from megatron.models.recompute import RecomputePlan
from megatron.models.sizes import sizes_of
from megatron.models.stack import LayerStack
from megatron.parallel.build import BuildContext
from megatron.parallel.context.split import local_positions


class GPTModel(nn.Module):
    """Embedding, layers, final normalization, output.

    Parameters are allocated on `device`, not filled: see `parallel.initialization.initialize`.
    Their names are global: layer i is `layers.i` whatever part of the model this process holds.

    Args:
        model: network flags, resolved (no None among the sizes).
        precision: number formats.
        context: what it is built in.
        padded_vocab_size: v.
        part: the layers that this process holds, and whether it begins or ends the model; None:
            the whole model.
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
        self.part = part or whole_model(sizes_of(model).layers)
        self.layout = context.layout
        self.attention_choice = context.kernels.attention
        self.embedding = new_embedding(
            model, precision, context, self.part, padded_vocab_size=padded_vocab_size
        )
        has_rope = model.position_embedding_type == "rope"
        self.rotary = RotaryTable(model, device=context.device) if has_rope else None
        self.layers = LayerStack(
            model,
            context,
            self.part.layers,
            recompute=recompute,
        )
        self.final_norm = self.output = None
        if self.part.head:
            self.final_norm = new_norm(model, context)
            token_loss = TokenLoss.from_config(precision, context.device)
            self.output = Output(
                model, context, token_loss, self.embedding, padded_vocab_size=padded_vocab_size
            )

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mask: Mask | None = None,
        hidden: Tensor | None = None,
        cache: KeyValueCache | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """One pass through the layers held here.

        With context parallelism s counts this rank's tokens: its part of every sequence.

        Args:
            tokens: [b, s].
            position_ids: [b, s], for learned positions; None: places in the sequence.
            labels: [b, s], the token that follows each.
            mask: bool [b or 1, 1, s, s], True where a query may attend, or documents; None: causal.
            hidden: [s, b, h], from the part before; None where this part begins the model.
            cache: of earlier tokens, with the places of these; b is 1 then. None: the tokens are
                whole sequences.
            loss_mask: [b, s], by what each loss will count, see `Output`.

        Returns:
            Where the model goes on in another part: hidden states [s, b, h]. At its end, with
            labels the loss of each token, fp32 [b, s]; else logits [b, s, v/t], with a cache of
            the tokens that it wants them of.
        """
        if cache is None:
            sequence = tokens.shape[1] * self.layout.context.size
            positions = local_positions(sequence, self.layout.context, tokens.device)
        else:
            positions = cache.positions
        if position_ids is None:
            position_ids = positions.expand_as(tokens)
        rotation = None if self.rotary is None else self.rotary(positions)
        if hidden is None:
            assert isinstance(self.embedding, Embedding), "this part takes hidden states"
            hidden = self.embedding(tokens, position_ids)
        stream = self.layers.run(Stream(hidden), mask, rotation, cache)
        if self.final_norm is None or self.output is None:
            return stream.join()
        _, x = self.final_norm(stream)  # [s, b, h]
        if cache is not None:
            x = x[cache.outputs]
        scores: Tensor = self.output(x, labels, loss_mask)
        return scores
