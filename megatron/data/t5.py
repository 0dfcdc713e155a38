"""Samples of a T5 run: runs of words are taken out of a text, and the model has to restore them.

    text            the cat sat on the mat
    encoder reads   the <0> on <1> mat
    decoder reads   [BOS] <0> cat sat <1> the
    labels          <0> cat sat <1> the [EOS]

<0>, <1> ... are the sentinels of --vocab-extra-ids. A T5's own tokenizer has sentinels of its own.
Then the encoder's text ends with [EOS] too, and the decoder's begins with padding instead of [BOS],
as in `transformers`. e is the encoder's sequence length, d the decoder's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron.data.datasets import DataRequest, Datasets
from megatron.data.masking import SpecialIds, choose_runs, hidden_budget, whole_words
from megatron.data.sample import IGNORED_LABEL, Sample, filled_up
from megatron.data.sentences import SentenceRequest, SentenceSource, build_sentence_datasets
from megatron.tokenizer.base import Tokenizer

# Tokens of the encoder's sequence that no text may take. Megatron keeps two, for [CLS] and [SEP],
# but does not write them; T5's own samples need one, for [EOS].
_RESERVED_TOKENS = 2
_LONGEST_RUN = 10  # words
_RUN_END = 0.2  # chance that a run ends after each word


@dataclass(frozen=True)
class T5Options:
    """The settings of T5's samples.

    Attributes:
        encoder_length: e.
        decoder_length: d.
        mask_prob: Share of tokens to take out.
        seed: Seed of all draws; sample i adds its number.
    """

    encoder_length: int
    decoder_length: int
    mask_prob: float
    seed: int


@dataclass(eq=False)
class T5Dataset:
    """T5's samples, made from runs of sentences. A sample holds arrays of int64.

    Megatron's masks `[e, e]`, `[d, d]` and `[d, e]` follow from the two here, on the device: only
    tokens that are not padding attend and are attended to (in the decoder, no later ones).

    `text_enc`: What the encoder reads, `[e]`.
    `text_dec`: What the decoder reads, `[d]`.
    `labels`: The token after each of the decoder's, -1 at padding, `[d]`.
    `loss_mask`: 1 where a label counts, `[d]`.
    `enc_mask`: 0 where a token of `text_enc` is padding, otherwise 1, `[e]`.
    `dec_mask`: 0 where a token of `text_dec` is padding, otherwise 1, `[d]`.
    `id`: The sample's number.
    """

    source: SentenceSource
    ids: SpecialIds
    options: T5Options
    _random: np.random.RandomState = field(default_factory=np.random.RandomState)

    @property
    def description(self) -> str:
        """Text that differs wherever the samples differ."""
        return f"T5 Dataset\n\n{self.source.description}{self.options}\n"

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.source)

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`.

        Raises:
            DataError: A token id is outside the vocabulary.
        """
        sentences, target = self.source[i]
        self._random.seed((self.options.seed + i) % 2**32)
        text = np.concatenate(sentences)[:target].astype(np.int64)
        runs = self._runs(text, target)
        left, taken_out = take_out(text, runs, self.ids.sentinels)
        encoder = [*left, *self.ids.encoder_end]
        e, d = self.options.encoder_length, self.options.decoder_length
        in_decoder = np.ones(len(taken_out) + 1)
        return {
            "text_enc": filled_up(encoder, e, self.ids.pad),
            "text_dec": filled_up([self.ids.bos, *taken_out], d, self.ids.pad),
            "labels": filled_up([*taken_out, self.ids.eos], d, IGNORED_LABEL),
            "loss_mask": filled_up(in_decoder, d, 0),
            "enc_mask": filled_up(np.ones(len(encoder)), e, 0),
            "dec_mask": filled_up(in_decoder, d, 0),
            "id": i,
        }

    def _runs(self, text: NDArray[np.int64], target: int) -> list[list[int]]:
        """Return the positions of the runs to take out, from first to last.

        There are at most as many as there are sentinels, and as the decoder has room for. Megatron
        stops with an error if it draws more.
        """
        random = self._random
        budget = hidden_budget(self.options.mask_prob, len(text), target)

        def draw_words() -> int:
            return min(random.geometric(_RUN_END), _LONGEST_RUN)

        runs: list[list[int]] = []
        room = self.options.decoder_length - 1
        for run in choose_runs(whole_words(text, self.ids), budget, draw_words, random):
            room -= 1 + len(run)
            if room < 0 or len(runs) == len(self.ids.sentinels):
                break
            runs.append(run)
        return sorted(runs)


def take_out(
    text: NDArray[np.int64], runs: list[list[int]], sentinels: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Return `text` with a sentinel for each run, and the runs, each behind its sentinel."""
    left: list[int] = []
    taken_out: list[int] = []
    start = 0
    for run, sentinel in zip(runs, sentinels, strict=False):
        left += [*text[start : run[0]].tolist(), sentinel]
        taken_out += [sentinel, *text[run].tolist()]
        start = run[-1] + 1
    return left + text[start:].tolist(), taken_out


def build_t5_datasets(
    request: DataRequest, *, encoder_seq_length: int, decoder_seq_length: int, tokenizer: Tokenizer
) -> Datasets:
    """Build T5's datasets that the flags name. Every process calls this.

    Args:
        request: What the run asks for.
        encoder_seq_length: Tokens that the encoder reads.
        decoder_seq_length: Tokens that the decoder reads.
        tokenizer: Gives the special ids.

    Raises:
        ConfigError: The sequence has no room for text, the vocabulary has no sentinels, no data is
            named, or --data-path or --split cannot be read.
        DataError: A dataset is missing, damaged, too small or of another tokenizer.
    """
    options = T5Options(
        encoder_seq_length, decoder_seq_length, request.data.mask_prob, request.seed
    )
    wanted = SentenceRequest(
        "--encoder-seq-length", encoder_seq_length, _RESERVED_TOKENS, 1, SpecialIds.of_t5
    )
    return build_sentence_datasets(
        request, wanted, tokenizer, lambda sentences, ids: T5Dataset(sentences, ids, options)
    )
