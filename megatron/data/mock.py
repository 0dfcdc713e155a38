"""Generated tokens that a model can learn: training without a corpus (`--mock-data`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron.data.gpt import GPTSample
from megatron.data.masking import SpecialIds
from megatron.data.sentence_map import SentenceMapPlan
from megatron.data.sentence_source import Tokens

_LARGEST_VOCABULARY = 256
_LARGEST_STEP = 4
_SENTENCE = 20  # tokens, about


class MockDataset:
    """Samples that count up from a random token by a random step, modulo a small vocabulary.

    The step is constant in a sample, so that a model predicts every token but the first two.
    Sample `i` depends on the seed, the split and `i` only.

    Args:
        num_samples: length of the dataset.
        seq_length: s, in tokens.
        vocab_size: ids stay below it, and below 256.
        split: number that keeps training, validation and test samples apart.
    """

    def __init__(
        self, num_samples: int, *, seq_length: int, vocab_size: int, seed: int, split: int
    ) -> None:
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.vocabulary = min(vocab_size, _LARGEST_VOCABULARY)
        self.seed = seed
        self.split = split

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> GPTSample:
        """Sample `i`: tokens `[s + 1]`."""
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        random = np.random.default_rng([self.seed, self.split, i])
        return {"text": _count_up(random, self.seq_length + 1, self.vocabulary), "id": i}


class MockSentences:
    """Sentences of BERT and T5 samples: a sample counts up, as those of `MockDataset`.

    Hidden tokens follow from their neighbours, and which of two segments came first from their
    ends.

    Args:
        plan: longest sample, share of short ones, seed.
        ids: their specials stay out.
        split: number that keeps training, validation and test samples apart.
    """

    def __init__(
        self, num_samples: int, plan: SentenceMapPlan, ids: SpecialIds, *, split: int
    ) -> None:
        self.num_samples = num_samples
        self.plan = plan
        self.first = max(ids.eos, *ids.sentinels) + 1
        self.vocabulary = min(ids.size - self.first, _LARGEST_VOCABULARY)
        self.split = split
        self.description = "Generated sentences\n"

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> tuple[list[Tokens], int]:
        """Sentences of sample `i`, two at least, and its length in tokens."""
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        random = np.random.default_rng([self.plan.seed, self.split, i])
        is_short = random.random() < self.plan.short_seq_prob
        longest = self.plan.max_length
        length = int(random.integers(2, longest + 1)) if is_short else longest
        text = self.first + _count_up(random, length, self.vocabulary)
        cuts = np.unique(random.integers(1, length, max(1, length // _SENTENCE)))
        return np.split(text, cuts), length


def _count_up(random: np.random.Generator, length: int, vocabulary: int) -> NDArray[np.int64]:
    """`[length]` ids below `vocabulary`, from a random one on, by a random step."""
    start = random.integers(vocabulary)
    step = random.integers(1, _LARGEST_STEP + 1)
    return np.asarray((start + step * np.arange(length, dtype=np.int64)) % vocabulary)
