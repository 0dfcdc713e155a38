"""Language models as they are: perplexity of texts, and the last words of passages (LAMBADA)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.config.tasks import LanguageModelTaskConfig
from megatron.errors import DataError
from megatron.inference.score import Sample, Score, windows
from megatron.tokenizer import Tokenizer
from tasks.detokenize import DETOKENIZERS, detokenizer_for
from tasks.files import read_documents, read_text
from tasks.results import Numbers


@dataclass(frozen=True)
class Prepared:
    """What a task asks of a model.

    Attributes:
        samples: to be scored.
        summarize: their scores to the task's numbers.
        data: what was read, in words.
        headline: the numbers that Megatron-LM's own line shows, with its names.
    """

    samples: list[Sample]
    summarize: Callable[[Sequence[Score]], Numbers]
    data: str
    headline: dict[str, str]


def prepare_wikitext(
    paths: Sequence[str], options: LanguageModelTaskConfig, tokenizer: Tokenizer, window: int
) -> Prepared:
    """One text: loss a token, and perplexity a word of the text as it was before detokenization.

    Words are counted with an end-of-line each, as published perplexities are.
    """
    path = paths[0]
    raw = read_text(path)
    name = detokenizer_for(path, options.detokenizer)
    tokens = np.array(tokenizer.tokenize_open(DETOKENIZERS[name](raw)))
    words = count_words(raw)
    if len(tokens) < 2:
        raise DataError(f"--valid-data {path}: holds no text to predict")
    samples = list(windows(tokens, window, options.overlapping_eval))

    def summarize(scores: Sequence[Score]) -> Numbers:
        total = -sum(score.log_probability for score in scores)
        targets = len(tokens) - 1
        ratio = targets / (words - 1)
        return {
            "loss": total / targets,
            "perplexity": _exp(total / targets),
            "adjusted perplexity": _exp(total / (words - 1)),
            "token ratio": ratio,
            "words": words,
            "tokens": len(tokens),
        }

    return Prepared(
        samples,
        summarize,
        f"{path}: {words:,} words with end-of-line, {len(tokens):,} tokens "
        f"(detokenizer: {name}), {len(samples):,} windows",
        {
            "loss": "avg loss",
            "perplexity": "ppl",
            "adjusted perplexity": "adjusted ppl",
            "token ratio": "token ratio",
        },
    )


def count_words(text: str) -> int:
    """Words between white space, and the ends of lines."""
    return len(text.split()) + text.count("\n")


def prepare_perplexity(
    paths: Sequence[str], options: LanguageModelTaskConfig, tokenizer: Tokenizer, window: int
) -> Prepared:
    """Any corpus: every document on its own, after an end-of-document token (or the one that the
    tokenizer begins every text with)."""
    samples: list[Sample] = []
    documents = tokens = words = size = 0
    detokenize = DETOKENIZERS[detokenizer_for(paths[0], options.detokenizer)]
    own_start = tokenizer.tokenize_open("")
    start = own_start[-1:] or [tokenizer.eod]
    for text in read_documents(paths):
        ids = tokenizer.tokenize_open(detokenize(text))[len(own_start) :]
        documents, tokens = documents + 1, tokens + len(ids)
        words, size = words + len(text.split()), size + len(text.encode())
        document = np.array([*start, *ids])
        samples += windows(document, window, options.overlapping_eval)
    if not tokens:
        raise DataError(f"--valid-data {' '.join(paths)}: holds no text")

    def summarize(scores: Sequence[Score]) -> Numbers:
        total = -sum(score.log_probability for score in scores)
        return {
            "loss": total / tokens,
            "perplexity": _exp(total / tokens),
            "word perplexity": _exp(total / max(1, words)),
            "bits a byte": total / math.log(2) / size,
            "documents": documents,
            "words": words,
            "tokens": tokens,
        }

    data = f"{' '.join(paths)}: {documents:,} documents, {words:,} words, {tokens:,} tokens"
    return Prepared(samples, summarize, data, {"loss": "avg loss", "perplexity": "ppl"})


def prepare_lambada(
    paths: Sequence[str], options: LanguageModelTaskConfig, tokenizer: Tokenizer, window: int
) -> Prepared:
    """Passages whose last token (or word, with --strict-lambada) is to be guessed."""
    split = _last_word if options.strict_lambada else _last_token
    detokenize = DETOKENIZERS[options.detokenizer or "none"]
    samples, cut = [], 0
    for number, text in enumerate(map(detokenize, read_documents(paths))):
        context, target = split(text, tokenizer)
        if not context or not target:
            raise DataError(
                f"--valid-data {paths[0]}: passage {number + 1} has no "
                f"{'context' if target else 'word to guess'}: {text[:40]!r}"
            )
        cut += len(context) + len(target) - 1 > window
        samples.append(last_window(context, target, window))
    if not samples:
        raise DataError(f"--valid-data {paths[0]}: holds no passage")

    def summarize(scores: Sequence[Score]) -> Numbers:
        correct = sum(score.is_greedy for score in scores)
        scored = sum(sample.scored for sample in samples)
        total = -sum(score.log_probability for score in scores)
        return {
            "number correct": correct,
            "total examples": len(scores),
            "accuracy": correct / len(scores),
            "perplexity of the target": _exp(total / len(scores)),
            "target tokens": scored,
            "passages cut to the window": cut,
        }

    return Prepared(
        samples,
        summarize,
        f"{' '.join(paths)}: {len(samples):,} passages, {cut:,} of them longer than the window "
        "and cut at the front",
        {
            "number correct": "number correct",
            "total examples": "total examples",
            "accuracy": "avg accuracy",
        },
    )


def last_window(context: Sequence[int], target: Sequence[int], window: int) -> Sample:
    """`target` scored after as much of `context` as the window holds.

    Of a target that is longer than the window, its end.
    """
    target = target[-window:]
    tokens = [*context, *target][-window - 1 :]
    return Sample(tokens, min(len(target), len(tokens) - 1))


def _last_token(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    tokens = tokenizer.tokenize_open(text)
    return tokens[:-1], tokens[-1:]


def _last_word(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    word = text.rsplit(maxsplit=1)[-1] if text.split() else ""
    return encode_pair(tokenizer, text[: text.rfind(word)].strip(), f" {word}")


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Ids of two texts that follow each other, encoded together.

    Alone, a continuation would begin as a text does for some tokenizers: with a token of its own.
    """
    before = tokenizer.tokenize_open(context)
    both = tokenizer.tokenize_open(context + continuation)
    if both[: len(before)] != before:  # the seam fell into a token: give it to the continuation
        before = list(_common_start(before, both))
    return before, both[len(before) :]


def _common_start(a: Sequence[int], b: Sequence[int]) -> Iterator[int]:
    for one, other in zip(a, b, strict=False):
        if one != other:
            return
        yield one


def _exp(loss: float) -> float:
    """A perplexity; of a hopeless model, infinite."""
    return math.exp(loss) if loss < 700 else math.inf
