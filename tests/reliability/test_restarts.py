"""torchrun restarts a run, which continues bit for bit; a crash loop ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.processes.crashes import FILE, CrashLog
from megatron.processes.watchdog import Verdict
from tests.launch import run_ranks
from tests.reliability.processes import environment, module, torchrun, wait_until

_LENGTH = ("--train-iters", "8", "--save-interval", "4")
_FAST = ("--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", "local")
_LOOP = "iteration 5 failed twice in the same way: "


def _flags(folder: Path, *flags: str) -> list[str]:
    save = folder / "checkpoints"
    metrics = ("--metrics-jsonl", str(folder / "metrics.jsonl"))
    save_flags = ("--save", str(save), "--load", str(save), *metrics, *_LENGTH, *flags)
    return module(*save_flags, "--distributed-timeout-minutes", "1")


def _losses(folder: Path) -> dict[int, tuple[float, float]]:
    """Return the last loss and gradient norm of each iteration."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {
        line["iteration"]: (line["lm loss"], line["grad-norm"])
        for line in lines
        if "lm loss" in line
    }


@pytest.mark.slow
def test_restarts_lose_nothing_and_skip_what_fails_twice(tmp_path: Path) -> None:
    faults = ("forward:1:3:kill", "backward:0:5:exception@1", "backward:0:5:exception@2")
    start = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    fast = tmp_path / "fast"
    flags = ["--on-crash-loop", "skip", "--fault-inject", *faults]
    flags += [*_FAST, "--non-persistent-local-ckpt-dir", str(fast)]
    with torchrun([*start, *_flags(tmp_path, *flags)], "none:0:0", tmp_path) as (process, output):
        assert process.wait(timeout=240) == 0, output.read_text()
    text = output.read_text()
    assert f"successfully loaded checkpoint from {fast}/iter_0000002 at iteration 2" in text
    assert text.count("checkpoints/iter_0000004 at iteration 4") == 2
    assert re.search(r"goodput: \d+\.\d% of the \d+ s since the run was first started", text)
    assert f"WARNING: {_LOOP}" in text
    assert "its samples are skipped from now on" in text
    assert "skipped iteration 5 of 8" in text
    assert json.loads((tmp_path / "checkpoints" / FILE).read_text())["skipped"] == [4]
    calm = tmp_path / "calm"
    calm.mkdir()
    words = _flags(calm, "--iterations-to-skip", "4")
    done = run_ranks(words, environment("none:0:0", tmp_path / "none"), 2)
    assert done.returncode == 0, done.stdout
    assert _losses(tmp_path) == _losses(calm)
    assert sorted(_losses(calm)) == [1, 2, 3, 4, 6, 7, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "code"), [("torch.distributed.run", 1), ("megatron.processes.torchrun", 11)]
)
def test_a_crash_loop_ends(launcher: str, code: int, tmp_path: Path) -> None:
    start = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "9"]
    words = [*start, *_flags(tmp_path, "--fault-inject", "backward:0:5:exception@all")]
    with torchrun(words, "none:0:0", tmp_path, launcher=launcher) as (process, output):
        assert process.wait(timeout=240) == code, output.read_text()
    text = output.read_text()
    assert text.count("fault injected at") == 2
    assert text.count(f"error: {_LOOP}") == 1
    assert "--on-crash-loop skip" in text


def test_a_run_that_its_scheduler_ends_is_not_restarted(tmp_path: Path) -> None:
    start = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "9"]
    words = [*start, *_flags(tmp_path, "--log-interval", "1"), "--train-iters", "100000"]
    name = "megatron.processes.torchrun"
    with torchrun(words, "none:0:0", tmp_path, launcher=name) as (process, output):
        wait_until(lambda: " iteration        2/" in output.read_text(), 240.0)
        process.terminate()
        assert process.wait(timeout=240) == 3, output.read_text()
    assert output.read_text().count("exiting program at iteration") == 1


def test_failures_are_recorded_until_a_person_starts_the_run(tmp_path: Path) -> None:
    log = CrashLog(tmp_path)
    killed = Verdict(1, 0, "rank 1 ended", 5, "rank 1")
    log.record(killed)
    assert log.loop() is None
    for other in (
        Verdict(1, 0, "rank 1 ended", 6, "rank 1"),
        Verdict(1, 0, "rank 2 ended", 5, "rank 2"),
        Verdict(7, 0, "not finite", 5),
    ):
        log.record(other)
        log.record(killed)
        assert log.loop() is None, other
    last = Verdict(1, 3, "rank 1 ended, said another", 5, "rank 1")
    log.record(last)
    assert log.loop() == last
    assert log.path.read_text().startswith('{\n "crashes": [\n  {\n   "code": 1,\n')
    log.record(Verdict(11, 0, "a crash loop", 0))
    assert log.loop() == last, "another restart would try again"
    assert log.skip(4)
    assert not log.skip(4)
    assert not log.skip(-1)
    assert log.skip(0)
    assert (log.loop(), log.skipped) == (None, [4, 0])
    log.record(killed)
    log.clear()
    log.record(killed)
    assert (log.loop(), log.skipped) == (None, [4, 0])
    log.path.write_text('{"crashes": [{"code": "x"}], "skipped": 3}')
    assert (log.loop(), log.skipped) == (None, [])
    for iteration in range(25):
        log.record(Verdict(1, 0, "ended", iteration))
    assert [one["iteration"] for one in json.loads(log.path.read_text())["crashes"]] == [
        *range(5, 25)
    ]
    log.disown()
    log.record(killed)
    other = CrashLog(tmp_path / "gone")
    other.record(killed)  # must not fail without a folder
    other.clear()
    assert (other.loop(), other.skipped) == (None, [])
    assert "rank 1" not in log.path.read_text()
