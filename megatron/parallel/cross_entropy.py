"""Cross entropy over a vocabulary that is split over tensor ranks, without fp32 copies of logits.

The logits are the largest activation of a language model. Here they are kept once, in the format
they came in; fp32 values exist for a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis

CHUNK = 2**24  # logits held in fp32 at a time: 64 MiB


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, axis: Axis, *, in_16_bits: bool = False
) -> Tensor:
    """-log softmax(logits)[label] over the whole vocabulary.

    Args:
        logits: [s, b, v/t], this rank's part of the (padded) vocabulary.
        labels: [s, b], ids in the whole vocabulary.
        axis: tensor axis.
        in_16_bits: take exponentials in the logits' own format instead of fp32. Sums over the
            vocabulary are fp32 in any case.

    Returns:
        [s, b] in fp32, equal on every rank.
    """
    return _CrossEntropy.apply(logits, labels, axis, in_16_bits)


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits and two numbers a row; backward makes the softmax again from them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, in_16_bits: bool) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        shift = all_reduce(rows.amax(dim=-1, keepdim=True), axis, dist.ReduceOp.MAX)
        if not in_16_bits:
            shift = shift.float()  # and so is every difference from it
        sums = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
        for part in _row_chunks(rows):
            sums[part] = (rows[part] - shift[part]).exp_().sum(dim=-1, dtype=torch.float32)
        local = labels.reshape(-1) - axis.rank * rows.shape[1]
        mine = (local >= 0) & (local < rows.shape[1])
        local = torch.where(mine, local, 0)
        picked = (rows.gather(1, local[:, None]) - shift)[:, 0].float() * mine
        sums, picked = all_reduce(torch.stack((sums, picked)), axis)
        ctx.save_for_backward(rows, shift, sums, local, mine)
        return (sums.log() - picked).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, shift, sums, local, mine = ctx.saved_tensors
        flat = grad.reshape(-1, 1)
        scale, at_label = flat / sums[:, None], flat * mine[:, None]
        result = torch.empty_like(rows)
        for part in _row_chunks(rows):  # grad * (softmax - one at the label)
            chunk = (rows[part] - shift[part]).exp_().mul_(scale[part])
            chunk.scatter_add_(1, local[part, None], -at_label[part].to(chunk.dtype))
            result[part] = chunk
        return result.view(*grad.shape, -1), None, None, None


def _row_chunks(rows: Tensor) -> Iterator[slice]:
    """Slices of rows with at most CHUNK elements each (but at least one row)."""
    height = max(1, CHUNK // rows.shape[1])
    return (slice(i, i + height) for i in range(0, rows.shape[0], height))
