"""Selection of the tokens to mask in a BERT or T5 sample: spans of whole words.

Both models choose tokens in the same way. They differ in the length of a span and in its
replacement. A word consists of a token and the `##` pieces that continue it. A word is masked as a
whole or not at all. Random draws are in the same order as in Megatron-LM, so the same tokens are
masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.errors import ConfigError
from megatron.tokenizer.base import Tokenizer

_CONTINUES = "##"
_SMALLEST_GENERATED = 16
_MISSING_ID = -1  # the id of a special token that does not exist


class SpecialIds(NamedTuple):
    """The special token ids that a model needs, and the size of the vocabulary.

    Attributes:
        size: The number of entries in the vocabulary.
        continues: Whether each entry continues a word, `[size]` bool.
        pad, cls, sep, mask, eos: The ids of the special tokens with these names, or -1.
        bos: The first id that a T5 decoder reads, or -1.
        sentinels: The ids with which T5 replaces masked spans, in order.
        encoder_end: The ids that follow the text in T5's encoder input.
    """

    size: int
    continues: NDArray[np.bool_]
    pad: int
    cls: int = _MISSING_ID
    sep: int = _MISSING_ID
    mask: int = _MISSING_ID
    bos: int = _MISSING_ID
    eos: int = _MISSING_ID
    sentinels: tuple[int, ...] = ()
    encoder_end: tuple[int, ...] = ()

    @staticmethod
    def for_bert(tokenizer: Tokenizer) -> SpecialIds:
        """Find the special ids of `tokenizer` for BERT samples.

        Raises:
            ConfigError: The tokenizer lacks one of these special tokens.
        """
        continues = np.zeros(tokenizer.vocab_size, bool)
        for entry, index in tokenizer.vocab.items():
            continues[index] = entry.startswith(_CONTINUES)
        pad, cls, sep, mask = tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask
        return SpecialIds(tokenizer.vocab_size, continues, pad, cls, sep, mask)

    @staticmethod
    def for_t5(tokenizer: Tokenizer) -> SpecialIds:
        """Find the special ids of `tokenizer` for T5 samples, preferably T5's own.

        Raises:
            ConfigError: The tokenizer has no sentinels, or lacks another special token.
        """
        sentinels = tuple(tokenizer.additional_special_tokens_ids)
        if not sentinels:
            raise ConfigError(
                "T5 needs a sentinel for each run of words that it masks, but the vocabulary has "
                "none: give --vocab-extra-ids 100 (with a BertWordPiece or SentencePiece "
                "tokenizer), or use T5's own tokenizer, which has <extra_id_0>, <extra_id_1> ..."
            )
        if tokenizer.has_t5_sentinels:  # T5 counts pieces, not words
            size = tokenizer.vocab_size
            ids = SpecialIds(size, np.zeros(size, bool), tokenizer.pad)
        else:
            ids = SpecialIds.for_bert(tokenizer)
        bos, eos, end = tokenizer.decoder_start, tokenizer.eos, tuple(tokenizer.encoder_end)
        return ids._replace(bos=bos, eos=eos, sentinels=sentinels, encoder_end=end)

    @staticmethod
    def generated(vocab_size: int) -> SpecialIds:
        """Return special ids for generated tokens: the first ids of the vocabulary.

        Raises:
            ConfigError: The vocabulary has too few ids.
        """
        if vocab_size < _SMALLEST_GENERATED:
            raise ConfigError(
                f"--mock-data: a vocabulary of {vocab_size} entries has no room for special "
                f"tokens: give one with at least {_SMALLEST_GENERATED} entries"
            )
        sentinels = tuple(range(6, 6 + min(100, (vocab_size - 6) // 2)))
        return SpecialIds(vocab_size, np.zeros(vocab_size, bool), 0, 1, 2, 3, 4, 5, sentinels)


Words = list[list[int]]  # the positions of each word


def whole_words(tokens: NDArray[np.int64], ids: SpecialIds) -> Words:
    """Return the positions of each word of `tokens` `[s]`, without [CLS] and [SEP].

    A piece that continues a word belongs to the previous word, even if there is a [SEP] in between.
    This happens if the beginning of a segment was cut off inside a word.
    """
    positions = np.flatnonzero((tokens != ids.cls) & (tokens != ids.sep))
    starts = ~ids.continues[tokens[positions]]
    starts[:1] = True
    bounds = [*np.flatnonzero(starts).tolist(), len(positions)]
    in_order = positions.tolist()
    return [in_order[start:end] for start, end in pairwise(bounds)]


def masking_budget(mask_prob: float, tokens: int, target_length: int) -> float:
    """Return the number of tokens of a sample that may be masked, rounded as in Megatron.

    Args:
        mask_prob: The fraction of tokens to mask.
        tokens: The number of tokens in the sample.
        target_length: The target length of the sample in tokens.
    """
    return min(mask_prob * target_length, max(1, round(tokens * mask_prob)))


def choose_spans(
    words: Words, budget: float, draw_words: Callable[[], int], random: np.random.RandomState
) -> Iterator[list[int]]:
    """Yield the positions of each span of words to mask, until `budget` positions are chosen.

    Words are tried in random order as the start of a span. A span that would exceed the budget is
    shortened. If it still exceeds the budget, or contains a word that has been chosen already, it
    is skipped.

    The caller may draw from `random` between two spans: as in Megatron, the draws for the tokens of
    a span precede those for the next span.

    Args:
        words: The positions of each word of the sample.
        budget: The number of positions that may be chosen.
        draw_words: A function that draws the length of a span in words. It is called for every
            word that is tried.
        random: The generator that shuffles the words to try.
    """
    order = np.arange(len(words))
    random.shuffle(order)
    chosen = bytearray(len(words))
    num_masked = 0
    for first in order.tolist():
        if num_masked + 1 > budget:
            return  # no other word fits; Megatron keeps trying, without effect
        span = words[first : first + draw_words()]
        size = sum(map(len, span))
        while len(span) > 1 and num_masked + size > budget:
            size -= len(span.pop())
        last = first + len(span)
        if num_masked + size > budget or any(chosen[first:last]):
            continue
        chosen[first:last] = b"\1" * len(span)
        num_masked += size
        yield list(chain.from_iterable(span))
