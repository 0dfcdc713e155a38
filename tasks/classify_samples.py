"""From labelled texts to what the loader draws from: token ids, epochs, and full batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data.sample import Sample, SampleDataset, filled_up
from megatron.tokenizer import Tokenizer
from tasks.classify_files import Example

_MOST_OF_CHOICE = 128  # tokens of a question with an answer, as in Megatron-LM


class TextSamples:
    """Examples as a BERT reads them: [CLS] first [SEP] second [SEP], cut at the end.

    A sample has `text`, `types` and `padding_mask` [c, s], one row a choice, and `label`.

    Args:
        examples: what to read.
        tokenizer: with cls, sep and pad.
        length: s.
    """

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, length: int) -> None:
        """Take the examples and how to read them."""
        self.examples = examples
        self._tokenizer = tokenizer
        self._length = length

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.examples)

    def __getitem__(self, i: int) -> Sample:
        """Return a sample."""
        example = self.examples[i]
        limit = _MOST_OF_CHOICE if len(example.texts) > 1 else None
        rows = [self._row(first, second, limit) for first, second in example.texts]
        text, types, padding = (np.stack(column) for column in zip(*rows, strict=True))
        return {
            "id": i,
            "text": text,
            "types": types,
            "padding_mask": padding,
            "label": np.array(example.label),
        }

    def _row(
        self, first: str, second: str | None, limit: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        tokenizer = self._tokenizer
        ids = [tokenizer.cls, *tokenizer.tokenize_spelled(first)[:limit], tokenizer.sep]
        types = [0] * len(ids)
        if second is not None:
            more = [*tokenizer.tokenize_spelled(second), tokenizer.sep]
            ids, types = ids + more, types + [1] * len(more)
        if len(ids) > self._length:
            ids, types = [*ids[: self._length - 1], tokenizer.sep], types[: self._length]
        return (
            filled_up(ids, self._length, tokenizer.pad),
            filled_up(types, self._length, 0),
            filled_up([1] * len(ids), self._length, 0),
        )


class Epochs:
    """A dataset shuffled anew for every epoch, as one long one.

    Sample k of the training is a pure function of seed and k.

    Args:
        dataset: one epoch.
        seed: of the shuffling.
        length: samples in all.
        used: of each epoch, the rest is dropped: so that an epoch ends with a full batch. None:
            all.
    """

    def __init__(
        self, dataset: SampleDataset, *, seed: int, length: int, used: int | None = None
    ) -> None:
        """Take the dataset and how it is shuffled."""
        self._dataset = dataset
        self._seed = seed
        self._length = length
        self._used = used or len(dataset)
        self._order: tuple[int, NDArray[np.int64]] | None = None  # of the epoch asked for last

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def __getitem__(self, i: int) -> Sample:
        """Return a sample."""
        epoch, place = divmod(i, self._used)
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng((self._seed, epoch))
            self._order = epoch, generator.permutation(len(self._dataset))
        sample: Sample = self._dataset[int(self._order[1][place])]
        return sample


class FilledUp:
    """A dataset and repetitions of its first sample, up to `length`, each with its own `id`.

    Args:
        dataset: of at least one sample.
        length: at least as many as it has.
    """

    def __init__(self, dataset: SampleDataset, length: int) -> None:
        """Take the dataset and its new length."""
        self._dataset = dataset
        self._length = length

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def __getitem__(self, i: int) -> Sample:
        """Return a sample."""
        sample: Sample = self._dataset[i if i < len(self._dataset) else 0]
        return {**sample, "id": i}


class Repeated:
    """A dataset again and again, up to `length`: for losses between epochs."""

    def __init__(self, dataset: SampleDataset, length: int) -> None:
        """Take the dataset and its new length."""
        self._dataset = dataset
        self._length = length

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def __getitem__(self, i: int) -> Sample:
        """Return a sample."""
        sample: Sample = self._dataset[i % len(self._dataset)]
        return sample
