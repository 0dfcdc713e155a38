"""The types and field names of samples and datasets, shared by all models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.errors import DataError

# The label of a position where there is nothing to predict.
IGNORED_LABEL = -1
# A field of a sample, `[segments]`: the ends of segments, whose tokens attend only to the same
# segment. In a batch, a 0 comes first, and empty segments are added at the end (see `collate`).
SEGMENT_ENDS = "segment_ends"
# A field of a batch with `SEGMENT_ENDS`: an array of shape `[n, 0]` if no segment has more than n
# tokens. It has no elements, so that the host can read n without waiting for the device.
LONGEST_SEGMENT = "longest_segment"
# A field of a finetuning sample, `[s]`: 1 where the label counts in the loss, otherwise 0.
TRAINED = "trained"
# A field of a sample from a `TextDataset`, `[7]`: the index of its dataset, its stream, and the
# position (`RowPosition`) at which the stream's next row begins. Other samples of a blend lack it.
ROW_POSITION = "place"
# A field of an evaluation sample: 1 if the sample counts in the loss, 0 if it only fills a
# micro-batch.
COUNTED = "counted"
# A sample: arrays, and `id`, the sample's index in its dataset. Each array except `SEGMENT_ENDS`
# has the same length in all samples of the dataset.
Sample = Mapping[str, NDArray[np.int64] | int]


class SampleDataset(Protocol):
    """A dataset whose sample `i` is a pure function of seed, data and `i`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, i: int) -> Any:
        """Return sample `i`, a `Sample`."""


class DescribedDataset(SampleDataset, Protocol):
    """A dataset with a description, from which the name of a blend's index is derived."""

    @property
    def description(self) -> str:
        """Text that names the data and the settings of the samples."""


@runtime_checkable
class ControlledDataset(SampleDataset, Protocol):
    """A dataset that is also evaluated with modified samples.

    Attributes:
        controls: The modified datasets, by the phrase to append to the name of the loss.
    """

    controls: Mapping[str, SampleDataset]


def pad_to(values: ArrayLike, length: int, fill_value: int) -> NDArray[np.int64]:
    """Return `values` padded with `fill_value` to `[length]` int64."""
    filled = np.full(length, fill_value, np.int64)
    array = np.asarray(values)
    filled[: len(array)] = array
    return filled


def outside_vocabulary(where: str, token: int, vocab_size: int) -> DataError:
    """Return the error for a token id that is outside the vocabulary.

    Args:
        where: The file and the position in it.
        token: The token id.
        vocab_size: The number of entries in the vocabulary.
    """
    return DataError(
        f"{where} holds the token id {token}, but the vocabulary has {vocab_size} entries: use "
        "the tokenizer with which the dataset was preprocessed, or preprocess it again"
    )
