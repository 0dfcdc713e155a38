"""Retro: a GPT model whose chunks attend to similar chunks of a database (Borgeaud et al., 2022).

The network is the same as in Megatron-LM 23.08: the encoder of the neighbors is part of the first
layer that reads them. The encoder's first layer also attends to the neighbors' chunk.

In a pipeline, stages send the hidden states of the sequence and of its neighbors together:
[s + l k r, b, h]. The neighbors' rows contain their embeddings before the first Retro layer, and
the encoder's output after it. Every message therefore has the same shape, and only one stage needs
the embeddings.

Shapes: s sequence, l chunks of m tokens, each with k neighbors of r tokens; b micro-batch, h
hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.models.gpt import GPTModel
from megatron.models.norm import Stream
from megatron.models.retrieval import Neighbors, RetrievalCache
from megatron.parallel.context.split import local_positions


class RetroModel(GPTModel):
    """Retro: a GPT model, some of whose layers attend to neighbors.

    It has the arguments and parameters of `GPTModel`, plus these parameters:

        layers.5.cross_norm, .cross_attention.query, .key_value, .output   also of layers 8, 11, ...
        layers.5.retriever.0.attention_norm, ...                           a layer that also
            attends to the chunk
        layers.5.retriever.1.attention_norm, ...                           plain layers
    """

    def forward(  # type: ignore[override] # it has neighbors, and no masks
        self,
        tokens: Tensor,
        neighbors: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        loss_mask: Tensor | None = None,
        neighbor_positions: Tensor | None = None,
    ) -> Tensor:
        """Run the layers of this part once, on whole sequences.

        With context parallelism, s and l count only this rank's tokens and chunks of a sequence.

        Args:
            tokens: [b, s].
            neighbors: [b, l, k, r], the tokens of each chunk's neighbors.
            position_ids: [b, s], for learned positions; `None` counts from the start of the
                sequence.
            labels: [b, s], the token that follows each token.
            hidden: [s + l k r, b, h], the previous part's output; `None` in the first part of the
                model.
            loss_mask: [b, s], the weight of each token's loss (`Output`).
            neighbor_positions: [b, l, k, r], for learned positions of the neighbors' tokens; `None`
                counts from the start of each neighbor.

        Returns:
            Hidden states [s + l k r, b, h] unless this is the last part of the model. With labels,
            the last part returns the loss of each token, fp32 [b, s], or the weighted sum of the
            losses if there is a loss mask. Without labels it returns logits [b, s, v/t].
        """
        samples, length = tokens.shape
        axis = self.layout.context
        positions = local_positions(length * axis.size, axis, tokens.device)
        if hidden is None:
            x = self.embed(tokens, positions if position_ids is None else position_ids)
            retrieved = self._embed_neighbors(neighbors, neighbor_positions)
        else:
            x, retrieved = hidden.tensor_split([length // self.layout.sequence.size])
            rows = neighbors.shape[3] // self.layout.sequence.size
            retrieved = retrieved.reshape(rows, -1, x.shape[2])  # [r, k b l, h]
        encoder_input = Neighbors(retrieved)
        stream = self.layers.run(Stream(x), None, self.rotation(positions), None, encoder_input)
        if self.final_norm is None or self.output is None:
            x = stream.join()
            return torch.cat((x, encoder_input.states.to(x.dtype).reshape(-1, samples, x.shape[2])))
        _, x = self.final_norm(stream)  # [s, b, h]
        scores: Tensor = self.output(x, labels, loss_mask)
        return scores

    def states(  # type: ignore[override] # its cache has neighbors
        self, tokens: Tensor, hidden: Tensor | None, cache: RetrievalCache
    ) -> Tensor:
        """Run the whole model except the output layer on new tokens, in inference.

        Args:
            tokens: [1, s].
            hidden: `None`, because the model is on a single process.
            cache: Keys and values of earlier tokens and chunks, the positions of the new tokens,
                and the neighbors of the chunks that end among them.

        Returns:
            Normalized hidden states [s, 1, h].
        """
        assert hidden is None, "Retro generates text on a single process"
        assert self.final_norm is not None, "Retro generates text on a single process"
        x, retrieved = self.embed(tokens, cache.positions), self._embed_neighbors(cache.neighbors)
        stream = self.layers.run(
            Stream(x), None, self.rotation(cache.positions), cache, Neighbors(retrieved, cache)
        )
        normal: Tensor = self.final_norm(stream)[1]
        return normal

    def _embed_neighbors(self, neighbors: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the embeddings of neighbors [b, l, k, r] as [r, k b l, h]."""
        if positions is None:
            positions = torch.arange(neighbors.shape[3], device=neighbors.device)
            positions = positions.expand_as(neighbors)
        tokens, positions = _by_neighbor(neighbors), _by_neighbor(positions)
        return self.embed(tokens, positions, site="neighbor embedding")


def _by_neighbor(values: Tensor) -> Tensor:
    """Make each neighbor a row: [b, l, k, r] -> [k b l, r]."""
    return values.permute(2, 0, 1, 3).flatten(0, 2)
