"""Who has which block of the key-value cache: numbers only, no memory.

A block holds the keys and values of so many consecutive tokens. A full block is known by a key that
stands for its tokens and all before them; sequences that begin alike share it. What nobody uses
keeps its content until the block is needed, the longest unused first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

Key = bytes

FIRST_KEY: Key = b""


def next_key(previous: Key, tokens: Sequence[int]) -> Key:
    """Of a full block with these tokens, after the block `previous` (`FIRST_KEY`: after none).

    A cryptographic hash: nobody can make two beginnings that are taken for one another.
    """
    text = ",".join(map(str, tokens)).encode()
    return hashlib.blake2b(previous + text, digest_size=16).digest()


class BlockPool:
    """The blocks 0 to `count`, exclusive, and their users."""

    def __init__(self, count: int) -> None:
        self._users = [0] * count
        self._keys: list[Key | None] = [None] * count
        self._blocks: dict[Key, int] = {}
        self._empty = deque(range(count))
        self._kept: OrderedDict[int, None] = OrderedDict()  # unused with content, oldest first

    @property
    def count(self) -> int:
        """Of all blocks."""
        return len(self._users)

    @property
    def available(self) -> int:
        """Blocks that nobody uses."""
        return len(self._empty) + len(self._kept)

    def take(self) -> int | None:
        """A block to write to; None where all are in use."""
        if self._empty:
            block = self._empty.popleft()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._users[block] = 1
        return block

    def is_known(self, key: Key) -> bool:
        """Whether `share` would find a block."""
        return key in self._blocks

    def is_unused(self, key: Key) -> bool:
        """Whether `share` would make one block less available."""
        return self._users[self._blocks[key]] == 0

    def share(self, key: Key) -> int:
        """Use the block of this key, which is known, as well."""
        block = self._blocks[key]
        return self.share_block(block)

    def share_block(self, block: int) -> int:
        """Use a block as well that is in use, or known by a key."""
        if self._users[block] == 0:
            del self._kept[block]
        self._users[block] += 1
        return block

    def publish(self, block: int, key: Key) -> None:
        """From now on `block`, which is in use, is full and what `key` stands for."""
        if key not in self._blocks:  # else another block has the same content
            self._blocks[key] = block
            self._keys[block] = key

    def release(self, block: int) -> None:
        """Use it no more."""
        assert self._users[block] > 0, f"block {block} is released twice"
        self._users[block] -= 1
        if self._users[block]:
            return
        if self._keys[block] is None:
            self._empty.append(block)
        else:
            self._kept[block] = None

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._blocks[key]
        self._keys[block] = None
