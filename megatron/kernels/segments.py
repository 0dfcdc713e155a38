"""Attention masks of packed documents, described by where the documents end.

The flash kernels need only these ends. A mask tensor is created where another kernel needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Result = TypeVar("Result")


@dataclass(frozen=True)
class Segments:
    """A batch of b samples of s tokens, divided into k segments; no token attends across them.

    Attributes:
        ends: 0, and then the end of each segment among the tokens of all samples in order, int32
            [k + 1]. A segment begins where the previous one ends, belongs to a single sample, and
            may be empty.
        shape: The sizes b and s.
        causal: Whether a token attends only to itself and to earlier tokens.
        longest: An upper bound on the length of segments; `None` means s. For every segment, the
            flash kernel starts as many thread blocks as a segment of this length needs.
        positions: The positions by which queries and keys are rotated in a batch of one sample,
            int64 [s]. `None` means the positions in the sample, which give the same attention
            except for the last bits.
    """

    ends: Tensor
    shape: tuple[int, int]
    causal: bool = True
    longest: int | None = None
    positions: Tensor | None = None
    _shared: dict[Hashable, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, ends: Tensor, tokens: Tensor, longest: int | None = None) -> Segments:
        """Return the segments of a batch of tokens.

        Args:
            ends: The attribute `ends`, of any integer dtype.
            tokens: The tokens [b, s]. Only the shape is used.
            longest: The attribute `longest`.
        """
        samples, length = tokens.shape
        return cls(ends.int(), (samples, length), longest=longest)

    @classmethod
    def of_padded(cls, is_token: Tensor) -> Segments:
        """Return the segments of padded samples [b, s], concatenated into one sample [1, b s].

        Args:
            is_token: True for tokens and False for the padding after them, bool [b, s]. The tokens
                and the padding of a sample are separate segments with bidirectional attention.
        """
        samples, length = is_token.shape
        starts = torch.arange(samples, device=is_token.device) * length
        ends = torch.stack((starts + is_token.sum(dim=1), starts + length), dim=1).flatten()
        ends = F.pad(ends, (1, 0)).int()
        return cls(ends, (1, samples * length), causal=False, longest=length)

    def in_one_row(self) -> Segments:
        """Return the same segments in a single sample [1, b s], with the same token positions."""
        samples, length = self.shape
        if samples == 1:
            return self
        positions = torch.arange(length, device=self.ends.device).repeat(samples)
        return Segments(
            self.ends, (1, samples * length), self.causal, self.longest or length, positions
        )

    def shared(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return a value that is derived from these segments and cached.

        All layers use the same segments, so derived values are computed only once.

        Args:
            key: The key of the value in the cache.
            make: The function that computes the value at the first call with this key.
        """
        if key not in self._shared:
            self._shared[key] = make()
        result: Result = self._shared[key]
        return result

    def within(self, chunk: int) -> Segments:
        """Return these segments, each divided from its start into chunks of `chunk` tokens."""
        if (self.longest or self.shape[1]) <= chunk:
            return self
        return self.shared(
            ("chunks", chunk), lambda: replace(self, ends=self._chunk_ends(chunk), longest=chunk)
        )

    def _chunk_ends(self, chunk: int) -> Tensor:
        """Return the ends of all chunks, int32.

        The number of chunks is known only on the device, so empty chunks pad it to an upper bound.
        """
        starts, stops = self.ends[:-1], self.ends[1:]
        counts = (stops - starts + chunk - 1) // chunk
        total = counts.cumsum(0, dtype=torch.int32)
        max_chunks = len(starts) + self.shape[0] * self.shape[1] // chunk
        index = torch.arange(max_chunks, device=starts.device, dtype=torch.int32)
        segment = torch.searchsorted(total, index, right=True).clamp(max=len(starts) - 1)
        chunk_in_segment = index - (total - counts)[segment]
        ends = torch.minimum(starts[segment] + (chunk_in_segment + 1) * chunk, stops[segment])
        return F.pad(ends, (1, 0))

    @cached_property
    def token_positions(self) -> Tensor:
        """The position of each token in its segment, int64 [b, s]."""
        tokens = torch.arange(self.shape[0] * self.shape[1], device=self.ends.device)
        return tokens.view(self.shape) - self.ends[number_segments(self.ends, self.shape)]

    @cached_property
    def mask(self) -> Tensor:
        """The equivalent mask: bool [b, 1, queries, keys], True where a query may attend."""
        segment = number_segments(self.ends, self.shape)
        same = segment[:, :, None] == segment[:, None, :]
        return (same.tril() if self.causal else same).unsqueeze(1)


def number_segments(ends: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the index of each token's segment, int64 [b, s].

    Args:
        ends: The ends of the segments, int32 [k + 1], as in `Segments`.
        shape: The sizes b and s.
    """
    tokens = torch.arange(shape[0] * shape[1], device=ends.device, dtype=torch.int32)
    return torch.searchsorted(ends[1:], tokens, right=True).view(shape)


Mask = Tensor | Segments
