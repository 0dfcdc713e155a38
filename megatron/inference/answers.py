"""Answers in progress: the choices to make for each request, and how their results are used.

`PlainAnswer` chooses one token at a time; `BeamAnswer` runs a beam search over several sequences.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import NamedTuple

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

IndexedChoice = tuple[int, Choice]  # index of a token in its row, and how to use its logits

_SMALLEST_TOP_P = 1e-9  # floor for a top_p that decays without a bound; it keeps one token


class Answer(ABC):
    """An answer in progress.

    Attributes:
        request: The request to answer.
        sequences: The answer's sequences. The scheduler knows all of them once the answer has
            begun.
    """

    def __init__(self, request: Request) -> None:
        """Start with the prompt.

        Args:
            request: The request to answer.
        """
        self.request = request
        # Tokens found in the cache are not computed again and would have no scores.
        reuses = not request.sampling.prompt_logprobs
        self._first = Sequence(request.id, list(request.prompt), reuses, adapter=request.adapter)
        self.sequences = [self._first]
        self._prompt_scores: dict[int, Chosen] = {}  # by the position of the scored token
        # True until the scores are reported.
        self._awaits_prompt_scores = request.sampling.prompt_logprobs

    def choices(self, row: Row) -> list[IndexedChoice]:
        """Return the tokens to choose or score for a row of the plan."""
        choices = self._prompt_choices(row)
        if row.is_last:
            choices += self._next_choices(row)
        return choices

    def process(self, row: Row, results: Many[Chosen], scheduler: Scheduler) -> list[Event]:
        """Process the results of a row once it is computed.

        Args:
            row: The computed row.
            results: One result for each of the row's `choices`.
            scheduler: The scheduler, to which sequences that begin or end are reported.

        Returns:
            The events to report.
        """
        events: list[Event] = []
        if self._awaits_prompt_scores:
            count = len(self._prompt_choices(row))
            events = self._process_prompt(row, results[:count])
            results = results[count:]
        if row.is_last:
            events += self._process_next(row, results, scheduler)
        return events

    @property
    def can_look_ahead(self) -> bool:
        """Whether the next step can be prepared before the current one has chosen a token."""
        return False

    def append_placeholder(self) -> None:
        """Append a placeholder for the token that the current step is choosing.

        The sequence ends with `UNKNOWN` until the token is known, unless that token completes the
        answer. Call this only if `can_look_ahead` is true.
        """
        raise AssertionError("a beam search waits for each round")

    @abstractmethod
    def finished(self) -> Finished:
        """Return the answer's final event, with the counts so far."""

    @abstractmethod
    def _next_choices(self, row: Row) -> list[IndexedChoice]:
        """Return the choices to make after the last known token."""

    @abstractmethod
    def _process_next(self, row: Row, results: Many[Chosen], scheduler: Scheduler) -> list[Event]:
        """Process the results of `_next_choices`, and return the events to report."""

    def _prompt_choices(self, row: Row) -> list[IndexedChoice]:
        """Return this row's prompt tokens to score. They are scored again after a preemption."""
        if not self._awaits_prompt_scores:
            return []
        prompt, tops = self.request.prompt, self.request.sampling.top_logprobs
        last = min(row.start + row.size, len(prompt) - 1)
        return [
            (
                position - row.start,
                Choice(target=prompt[position + 1], logprob=True, top_logprobs=tops),
            )
            for position in range(row.start, last)
        ]

    def _process_prompt(self, row: Row, results: Many[Chosen]) -> list[Event]:
        self._prompt_scores |= {row.start + i + 1: result for i, result in enumerate(results)}
        prompt = self.request.prompt
        if row.start + row.size < len(prompt):
            return []
        self._awaits_prompt_scores = False
        scores = [self._prompt_scores[position] for position in range(1, len(prompt))]
        tops = tuple(score.top for score in scores) if self.request.sampling.top_logprobs else ()
        return [Prompt(self.request.id, tuple(score.logprob for score in scores), tops)]


class PlainAnswer(Answer):
    """An answer with a single sequence, which gains one token per step, or more with drafts."""

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
            top_logprobs=sampling.top_logprobs,
        )
        if not self._choice.is_penalized:  # a draft would change the history of later drafts
            self._first.draft_limit = len(request.prompt) + sampling.max_new_tokens

    def finished(self) -> Finished:
        """Return the answer's final event, with the counts so far."""
        cached = self._first.cached
        return Finished(self.request.id, "stop", new_tokens=self._new_tokens, cached_tokens=cached)

    @property
    def can_look_ahead(self) -> bool:
        """Whether the next choice can be prepared before the token being computed is known."""
        depends = self._choice.is_penalized or self.request.sampling.banned_pairs
        return not self._awaits_prompt_scores and not depends

    def append_placeholder(self) -> None:
        """Append `UNKNOWN` for the token being computed, unless it is the last one."""
        if self._new_tokens + 1 < self.request.sampling.max_new_tokens:
            self._first.tokens.append(UNKNOWN)

    @property
    def _new_tokens(self) -> int:
        """Number of new tokens known so far."""
        tokens = self._first.tokens
        return len(tokens) - len(self.request.prompt) - (tokens[-1] == UNKNOWN)

    def _next_choices(self, row: Row) -> list[IndexedChoice]:
        sampling, choice = self.request.sampling, self._choice
        if not sampling.max_new_tokens:
            return []
        first = row.size - 1 - row.drafts
        if not choice.is_sampled and not sampling.banned_pairs:
            return [(offset, choice) for offset in range(first, row.size)]
        choices = []
        tokens = self._first.tokens
        index = len(tokens) - len(self.request.prompt)  # the new token's index, from 0
        for offset, last in enumerate((tokens[-1], *row.tokens[first + 1 :]), first):
            top_p = sampling.top_p
            if top_p and sampling.top_p_decay:
                decayed = top_p * sampling.top_p_decay**index
                top_p = max(decayed, min(sampling.top_p_bound, top_p), _SMALLEST_TOP_P)
            token_choice = choice._replace(
                top_p=top_p,
                uniform=uniform(self._seed, index),
                banned=_banned(sampling, last),
            )
            choices.append((offset, token_choice))
            index += 1
        return choices

    def _process_next(self, row: Row, results: Many[Chosen], scheduler: Scheduler) -> list[Event]:
        events: list[Event] = []
        sampling, tokens = self.request.sampling, self._first.tokens
        # If a draft differs from the chosen token, later choices are meaningless.
        drafts = (*row.tokens[row.size - row.drafts :], None)
        for chosen, draft in zip(results, drafts, strict=False):
            assert chosen.token is not None
            if tokens[-1] == UNKNOWN:
                tokens.pop()
            tokens.append(chosen.token)
            logprob = chosen.logprob if sampling.logprobs else None
            events.append(Token(self.request.id, chosen.token, logprob, chosen.top))
            if ends(sampling, tokens):
                return [*events, self.finished()]
            if chosen.token != draft:
                break
        if row.drafts:
            scheduler.drop_drafts(row.sequence)
        if self._new_tokens >= sampling.max_new_tokens:
            events.append(replace(self.finished(), reason="length"))
        return events


class _Hypothesis(NamedTuple):
    """A partial answer in a beam search: a beam, or a continuation of one.

    Attributes:
        sequence: Sequence of the beam, or of the beam that is continued.
        tokens: Tokens of the answer so far, without the prompt.
        logprobs: Log probability of each of these tokens.
        total: Sum of `logprobs`.
    """

    sequence: Sequence
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0


class BeamAnswer(Answer):
    """An answer with one sequence per beam. A round ends once all beams have been computed.

    Each round considers the most likely continuations of all beams. Among the best `beam_width` of
    them, those that end become answers; the best that do not end become the next beams. The search
    is over when every beam has reached the maximum length, or when `beam_width` answers are known
    and no beam's score, at its current length, beats the worst of them.
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        """Start with the prompt.

        Args:
            request: A request with beam search.
            vocab_size: Number of vocabulary entries that can be chosen.
        """
        super().__init__(request)
        sampling = request.sampling
        # Each beam can end with any stop token; `beam_width` other candidates are still needed.
        self._candidates = max(2, 1 + len(sampling.stop_tokens)) * sampling.beam_width
        self._top_logprobs = min(self._candidates, vocab_size)
        self._beams = [_Hypothesis(self._first)]
        self._continuations: dict[Sequence, TopLogprobs] = {}  # the results of this round so far
        self._answers: list[Beam] = []  # best first

    def finished(self) -> Finished:
        """Return the answer's final event, with the counts so far."""
        return Finished(
            self.request.id,
            "stop",
            new_tokens=len(self._answers[0].tokens) if self._answers else 0,
            cached_tokens=self._first.cached,
            beams=tuple(self._answers),
        )

    def _next_choices(self, row: Row) -> list[IndexedChoice]:
        banned = _banned(self.request.sampling, row.tokens[-1])
        return [(row.size - 1, Choice(top_logprobs=self._top_logprobs, banned=banned))]

    def _process_next(self, row: Row, results: Many[Chosen], scheduler: Scheduler) -> list[Event]:
        self._continuations[row.sequence] = results[0].top
        if len(self._continuations) < len(self.sequences):
            return []
        prompt = self.request.prompt
        beams = self._continue()
        self._continuations = {}
        if not beams:
            event = self.finished()
            is_complete = ends(self.request.sampling, prompt + event.beams[0].tokens)
            return [event if is_complete else replace(event, reason="length")]
        previous = self.sequences
        self.sequences, self._beams = [], []
        for beam in beams:
            sequence = beam.sequence
            # A beam's first continuation keeps its sequence; each additional one gets a fork.
            if sequence in self.sequences:
                sequence = scheduler.fork(sequence, [*prompt, *beam.tokens])
            else:
                sequence.tokens.append(beam.tokens[-1])
            self.sequences.append(sequence)
            self._beams.append(beam._replace(sequence=sequence))
        for sequence in previous:
            if sequence not in self.sequences:
                scheduler.remove(sequence)
        return []

    def _continue(self) -> list[_Hypothesis]:
        """Finish a round, and return the next round's beams, best first.

        Each returned beam still has the sequence of the beam that it continues. If the result is
        empty, the search is over.
        """
        sampling, answers = self.request.sampling, self._answers
        hypotheses = [
            _Hypothesis(
                beam.sequence,
                (*beam.tokens, token),
                (*beam.logprobs, logprob),
                beam.total + logprob,
            )
            for beam in self._beams
            for token, logprob in self._continuations[beam.sequence]
            if logprob > -math.inf  # not banned
        ]
        # The sort is stable: among equals, earlier beams come first.
        hypotheses.sort(key=lambda hypothesis: -hypothesis.total)
        beams = []
        for rank, hypothesis in enumerate(hypotheses[: self._candidates]):
            is_over = len(hypothesis.tokens) >= sampling.max_new_tokens
            if not is_over and not ends(sampling, self.request.prompt + hypothesis.tokens):
                beams.append(hypothesis)
            elif rank < sampling.beam_width:
                answers.append(
                    Beam(hypothesis.tokens, self._score(hypothesis), hypothesis.logprobs)
                )
                answers.sort(key=lambda beam: -beam.score)
                del answers[sampling.beam_width :]
        is_full = len(answers) == sampling.beam_width
        if is_full and beams and self._score(beams[0]) <= answers[-1].score:
            return []
        return beams[: sampling.beam_width]

    def _score(self, hypothesis: _Hypothesis) -> float:
        return hypothesis.total / len(hypothesis.tokens) ** self.request.sampling.length_penalty


def ends(sampling: Sampling, tokens: Many[int]) -> bool:
    """Return whether the last token completes the answer.

    Args:
        sampling: The request's stop tokens and stop sequences.
        tokens: Tokens of the prompt and the answer, which has at least one.
    """
    matches = (tuple(tokens[-len(stop) :]) == stop for stop in sampling.stop_sequences)
    return tokens[-1] in sampling.stop_tokens or any(matches)


def _banned(sampling: Sampling, last: int) -> tuple[int, ...]:
    return tuple(second for first, second in sampling.banned_pairs if first == last)
