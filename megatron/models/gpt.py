"""GPT: a decoder-only transformer language model (Radford et al., 2019; Shoeybi et al., 2019).

Shapes: s sequence, b micro-batch, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.config.stages import ModelPart
from megatron.kernels.attention import flash_problem
from megatron.kernels.rope import Rotation
from megatron.kernels.segments import Mask, Segments
from megatron.models.attention import KeyValueCache
from megatron.models.block import LayerStack
from megatron.models.head import Output, TokenScore
from megatron.models.mixture_plan import MixturePlan
from megatron.models.multi_token import MultiToken, run_depths
from megatron.models.network import Network
from megatron.models.norm import Stream, new_norm
from megatron.models.plan import AttentionPlan, ClassifierPlan, ModelPlan, multi_token_plan
from megatron.models.recompute import RecomputePlan
from megatron.parallel.build import BuildContext
from megatron.parallel.context.split import TokenBatch, local_positions


class GPTModel(Network):
    """A GPT model: embedding, layers, final normalization, and an output layer or a reward head.

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
        self.layers = LayerStack(plan.layers, context, self.part.layers, recompute=recompute)
        self.packs_samples = _can_pack_samples(plan, context, self.part)
        self.final_norm = self.output = self.score = self.mtp = None
        if self.part.head:
            self.final_norm = new_norm(plan.final_norm, plan.hidden, context)
            score = plan.head("score")
            if isinstance(score, ClassifierPlan):
                self.score = TokenScore(score, context)
            else:
                assert plan.output is not None
                mtp = multi_token_plan(plan)
                uses = 1 + (mtp.depths if mtp is not None else 0)
                self.output = Output(plan.output, context, self.embedding, uses=uses)
                if mtp is not None:
                    self.mtp = MultiToken(mtp, context, recompute)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mask: Mask | None = None,
        hidden: Tensor | None = None,
        loss_mask: Tensor | None = None,
        ahead: Sequence[TokenBatch] = (),
    ) -> Tensor:
        """Run the layers of this part once, on whole sequences.

        With context parallelism, s counts only this rank's tokens of each sequence.

        Args:
            tokens: [b, s].
            position_ids: [b, s], for learned positions; `None` counts from the start of the
                sequence.
            labels: [b, s], the token that follows each token.
            mask: bool [b or 1, 1, s, s], True where a query may attend, or the `Segments` that
                describe the batch's documents; `None` means causal.
            hidden: [s, b, h], the previous part's output; `None` in the first part of the model.
            loss_mask: [b, s], the weight of each token's loss (`Output`).
            ahead: The inputs and labels of each depth of multi-token prediction, in training. For
                depth k, from 1, they are those of the token k positions later.

        Returns:
            Hidden states [s, b, h] unless this is the last part of the model. With labels, the last
            part returns the loss of each token, fp32 [b, s], or the weighted sum of the losses if
            there is a loss mask. Without labels it returns logits [b, s, v/t]. A reward model
            returns a score for each token instead, fp32 [b, s]. With `ahead`, the last part returns
            the weighted sum of the model's losses and that of each depth's, [1 + depths].
        """
        length = tokens.shape[1]
        documents = mask if self.packs_samples and isinstance(mask, Segments) else None
        if documents is not None and labels is not None and loss_mask is not None:
            # Put all samples in one row. The segments keep them apart, and the flash kernel then
            # needs no copies of queries, keys, values and results.
            mask = documents.in_one_row()
            position_ids = mask.positions if position_ids is None else position_ids.reshape(1, -1)
            tokens, labels, loss_mask = (x.reshape(1, -1) for x in (tokens, labels, loss_mask))
        x, rotations = self._run_layers(tokens, position_ids, mask, hidden, None, length)
        if self.final_norm is None:
            return x
        if self.score is not None:
            rewards: Tensor = self.score(x)
            return rewards
        assert self.output is not None
        if not ahead:
            scores: Tensor = self.output(x, labels, loss_mask)
            return scores
        assert self.mtp is not None, "the model predicts one token"
        embeddings = [
            self.embed(inputs.tokens, inputs.position_ids, site=f"embedding {depth} ahead")
            for depth, inputs in enumerate(ahead, 1)
        ]
        ahead_rotations = [self._rotation_ahead(depth, rotations) for depth in range(len(ahead))]
        depth_states = run_depths(self.mtp, x, embeddings, mask, ahead_rotations)
        sums = [self.output(x, labels, loss_mask)]
        for states, inputs in zip(depth_states, ahead, strict=True):
            sums.append(self.output(states, inputs.labels, inputs.loss_mask))
        return torch.stack(sums)

    def states(self, tokens: Tensor, hidden: Tensor | None, cache: KeyValueCache) -> Tensor:
        """Run the layers of this part on new tokens, in inference.

        Args:
            tokens: [1, s].
            hidden: [s, 1, h], the previous part's output; `None` in the first part of the model.
            cache: Keys and values of earlier tokens, and the positions of the new tokens.

        Returns:
            Hidden states [s, 1, h] of all tokens, normalized in the last part of the model.
        """
        return self._run_layers(tokens, None, None, hidden, cache, tokens.shape[1])[0]

    def states_ahead(
        self, depth: int, tokens: Tensor, hidden: Tensor, cache: KeyValueCache
    ) -> Tensor:
        """Return the normalized hidden states of one depth of multi-token prediction, [s, 1, h].

        Args:
            depth: Index of the depth, from 0. Depth k (`multi_token`) has index k - 1.
            tokens: [1, s], the tokens that the depth reads at the cache's positions.
            hidden: [s, 1, h], the normalized hidden states of the previous depth.
            cache: The depth's keys and values of earlier tokens.
        """
        assert self.mtp is not None, "the model predicts one token"
        embeddings = self.embed(tokens, cache.positions)
        rotations = self.rotation(cache.positions, cache.lengths)
        rotation = self._rotation_ahead(depth, rotations)
        states: Tensor = self.mtp[depth](hidden, embeddings, None, rotation, cache)
        return states

    def _rotation_ahead(self, depth: int, rotations: tuple[Rotation, ...]) -> Rotation | None:
        """Return the rotation of one depth of multi-token prediction, counted from 0."""
        ahead = multi_token_plan(self.plan)
        assert ahead is not None, "the model predicts one token"
        return self.rotation_in(ahead.layers[depth], rotations)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [1, k, v/t] of normalized hidden states [k, 1, h]."""
        assert self.output is not None, "the last part of the model has the output layer"
        scores: Tensor = self.output(states, None)
        return scores

    def _run_layers(
        self,
        tokens: Tensor,
        position_ids: Tensor | None,
        mask: Mask | None,
        hidden: Tensor | None,
        cache: KeyValueCache | None,
        length: int,
    ) -> tuple[Tensor, tuple[Rotation, ...]]:
        """Return the hidden states, normalized if this is the last part, and the rotations used.

        The arguments are those of `forward` and `states`, plus `length`: the number of tokens of
        each sequence that this rank holds.
        """
        sequence_length: int | Tensor
        if cache is None:
            sequence_length = length * self.layout.context.size
            if isinstance(mask, Segments) and mask.positions is not None:
                positions = mask.positions
            else:
                positions = local_positions(sequence_length, self.layout.context, tokens.device)
        else:
            sequence_length, positions = cache.lengths, cache.positions
        if hidden is None:
            hidden = self.embed(tokens, positions if position_ids is None else position_ids)
        rotations = self.rotation(positions, sequence_length)
        stream = self.layers.run(Stream(hidden), mask, rotations, cache)
        if self.final_norm is None:
            return stream.join(), rotations
        normal: Tensor = self.final_norm(stream)[1]  # [s, b, h]
        return normal, rotations


def _can_pack_samples(plan: ModelPlan, context: BuildContext, part: ModelPart) -> bool:
    """Return whether a batch of samples with documents may be packed into one long sequence.

    This requires that no layer's result for a token depends on where its document is in the batch.
    """
    return (
        part.embedding
        and part.head
        and multi_token_plan(plan) is None
        and plan.position_bias is None
        and context.layout.context.size == 1
        and not context.layout.sequence_parallel
        and context.kernels.attention.name != "plain"
        and all(
            isinstance(layer.mixer, AttentionPlan)
            and layer.mixer.alibi is None
            and layer.mixer.softcap is None
            and not flash_problem(layer.mixer.head_size, context.dtype, context.device)
            and not (isinstance(layer.mlp, MixturePlan) and layer.mlp.router.counts_by_sample)
            for layer in plan.layers
        )
    )
