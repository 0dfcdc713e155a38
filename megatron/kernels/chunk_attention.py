"""Attention from new prompt tokens, processed in chunks, to all tokens of their sequences."""

from __future__ import annotations

from operator import add

import torch
from torch import Tensor

from megatron.device import Device
from megatron.kernels.attention import (
    AttentionFunction,
    AttentionOptions,
    flash_problem,
    fused_attention,
    gpu_attention,
    include_sinks,
)
from megatron.kernels.cached_sequences import Chunks


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cached: tuple[Tensor, Tensor],
    chunks: Chunks,
    options: AttentionOptions,
) -> Tensor:
    """Compute causal attention of new prompt tokens over all tokens of their sequences.

    Args:
        query: The queries of the new tokens, [s, n, d].
        key: The keys of the new tokens, [s, g, d].
        value: The values of the new tokens, [s, g, d].
        cached: The cached keys and values [slots, g, d], including those of the new tokens.
        chunks: The sequences.
        options: The attention options; the mask and `causal` are not used.

    Returns:
        The results [s, n d].
    """
    if options.chunk is not None:
        chunks = chunks.within(options.chunk)
    if chunks.slots is not None:
        key, value = (x[chunks.slots] for x in cached)  # [l, g, d]
    problem = flash_problem(query.shape[-1], query.dtype, query.device)
    if not problem and options.softcap is None and options.slopes is None:
        return _flash_chunks(query, key, value, chunks, options)
    attend = gpu_attention if Device(query.device).is_gpu else fused_attention
    lengths = [start + size for start, size in zip(chunks.starts, chunks.sizes, strict=True)]
    splits = query.split(chunks.sizes), key.split(lengths), value.split(lengths)
    chunk_tensors = zip(*splits, strict=True)
    return torch.cat([_one_chunk(*tensors, attend, options) for tensors in chunk_tensors])


def describe_chunks(
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_bounded: bool = False,
    has_slopes: bool = False,
) -> str:
    """Describe the kernels that `chunk_attention` uses, for the start-up panel.

    Args:
        head_size: The number of channels of a head.
        dtype: The data type of queries, keys and values.
        device: The device on which attention runs.
        is_bounded: Whether scores are bounded (`AttentionOptions.softcap`).
        has_slopes: Whether ALiBi biases are added to the scores.
    """
    problem = flash_problem(head_size, dtype, device)
    if is_bounded or has_slopes:
        problem = f"flash kernels do not {'bound' if is_bounded else 'add biases to'} scores"
    return f"PyTorch's, one sequence at a time ({problem})" if problem else "flash, all in one"


def _flash_chunks(
    query: Tensor, key: Tensor, value: Tensor, chunks: Chunks, options: AttentionOptions
) -> Tensor:
    longest = max(map(add, chunks.starts, chunks.sizes))
    # With a maximum of one query per sequence, the kernel would change the order of keys.
    max_queries = max(2, *chunks.sizes)
    dropout, causal, debug = 0.0, True, False
    segments = (*chunks.ends, max_queries, longest)
    parts = (query, key, value)
    window = {} if options.window is None else {"window_size_left": options.window}
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *parts, *segments, dropout, causal, debug, scale=options.scale, **window
    )
    if options.sinks is not None:
        share, _ = include_sinks(logsumexp, options.sinks)  # [n, s]
        out = (out * share.t().unsqueeze(-1)).to(query.dtype)
    return out.flatten(1)


def _one_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: AttentionFunction,
    options: AttentionOptions,
) -> Tensor:
    """Compute attention of the last c of l tokens: queries [c, n, d], keys and values [l, g, d]."""
    mask, length = None, len(key)
    if length > len(query):
        positions = torch.arange(length, device=query.device)
        mask = (positions <= positions[-len(query) :].unsqueeze(1))[None, None]  # [1, 1, c, l]
    query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    options = options._replace(mask=mask, causal=mask is None)
    return attend(query, key, value, options).squeeze(1)
