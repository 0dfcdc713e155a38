"""Choosing the next tokens from logits. The choice for a row depends on that row alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.device import Device

_NEG_INF = float("-inf")
# A lower temperature counts as 0, because logits divided by it overflow fp32.
_MIN_TEMPERATURE = 1e-30
_MAX_SCORED_ROWS = 256  # rows scored at a time; limits the size of the fp32 copies of logits
_NOT_FINITE = -1
_MASK = 2**64 - 1


class Choice(NamedTuple):
    """Instructions for choosing or scoring a token from one row of logits.

    Attributes:
        target: The token that is known to follow, or `None` if one is to be chosen.
        temperature: Divisor of the logits before sampling. 0 always takes the most likely token.
        top_k: Sample from the k most likely tokens. 0 disables the limit.
        top_p: Sample from the smallest set of most likely tokens whose total probability reaches
            this value. 0 disables the limit.
        uniform: Random number in [0, 1) that determines which token is drawn.
        repetition_penalty: Number that divides the positive logits and multiplies the negative
            logits of tokens in `history`. 1 disables it.
        history: Tokens to which the repetition penalty applies.
        banned: Tokens that are never chosen. Their log probability is minus infinity.
        logprob: Whether to report the token's log probability.
        top_logprobs: Number of most likely tokens to report.
    """

    target: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    uniform: float = 0.0
    repetition_penalty: float = 1.0
    history: Sequence[int] = ()
    banned: tuple[int, ...] = ()
    logprob: bool = False
    top_logprobs: int = 0

    @property
    def is_sampled(self) -> bool:
        """Whether the token is drawn at random: neither given, nor always the most likely one."""
        return self.target is None and self.temperature >= _MIN_TEMPERATURE and self.top_k != 1

    @property
    def is_penalized(self) -> bool:
        """Whether a repetition penalty changes the logits of tokens in `history`."""
        return self.target is None and self.repetition_penalty != 1


class Chosen(NamedTuple):
    """The token chosen or scored for one row of logits.

    Attributes:
        token: The target or the chosen token. `None` means that the logits are not finite.
        logprob: Log probability of the token. Meaningless if it was not requested.
        top: The requested number of most likely tokens, with their log probabilities.
    """

    token: int | None
    logprob: float
    top: tuple[tuple[int, float], ...]


def uniform(seed: int, index: int) -> float:
    """Return a pseudorandom number in [0, 1) derived from a seed and an index (SplitMix64)."""
    state = (seed * 0x9E3779B97F4A7C15 + index + 1) * 0xD1B54A32D192ED03 & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ state >> shift) * factor) & _MASK
    return ((state ^ state >> 31) >> 32) / 2**32


def result_width(choices: Sequence[Choice]) -> int:
    """Return the number of columns of `choose`'s result."""
    return 2 + 2 * max(choice.top_logprobs for choice in choices)


def choose(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Choose or score a token for each row of logits.

    Args:
        logits: Logits [k, v], without padding entries.
        choices: How to choose or score a token in each of the k rows.

    Returns:
        fp64 [k, 2 + 2m]: the token (-1 if the row's largest logit is not finite), its log
        probability, the m most likely tokens, and their log probabilities. m is the largest
        `top_logprobs` of all choices. `unpack` takes the flattened result.
    """
    result = logits.new_zeros(len(choices), result_width(choices), dtype=torch.float64)
    pairs = [(row, token) for row, choice in enumerate(choices) for token in choice.banned]
    if pairs:
        rows, banned = _send(np.array(pairs).T, logits)
        logits = logits.index_put((rows, banned), logits.new_full((), _NEG_INF))
    maxima, likeliest = logits.max(dim=-1)
    tokens = _tokens(logits, likeliest, choices)
    _fill_in_logprobs(logits, tokens, choices, result)
    # If a row has a NaN anywhere, its maximum is NaN.
    result[:, 0] = torch.where(maxima.isfinite(), tokens, _NOT_FINITE)
    return result


def unpack(result: Sequence[float], choices: Sequence[Choice]) -> list[Chosen]:
    """Return the flattened result of `choose` as one `Chosen` per row."""
    width = result_width(choices)
    max_top = (width - 2) // 2
    if not max_top:
        return [
            Chosen(None if token == _NOT_FINITE else int(token), logprob, ())
            for token, logprob in zip(result[::2], result[1::2], strict=True)
        ]
    chosen = []
    rows = (result[start : start + width] for start in range(0, len(result), width))
    for row, choice in zip(rows, choices, strict=True):
        tokens = row[2 : 2 + choice.top_logprobs]
        logprobs = row[2 + max_top : 2 + max_top + choice.top_logprobs]
        top = tuple((int(token), logprob) for token, logprob in zip(tokens, logprobs, strict=True))
        chosen.append(Chosen(None if row[0] == _NOT_FINITE else int(row[0]), row[1], top))
    return chosen


def _tokens(logits: Tensor, tokens: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Return the token of each row, int64 [k]: its target, a sampled token or the likeliest one.

    `tokens` contains each row's likeliest token before penalties, and is changed in place.
    """
    targets_by_row = {
        i: choice.target for i, choice in enumerate(choices) if choice.target is not None
    }
    if targets_by_row:
        rows, targets = _send(np.array([*targets_by_row.items()]).T, logits)
        tokens[rows] = targets
    changed = [i for i, choice in enumerate(choices) if choice.is_sampled or choice.is_penalized]
    if changed:
        row_choices, rows = [choices[i] for i in changed], _send(np.array(changed), logits)
        scores = _penalized(logits[rows].float(), row_choices)
        tokens[rows] = _drawn(scores, row_choices)
    return tokens


def _penalized(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Apply repetition penalties to logits [k, v] in place, and return them."""
    for row, choice in zip(scores, choices, strict=True):
        if choice.is_penalized:
            seen = _send(np.array(sorted(set(choice.history))), scores)
            original = row[seen]
            penalty = choice.repetition_penalty
            row[seen] = torch.where(original > 0, original / penalty, original * penalty)
    return scores


def _drawn(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    tokens = scores.argmax(dim=-1)
    for truncates in (False, True):
        indices = [
            i
            for i, c in enumerate(choices)
            if c.is_sampled and (c.top_k > 0 or c.top_p > 0) == truncates
        ]
        if not indices:
            continue
        row_choices, rows = [choices[i] for i in indices], _send(np.array(indices), scores)
        temperatures = _send(
            np.array([choice.temperature for choice in row_choices], np.float32), scores
        )
        scaled = scores[rows] / temperatures.unsqueeze(1)
        tokens[rows] = (
            _draw_among_best(scaled, row_choices) if truncates else _draw(scaled, row_choices)
        )
    return tokens


def _draw(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Sample an index from the softmax of each row of logits [k, v]."""
    cumulative = scores.double().softmax(dim=-1).cumsum(dim=-1)
    thresholds = _send(np.array([choice.uniform for choice in choices]), scores).unsqueeze(1)
    thresholds = thresholds * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, thresholds, right=True)
    return index.squeeze(1).clamp(max=scores.shape[1] - 1)


def _draw_among_best(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    vocab = scores.shape[1]
    top_k = [min(choice.top_k or vocab, vocab) for choice in choices]
    best, tokens = scores.topk(max(top_k), dim=-1)  # in descending order
    rank = torch.arange(best.shape[1], device=scores.device)
    best = best.masked_fill(rank >= _send(np.array(top_k), scores).unsqueeze(1), _NEG_INF)
    probability = best.softmax(dim=-1)
    preceding = probability.cumsum(dim=-1) - probability
    top_p = _send(np.array([choice.top_p or 2.0 for choice in choices], np.float32), scores)
    # Nothing precedes the most probable token, which is always kept.
    best = best.masked_fill(preceding > top_p.unsqueeze(1), _NEG_INF)
    return tokens.gather(1, _draw(best, choices).unsqueeze(1)).squeeze(1)


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log probabilities [k, v] of logits, each row bitwise independent of the others."""
    if Device(logits.device).is_gpu:  # a plain sum's order depends on the number of rows
        return logits.log_softmax(dim=-1)
    # The same computation as in `kernels/cross_entropy.py`, so that training has the same bits.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    return logits - logits.exp().sum(dim=-1, keepdim=True).log()


def _fill_in_logprobs(
    logits: Tensor, tokens: Tensor, choices: Sequence[Choice], result: Tensor
) -> None:
    """Fill in all columns of the result except the first, which has the tokens."""
    max_top = (result.shape[1] - 2) // 2
    scored = [i for i, choice in enumerate(choices) if choice.logprob or choice.top_logprobs]
    for start in range(0, len(scored), _MAX_SCORED_ROWS):
        rows = _send(np.array(scored[start : start + _MAX_SCORED_ROWS]), logits)
        logprobs = _log_softmax(logits[rows].float())
        token_logprobs = logprobs.gather(1, tokens[rows].unsqueeze(1)).squeeze(1)
        result[rows, 1] = token_logprobs.double()
        if max_top:
            best = logprobs.topk(min(max_top, logprobs.shape[1]), dim=-1)
            count = best.indices.shape[1]
            result[rows, 2 : 2 + count] = best.indices.double()
            result[rows, 2 + max_top : 2 + max_top + count] = best.values.double()


def _send(array: np.ndarray, like: Tensor) -> Tensor:
    """Copy an array to the device of `like`, without waiting for the GPU's earlier work."""
    return Device(like.device).send(np.ascontiguousarray(array))
