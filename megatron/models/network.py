"""The base class of all models, with the plan, the embedding and the rotary embeddings."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.stages import ModelPart, whole_model
from megatron.kernels.rope import Rotation
from megatron.models.embedding import Embedding, RotaryTable, new_embedding
from megatron.models.plan import LayerPlan, ModelPlan, multi_token_plan, rotaries
from megatron.parallel.build import BuildContext


class Network(nn.Module):
    """The base class of models and their parts, with the plan, embedding and rotary embeddings.

    Parameters are allocated but not initialized; `parallel.parameter.initialize` does that. Their
    names are global: layer i is `layers.i` on every process.

    Args:
        plan: The whole network.
        context: Layout, device, kernels and number formats.
        part: The layers that this process holds, and whether it has the embedding and the heads;
            `None` builds the whole model.
    """

    def __init__(self, plan: ModelPlan, context: BuildContext, part: ModelPart | None) -> None:
        """Build the embedding and the rotary table if this part needs them."""
        super().__init__()
        self.plan = plan
        self.part = part or whole_model(len(plan.layers))
        self.layout = context.layout
        self.attention_choice = context.kernels.attention
        self.embedding = new_embedding(plan, context, self.part)
        ahead = multi_token_plan(plan)
        # The rotations of `LayerStack` come first, in the same order.
        self._rotaries = rotaries((*plan.layers, *(ahead.layers if ahead is not None else ())))
        self.rotary = nn.ModuleList(
            RotaryTable(rotary, context.device) for rotary in self._rotaries
        )

    def embed(
        self,
        tokens: Tensor,
        positions: Tensor,
        token_types: Tensor | None = None,
        *,
        site: str = "embedding",
    ) -> Tensor:
        """Return the embeddings of tokens, [s, b, h]; [s/t, b, h] with sequence parallelism.

        Args:
            tokens: [b, s].
            positions: [s] or [b, s].
            token_types: [b, s], for a model that has them; `None` means all are 0.
            site: Name that gives this call its own dropout mask within the pass.
        """
        assert isinstance(self.embedding, Embedding), "this part takes hidden states"
        position_ids = positions.expand_as(tokens)
        vectors: Tensor = self.embedding(tokens, position_ids, token_types, site=site)
        return vectors

    def rotation(
        self, positions: Tensor, length: int | Tensor | None = None
    ) -> tuple[Rotation, ...]:
        """Return the rotation of positions [s] for each kind of rotary embeddings in the model.

        Args:
            positions: The positions, int64 [s].
            length: The length of the sequence, or of each position's sequence, int64 [s]. `None`
                means that all positions belong to one whole sequence.
        """
        lengths = len(positions) if length is None else length
        return tuple(table(positions, lengths) for table in self.rotary)

    def rotation_in(self, layer: LayerPlan, rotations: tuple[Rotation, ...]) -> Rotation | None:
        """Return the rotation of one layer, or `None` if it has no rotary embeddings.

        Args:
            layer: The plan of the layer.
            rotations: The result of `rotation`.
        """
        if layer.rotary is None:
            return None
        return rotations[self._rotaries.index(layer.rotary)]
