"""BERT samples: two segments, in order or swapped, with some of their tokens masked.

    [CLS] segment A [SEP] segment B [SEP] [PAD] ...

The model predicts the masked tokens, and whether B preceded A in the text. Without the binary head,
there is a single segment and no second [SEP]. In shapes, s is the sequence length.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.datasets import DataRequest, DatasetPart, Datasets
from megatron.data.masking import SpecialIds
from megatron.data.sample import IGNORED_LABEL, Sample, pad_to
from megatron.data.sentences import SentenceSamples, Tokens, build_sentence_datasets, plan_sentences
from megatron.data.tfrecord import TFRecordDataset, TFRecordOptions
from megatron.tokenizer.base import Tokenizer

_ADDED_TOKENS = 3  # [CLS] and two [SEP]
# A masked span has 1, 2 or 3 words, with probabilities in the ratio 1 : 1/2 : 1/3. They are
# computed with the same floating-point operations as in numpy's choice(), so that the draws are
# identical.
_SHARES = 1.0 / np.arange(1, 4)
_SHARES /= _SHARES.sum()
_CUMULATIVE = (_SHARES / _SHARES.sum()).cumsum()
_SPAN_LENGTH_CDF: list[float] = (_CUMULATIVE / _CUMULATIVE[-1]).tolist()


class BertOptions(NamedTuple):
    """Settings for BERT samples.

    Attributes:
        seq_length: The sequence length s, special tokens included.
        mask_prob: The fraction of tokens to mask.
        seed: The base of the random seeds. Sample i is drawn with the seed `seed + i`.
        binary_head: Whether a sample has two segments, which are swapped in half of the samples.
    """

    seq_length: int
    mask_prob: float
    seed: int
    binary_head: bool = True


@dataclass(eq=False)
class BertDataset(SentenceSamples):
    """BERT samples, made from consecutive sentences. A sample holds int64 arrays `[s]`.

    `text`: The tokens, with the masked ones replaced.
    `types`: 0 in segment A and in padding, 1 in segment B.
    `labels`: The original token at masked positions, -1 at all others.
    `is_random`: A single number: 1 if the segments are swapped, otherwise 0.
    `loss_mask`: 1 at masked positions, otherwise 0.
    `padding_mask`: 0 at padding, otherwise 1.
    `id`: The sample's index.
    """

    kind = "BERT"
    options: BertOptions

    def _make(self, sentences: list[Tokens], target: int, random: np.random.RandomState) -> Sample:
        a, b, is_swapped = _segments(sentences, random, two=self.options.binary_head)
        a, b = truncate(a, b, target, random)
        second = [b, [self.ids.sep]] if len(b) else []
        text = np.concatenate([[self.ids.cls], a, [self.ids.sep], *second]).astype(np.int64)
        masked, labels = self._mask(text, target, random)
        length, length_a = self.options.seq_length, len(a) + 2
        return {
            "text": pad_to(masked, length, self.ids.pad),
            "types": pad_to(np.arange(len(text)) >= length_a, length, 0),
            "labels": pad_to(labels, length, IGNORED_LABEL),
            "is_random": int(is_swapped),
            "loss_mask": pad_to(labels != IGNORED_LABEL, length, 0),
            "padding_mask": pad_to(np.ones(len(text)), length, 0),
        }

    def _mask(
        self, text: NDArray[np.int64], target: int, random: np.random.RandomState
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return `text` with the masked tokens replaced, and the labels.

        80% of the chosen tokens become [MASK], 10% become a random token, and 10% stay the same.
        """
        masked, labels = text.copy(), np.full(len(text), IGNORED_LABEL, np.int64)

        def draw_words() -> int:
            return 1 + bisect_right(_SPAN_LENGTH_CDF, random.random_sample())

        for span in self._choose_spans(text, target, draw_words):
            labels[span] = text[span]
            for position in span:
                if random.random_sample() < 0.8:
                    masked[position] = self.ids.mask
                elif random.random_sample() >= 0.5:
                    masked[position] = random.randint(0, self.ids.size)
        return masked, labels


def _segments(
    sentences: list[Tokens], random: np.random.RandomState, *, two: bool
) -> tuple[Tokens, Tokens, bool]:
    """Split sentences into segments A and B; return them, and whether they are swapped."""
    if not two:
        return np.concatenate(sentences), np.empty(0, np.int64), False
    count = len(sentences)
    first = random.randint(1, count) if count > 2 else 1  # number of sentences in the first segment
    a, b = np.concatenate(sentences[:first]), np.concatenate(sentences[first:])
    is_swapped = random.random_sample() < 0.5
    return (b, a, True) if is_swapped else (a, b, False)


def truncate(
    a: Tokens, b: Tokens, limit: int, random: np.random.RandomState
) -> tuple[Tokens, Tokens]:
    """Remove tokens from segments A and B until they have at most `limit` tokens together.

    Each token is removed from the longer segment, or from B if both are equally long. A random draw
    decides whether the first or the last token of the segment is removed.

    Args:
        a: The tokens of segment A, `[tokens]`.
        b: The tokens of segment B, `[tokens]`.
        limit: The maximum number of tokens in both segments together.
        random: The generator of the random draws.

    Returns:
        The truncated segments A and B.
    """
    excess = len(a) + len(b) - limit
    if excess <= 0:
        return a, b
    lead = len(a) - len(b)
    from_a = np.arange(excess) % 2 != lead % 2  # alternate once the lengths are equal
    from_a[: abs(lead)] = lead > 0
    at_front = random.random_sample(excess) < 0.5
    truncated = []
    for segment, is_cut in ((a, from_a), (b, ~from_a)):
        front, back = int((is_cut & at_front).sum()), int((is_cut & ~at_front).sum())
        truncated.append(segment[front : len(segment) - back])
    return truncated[0], truncated[1]


def build_bert_datasets(
    request: DataRequest, *, seq_length: int, tokenizer: Tokenizer, binary_head: bool
) -> Datasets:
    """Build the BERT datasets that the flags name. Collective.

    An entry of --data-path may also name TFRecord files, which contain complete samples.

    Args:
        request: The data that the run needs.
        seq_length: The number of tokens in a sample, [CLS] and [SEP] included.
        tokenizer: The tokenizer, which supplies the special ids.
        binary_head: Whether samples have two segments, in order or swapped.

    Raises:
        ConfigError: The sequence has no room for text, the vocabulary lacks a special token, no
            data is named, the data is text, or --data-path or --split cannot be parsed.
        DataError: A dataset is missing, damaged, too small or made with a different tokenizer.
    """
    options = BertOptions(seq_length, request.data.mask_prob, request.seed, binary_head)
    min_sentences = 2 if binary_head else 1
    plan = plan_sentences(request, "--seq-length", seq_length, _ADDED_TOKENS, min_sentences)
    build = partial(BertDataset, options=options)
    tfrecord_options = TFRecordOptions(seq_length, tokenizer.vocab_size, request.seed)

    def build_from_tfrecords(part: DatasetPart) -> TFRecordDataset:
        return TFRecordDataset(part.data, part.bounds, part.num_samples, tfrecord_options)

    return build_sentence_datasets(
        request, plan, tokenizer, SpecialIds.for_bert, build, build_from_tfrecords
    )
