"""Cross entropy over a vocabulary split over tensor ranks, without fp32 copies of logits.

Logits are the largest activation of a language model. This module keeps a single copy of them in
their original dtype, and their gradient may reuse the memory of this copy. `linear_cross_entropy`
never has all logits in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.cross_entropy import REFERENCE, CrossEntropy, Statistics
from megatron.kernels.weight_gradient import weight_gradient
from megatron.parallel.collectives import Communication, all_reduce
from megatron.parallel.layout import Axis
from megatron.parallel.linear import WeightSlot
from megatron.parallel.products import LinearCall

# The number of logits that `linear_cross_entropy` has in memory at a time. Each chunk reads and
# writes the weight's whole gradient. With fewer rows per chunk, this would take longer than the
# products.
CHUNK_LOGITS = 2**29
_ROWS_OF_A_TILE = 128  # rows in a tile of a product


def vocabulary_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    implementation: CrossEntropy = REFERENCE,
    reuse_logits: bool = False,
) -> Tensor:
    """Return the cross entropy -log softmax(logits)[label] over the whole vocabulary.

    Collective over the axis.

    Args:
        logits: This rank's shard of the logits over the padded vocabulary, [s, b, v/t].
        labels: The labels [s, b], as ids in the whole vocabulary.
        axis: The tensor axis.
        implementation: A kernel, or plain PyTorch.
        reuse_logits: Whether the backward pass overwrites the logits with their gradient. If so,
            nothing else may need the logits, and the backward pass can run only once. Autograd
            raises an error on any later use.

    Returns:
        The losses [s, b] in fp32, equal on every rank.
    """
    return _CrossEntropy.apply(logits, labels, axis, implementation, reuse_logits)


class _CrossEntropy(torch.autograd.Function):
    """A cross entropy that saves the logits and two values per row and recomputes the softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        axis: Axis,
        implementation: CrossEntropy,
        reuse_logits: bool,
    ) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        local = local_labels(labels, axis, rows.shape[1])
        maxima, sums, loss = join_statistics(
            implementation.statistics(rows, local), local, rows.shape[1], axis
        )
        ctx.save_for_backward(logits, local, maxima, sums)
        ctx.implementation, ctx.reuse_logits = implementation, reuse_logits
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, maxima, sums = ctx.saved_tensors  # raises an error if they were reused
        rows = logits.reshape(-1, logits.shape[-1])
        result = rows if ctx.reuse_logits else torch.empty_like(rows)
        ctx.implementation.gradient(rows, local, maxima, sums, grad.reshape(-1), result)
        if ctx.reuse_logits:  # autograd does not see what kernels write
            torch.autograd.graph.increment_version(logits)
        return result.view(*grad.shape, -1), None, None, None, None


def local_labels(labels: Tensor, axis: Axis, size: int) -> Tensor:
    """Return labels relative to this rank's first vocabulary entry, [n].

    Args:
        labels: The labels, as ids in the whole vocabulary.
        axis: The tensor axis.
        size: The number of vocabulary entries per rank.
    """
    return labels.reshape(-1) - axis.rank * size


def join_statistics(
    part: Statistics, local: Tensor, size: int, axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the statistics of all ranks' logits, with two collectives.

    Args:
        part: The statistics of this rank's shard of the logits.
        local: The labels relative to this rank's first vocabulary entry, [n].
        size: The number of vocabulary entries per rank.
        axis: The tensor axis.

    Returns:
        The maximum, the sum of exponentials and the loss of each whole row, fp32 [n].
    """
    if axis.size == 1:
        return part.maxima, part.sums, part.sums.log() - (part.targets - part.maxima)
    maxima = all_reduce(part.maxima.clone(), axis, dist.ReduceOp.MAX)
    is_local = (local >= 0) & (local < size)
    targets = torch.where(is_local, part.targets - maxima, 0.0)
    shifted = part.sums * (part.maxima - maxima).exp()
    sums, targets = all_reduce(torch.stack((shifted, targets)), axis)
    return maxima, sums, sums.log() - targets


class ChunkedLoss(NamedTuple):
    """The result of `linear_cross_entropy`, equal on every rank.

    Attributes:
        losses: The loss of each token, fp32 [s, b]. It has no gradient.
        total: The sum of losses * loss_mask, the only result that can be differentiated.
    """

    losses: Tensor
    total: Tensor


def linear_cross_entropy(
    call: LinearCall,
    labels: Tensor,
    communication: Communication,
    *,
    loss_mask: Tensor | None = None,
    implementation: CrossEntropy = REFERENCE,
    slot: WeightSlot | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> ChunkedLoss:
    """Return the cross entropy of the logits x W^T + bias, computing a few rows at a time.

    While a chunk of logits exists, the forward pass already computes the gradients of
    sum(losses * loss_mask), unless gradients are disabled, so no product is computed twice. The
    backward pass multiplies these gradients by the gradient of the sum, a single number. Only the
    sum can be differentiated. Both passes are collective over the communication's axis.

    Args:
        call: The arguments of the product that computes the logits: the input [s, b, h], or
            [s/t, b, h] with sequence parallelism; this rank's rows of the weight, [v/t, h]; and the
            bias [v/t].
        labels: The labels [s, b], as ids in the whole vocabulary.
        communication: The collectives before and after the product.
        loss_mask: The weight of each token's loss, [s, b]; `None` means 1.
        implementation: A kernel, or plain PyTorch.
        slot: The destination of the weight's gradient; `None` leaves the gradient to autograd.
        chunk_logits: The approximate number of this rank's logits to compute at a time.
    """
    mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
    weight = call.weight if slot is None else call.weight.detach()
    chunking = _Chunking(communication, implementation, slot, chunk_logits, torch.is_grad_enabled())
    return ChunkedLoss(
        *_LinearCrossEntropy.apply(call.x, weight, call.bias, labels, mask, chunking)
    )


class _Chunking(NamedTuple):
    """The settings of `linear_cross_entropy`, and whether to compute gradients."""

    communication: Communication
    implementation: CrossEntropy
    slot: WeightSlot | None
    chunk_logits: int
    with_gradients: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        mask: Tensor,
        chunking: _Chunking,
    ) -> tuple[Tensor, Tensor]:
        implementation, axis, size = (
            chunking.implementation,
            chunking.communication.axis,
            weight.shape[0],
        )
        gathered = chunking.communication.start_gather(x).wait()  # [s, b, h]
        whole = gathered.flatten(0, -2)  # [n, h]
        weights = mask
        local, mask = local_labels(labels, axis, size), mask.reshape(-1).float()  # [n]
        losses = torch.empty_like(mask)
        gradients = None
        if chunking.with_gradients:
            # A frozen weight needs no gradient. A weight with a slot is detached, but trained.
            is_trained = chunking.slot is not None or ctx.needs_input_grad[1]
            gradients = _HeadGradients.like(gathered, weight if is_trained else None, bias)
        for rows in _chunks(whole.shape[0], size, chunking.chunk_logits):
            logits = F.linear(whole[rows], weight, bias)  # [rows, v/t]
            part = implementation.statistics(logits, local[rows])
            maxima, sums, losses[rows] = join_statistics(part, local[rows], size, axis)
            if gradients is not None:  # overwrites the logits
                upstream = _GRADIENT_SCALE * mask[rows]
                implementation.gradient(logits, local[rows], maxima, sums, upstream, logits)
                gradients.add(rows, logits, whole[rows], weight)
            del logits  # before the next chunk allocates memory
        if gradients is not None:
            ctx.save_for_backward(gradients.input, gradients.weight, gradients.bias, mask)
            ctx.chunking, ctx.dtype = chunking, weight.dtype
        losses = losses.view(labels.shape)
        ctx.mark_non_differentiable(losses)
        return losses, (losses.t() * weights.t()).sum()  # in the order of a batch [b, s]

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        chunking: _Chunking = ctx.chunking
        input_sum, weight_sum, bias_sum, mask = ctx.saved_tensors
        squares = mask.square().sum().clamp(min=torch.finfo(mask.dtype).tiny)
        # This is grad / _GRADIENT_SCALE, or exactly 0 if no token counts.
        factor = (grad * mask * mask).sum() / squares / _GRADIENT_SCALE
        # The view has one dimension, because on a GPU a zero-dimensional operand is rounded to the
        # dtype of the other operand. In bf16, this would change all gradients of the network by up
        # to 0.2%; in fp16, some would be lost.
        input_grad = torch.empty_like(input_sum)
        torch.mul(input_sum, factor.view(1), out=input_grad)
        summing = chunking.communication.start_sum(input_grad)
        weight_grad = bias_grad = None
        if chunking.slot is None and weight_sum is not None:
            weight_grad = (weight_sum * factor).to(ctx.dtype)
        elif chunking.slot is not None:
            with chunking.slot() as (into, accumulate):
                if accumulate:
                    into.addcmul_(weight_sum, factor)
                else:
                    torch.mul(weight_sum, factor, out=into)
        if bias_sum is not None:
            bias_grad = (bias_sum * factor).to(ctx.dtype)
        return summing.wait(), weight_grad, bias_grad, None, None, None


# The factor by which stored gradients are multiplied until the backward pass. Without it, small
# gradients would be lost in 16 bits (fp16's smallest number is 6e-8, and many probabilities are
# smaller). Multiplying by a power of two is exact.
_GRADIENT_SCALE = 1024.0


@dataclass
class _HeadGradients:
    """The gradients of the masked sum of losses.

    Attributes:
        input: The input's gradient [s, b, h].
        weight: The weight's gradient [v/t, h] in fp32; `None` if the weight is frozen.
        bias: The bias's gradient [v/t] in fp32; `None` without a bias.
    """

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def like(cls, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> _HeadGradients:
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        of_weight = None if weight is None else torch.empty_like(weight, dtype=torch.float32)
        return cls(x.new_empty(x.shape), of_weight, of_bias)

    def add(self, rows: slice, of_logits: Tensor, x: Tensor, weight: Tensor) -> None:
        """Add the contribution of some rows.

        Args:
            rows: The indices of the rows.
            of_logits: The gradient of the rows' logits, [rows, v/t].
            x: The input of the rows, [rows, h].
            weight: The weight [v/t, h].
        """
        torch.mm(of_logits, weight, out=self.input.flatten(0, -2)[rows])
        if self.weight is not None:
            weight_gradient(of_logits, x, self.weight, accumulate=rows.start > 0)
        if self.bias is not None:
            self.bias += of_logits.sum(0, dtype=torch.float32)


def _chunks(rows: int, size: int, limit: int) -> Iterator[slice]:
    """Divide the rows, of `size` elements each, into chunks of at most about `limit` elements."""
    count = max(1, min(rows, -(-rows * size // limit)))
    height = -(-rows // count)
    if height > _ROWS_OF_A_TILE:
        height += -height % _ROWS_OF_A_TILE
    return (slice(i, min(i + height, rows)) for i in range(0, rows, height))
