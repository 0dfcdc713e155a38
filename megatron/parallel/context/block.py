"""Attention between a block of queries and a block of keys, and the merging of results.

The attention of a block yields a result and the log-sum-exp of its scores, with which the results
of several blocks are merged. The backward pass of each block needs only the merged result and the
merged log-sum-exp of whole rows. Dropout does not change the log-sum-exp, because it applies to
weights that are already normalized.

Documents may divide a block (`BlockDocuments`). A query whose document has no key in the block gets
the result 0 and the log-sum-exp -inf, which have no effect on the merged result. Windows and ALiBi
biases (`ScoreRules`) are computed in plain PyTorch, because the queries of a block need not be
consecutive.

Shapes: b micro-batch, n query heads, g key-value heads (each serves n/g consecutive query heads),
q queries and k keys in a block, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.device import Device
from megatron.kernels.attention import flash_problem
from megatron.kernels.segments import number_segments

# The values needed to redraw a block's dropout mask; empty without dropout.
RngState = tuple[Tensor, ...]


class QueryRows(NamedTuple):
    """Queries, and their results merged over all blocks.

    Attributes:
        grad: The gradient of `out`, [b, n, q, d].
        query: The queries [b, n, q, d].
        out: The merged result of all blocks, [b, n, q, d].
        logsumexp: The log-sum-exp over all blocks, fp32 [b, n, q].
    """

    grad: Tensor
    query: Tensor
    out: Tensor
    logsumexp: Tensor


class BlockDocuments(NamedTuple):
    """The documents of a block's queries and keys. Attention stays within a document.

    Both tensors of ends list the same documents in the same order, sample by sample. A document
    without queries or keys in the block is listed with zero tokens.

    Attributes:
        query_ends: 0, and then the end of each document among the b q queries, int32 [documents +
            1].
        key_ends: The same for the b k keys.
        longest: An upper bound on the number of tokens of a document.
        has_keys: Whether each query's document has a key in the block, bool [b, q]; `None` if this
            is true for all queries.
    """

    query_ends: Tensor
    key_ends: Tensor
    longest: int
    has_keys: Tensor | None = None

    def kernel_arguments(self, queries: int, keys: int) -> tuple[Tensor, Tensor, int, int]:
        """Return the arguments for a kernel that supports sequences of different lengths.

        Args:
            queries: The number of queries per sample.
            keys: The number of keys per sample.

        Returns:
            The ends among queries and keys, and upper bounds on the lengths among queries and keys.
        """
        ends = (self.query_ends, self.key_ends)
        return (*ends, min(self.longest, queries), min(self.longest, keys))


class ScoreRules(NamedTuple):
    """The scale, window and ALiBi biases of a block's scores.

    Attributes:
        scale: The factor applied to the scores; `None` means 1 / sqrt(d).
        window: The maximum number of earlier tokens to which a query attends; `None` for no limit.
        slopes: The ALiBi slope of each query head, [n]; `None` without ALiBi (`AttentionOptions`).
        query_positions: The positions of the queries in their sequences, int64 [q].
        key_positions: The positions of the keys, int64 [k].
    """

    scale: float | None
    window: int | None
    slopes: Tensor | None
    query_positions: Tensor
    key_positions: Tensor


class BlockOptions(NamedTuple):
    """The properties of a block's attention, the same in both passes.

    Attributes:
        causal: Whether query i attends only to keys up to i, which requires q = k.
        dropout: The dropout probability of attention weights.
        documents: The documents within which queries attend; `None` means one document per sample.
        rules: The scale, window and biases of the scores; `None` applies only the scale
            1 / sqrt(d).
    """

    causal: bool
    dropout: float
    documents: BlockDocuments | None = None
    rules: ScoreRules | None = None

    def scale(self, query: Tensor) -> float:
        """Return the factor applied to the scores of `query` [b, n, q, d]."""
        scale = None if self.rules is None else self.rules.scale
        return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


BlockForward = Callable[[Tensor, Tensor, Tensor, BlockOptions], tuple[Tensor, Tensor, RngState]]
"""The forward function of one implementation of attention within a block.

It takes queries [b, n, q, d], keys and values [b, g, k, d], and the options. It returns the result
[b, n, q, d], the log-sum-exp of the scores, fp32 [b, n, q], and the values from which the backward
pass redraws the dropout mask. Dropout draws from the device's default generator.
"""
BlockBackward = Callable[
    [QueryRows, Tensor, Tensor, BlockOptions, RngState], tuple[Tensor, Tensor, Tensor]
]
"""The backward function, which returns a block's contribution to the gradients of all inputs.

It takes the queries with their merged results, the keys and values, the options, and the values
that the forward function returned for redrawing the dropout mask. It returns the gradients of
queries [b, n, q, d], keys and values [b, g, k, d].
"""


@dataclass(frozen=True)
class BlockAttention:
    """An implementation of attention within a block.

    Attributes:
        name: The name of the implementation.
        reason: Why it was chosen, for the start-up panel.
        forward: The forward function.
        backward: The backward function.
    """

    name: str
    reason: str
    forward: BlockForward
    backward: BlockBackward


def choose_block(head_size: int, dtype: torch.dtype, device: torch.device) -> BlockAttention:
    """Choose the flash kernel if it can run, otherwise plain PyTorch.

    Args:
        head_size: The head size d.
        dtype: The data type of queries, keys and values.
        device: The device that runs attention.
    """
    unsupported = flash_problem(head_size, dtype, device)
    if unsupported:
        return plain_block(unsupported)
    return BlockAttention("flash", "16 bits on a GPU", flash_forward, flash_backward)


def plain_block(reason: str) -> BlockAttention:
    """Return the implementation in plain PyTorch, with the reason for choosing it."""
    return BlockAttention("plain", reason, reference_forward, reference_backward)


def merge(out: Tensor, logsumexp: Tensor, part: Tensor, part_sum: Tensor) -> None:
    """Merge a block's result into the merged result, in place.

    Each result is weighted by its share of the sum of exponentials.

    Args:
        out: The merged result so far, [b, n, q, d].
        logsumexp: The merged log-sum-exp so far, [b, n, q].
        part: The block's result, [b, n, q, d].
        part_sum: The block's log-sum-exp, [b, n, q].
    """
    share = (part_sum - logsumexp).sigmoid().unsqueeze(-1)
    out.lerp_(part.to(out.dtype), share)
    logsumexp.copy_(logsumexp.logaddexp(part_sum))


def reference_forward(
    query: Tensor, key: Tensor, value: Tensor, options: BlockOptions
) -> tuple[Tensor, Tensor, RngState]:
    """Implement `BlockForward` in fp32 or wider, with all scores of the block in memory."""
    query, key, value = _widen(query), _widen(key), _widen(value)
    scores = _scores(query, key, options)  # [b, g, n/g * q, k]
    logsumexp = scores.logsumexp(dim=-1)
    # Rows without keys subtract a finite number instead of -inf, so their weights are 0.
    finite = logsumexp.clamp(min=torch.finfo(logsumexp.dtype).min)
    weights = (scores - finite.unsqueeze(-1)).exp()
    rng_state: RngState = ()
    if options.dropout > 0:
        generator = Device(query.device).default_generator
        rng_state = (generator.get_state(),)
        weights = weights * _dropout_mask(weights, options.dropout, generator)
    return (weights @ value).view_as(query), logsumexp.view(query.shape[:3]), rng_state


def reference_backward(
    rows: QueryRows, key: Tensor, value: Tensor, options: BlockOptions, rng_state: RngState
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `BlockBackward` in fp32 or wider, with all scores of the block in memory.

    With weights P = exp(scores - logsumexp), the scores' gradient is P * (dP - sum(grad * out)),
    because P * dP and grad * out have the same sum over a whole row. Dropout multiplies the
    weights, and therefore dP, by 0 or 1 / (1 - p), which does not change this identity.
    """
    logsumexp, groups = rows.logsumexp, key.shape[1]
    grad, query, out, key, value = (_widen(x) for x in (*rows[:3], key, value))
    scores = _scores(query, key, options)
    weights = (scores - _by_group(logsumexp, groups).unsqueeze(-1)).exp()
    grad_rows = _by_group(grad, groups)
    row_sums = _by_group((grad * out).sum(-1), groups).unsqueeze(-1)
    grad_weights, dropped_weights = grad_rows @ value.transpose(2, 3), weights
    if options.dropout > 0:
        generator = torch.Generator(query.device)
        generator.set_state(rng_state[0])
        dropout_mask = _dropout_mask(weights, options.dropout, generator)
        grad_weights, dropped_weights = grad_weights * dropout_mask, weights * dropout_mask
    grad_value = dropped_weights.transpose(2, 3) @ grad_rows
    grad_scores = weights * (grad_weights - row_sums) * options.scale(query)
    grad_key = grad_scores.transpose(2, 3) @ _by_group(query, groups)
    return (grad_scores @ key).view_as(query), grad_key, grad_value


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, options: BlockOptions
) -> tuple[Tensor, Tensor, RngState]:
    """Implement `BlockForward` with the flash kernel, in the 16-bit dtype of the inputs.

    The kernel draws from a counter-based generator (Philox) and returns the seed and offset that it
    used. With documents, the kernel's variant for sequences of different lengths runs. In this
    variant, a document without queries or keys in the block costs almost nothing.
    """
    causal, dropout, documents, _ = options
    if documents is not None:
        samples, _, length, _ = query.shape
        tensors = (_in_one_row(x) for x in (query, key, value))
        kernel_arguments, debug = documents.kernel_arguments(length, key.shape[2]), False
        # PyTorch's public interface to this variant (`torch.nn.attention.varlen`) has no dropout.
        flat, sums, *rng_state, _ = torch.ops.aten._flash_attention_forward(
            *tensors, *kernel_arguments, dropout, causal, debug, scale=options.scale(query)
        )  # [b q, n, d] and [n, b q]
        logsumexp = sums.unflatten(1, (samples, length)).transpose(0, 1)
        if documents.has_keys is not None:  # the kernel returns inf for queries without keys
            logsumexp = logsumexp.masked_fill(~documents.has_keys.unsqueeze(1), -math.inf)
        return _by_sample(flat, samples), logsumexp, tuple(rng_state) if dropout > 0 else ()
    out, logsumexp, _, _, _, _, *rng_state, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, scale=options.scale(query)
    )
    return out, logsumexp, tuple(rng_state) if dropout > 0 else ()


def flash_backward(
    rows: QueryRows, key: Tensor, value: Tensor, options: BlockOptions, rng_state: RngState
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `BlockBackward` with the flash kernel."""
    if not rng_state:
        rng_state = (torch.empty(2, dtype=torch.uint64, device=key.device),) * 2  # unused
    causal, dropout, documents, _ = options
    grad, query, out, logsumexp = rows
    if documents is not None:
        joined = (_in_one_row(x) for x in (grad, query, key, value, out))
        sums = logsumexp.transpose(0, 1).flatten(1)  # [n, b q]
        kernel_arguments = documents.kernel_arguments(query.shape[2], key.shape[2])
        flat = torch.ops.aten._flash_attention_backward(
            *joined,
            sums.contiguous(),
            *kernel_arguments,
            dropout,
            causal,
            *rng_state,
            scale=options.scale(query),
        )
        of_query, of_key, of_value = (_by_sample(x, query.shape[0]) for x in flat)
        return of_query, of_key, of_value
    # The kernel requires a dense log-sum-exp, and a slice for half of the queries is not dense.
    tensors = (grad, query, key, value, out, logsumexp.contiguous(), None, None)
    arguments = (query.shape[2], key.shape[2], dropout, causal, *rng_state)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    gradients: tuple[Tensor, Tensor, Tensor] = backward(
        *tensors, *arguments, scale=options.scale(query)
    )
    return gradients


def _dropout_mask(weights: Tensor, dropout: float, generator: torch.Generator) -> Tensor:
    """Draw the factors by which dropout multiplies weights: 0 or 1 / (1 - p)."""
    mask = torch.empty_like(weights).bernoulli_(1 - dropout, generator=generator)
    return mask.div_(1 - dropout)


def _in_one_row(x: Tensor) -> Tensor:
    """Concatenate the samples: [b, n, q, d] -> [b q, n, d]."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_sample(x: Tensor, samples: int) -> Tensor:
    """Undo `_in_one_row`."""
    return x.unflatten(0, (samples, -1)).transpose(1, 2)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Stack the rows of query heads that share a key head: [b, n, q, ...] -> [b, g, n/g * q, ...].

    Products then need no copies of keys or values, and a sum over rows also sums over the query
    heads of a group.
    """
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _scores(query: Tensor, key: Tensor, options: BlockOptions) -> Tensor:
    """Return the scores [b, g, n/g * q, k], with -inf for masked pairs."""
    causal, _, documents, rules = options
    samples, _, length, _ = query.shape
    scores = _by_group(query * options.scale(query), key.shape[1]) @ key.transpose(2, 3)
    by_head = scores.unflatten(2, (-1, length))  # [b, g, n/g, q, k]
    if rules is not None:
        distance = rules.query_positions[:, None] - rules.key_positions
        if rules.slopes is not None:
            by_head -= rules.slopes.view(key.shape[1], -1, 1, 1) * distance
        if rules.window is not None:
            by_head.masked_fill_(distance > rules.window, -math.inf)
    if causal:
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        by_head.masked_fill_(future, -math.inf)
    if documents is not None:
        of_query = number_segments(documents.query_ends, (samples, length))
        of_key = number_segments(documents.key_ends, (samples, key.shape[2]))
        differ = of_query[:, :, None] != of_key[:, None, :]  # [b, q, k]
        by_head.masked_fill_(differ[:, None, None], -math.inf)
    return scores
