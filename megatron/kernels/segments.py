"""Stretches of a batch's tokens that attend within themselves only, without a mask in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """A batch of b samples of s tokens, cut into k stretches.

    Attributes:
        ends: int32 [k + 1], 0 and where each stretch ends, in all tokens, sample after sample. A
            stretch begins where the one before ends, lies in one sample, and may be empty.
        mask: bool [b, 1, 1, s], the same for forms that take a mask: True where a key may be
            attended to. Queries of padding attend to the tokens then instead of to each other:
            nobody reads what becomes of them.
    """

    ends: Tensor
    mask: Tensor

    @classmethod
    def of_padding(cls, padding: Tensor) -> Segments:
        """Of bool [b, s], True for a token: the tokens of each sample, and the padding behind them.

        Nothing here waits for a GPU: what is padding behind no token is an empty stretch.
        """
        samples, length = padding.shape
        begins = torch.arange(samples, device=padding.device) * length
        tokens = begins + padding.sum(dim=1)
        ends = torch.stack((tokens, begins + length), dim=1).flatten()
        return cls(torch.nn.functional.pad(ends, (1, 0)).int(), padding[:, None, None, :])


Mask = Tensor | Segments
