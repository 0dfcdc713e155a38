"""Inputs and labels of multi-token prediction: a micro-batch, shifted to the left."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.context.split import TokenBatch


def batches_ahead(
    batch: TokenBatch, depths: int, documents: Tensor | None = None, *, eod: int | None = None
) -> Iterator[TokenBatch]:
    """Yield the inputs and labels of each depth: `batch`, shifted one position further each time.

    At position i, depth k reads token i + k and predicts token i + k + 1. This prediction has the
    same weight in the loss as the label of token i + k has in `batch`. Beyond the end of the
    sequence, the weight is 0. If `documents` are given, the weight is also 0 where token i + k or,
    if `eod` is given too, token i + k + 1 belongs to a different document than token i.

    Args:
        batch: The micro-batch, with whole sequences `[b, s]`.
        depths: The number of depths.
        documents: The index of each token's document, `[b, s]`. `None` allows predictions across
            the ends of documents.
        eod: The id of the end-of-document token, if documents end with it.
    """
    shifted = batch
    mask, shifted_documents = batch.loss_mask, documents
    if documents is not None and eod is not None:
        mask = mask * (batch.tokens != eod)  # the next token begins another document
    for _ in range(depths):
        shifted = TokenBatch(*(_shifted(x) for x in shifted))
        mask = _shifted(mask)
        weights = mask
        if documents is not None and shifted_documents is not None:
            shifted_documents = _shifted(shifted_documents, -1)
            weights = mask * (shifted_documents == documents)
        yield shifted._replace(loss_mask=weights)


def _shifted(x: Tensor, last: int = 0) -> Tensor:
    """Shift `[b, s]` by one position to the left, and fill the end with `last`."""
    return F.pad(x[:, 1:], (0, 1), value=last)
