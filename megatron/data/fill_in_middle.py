"""Fill in the middle: samples that teach a model to write the text between two other texts.

A document is cut at two random characters into prefix, middle and suffix. They are reordered and
marked with special tokens (Bavarian et al., 2022, arXiv:2207.14255):

    PSM    <prefix> prefix <suffix> suffix <middle> middle
    SPM    <prefix> <suffix> suffix <middle> prefix middle

The rules and the order of random draws are the same as in Megatron Core's `GPTFIMDataset`. In Core,
a process uses one random stream for all of its samples. Here, each sample has its own stream, so a
sample does not depend on the process that loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import DataConfig
from megatron.data.sample import Sample
from megatron.data.text_stream import WrappedDataset
from megatron.errors import ConfigError
from megatron.tokenizer.base import Tokenizer

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class FillInMiddle:
    """A random rearrangement of documents into prefix, suffix and middle.

    Attributes:
        tokenizer: The run's tokenizer. Texts are cut between characters and tokenized again.
        rate: The probability of rearranging a document, 0 to 1.
        spm_rate: The probability of SPM instead of PSM, 0 to 1.
        ids: The ids of the tokens "prefix", "middle", "suffix", "pad" and "eod".
        fragment_end: The id of the token that divides a document into fragments, which are
            rearranged separately. `None` rearranges whole documents.
        fragment_rate: The probability of rearranging a fragment of a selected document, 0 to 1.
        exempt_prefix: Texts that begin with this string are not changed. `None` exempts no text.
    """

    tokenizer: Tokenizer
    rate: float
    spm_rate: float
    ids: Mapping[str, int]
    fragment_end: int | None = None
    fragment_rate: float = 0.0
    exempt_prefix: str | None = None

    @classmethod
    def from_config(cls, data: DataConfig, tokenizer: Tokenizer) -> FillInMiddle:
        """Return the rearrangement that the --fim-* flags specify.

        Raises:
            ConfigError: The tokenizer has no entry for one of the tokens.
        """
        ids = {
            name: _entry(tokenizer, f"--fim-{name}-token", getattr(data, f"fim_{name}_token"))
            for name in ("prefix", "middle", "suffix", "pad")
        }
        end = data.fim_eod_token
        ids["eod"] = tokenizer.eod if end is None else _entry(tokenizer, "--fim-eod-token", end)
        fragment = data.fim_split_sample
        return cls(
            tokenizer,
            data.fim_rate,
            data.fim_spm_rate,
            ids,
            None if fragment is None else _entry(tokenizer, "--fim-split-sample", fragment),
            data.fim_fragment_rate or 0.0,
            data.fim_no_prefix,
        )

    def rearrange(self, tokens: Tokens, random: np.random.RandomState) -> Tokens:
        """Return a sample with some of its documents rearranged at random, `[s + 1]`.

        As in Megatron, an end-of-document token is removed if its document is empty. The result is
        cut or padded at the end to the length of the sample.

        Args:
            tokens: The tokens of the sample, `[s + 1]`.
            random: The generator of the random draws.
        """
        documents = _map_parts(tokens, self.ids["eod"], lambda text: self._document(text, random))
        result = documents[: len(tokens)]
        padding = np.full(len(tokens) - len(result), self.ids["pad"])
        return np.concatenate([result, padding], dtype=np.int64)

    def _document(self, tokens: Tokens, random: np.random.RandomState) -> Tokens:
        end = self.fragment_end
        if end is None or end not in tokens:
            return self._text(tokens, self.rate, random)
        if not random.binomial(1, self.rate):
            return tokens
        return _map_parts(tokens, end, lambda text: self._text(text, self.fragment_rate, random))

    def _text(self, tokens: Tokens, rate: float, random: np.random.RandomState) -> Tokens:
        if not random.binomial(1, rate):
            return tokens
        text = self.tokenizer.detokenize(tokens.tolist())
        if self.exempt_prefix is not None and text.startswith(self.exempt_prefix):
            return tokens
        first, second = sorted(random.randint(low=0, high=len(text) + 1, size=2).tolist())
        prefix, middle, suffix = self.tokenizer.tokenize_sentences(
            [text[:first], text[first:second], text[second:]]
        )
        prefix_token, middle_token, suffix_token = (
            [self.ids[name]] for name in ("prefix", "middle", "suffix")
        )
        if random.binomial(1, self.spm_rate):
            return np.concatenate(
                [prefix_token, suffix_token, suffix, middle_token, prefix, middle]
            )
        return np.concatenate([prefix_token, prefix, suffix_token, suffix, middle_token, middle])


@dataclass(eq=False)
class FillInMiddleDataset(WrappedDataset):
    """A dataset that rearranges the documents in the samples of another one.

    Attributes:
        dataset: The dataset, whose samples have `text`, `[s + 1]`.
        transform: The rearrangement.
        seed: The seed of all random draws, which also depend on the index of the sample.
    """

    transform: FillInMiddle
    seed: int

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`, with some of its documents rearranged."""
        sample: Sample = self.dataset[i]
        random = np.random.RandomState([self.seed, i & 0xFFFFFFFF, i >> 32])
        return {**sample, "text": self.transform.rearrange(np.asarray(sample["text"]), random)}


def _map_parts(tokens: Tokens, end: int, change: Callable[[Tokens], Tokens]) -> Tokens:
    """Apply a function to the texts that `end` separates, and join the results again.

    The token after an empty text is removed.
    """
    results: list[Any] = []
    start = 0
    for position in np.flatnonzero(tokens == end).tolist():
        if position > start:
            results += [change(tokens[start:position]), [end]]
        start = position + 1
    return np.concatenate([*results, change(tokens[start:])])


def _entry(tokenizer: Tokenizer, flag: str, token: str) -> int:
    index = tokenizer.vocab.get(token)
    if index is None:
        raise ConfigError(
            f"{flag} {token}: the tokenizer has no such entry: name an existing one, or use a "
            "tokenizer that was trained for filling in the middle"
        )
    return index
