"""Answers in progress: the choices to make for a request, and what to do with the results.

`PlainAnswer` chooses token after token; `BeamAnswer` searches with several sequences.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from megatron.inference.request import (
    Beam,
    Event,
    Finished,
    Prompt,
    Request,
    Sampling,
    Token,
    TopLogprobs,
)
from megatron.inference.sampling import Choice, Chosen, uniform
from megatron.inference.scheduler import UNKNOWN, Row, Scheduler, Sequence

PlacedChoice = tuple[int, Choice]  # index of a row's token, and what to do with its logits

_SMALLEST_TOP_P = 1e-9  # floor for a top_p that decays without a bound: the most likely token


class Answer(ABC):
    """An answer in progress.

    Attributes:
        request: The request that it answers.
        sequences: Its sequences, all of which the scheduler has.
    """

    def __init__(self, request: Request) -> None:
        """Start with the prompt.

        Args:
            request: The request to answer.
        """
        self.request = request
        # Tokens found in the cache are not computed again, so they would have no scores.
        reuses = not request.sampling.prompt_logprobs
        self._first = Sequence(request.id, list(request.prompt), reuses)
        self.sequences = [self._first]
        self._prompt_scores: dict[int, Chosen] = {}  # by the position of the scored token
        self._owes_prompt = request.sampling.prompt_logprobs  # until they are reported

    def choices(self, row: Row) -> list[PlacedChoice]:
        """Return the tokens to choose or score in a row."""
        choices = self._prompt_choices(row)
        if row.is_last:
            choices += self._next_choices(row)
        return choices

    def take(self, row: Row, results: Many[Chosen], scheduler: Scheduler) -> list[Event]:
        """Process the results of a row once it is computed.

        Args:
            row: The computed row.
            results: One result for each of the row's `choices`.
            scheduler: The scheduler, which learns about sequences that begin or end here.

        Returns:
            The events to report.
        """
        events: list[Event] = []
        if self._owes_prompt:
            count = len(self._prompt_choices(row))
            events = self._take_prompt(row, results[:count])
            results = results[count:]
        if row.is_last:
            events += self._take_next(row, results, scheduler)
        return events

    @property
    def can_expect(self) -> bool:
        """Whether the next step can be prepared before the current one has chosen a token."""
        return False

    def expect(self) -> None:
        """Reserve a place for the token that the step under way is choosing.

        The sequence ends with `UNKNOWN` until the token is known, unless that token completes the
        answer. This is called only if `can_expect`.
        """
        raise AssertionError("a beam search waits for each round")

    @abstractmethod
    def finished(self) -> Finished:
        """Return the answer's final event, with the counts so far."""

    @abstractmethod
    def _next_choices(self, row: Row) -> list[PlacedChoice]:
        """Return the choices to make after the last known token."""

    @abstractmethod
    def _take_next(self, row: Row, results: Many[Chosen], scheduler: Scheduler) -> list[Event]:
        """Process the results of `_next_choices`, and return the events to report."""

    def _prompt_choices(self, row: Row) -> list[PlacedChoice]:
        """Return the prompt tokens to score in a row. A preempted request scores them again."""
        if not self._owes_prompt:
            return []
        prompt, tops = self.request.prompt, self.request.sampling.top_logprobs
        last = min(row.start + row.size, len(prompt) - 1)
        return [
            (place - row.start, Choice(target=prompt[place + 1], logprob=True, tops=tops))
            for place in range(row.start, last)
        ]

    def _take_prompt(self, row: Row, results: Many[Chosen]) -> list[Event]:
        self._prompt_scores |= {row.start + i + 1: result for i, result in enumerate(results)}
        prompt = self.request.prompt
        if row.start + row.size < len(prompt):
            return []
        self._owes_prompt = False
        scores = [self._prompt_scores[place] for place in range(1, len(prompt))]
        tops = tuple(score.top for score in scores) if self.request.sampling.top_logprobs else ()
        return [Prompt(self.request.id, tuple(score.logprob for score in scores), tops)]


class PlainAnswer(Answer):
    """An answer with a single sequence, which gains one token per step."""

    def __init__(self, request: Request, seed: int) -> None:
        """Start with the prompt.

        Args:
            request: A request without beam search.
            seed: Seed of the random draws.
        """
        super().__init__(request)
        self._seed = seed
        sampling = request.sampling
        self._choice = Choice(  # the settings that are the same for every token
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            history=self._first.tokens,
            logprob=sampling.logprobs,
            tops=sampling.top_logprobs,
        )

    def finished(self) -> Finished:
        """Return the answer's final event, with the counts so far."""
        cached = self._first.cached
        return Finished(self.request.id, "stop", new_tokens=self._new_tokens, cached_tokens=cached)

    @property
    def can_expect(self) -> bool:
        """Whether the next token's choice is independent of the token under way."""
        depends = self._choice.is_penalized or self.request.sampling.banned_pairs
        return not self._owes_prompt and not depends

    def expect(self) -> None:
        """Append `UNKNOWN` for the token under way, unless it is the last one."""
        if self._new_tokens + 1 < self.request.sampling.max_new_tokens:
            self._first.tokens.append(UNKNOWN)

    @property
    def _new_tokens(self) -> int:
        """Number of known new tokens."""
        tokens = self._first.tokens
        return len(tokens) - len(self.request.prompt) - (tokens[-1] == UNKNOWN)

    def _next_choices(self, row: Row) -> list[PlacedChoice]:
        sampling, choice = self.request.sampling, self._choice
        if not sampling.max_new_tokens:
            return []
        if choice.is_drawn or sampling.banned_pairs:
            number = len(self._first.tokens) - len(self.request.prompt)  # new token's index, from 0
            top_p = sampling.top_p
            if top_p and sampling.top_p_decay:
                decayed = top_p * sampling.top_p_decay**number
                top_p = max(decayed, min(sampling.top_p_bound, top_p), _SMALLEST_TOP_P)
            choice = choice._replace(
                top_p=top_p,
                uniform=uniform(self._seed, number),
                banned=_banned(sampling, self._first.tokens[-1]),
            )
        return [(row.size - 1, choice)]

    def _take_next(self, row: Row, results: Many[Chosen], scheduler: Scheduler) -> list[Event]:
        events: list[Event] = []
        sampling, tokens = self.request.sampling, self._first.tokens
        if results:
            (chosen,) = results
            assert chosen.token is not None
            if tokens[-1] == UNKNOWN:
                tokens.pop()
            tokens.append(chosen.token)
            logprob = chosen.logprob if sampling.logprobs else None
            events.append(Token(self.request.id, chosen.token, logprob, chosen.top))
            if ends(sampling, tokens):
                return [*events, self.finished()]
        if self._new_tokens >= sampling.max_new_tokens:
            events.append(replace(self.finished(), reason="length"))
        return events


class BeamAnswer(Answer):
    """An answer with one sequence per beam. A round ends once all beams have been computed."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        """Start with the prompt.

        Args:
            request: A request with beam search.
            vocab_size: Number of vocabulary entries that can be chosen.
        """
        super().__init__(request)
        sampling = request.sampling
        self._search = BeamSearch(
            sampling.beam_width,
            length_penalty=sampling.length_penalty,
            max_new_tokens=sampling.max_new_tokens,
            ends=lambda answer: ends(sampling, (*request.prompt, *answer)),
            endings=len(sampling.stop_tokens),
        )
        self._tops = min(self._search.candidates, vocab_size)
        self._nexts: dict[Sequence, Chosen] = {}  # the results of this round so far

    def finished(self) -> Finished:
        """Return the answer's final event, with the counts so far."""
        answers = tuple(self._search.answers)
        return Finished(
            self.request.id,
            "stop",
            new_tokens=len(answers[0].tokens) if answers else 0,
            cached_tokens=self._first.cached,
            beams=answers,
        )

    def _next_choices(self, row: Row) -> list[PlacedChoice]:
        banned = _banned(self.request.sampling, row.tokens[-1])
        return [(row.size - 1, Choice(tops=self._tops, banned=banned))]

    def _take_next(self, row: Row, results: Many[Chosen], scheduler: Scheduler) -> list[Event]:
        (self._nexts[row.sequence],) = results
        if len(self._nexts) < len(self.sequences):
            return []
        parents = self.sequences
        steps = self._search.advance([self._nexts[beam].top for beam in parents])
        self._nexts = {}
        if not steps:
            event = self.finished()
            is_complete = ends(self.request.sampling, self.request.prompt + event.beams[0].tokens)
            return [event if is_complete else replace(event, reason="length")]
        # A beam's first continuation keeps its sequence; each further one gets a fork.
        forks = {
            place: scheduler.fork(parents[step.parent], [*parents[step.parent].tokens, step.token])
            for place, step in enumerate(steps)
            if step.parent in [earlier.parent for earlier in steps[:place]]
        }
        self.sequences = []
        for place, step in enumerate(steps):
            if place not in forks:
                parents[step.parent].tokens.append(step.token)
            self.sequences.append(forks.get(place, parents[step.parent]))
        for beam in parents:
            if beam not in self.sequences:
                scheduler.remove(beam)
        return []


@dataclass(frozen=True)
class _Beginning:
    """The tokens of a beam so far."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0

    def then(self, token: int, logprob: float) -> _Beginning:
        """Return this beginning with one more token."""
        return _Beginning((*self.tokens, token), (*self.logprobs, logprob), self.total + logprob)


@dataclass(frozen=True)
class Continuation:
    """A beam of the next round.

    Attributes:
        parent: The beam of this round that it continues.
        token: The token that it adds.
    """

    parent: int
    token: int


class BeamSearch:
    """A beam search in rounds: the beginnings to continue and the best answers so far, no tensors.

    Each round considers the most likely continuations of all beams. Among the best `width` of them,
    those that end become answers; the best that do not end become the next beams. The search is
    over when every beam has ended at the longest length, or when `width` answers are known and no
    beam's score, at its present length, beats the worst of them.
    """

    def __init__(
        self,
        width: int,
        *,
        length_penalty: float,
        max_new_tokens: int,
        ends: Callable[[Many[int]], bool],
        endings: int,
    ) -> None:
        """Start with an empty beginning.

        Args:
            width: Number of beams, which is also the number of answers.
            length_penalty: Power of the length by which scores are divided.
            max_new_tokens: Length of the longest answer, in tokens.
            ends: Returns whether an answer, without its prompt, is complete.
            endings: Number of tokens that can end an answer.
        """
        # Among this many continuations at least `width` go on, even if all that can end do.
        self.candidates = max(2, 1 + endings) * width
        self.answers: list[Beam] = []  # best first
        self._width = width
        self._penalty = length_penalty
        self._longest = max_new_tokens
        self._ends = ends
        self._running = [_Beginning()]

    def advance(self, nexts: Many[TopLogprobs]) -> list[Continuation]:
        """Return the next round's beams, best first. If there are none, the search is over.

        Args:
            nexts: The most likely `candidates` tokens for each beam of this round.
        """
        ways = [
            (begin.then(token, logprob), Continuation(parent, token))
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
                self.answers.append(Beam(begin.tokens, self._score(begin), begin.logprobs))
                self.answers.sort(key=lambda beam: -beam.score)
                del self.answers[self._width :]
        going_on = going_on[: self._width]
        self._running = [begin for begin, _ in going_on]
        is_full = len(self.answers) == self._width
        if is_full and self._running and self._score(self._running[0]) <= self.answers[-1].score:
            return []
        return [step for _, step in going_on]

    def _score(self, begin: _Beginning) -> float:
        return begin.total / len(begin.tokens) ** self._penalty


def ends(sampling: Sampling, tokens: Many[int]) -> bool:
    """Return whether the last token completes the answer.

    Args:
        sampling: The request's stop tokens and stop sequences.
        tokens: Tokens of the prompt and the answer, which has at least one.
    """
    if tokens[-1] in sampling.stop_tokens:
        return True
    return any(tuple(tokens[-len(stop) :]) == stop for stop in sampling.stop_sequences)


def _banned(sampling: Sampling, last: int) -> tuple[int, ...]:
    return tuple(second for first, second in sampling.banned_pairs if first == last)
