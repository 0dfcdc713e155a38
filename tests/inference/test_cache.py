"""The blocks of the cache, snapshots of states, and the keys by which blocks are found again."""

from __future__ import annotations

from typing import Any

import torch

from megatron.inference.cache import BlockPool, CacheMemory, Snapshots, next_key
from megatron.models.recurrent_plan import StateSpec


def test_a_key_depends_on_all_tokens_before_and_on_what_changes_their_vectors() -> None:
    first = next_key([], [1, 2, 3, 4, 5], 2)
    second = next_key([first], [1, 2, 3, 4, 5], 2)
    assert first == next_key([], [1, 2, 9], 2)
    assert second == next_key([first], [0, 0, 3, 4], 2)
    others = [
        next_key([], [12, 3], 2),
        next_key([], [1, 23], 2),
        next_key([], [1, 2, 3], 3),
        next_key([], [3, 4], 2),
        next_key([second], [1, 2, 3, 4, 5, 6], 2),
        next_key([], [1, 2], 2, 1),
        next_key([], [1, 2], 2, 2),
        next_key([], [1, 2], 2, variant=1),
        next_key([], [1, 2], 2, variant=2**64 - 1),
        next_key([], [1, 2], 2, 1, variant=1),
    ]
    assert len({first, second, *others}) == 12
    assert all(len(key) == 16 for key in others)


def test_blocks_without_content_are_taken_first_and_then_the_oldest() -> None:
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    assert pool.available == 0
    for block, key in ((2, b"two"), (0, b"zero"), (1, b"one")):
        pool.publish(block, key)
    for block in (1, 3, 2, 0):
        pool.release(block)
    assert pool.available == 4
    assert [pool.find(key) for key in (b"zero", b"one", b"two", b"three")] == [0, 1, 2, None]
    assert [pool.allocate() for _ in range(2)] == [3, 1]
    assert pool.find(b"one") is None
    pool.share([2])
    assert (pool.available, pool.is_unused(2), pool.is_unused(0)) == (1, False, True)
    assert pool.allocate() == 0
    assert pool.find(b"two") == 2


def test_a_shared_block_is_free_after_its_last_use() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.publish(block, b"key")
    pool.share([block])
    pool.release(block)
    assert (pool.available, pool.is_unused(block)) == (0, False)
    pool.release(block)
    assert (pool.available, pool.is_unused(block)) == (1, True)
    pool.share([block, block])
    pool.release(block)
    assert pool.available == 0


def test_the_first_block_with_a_content_keeps_its_key() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    assert pool.find(b"key") == first
    pool.release(second)
    assert pool.allocate() == second  # it has no content that others could use


def test_a_new_snapshot_replaces_the_one_not_used_for_longest() -> None:
    snapshots = Snapshots([7, 8])
    slots = {key: snapshots.allocate(key) for key in (b"a", b"b")}
    assert sorted(slots.values()) == [7, 8]
    assert snapshots.allocate(b"a") is None
    assert snapshots.use(b"a") == slots[b"a"]
    assert snapshots.allocate(b"c") == slots[b"b"]
    assert [key in snapshots for key in (b"a", b"b", b"c")] == [True, False, True]
    assert snapshots.allocate(b"b") == slots[b"a"]
    assert Snapshots([]).allocate(b"a") is None


def test_states_are_copied_from_slot_to_slot_in_all_layers() -> None:
    specs = (StateSpec("a", (2,), torch.float64), StateSpec("b", (3, 2)))
    arguments: Any = ({1: (2, 4, 8)}, None, 3, 16, torch.device("cpu"), torch.bfloat16)
    memory = CacheMemory(*arguments, recurrent={0: specs, 4: specs[:1]}, state_slots=5)
    assert memory.spare_slot == 48
    assert {index: (*layer.shape,) for index, layer in memory.layers.items()} == {2: (2, 64, 4, 8)}
    assert {index: [(*one.shape, one.dtype) for one in states] for index, states in (
        memory.states.items()
    )} == {
        1: [(6, 2, torch.float64), (6, 3, 2, torch.bfloat16)],
        5: [(6, 2, torch.float64)],
    }  # fmt: skip
    assert memory.size_bytes == 2 * 64 * 4 * 8 * 2 + 6 * (2 * 8 + 6 * 2 + 2 * 8)
    tensors = [one for states in memory.states.values() for one in states]
    for one in tensors:
        one.copy_(torch.arange(6).view(-1, *[1] * (one.dim() - 1)).expand_as(one))
    memory.copy_states([])
    memory.copy_states([(0, 5), (3, 1)])
    for one in tensors:
        assert one.flatten(1)[:, 0].tolist() == [0, 3, 2, 3, 4, 0]
