"""From logits to the next tokens. What is chosen for a row depends on that row alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.device import Device

NEVER = float("-inf")
COLDEST = 1e-30  # scores over a lower temperature are no fp32 numbers: it is taken for 0
MOST_SCORED_ROWS = 256  # at a time, so that fp32 copies of logits stay small
_NOT_FINITE = -1
_MASK = 2**64 - 1


class Choice(NamedTuple):
    """What to do with one row of logits; see `request.Sampling`.

    Attributes:
        target: the token that is known to follow; None: one is to be chosen.
        uniform: in [0, 1), says which token is drawn.
        history: tokens to which the repetition penalty applies.
        banned: tokens that are out of question; their log probability is minus infinity.
        logprob: tell the token's log probability.
        tops: tell those of the so many most likely.
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
    tops: int = 0

    @property
    def is_drawn(self) -> bool:
        """Whether chance decides."""
        return self.target is None and self.temperature >= COLDEST and self.top_k != 1

    @property
    def is_penalized(self) -> bool:
        """Whether scores change with the history."""
        return self.target is None and self.repetition_penalty != 1


class Chosen(NamedTuple):
    """The result for one row.

    Attributes:
        token: the target, or what was chosen; None: the logits are not finite.
        logprob: anything where it was not asked for.
        top: as many as asked for.
    """

    token: int | None
    logprob: float
    top: tuple[tuple[int, float], ...]


def uniform(seed: int, number: int) -> float:
    """In [0, 1): a function of seed and number that looks random (SplitMix64)."""
    state = (seed * 0x9E3779B97F4A7C15 + number + 1) * 0xD1B54A32D192ED03 & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ state >> shift) * factor) & _MASK
    return ((state ^ state >> 31) >> 32) / 2**32


def result_width(choices: Sequence[Choice]) -> int:
    """Columns of `choose`'s result."""
    return 2 + 2 * max(choice.tops for choice in choices)


def choose(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """The next tokens.

    Args:
        logits: [k, v], without padding entries.
        choices: k.

    Returns:
        fp64 [k, 2 + 2m], flat for `unpack`: token, its log probability, m tokens, their log
        probabilities, where m is the most `tops` of a choice.
    """
    result = logits.new_zeros(len(choices), result_width(choices), dtype=torch.float64)
    if any(choice.banned for choice in choices):
        logits = _without_banned(logits, choices)
    largest, likeliest = logits.max(dim=-1)
    tokens = _tokens(logits, likeliest, choices)
    _tell_logprobs(logits, tokens, choices, result)
    # A NaN anywhere in a row is its maximum.
    result[:, 0] = torch.where(largest.isfinite(), tokens, _NOT_FINITE)
    return result


def unpack(result: Sequence[float], choices: Sequence[Choice]) -> list[Chosen]:
    """`choose`'s result, flat, row by row."""
    width = result_width(choices)
    most = (width - 2) // 2
    if not most:
        return [
            Chosen(None if token == _NOT_FINITE else int(token), logprob, ())
            for token, logprob in zip(result[::2], result[1::2], strict=True)
        ]
    chosen = []
    rows = (result[start : start + width] for start in range(0, len(result), width))
    for row, choice in zip(rows, choices, strict=True):
        tokens, logprobs = row[2 : 2 + choice.tops], row[2 + most : 2 + most + choice.tops]
        top = tuple((int(token), logprob) for token, logprob in zip(tokens, logprobs, strict=True))
        chosen.append(Chosen(None if row[0] == _NOT_FINITE else int(row[0]), row[1], top))
    return chosen


def _without_banned(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    pairs = [(row, token) for row, choice in enumerate(choices) for token in choice.banned]
    rows, tokens = _send(np.array(pairs).T, logits)
    return logits.index_put((rows, tokens), logits.new_full((), NEVER))


def _tokens(logits: Tensor, tokens: Tensor, choices: Sequence[Choice]) -> Tensor:
    """[k], int64: `tokens`, which are the likeliest, changed where others are asked for."""
    known = {i: choice.target for i, choice in enumerate(choices) if choice.target is not None}
    if known:
        rows, targets = _send(np.array([*known.items()]).T, logits)
        tokens[rows] = targets
    changed = [i for i, choice in enumerate(choices) if choice.is_drawn or choice.is_penalized]
    if changed:
        mine, rows = [choices[i] for i in changed], _send(np.array(changed), logits)
        scores = _penalized(logits[rows].float(), mine)
        tokens[rows] = _drawn(scores, mine)
    return tokens


def _penalized(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Changes `scores` and returns them."""
    for row, choice in zip(scores, choices, strict=True):
        if choice.is_penalized:
            seen = _send(np.array(sorted(set(choice.history))), scores)
            before = row[seen]
            weaker = torch.where(
                before > 0,
                before / choice.repetition_penalty,
                before * choice.repetition_penalty,
            )
            row[seen] = weaker
    return scores


def _drawn(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    tokens = scores.argmax(dim=-1)
    for cuts in (False, True):
        drawn = [
            i for i, c in enumerate(choices) if c.is_drawn and (c.top_k > 0 or c.top_p > 0) == cuts
        ]
        if not drawn:
            continue
        mine, rows = [choices[i] for i in drawn], _send(np.array(drawn), scores)
        heat = _send(_floats(choice.temperature for choice in mine), scores).unsqueeze(1)
        hot = scores[rows] / heat
        tokens[rows] = _draw_among_best(hot, mine) if cuts else _draw(hot, mine)
    return tokens


def _draw(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    """[k]: places in the rows of [k, v], each with its softmax's probability."""
    upto = scores.double().softmax(dim=-1).cumsum(dim=-1)
    at = _send(np.array([choice.uniform for choice in choices]), scores).unsqueeze(1)
    at = at * upto[:, -1:]
    place = torch.searchsorted(upto, at, right=True)
    return place.squeeze(1).clamp(max=scores.shape[1] - 1)


def _draw_among_best(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    vocab = scores.shape[1]
    kept = [min(choice.top_k or vocab, vocab) for choice in choices]
    best, tokens = scores.topk(max(kept), dim=-1)  # in falling order
    place = torch.arange(best.shape[1], device=scores.device)
    best = best.masked_fill(place >= _send(np.array(kept), scores).unsqueeze(1), NEVER)
    share = best.softmax(dim=-1)
    before = share.cumsum(dim=-1) - share
    top_p = _send(_floats(choice.top_p or 2.0 for choice in choices), scores).unsqueeze(1)
    best = best.masked_fill((before > top_p) & (place > 0), NEVER)
    return tokens.gather(1, _draw(best, choices).unsqueeze(1)).squeeze(1)


def _tell_logprobs(
    logits: Tensor, tokens: Tensor, choices: Sequence[Choice], result: Tensor
) -> None:
    """Fill in all but the tokens."""
    most = (result.shape[1] - 2) // 2
    told = [i for i, choice in enumerate(choices) if choice.logprob or choice.tops]
    for start in range(0, len(told), MOST_SCORED_ROWS):
        rows = _send(np.array(told[start : start + MOST_SCORED_ROWS]), logits)
        logprobs = logits[rows].float().log_softmax(dim=-1)
        own = logprobs.gather(1, tokens[rows].unsqueeze(1)).squeeze(1)
        result[rows, 1] = own.double()
        if most:
            best = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
            count = best.indices.shape[1]
            result[rows, 2 : 2 + count] = best.indices.double()
            result[rows, 2 + most : 2 + most + count] = best.values.double()


def _floats(numbers: Iterable[float]) -> np.ndarray:
    return np.fromiter(numbers, np.float32)


def _send(array: np.ndarray, like: Tensor) -> Tensor:
    """To where `like` is. Nothing here waits for a GPU, which may still be at an earlier step."""
    return Device(like.device).send(np.ascontiguousarray(array))
