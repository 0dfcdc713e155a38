"""The random numbers of C++'s `std::mt19937` and `std::mt19937_64`, many at a time.

Megatron-LM draws sentence maps in C++, so the same maps need the same streams. numpy's own
Mersenne Twister is the 32-bit one; the 64-bit one stands here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_BLOCKS = 256  # state updates of each array that is given out
_WORDS, _MIDDLE = 312, 156
_LOW = np.uint64(0x7FFFFFFF)
_HIGH = np.uint64(0xFFFFFFFF80000000)
_TWIST = np.uint64(0xB5026F5AA96619E9)
_ONE = np.uint64(1)


def mt19937(seed: int, block: int) -> Iterator[NDArray[np.uint32]]:
    """`std::mt19937(seed)`: its draws, for ever, in arrays of `block`."""
    random = np.random.RandomState(seed % 2**32)
    while True:
        yield random.randint(0, 2**32, block, dtype=np.uint32)  # one draw each, as it is


def mt19937_64(seed: int) -> Iterator[NDArray[np.uint64]]:
    """`std::mt19937_64(seed)`: its draws, for ever, in arrays of one size."""
    state = _seeded(seed)
    while True:
        block = np.empty((_BLOCKS, _WORDS), np.uint64)
        for words in block:
            state = _next_state(state)
            words[:] = state
        yield _temper(block.reshape(-1))


def _seeded(seed: int) -> NDArray[np.uint64]:
    words = [seed % 2**64]
    for i in range(1, _WORDS):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % 2**64)
    return np.array(words, np.uint64)


def _next_state(old: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The 312 words that follow. Each needs its old self, the next word and the one 156 on."""
    new = np.empty_like(old)
    mixed = _mix(old[:-1], old[1:])
    new[:_MIDDLE] = old[_MIDDLE:] ^ mixed[:_MIDDLE]
    new[_MIDDLE:-1] = new[: _MIDDLE - 1] ^ mixed[_MIDDLE:]
    new[-1:] = new[_MIDDLE - 1 : _MIDDLE] ^ _mix(old[-1:], new[:1])
    return new


def _mix(word: NDArray[np.uint64], following: NDArray[np.uint64]) -> NDArray[np.uint64]:
    joined = (word & _HIGH) | (following & _LOW)
    return (joined >> _ONE) ^ (joined & _ONE) * _TWIST


def _temper(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x ^= (x >> np.uint64(29)) & np.uint64(0x5555555555555555)
    x ^= (x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    x ^= (x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    x ^= x >> np.uint64(43)
    return x
