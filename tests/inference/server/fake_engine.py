"""An engine that repeats the prompt, so every answer is known in advance."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from megatron.inference.request import (
    Beam,
    EngineLimits,
    Event,
    Finished,
    NeighborPassage,
    Prompt,
    Request,
    RequestError,
    Retrieved,
    Stats,
    Token,
)
from megatron.parallel.layout import Layout


def logprob_of(token: int) -> float:
    """Return the fake engine's log-probability for a token, the same at every position."""
    return -(token % 16) / 8


@dataclass
class _Running:
    request: Request
    made: list[int] = field(default_factory=list)


class FakeEngine:
    """An engine that repeats the prompt's tokens until a stop token or sequence, or the limit.

    Attributes:
        places: The number of sequences in a batch; further ones wait.
        seconds: The time that a step takes.
        fails: The prompt whose steps raise an error, if any.
        passages: What a Retro model would read before the first two tokens.
        seen: All accepted requests, in order.
    """

    def __init__(
        self, *, vocab_size: int = 400, max_length: int = 256, places: int = 4, seconds: float = 0
    ) -> None:
        # What the serving loop needs from an engine's executor.
        device = SimpleNamespace(torch_device=torch.device("cpu"))
        self.executor = SimpleNamespace(replica=Layout.single().world, device=device)
        self.limits = EngineLimits(vocab_size, max_length, cache_tokens=100_000, max_beams=8)
        self.places = places
        self.seconds = seconds
        self.fails: tuple[int, ...] | None = None
        self.passages: tuple[NeighborPassage, ...] = ()
        self.seen: list[Request] = []
        self._all: dict[str, _Running] = {}
        self._new_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._all)

    @property
    def stats(self) -> Stats:
        running = min(self.places, len(self._all))
        return Stats(running=running, waiting=len(self._all) - running, new_tokens=self._new_tokens)

    def add(self, request: Request) -> None:
        if len(request.prompt) + request.sampling.max_new_tokens > self.limits.max_length:
            raise RequestError("too long")
        self.seen.append(request)
        self._all[request.id] = _Running(request)

    def cancel(self, request: str) -> list[Event]:
        if self._all.pop(request, None) is None:
            return []
        return [Finished(request, "cancelled")]

    def abort(self, message: str) -> list[Event]:
        names = list(self._all)
        self._all.clear()
        return [Finished(name, "error", message) for name in names]

    def step(self) -> list[Event]:
        time.sleep(self.seconds)
        events: list[Event] = []
        for running in list(self._all.values())[: self.places]:
            if running.request.prompt == self.fails:
                raise ValueError("a fault for the test")
            events += self._advance(running)
        return events

    def _advance(self, running: _Running) -> list[Event]:
        request, sampling, made = running.request, running.request.sampling, running.made
        if sampling.beam_width > 1:
            return [self._finish(running, "length", self._beams(request))]
        events: list[Event] = []
        if not made and sampling.prompt_logprobs:
            scores = tuple(logprob_of(token) for token in request.prompt[1:])
            events.append(Prompt(request.id, scores))
        if sampling.max_new_tokens == 0:
            return [*events, self._finish(running, "length")]
        if self.passages and len(made) < 2:  # the rest before the second
            half = self.passages[len(made) :: 2]
            events.append(Retrieved(request.id, half))
        token = request.prompt[len(made) % len(request.prompt)]
        made.append(token)
        self._new_tokens += 1
        top = tuple((other, logprob_of(other)) for other in range(40, 40 + sampling.top_logprobs))
        logprob = logprob_of(token) if sampling.logprobs else None
        events.append(Token(request.id, token, logprob, top))
        last = (*request.prompt[-1:], *made)
        ends = any(last[-len(each) :] == each for each in sampling.stop_sequences)
        if token in sampling.stop_tokens or ends:
            events.append(self._finish(running, "stop"))
        elif len(made) == sampling.max_new_tokens:
            events.append(self._finish(running, "length"))
        return events

    def _beams(self, request: Request) -> tuple[Beam, ...]:
        tokens = request.prompt[: request.sampling.max_new_tokens]
        logprobs = tuple(logprob_of(token) for token in tokens)
        return tuple(
            Beam(tokens, -float(rank), logprobs) for rank in range(request.sampling.beam_width)
        )

    def _finish(self, running: _Running, reason: str, beams: tuple[Beam, ...] = ()) -> Finished:
        del self._all[running.request.id]
        return Finished(
            running.request.id,
            reason,
            new_tokens=len(running.made),
            beams=beams,  # type: ignore[arg-type]
        )
