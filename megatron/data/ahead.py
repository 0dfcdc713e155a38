"""Inputs and labels of multi-token prediction: those of a micro-batch, some places further on."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from megatron.data.gpt import TokenBatch


def batches_ahead(
    batch: TokenBatch, depths: int, documents: Tensor | None = None, *, eod: int | None = None
) -> Iterator[TokenBatch]:
    """Yield what each depth reads and predicts: `batch`, moved by one more place each time.

    At place i, depth k reads token i + k and predicts token i + k + 1, whose weight in the loss is
    the one that it has in `batch`. It is 0 if the sequence ends before, and if `documents` are kept
    apart, also where token i + k + 1 belongs to another document than token i.

    Args:
        batch: The micro-batch, whole sequences [b, s].
        depths: The number of depths.
        documents: The number of each token's document, [b, s]; `None` lets predictions pass over
            the ends of documents.
        eod: The id of the token that ends a document, if such tokens end `documents`.
    """
    here = batch
    mask, there = batch.loss_mask, documents
    if documents is not None and eod is not None:
        mask = mask * (batch.tokens != eod)  # the next token begins another document
    for _ in range(depths):
        here = TokenBatch(*(_moved(x) for x in here))
        mask = _moved(mask)
        weights = mask
        if documents is not None and there is not None:
            there = _moved(there, -1)
            weights = mask * (there == documents)
        yield here._replace(loss_mask=weights)


def _moved(x: Tensor, last: int = 0) -> Tensor:
    """Return what stands one place further on, [b, s]; `last` at the end."""
    return F.pad(x[:, 1:], (0, 1), value=last)
