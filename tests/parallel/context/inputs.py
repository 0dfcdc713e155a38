"""Queries, keys and values for tests of attention over context ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.attention import AttentionOptions, attention_reference
from megatron.kernels.segments import Segments
from megatron.parallel.context.block import BlockAttention, BlockOptions, QueryRows, merge
from megatron.parallel.context.ring import documents_of, ring_plan
from megatron.parallel.context.split import join_sequence, split_sequence
from megatron.parallel.layout import Axis


def heads(sequence: int, groups: int, *, batch: int = 2, n: int = 4, d: int = 8) -> list[Tensor]:
    """Return query [s, b, n, d], key and value [s, b, g, d]."""
    generator = torch.Generator().manual_seed(groups)
    query = torch.randn(sequence, batch, n, d, generator=generator)
    return [query, *torch.randn(2, sequence, batch, groups, d, generator=generator)]


def weights_of(out: Tensor) -> Tensor:
    """Return a gradient for `out` with distinct elements."""
    return torch.linspace(-1, 1, out.numel()).view_as(out)


def by_head(inputs: list[Tensor]) -> list[Tensor]:
    """Return the inputs as blocks take them: [b, n or g, s, d]."""
    return [x.permute(1, 2, 0, 3) for x in inputs]


def one_process(inputs: list[Tensor], *, causal: bool, mask: Tensor | None = None) -> list[Tensor]:
    """Return the result [s, b, n * d] and gradients of the attention formula, in float64."""
    query, key, value = (x.detach().double().requires_grad_() for x in inputs)
    options = AttentionOptions(mask, causal=causal)
    out = attention_reference(query, key, value, options, softmax_in_fp32=False)
    out.backward(weights_of(out).double())
    gradients = [x.grad for x in (query, key, value)]
    return [x.float() for x in (out.detach(), *gradients) if x is not None]


def ring_in_one(
    inputs: list[Tensor], segments: Segments, *, size: int, block: BlockAttention
) -> list[Tensor]:
    """Return the result [s, b, n * d] and gradients of a ring whose ranks take turns here."""
    axes = [Axis(size=size, rank=rank, ranks=tuple(range(size))) for rank in range(size)]
    by_rank = [[split_sequence(x, axis, 0) for x in inputs] for axis in axes]
    query, key, value = (list(x) for x in zip(*map(by_head, by_rank), strict=True))
    grads = [
        split_sequence(weights_of(inputs[0].flatten(2)), axis, 0).view_as(part[0])
        for axis, part in zip(axes, by_rank, strict=True)
    ]
    of_key, of_value = ([torch.zeros_like(x, dtype=torch.float) for x in y] for y in (key, value))
    outs, of_query = [], []
    for axis in axes:
        rank, length = axis.rank, query[axis.rank].shape[2]
        plan = ring_plan(axis, length, causal=segments.causal)
        documents = documents_of(segments, plan, axis, length)
        options = [BlockOptions(x.causal, 0.0, y) for x, y in zip(plan, documents, strict=True)]
        for index, step in enumerate(plan):
            places = [x[step.source][:, :, step.keys] for x in (key, value)]
            part, part_sum, _ = block.forward(
                query[rank][:, :, step.queries], *places, options[index]
            )
            if index == 0:
                out, logsumexp = part.float(), part_sum
            else:
                merge(out[:, :, step.queries], logsumexp[:, :, step.queries], part, part_sum)
        out = out.to(query[rank].dtype)
        grad = grads[rank].to(out).permute(1, 2, 0, 3)
        of_query.append(torch.zeros_like(query[rank], dtype=torch.float))
        for index, step in enumerate(plan):
            rows = QueryRows(*(x[:, :, step.queries] for x in (grad, query[rank], out, logsumexp)))
            places = [x[step.source][:, :, step.keys] for x in (key, value)]
            found = block.backward(rows, *places, options[index], ())
            of_query[rank][:, :, step.queries] += found[0]
            of_key[step.source][:, :, step.keys] += found[1]
            of_value[step.source][:, :, step.keys] += found[2]
        outs.append(out)
    results = (outs, of_query, of_key, of_value)
    whole = [join_sequence([x.permute(2, 0, 1, 3) for x in parts], 0) for parts in results]
    return [whole[0].flatten(2), *whole[1:]]
