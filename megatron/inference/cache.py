"""The KV cache and the states of recurrent layers: blocks, memory, and a step's view of it.

A block stores the keys and values of consecutive tokens, each in its own slot. A full block has a
key that identifies its tokens and all tokens before them. Sequences with the same prefix share the
block. An unused block keeps its content until the block is needed. The block that has been unused
longest is reused first.

The states of a recurrent layer have a constant size for each sequence. Every sequence in the batch
has its own state slot, an index into the tensors of states. The sequence's new states are written
to this slot after each step.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from megatron.kernels.attention import AttentionOptions
from megatron.kernels.cached_sequences import Chunks, Singles
from megatron.kernels.paged_attention import LatentHeads, PagedAttention
from megatron.models.attention import Recurrence
from megatron.models.recurrent_plan import StateSpec

BlockKey = bytes


def next_key(
    keys: Sequence[BlockKey],
    tokens: Sequence[int],
    block_size: int,
    adapter: int = 0,
    *,
    variant: int = 0,
) -> BlockKey:
    """Return the key of a sequence's next full block, which follows the blocks with these keys.

    The key is a cryptographic hash, so nobody can construct two different prompts with the same
    key. The key includes the adapter, because the same tokens have different keys and values with a
    different adapter. The same is true of a sequence longer than the training context of a model
    with LongRoPE or dynamic NTK; `variant` distinguishes these cases.

    Args:
        keys: Keys of all blocks before the next one.
        tokens: Tokens of the sequence.
        block_size: Number of tokens in a block.
        adapter: Index of the sequence's adapter, counted from 1; 0 is the base model.
        variant: A number below 2 ** 64 that distinguishes sequences with the same tokens but
            different keys and values.
    """
    start = len(keys) * block_size
    text = ",".join(map(str, tokens[start : start + block_size])).encode()
    salt = (adapter << 64 | variant).to_bytes(hashlib.blake2b.SALT_SIZE, "little")
    data = (keys[-1] if keys else b"") + text
    return hashlib.blake2b(data, digest_size=16, salt=salt).digest()


class BlockPool:
    """The blocks of the cache, numbered from 0, with the number of sequences that use each.

    It has no tensors.
    """

    def __init__(self, count: int) -> None:
        """Start with all blocks unused.

        Args:
            count: Number of blocks.
        """
        self.count = count
        self._references = [0] * count
        self._keys: list[BlockKey | None] = [None] * count
        self._blocks: dict[BlockKey, int] = {}
        self._free = deque(range(count))
        # Unused blocks with content, and their keys, oldest first.
        self._reusable: OrderedDict[int, BlockKey] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of unused blocks."""
        return len(self._free) + len(self._reusable)

    def allocate(self) -> int:
        """Return a block to write to, with a reference count of 1. One must be available.

        The content of an unused block may be lost.
        """
        if self._free:
            block = self._free.popleft()
        else:
            block, key = self._reusable.popitem(last=False)
            del self._blocks[key]
            self._keys[block] = None
        self._references[block] = 1
        return block

    def find(self, key: BlockKey) -> int | None:
        """Return the block with this key, or `None` if there is none."""
        return self._blocks.get(key)

    def is_unused(self, block: int) -> bool:
        """Return whether a block is unused. If so, `share` reduces `available` by one."""
        return self._references[block] == 0

    def share(self, blocks: Iterable[int]) -> None:
        """Increment the reference counts of blocks that are in use or have a key."""
        for block in blocks:
            if self._references[block] == 0:
                del self._reusable[block]
            self._references[block] += 1

    def publish(self, block: int, key: BlockKey) -> None:
        """Record that a block in use is full and contains the tokens that `key` identifies."""
        if key not in self._blocks:  # otherwise another block already has this content
            self._blocks[key] = block
            self._keys[block] = key

    def release(self, block: int) -> None:
        """Decrement the reference count of a block."""
        assert self._references[block] > 0, f"block {block} is released twice"
        self._references[block] -= 1
        if self._references[block]:
            return
        key = self._keys[block]
        if key is None:
            self._free.append(block)
        else:
            self._reusable[block] = key


class Snapshots:
    """The slots of state snapshots taken at the ends of blocks; `CacheMemory` holds the tensors.

    If no slot is free, a new snapshot replaces the least recently used one.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        """Start without snapshots.

        Args:
            slots: The state slots for snapshots.
        """
        self._free = list(slots)
        self._slots: OrderedDict[BlockKey, int] = OrderedDict()  # least recently used first

    def __contains__(self, key: BlockKey) -> bool:
        """Return whether there is a snapshot at the end of the block with this key."""
        return key in self._slots

    def use(self, key: BlockKey) -> int:
        """Return the slot of an existing snapshot, and mark it as the most recently used."""
        self._slots.move_to_end(key)
        return self._slots[key]

    def allocate(self, key: BlockKey) -> int | None:
        """Return a slot for a new snapshot, or `None` if it already exists or there are no slots.

        Args:
            key: Key of the block at whose end the snapshot is taken.
        """
        if key in self._slots or not (self._free or self._slots):
            return None
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._slots[key] = slot
        return slot


@dataclass(eq=False)
class CacheMemory:
    """Keys and values (or latent vectors) and states of this process's layers and heads.

    Attributes:
        shapes: The shape of a token's entry in the cache, by 0-based layer index
            (`AttentionPlan.cached`).
        paged: Paged attention, which writes to the cache and attends to it.
        blocks: Number of blocks. One more is allocated for the padding of batches.
        block_size: Number of tokens in a block.
        device: Device of the memory.
        dtype: Number format of keys and values, and of states whose specs do not set one.
        recurrent: Specs of a sequence's states in each recurrent layer, by 0-based layer index.
        state_slots: Number of state slots, each for one sequence or snapshot. One more is
            allocated for padding.
        layers: Keys and values [2, slots, g, d], or latent vectors [1, slots, 1, w], by 1-based
            layer number.
        states: States [state_slots + 1, ...] by 1-based layer number.
        spare_slot: Slot for the padding of batches.
        size_bytes: Size of all layers and states in bytes.
    """

    shapes: Mapping[int, tuple[int, int, int]]
    paged: PagedAttention
    blocks: int
    block_size: int
    device: torch.device
    dtype: torch.dtype
    recurrent: Mapping[int, tuple[StateSpec, ...]] = field(default_factory=dict)
    state_slots: int = 0

    def __post_init__(self) -> None:
        """Allocate the memory."""
        self.spare_slot = self.blocks * self.block_size
        slots = self.spare_slot + self.block_size
        self.layers = {
            index + 1: torch.zeros(tensors, slots, *sizes, device=self.device, dtype=self.dtype)
            for index, (tensors, *sizes) in self.shapes.items()
        }
        self.states = {
            index + 1: tuple(
                torch.zeros(
                    self.state_slots + 1,
                    *spec.shape,
                    device=self.device,
                    dtype=spec.dtype or self.dtype,
                )
                for spec in specs
            )
            for index, specs in self.recurrent.items()
        }
        allocated = [
            *self.layers.values(),
            *(state for states in self.states.values() for state in states),
        ]
        self.size_bytes = sum(memory.nbytes for memory in allocated)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the states in all layers from one slot to another.

        Args:
            pairs: Pairs of source and target slots.
        """
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.device).unbind(1)
        for states in self.states.values():
            for state in states:
                state.index_copy_(0, target, state.index_select(0, source))


@dataclass(frozen=True)
class StateRows:
    """The sequences of a step, for layers with states.

    Attributes:
        slots: State slot of each sequence, int64 [sequences]. Sequences that add one token
            come first.
        singles: Number of sequences that add one token.
        chunks: For each other sequence, the number of tokens that it adds, and whether these are
            its first.
    """

    slots: Tensor
    singles: int
    chunks: tuple[tuple[int, bool], ...] = ()


@dataclass(frozen=True)
class StepCache:
    """A step's view of the cache: the `models.attention.KeyValueCache` that a model receives.

    Attributes:
        memory: The keys, values and states of all sequences.
        positions: Position of each token in its sequence, int64 [s].
        lengths: Sequence length that determines each token's rotary frequencies, int64 [s].
        slots: Slot of each token's key and value, int64 [s].
        outputs: Indices of the tokens whose logits are computed, int64 [k].
        singles: Sequences that add one token, which come first, or `None` if there are none.
        chunks: Sequences that add several tokens, or `None` if there are none.
        rows: All sequences, for layers with states; `None` if the model has none.
    """

    memory: CacheMemory
    positions: Tensor
    lengths: Tensor
    slots: Tensor
    outputs: Tensor
    singles: Singles | None
    chunks: Chunks | None
    rows: StateRows | None = None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store the tokens' keys and values, and attend from each token to its sequence so far.

        Args:
            query: Queries [s, 1, n/t, d].
            key: Keys [s, 1, g/t, d].
            value: Values [s, 1, g/t, d].
            options: The layer number, and how scores become attention weights.

        Returns:
            Attention output [s, 1, n d / t].
        """
        query, key, value = (x.squeeze(1) for x in (query, key, value))  # [s, heads, d]
        keys, values = self.memory.layers[options.layer_number]
        paged = self.memory.paged
        paged.append(key, value, keys, values, self.slots)
        parts, count = [], 0
        if self.singles is not None:
            count = self.singles.lengths.numel()
            rows = paged.singles(query[:count], keys, values, self.singles, options)
            parts.append(rows.flatten(1))
        if self.chunks is not None:
            query, key, value = (x[count:] for x in (query, key, value))
            parts.append(paged.chunks(query, key, value, (keys, values), self.chunks, options))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.unsqueeze(1)

    def attend_latent(
        self, query: Tensor, latent: Tensor, heads: LatentHeads, options: AttentionOptions
    ) -> Tensor:
        """Store the tokens' latent vectors, and attend from each token to its sequence so far.

        Args:
            query: Queries [s, 1, n/t, d].
            latent: Latent vectors [s, 1, w].
            heads: The layer that computes keys and values from these vectors.
            options: The layer number, the scale of the scores, and how they become weights.

        Returns:
            Attention output [s, 1, n d / t].
        """
        query = query.squeeze(1)
        (vectors,) = self.memory.layers[options.layer_number]  # [slots, 1, w]
        vectors.index_copy_(0, self.slots, latent)
        paged = self.memory.paged
        parts, count = [], 0
        if self.singles is not None:
            count = self.singles.lengths.numel()
            rows = paged.latent_singles(query[:count], vectors, heads, self.singles, options)
            parts.append(rows.flatten(1))
        if self.chunks is not None:
            slots = self.chunks.slots
            read = latent[count:] if slots is None else vectors[slots]  # [l, 1, w]
            new, chunks = query[count:], replace(self.chunks, slots=None)
            tokens = partial(self.chunks.first_tokens, count)
            key, value = heads.expanded(read.squeeze(1), tokens)
            parts.append(paged.chunks(new, key, value, (key, value), chunks, options))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.unsqueeze(1)

    def recur(self, layer_number: int, x: Tensor, recurrence: Recurrence) -> Tensor:
        """Continue each token's sequence from its states in a layer, and keep the new states.

        Sequences that add one token are computed together, the others one by one.

        Args:
            layer_number: Index of the layer in the model, from 1.
            x: Input of the recurrence, [s, 1, c].
            recurrence: The recurrence to run.

        Returns:
            The recurrence's results [s, 1, ...].
        """
        assert self.rows is not None, "the engine was built without states"
        memory, rows = self.memory.states[layer_number], self.rows
        counts = [(rows.singles, 1, False)] * bool(rows.singles)
        counts += [(1, size, is_new) for size, is_new in rows.chunks]
        results, token, sequence = [], 0, 0
        for count, size, is_new in counts:
            slots = rows.slots[sequence : sequence + count]
            before = None if is_new else tuple(states.index_select(0, slots) for states in memory)
            tokens = x[token : token + count * size].view(count, size, *x.shape[2:])
            out, after = recurrence(tokens.transpose(0, 1), before)
            for states, new_states in zip(memory, after, strict=True):
                states.index_copy_(0, slots, new_states.to(states.dtype))
            results.append(out.transpose(0, 1).flatten(0, 1).unsqueeze(1))
            token, sequence = token + count * size, sequence + count
        return results[0] if len(results) == 1 else torch.cat(results)
