"""Samples of a BERT run: two segments in or out of order, some of their tokens hidden.

    [CLS] segment A [SEP] segment B [SEP] [PAD] ...

The model says what the hidden tokens were, and whether B came before A in the text. Without the
binary head there is one segment and no second [SEP]. s is the sequence length.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from megatron.data.masking import SpecialIds, choose_runs, hidden_budget, whole_words
from megatron.data.sample import IGNORED_LABEL, filled_up
from megatron.data.sentence_source import SentenceSource, Tokens

ADDED_TOKENS = 3  # [CLS] and two [SEP]
# A run of 1, 2 or 3 words, the shorter the likelier: shares 1, 1/2, 1/3 of their sum, in the
# floating-point operations of numpy's choice(), whose draws these are.
_SHARES = 1.0 / np.arange(1, 4)
_SHARES /= _SHARES.sum()
_CUMULATIVE = (_SHARES / _SHARES.sum()).cumsum()
_RUN_LENGTHS: list[float] = (_CUMULATIVE / _CUMULATIVE[-1]).tolist()


class BertSample(TypedDict):
    """One sample, arrays `[s]` int64.

    Attributes:
        text: tokens, some replaced.
        types: 0 in segment A (and padding), 1 in segment B.
        labels: the token that was replaced, where one was; else -1.
        is_random: 1 where the segments are swapped.
        loss_mask: 1 where a token was replaced.
        padding_mask: 1 where a token is no padding.
        id: its number.
    """

    text: NDArray[np.int64]
    types: NDArray[np.int64]
    labels: NDArray[np.int64]
    is_random: int
    loss_mask: NDArray[np.int64]
    padding_mask: NDArray[np.int64]
    id: int


@dataclass(frozen=True)
class BertOptions:
    """What decides the samples, beside the sentences.

    Attributes:
        seq_length: s, special tokens counted.
        mask_prob: share of tokens to hide.
        binary_head: whether a sample has two segments, swapped in half of the cases.
    """

    seq_length: int
    mask_prob: float
    seed: int
    binary_head: bool = True


class BertDataset:
    """BERT's samples over runs of sentences."""

    def __init__(self, source: SentenceSource, ids: SpecialIds, options: BertOptions) -> None:
        self.source = source
        self.ids = ids
        self.options = options
        self._random = np.random.RandomState()  # seeded anew for every sample

    @property
    def description(self) -> str:
        """Text that differs wherever the samples do."""
        return f"BERT Dataset\n\n{self.source.description}{self.options}\n"

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> BertSample:
        """Sample `i`.

        Raises:
            DataError: a token id is outside the vocabulary.
        """
        sentences, target = self.source[i]
        random = self._random
        random.seed((self.options.seed + i) % 2**32)  # a fifth of what a new generator takes
        a, b, is_swapped = _segments(sentences, random, two=self.options.binary_head)
        a, b = truncate(a, b, target, random)
        text = _join(a, b, self.ids)
        masked, labels = _hide(text, target, self.ids, self.options.mask_prob, random)
        length, in_a = self.options.seq_length, len(a) + 2
        return {
            "text": filled_up(masked, length, self.ids.pad),
            "types": filled_up(np.arange(len(text)) >= in_a, length, 0),
            "labels": filled_up(labels, length, IGNORED_LABEL),
            "is_random": int(is_swapped),
            "loss_mask": filled_up(labels != IGNORED_LABEL, length, 0),
            "padding_mask": filled_up(np.ones(len(text)), length, 0),
            "id": i,
        }


def _segments(
    sentences: list[Tokens], random: np.random.RandomState, *, two: bool
) -> tuple[Tokens, Tokens, bool]:
    """Segments A and B, and whether they are swapped."""
    if not two:
        return np.concatenate(sentences), np.empty(0, np.int64), False
    count = len(sentences)
    first = random.randint(1, count) if count > 2 else 1  # sentences of the one that comes first
    a, b = np.concatenate(sentences[:first]), np.concatenate(sentences[first:])
    is_swapped = random.random_sample() < 0.5
    return (b, a, True) if is_swapped else (a, b, False)


def truncate(
    a: Tokens, b: Tokens, most: int, random: np.random.RandomState
) -> tuple[Tokens, Tokens]:
    """Take tokens away until `most` are left: each from the longer segment, of equals from B.

    Each is the segment's first or last, as drawn.
    """
    excess = len(a) + len(b) - most
    if excess <= 0:
        return a, b
    lead = len(a) - len(b)
    from_a = np.arange(excess) % 2 != lead % 2  # in turn, once the lengths have met
    from_a[: abs(lead)] = lead > 0
    at_front = random.random_sample(excess) < 0.5
    cuts = []
    for segment, mine in ((a, from_a), (b, ~from_a)):
        front, back = int((mine & at_front).sum()), int((mine & ~at_front).sum())
        cuts.append(segment[front : len(segment) - back])
    return cuts[0], cuts[1]


def _join(a: Tokens, b: Tokens, ids: SpecialIds) -> NDArray[np.int64]:
    """The segments with the special tokens; without a B no second [SEP]."""
    second = [b, [ids.sep]] if len(b) else []
    return np.concatenate([[ids.cls], a, [ids.sep], *second]).astype(np.int64)


def _hide(
    text: NDArray[np.int64],
    target: int,
    ids: SpecialIds,
    mask_prob: float,
    random: np.random.RandomState,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`text` with some tokens replaced, and the labels.

    Of the chosen tokens 80% become [MASK], 10% any token, and 10% stay.
    """
    masked, labels = text.copy(), np.full(len(text), IGNORED_LABEL, np.int64)
    budget = hidden_budget(mask_prob, len(text), target)

    def draw_words() -> int:
        return 1 + bisect_right(_RUN_LENGTHS, random.random_sample())

    for run in choose_runs(whole_words(text, ids), budget, draw_words, random):
        labels[run] = text[run]
        for position in run:
            if random.random_sample() < 0.8:
                masked[position] = ids.mask
            elif random.random_sample() >= 0.5:
                masked[position] = random.randint(0, ids.size)
    return masked, labels
