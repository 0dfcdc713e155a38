"""T5 samples: spans of words are removed from a text, and the model has to restore them.

    text            the cat sat on the mat
    encoder reads   the <0> on <1> mat
    decoder reads   [BOS] <0> cat sat <1> the
    labels          <0> cat sat <1> the [EOS]

<0>, <1> ... are the sentinels that --vocab-extra-ids adds, or those of T5's own tokenizer. With
T5's tokenizer, the encoder's text also ends with [EOS], and the decoder's text begins with padding
instead of [BOS], as in `transformers`. In shapes, e is the encoder's sequence length and d the
decoder's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.datasets import DataRequest, Datasets
from megatron.data.masking import SpecialIds
from megatron.data.sample import IGNORED_LABEL, Sample, pad_to
from megatron.data.sentences import SentenceSamples, Tokens, build_sentence_datasets, plan_sentences
from megatron.tokenizer.base import Tokenizer

# The number of tokens of the encoder's sequence that text may not use. Megatron reserves two, for
# [CLS] and [SEP], but does not write them. T5's own samples need one, for [EOS].
_RESERVED_TOKENS = 2
_MAX_SPAN_WORDS = 10
_SPAN_END_PROB = 0.2  # the probability that a span ends after a word


class T5Options(NamedTuple):
    """Settings for T5 samples.

    Attributes:
        encoder_length: The encoder's sequence length e.
        decoder_length: The decoder's sequence length d.
        mask_prob: The fraction of tokens to remove.
        seed: The base of the random seeds. Sample i is drawn with the seed `seed + i`.
    """

    encoder_length: int
    decoder_length: int
    mask_prob: float
    seed: int


@dataclass(eq=False)
class T5Dataset(SentenceSamples):
    """T5 samples, made from consecutive sentences. A sample holds int64 arrays.

    Megatron's masks `[e, e]`, `[d, d]` and `[d, e]` are computed on the device from the two masks
    below. Padding neither attends nor is attended to, and in the decoder no token attends to later
    ones.

    `text_enc`: The encoder's input, `[e]`.
    `text_dec`: The decoder's input, `[d]`.
    `labels`: The token after each of the decoder's tokens, -1 at padding, `[d]`.
    `loss_mask`: 1 for labels that count in the loss, otherwise 0, `[d]`.
    `enc_mask`: 0 at padding in `text_enc`, otherwise 1, `[e]`.
    `dec_mask`: 0 at padding in `text_dec`, otherwise 1, `[d]`.
    `id`: The sample's index.
    """

    kind = "T5"
    options: T5Options

    def _make(self, sentences: list[Tokens], target: int, random: np.random.RandomState) -> Sample:
        text = np.concatenate(sentences)[:target].astype(np.int64)

        def draw_words() -> int:
            return min(random.geometric(_SPAN_END_PROB), _MAX_SPAN_WORDS)

        e, d = self.options.encoder_length, self.options.decoder_length
        spans: list[list[int]] = []
        room = d - 1
        for span in self._choose_spans(text, target, draw_words):
            room -= 1 + len(span)
            # Megatron fails with an error if it draws more spans than the decoder's length or the
            # number of sentinels allows.
            if room < 0 or len(spans) == len(self.ids.sentinels):
                break
            spans.append(span)
        remaining, removed = replace_spans(text, sorted(spans), self.ids.sentinels)
        encoder = [*remaining, *self.ids.encoder_end]
        in_decoder = np.ones(len(removed) + 1)
        return {
            "text_enc": pad_to(encoder, e, self.ids.pad),
            "text_dec": pad_to([self.ids.bos, *removed], d, self.ids.pad),
            "labels": pad_to([*removed, self.ids.eos], d, IGNORED_LABEL),
            "loss_mask": pad_to(in_decoder, d, 0),
            "enc_mask": pad_to(np.ones(len(encoder)), e, 0),
            "dec_mask": pad_to(in_decoder, d, 0),
        }


def replace_spans(
    text: NDArray[np.int64], spans: list[list[int]], sentinels: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Replace spans of a text with sentinels.

    Args:
        text: The token ids, `[tokens]`.
        spans: The positions in each span, in ascending order.
        sentinels: The id that replaces each span.

    Returns:
        The text with sentinels, and the sequence of each sentinel followed by its span.
    """
    remaining: list[int] = []
    removed: list[int] = []
    start = 0
    for span, sentinel in zip(spans, sentinels, strict=False):
        remaining += [*text[start : span[0]].tolist(), sentinel]
        removed += [sentinel, *text[span].tolist()]
        start = span[-1] + 1
    return remaining + text[start:].tolist(), removed


def build_t5_datasets(
    request: DataRequest, *, encoder_seq_length: int, decoder_seq_length: int, tokenizer: Tokenizer
) -> Datasets:
    """Build the T5 datasets that the flags name. Collective.

    Args:
        request: The data that the run needs.
        encoder_seq_length: The number of tokens that the encoder reads.
        decoder_seq_length: The number of tokens that the decoder reads.
        tokenizer: The tokenizer, which supplies the special ids.

    Raises:
        ConfigError: The sequence has no room for text, the vocabulary lacks sentinels or another
            special token, no data is named, the data is text, or --data-path or --split cannot be
            parsed.
        DataError: A dataset is missing, damaged, too small or made with a different tokenizer.
    """
    mask_prob, seed = request.data.mask_prob, request.seed
    options = T5Options(encoder_seq_length, decoder_seq_length, mask_prob, seed)
    flag = "--encoder-seq-length"
    plan = plan_sentences(request, flag, encoder_seq_length, _RESERVED_TOKENS)
    build = partial(T5Dataset, options=options)
    return build_sentence_datasets(request, plan, tokenizer, SpecialIds.for_t5, build)
