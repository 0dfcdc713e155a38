"""Seeds as pure functions of what they are for, so no generator state has to be saved or moved."""

from __future__ import annotations

import hashlib
import json


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part, and on nothing else.

    Args:
        parts: what the seed is for, most general first: run seed, purpose, index.
    """
    return int.from_bytes(_digest(*parts)[:8], "big") >> 1


def derive_key(*parts: int | str) -> tuple[int, int]:
    """Two 32-bit words that depend on every part: a key for a counter-based generator."""
    digest = _digest(*parts)
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")


def micro_batch_seed(seed: int, first_sample: int) -> int:
    """Seed of the dropout masks of one micro-batch.

    It depends on the run's seed and the place in the run's sample order of the micro-batch's first
    sample. Neither a restart nor another number of data-parallel processes changes it.
    """
    return derive_seed(seed, "micro batch", first_sample)


def _digest(*parts: int | str) -> bytes:
    # JSON keeps the parts apart: (1, 23) and (12, 3), or 1 and "1", give different texts.
    return hashlib.sha256(json.dumps(parts).encode()).digest()
