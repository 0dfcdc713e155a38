"""Attention of new tokens over a key-value cache in blocks.

The cache of a layer is two tensors [slots, g, d]; block i is slots i * block_size and on. A pass
has s tokens of any number of sequences: first those of sequences that add one token each
("singles"), then chunks of several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.device import Device
from megatron.kernels.attention import cpu_attention, gpu_attention


@dataclass(frozen=True)
class Singles:
    """Sequences that add one token, u of them; those of no tokens fill a batch up and add none.

    Attributes:
        tables: int32 [u, m], the blocks of each, and anything behind them.
        lengths: int32 [u], tokens of each, with the new one.
        longest: no less than the longest.
        block_size: tokens of a block.
    """

    tables: Tensor
    lengths: Tensor
    longest: int
    block_size: int


@dataclass(frozen=True)
class Chunk:
    """Several new tokens of one sequence.

    Attributes:
        first: of the pass's tokens.
        count: how many.
        slots: int64 [l], of all tokens of the sequence up to the chunk's last; None: the chunk
            is all there is.
    """

    first: int
    count: int
    slots: Tensor | None


class SingleAttention(Protocol):
    """How singles attend."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, singles: Singles) -> Tensor:
        """One query a sequence.

        Args:
            query: [u, n, d].
            keys: [slots, g, d], the new ones included.
            values: as keys.
            singles: where each sequence is.

        Returns:
            [u, n, d]; anything where there are no tokens.
        """


def single_attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, singles: Singles
) -> Tensor:
    """See `SingleAttention`: collects each sequence's keys and values, as many as the longest has.

    The heads of a group take the place of positions that share keys, so that none are repeated.
    """
    size, groups = singles.block_size, keys.shape[1]
    blocks = singles.tables[:, : -(-singles.longest // size)].long()
    within = torch.arange(size, device=query.device)
    slots = (blocks.unsqueeze(2) * size + within).flatten(1)[:, : singles.longest]  # [u, l]
    key, value = (x[slots].transpose(1, 2) for x in (keys, values))  # [u, g, l, d]
    seen = torch.arange(slots.shape[1], device=query.device) < singles.lengths.unsqueeze(1)
    mask = seen[:, None, None]  # [u, 1, 1, l]
    out = F.scaled_dot_product_attention(
        query.unflatten(1, (groups, -1)), key, value, attn_mask=mask
    )
    return out.flatten(1, 2)


def chunk_attention(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, chunk: Chunk
) -> Tensor:
    """The chunk's tokens attend to those before them, in the cache and in the chunk.

    Args:
        query: [c, n, d].
        key: [c, g, d], of the chunk itself.
        value: as key.
        keys: [slots, g, d], with all of these.
        values: as keys.
        chunk: where they are.

    Returns:
        [c, n d].
    """
    attend = gpu_attention if Device(query.device).is_gpu else cpu_attention
    if chunk.slots is None:
        out = attend(
            *(x.unsqueeze(1) for x in (query, key, value)), mask=None, causal=True, dropout=0.0
        )
        return out.squeeze(1)
    length = chunk.slots.numel()
    places = torch.arange(length, device=query.device)
    mask = places <= places[-chunk.count :].unsqueeze(1)  # [c, l]
    out = attend(
        query.unsqueeze(1),
        keys[chunk.slots].unsqueeze(1),
        values[chunk.slots].unsqueeze(1),
        mask=mask[None, None],
        causal=False,
        dropout=0.0,
    )
    return out.squeeze(1)
