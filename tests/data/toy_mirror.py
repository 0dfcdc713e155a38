"""A sample kind defined outside the package: the start of a document, then its mirror image.

A model can predict the second half of every sample once it has found the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.data.datasets import DataRequest, DatasetPart, Datasets, build_datasets
from megatron.data.mock import MockDataset
from megatron.data.sample import Sample, SampleDataset, pad_to


@dataclass(eq=False)
class MirrorDataset:
    """The samples of one part of an indexed dataset: `text`, `[s + 1]`, and `id`."""

    part: DatasetPart
    seed: int
    seq_length: int

    @property
    def description(self) -> str:
        """Return text that names the data and the settings of the samples."""
        part = self.part
        return f"Mirror\n{part.data.prefix} {part.split} {part.bounds} {self.seed}\n"

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.part.num_samples

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`, a pure function of seed, data and `i`."""
        document = int(np.random.default_rng([self.seed, i]).integers(*self.part.bounds))
        tokens = self.part.data.get(document)[: (self.seq_length + 1) // 2]
        mirrored = np.concatenate([tokens, tokens[::-1]])
        return {"text": pad_to(mirrored, self.seq_length + 1, 0), "id": i}


def build_mirror_datasets(request: DataRequest, *, seq_length: int, vocab_size: int) -> Datasets:
    """Build the datasets that the flags name."""

    def build_part(part: DatasetPart) -> MirrorDataset:
        return MirrorDataset(part, request.seed, seq_length)

    def build_mock(count: int, split: int) -> SampleDataset:
        return MockDataset(count, seq_length, vocab_size, request.seed, split)

    return build_datasets(request, build_part, build_mock)
