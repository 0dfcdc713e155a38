"""Rows 2, 3 and 4: processes are killed while they save."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.background import BackgroundSaver
from megatron.checkpoint.entries import Entry, State, flatten
from megatron.checkpoint.find import TRACKER, read_tracker
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.reader import NativeReader
from megatron.checkpoint.retention import RetentionPolicy
from megatron.checkpoint.store import Snapshot, write_checkpoint
from megatron.device import Device
from megatron.parallel.layout import Layout
from tests.checkpoint.killing import assert_recovers, kill_at, run_forked
from tests.checkpoint.states import assert_holds, make_state, meta_of, save, save_state
from tests.reliability.scoreboard.score import Trials, expect

_RANKS = 2
_HIDDEN = 128  # a megabyte per rank
# A rank notices at once that a connected peer was killed, but waits this long for a peer that it
# has not connected to yet.
_TIMEOUT = timedelta(seconds=10)
_EXIT_SECONDS = 120.0  # seconds within which the rest of a killed job must end


def _state_of(iteration: int, rank: int) -> State:
    """Return a tensor that both ranks hold, and tensors that only this rank holds."""
    local = make_state(iteration * _RANKS + rank, _HIDDEN)
    shared = {"model.copy": Entry.whole(torch.full((1000,), float(iteration)))}
    return shared | {f"{name}.{rank}": entry for name, entry in local.items()}


def _whole_state(iteration: int) -> State:
    return _state_of(iteration, 0) | _state_of(iteration, 1)


def _save_on_and_on(rank: int, store: Path, root: Path, background: bool, ready_pipe: int) -> None:
    """Run one rank of a job that saves iterations 2, 3 ... until it is killed."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=_RANKS, timeout=_TIMEOUT
    )
    layout, device = Layout.at(rank, _RANKS).connect("cpu"), Device.cpu()
    saver: BackgroundSaver | None = None
    if background:
        state = _state_of(1, rank)
        beside = layout.for_thread(_TIMEOUT)
        saver = BackgroundSaver(
            root, state, layout, beside, device, keep=RetentionPolicy(3), report=lambda *_: None
        )
    os.write(ready_pipe, b"x")
    for iteration in itertools.count(2):
        state, meta = _state_of(iteration, rank), meta_of(iteration)
        if saver is None:
            save(root, iteration, state, meta, layout)
            continue
        saver.wait()
        saver.start(iteration, state, meta, since=time.perf_counter())
        for _, entry in flatten(state):
            entry.tensor.zero_()  # training continues


class _Job:
    """Forks ranks that save endlessly."""

    def __init__(self, folder: Path, root: Path, background: bool) -> None:
        receive, send = os.pipe()
        self.pids = [self._fork(rank, folder, root, background, send) for rank in range(_RANKS)]
        os.close(send)
        for _ in self.pids:
            expect(select.select([receive], [], [], _EXIT_SECONDS)[0], "the job did not start")
            expect(os.read(receive, 1), "a rank failed before it was killed")
        os.close(receive)

    def _fork(self, rank: int, folder: Path, root: Path, background: bool, ready: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the survivor's complaints
                _save_on_and_on(rank, folder / "store", root, background, ready)
            finally:
                os._exit(3)
        return pid

    def end(self) -> list[int]:
        """Return exit codes. Raises AssertionError if a rank does not notice the other's death."""
        deadline, codes = time.monotonic() + _EXIT_SECONDS, {}
        while len(codes) < len(self.pids) and time.monotonic() < deadline:
            for pid in self.pids:
                if pid not in codes and (waited := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(waited[1])
            time.sleep(0.002)
        survivors = [pid for pid in self.pids if pid not in codes]
        for pid in survivors:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        expect(not survivors, "a rank went on after the other was killed")
        return [codes[pid] for pid in self.pids]


def _watch(root: Path, seconds: float) -> int:
    """Check every millisecond that the tracker names a sound checkpoint; return how often."""
    reads, previous, deadline = 0, None, time.monotonic() + seconds
    while time.monotonic() < deadline:
        name, problem = read_tracker(root)
        expect(problem is None, f"the tracker was torn: {problem}")
        reads += 1
        if name != previous and name is not None:
            with contextlib.suppress(FileNotFoundError):  # --keep-latest may remove old ones
                expect((root / name / MANIFEST).exists() or _is_old(root, name), f"no {name}")
                if (root / name / MANIFEST).exists():
                    NativeReader(root / name).verify()
            previous = name
        time.sleep(0.001)
    return reads


def _is_old(root: Path, name: str) -> bool:
    current, _ = read_tracker(root)
    return current is not None and current > name


def _kill_one(folder: Path, background: bool, rng: random.Random, trials: Trials) -> None:
    root = folder / "checkpoints"
    layout = Layout.single()
    save(root, 1, _whole_state(1), {"iteration": 1}, layout)
    job = _Job(folder, root, background)
    seconds, victim = rng.uniform(0.0, 0.15), rng.randrange(_RANKS)
    try:
        if background:
            trials.note("reads of the tracker", _watch(root, seconds))
        else:
            time.sleep(seconds)
    finally:
        os.kill(job.pids[victim], signal.SIGKILL)
        codes = job.end()
    expect(codes[victim] == -signal.SIGKILL, f"the victim ended with {codes[victim]}")
    expect(codes[1 - victim] == 3, f"the survivor ended with {codes[1 - victim]}")
    if any(".tmp-" in path.name for path in root.iterdir()):
        trials.note("left temporary files")
    newest = int((root / TRACKER).read_text())
    reader = open_checkpoint(root)
    expect(reader is not None and reader.iteration >= newest, "an older one was loaded")
    assert reader is not None
    expect(reader.meta == meta_of(reader.iteration), "mixed with another's meta")
    assert_holds(reader, _whole_state(reader.iteration))
    del reader
    save(root, 100_000, _whole_state(7), {"iteration": 100_000}, layout)
    leftovers = [
        path.name for path in root.iterdir() if ".tmp-" in path.name or ".old-" in path.name
    ]
    expect(not leftovers, f"the next save left {leftovers}")


def _kill_often(folder: Path, count: int, background: bool) -> Trials:
    trials = Trials.with_seeds(count)
    for seed in range(count):
        inner = folder / str(seed)
        inner.mkdir()
        with trials.trial(f"seed {seed}"):
            _kill_one(inner, background, random.Random(seed), trials)
        shutil.rmtree(inner)
    return trials


def killed_in_a_save(folder: Path, count: int) -> Trials:
    """Try row 2: kill one of two ranks at a random time during a foreground save."""
    return _kill_often(folder, count, background=False)


def killed_in_a_background_save(folder: Path, count: int) -> Trials:
    """Try row 3: the same for a background save, while the tracker is watched."""
    return _kill_often(folder, count, background=True)


def _write(root: Path, iteration: int, keep: RetentionPolicy | None = None) -> None:
    state, meta = make_state(iteration), meta_of(iteration)
    snapshot = Snapshot.take(iteration, state, meta, Layout.single())
    write_checkpoint(root, snapshot, keep=keep)


def _write_in_background(root: Path) -> None:
    state, layout = make_state(20), Layout.single()
    saver = BackgroundSaver(
        root, state, layout, layout, Device.cpu(), keep=None, report=lambda *_: None
    )
    saver.start(20, state, {"iteration": 20}, since=time.perf_counter())
    saver.wait()


_SAVES: dict[str, Callable[[Path], None]] = {
    "a new one": lambda root: _write(root, 20),
    "one that replaces another": lambda root: _write(root, 10),
    "one that deletes old ones": lambda root: _write(root, 20, keep=RetentionPolicy(1)),
    "one in the background": _write_in_background,
}


def killed_at_every_call(folder: Path, count: int) -> Trials:
    """Try row 4: kill at every system call of a save; `count` limits the calls for each way."""
    trials = Trials()
    for name, save_once in _SAVES.items():
        for boundary in range(count):
            root = folder / f"{name} {boundary}"
            save_state(root, 10)

            def doomed(
                boundary: int = boundary, root: Path = root, save_once: Any = save_once
            ) -> None:
                kill_at(boundary)
                save_once(root)

            status = run_forked(doomed)
            if status == 0:  # there are no more calls
                break
            with trials.trial(f"{name}, call {boundary}"):
                expect(status == -signal.SIGKILL, f"ended with {status}")
                assert_recovers(root, [10, 20])
            shutil.rmtree(root)
        trials.note(f"calls of {name}", boundary)
    return trials
