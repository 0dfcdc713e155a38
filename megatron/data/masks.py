"""From the tokens of a micro-batch to what the model takes.

b micro-batch, s sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.parallel.context.split import split_sequence
from megatron.parallel.layout import Axis


class Batch(NamedTuple):
    """One micro-batch.

    Attributes:
        tokens: inputs, `[b, s]` int64.
        labels: the token after each input, `[b, s]` int64.
        loss_mask: 1 where a label counts, else 0, `[b, s]` float32.
        position_ids: `[b, s]` int64.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor


def make_batch(
    text: Tensor,
    *,
    eod: int,
    reset_position_ids: bool = False,
    eod_mask_loss: bool = False,
) -> Batch:
    """Cut inputs and labels, and mark where documents end.

    An end-of-document token belongs to the document that it ends.

    Args:
        text: tokens `[b, s + 1]`.
        eod: id of the end-of-document token.
        reset_position_ids: count positions from 0 in every document.
        eod_mask_loss: no loss where the input is an end-of-document token.
    """
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    is_end = tokens == eod
    loss_mask = make_loss_mask(tokens, eod=eod, eod_mask_loss=eod_mask_loss)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # Whether each token is the first after an end, `[b, s]`.
    is_start = torch.nn.functional.pad(is_end[:, :-1], (1, 0))
    if reset_position_ids:
        start = torch.where(is_start, positions, 0).cummax(dim=1).values
        positions = positions - start
    return Batch(tokens, labels, loss_mask, positions)


def make_loss_mask(tokens: Tensor, *, eod: int, eod_mask_loss: bool) -> Tensor:
    """1 where the token after one of `tokens` `[b, s]` counts, else 0: `[b, s]` float32.

    See `make_batch`.
    """
    if eod_mask_loss:
        return (tokens != eod).float()
    return torch.ones_like(tokens, dtype=torch.float32)


def context_part(batch: Batch, axis: Axis) -> Batch:
    """This rank's tokens of a whole micro-batch, `[b, s/C]` each, for C context ranks.

    Gradients and losses are averaged over context ranks, so for a mean over the whole batch a
    rank's loss is C * (loss * loss_mask).sum() / whole loss_mask.sum(): the denominator is that of
    `batch`, which every context rank holds, not that of the part.
    """
    if axis.size == 1:
        return batch
    return Batch(*(split_sequence(x, axis, dim=1) for x in batch))
