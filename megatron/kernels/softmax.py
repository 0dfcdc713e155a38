"""The softmax of attention that holds every score."""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -10000.0  # score of a pair that may not attend, as in Megatron


def masked_softmax(
    scores: Tensor, mask: Tensor | None, *, causal: bool, factor: float, dtype: torch.dtype
) -> Tensor:
    """softmax(factor * scores) over keys, in the type of the scores.

    Args:
        scores: [b, n, s, keys].
        mask: bool [b or 1, 1, s or 1, keys], True where a query may attend; replaces `causal`.
        causal: without a mask, query i sees keys up to i + keys - s.
        factor: of the scores.
        dtype: of the result.

    Returns:
        Weights [b, n, s, keys]. Where a query may attend to nothing, all its weights are equal.
    """
    scores = scores * factor
    if mask is None and causal:
        queries, keys = scores.shape[-2:]
        everything = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        mask = everything.tril(keys - queries)
    if mask is not None:
        scores = scores.masked_fill(~mask, MASKED)
    return scores.softmax(dim=-1).to(dtype)
