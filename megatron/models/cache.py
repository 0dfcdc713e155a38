"""What inference gives a model besides tokens: the keys and values of earlier ones."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KeyValueCache(Protocol):
    """Keys and values that a pass goes on from, and where its tokens belong.

    Such a pass has one sample of s tokens: of any number of sequences, each token at its own place
    in its own.
    """

    @property
    def positions(self) -> Tensor:
        """Place of each token in its sequence, int64 [s]."""
        ...

    @property
    def outputs(self) -> Tensor:
        """Which of the s tokens logits are wanted of, int64 [k]."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer_number: int) -> Tensor:
        """Keep the tokens' keys and values, and attend to all of each one's sequence up to it.

        Args:
            query: [s, 1, n/t, d].
            key: [s, 1, g/t (at least 1), d].
            value: as key.
            layer_number: from 1.

        Returns:
            [s, 1, n d / t].
        """
        ...
