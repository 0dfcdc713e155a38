"""A toy network for pipelines: linear parts, with a loss after the last."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.layout import Layout
from megatron.parallel.pipeline.executor import run_schedule
from megatron.parallel.pipeline.p2p import PipelineChannel
from megatron.parallel.pipeline.schedule import ScheduleKind, forward_only, make_schedule
from megatron.parallel.pipeline.weight_gradients import WeightGradientQueue

SHAPE = (3, 2, 4)  # s, b, h


class _Product(torch.autograd.Function):
    """x W^T, whose weight gradient is deferred where a queue collects."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: WeightGradientQueue | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight

        def product() -> Tensor:
            return grad.flatten(0, 1).t() @ x.flatten(0, 1)

        if ctx.queue is None or not ctx.queue.is_collecting:
            return grad_x, product(), None
        ctx.queue.push(lambda: weight.grad.add_(product()))
        return grad_x, None, None


class Part(nn.Module):
    """tanh(x W^T + b); the first part creates its own input, the last one computes a loss."""

    def __init__(self, index: int, count: int, micro_batches: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.bias = nn.Parameter(torch.randn(4, generator=generator))
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.is_last = index == count - 1
        self.micro_batches = micro_batches
        self.losses: list[float] = []
        self.weight_gradients: WeightGradientQueue | None = None

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        if x is None:
            x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 + micro_batch))
        y = torch.tanh(_Product.apply(x, self.weight, self.weight_gradients) + self.bias)
        if not self.is_last:
            return y
        loss = y.square().mean() / self.micro_batches
        self.losses.append(loss.item())
        return loss


def gradients_of(parts: list[Part]) -> list[Tensor]:
    found = []
    for part in parts:
        assert part.weight.grad is not None
        assert part.bias.grad is not None
        found += [part.weight.grad, part.bias.grad]
    return found


def alone(count: int, micro_batches: int) -> tuple[list[float], list[Tensor]]:
    """Return the losses and every part's gradients, by plain autograd."""
    parts = [Part(i, count, micro_batches) for i in range(count)]
    for micro_batch in range(micro_batches):
        x = None
        for part in parts:
            x = part(micro_batch, x)
        assert x is not None
        x.backward()
    return parts[-1].losses, gradients_of(parts)


def in_pipeline(
    layout: Layout, kind: ScheduleKind, chunks: int, micro_batches: int, *, backward: bool = True
) -> tuple[list[float], list[Tensor]]:
    """Return the losses (on the last stage) and this stage's gradients, chunk by chunk."""
    stages, stage = layout.pipeline.size, layout.pipeline.rank
    count = stages * chunks
    parts = [Part(c * stages + stage, count, micro_batches) for c in range(chunks)]
    queue = WeightGradientQueue()
    for part in parts:
        part.weight_gradients = queue
    channel = None
    if stages > 1:
        channel = PipelineChannel(
            layout,
            ring=chunks > 1,
            device=torch.device("cpu"),
            dtype=torch.float32,
            shape=SHAPE,
        )
    schedule = make_schedule(kind, stages, chunks, micro_batches)
    if not backward:
        schedule = forward_only(schedule)
    run_schedule(schedule[stage], parts, channel, weight_gradients=queue)
    return parts[-1].losses, gradients_of(parts)
