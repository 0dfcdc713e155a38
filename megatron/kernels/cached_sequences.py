"""Descriptions of the sequences that add tokens to a paged cache (`paged_attention`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add

import torch
from torch import Tensor


@dataclass(frozen=True)
class Singles:
    """The u sequences that add one token each. Sequences without tokens pad the batch.

    Attributes:
        tables: The cache blocks of each sequence, int32 [u, m]. Entries after a sequence's last
            block are arbitrary.
        lengths: The number of tokens of each sequence, including the new token, int32 [u].
        longest: An upper bound on the lengths.
        block_size: The number of tokens in a cache block.
    """

    tables: Tensor
    lengths: Tensor
    longest: int
    block_size: int

    def within(self, chunk: int) -> Singles:
        """Return the sequences, each reduced to the tokens of its last chunk.

        Args:
            chunk: The number of tokens in a chunk, a multiple of `block_size`.
        """
        if self.longest <= chunk:
            return self
        blocks = torch.arange(chunk // self.block_size, device=self.tables.device)
        starts = chunk_starts(self.lengths, chunk)
        # A chunk may be longer than its sequence.
        columns = (starts[:, None] // self.block_size + blocks).clamp(max=self.tables.shape[1] - 1)
        tables = self.tables.gather(1, columns)
        return Singles(tables, self.lengths - starts, chunk, self.block_size)


def chunk_starts(lengths: Tensor, chunk: int) -> Tensor:
    """Return the position at which the last chunk of each sequence begins.

    Args:
        lengths: The number of tokens of each sequence, in a tensor of any shape.
        chunk: The number of tokens in a chunk.

    Returns:
        The positions, in the shape of the lengths.
    """
    return (lengths - 1).clamp(min=0) // chunk * chunk


@dataclass(frozen=True)
class Chunks:
    """The c sequences that add consecutive tokens of their prompts.

    Attributes:
        starts: The number of tokens of each sequence that are already in the cache.
        sizes: The number of new tokens of each sequence.
        ends: The cumulative numbers, sequence by sequence, of new tokens and of all tokens, int32
            [2, c + 1]. Each row begins with 0.
        slots: The cache slots of all l tokens, sequence by sequence, int64 [l]; `None` if all
            tokens are new.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    ends: Tensor
    slots: Tensor | None
    _by_chunk_size: dict[int, Chunks] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def within(self, chunk: int) -> Chunks:
        """Return the chunks that contain new tokens, each as a separate sequence.

        The result is cached, because all layers use the same chunks.

        Args:
            chunk: The number of tokens in a chunk.
        """
        if chunk not in self._by_chunk_size:
            self._by_chunk_size[chunk] = self._divide(chunk)
        return self._by_chunk_size[chunk]

    def first_tokens(self, before: int) -> Tensor:
        """Return, for every token, the index within the step of its sequence's first new token.

        Args:
            before: The number of tokens in the step that precede the tokens of these sequences.

        Returns:
            The indices, int64 [l].
        """
        new_ends, total_ends = self.ends.long()
        total = sum(self.starts) + sum(self.sizes)
        return (new_ends[:-1] + before).repeat_interleave(total_ends.diff(), output_size=total)

    def _divide(self, chunk: int) -> Chunks:
        starts, sizes, ranges, before = [], [], [], 0
        for start, size in zip(self.starts, self.sizes, strict=True):
            first = start // chunk * chunk
            ranges.append(range(before + first, before + start + size))
            for chunk_start in range(first, start + size, chunk):
                begin = max(start, chunk_start)
                starts.append(begin - chunk_start)
                sizes.append(min(start + size, chunk_start + chunk) - begin)
            before += start + size
        lengths = [*map(add, starts, sizes)]
        ends = torch.tensor([[0, *sizes], [0, *lengths]], dtype=torch.int32).cumsum(1)
        slots = self.slots
        if slots is not None:
            slots = torch.cat([slots[part.start : part.stop] for part in ranges])
        ends = ends.int().to(self.ends.device)
        return Chunks(tuple(starts), tuple(sizes), ends, slots)
