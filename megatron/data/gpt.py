"""Samples of a GPT run: `sequence length + 1` tokens each, cut from documents laid end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from megatron.data.cache import ArraySpec, IndexCache
from megatron.data.gpt_index import (
    GPTIndex,
    GPTIndexPlan,
    build_gpt_index,
    describe_gpt_index,
    is_sound_gpt_index,
    plan_gpt_index,
)
from megatron.data.indexed import IndexedDataset, bin_path, idx_path
from megatron.data.sample import outside_vocabulary
from megatron.errors import DataError


class GPTSample(TypedDict):
    """One sample: its tokens `[s + 1]` int64, and its number in the dataset's order."""

    text: NDArray[np.int64]
    id: int


class GPTDataset:
    """The samples of one split of one indexed dataset.

    Args:
        data: the tokens.
        index: which of them make up each sample.
        plan: what `index` was built from.
        description: Megatron's text that names the index.
        vocab_size: ids from here on are refused.
    """

    def __init__(
        self,
        data: IndexedDataset,
        index: GPTIndex,
        plan: GPTIndexPlan,
        *,
        description: str,
        vocab_size: int,
    ) -> None:
        self.data = data
        self.index = index
        self.plan = plan
        self.description = description
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def __getitem__(self, i: int) -> GPTSample:
        """Sample `i`: the tokens from the start of its row to that of the next, inclusive.

        Raises:
            DataError: a token id is outside the vocabulary, or index and data do not fit.
        """
        row = int(self.index.shuffle[i])
        (first, offset), (last, end) = self.index.samples[row : row + 2].tolist()
        parts = [
            self._document(
                place,
                start=offset if place == first else 0,
                stop=end + 1 if place == last else None,
            )
            for place in range(first, last + 1)
        ]
        text = np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)
        if len(text) != self.plan.seq_length + 1:
            raise self._misfit(i, f"{len(text)} tokens, expected {self.plan.seq_length + 1}")
        if int(text.max()) >= self.vocab_size:
            self._refuse_token(first, last)
        return {"text": text, "id": i}

    def _document(self, place: int, start: int, stop: int | None) -> NDArray[Any]:
        document = int(self.index.documents[place])
        try:
            length = None if stop is None else stop - start
            return self.data.get(document, offset=start, length=length)
        except IndexError as error:
            raise self._misfit(place, str(error)) from None

    def _misfit(self, at: int, what: str) -> DataError:
        return DataError(
            f"{self.data.prefix}: index and data do not fit at {at}: {what}; delete the index "
            "cache (index-cache beside the dataset, or --data-cache-path) so that it is built anew"
        )

    def _refuse_token(self, first: int, last: int) -> None:
        for document in self.index.documents[first : last + 1].tolist():
            largest = int(self.data.get(document).max(initial=0))
            if largest >= self.vocab_size:
                where = f"{bin_path(self.data.prefix)}: document {document}"
                raise outside_vocabulary(where, largest, self.vocab_size)


def build_gpt_dataset(
    data: IndexedDataset,
    bounds: tuple[int, int],
    *,
    name: str,
    num_samples: int,
    seq_length: int,
    seed: int,
    split: str,
    vocab_size: int,
    data_cache_path: str | None,
    warns: bool = True,
) -> GPTDataset:
    """Load or build the index of documents `[bounds[0], bounds[1])` and draw a first sample.

    Args:
        name: train, valid or test; part of the index's name.
        split: the --split text as the user spelt it; part of the index's name.
        data_cache_path: folder for the index; None: `index-cache` beside the dataset.
        warns: whether this process reports a cache folder that cannot be written to.

    Raises:
        DataError: the documents hold no token, too few for the samples asked for, or ids outside
            the vocabulary.
    """
    start, end = bounds
    tokens = int(data.sequence_lengths[start:end].sum(dtype=np.int64))
    if tokens == 0:
        raise DataError(
            f"{data.prefix}: the {name} split is documents {start} to {end - 1} of {len(data)}, "
            f"which hold no token, but {num_samples} samples of {seq_length} tokens are asked "
            "for: change --split or give more data"
        )
    plan = plan_gpt_index(end - start, tokens, num_samples, seq_length)
    description = describe_gpt_index(data.prefix, name, num_samples, seq_length, seed, split)
    beside = Path(data.prefix).parent / "index-cache"
    folders = (beside,) if data_cache_path is None else (beside, Path(data_cache_path))
    arrays = IndexCache(folders, warns).load_or_build(
        description,
        [
            ArraySpec(*spec)
            for spec in zip(
                ("doc_idx", "sample_idx", "shuffle_idx"), plan.dtypes, plan.shapes, strict=True
            )
        ],
        lambda: build_gpt_index(plan, data.sequence_lengths, start, seed),
        is_sound=lambda arrays: is_sound_gpt_index(plan, GPTIndex(*arrays), start),
        source=idx_path(data.prefix),
    )
    dataset = GPTDataset(
        data, GPTIndex(*arrays), plan, description=description, vocab_size=vocab_size
    )
    _ = dataset[0]  # another tokenizer's dataset is found out here, not at some later step
    return dataset
