"""Which tokens a BERT or T5 sample hides: whole words, in runs of several.

Both models choose in the same way. They differ in how long a run is and in what replaces it. A
word is a token with the `##` pieces that continue it, and is hidden whole or not at all. The order
of random draws is that of Megatron-LM, so the same tokens are hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.errors import ConfigError
from megatron.tokenizer.base import Tokenizer

_CONTINUES = "##"
_SMALLEST_GENERATED = 16
_NONE = -1  # no token has it


@dataclass(frozen=True)
class SpecialIds:
    """The special ids that a model needs, and the size of the vocabulary.

    Attributes:
        size: Entries of the vocabulary.
        continues: Whether each entry continues a word, `[size]` bool.
        pad, cls, sep, mask, eos: The special tokens of those names, or -1.
        bos: What a T5's decoder reads first.
        sentinels: What T5 puts in the place of hidden runs, in order.
        encoder_end: What follows the text that T5's encoder reads.
    """

    size: int
    continues: NDArray[np.bool_]
    pad: int
    cls: int = _NONE
    sep: int = _NONE
    mask: int = _NONE
    bos: int = _NONE
    eos: int = _NONE
    sentinels: tuple[int, ...] = ()
    encoder_end: tuple[int, ...] = ()

    @staticmethod
    def of_bert(tokenizer: Tokenizer) -> SpecialIds:
        """Find the special ids of `tokenizer` for BERT's samples.

        Raises:
            ConfigError: It lacks one.
        """
        continues = np.zeros(tokenizer.vocab_size, bool)
        for entry, index in tokenizer.vocab.items():
            continues[index] = entry.startswith(_CONTINUES)
        return SpecialIds(
            size=tokenizer.vocab_size,
            continues=continues,
            pad=tokenizer.pad,
            cls=tokenizer.cls,
            sep=tokenizer.sep,
            mask=tokenizer.mask,
        )

    @staticmethod
    def of_t5(tokenizer: Tokenizer) -> SpecialIds:
        """Find the special ids of `tokenizer` for T5's samples: T5's own if it has them.

        Raises:
            ConfigError: It has no sentinels, or lacks another special token.
        """
        sentinels = tuple(tokenizer.additional_special_tokens_ids)
        if not sentinels:
            raise ConfigError(
                "T5 needs a sentinel for each run of words that it hides, and the vocabulary has "
                "none: give --vocab-extra-ids 100 (with a BertWordPiece or SentencePiece tokenizer)"
                ", or a T5's tokenizer, which has <extra_id_0>, <extra_id_1> ..."
            )
        if not tokenizer.has_t5_sentinels:
            bert = SpecialIds.of_bert(tokenizer)
            return replace(bert, bos=tokenizer.bos, eos=tokenizer.eos, sentinels=sentinels)
        return SpecialIds(
            size=tokenizer.vocab_size,
            continues=np.zeros(tokenizer.vocab_size, bool),  # T5 counts pieces, not words
            pad=tokenizer.pad,
            bos=tokenizer.decoder_start,
            eos=tokenizer.eos,
            sentinels=sentinels,
            encoder_end=tuple(tokenizer.encoder_end),
        )

    @staticmethod
    def generated(vocab_size: int) -> SpecialIds:
        """Take the first ids of any vocabulary as special, for generated tokens.

        Raises:
            ConfigError: There are too few ids.
        """
        if vocab_size < _SMALLEST_GENERATED:
            raise ConfigError(
                f"--mock-data: a vocabulary of {vocab_size} has no room for special tokens: give "
                f"one of at least {_SMALLEST_GENERATED} entries"
            )
        sentinels = range(6, 6 + min(100, (vocab_size - 6) // 2))
        none = np.zeros(vocab_size, bool)
        return SpecialIds(vocab_size, none, 0, 1, 2, 3, 4, 5, tuple(sentinels))


class WordSpans(NamedTuple):
    """The words of a sample: word k is `positions[bounds[k] : bounds[k + 1]]`."""

    positions: list[int]
    bounds: list[int]


def whole_words(tokens: NDArray[np.int64], ids: SpecialIds) -> WordSpans:
    """Return the words of `tokens` `[s]`, without [CLS] and [SEP].

    A piece that continues a word belongs to the last word before it even if a [SEP] lies between,
    which happens if a segment's front was cut off inside a word.
    """
    positions = np.flatnonzero((tokens != ids.cls) & (tokens != ids.sep))
    starts = ~ids.continues[tokens[positions]]
    starts[:1] = True
    bounds = [*np.flatnonzero(starts).tolist(), len(positions)]
    return WordSpans(positions.tolist(), bounds)


def hidden_budget(mask_prob: float, tokens: int, target_length: int) -> float:
    """Return how many of a sample's `tokens` may be hidden, fractions rounded as in Megatron."""
    return min(mask_prob * target_length, max(1, round(tokens * mask_prob)))


def choose_runs(
    words: WordSpans, budget: float, draw_words: Callable[[], int], random: np.random.RandomState
) -> Iterator[list[int]]:
    """Yield the positions of one run of words after another, until `budget` positions are chosen.

    Words are tried in random order as starts of a run. A run that would exceed the budget is
    shortened. A run that still exceeds it, or meets a chosen word, is left out.

    The caller may draw from `random` between two runs: as in Megatron, its draws for the tokens of
    a run come before those for the next run.

    Args:
        words: The words of the sample.
        budget: How many positions may be chosen.
        draw_words: Draws the length of a run in words; called for every word that is tried.
        random: Source of the order in which words are tried.
    """
    count = len(words.bounds) - 1
    order = np.arange(count)
    random.shuffle(order)
    chosen = bytearray(count)
    taken = 0
    for first in order.tolist():
        if taken + 1 > budget:
            return  # no word fits; Megatron goes on trying, without effect
        last = min(first + draw_words(), count)
        start = words.bounds[first]
        while last > first + 1 and taken + words.bounds[last] - start > budget:
            last -= 1
        size = words.bounds[last] - start
        if taken + size > budget or any(chosen[first:last]):
            continue
        chosen[first:last] = b"\1" * (last - first)
        taken += size
        yield words.positions[start : start + size]
