"""The serving loop: the same decisions on every rank; failures end requests, not ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.inference.engine import BatchEngine
from megatron.inference.messages import Add, Cancel, Command, Shutdown
from megatron.inference.request import Event, Request, Sampling
from megatron.inference.worker import execute, serve
from megatron.parallel.layout import Layout
from tests.checkpoint.huggingface.models import VOCAB
from tests.distributed import run_distributed
from tests.inference.toy import drain, end_of, greedy, prompts, tokens_of, toy_engine, write_model


class Script:
    """An inbox with what arrives at each poll, and a record of the answers."""

    def __init__(self, arrivals: Sequence[Sequence[Command]]) -> None:
        self.arrivals = list(arrivals)
        self.events: dict[str, list[Event]] = {}
        self.waits: list[float] = []

    def poll(self, wait: float) -> list[Command]:
        self.waits.append(wait)
        if self.arrivals:
            return list(self.arrivals.pop(0))
        return [Shutdown()] if wait else []  # when nothing is left to do

    def send(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events.setdefault(event.request, []).append(event)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


REQUESTS = [
    Request(str(i), prompt, greedy(6))
    for i, prompt in enumerate(prompts(6, longest=10, vocab=VOCAB))
]
IMPOSSIBLE = Request("impossible", (1,), greedy(10_000))
ARRIVALS: list[list[Command]] = [
    [Add(REQUESTS[0]), Add(IMPOSSIBLE)],
    [],
    [Add(request) for request in REQUESTS[1:]],
    [Cancel("5"), Cancel("nobody")],
]


def _serve(layout: Layout, folder: Path) -> dict[str, list[Event]] | None:
    engine = toy_engine(folder, layout=layout)
    inbox = Script(ARRIVALS) if layout.world.rank == 0 else None
    serve(engine, inbox)
    assert not engine.has_work
    return None if inbox is None else inbox.events


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_commands_reach_every_rank_and_events_come_from_one(
    sizes: dict[str, int], folder: Path
) -> None:
    if sizes:
        found, nothing = run_distributed(2, _serve, folder, **sizes)
        assert nothing is None
    else:
        found = _serve(Layout.single(), folder)
    expected = drain(toy_engine(folder), REQUESTS)
    for key in "01234":
        assert tokens_of(found[key]) == tokens_of(expected[key])
        assert end_of(found[key]).reason == "length"
    assert end_of(found["5"]).reason == "cancelled"
    assert end_of(found["impossible"]).reason == "refused"
    assert "positions" in end_of(found["impossible"]).message
    assert "nobody" not in found


def test_an_idle_loop_waits_and_a_busy_one_does_not(folder: Path) -> None:
    inbox = Script([[], [Add(REQUESTS[0])]])
    serve(toy_engine(folder), inbox)
    assert inbox.waits[0] > 0
    assert inbox.waits[1] > 0
    assert inbox.waits[2:-1] == [0.0] * 5
    assert inbox.waits[-1] > 0


def test_shutting_down_ends_what_runs(folder: Path) -> None:
    inbox = Script([[Add(REQUESTS[0])], [Shutdown()]])
    serve(toy_engine(folder), inbox)
    assert end_of(inbox.events["0"]).reason == "error"
    assert "shutting down" in end_of(inbox.events["0"]).message


def test_a_step_that_fails_ends_its_requests_and_the_next_ones_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = toy_engine(folder)
    step, calls = engine.step, iter(range(100))

    def fails_once(self: BatchEngine) -> list[Event]:
        if next(calls) == 1:
            raise MemoryError("no room")
        return step()

    monkeypatch.setattr(BatchEngine, "step", fails_once)
    inbox = Script([[Add(REQUESTS[0])], [], [Add(REQUESTS[1])]])
    with caplog.at_level(logging.ERROR):
        serve(engine, inbox)
    assert end_of(inbox.events["0"]).message == "MemoryError: no room"
    assert end_of(inbox.events["1"]).reason == "length"
    assert engine.stats.blocks_used == 0
    assert "a step failed" in caplog.text


def test_scores_that_are_not_finite_end_the_request(folder: Path) -> None:
    engine = toy_engine(folder)
    (word,) = (
        parameter
        for name, parameter in engine.executor.model.named_parameters()
        if name == "embedding.word.weight"
    )
    word.data[7] = float("nan")
    sampling = Sampling(max_new_tokens=3, temperature=1.0, seed=1)
    found = drain(engine, [Request("sick", (1, 7), sampling), Request("well", (1, 2), greedy(3))])
    assert end_of(found["sick"]).reason == "error"
    assert "not finite" in end_of(found["sick"]).message
    assert end_of(found["well"]).reason == "length"
    assert execute(engine, Cancel("sick")) == []
