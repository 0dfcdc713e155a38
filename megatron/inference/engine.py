"""The engine, which takes requests, runs steps and returns events.

It connects the scheduler, which plans steps, the executor, which computes them, and the answers,
which determine the tokens to choose. Every decision made here is the same on every rank.

On a GPU, a step is queued before the previous step's results are read, so that no GPU waits for
Python. The queued step's sequences then end with a token that only the GPU knows. If that token
ends an answer, the queued step's result for that answer is discarded.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.command import PanelRow
from megatron.inference.answers import Answer, BeamAnswer, PlainAnswer
from megatron.inference.executor import LogitsRequest, StepExecutor
from megatron.inference.request import (
    EngineLimits,
    Event,
    Finished,
    Reason,
    Request,
    RequestError,
    Stats,
    Token,
)
from megatron.inference.sampling import Chosen
from megatron.inference.scheduler import Scheduler, SchedulerSettings, StepPlan
from megatron.inference.speculation import Drafter

_TOTALS = (
    *("prompt_tokens", "cached_tokens", "new_tokens"),
    *("drafted_tokens", "accepted_tokens", "choosing_rows"),
)


class _StepInFlight(NamedTuple):
    """A step that has been queued, and whose results have not been read yet.

    Attributes:
        plan: The step's plan.
        counts: Number of results that each row of the plan will have.
        wait: Function that waits for the device and returns the results.
    """

    plan: StepPlan
    counts: list[int]
    wait: Callable[[], list[Chosen]]


@dataclass(eq=False)
class BatchEngine:
    """An engine whose steps are shared by all requests.

    All ranks make the same calls in the same order.

    Attributes:
        executor: Executor that runs the model.
        settings: Sizes of steps and of the cache.
        limits: Limits on the requests that `add` accepts.
        seed: Seed for requests that do not set one.
        looks_ahead: Whether to queue a step before the previous step's results are read.
        panel_rows: Names and descriptions of the implementations in use, for the start-up panel.
        drafter: The drafter of tokens for the next step; `None` for no drafts.
    """

    executor: StepExecutor
    settings: SchedulerSettings
    limits: EngineLimits
    seed: int
    looks_ahead: bool
    panel_rows: Sequence[PanelRow]
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        """Start without requests."""
        self._flight: _StepInFlight | None = None
        self._scheduler = Scheduler(self.settings)
        self._answers: dict[str, Answer] = {}
        # Beam searches run one at a time, because two could wait for each other's blocks.
        self._searches: deque[Answer] = deque()
        self._totals = dict.fromkeys(_TOTALS, 0)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._answers)

    @property
    def stats(self) -> Stats:
        """Statistics about requests, tokens and the cache."""
        pool = self._scheduler.pool
        running = len({sequence.request for sequence in self._scheduler.running})
        return Stats(
            running=running,
            waiting=len(self._answers) - running,
            blocks=pool.count,
            blocks_used=pool.count - pool.available,
            preempted=self._scheduler.preempted,
            **self._totals,
        )

    def add(self, request: Request) -> None:
        """Accept a request.

        Raises:
            RequestError: The engine cannot answer the request (`check`), or its id is in use. The
                engine is then unchanged.
        """
        if request.id in self._answers:
            raise RequestError(f"request id {request.id!r} is in use: choose another")
        check(request, self.limits, self.settings)
        self._totals["prompt_tokens"] += len(request.prompt)
        answer: Answer
        if request.sampling.beam_width > 1:
            answer = BeamAnswer(request, self.limits.vocab_size)
            self._searches.append(answer)
        else:
            seed = request.sampling.seed
            if seed is None:
                digest = hashlib.blake2b(f"{self.seed} {request.id}".encode(), digest_size=8)
                seed = int.from_bytes(digest.digest(), "little")
            answer = PlainAnswer(request, seed)
        self._answers[request.id] = answer
        if answer not in self._searches or len(self._searches) == 1:
            self._scheduler.add(*answer.sequences)

    def cancel(self, request: str) -> list[Event]:
        """End a request now, and return its last event. Do nothing if it has already ended.

        Args:
            request: Id of the request.
        """
        answer = self._answers.get(request)
        return [] if answer is None else [self._end_early(answer, "cancelled")]

    def abort(self, message: str) -> list[Event]:
        """End all requests with an error, and return their last events.

        Args:
            message: Message of the error.
        """
        return [self._end_early(answer, "error", message) for answer in [*self._answers.values()]]

    def step(self) -> list[Event]:
        """Compute the next tokens for the requests in the batch.

        Returns:
            The events to report. Each request's events are in order.
        """
        flight, self._flight = self._flight or self._begin_step(), None
        if flight is None:
            assert not self._answers, "requests are waiting, but none can proceed"
            return []
        # Drafts depend on the tokens that a step has chosen.
        if self.looks_ahead and self.drafter is None and self._can_plan_ahead(flight):
            self._flight = self._begin_step()
        events = self._finish_step(flight)
        if not self._answers:
            self._flight = None
        return events

    def _begin_step(self) -> _StepInFlight | None:
        """Plan a step and start it, or return `None` if there is nothing to do."""
        plan = self._scheduler.plan()
        if not plan:
            return None
        choices = [self._answers[row.sequence.request].choices(row) for row in plan]
        requests = [
            LogitsRequest(index, offset, choice)
            for index, row_choices in enumerate(choices)
            for offset, choice in row_choices
        ]
        wait = self.executor.begin(plan, requests)
        self._scheduler.mark_started(plan)
        return _StepInFlight(plan, [len(row_choices) for row_choices in choices], wait)

    def _can_plan_ahead(self, flight: _StepInFlight) -> bool:
        """Return whether the next step can be planned before this one's results are known.

        If so, append a placeholder to each sequence for the token that is being chosen.
        """
        answers = [
            self._answers[row.sequence.request]
            for row in flight.plan
            if row.is_last and not row.sequence.is_removed
        ]
        if not all(answer.can_look_ahead for answer in answers):
            return False
        for answer in answers:
            answer.append_placeholder()
        return True

    def _finish_step(self, flight: _StepInFlight) -> list[Event]:
        """Wait for a step, pass its results to the answers, and return the events to report."""
        chosen = iter(flight.wait())
        self._scheduler.mark_complete(flight.plan)
        events: list[Event] = [*self.executor.retrieved(flight.plan)]
        for row, count in zip(flight.plan, flight.counts, strict=True):
            results = [next(chosen) for _ in range(count)]
            if row.sequence.is_removed:
                continue
            answer = self._answers[row.sequence.request]
            if any(result.token is None for result in results):
                message = "the model's scores are not finite: check its weights and number format"
                events.append(self._end_early(answer, "error", message))
                continue
            answer_events = answer.process(row, results, self._scheduler)
            new = sum(isinstance(event, Token) for event in answer_events)
            self._totals["new_tokens"] += new
            self._totals["drafted_tokens"] += row.drafts
            self._totals["accepted_tokens"] += max(0, new - 1)
            self._totals["choosing_rows"] += bool(new)
            if answer_events and isinstance(answer_events[-1], Finished):
                self._end(answer, answer_events[-1])
            events += answer_events
        if self.drafter is not None:
            self.drafter.draft(flight.plan)
        return events

    def _end_early(self, answer: Answer, reason: Reason, message: str = "") -> Finished:
        event = replace(answer.finished(), reason=reason, message=message, beams=())
        self._end(answer, event)
        return event

    def _end(self, answer: Answer, event: Finished) -> None:
        """Remove an answer, count its tokens, free its blocks, and start the next beam search."""
        del self._answers[answer.request.id]
        self._totals["cached_tokens"] += event.cached_tokens
        if event.beams:
            self._totals["new_tokens"] += event.new_tokens
        is_started = answer not in self._searches or answer is self._searches[0]
        if is_started:
            for sequence in answer.sequences:
                self._scheduler.remove(sequence)
        if answer in self._searches:
            self._searches.remove(answer)
            if is_started and self._searches:
                self._scheduler.add(*self._searches[0].sequences)


def check(request: Request, limits: EngineLimits, settings: SchedulerSettings) -> None:
    """Check whether an engine can answer a request.

    Args:
        request: The request to check.
        limits: Limits of the engine.
        settings: Sizes of the engine's steps and cache.

    Raises:
        RequestError: The engine cannot answer the request. The message says why.
    """
    sampling, vocab = request.sampling, limits.vocab_size
    length = len(request.prompt) + sampling.max_new_tokens
    blocks = settings.blocks_for(length) * sampling.beam_width
    tokens = {*request.prompt, *(token for pair in sampling.banned_pairs for token in pair)}
    invalid = sorted(token for token in tokens if not 0 <= token < vocab)
    if invalid:
        raise RequestError(f"token id {invalid[0]} is outside the vocabulary (0 to {vocab - 1})")
    if length > limits.max_length:
        raise RequestError(
            f"prompt of {len(request.prompt)} tokens and max_new_tokens {sampling.max_new_tokens} "
            f"exceed the model's {limits.max_length} positions: shorten one of them"
        )
    if not 0 <= request.adapter <= limits.adapters:
        raise RequestError(
            f"adapter {request.adapter}: give 0 (the base model) to {limits.adapters}"
        )
    if sampling.beam_width > limits.max_beams:
        raise RequestError(
            f"beam_width {sampling.beam_width} exceeds the limit of {limits.max_beams} sequences: "
            f"give at most {limits.max_beams}"
        )
    if blocks > settings.blocks:
        raise RequestError(
            f"{sampling.beam_width} x {length} tokens do not fit in the cache of "
            f"{limits.cache_tokens}: request fewer, or start with a larger cache"
        )
    if sampling.beam_width > 1 and sampling.repetition_penalty != 1:
        raise RequestError(
            f"repetition_penalty {sampling.repetition_penalty} cannot be combined with beam "
            "search: give repetition_penalty 1, or beam_width 1"
        )
    if sampling.top_logprobs > vocab:
        raise RequestError(
            f"top_logprobs {sampling.top_logprobs} exceeds the vocabulary's {vocab} tokens: give "
            f"at most {vocab}"
        )
