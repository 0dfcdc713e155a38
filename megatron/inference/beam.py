"""Beam search: which beginnings to go on with, and the best answers so far. No tensors here.

Of all ways to go on from all beams the most likely are looked at. Among the best `width` of them
those that end are answers; the best that do not end go on. It is over when every beam has ended at
the longest length, or when `width` answers are known and no beam's score, over its length as it is
now, beats the worst of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.inference.request import Beam, TopLogprobs


@dataclass(frozen=True)
class _Beginning:
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0

    def then(self, token: int, logprob: float) -> _Beginning:
        return _Beginning((*self.tokens, token), (*self.logprobs, logprob), self.total + logprob)


@dataclass(frozen=True)
class Step:
    """A beam of the next round.

    Attributes:
        parent: the beam of this round that it continues.
        token: with which.
    """

    parent: int
    token: int


class BeamSearch:
    """One search, round by round.

    Args:
        width: beams, and answers wanted.
        length_penalty: see `request.Sampling`.
        max_new_tokens: longest answer.
        ends: whether an answer, without its prompt, is complete.
        endings: how many tokens can end an answer.
    """

    def __init__(
        self,
        width: int,
        *,
        length_penalty: float,
        max_new_tokens: int,
        ends: Callable[[Sequence[int]], bool],
        endings: int,
    ) -> None:
        # Among so many continuations `width` go on, even where as many as can have ended.
        self.candidates = max(2, 1 + endings) * width
        self.answers: list[Beam] = []  # best first
        self._width = width
        self._penalty = length_penalty
        self._longest = max_new_tokens
        self._ends = ends
        self._running = [_Beginning()]

    def advance(self, nexts: Sequence[TopLogprobs]) -> list[Step]:
        """The next round's beams, best first; none: the search is over.

        Args:
            nexts: for each beam of this round the most likely `candidates` tokens.
        """
        ways = [
            (begin.then(token, logprob), Step(parent, token))
            for parent, (begin, top) in enumerate(zip(self._running, nexts, strict=True))
            for token, logprob in top
            if logprob > -math.inf  # not banned
        ]
        ways.sort(key=lambda way: -way[0].total)  # stable: earlier beams first among equals
        going_on = []
        for rank, (begin, step) in enumerate(ways[: self.candidates]):
            if len(begin.tokens) < self._longest and not self._ends(begin.tokens):
                going_on.append((begin, step))
            elif rank < self._width:
                self._add_answer(begin)
        going_on = going_on[: self._width]
        self._running = [begin for begin, _ in going_on]
        return [] if self._is_over() else [step for _, step in going_on]

    def _add_answer(self, begin: _Beginning) -> None:
        score = begin.total / len(begin.tokens) ** self._penalty
        self.answers.append(Beam(begin.tokens, score, begin.logprobs))
        self.answers.sort(key=lambda beam: -beam.score)
        del self.answers[self._width :]

    def _is_over(self) -> bool:
        if not self._running:
            return True
        best = self._running[0]
        reach = best.total / len(best.tokens) ** self._penalty
        return len(self.answers) == self._width and reach <= self.answers[-1].score
