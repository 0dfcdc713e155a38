"""Generated tokens that a model can learn: training without a corpus (`--mock-data`)."""

from __future__ import annotations

import numpy as np

from megatron.data.gpt import GPTSample

_LARGEST_VOCABULARY = 256
_LARGEST_STEP = 4


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
        start = random.integers(self.vocabulary)
        step = random.integers(1, _LARGEST_STEP + 1)
        text = (start + step * np.arange(self.seq_length + 1, dtype=np.int64)) % self.vocabulary
        return {"text": text, "id": i}
