"""Bi-encoder: two BERT towers that map queries and contexts into one vector space.

A high inner product of their vectors means that a context answers a query. Training compares each
query with the contexts of all samples in the micro-batch, on all data-parallel ranks. A query's own
context is correct and all others are wrong (Lee et al., 2019, "Latent Retrieval for Weakly
Supervised Open Domain Question Answering").

Shapes: q queries, c contexts, s sequence, b micro-batch, h hidden, e size of a vector.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.retriever import CONTEXT, QUERY, SHARED
from megatron.config.stages import ModelPart, whole_model
from megatron.models.bert import BertModel, Classifier, first_token
from megatron.models.plan import ClassifierPlan, ModelPlan
from megatron.models.recompute import RecomputePlan
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import gather_rows_to
from megatron.parallel.layout import Axis


class Vectors(NamedTuple):
    """The vectors of some queries, [q, e], and of some contexts, [c, e]."""

    queries: Tensor
    contexts: Tensor


class TextEncoder(BertModel):
    """A tower: a BERT model whose hidden state of [CLS], optionally projected, represents a text.

    Its parameters are those of a BERT model without heads or pooler. With a projection it also has
    `projection.weight` [e, h] and `projection.bias` [e]. The arguments are those of `BertModel`.
    """

    def __init__(
        self,
        plan: ModelPlan,
        context: BuildContext,
        part: ModelPart | None = None,
        recompute: RecomputePlan | None = None,
    ) -> None:
        """Build a BERT model, and the projection if the plan has one."""
        super().__init__(plan, context, part, recompute)
        self.sequence = context.layout.sequence
        projection = plan.head("projection")
        self.projection = None
        if isinstance(projection, ClassifierPlan):
            self.projection = Classifier(projection, context)

    def encode(self, tokens: Tensor, is_token: Tensor) -> Tensor:
        """Return the vectors of texts, [b, e], on every tensor-parallel rank.

        Args:
            tokens: [b, s].
            is_token: bool [b, s], False for padding, which comes after the tokens.
        """
        first = first_token(self(tokens, is_token, torch.zeros_like(tokens)), self.sequence)
        projected: Tensor = first if self.projection is None else self.projection(first)
        return projected.squeeze(0)


class BiEncoderModel(nn.Module):
    """The towers of a bi-encoder: `query_model` and `context_model`, or a single `shared_model`.

    Args:
        plan: The whole network, with the number of towers.
        context: Layout, device, kernels and number formats.
        part: The whole model, or `None`, which means the same. Towers cannot be split into pipeline
            stages.
        recompute: Activations to recompute in the backward pass; `None` keeps all of them.
    """

    def __init__(
        self,
        plan: ModelPlan,
        context: BuildContext,
        part: ModelPart | None = None,
        recompute: RecomputePlan | None = None,
    ) -> None:
        """Build the towers."""
        super().__init__()
        whole = whole_model(len(plan.layers))
        assert part in (None, whole), "the towers of a bi-encoder are not split into stages"
        self.plan, self.part = plan, whole
        self.towers = (SHARED,) if plan.towers == 1 else (QUERY, CONTEXT)
        for name in self.towers:
            self.add_module(name, TextEncoder(plan, context, whole, recompute))
        self.attention_choice = context.kernels.attention

    @property
    def queries(self) -> TextEncoder:
        """The tower that encodes queries."""
        return self._tower(0)

    @property
    def contexts(self) -> TextEncoder:
        """The tower that encodes contexts."""
        return self._tower(-1)

    def forward(
        self, queries: Tensor, is_query_token: Tensor, contexts: Tensor, is_context_token: Tensor
    ) -> Vectors:
        """Return the vectors of queries and contexts.

        Args:
            queries: [q, s].
            is_query_token: bool [q, s], False for padding.
            contexts: [c, s].
            is_context_token: bool [c, s], False for padding.
        """
        if len(self.towers) == 2:
            return Vectors(
                self.queries.encode(queries, is_query_token),
                self.contexts.encode(contexts, is_context_token),
            )
        # One pass over both, because a weight's gradient is collected once per micro-batch.
        texts, is_token = (
            torch.cat([queries, contexts]),
            torch.cat([is_query_token, is_context_token]),
        )
        vectors = self.queries.encode(texts, is_token)
        return Vectors(vectors[: len(queries)], vectors[len(queries) :])

    def _tower(self, index: int) -> TextEncoder:
        tower = self.get_submodule(self.towers[index])
        assert isinstance(tower, TextEncoder)
        return tower


class Retrieval(NamedTuple):
    """The result of searching for each query's context among the contexts of all ranks.

    Attributes:
        loss: The mean cross entropy of the correct contexts over the queries of all ranks. It is
            the same on every rank.
        ranks: For each query of all ranks, the number of contexts that score higher than the
            correct one, int64 [queries of all ranks].
    """

    loss: Tensor
    ranks: Tensor


def compare_all(
    vectors: Vectors, data: Axis, *, scale: float, counted: Tensor | None = None
) -> Retrieval:
    """Score the queries of all ranks against the contexts of all ranks; return loss and ranking.

    Context i of a rank is the correct one for its query i. If a rank has more contexts than
    queries, the extra ones are wrong for every query. The numbers of queries and contexts are the
    same on all ranks, and so are the results. Collective.

    Gradients flow back to the rank of each vector. Averaged over the ranks, as parameter gradients
    are, they equal those of a single process with all samples.

    Args:
        vectors: The vectors of this rank.
        data: The data-parallel ranks.
        scale: Factor applied to the scores.
        counted: bool [c], False for contexts that are only padding; `None` counts all.
    """
    queries = gather_rows_to(vectors.queries.float(), data)
    contexts = gather_rows_to(vectors.contexts.float(), data)
    scores = queries @ contexts.t() * scale
    if counted is not None:
        is_counted = gather_rows_to(counted.float()[:, None], data)[:, 0] > 0
        scores = scores.masked_fill(~is_counted, -torch.inf)
    num_queries, num_contexts = len(vectors.queries), len(vectors.contexts)
    correct = torch.arange(len(queries), device=scores.device)
    correct = correct // num_queries * num_contexts + correct % num_queries
    with torch.no_grad():
        ranks = (scores > scores.gather(1, correct[:, None])).sum(1)
    return Retrieval(F.cross_entropy(scores, correct), ranks)


def top_k_accuracy(ranks: Tensor, k: int) -> Tensor:
    """Return the percentage of queries whose correct context is among the k best.

    Args:
        ranks: For each query, the number of contexts that score higher than the correct one, [q].
        k: The number of contexts to consider.
    """
    return 100 * (ranks < k).float().mean()
