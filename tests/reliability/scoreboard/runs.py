"""Rows 5, 7, 12, 15, 27 and 28: repeated and resumed runs, waits, signals, jumping clocks."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.background import BackgroundSaver
from megatron.checkpoint.entries import Entry, flatten
from megatron.checkpoint.find import TRACKER
from megatron.checkpoint.retention import RetentionPolicy
from megatron.checkpoint.shard import memory_of
from megatron.device import Device
from megatron.errors import EXIT_SAVED_ON_SIGNAL
from megatron.parallel.layout import Layout
from megatron.training.checkpointing import state_of
from tests.distributed import run_distributed
from tests.reliability.scoreboard.commands import run_training, train_command
from tests.reliability.scoreboard.elastic import changing_machines
from tests.reliability.scoreboard.score import Trials, expect
from tests.training.toy import train_toy

_DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1".split()
_SIZES = {"tensor": "--tensor-model-parallel-size", "pipeline": "--pipeline-model-parallel-size"}


@dataclass(frozen=True)
class _Setup:
    """A layout, with flags for saving or sharding."""

    processes: int
    tensor: int = 1
    pipeline: int = 1
    flags: str = ""

    @property
    def name(self) -> str:
        return f"tp{self.tensor} pp{self.pipeline} of {self.processes} {self.flags}".strip()

    def train(self, *flags: str) -> list[tuple[list[float], str]]:
        """Return every rank's losses, and the digest of its final state."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline}
        args = [*_DROPOUT, "--eval-iters", "0", *self.flags.split(), *flags]
        for axis, size in sizes.items():
            args += [_SIZES[axis], str(size)]
        return run_distributed(self.processes, _train, args, **sizes)


_SETUPS = (
    _Setup(1),
    _Setup(1, flags="--async-save"),
    _Setup(1, flags="--bf16"),
    _Setup(1, flags="--fp16 --initial-loss-scale 1024"),
    _Setup(2, flags="--zero-stage 1 --async-save"),
    _Setup(2, flags="--zero-stage 3 --bf16"),
    _Setup(2, tensor=2, flags="--sequence-parallel"),
    _Setup(2, pipeline=2),
    _Setup(4, tensor=2, pipeline=2, flags="--async-save"),
    _Setup(2, tensor=2),
    _Setup(4, pipeline=2, flags="--zero-stage 1"),
    _Setup(2, flags="--zero-stage 2"),
)


def _train(layout: Layout, args: list[str]) -> tuple[list[float], str]:
    recorder, run = train_toy(layout, args)
    digest = hashlib.sha256(repr(run.progress).encode())
    for name, entry in flatten(state_of(run)):
        digest.update(f"{name} {entry.offset}".encode())
        digest.update(memory_of(entry.tensor))
    return recorder.values("lm loss"), digest.hexdigest()


def resumed_runs(folder: Path, count: int) -> Trials:
    """Try row 5: 40 iterations in one run, and 20 + 20 with a restart in between."""
    trials = Trials()
    for setup in _SETUPS[:count]:
        with trials.trial(setup.name):
            save = ["--save", str(folder / setup.name), "--save-interval", "20"]
            length = ["--train-iters", "40"]
            uninterrupted = setup.train(*length)
            first = setup.train(*length, *save, "--exit-interval", "20")
            second = setup.train(*length, "--load", str(folder / setup.name))
            for expected, first_half, second_half in zip(uninterrupted, first, second, strict=True):
                expect(first_half[0] + second_half[0] == expected[0], "the losses differ")
                expect(second_half[1] == expected[1], "the states differ")
    return trials


def fresh_runs(folder: Path, count: int) -> Trials:
    """Try row 28: the same run twice."""
    trials = Trials()
    for setup in _SETUPS[:count]:
        with trials.trial(setup.name):
            flags = ("--train-iters", "50", "--deterministic-mode")
            expect(setup.train(*flags) == setup.train(*flags), "losses or states differ")
    return trials


def _samples(layout: Layout, args: list[str]) -> None:
    train_toy(layout, args)


def sample_order(folder: Path, count: int) -> Trials:
    """Try row 7: what each iteration reads if the run continues with other numbers of processes."""
    common = "--global-batch-size 12 --train-iters 12 --eval-iters 0 --log-sample-ids".split()
    reference = folder / "whole"
    _samples(Layout.single(), [*common, "--save", str(reference), "--save-interval", "100"])
    expected = _read_samples(reference)
    trials = Trials()
    for order in itertools.islice(itertools.permutations((4, 2, 1, 3)), count):
        root = folder / "-".join(map(str, order))
        with trials.trial(root.name):
            for attempt, processes in enumerate(order, 1):
                args = [*common, "--save", str(root), "--load", str(root), "--save-interval", "3"]
                run_distributed(processes, _samples, [*args, "--exit-interval", str(3 * attempt)])
            actual = _read_samples(root)
            expect(len(actual) == len(expected) == 12, f"{len(actual)} iterations")
            expect(actual == expected, "other samples, or another order")
            all_samples = [sample for samples in actual.values() for sample in samples]
            expect(len(set(all_samples)) == len(all_samples) == 144, "samples repeated or skipped")
    changing_machines(folder, trials)
    return trials


def _read_samples(root: Path) -> dict[int, list[int]]:
    lines = (root / "samples.jsonl").read_text().splitlines()
    return {record["iteration"]: record["ids"] for record in map(json.loads, lines)}


def terminated(folder: Path, count: int) -> Trials:
    """Try row 15: SIGTERM at a random time gives a final checkpoint and a special exit code.

    It arrives in an iteration, an evaluation or a save, in the foreground or background.
    """
    trials, rng = Trials("seed 15"), random.Random(15)
    for number in range(count):
        root, flags = folder / str(number), ("--async-save",) if number % 2 else ()
        with trials.trial(f"time {number}, {' '.join(flags)}"):
            save_flags = ("--save", str(root), "--save-interval", "2", "--keep-latest", "2")
            save_flags += ("--train-iters", "100000", "--eval-iters", "2", "--eval-interval", "3")
            with train_command(folder / "out", *save_flags, *flags) as run:
                run.wait_for_output("iteration        1/")
                time.sleep(rng.uniform(0.0, 0.3))
                os.kill(run.pid, rng.choice((signal.SIGTERM, signal.SIGINT)))
                result = run.end()
            expect(result.code == EXIT_SAVED_ON_SIGNAL, f"ended with {result.code}")
            last = re.findall(r"iteration +(\d+)/", result.output)[-1]
            expect((root / TRACKER).read_text() == last, "not all iterations were saved")
            resume_flags = ("--load", str(root), "--exit-interval", "1", *save_flags[2:])
            after = run_training(folder / "out", *resume_flags).output
            expect(f"iteration {int(last) + 1:8d}/" in after, "did not go on behind the last")
    return trials


def jumping_clock(folder: Path, count: int) -> Trials:
    """Try row 27: the machine's clock jumps back and forth by an hour."""
    trials = Trials.with_seeds(count)
    flags = ("--save-interval-in-mins", "5", "--exit-duration-in-mins", "30")
    expected = _losses(run_training(folder / "out", "--save", str(folder / "a"), *flags).output)
    expect(len(expected) == 6, "the run without jumps failed")
    for number in range(count):
        with trials.trial(f"jump {number}"):
            save = ("--save", str(folder / f"b{number}"), *flags)
            result = run_training(folder / "out", *save, preexec=_jumps(number))
            expect(result.code == 0, f"ended with {result.code}")
            expect(_losses(result.output) == expected, "other losses")
            expect(result.output.count("successfully saved") == 1, "the jump was taken for time")
    return trials


def _jumps(number: int) -> Callable[[], None]:
    real_time, rng = time.time, random.Random(number)

    def patch() -> None:
        time.time = lambda: real_time() + rng.choice((-3600.0, 0.0, 3600.0))  # type: ignore[assignment]

    return patch


def _losses(text: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", text)


def waiting_time(folder: Path, count: int) -> Trials:
    """Try row 12: measure how long training waits for half a gigabyte."""
    tensors = {f"model.{i}": Entry.whole(torch.full((16 << 20,), float(i))) for i in range(8)}
    size = sum(entry.tensor.nbytes for entry in tensors.values())
    layout = Layout.single()
    saver = BackgroundSaver(
        folder,
        tensors,
        layout,
        layout,
        Device.cpu(),
        keep=RetentionPolicy(1),
        report=lambda *_: None,
    )
    trials, waits = Trials(), []
    for number in range(count):
        with trials.trial(f"save {number}"):
            start_time = time.perf_counter()
            saver.start(number, tensors, {}, since=start_time)
            waits.append(time.perf_counter() - start_time)
            saver.wait()
            expect(waits[-1] <= size / 1e9 + 0.1, f"{waits[-1]:.2f} s")
    trials.note(f"MiB per save, whose longest wait was {max(waits):.2f} s", size >> 20)
    return trials
