"""Where the documents of a GPT's samples end, for attention that stays within them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data.sample import SEGMENT_ENDS, Sample, SampleDataset


class DocumentEnds:
    """A dataset's samples, each with `SEGMENT_ENDS` of its inputs: where a document ends, and s.

    An end-of-document token belongs to the document that it ends.

    Args:
        dataset: of samples with `text`, [s + 1].
        eod: id of the end-of-document token.
    """

    def __init__(self, dataset: SampleDataset, eod: int) -> None:
        self._dataset, self._eod = dataset, eod

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> Sample:
        sample: Sample = self._dataset[i]
        text = np.asarray(sample["text"])
        length = len(text) - 1
        ends = np.flatnonzero(text[: length - 1] == self._eod) + 1
        return {**sample, SEGMENT_ENDS: np.append(ends, length)}


def join_ends(samples: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """`SEGMENT_ENDS` of samples one behind the other, with 0 before: [k + 1]."""
    lengths = [int(ends[-1]) for ends in samples]
    begins = np.cumsum([0, *lengths[:-1]])
    return np.concatenate([[0], *(ends + b for ends, b in zip(samples, begins, strict=True))])
