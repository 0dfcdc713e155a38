"""The common form of samples and datasets of all models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.errors import DataError

# The label of a position with nothing to predict.
IGNORED_LABEL = -1
# A part of a sample or batch: the ends of runs of tokens that attend only within themselves.
SEGMENT_ENDS = "segment_ends"
# A part of a batch with `SEGMENT_ENDS`: `[n, 0]` if no segment has more than n tokens. It has no
# elements, because the host reads a size without waiting for the device.
LONGEST_SEGMENT = "longest_segment"
# A part of a sample of examples, `[s]`: 1 where the label counts in the loss, otherwise 0.
TRAINED = "trained"
# A part of a sample of text, `[7]`, that says where the next row of its stream begins. In a blend,
# other samples lack it.
PLACE = "place"
# One sample: arrays, and `id`, the sample's number in its dataset. Each array except `SEGMENT_ENDS`
# has the same length in the whole dataset.
Sample = Mapping[str, NDArray[np.int64] | int]


class SampleDataset(Protocol):
    """A dataset whose sample `i` is a pure function of seed, data and `i`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, i: int) -> Any:
        """Return a `Sample`."""


class DescribedDataset(SampleDataset, Protocol):
    """A dataset that a blend can name."""

    @property
    def description(self) -> str:
        """A text that differs whenever the samples differ."""


@runtime_checkable
class ControlledDataset(SampleDataset, Protocol):
    """A dataset that is evaluated in other forms, too.

    Attributes:
        controls: The same samples with a change, by a phrase that follows the name of a loss.
    """

    controls: Mapping[str, SampleDataset]


def filled_up(values: ArrayLike, length: int, filler: int) -> NDArray[np.int64]:
    """Return `values` padded with `filler` to `[length]` int64."""
    filled = np.full(length, filler, np.int64)
    given = np.asarray(values)
    filled[: len(given)] = given
    return filled


def outside_vocabulary(where: str, token: int, vocab_size: int) -> DataError:
    """Return the error for a token id that is too large; `where` names a file and place in it."""
    return DataError(
        f"{where} holds the token id {token}, but the vocabulary has {vocab_size} entries: use "
        "the tokenizer that the dataset was preprocessed with, or preprocess it again"
    )
