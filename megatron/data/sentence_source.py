"""Runs of sentences, a run a sample: what BERT's and T5's samples are made of."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from megatron.data.indexed import IndexedDataset, bin_path
from megatron.data.sample import outside_vocabulary

Tokens = NDArray[Any]


class SentenceSource(Protocol):
    """Sentences and target length of each sample."""

    @property
    def description(self) -> str:
        """Text that differs wherever the sentences do."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> tuple[list[Tokens], int]:
        """Sentences of sample `i`, and how many of their tokens it may hold."""
        ...


class MappedSentences:
    """The sentences that a map names, from an indexed dataset.

    Args:
        rows: the map, see `sentence_map`.
        description: of the map.
        vocab_size: ids from here on are refused.
    """

    def __init__(
        self, data: IndexedDataset, rows: NDArray[Any], *, description: str, vocab_size: int
    ) -> None:
        self.data = data
        self.rows = rows
        self.description = description
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[list[Tokens], int]:
        """Sentences and target of row `i`.

        Raises:
            DataError: a token id is outside the vocabulary.
        """
        first, end, target = self.rows[i].tolist()
        sentences = [self.data.get(number) for number in range(first, end)]
        for number, sentence in enumerate(sentences, start=first):
            if len(sentence) and int(sentence.max()) >= self.vocab_size:
                where = f"{bin_path(self.data.prefix)}: sentence {number}"
                raise outside_vocabulary(where, int(sentence.max()), self.vocab_size)
        return sentences, target
