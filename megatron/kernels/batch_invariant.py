"""Batch-invariant matrix products and attention in fp32 on CPUs.

The results for a token are bitwise identical in any batch. A library adds the terms of a sum in an
order that depends on the sizes of the matrices. Training processes all tokens of a text together,
and generation one token at a time, so their results would differ in the last bits. Measurements
with MKL (torch 2.11 and 2.13; repeated by tests/kernels/test_batch_invariant.py) show:

- A row of a product has the same bits in any matrix of at least 16 rows. 4 rows suffice on AMD
  processors with AVX2 and AVX-512, but Intel processors with AMX need 5 rows for sums of 96 terms,
  11 for 256 terms, and 16 for 512 to 4096 terms.
- A sum over keys has the same bits if it consists of products of 64 keys, added one after another.
  Masked keys only add zeros.

Products are therefore padded to at least 16 rows, and attention pads the keys of each sequence to a
multiple of 64.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.attention import AttentionOptions, add_slopes
from megatron.kernels.segments import Segments

NAME = "batch-invariant"
_ROWS = 16
_KEYS = 64


def batch_invariant_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias for x [m, k], weight [n, k] and bias [n]."""
    rows = len(x)
    if rows >= _ROWS:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, _ROWS - rows)), weight, bias)[:rows]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Compute attention within b sequences, with all scores in memory.

    Autograd computes the backward pass.

    Args:
        query: The queries [b, n, q, d].
        key: The keys [b, g, keys, d], starting with the first token of each sequence.
        value: The values [b, g, keys, d].
        visible: Whether a query may attend to a key, bool, broadcast to [b, 1, q, keys]. With
            slopes, the last visible key of a query must be its own.
        options: The attention options. Mask, `causal` and window are ignored.

    Returns:
        The result [b, n, q, d].
    """
    queries, keys = query.shape[2], key.shape[2]
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    padding = -keys % _KEYS
    key, value = (F.pad(x, (0, 0, 0, padding)) for x in (key, value))
    visible = F.pad(visible, (0, padding))
    if queries < _ROWS:
        query = F.pad(query, (0, 0, 0, _ROWS - queries))
        if visible.shape[2] > 1:
            visible = F.pad(visible, (0, 0, 0, _ROWS - queries), value=True)
    scores = query @ key.transpose(2, 3) * (options.scale or 1 / math.sqrt(query.shape[3]))
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.slopes is None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    else:
        positions = torch.arange(visible.shape[-1], device=visible.device)
        query_positions = (visible * positions).amax(-1, keepdim=True)
        biases = add_slopes(
            visible, options.slopes, (positions - query_positions).squeeze(1), scores.dtype
        )
        scores = scores + biases
    if options.sinks is None:
        weights = scores.softmax(dim=-1)
    else:  # sinks form a separate block before the keys, so that sums keep their order
        sink_block = scores.new_full((*scores.shape[:-1], _KEYS), torch.finfo(scores.dtype).min)
        sink_block[..., 0] = options.sinks.unsqueeze(-1)
        weights = torch.cat((sink_block, scores), dim=-1).softmax(dim=-1)[..., _KEYS:]
    weights = F.dropout(weights, options.dropout)
    parts = zip(weights.split(_KEYS, dim=3), value.split(_KEYS, dim=2), strict=True)
    out = torch.zeros_like(query)
    for weight, part in parts:
        out = out + weight @ part
    return out[:, :, :queries]


def batch_invariant_attention(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute attention as an `AttentionFunction`, one segment at a time.

    Masks of values that are added to the scores are not supported, but ALiBi slopes are.

    Args:
        query: The queries [s, b, n, d].
        key: The keys [s, b, g, d].
        value: The values [s, b, g, d].
        options: The attention options.

    Returns:
        The result [s, b, n * d].
    """
    mask = options.mask
    if isinstance(mask, Segments):
        tokens = [x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)]  # [b s, n or g, d]
        ends: list[int] = mask.shared("ends", mask.ends.tolist)
        sizes = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        parts = []
        for size, *rows in zip(sizes, *(x.split(sizes) for x in tokens), strict=True):
            if size:
                q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in rows)  # [1, n or g, size, d]
                segment_options = options._replace(causal=mask.causal)
                visible = segment_options.visible_keys(size, size, query.device)
                out = attend(q, k, v, visible[None, None], options)
                parts.append(out.squeeze(0).transpose(0, 1))
        length, samples = query.shape[:2]
        return torch.cat(parts).unflatten(0, (samples, length)).transpose(0, 1).flatten(2)
    mask = options.allowed(len(query), len(key), query.device)
    if mask is None:
        mask = options.visible_keys(len(query), len(key), query.device)[None, None]
    assert mask.dtype == torch.bool, "a rule refuses relative positions"
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = attend(query, key, value, mask, options)
    return out.permute(2, 0, 1, 3).flatten(2)
