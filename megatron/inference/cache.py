"""The memory of the key-value cache, and a step's view of it for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.paged_attention import Chunks, PagedAttention, Singles, chunk_attention


class CacheMemory:
    """Keys and values of every layer that this process holds, for its heads.

    Args:
        layers: their indices, from 0.
        blocks: how many can be used; one more takes what fills batches up.
        block_size: tokens of a block.
        groups: key-value heads of this process.
        head_size: channels of each.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        blocks: int,
        block_size: int,
        groups: int,
        head_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.block_size = block_size
        self.spare_slot = blocks * block_size
        shape = (len(layers), 2, (blocks + 1) * block_size, groups, head_size)
        memory = torch.zeros(shape, device=device, dtype=dtype)
        self.size_bytes = memory.nbytes
        self._layers = {index + 1: memory[place] for place, index in enumerate(layers)}

    def of_layer(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, g, d]; layers count from 1."""
        keys, values = self._layers[layer_number]
        return keys, values


@dataclass(frozen=True)
class StepCache:
    """A step's tokens in the cache: what `models.attention.KeyValueCache` asks for.

    Attributes:
        memory: of the cache.
        positions: of each token in its sequence, int64 [s].
        slots: where its key and value go, int64 [s].
        outputs: tokens whose logits are wanted, int64 [k].
        singles: the first tokens, one a sequence; None: there are none.
        chunks: the tokens behind them; likewise.
        paged: how the first attend, and how the cache is written.
    """

    memory: CacheMemory
    positions: Tensor
    slots: Tensor
    outputs: Tensor
    singles: Singles | None
    chunks: Chunks | None
    paged: PagedAttention

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer_number: int) -> Tensor:
        """See `KeyValueCache`."""
        query, key, value = (x.squeeze(1) for x in (query, key, value))  # [s, heads, d]
        keys, values = self.memory.of_layer(layer_number)
        self.paged.append(key, value, keys, values, self.slots)
        parts, count = [], 0
        if self.singles is not None:
            count = self.singles.lengths.numel()
            parts.append(self.paged.singles(query[:count], keys, values, self.singles).flatten(1))
        if self.chunks is not None:
            query, key, value = (x[count:] for x in (query, key, value))
            parts.append(chunk_attention(query, key, value, keys, values, self.chunks))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.unsqueeze(1)
