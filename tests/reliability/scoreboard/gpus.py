"""Rows 13 and 44: saves and restarts of a model of 1.3 billion parameters on GPUs.

A checkpoint takes 24.8 GB, and two are kept for a moment: the temporary folder (TMPDIR) needs room.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron.device import Device, gpu_count
from tests.reliability.scoreboard.score import Trials, expect
from tests.repository import ROOT, command_environment
from tools import chaos
from tools.bench.workloads import PRECISIONS, WORKLOADS

_SHARE = 0.98  # of the speed without saves
_RECOVERY = 30.0  # seconds
_LIMIT = 300.0  # seconds
_INTERVAL = 50  # iterations between saves


def _command(folder: Path, *flags: str, restarts: int = 0) -> list[str]:
    """Return the command that trains S on all GPUs, under the project's launcher."""
    gpus, workload = gpu_count(), WORKLOADS["S"]
    start = ["-m", "megatron.processes.torchrun", "--standalone", "--nproc-per-node", str(gpus)]
    start += ["--max-restarts", str(restarts)]
    batch = ["--micro-batch-size", str(workload.micro_batch), "--global-batch-size"]
    batch += [str(gpus * workload.samples_per_gpu)]
    data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--lr", "1e-4", "--eval-iters", "0"]
    data += ["--vocab-size", str(workload.vocabulary - 1), "--log-interval", "10"]
    network = [*workload.network.split(), *PRECISIONS["bf16"], "--use-distributed-optimizer"]
    metrics = ["--metrics-jsonl", str(folder / "metrics")]
    script = str(ROOT / "pretrain_gpt.py")
    return [sys.executable, *start, script, *network, *batch, *data, *metrics, *flags]


def _job(folder: Path, command: Sequence[str]) -> chaos.Job:
    os.environ["PYTHONPATH"] = command_environment()["PYTHONPATH"]
    return chaos.Job(chaos.Plan(command, ["kill"], 1.0, 0.0, folder / "save", folder / "out"))


def _steps(folder: Path) -> list[tuple[int, float]]:
    """Return the iterations so far, repeated ones too, and when each ended (since 1970)."""
    lines = chaos.read_metrics(folder / "metrics")
    return [(line["iteration"], line["time"]) for line in lines if "grad-norm" in line]


def saving_throughput(folder: Path, count: int) -> Trials:
    """Try row 13: the time of 50 iterations and a save, compared with 50 iterations alone."""
    trials, times = Trials(), []
    length = ("--train-iters", str(_INTERVAL * (count + 1) + 1))
    saves = ("--save-interval", str(_INTERVAL), "--async-save", "--keep-latest", "1")
    for name, save_flags in (("alone", ()), ("saves", saves)):
        inner = folder / name
        inner.mkdir()
        save_folder = ("--save", str(inner / "save")) if save_flags else ()
        code, _ = _job(inner, _command(inner, *length, *save_folder, *save_flags)).end()
        last = (inner / "out").read_text(encoding="utf-8")[-500:]
        expect(code == 0, f"the run {name} ended with {code}: {last}")
        times.append(dict(_steps(inner)))
    for number in range(1, count + 1):
        # From the end of a step to that of another, with the copy of the weights in between.
        first, last = _INTERVAL * number - 1, _INTERVAL * (number + 1) - 1
        alone, saving = (ends[last] - ends[first] for ends in times)
        with trials.trial(f"save {number}"):
            trials.note("milliseconds of training alone", round(1000 * alone))
            trials.note("milliseconds with saves", round(1000 * saving))
            expect(saving <= alone / _SHARE, f"{saving:.2f} s instead of {alone:.2f} s")
    trials.note(f"{Device.pick().name}s", gpu_count())
    return trials


def restarts_on_gpus(folder: Path, count: int) -> Trials:
    """Try row 44: SIGKILL to a random rank at a random time after a save."""
    trials, rng, recoveries = Trials("seed 44"), random.Random(44), [0.0]
    save = str(folder / "save")
    flags = ("--save", save, "--load", save, "--keep-latest", "1")
    flags += ("--train-iters", "100000", "--save-interval", str(_INTERVAL))
    job = _job(folder, _command(folder, *flags, restarts=count))
    try:
        for i in range(count):
            _wait_for_step(folder, job, len(_steps(folder)) + _INTERVAL + 4)
            time.sleep(rng.uniform(0.0, 3.0))
            with trials.trial(f"kill {i}"):
                fault = chaos.inject_fault("kill", job, folder / "save", rng)
                if fault is None:
                    raise AssertionError("there was no rank to kill")
                time.sleep(1.0)  # the step in flight may still end
                next_step = _wait_for_step(folder, job, len(_steps(folder)) + 1)
                recoveries.append(next_step - fault.time)
                expect(recoveries[-1] <= _RECOVERY, f"the next step: {recoveries[-1]:.1f} s later")
    finally:
        for pid in job.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.end()
    with trials.trial("steps lost"):
        lost_steps = chaos.lost_steps(chaos.read_metrics(folder / "metrics"))
        expect(
            len(lost_steps) == count and max(lost_steps) <= _INTERVAL, f"steps lost: {lost_steps}"
        )
    trials.note("milliseconds to the next step at most", round(1000 * max(recoveries)))
    trials.note(f"{Device.pick().name}s", gpu_count())
    return trials


def _wait_for_step(folder: Path, job: chaos.Job, count: int) -> float:
    """Return when step `count` of all attempts, from 1, ended (since 1970)."""
    deadline = time.monotonic() + _LIMIT
    while len(steps := _steps(folder)) < count:
        output = (folder / "out").read_text(encoding="utf-8", errors="replace")[-500:]
        expect(job.process.poll() is None, f"the run ended: {output}")
        expect(time.monotonic() < deadline, f"no step {count} in {_LIMIT:.0f} s: {output}")
        time.sleep(0.1)
    return steps[count - 1][1]
