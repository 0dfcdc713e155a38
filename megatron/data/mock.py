"""Generated tokens that a model can learn, for training without a corpus (`--mock-data`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.masking import SpecialIds
from megatron.data.sample import Sample
from megatron.data.sentence_map import SentenceMapPlan

_LARGEST_VOCABULARY = 256
_LARGEST_STEP = 4
_SENTENCE = 20  # approximate length of a sentence in tokens


@dataclass(eq=False)
class MockDataset:
    """GPT samples that count up from a random token by a random step, modulo a small vocabulary.

    The step is constant within a sample, so a model can predict every token except the first two.
    Sample `i` depends only on the seed, the split and `i`.

    Attributes:
        num_samples: The number of samples.
        seq_length: The sequence length s in tokens.
        vocab_size: The size of the vocabulary. Ids are below this number and below 256.
        seed: The seed of the random draws.
        split: The index of the split, so that training, validation and test samples differ.
    """

    num_samples: int
    seq_length: int
    vocab_size: int
    seed: int
    split: int
    description: str = "Generated tokens\n"

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`: tokens `[s + 1]`."""
        random = _generator(self.num_samples, self.seed, self.split, i)
        return {"text": _count_up(random, self.seq_length + 1, self.vocab_size), "id": i}


@dataclass(eq=False)
class MockSentences:
    """Generated sentences for BERT, T5 and ICT, whose tokens count up as in `MockDataset`.

    A model can predict masked tokens from their neighbors, and the order of two segments from the
    tokens where they meet.

    Attributes:
        num_samples: The number of samples.
        plan: The length of the longest sample, the share of short samples, and the seed.
        ids: The special ids, which do not occur in the sentences.
        split: The index of the split, so that training, validation and test samples differ.
    """

    num_samples: int
    plan: SentenceMapPlan
    ids: SpecialIds
    split: int
    description: str = "Generated sentences\n"

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def __getitem__(self, i: int) -> tuple[list[NDArray[np.int64]], int]:
        """Return the sentences of sample `i`, at least two, and its length in tokens."""
        random = _generator(self.num_samples, self.plan.seed, self.split, i)
        is_short = random.random() < self.plan.short_seq_prob
        longest = self.plan.max_length
        length = int(random.integers(2, longest + 1)) if is_short else longest
        first = max(self.ids.eos, *self.ids.sentinels) + 1
        text = first + _count_up(random, length, self.ids.size - first)
        cuts = np.unique(random.integers(1, length, max(1, length // _SENTENCE)))
        return np.split(text, cuts), length


def _generator(num_samples: int, seed: int, split: int, i: int) -> np.random.Generator:
    """Return the random generator of sample `i`.

    Raises:
        IndexError: There is no such sample.
    """
    if not 0 <= i < num_samples:
        raise IndexError(f"sample {i} of {num_samples}")
    return np.random.default_rng([seed, split, i])


def _count_up(random: np.random.Generator, length: int, vocabulary: int) -> NDArray[np.int64]:
    """Return `[length]` ids that count up from a random start by a random step."""
    vocabulary = min(vocabulary, _LARGEST_VOCABULARY)
    start = random.integers(vocabulary)
    step = random.integers(1, _LARGEST_STEP + 1)
    return np.asarray((start + step * np.arange(length, dtype=np.int64)) % vocabulary)
