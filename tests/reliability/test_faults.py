"""A rank hangs, fails or dies: the others say so and end in time, with the documented code."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from megatron.processes.hang_files import hang_view
from tests.reliability.processes import (
    Outcome,
    children,
    module,
    run_ranks,
    torchrun,
    wait_until,
)

_TENSOR = ("--tensor-model-parallel-size", "2")
_TIMEOUT = 10.0  # seconds that a rank may keep others waiting: a busy machine may stop one for 4 s
_LATEST = _TIMEOUT + 60.0


def _limit(seconds: float) -> tuple[str, str]:
    return "--distributed-timeout-minutes", f"{seconds / 60:.4f}"


def _errors(outcomes: list[Outcome | None]) -> str:
    return "".join(outcome.errors for outcome in outcomes if outcome is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("stop", _TENSOR, "rank 3: no sign of life"),
        ("stop", ("--zero-stage", "3"), "for all-gather with ranks"),
        ("stop", ("--DDP-impl", "torch"), "for all-reduce with ranks"),
        ("sleep", ("--pipeline-model-parallel-size", "2"), "rank 3: alive in iteration 2, forward"),
        ("load", (), "rank 3: alive in iteration 2, loading of micro-batch 0"),
        ("skip", _TENSOR, "rank 3: waits in iteration 2, reduction of the losses"),
    ],
)
def test_a_hang_is_explained_and_ends(
    kind: str, flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    dumps = tmp_path / "dumps"
    path = ("--flight-recorder-dump-path", str(dumps))
    outcomes = run_ranks(4, f"{kind}:3:2", tmp_path, *flags, *path, *_limit(_TIMEOUT))
    assert (outcomes[3] is None) == (kind == "stop")
    for outcome in outcomes:
        if outcome is not None:
            assert outcome.code == 5, outcome.errors
            assert _TIMEOUT < outcome.seconds < _LATEST
    errors = _errors(outcomes)
    assert errors.count("error: hang in iteration 2") == 1, errors
    assert "rank 3 did not join the" in errors
    assert message in errors
    assert "Traceback" not in errors
    view = hang_view(dumps, stacks=True)
    assert view.splitlines()[0].partition(": ")[2] in errors
    rows = {line.split()[0]: line for line in view.splitlines()[2:6]}
    state = {"stop": " silent ", "skip": " waits "}.get(kind, " runs ")
    assert state in rows["3"]
    assert all(" waits " in rows[rank] for rank in "012")
    assert any("  rank 3  " in rows[rank] for rank in "012")  # missing
    assert view.count("  thread MainThread") >= 1
    (without_stacks,) = re.findall(r"^(.+):\n  no stacks were", view, re.MULTILINE) or [""]
    if kind == "stop":
        assert without_stacks
    else:
        assert not without_stacks.startswith("ranks")  # on a busy machine, one may be late


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("lose", 10, "[rank 1] error: a data loading process (pid "),
        ("mistake", 6, "[rank 1] error: --data-path corpus: sample 17 is damaged"),
        ("bug", 1, "[rank 1] error: this is a bug"),
        ("kill", 1, "rank 1 ended without reporting an error, in iteration 2"),
    ],
)
def test_an_error_is_reported_once(kind: str, code: int, message: str, tmp_path: Path) -> None:
    flags = ("--num-workers", "1") if kind == "lose" else _TENSOR
    outcomes = run_ranks(4, f"{kind}:1:2", tmp_path, *flags, *_limit(60.0))
    codes = [outcome and outcome.code for outcome in outcomes]
    assert codes == [code, -9 if kind == "kill" else code, code, code]
    errors = _errors(outcomes)
    assert errors.count("error: ") == 1, errors
    assert errors.count("Traceback") == (kind == "bug")
    assert message in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "seconds", "code"), [(signal.SIGKILL, 60.0, 1), (signal.SIGSTOP, _TIMEOUT, 5)]
)
def test_a_frozen_launcher_keeps_no_survivor(
    number: signal.Signals, seconds: float, code: int, tmp_path: Path
) -> None:
    """A killed rank breaks connections at once; a stopped one is noticed after the limit."""
    length = ("--train-iters", "1000000")
    words = ["--standalone", "--nproc-per-node", "2", *module(*_limit(seconds), *length)]
    with torchrun(words, "none:0:0", tmp_path) as (process, output):
        wait_until(lambda: "iteration        3/" in output.read_text(), 120.0)
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(process.pid, signal.SIGSTOP)
        victim, survivor = ranks if number == signal.SIGKILL else reversed(ranks)
        os.kill(victim, number)
        wait_until(lambda: survivor not in children(process.pid), _LATEST)
        status = int(Path(f"/proc/{survivor}/stat").read_text().split()[-1])
        os.kill(victim, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(status) == code, output.read_text()
        assert "error: " in output.read_text()
