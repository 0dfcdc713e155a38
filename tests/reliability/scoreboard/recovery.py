"""Rows 1, 14, 19, 34 and 35: restarts, verification, non-finite numbers, leaks, a soak test."""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.checkpoint.entries import Entry
from megatron.checkpoint.find import checkpoint_at
from megatron.checkpoint.loading import open_folder
from megatron.checkpoint.store import Snapshot, write_checkpoint
from megatron.errors import NumericsError
from megatron.parallel.layout import Layout
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.loop import standard_callbacks, train
from megatron.training.run import Run
from megatron.training.step import StepOutcome
from tests.checkpoint.states import meta_of
from tests.distributed import run_distributed
from tests.launch import run_ranks
from tests.reliability.processes import TOY
from tests.reliability.scoreboard.commands import run_training
from tests.reliability.scoreboard.score import Trials, expect
from tests.repository import ROOT, command_environment
from tests.training.toy import build_toy
from tools import chaos

_RECOVERY = 15.0  # seconds
_GOODPUT = 0.8
_BYTES_PER_SECOND = 1e9
_LAUNCHERS = ("torch.distributed.run", "megatron.processes.torchrun")
_DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
_LAYOUTS: tuple[tuple[str, ...], ...] = (
    (),
    ("--tensor-model-parallel-size", "2"),
    ("--use-distributed-optimizer",),
    ("--zero-stage", "3"),
)


def _command(
    folder: Path, processes: int, restarts: int, *flags: str, launcher: str = _LAUNCHERS[0]
) -> list[str]:
    """Return the toy's command under torchrun; it saves and resumes in `folder`."""
    save = str(folder / "save")
    start = ["-m", launcher, "--standalone", "--nproc-per-node", str(processes)]
    start += ["--max-restarts", str(restarts)]
    save_flags = ["--save", save, "--load", save, "--metrics-jsonl", str(folder / "metrics")]
    save_flags += ["--keep-latest", "2", "--distributed-timeout-minutes", "0.5", *_DROPOUT]
    return [sys.executable, *start, str(ROOT / "pretrain_gpt.py"), *TOY, *save_flags, *flags]


def _undisturbed(folder: Path, processes: int, *flags: str) -> tuple[Path, float]:
    """Return an undisturbed run's metrics, and the seconds that its steps took."""
    folder.mkdir()
    command = _command(folder, processes, 0, *flags)
    first = next(i for i, arg in enumerate(command) if arg.endswith("pretrain_gpt.py"))
    done = run_ranks(command[first:], command_environment(), processes, seconds=7200.0)
    expect(done.returncode == 0, f"the undisturbed run failed: {done.stdout[-500:]}")
    steps = chaos.steps_of(chaos.read_metrics(folder / "metrics"))
    return folder / "metrics", sum(seconds for _, _, seconds in steps)


def killed_ranks(folder: Path, count: int) -> Trials:
    """Try row 1: SIGKILL to a random rank at a random time, under torchrun and our launcher."""
    trials = Trials.with_seeds(count)
    flags = ("--train-iters", "300", "--save-interval", "20", "--log-interval", "100")
    reference, seconds = _undisturbed(folder / "calm", 2, *flags)
    slowest = [0.0, 0.0]
    for seed in range(count):
        inner, rng = folder / str(seed), random.Random(seed)
        inner.mkdir()
        with trials.trial(f"seed {seed}"):
            save, metrics = inner / "save", inner / "metrics"
            command = _command(inner, 2, 1, *flags, launcher=_LAUNCHERS[seed % 2])
            plan = chaos.Plan(command, ["kill"], 1.0, 0.0, save, inner / "out", starts=1)
            job, delay = _start_job(plan), rng.uniform(0.0, 0.7 * seconds)
            deadline = time.monotonic() + 120.0
            while not any("grad-norm" in line for line in chaos.read_metrics(metrics)):
                expect(time.monotonic() < deadline, "it did not begin to train")
                time.sleep(0.02)
            time.sleep(delay)
            fault = chaos.inject_fault("kill", job, save, rng)
            code, survivors = job.end()
            expect(fault is not None, "the run was over before the fault")
            outcome = chaos.Outcome([code], [fault] if fault else [], 1.0, survivors)
            problems, numbers = chaos.judge(save, metrics, outcome, reference)
            expect(not problems, "; ".join(problems))
            expect(numbers["restarts"] == 1, f"{numbers['restarts']} restarts")
            expect(numbers["most steps lost"] <= 20, f"{numbers['most steps lost']} steps lost")
            recovery = numbers["longest recovery (s)"]
            slowest[seed % 2] = max(slowest[seed % 2], recovery)
            expect(0.0 < recovery <= _RECOVERY, f"the next step came after {recovery:.1f} s")
    for launcher, seconds in zip(_LAUNCHERS, slowest, strict=True):
        trials.note(f"milliseconds to the next step at most, {launcher}", round(1000 * seconds))
    return trials


def _start_job(plan: chaos.Plan) -> chaos.Job:
    os.environ |= command_environment()
    return chaos.Job(plan)


def soaked(folder: Path, count: int) -> Trials:
    """Try row 35: about `count` minutes with a kill about every minute."""
    trials = Trials("seed 35")
    fast_save_flags = (
        "--non-persistent-save-interval",
        "25",
        "--non-persistent-ckpt-type",
        "local",
    )
    common = ("--save-interval", "500", "--log-interval", "1000")
    _, seconds = _undisturbed(folder / "probe", 4, *common, "--train-iters", "50")
    length = ("--train-iters", str(int(50 * 60.0 * count * _GOODPUT / seconds)))
    reference, _ = _undisturbed(folder / "calm", 4, *common, *length)
    inner = folder / "soak"
    inner.mkdir()
    local = (*fast_save_flags, "--non-persistent-local-ckpt-dir", str(inner / "fast"))
    command = _command(inner, 4, 10_000, *common, *length, *local, launcher=_LAUNCHERS[1])
    plan = chaos.Plan(command, ["kill"], 60.0, 120.0 * count, inner / "save", inner / "out")
    with trials.trial("soak"):
        os.environ |= command_environment()
        outcome = chaos.run_under_faults(plan, seed=35)
        problems, numbers = chaos.judge(inner / "save", inner / "metrics", outcome, reference)
        trials.note("kills", numbers["faults"])
        trials.note("iterations", int(length[1]))
        trials.note("goodput in percent", round(100 * numbers["goodput"]))
        trials.note("most steps lost", numbers["most steps lost"])
        expect(not problems, "; ".join(problems))
        expect(numbers["goodput"] >= _GOODPUT, f"goodput {numbers['goodput']:.1%}")
        # A kill may happen while the newest non-persistent checkpoint is written.
        expect(numbers["most steps lost"] <= 50, f"{numbers['most steps lost']} steps lost")
    return trials


def verification(folder: Path, count: int) -> Trials:
    """Try row 14: the CPU time for verifying half a gigabyte."""
    tensors = {f"model.{i}": Entry.whole(torch.full((16 << 20,), float(i))) for i in range(8)}
    size = sum(entry.tensor.nbytes for entry in tensors.values())
    snapshot = Snapshot.take(1, tensors, meta_of(1), Layout.single())
    checkpoint = checkpoint_at(write_checkpoint(folder, snapshot))
    assert checkpoint is not None
    trials, speeds = Trials(), []
    for number in range(count):
        with trials.trial(f"load {number}"):
            start = time.process_time()
            open_folder(checkpoint)
            speeds.append(size / (time.process_time() - start))
            expect(speeds[-1] >= _BYTES_PER_SECOND, f"{speeds[-1] / 1e9:.2f} GB/s")
    trials.note(f"MiB verified, at {min(speeds) / 1e9:.2f} GB/s per core or faster", size >> 20)
    return trials


def not_finite(folder: Path, count: int) -> Trials:
    """Try row 19: a NaN in the pass of one of two ranks, once and several times in a row."""
    trials = Trials.with_seeds(count)
    skip_flags = ("--on-nonfinite", "skip", "--max-nonfinite-skips", "2")
    for seed in range(count):
        inner, rng = folder / str(seed), random.Random(seed)
        inner.mkdir()
        layout, rank, step = rng.choice(_LAYOUTS), rng.randrange(2), rng.choice((2, 3))
        point = rng.choice(("forward", "backward"))
        with trials.trial(f"seed {seed}, {point} of rank {rank} at {step}, {' '.join(layout)}"):
            skipped = _train(inner / "calm", *layout, "--iterations-to-skip", str(step - 1))
            fault = ("--fault-inject", f"{point}:{rank}:{step}:nan")
            damaged = _train(inner / "nan", *layout, *skip_flags, *fault)
            for name, (code, output) in (("calm", skipped), ("nan", damaged)):
                expect(code == 0, f"{name}: {code}: {output[-300:]}")
            expect(_state_of(inner / "calm") == _state_of(inner / "nan"), "weights or moments")
            faults = [f"{point}:{rank}:{step + k}:nan" for k in range(3)]
            code, output = _train(inner / "many", *layout, *skip_flags, "--fault-inject", *faults)
            expect(code == NumericsError.exit_code, f"ended with {code}: {output[-300:]}")
            expect("3 such iterations in a row exceed" in output, output[-300:])
            expect(f"iteration {step + 2}: " in output, output[-300:])
    return trials


def _train(folder: Path, *flags: str, ranks: int = 2) -> tuple[int, str]:
    """Train six iterations and save the last; return the exit code and the output."""
    args = [str(ROOT / "pretrain_gpt.py"), *TOY, "--train-iters", "6", "--save-interval", "10000"]
    args += ["--save", str(folder), "--distributed-timeout-minutes", "1", *flags]
    done = run_ranks(args, command_environment(), ranks)
    return done.returncode, done.stdout


def _state_of(folder: Path) -> dict[str, bytes]:
    files = folder.glob("iter_*/*.safetensors")
    return {path.name: path.read_bytes() for path in sorted(files)}


class _Usage(Callback):
    """Records the process's open files and bytes of memory after each step."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int]] = []

    def after_step(self, run: Run, outcome: StepOutcome, leave: EarlyExit | None) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.samples.append((len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")))


def _saves(layout: Layout, flags: Sequence[str]) -> list[tuple[int, int]]:
    run, usage = build_toy(layout, flags), _Usage()
    callbacks, _ = standard_callbacks(run, [])
    train(run, [*callbacks, usage])
    return usage.samples


def leaks(folder: Path, count: int) -> Trials:
    """Try row 34: `count` starts, and a quarter as many saves in a single process."""
    trials, saves = Trials(), max(count // 4, 4)
    for number, flags in enumerate(((), ("--async-save",))):
        with trials.trial(f"{saves} saves {' '.join(flags)}"):
            save_flags = ["--save", str(folder / f"saves{number}"), "--save-interval", "1", *flags]
            save_flags += [
                "--keep-latest",
                "2",
                "--eval-iters",
                "0",
                "--train-iters",
                str(3 * saves),
            ]
            (usage,) = run_distributed(1, _saves, save_flags)
            (files, memory), (files_after, memory_after) = usage[saves], usage[-1]
            expect(files_after <= files, f"{files} open files became {files_after}")
            expect(memory_after <= 1.05 * memory, f"{memory:,} bytes became {memory_after:,}")
    trials.note("saves", 6 * saves)
    shared_before, open_files = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    earlier_children = _children()  # such as a server from which other tests fork
    save = ("--save", str(folder / "starts"), "--load", str(folder / "starts"))
    flags = (*save, "--save-interval", "1", "--keep-latest", "2", "--exit-interval", "1")
    for number in range(count):
        with trials.trial(f"start {number}"):
            data_flags = ("--num-workers", "1", "--train-iters", str(count + 1))
            result = run_training(folder / "out", *flags, *data_flags)
            expect(result.code == 0, f"ended with {result.code}: {result.output[-300:]}")
            left = _left_in_shared_memory(shared_before)
            expect(not left, f"left in /dev/shm: {left}")
            expect(len(os.listdir("/proc/self/fd")) <= open_files, "files stayed open")
            children = _children() - earlier_children
            expect(not children, f"processes kept running: {sorted(children)}")
    trials.note("starts", count)
    return trials


def _left_in_shared_memory(before: set[str]) -> list[str]:
    """Return PyTorch's new files in /dev/shm whose processes have ended.

    Programs that run at the same time have files there too, mostly for a moment.
    """
    deadline = time.monotonic() + 5.0
    while True:
        names = set(os.listdir("/dev/shm")) - before
        creators = {name: re.match(r"torch_(\d+)_", name) for name in names if "torch" in name}
        left = [n for n, pid in creators.items() if not pid or not Path("/proc", pid[1]).exists()]
        if not left or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.1)


def _children() -> set[str]:
    """Return the ids of this process's children."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
