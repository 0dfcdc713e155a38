"""Faults described by --fault-inject, and their effects on a process."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron.config.reliability import Fault
from megatron.parallel.journal import Journal, Transfer
from megatron.processes import faults
from megatron.processes.faults import FaultyJournal, InjectedFaultError, attach_faults, flip_bit
from tests.reliability.scoreboard.commands import run_training


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("forward:1:20", "expected POINT:RANK:STEP:KIND, for example forward:1:20:kill"),
        ("forwards:0:2:kill", "expected POINT load, step, data, forward"),
        ("forward:0:2:kil", "got 'kil': did you mean kill?"),
        ("forward:x:2:kill", "expected a whole number as RANK, got 'x'"),
        ("forward:0:-2:kill", "expected a whole number as STEP, got '-2'"),
        ("save:0:2:nan", "nan works only at forward or backward, not at save"),
        ("load:0:2:kill", "STEP is 0 at load and counts from 1 elsewhere"),
        ("forward:0:0:kill", "STEP is 0 at load and counts from 1 elsewhere"),
        ("forward:0:2:nan=3", "nan does not take a duration: drop =3"),
        ("forward:0:2:kill@x", "expected KIND"),
        ("forward:0:2:kill=2x", "only slow takes a factor, which must be above 1, got 'kill=2x'"),
        ("forward:0:2:slow=1x", "only slow takes a factor, which must be above 1, got 'slow=1x'"),
    ],
)
def test_a_malformed_fault_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Fault.parse(text)


def test_a_fault_is_read() -> None:
    assert Fault.parse("save:3:20:kill=0.5@2") == Fault("save", 3, 20, "kill", 0.5, 2)
    assert Fault.parse("load:0:0:hang@all") == Fault("load", 0, 0, "hang", 0.0, None)
    assert Fault.parse("data:1:9:slow").seconds == 1.0
    assert Fault.parse("step:1:9:slow=2.5x") == Fault("step", 1, 9, "slow", factor=2.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["forward:0:2:kil"], "--fault-inject forward:0:2:kil: expected KIND"),
        (["forward:1:2:kill"], "--fault-inject forward:1:2:kill: there is no rank 1"),
        (
            ["forward:0:7:kill"],
            "--fault-inject forward:0:7:kill: the run ends after --train-iters 6",
        ),
        (["save:0:2:full"], "the run never reaches save without --save: add it"),
        (["load:0:0:kill"], "the run never reaches load without --load: add it"),
    ],
)
def test_a_fault_that_cannot_strike_is_refused(given: list[str], said: str, tmp_path: Path) -> None:
    words = [word for fault in given for word in ("--fault-inject", fault)]
    ended = run_training(tmp_path / "out", *words)
    assert ended.code == 9, ended.output
    assert said in ended.output


def _until(journal: FaultyJournal, steps: int, *operations: str) -> None:
    for step in range(1, steps + 1):
        journal.iteration = step
        for operation in operations:
            journal.enter(operation)


def test_a_fault_strikes_once_at_its_point() -> None:
    journal = FaultyJournal(None, [Fault.parse("optimizer:0:2:exception")])
    with pytest.raises(InjectedFaultError, match="optimizer:0:2:exception"):
        _until(journal, 3, "forward of micro-batch 0, chunk 0", "optimizer step")
    assert (journal.iteration, str(journal.position.operation)) == (2, "optimizer step")
    _until(journal, 3, "optimizer step")  # it does not fail again


_DONE = [
    (0, "loading of the checkpoint"),
    (1, "loading of micro-batch 0"),
    (1, "first forward pass"),
    (1, "backward of micro-batch 0, chunk 0"),
    (1, "all-reduce of the norm"),
    (1, "optimizer step"),
    (1, "saving a checkpoint"),
    (2, "first forward pass"),
    (2, "loading of micro-batch 1"),
    (2, "backward of micro-batch 1, chunk 0"),
    (2, "optimizer step"),
    (2, "saving a checkpoint"),
]


@pytest.mark.parametrize(
    ("fault", "strikes"),
    [
        ("load:0:0:exception", 0),
        ("step:0:1:exception", 1),
        ("data:0:1:exception", 1),
        ("forward:0:1:exception", 2),
        ("backward:0:1:exception", 3),
        ("optimizer:0:1:exception", 5),
        ("save:0:1:exception", 6),
        ("step:0:2:exception", 7),
        ("forward:0:2:exception", 7),
        ("data:0:2:exception", 8),
        ("save:0:2:exception", 11),
        ("save:0:3:exception", None),
    ],
)
def test_the_operation_at_which_a_fault_strikes(fault: str, strikes: int | None) -> None:
    journal = FaultyJournal(None, [Fault.parse(fault)])
    found = []
    for number, (step, operation) in enumerate(_DONE):
        journal.iteration = step
        try:
            journal.enter(operation)
        except InjectedFaultError:
            found.append(number)
    assert found == ([] if strikes is None else [strikes])


def test_faults_of_a_step_strike_once_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, slept = threading.Event(), list[float]()
    monkeypatch.setattr(faults, "_end", lambda kind: ended.set() if kind == "exit" else None)
    monkeypatch.setattr("megatron.processes.faults.time.sleep", slept.append)
    weight = nn.Linear(2, 2, bias=False)
    nn.init.ones_(weight.weight)
    words = ("step:0:2:slow=0.5", "step:0:3:hang", "step:0:2:flip", "step:0:1:exit=0.001")
    journal: Journal = FaultyJournal(None, [Fault.parse(text) for text in words])
    attach_faults(Journal(None), [weight])  # this journal has no faults
    attach_faults(journal, [weight, nn.Linear(1, 1)])
    changed = []
    for step in (1, 2, 3):
        journal.iteration = step
        for operation in ("forward of micro-batch 0, chunk 0", "optimizer step"):
            journal.enter(operation)
            changed.append(int((weight.weight != 1).sum()))
    assert ended.wait(30)  # after a moment, not at once
    assert changed == [0, 0, 1, 1, 1, 1]
    assert slept == [0.5, 0.5, 1e9]


def test_a_factor_of_a_step_is_of_all_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], list[float]()

    class Clock:
        monotonic = time = staticmethod(lambda: now[0])
        sleep = staticmethod(slept.append)

    monkeypatch.setattr("megatron.processes.faults.time", Clock)
    texts = ("step:0:2:slow=3x", "optimizer:0:2:slow=2x", "step:0:4:slow=1.5x")
    journal = FaultyJournal(None, [Fault.parse(text) for text in texts])
    for step in (1, 2, 3):
        journal.iteration = step
        for operation in ("forward of micro-batch 0, chunk 0", "optimizer step", "something else"):
            journal.enter(operation)
            now[0] += 1.0
    factors = [seconds for seconds in slept if seconds]
    assert factors == [2.0] * 4  # forward and update of two steps, each three times as long
    journal = FaultyJournal(None, [Fault.parse("forward:0:1:slow=1.5x")])
    journal.iteration = 1
    journal.enter("forward of micro-batch 0, chunk 0")
    now[0] += 1.0
    journal.enter("optimizer step")
    assert slept[-1] == 0.5


def test_all_outputs_of_a_training_module_are_damaged() -> None:
    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"a": (x * 1, [x * 2]), "b": torch.ones(1), "c": 5}

    part, x = Part(), torch.ones(1, requires_grad=True)
    journal = FaultyJournal(None, [Fault.parse("forward:0:1:spike")])
    journal.attach([part])
    journal.iteration = 1
    part.eval()
    assert part(x)["a"][0] == 1  # an evaluation
    part.train()
    (a, (b,)), c, number = part(x).values()
    assert [a.item(), b.item(), c.item(), number] == [1000, 2000, 1, 5]


def test_a_full_disk_takes_small_files_only(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        journal = FaultyJournal(None, [Fault.parse("save:0:1:full")])
        journal.iteration = 1
        journal.enter("saving a checkpoint")
        (tmp_path / "small").write_bytes(bytes(4096))
        try:
            (tmp_path / "large").write_bytes(bytes(4097))
        except OSError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0


def test_a_slow_rank_stays_slow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("megatron.processes.faults.time.sleep", slept.append)
    journal = FaultyJournal(None, [Fault.parse("forward:0:2:slow=0.05")])
    for step in range(1, 5):
        journal.iteration = step
        journal.enter("forward of micro-batch 0, chunk 0")
        with journal.inside("loading of micro-batch 0"):
            pass  # the process returns to the same pass
        assert slept == [0.05] * (step - 1)
    assert capsys.readouterr().err.count("fault injected at ") == 1


def test_a_factor_makes_work_longer_but_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    class Clock:
        monotonic = time = staticmethod(lambda: now[0])

        @staticmethod
        def sleep(seconds: float) -> None:
            slept.append(seconds)

    monkeypatch.setattr("megatron.processes.faults.time", Clock)
    journal = FaultyJournal(None, [Fault.parse("forward:0:2:slow=3x")])
    wait = Transfer(journal, "all-reduce", (0, 1), 1, None)
    for step in (1, 2):
        journal.iteration = step
        journal.enter("forward of micro-batch 0, chunk 0")
        now[0] += 1.0
        journal.begin_wait(wait)
        assert journal.waits_for is wait
        now[0] += 10.0
        journal.end_wait()
        assert journal.waits_for is None
        with journal.external_collective("all-gather", (0, 1)):
            now[0] += 20.0
        now[0] += 0.5
        journal.enter("backward of micro-batch 0, chunk 0")
        now[0] += 7.0
        journal.enter("optimizer step")
    assert slept[-1:] == [3.0]  # twice the 1.5 s of its own work
    assert slept.count(3.0) == 1


@pytest.mark.parametrize(
    ("fault", "is_damaged"),
    [
        ("forward:0:2:nan", lambda loss, gradient: loss.isnan() and gradient.isnan().all()),
        ("backward:0:2:nan", lambda loss, gradient: not loss.isnan() and gradient.isnan().all()),
        ("backward:0:2:spike", lambda loss, gradient: gradient.eq(1000.0).all()),
        ("forward:0:2:spike", lambda loss, gradient: loss == 6000.0 and gradient.eq(1000.0).all()),
        ("backward:0:2:flip", lambda loss, gradient: not torch.equal(gradient, torch.ones(2, 3))),
    ],
)
def test_numbers_are_damaged_in_one_step(
    fault: str, is_damaged: Callable[[torch.Tensor, torch.Tensor], bool]
) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self) -> torch.Tensor:
            return self.weight * 1.0

    part = Part()
    journal = FaultyJournal(None, [Fault.parse(fault)])
    journal.attach([part])
    found = []
    for step in (1, 2, 3):
        part.weight.grad, journal.iteration = None, step
        loss = part().sum()
        loss.backward()
        assert part.weight.grad is not None
        found.append(bool(is_damaged(loss.detach(), part.weight.grad)))
    assert found == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_bit_of_one_number_flips(dtype: torch.dtype) -> None:
    before = torch.ones(3, 3, dtype=dtype)
    after = before.clone()
    flip_bit(after)
    assert ((after != before).sum(), after.flatten()[4]) == (1, 1.5)


def test_a_nan_and_a_full_disk_end_a_run_with_their_codes(tmp_path: Path) -> None:
    ended = run_training(tmp_path / "out", "--fault-inject", "backward:0:3:nan")
    assert ended.code == 7, ended.output
    assert "iteration 3: " in ended.output
    save = ("--save", str(tmp_path / "save"), "--save-interval", "2")
    ended = run_training(tmp_path / "out", *save, "--fault-inject", "save:0:4:full")
    assert ended.code == 8, ended.output
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        ("kill", lambda status: os.WTERMSIG(status) == signal.SIGKILL),
        ("stop", os.WIFSTOPPED),
        ("exit", lambda status: os.waitstatus_to_exitcode(status) == 1),
    ],
)
def test_a_process_ends_as_its_fault_says(kind: str, ending: Callable[[int], bool]) -> None:
    child = os.fork()
    if child == 0:
        journal = FaultyJournal(None, [Fault.parse(f"forward:0:1:{kind}")])
        journal.iteration = 1
        journal.enter("forward of micro-batch 0, chunk 0")
        os._exit(77)  # not reached
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ending(status)
