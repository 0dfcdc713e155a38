"""Rows 5, 7, 15, 27 and 28: repeated and resumed runs, signals, and jumping clocks."""

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
class _Way:
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
        words = [*_DROPOUT, "--eval-iters", "0", *self.flags.split(), *flags]
        for axis, size in sizes.items():
            words += [_SIZES[axis], str(size)]
        return run_distributed(self.processes, _train, words, **sizes)


_WAYS = (
    _Way(1),
    _Way(1, flags="--async-save"),
    _Way(1, flags="--bf16"),
    _Way(1, flags="--fp16 --initial-loss-scale 1024"),
    _Way(2, flags="--zero-stage 1 --async-save"),
    _Way(2, flags="--zero-stage 3 --bf16"),
    _Way(2, tensor=2, flags="--sequence-parallel"),
    _Way(2, pipeline=2),
    _Way(4, tensor=2, pipeline=2, flags="--async-save"),
    _Way(2, tensor=2),
    _Way(4, pipeline=2, flags="--zero-stage 1"),
    _Way(2, flags="--zero-stage 2"),
)


def _train(layout: Layout, words: list[str]) -> tuple[list[float], str]:
    recorder, run = train_toy(layout, words)
    digest = hashlib.sha256(repr(run.progress).encode())
    for name, entry in flatten(state_of(run)):
        digest.update(f"{name} {entry.offset}".encode())
        digest.update(memory_of(entry.tensor))
    return recorder.values("lm loss"), digest.hexdigest()


def resumed_runs(folder: Path, count: int) -> Trials:
    """Try row 5: 40 iterations in one run, and 20 + 20 with a restart in between."""
    trials = Trials()
    for way in _WAYS[:count]:
        with trials.trial(way.name):
            save = ["--save", str(folder / way.name), "--save-interval", "20"]
            length = ["--train-iters", "40"]
            straight = way.train(*length)
            first = way.train(*length, *save, "--exit-interval", "20")
            second = way.train(*length, "--load", str(folder / way.name))
            for whole, begun, ended in zip(straight, first, second, strict=True):
                expect(begun[0] + ended[0] == whole[0], "the losses differ")
                expect(ended[1] == whole[1], "the states differ")
    return trials


def fresh_runs(folder: Path, count: int) -> Trials:
    """Try row 28: the same run twice."""
    trials = Trials()
    for way in _WAYS[:count]:
        with trials.trial(way.name):
            flags = ("--train-iters", "50", "--deterministic-mode")
            expect(way.train(*flags) == way.train(*flags), "losses or states differ")
    return trials


def _samples(layout: Layout, words: list[str]) -> None:
    train_toy(layout, words)


def sample_order(folder: Path, count: int) -> Trials:
    """Try row 7: what each iteration reads if the run continues with other numbers of processes."""
    common = "--global-batch-size 12 --train-iters 12 --eval-iters 0 --log-sample-ids".split()
    whole = folder / "whole"
    _samples(Layout.single(), [*common, "--save", str(whole), "--save-interval", "100"])
    expected = _read_samples(whole)
    trials = Trials()
    for order in itertools.islice(itertools.permutations((4, 2, 1, 3)), count):
        root = folder / "-".join(map(str, order))
        with trials.trial(root.name):
            for leg, processes in enumerate(order, 1):
                words = [*common, "--save", str(root), "--load", str(root), "--save-interval", "3"]
                run_distributed(processes, _samples, [*words, "--exit-interval", str(3 * leg)])
            got = _read_samples(root)
            expect(len(got) == len(expected) == 12, f"{len(got)} iterations")
            expect(got == expected, "other samples, or another order")
            every = [sample for samples in got.values() for sample in samples]
            expect(len(set(every)) == len(every) == 144, "samples repeated or skipped")
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
            words = ("--save", str(root), "--save-interval", "2", "--keep-latest", "2")
            words += ("--train-iters", "100000", "--eval-iters", "2", "--eval-interval", "3")
            with train_command(folder / "out", *words, *flags) as run:
                run.until("iteration        1/")
                time.sleep(rng.uniform(0.0, 0.3))
                os.kill(run.pid, rng.choice((signal.SIGTERM, signal.SIGINT)))
                ended = run.end()
            expect(ended.code == EXIT_SAVED_ON_SIGNAL, f"ended with {ended.code}")
            last = re.findall(r"iteration +(\d+)/", ended.output)[-1]
            expect((root / TRACKER).read_text() == last, "not all iterations were saved")
            again = ("--load", str(root), "--exit-interval", "1", *words[2:])
            after = run_training(folder / "out", *again).output
            expect(f"iteration {int(last) + 1:8d}/" in after, "did not go on behind the last")
    return trials


def jumping_clock(folder: Path, count: int) -> Trials:
    """Try row 27: the machine's clock jumps back and forth by an hour."""
    trials = Trials.with_seeds(count)
    words = ("--save-interval-in-mins", "5", "--exit-duration-in-mins", "30")
    expected = _losses(run_training(folder / "out", "--save", str(folder / "a"), *words).output)
    expect(len(expected) == 6, "the run without jumps failed")
    for number in range(count):
        with trials.trial(f"jump {number}"):
            save = ("--save", str(folder / f"b{number}"), *words)
            ended = run_training(folder / "out", *save, before=_jumps(number))
            expect(ended.code == 0, f"ended with {ended.code}")
            expect(_losses(ended.output) == expected, "other losses")
            expect(ended.output.count("successfully saved") == 1, "the jump was taken for time")
    return trials


def _jumps(number: int) -> Callable[[], None]:
    plain, rng = time.time, random.Random(number)

    def patch() -> None:
        time.time = lambda: plain() + rng.choice((-3600.0, 0.0, 3600.0))  # type: ignore[assignment]

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
    trials, waited = Trials(), []
    for number in range(count):
        with trials.trial(f"save {number}"):
            waited.append(saver.start(number, tensors, {}, since=time.perf_counter()))
            saver.wait()
            expect(waited[-1] <= size / 1e9 + 0.1, f"{waited[-1]:.2f} s")
    trials.note(f"MiB per save, whose longest wait was {max(waited):.2f} s", size >> 20)
    return trials
