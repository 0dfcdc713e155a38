"""Multi-token prediction: additional layers that predict tokens further ahead.

See DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2; training follows Megatron Core.
The model itself (depth 0) reads a token and predicts the next one. Depth k reads one more token
than depth k - 1 and predicts the token after it: it projects the concatenation of that token's
normalized embedding and the normalized hidden states of depth k - 1, and passes the result through
its own layer. All depths share the model's embedding and output layer. In a pipeline, they
therefore run on the stage with the output layer, which holds a copy of the word embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.config.stages import ModelPart
from megatron.kernels.rope import Rotation
from megatron.kernels.segments import Mask
from megatron.models.attention import KeyValueCache
from megatron.models.block import Block
from megatron.models.costs import MicroBatch
from megatron.models.head import Output
from megatron.models.norm import Norm, Stream, new_norm
from megatron.models.plan import LayerPlan, ModelPlan, MultiTokenPlan, multi_token_plan
from megatron.models.recompute import RecomputePlan, checkpointed
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear


def layers_of(plan: ModelPlan, part: ModelPart) -> list[LayerPlan]:
    """Return the layers of a part of the model, including those of multi-token prediction."""
    mtp = multi_token_plan(plan)
    layers = [plan.layers[index] for index in part.layers]
    return [*layers, *(mtp.layers if part.head and mtp is not None else ())]


def copies_words(plan: ModelPlan) -> bool:
    """Return whether the last part of the model also reads the word embedding."""
    return plan.ties_words or plan.embedding.ahead > 0


class Depth(nn.Module):
    """A predictor of one more token: two normalizations, a projection, a layer, a normalization.

    The projection is not split. With sequence parallelism, every tensor rank projects its own
    tokens, without communication. Otherwise all ranks project the same tokens.

    Args:
        plan: The plan of all depths.
        context: Layout, device, kernels and number formats.
        index: Index of the depth in the plan, from 0. Depth k has index k - 1.
        recompute: Activations to recompute in the backward pass; `None` keeps all of them.
    """

    def __init__(
        self,
        plan: MultiTokenPlan,
        context: BuildContext,
        index: int,
        recompute: RecomputePlan | None = None,
    ) -> None:
        """Build the modules of the depth."""
        super().__init__()
        hidden = plan.hidden
        if recompute is not None:
            context = replace(context, recomputed=recompute.parts)
        self.embedding_norm = new_norm(plan.norm, hidden, context)
        self.hidden_norm = new_norm(plan.norm, hidden, context)
        self.projection = Linear(
            2 * hidden,
            hidden,
            context,
            split=None,
            init=plan.init.weight(2 * hidden, hidden),
            bias=False,
        )
        # As in Megatron Core, depths do not count as last layers.
        context = replace(context, fp8_layers=None)
        self.layer = Block(plan.layers[index], context, plan.layer_offset + index + 1)
        self.final_norm = new_norm(plan.norm, hidden, context)
        self.fp32_residual = context.precision.fp32_residual_connection
        self.is_recomputed = self.recomputes_all(recompute)
        self.routers = context.registry.routers
        self.stops_early = not (context.gathers_weights and self.routers.states)

    @staticmethod
    def recomputes_all(recompute: RecomputePlan | None) -> bool:
        """Return whether the backward pass recomputes whole depths.

        Method "block" recomputes the first layers of a stage but no depths, as in Megatron Core.
        """
        if recompute is None or recompute.granularity != "full":
            return False
        return recompute.method == "uniform"

    def forward(
        self,
        hidden: Tensor,
        vectors: Tensor,
        mask: Mask | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return the normalized hidden states of this depth, [s, b, h].

        Args:
            hidden: The previous depth's hidden states, [s, b, h]; [s/t, b, h] with sequence
                parallelism.
            vectors: The embeddings of the tokens that this depth reads, in the same shape.
            mask: Which keys a query may attend to, as in the model's other layers.
            rotation: Rotation of queries and keys, if this depth has rotary embeddings.
            cache: Keys and values of earlier tokens, in inference.
        """
        inputs = (hidden, vectors, mask, rotation, cache)
        if self.is_recomputed and torch.is_grad_enabled():
            return checkpointed(
                self._run,
                *inputs,
                recompute_context=self.routers.paused,
                stops_early=self.stops_early,
            )
        return self._run(*inputs)

    def _run(
        self,
        hidden: Tensor,
        vectors: Tensor,
        mask: Mask | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        _, embedded = self.embedding_norm(Stream(vectors))
        _, normal = self.hidden_norm(Stream(hidden))
        x = self.projection(torch.cat((embedded, normal), -1))
        stream = self.layer(Stream(x.float() if self.fp32_residual else x), mask, rotation, cache)
        result: Tensor
        _, result = self.final_norm(stream)
        return result


class MultiToken(nn.ModuleList):
    """All depths of multi-token prediction, which the model runs one after another.

    Its costs exclude the depths' transformer layers, which are counted with the model's own layers
    (`layers_of`).

    Args:
        plan: The plan of all depths.
        context: Layout, device, kernels and number formats.
        recompute: Activations to recompute in the backward pass; `None` keeps all of them.
    """

    def __init__(
        self, plan: MultiTokenPlan, context: BuildContext, recompute: RecomputePlan | None = None
    ) -> None:
        """Build every depth."""
        super().__init__(Depth(plan, context, index, recompute) for index in range(plan.depths))

    @staticmethod
    def parameter_count(plan: MultiTokenPlan, tensor: int) -> int:
        """Count the parameters outside the layers. Every tensor rank holds all of them."""
        norms = 3 * Norm.parameter_count(plan.norm, plan.hidden)
        return plan.depths * norms + MultiToken.matrix_parameters(plan)

    @staticmethod
    def matrix_parameters(plan: MultiTokenPlan) -> int:
        """Count the elements of the projections."""
        return plan.depths * 2 * plan.hidden**2

    @staticmethod
    def flops(plan: MultiTokenPlan, length: int) -> int:
        """Count the FLOPs of projections and output layers for a sequence."""
        projection = 6 * length * 2 * plan.hidden**2
        return plan.depths * (projection + Output.flops(plan.output, length))

    @staticmethod
    def activation_bytes(plan: MultiTokenPlan, batch: MicroBatch) -> int:
        """Count the bytes kept outside the layers for the backward pass.

        These are each depth's logits, input, embeddings, normalized pair and result.
        """
        states = 5 * batch.width * batch.tokens * plan.hidden // batch.sequence
        return plan.depths * (states + Output.activation_bytes(plan.output, batch))


def run_depths(
    depths: MultiToken,
    hidden: Tensor,
    vectors: Sequence[Tensor],
    mask: Mask | None,
    rotations: Sequence[Rotation | None],
) -> list[Tensor]:
    """Return the normalized hidden states of every depth, [s, b, h] each.

    Args:
        depths: The depths, in order.
        hidden: The model's normalized hidden states, [s, b, h].
        vectors: The embeddings that each depth reads, in the same shape.
        mask: Which keys a query may attend to.
        rotations: The rotation of each depth's queries and keys.
    """
    states = [hidden]
    for depth, embeddings, rotation in zip(depths, vectors, rotations, strict=True):
        states.append(depth(states[-1], embeddings, mask, rotation))
    return states[1:]
