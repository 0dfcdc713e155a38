"""The output layer, which computes the score of every vocabulary entry and each token's loss.

A reward model computes a single score for each token instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.cross_entropy import choose_cross_entropy
from megatron.kernels.library import find_library
from megatron.models.costs import MicroBatch
from megatron.models.embedding import Embedding, TiedWordEmbedding, vocabulary_matrix
from megatron.models.plan import ClassifierPlan, OutputPlan
from megatron.parallel.adapter import Adapter
from megatron.parallel.adapter_stack import AdapterStack
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import Communication, reduce_from
from megatron.parallel.cross_entropy import (
    CHUNK_LOGITS,
    linear_cross_entropy,
    vocabulary_cross_entropy,
)
from megatron.parallel.layers import Linear, Projections, Split
from megatron.parallel.linear import collective_transport, parallel_linear
from megatron.parallel.parameter import ZEROS
from megatron.parallel.products import PLAIN, InFp32, LinearCall


class Output(nn.Module):
    """The output layer, which computes a score for every vocabulary entry, or each token's loss.

    Its matrix [v, h] is the word embedding table or, in a model that does not tie the two, a
    separate matrix. Only a separate matrix can have an adapter (`adapter`, as in `Linear`).

    Args:
        plan: The plan of this layer.
        context: Layout, device, kernels and number formats.
        embedding: Embedding of this part of the model. It may be `None` only if the matrix is not
            tied.
        uses: How many times a training pass computes losses with the matrix.
    """

    def __init__(
        self,
        plan: OutputPlan,
        context: BuildContext,
        embedding: Embedding | TiedWordEmbedding | None,
        *,
        uses: int = 1,
    ) -> None:
        """Tie the matrix to the embedding table, or allocate one."""
        super().__init__()
        layout = context.layout
        self.communication = Communication(layout.tensor, layout.sequence_parallel, context.overlap)
        self.scale, self.softcap = plan.scale, plan.softcap
        precision = context.precision
        fuses = precision.cross_entropy_loss_fusion
        library = find_library(context.device).library if fuses else None
        self.cross_entropy = choose_cross_entropy(
            library, in_16_bits=precision.fp16_lm_cross_entropy
        )
        # The loss is computed in chunks, so the logits of all tokens are never in memory together.
        self.is_chunked = fuses and precision.cross_entropy_fusion_impl == "linear"
        self.products = context.kernels.output_products
        self.in_features, self.out_features = plan.hidden, plan.vocabulary
        self.split: Split | None = "column"
        self.adapted_as: Projections | None = None
        self.adapter: Adapter | AdapterStack | None = None
        # The tuple keeps the embedding from becoming a submodule, so its weight has only one name.
        self._tied: tuple[nn.Module, ...] = ()
        if not plan.tied:
            self.weight = vocabulary_matrix(plan.vocabulary, plan.hidden, plan.init, context)
        else:
            assert embedding is not None, "a tied output needs the embedding"
            self._tied = (embedding.word,)
        self.bias = None
        if plan.bias:
            self.bias = context.new_parameter((plan.vocabulary,), init=ZEROS, split_dim=0)
        self._gradient = context.registry.reserve_slot(self._matrix(), uses=uses)

    @staticmethod
    def parameter_count(plan: OutputPlan, tensor: int) -> int:
        """Count the parameters that one of `tensor` ranks holds, except a tied embedding."""
        own = 0 if plan.tied else plan.hidden
        return plan.vocabulary // tensor * (own + plan.bias)

    @staticmethod
    def flops(plan: OutputPlan, length: int) -> int:
        """Count the FLOPs of the forward and backward passes for a sequence."""
        return 6 * length * plan.vocabulary * plan.hidden

    @staticmethod
    def activation_bytes(plan: OutputPlan, batch: MicroBatch) -> int:
        """Count the bytes that the logits of pending losses occupy until the backward pass.

        The gradients of the logits reuse these bytes.
        """
        rows = plan.vocabulary // batch.tensor
        if not batch.chunked_loss:
            return batch.losses * batch.width * batch.tokens * rows
        # One chunk of logits, and the gradients that are kept until the backward pass.
        gradients = plan.hidden * (4 * rows + batch.width * batch.tokens)
        logits = min(batch.tokens * rows, CHUNK_LOGITS)
        return batch.width * logits + batch.losses * gradients

    def forward(self, x: Tensor, labels: Tensor | None, loss_mask: Tensor | None = None) -> Tensor:
        """Return logits, or the loss if labels are given.

        Args:
            x: Normalized hidden states [s, b, h]; [s/t, b, h] with sequence parallelism.
            labels: [b, s], the correct token at each position.
            loss_mask: [b, s], the weight of each token's loss.

        Returns:
            The scalar sum(losses * loss_mask) if labels and a mask are given. With labels alone,
            the loss of each token, fp32 [b, s], which has no gradient with
            --cross-entropy-fusion-impl linear. Otherwise logits [b, s, v/t].
        """
        if self.scale is not None:
            x = x * self.scale
        low_rank, bias = None, self.bias
        if self.adapter is not None:
            x, low_rank = self.adapter.project_down(x)
            bias = bias if low_rank is None else None  # added after the adapter's output
        call, slot = LinearCall(x, self._matrix(), bias), self._gradient.slot
        if labels is not None and self.is_chunked:
            chunked = linear_cross_entropy(
                call,
                labels.t(),
                self.communication,
                loss_mask=None if loss_mask is None else loss_mask.t(),
                implementation=self.cross_entropy,
                slot=slot,
            )
            return chunked.losses.t() if loss_mask is None else chunked.total
        transport = collective_transport(self.communication)
        products = self.products if labels is None else PLAIN
        logits = parallel_linear(call, transport, slot=slot, products=products)
        if self.adapter is not None and low_rank is not None:
            logits = self.adapter.add_product(low_rank, logits, self._matrix())
            logits = logits if self.bias is None else logits + self.bias
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if labels is None:
            return logits.transpose(0, 1)
        axis = self.communication.axis
        losses = vocabulary_cross_entropy(
            logits, labels.t(), axis, implementation=self.cross_entropy, reuse_logits=True
        ).t()
        return losses if loss_mask is None else (losses * loss_mask).sum()

    def _matrix(self) -> nn.Parameter:
        module = self._tied[0] if self._tied else self
        matrix: nn.Parameter = module.weight  # type: ignore[assignment]
        return matrix


class TokenScore(Linear):
    """A reward model's head, which computes one score for each token in fp32.

    Args:
        plan: The plan of the head.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: ClassifierPlan, context: BuildContext) -> None:
        """Allocate the whole layer on every tensor rank."""
        super().__init__(
            plan.hidden,
            plan.outputs,
            context.multiplying_by(InFp32),
            split=None,
            init=plan.init.weight(plan.hidden, plan.outputs),
            bias=plan.bias,
        )
        self.sequence = context.layout.sequence

    @staticmethod
    def parameter_count(plan: ClassifierPlan, tensor: int) -> int:
        """Count the parameters. Every tensor rank holds all of them."""
        return plan.outputs * (plan.hidden + plan.bias)

    @staticmethod
    def flops(plan: ClassifierPlan, length: int) -> int:
        """Count the FLOPs of the forward and backward passes for a sequence."""
        return 6 * length * plan.outputs * plan.hidden

    @staticmethod
    def activation_bytes(plan: ClassifierPlan, batch: MicroBatch) -> int:
        """Return 0: one number per token is negligible next to the layers' activations."""
        return 0

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, h], or [s/t, b, h] with sequence parallelism, to fp32 [b, s] on every rank."""
        scores = super().forward(x).squeeze(-1).t()
        # Each rank fills in the scores of its own tokens, so the sum over ranks has all scores.
        # Every rank computes the same loss, so each gradient goes to the rank that holds the token.
        offset, part = self.sequence.rank * scores.shape[1], scores.shape[1]
        after = (self.sequence.size - 1) * part - offset
        return reduce_from(F.pad(scores, (offset, after)), self.sequence)


def masked_mean(total: Tensor, mask: Tensor) -> Tensor:
    """Return the mean loss of the tokens that the mask includes, or 0 (not nan) if there are none.

    Args:
        total: The scalar sum of losses * mask.
        mask: 1 for each token whose loss counts, otherwise 0.
    """
    return total / mask.sum().clamp(min=1)
