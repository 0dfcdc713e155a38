"""DeepSpeed-Ulysses (Jacobs et al., 2023): inside attention a rank holds the whole sequence.

Outside a rank has some tokens and all heads. One all-to-all turns this into all tokens, in their
global order, and some heads; attention is then an ordinary one; another all-to-all turns it back.

Shapes: s sequence, C context-parallel size, b micro-batch, n query heads, g key-value heads, d
head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.kernels.attention import AttentionFunction, AttentionOptions
from megatron.parallel.context.split import join_sequence, split_for_all
from megatron.parallel.layout import Axis


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    axis: Axis,
    attend: AttentionFunction,
) -> Tensor:
    """Attend from this rank's queries to the whole sequence. Collective over the axis.

    Args:
        query: [s/C, b, n, d], rank's part of the sequence as `split_sequence` cuts it. C divides
            n and g.
        key: [s/C, b, g, d].
        value: [s/C, b, g, d].
        options: without a mask.
        axis: the context axis.
        attend: what runs on query [s, b, n/C, d], key and value [s, b, g/C, d].

    Returns:
        [s/C, b, n * d].
    """
    assert options.mask is None, "a rule refuses masks with context parallelism"
    by_rank = [x.unflatten(2, (axis.size, -1)) for x in (query, key, value)]
    heads = [x.shape[3] for x in by_rank]
    packed = torch.cat(by_rank, dim=3)  # [s/C, b, C, (n + 2g)/C, d]: one message to each rank
    tokens = exchange(packed.movedim(2, 0), axis)
    whole = join_sequence(tokens.unbind(0), dim=0)  # [s, b, (n + 2g)/C, d]
    query, key, value = whole.split(heads, dim=2)
    out = attend(query, key, value, options)
    parts = torch.stack(split_for_all(out, axis.size, dim=0))  # [C, s/C, b, n/C * d]
    return exchange(parts, axis).movedim(0, 2).flatten(2)


def exchange(x: Tensor, axis: Axis) -> Tensor:
    """Send x[i] to rank i, receive its x[own rank] as result[i]: [C, ...] -> [C, ...].

    Its own backward.
    """
    out: Tensor = _Exchange.apply(x, axis)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _exchange(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.axis), None


def _exchange(x: Tensor, axis: Axis) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    work = dist.all_to_all_single(received, x, group=axis.group, async_op=True)
    axis.transfer("all-to-all", work).wait()
    return received
