"""Cross entropy over a vocabulary that is split over tensor ranks, without fp32 copies of logits.

The logits are the largest activation of a language model. Here they are kept once, in the format
they came in, and their gradient may take their place; or they are never all there: see
`linear_cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.cross_entropy import REFERENCE, CrossEntropy, Statistics
from megatron.kernels.weight_gradient import weight_gradient
from megatron.parallel.collectives import all_reduce
from megatron.parallel.communication import Communication
from megatron.parallel.gradients import GradientSlot
from megatron.parallel.layout import Axis

# Logits that `linear_cross_entropy` holds at a time: rows enough for a product at full speed.
CHUNK_LOGITS = 2**27


def vocabulary_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    form: CrossEntropy = REFERENCE,
    reuse_logits: bool = False,
) -> Tensor:
    """-log softmax(logits)[label] over the whole vocabulary.

    Args:
        logits: [s, b, v/t], this rank's part of the (padded) vocabulary.
        labels: [s, b], ids in the whole vocabulary.
        axis: tensor axis.
        form: kernel or plain PyTorch.
        reuse_logits: backward writes the gradient over the logits. Nobody else may need them
            then, and backward runs once: autograd refuses whatever comes after.

    Returns:
        [s, b] in fp32, equal on every rank.
    """
    return _CrossEntropy.apply(logits, labels, axis, form, reuse_logits)


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits and two numbers a row; backward makes the softmax again from them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        axis: Axis,
        form: CrossEntropy,
        reuse_logits: bool,
    ) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        local = _local_labels(labels, axis, rows.shape[1])
        maxima, sums, loss = _join(form.statistics(rows, local), local, rows.shape[1], axis)
        ctx.save_for_backward(logits, local, maxima, sums)
        ctx.form, ctx.reuse_logits = form, reuse_logits
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, maxima, sums = ctx.saved_tensors  # raises where they were reused already
        rows = logits.reshape(-1, logits.shape[-1])
        result = rows if ctx.reuse_logits else torch.empty_like(rows)
        ctx.form.gradient(rows, local, maxima, sums, grad.reshape(-1), result)
        if ctx.reuse_logits:  # kernels write behind autograd's back
            torch.autograd.graph.increment_version(logits)
        return result.view(*grad.shape, -1), None, None, None, None


def _local_labels(labels: Tensor, axis: Axis, size: int) -> Tensor:
    """Labels [n] counted from this rank's first of `size` vocabulary entries."""
    return labels.reshape(-1) - axis.rank * size


def _join(part: Statistics, local: Tensor, size: int, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Of whole rows [n]: maxima, sums of exponentials, losses. Two small collectives."""
    if axis.size == 1:
        return part.maxima, part.sums, part.sums.log() - (part.targets - part.maxima)
    maxima = all_reduce(part.maxima.clone(), axis, dist.ReduceOp.MAX)
    mine = (local >= 0) & (local < size)
    picked = torch.where(mine, part.targets - maxima, 0.0)
    shifted = part.sums * (part.maxima - maxima).exp()
    sums, picked = all_reduce(torch.stack((shifted, picked)), axis)
    return maxima, sums, sums.log() - picked


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    communication: Communication,
    *,
    bias: Tensor | None = None,
    form: CrossEntropy = REFERENCE,
    slot: GradientSlot | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> Tensor:
    """The cross entropy of x W^T + bias, of which only a few rows exist at a time.

    Forward keeps three numbers a token. Backward computes each chunk of logits again (a third more
    work in the output product), turns it into its gradient, and adds the weight's gradient in fp32.

    Args:
        x: [s, b, h]; with sequence parallelism this rank's part [s/t, b, h].
        weight: [v/t, h], this rank's part of the vocabulary.
        labels: [s, b], ids in the whole vocabulary.
        communication: of the product.
        bias: [v/t].
        form: kernel or plain PyTorch.
        slot: where the weight's gradient goes; None: autograd gets it, in the weight's format.
        chunk_logits: elements of logits at a time.

    Returns:
        [s, b] in fp32, equal on every rank.
    """
    read = weight if slot is None else weight.detach()
    return _LinearCrossEntropy.apply(x, read, bias, labels, communication, form, slot, chunk_logits)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        communication: Communication,
        form: CrossEntropy,
        slot: GradientSlot | None,
        chunk_logits: int,
    ) -> Tensor:
        whole = communication.start_gather(x).wait().flatten(0, -2)
        local = _local_labels(labels, communication.axis, weight.shape[0])
        ctx.height = max(1, chunk_logits // weight.shape[0])
        numbers = whole.new_empty(3, whole.shape[0], dtype=torch.float32)
        for rows in _parts(whole, ctx.height):
            part = form.statistics(F.linear(whole[rows], weight, bias), local[rows])
            numbers[:, rows] = torch.stack(part)
        statistics = Statistics(*numbers)
        maxima, sums, loss = _join(statistics, local, weight.shape[0], communication.axis)
        ctx.save_for_backward(x, weight, bias, local, maxima, sums)
        ctx.communication, ctx.form, ctx.slot = communication, form, slot
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, local, maxima, sums = ctx.saved_tensors
        upstream = grad.reshape(-1)
        gathered = ctx.communication.start_gather(x).wait()
        whole = gathered.flatten(0, -2)
        input_grad = torch.empty_like(whole)
        bias_grad = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        with _weight_sum(weight, ctx.slot) as (into, accumulate):
            for rows in _parts(whole, ctx.height):
                logits = F.linear(whole[rows], weight, bias)
                numbers = (local[rows], maxima[rows], sums[rows], upstream[rows])
                ctx.form.gradient(logits, *numbers, logits)
                torch.mm(logits, weight, out=input_grad[rows])
                if bias_grad is not None:
                    bias_grad += logits.sum(0, dtype=torch.float32)
                weight_gradient(logits, whole[rows], into, accumulate=accumulate or rows.start > 0)
        summing = ctx.communication.start_sum(input_grad.view_as(gathered))
        weight_grad = into.to(weight.dtype) if ctx.slot is None else None
        if bias_grad is not None:
            bias_grad = bias_grad.to(bias.dtype)
        return summing.wait(), weight_grad, bias_grad, None, None, None, None, None


def _parts(rows: Tensor, height: int) -> Iterator[slice]:
    return (slice(i, i + height) for i in range(0, rows.shape[0], height))


@contextmanager
def _weight_sum(weight: Tensor, slot: GradientSlot | None) -> Iterator[tuple[Tensor, bool]]:
    """Where the weight's gradient is added up in fp32, and whether something is there already."""
    if slot is None:
        yield torch.empty_like(weight, dtype=torch.float32), False
        return
    with slot.open() as (into, accumulate):
        yield into, accumulate
