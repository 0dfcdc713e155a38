"""The KV cache: the pool of blocks, their memory, and a step's view of it.

A block holds the keys and values of consecutive tokens. A full block is known by a key that
identifies its tokens and all tokens before them, and sequences that begin alike share it. An unused
block keeps its content until the block is needed; the one that has been unused longest goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.paged_attention import Chunks, PagedAttention, Singles, chunk_attention

BlockKey = bytes

FIRST_KEY: BlockKey = b""


def next_key(previous: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """Return the key of a full block.

    It is a cryptographic hash, so nobody can construct two different prompts that share a key.

    Args:
        previous: Key of the block before it, or `FIRST_KEY` if there is none.
        tokens: Tokens of this block.
    """
    text = ",".join(map(str, tokens)).encode()
    return hashlib.blake2b(previous + text, digest_size=16).digest()


class BlockPool:
    """The block numbers, from 0, and how many sequences use each block. It holds no memory."""

    def __init__(self, count: int) -> None:
        """Start with all blocks unused.

        Args:
            count: Number of blocks.
        """
        self.count = count
        self._users = [0] * count
        self._keys: list[BlockKey | None] = [None] * count
        self._blocks: dict[BlockKey, int] = {}
        self._empty = deque(range(count))
        self._kept: OrderedDict[int, None] = OrderedDict()  # unused with content, oldest first

    @property
    def available(self) -> int:
        """Number of unused blocks."""
        return len(self._empty) + len(self._kept)

    def take(self) -> int | None:
        """Return a block to write to, or `None` if all blocks are in use."""
        if self._empty:
            block = self._empty.popleft()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            key = self._keys[block]
            assert key is not None
            del self._blocks[key]
            self._keys[block] = None
        else:
            return None
        self._users[block] = 1
        return block

    def is_known(self, key: BlockKey) -> bool:
        """Return whether a block has this key, so that `share` can return it."""
        return key in self._blocks

    def is_unused(self, key: BlockKey) -> bool:
        """Return whether the key's block is unused, so that `share` would leave one block fewer."""
        return self._users[self._blocks[key]] == 0

    def share(self, key: BlockKey) -> int:
        """Add a user to the block of a known key, and return the block."""
        return self.share_block(self._blocks[key])

    def share_block(self, block: int) -> int:
        """Add a user to a block that is in use or known by a key, and return the block."""
        if self._users[block] == 0:
            del self._kept[block]
        self._users[block] += 1
        return block

    def publish(self, block: int, key: BlockKey) -> None:
        """Record that a block in use is full and holds the tokens that `key` identifies."""
        if key not in self._blocks:  # otherwise another block has the same content
            self._blocks[key] = block
            self._keys[block] = key

    def release(self, block: int) -> None:
        """Remove a user from a block."""
        assert self._users[block] > 0, f"block {block} is released twice"
        self._users[block] -= 1
        if self._users[block]:
            return
        if self._keys[block] is None:
            self._empty.append(block)
        else:
            self._kept[block] = None


class CacheMemory:
    """The keys and values of this process's layers and heads."""

    def __init__(
        self,
        shapes: Mapping[int, tuple[int, int]],
        paged: PagedAttention,
        *,
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the memory.

        Args:
            shapes: Number of KV heads in this process and channels of each, by layer index, from 0.
            paged: Attention that writes the cache and serves sequences that add one token.
            blocks: Number of blocks. One more is allocated for the padding of batches.
            block_size: Number of tokens in a block.
            device: Device of the memory.
            dtype: Number format of keys and values.
        """
        self.paged = paged
        self.blocks = blocks
        self.block_size = block_size
        self.spare_slot = blocks * block_size
        slots = (blocks + 1) * block_size
        self._layers = {
            index + 1: torch.zeros(2, slots, *shape, device=device, dtype=dtype)
            for index, shape in shapes.items()
        }
        self.size_bytes = sum(memory.nbytes for memory in self._layers.values())

    def of_layer(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [slots, g, d] of a layer, counted from 1."""
        keys, values = self._layers[layer_number]
        return keys, values


@dataclass(frozen=True)
class StepCache:
    """A step's view of the cache: the `models.attention.KeyValueCache` that a model receives.

    Attributes:
        memory: The cache.
        positions: Position of each token in its sequence, int64 [s].
        slots: Slot of each token's key and value, int64 [s].
        outputs: Indices of the tokens whose logits are computed, int64 [k].
        singles: Sequences that add one token, which come first, or `None` if there are none.
        chunks: Sequences that add several tokens, or `None` if there are none.
    """

    memory: CacheMemory
    positions: Tensor
    slots: Tensor
    outputs: Tensor
    singles: Singles | None
    chunks: Chunks | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer_number: int) -> Tensor:
        """Store the tokens' keys and values, and attend from each token to its sequence so far.

        Args:
            query: Queries [s, 1, n/t, d].
            key: Keys [s, 1, g/t, d].
            value: Values [s, 1, g/t, d].
            layer_number: Number of the layer, counted from 1.

        Returns:
            Attention output [s, 1, n d / t].
        """
        query, key, value = (x.squeeze(1) for x in (query, key, value))  # [s, heads, d]
        keys, values = self.memory.of_layer(layer_number)
        paged = self.memory.paged
        paged.append(key, value, keys, values, self.slots)
        parts, count = [], 0
        if self.singles is not None:
            count = self.singles.lengths.numel()
            parts.append(paged.singles(query[:count], keys, values, self.singles).flatten(1))
        if self.chunks is not None:
            query, key, value = (x[count:] for x in (query, key, value))
            parts.append(chunk_attention(query, key, value, keys, values, self.chunks))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.unsqueeze(1)
