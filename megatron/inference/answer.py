"""What becomes of one request: which scores its sequences want, and what follows from them.

`PlainAnswer` chooses token after token; `BeamAnswer` searches with several sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Protocol

from megatron.inference.beam import BeamSearch
from megatron.inference.request import Event, Finished, Prompt, Request, Sampling, Token
from megatron.inference.sampling import Choice, Chosen, uniform
from megatron.inference.scheduler import UNKNOWN, Row, Scheduler, Sequence

Wish = tuple[int, Choice]  # place among a row's tokens, and what to do with the logits there

_SMALLEST_TOP_P = 1e-9  # where it decays without a bound: the most likely token


class Answer(Protocol):
    """An answer in the making."""

    @property
    def request(self) -> Request:
        """To what."""
        ...

    @property
    def sequences(self) -> list[Sequence]:
        """Its sequences, all of which the scheduler has."""
        ...

    def wishes(self, row: Row) -> list[Wish]:
        """The scores wanted of a row."""
        ...

    def take(self, row: Row, results: Many[Chosen], scheduler: Scheduler) -> list[Event]:
        """What was chosen for these wishes, once the row is computed; what there is to tell.

        Sequences that begin or end here do so in the scheduler too.
        """
        ...

    @property
    def can_expect(self) -> bool:
        """Whether a step can be prepared before the one before it has chosen a token."""
        ...

    def expect(self) -> None:
        """The step under way chooses this answer's next token: let its sequence have `UNKNOWN`
        until then, unless the answer is complete with it. Only where `can_expect`."""
        ...

    def finished(self) -> Finished:
        """Counts so far, for an end that comes from outside."""
        ...


class PlainAnswer:
    """See `Answer`. One sequence, one token a step.

    Args:
        request: without beams.
        seed: of the draws.
    """

    def __init__(self, request: Request, seed: int) -> None:
        self.request = request
        self._seed = seed
        self._prompt = _PromptScores(request)
        # Of tokens found in the cache there would be no scores.
        reuses = not request.sampling.prompt_logprobs
        self._sequence = Sequence(request.id, list(request.prompt), reuses)
        sampling = request.sampling
        self._choice = Choice(  # as far as it is the same for every token
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            history=self._sequence.tokens,
            logprob=sampling.logprobs,
            tops=sampling.top_logprobs,
        )

    @property
    def sequences(self) -> list[Sequence]:
        """See `Answer`."""
        return [self._sequence]

    def wishes(self, row: Row) -> list[Wish]:
        """See `Answer`."""
        wishes = self._prompt.wishes(row)
        if row.is_last and self.request.sampling.max_new_tokens:
            wishes.append((row.size - 1, self._next()))
        return wishes

    def take(self, row: Row, results: Many[Chosen], scheduler: Scheduler) -> list[Event]:
        """See `Answer`."""
        events, results = self._prompt.take(row, results)
        if not row.is_last:
            return events
        sampling, tokens = self.request.sampling, self._sequence.tokens
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

    def finished(self) -> Finished:
        """See `Answer`."""
        cached = self._sequence.cached
        return Finished(self.request.id, "stop", new_tokens=self._new_tokens, cached_tokens=cached)

    @property
    def can_expect(self) -> bool:
        """See `Answer`."""
        depends = self._choice.is_penalized or self.request.sampling.banned_pairs  # on what it is
        return self._prompt.is_told and not depends

    def expect(self) -> None:
        """See `Answer`."""
        if self._new_tokens + 1 < self.request.sampling.max_new_tokens:
            self._sequence.tokens.append(UNKNOWN)

    @property
    def _new_tokens(self) -> int:
        """Known ones."""
        tokens = self._sequence.tokens
        return len(tokens) - len(self.request.prompt) - (tokens[-1] == UNKNOWN)

    def _next(self) -> Choice:
        """How to choose the next token."""
        sampling = self.request.sampling
        number = len(self._sequence.tokens) - len(self.request.prompt)
        if not self._choice.is_drawn and not sampling.banned_pairs:
            return self._choice
        return self._choice._replace(
            top_p=_decayed_top_p(sampling, number),
            uniform=uniform(self._seed, number),
            banned=_banned(sampling, self._sequence.tokens[-1]),
        )


class BeamAnswer:
    """See `Answer`. A sequence for each beam; a round is over when all have been computed.

    Args:
        request: with beams.
        vocab_size: entries that can be chosen.
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        self.request = request
        sampling = request.sampling
        self._prompt = _PromptScores(request)
        self._search = BeamSearch(
            sampling.beam_width,
            length_penalty=sampling.length_penalty,
            max_new_tokens=sampling.max_new_tokens,
            ends=lambda answer: ends(sampling, (*request.prompt, *answer)),
            endings=len(sampling.stop_tokens),
        )
        self._tops = min(self._search.candidates, vocab_size)
        first = Sequence(request.id, list(request.prompt), not sampling.prompt_logprobs)
        self._cached_of = first
        self._beams = [first]
        self._nexts: dict[Sequence, Chosen] = {}  # of the round, as far as known

    @property
    def sequences(self) -> list[Sequence]:
        """See `Answer`."""
        return list(self._beams)

    def wishes(self, row: Row) -> list[Wish]:
        """See `Answer`."""
        wishes = self._prompt.wishes(row)
        if row.is_last:
            banned = _banned(self.request.sampling, row.tokens[-1])
            wishes.append((row.size - 1, Choice(tops=self._tops, banned=banned)))
        return wishes

    def take(self, row: Row, results: Many[Chosen], scheduler: Scheduler) -> list[Event]:
        """See `Answer`."""
        events, results = self._prompt.take(row, results)
        if row.is_last:
            (self._nexts[row.sequence],) = results
            if len(self._nexts) == len(self._beams):
                events += self._next_round(scheduler)
        return events

    @property
    def can_expect(self) -> bool:
        """See `Answer`. What is chosen says which beams go on."""
        return False

    def expect(self) -> None:
        """See `Answer`."""
        raise AssertionError("a beam search waits for each round")

    def finished(self) -> Finished:
        """See `Answer`."""
        answers = tuple(self._search.answers)
        new = len(answers[0].tokens) if answers else 0
        return Finished(
            self.request.id,
            "stop",
            new_tokens=new,
            cached_tokens=self._cached_of.cached,
            beams=answers,
        )

    def _next_round(self, scheduler: Scheduler) -> list[Event]:
        """Go on with the best: a beam's first continuation has its sequence, others a fork."""
        steps = self._search.advance([self._nexts[beam].top for beam in self._beams])
        self._nexts = {}
        if not steps:
            event = self.finished()
            is_complete = ends(self.request.sampling, self.request.prompt + event.beams[0].tokens)
            return [event if is_complete else replace(event, reason="length")]
        parents = self._beams
        forks = {
            place: scheduler.fork(parents[step.parent], [*parents[step.parent].tokens, step.token])
            for place, step in enumerate(steps)
            if step.parent in [earlier.parent for earlier in steps[:place]]
        }
        self._beams = []
        for place, step in enumerate(steps):
            if place not in forks:
                parents[step.parent].tokens.append(step.token)
            self._beams.append(forks.get(place, parents[step.parent]))
        for beam in parents:
            if beam not in self._beams:
                scheduler.remove(beam)
        return []


class _PromptScores:
    """The prompt's log probabilities, as its chunks are computed; again after a preemption."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._scores: dict[int, Chosen] = {}  # by place of the token that is scored
        self.is_told = not request.sampling.prompt_logprobs

    def wishes(self, row: Row) -> list[Wish]:
        if self.is_told:
            return []
        prompt, tops = self._request.prompt, self._request.sampling.top_logprobs
        last = min(row.start + row.size, len(prompt) - 1)
        return [
            (place - row.start, Choice(target=prompt[place + 1], logprob=True, tops=tops))
            for place in range(row.start, last)
        ]

    def take(self, row: Row, results: Many[Chosen]) -> tuple[list[Event], Many[Chosen]]:
        """What there is to tell, and the results that are not the prompt's."""
        if self.is_told:
            return [], results
        count = len(self.wishes(row))
        self._scores |= {row.start + i + 1: results[i] for i in range(count)}
        prompt = self._request.prompt
        if row.start + row.size < len(prompt):
            return [], results[count:]
        self.is_told = True
        scores = [self._scores[place] for place in range(1, len(prompt))]
        tops = tuple(score.top for score in scores) if self._request.sampling.top_logprobs else ()
        event = Prompt(self._request.id, tuple(score.logprob for score in scores), tops)
        return [event], results[count:]


def ends(sampling: Sampling, tokens: Many[int]) -> bool:
    """Whether the last token, which is the answer's, completes it.

    Args:
        sampling: with the rules.
        tokens: prompt and answer.
    """
    if tokens[-1] in sampling.stop_tokens:
        return True
    return any(tuple(tokens[-len(stop) :]) == stop for stop in sampling.stop_sequences)


def _banned(sampling: Sampling, last: int) -> tuple[int, ...]:
    return tuple(second for first, second in sampling.banned_pairs if first == last)


def _decayed_top_p(sampling: Sampling, number: int) -> float:
    """For new token `number`, from 0."""
    if not sampling.top_p or not sampling.top_p_decay:
        return sampling.top_p
    decayed = sampling.top_p * sampling.top_p_decay**number
    return max(decayed, min(sampling.top_p_bound, sampling.top_p), _SMALLEST_TOP_P)
