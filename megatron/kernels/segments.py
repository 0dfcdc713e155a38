"""Texts one after the other, each by itself, without a mask in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """A batch of b samples of s tokens, cut into k stretches: a token attends to those of its own.

    Attributes:
        ends: int32 [k + 1], 0 and where each stretch ends, in all tokens, sample after sample. A
            stretch begins where the one before ends, lies in one sample, and may be empty.
        shape: b, s.
        causal: to itself and those before it only.
        longest: no stretch has more tokens; None: s.
    """

    ends: Tensor
    shape: tuple[int, int]
    causal: bool = True
    longest: int | None = None

    @classmethod
    def of(cls, ends: Tensor, tokens: Tensor) -> Segments:
        """Of tokens [b, s], from ends of any integer type."""
        samples, length = tokens.shape
        return cls(ends.int(), (samples, length))

    @classmethod
    def of_padded(cls, padding: Tensor) -> Segments:
        """Of samples [b, s] one after the other as one, [1, b s]: those of tokens, True in
        `padding`, and behind them those of padding, each by itself, attending in both ways."""
        samples, length = padding.shape
        starts = torch.arange(samples, device=padding.device) * length
        ends = torch.stack((starts + padding.sum(dim=1), starts + length), dim=1).flatten()
        ends = F.pad(ends, (1, 0)).int()
        return cls(ends, (1, samples * length), causal=False, longest=length)

    @cached_property
    def mask(self) -> Tensor:
        """The same for forms that take a mask: bool [b, 1, s, s], True where a query (dim 2) may
        attend to a key (dim 3)."""
        samples, length = self.shape
        tokens = torch.arange(samples * length, device=self.ends.device, dtype=torch.int32)
        stretch = torch.searchsorted(self.ends[1:], tokens, right=True).view(self.shape)
        same = stretch[:, :, None] == stretch[:, None, :]
        return (same.tril() if self.causal else same).unsqueeze(1)


Mask = Tensor | Segments
