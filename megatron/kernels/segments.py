"""Stretches of a batch's tokens that attend within themselves only, without a mask in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """A batch of b samples of s tokens, cut into k stretches.

    Attributes:
        ends: int32 [k + 1], 0 and where each stretch ends, in all tokens, sample after sample. A
            stretch begins where the one before ends, lies in one sample, and may be empty.
        shape: b, s.
        causal: tokens attend to those before them only.
        keys: bool [b, s], keys that any query of the sample may attend to in forms that take a
            mask; None: those of its stretch.
    """

    ends: Tensor
    shape: tuple[int, int]
    causal: bool
    keys: Tensor | None = None

    @classmethod
    def of_documents(cls, ends: Tensor, shape: tuple[int, int]) -> Segments:
        """Documents packed into samples: of `ends`, see `Segments`, of any integers."""
        return cls(ends.int(), shape, causal=True)

    @classmethod
    def of_padding(cls, padding: Tensor) -> Segments:
        """Of bool [b, s], True for a token: the tokens of each sample, and the padding behind them.

        Where a mask is taken, padding attends to the tokens instead of to itself: nobody reads what
        becomes of it. Nothing here waits for a GPU: what is no padding at all is an empty stretch.
        """
        samples, length = padding.shape
        begins = torch.arange(samples, device=padding.device) * length
        ends = torch.stack((begins + padding.sum(dim=1), begins + length), dim=1).flatten()
        return cls(F.pad(ends, (1, 0)).int(), (samples, length), causal=False, keys=padding)

    @cached_property
    def mask(self) -> Tensor:
        """The same for forms that take a mask: bool [b, 1, s or 1, s], True where a query (dim 2)
        may attend to a key (dim 3)."""
        if self.keys is not None:
            return self.keys[:, None, None, :]
        samples, length = self.shape
        tokens = torch.arange(samples * length, device=self.ends.device, dtype=torch.int32)
        stretch = torch.searchsorted(self.ends[1:], tokens, right=True).view(self.shape)
        same = stretch[:, :, None] == stretch[:, None, :]
        return (same.tril() if self.causal else same).unsqueeze(1)


Mask = Tensor | Segments
