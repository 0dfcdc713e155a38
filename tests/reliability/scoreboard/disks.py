"""Rows 8, 9 and 26: full, failing or vanishing disks, and folders that others use."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.checkpoint import store
from megatron.checkpoint.background import BackgroundSaver
from megatron.checkpoint.entries import Entry, State
from megatron.checkpoint.find import TRACKER
from megatron.device import Device
from megatron.errors import EXIT_SAVED_ON_SIGNAL, CheckpointError, StorageError
from megatron.parallel.layout import Layout
from tests.checkpoint.states import make_state, save
from tests.distributed import TIMEOUT, run_distributed
from tests.reliability.scoreboard.commands import Command, run_training, train_command
from tests.reliability.scoreboard.score import Trials, expect

_NOBODY = 65534
_TMPFS = 128 << 20  # the space that a save reserves in advance is available
_SAVE = ("--save-interval", "2")


@contextmanager
def _small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small file system on `folder`; return False if that is not permitted."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={_TMPFS}", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def _fill_disk_at(fraction: float, root: Path, is_real: bool) -> Callable[[], None]:
    """Leave space for this share of a shard, from the second checkpoint on.

    Either a file really fills the disk, or the system's answer is simulated.
    """
    write = store.write_shard

    def fail(path: Path, tensors: Any, header: bytes, pieces: Any, threads: int) -> Any:
        if path.parent.name.startswith("iter_0000002"):
            return write(path, tensors, header, pieces, threads)
        free_bytes = int(fraction * (len(header) + sum(piece.size for piece in pieces.values())))
        if is_real:
            disk = os.statvfs(root)
            with open(root / "ballast", "wb") as ballast:
                size = disk.f_bavail * disk.f_frsize - free_bytes
                os.posix_fallocate(ballast.fileno(), 0, size // disk.f_frsize * disk.f_frsize)
            return write(path, tensors, header, pieces, threads)
        pwrite, remaining = os.pwrite, free_bytes

        def limited(descriptor: int, data: Any, position: int) -> int:
            nonlocal remaining
            if remaining <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = pwrite(descriptor, data[:remaining], position)
            remaining -= written
            return written

        os.pwrite = limited
        return write(path, tensors, header, pieces, threads)

    def patch() -> None:
        store.write_shard = fail

    return patch


def full_disk(folder: Path, count: int) -> Trials:
    """Try row 8: no space left at `count` offsets of a shard, in the foreground and background."""
    trials = Trials()
    for flags in ((), ("--async-save",)):
        for step in range(count):
            inner = folder / f"{step}{''.join(flags)}"
            inner.mkdir()
            with trials.trial(inner.name), _small_disk(inner / "disk") as is_real:
                _fill_one(inner, step / count, is_real, flags)
                trials.note("on a file system that is full" if is_real else "played")
    return trials


def _fill_one(folder: Path, fraction: float, is_real: bool, flags: tuple[str, ...]) -> None:
    root = folder / "disk" / "checkpoints"
    root.mkdir()
    all_flags = ("--save", str(root), *_SAVE, "--hidden-size", "64", *flags)
    preexec = _fill_disk_at(fraction, root, is_real)
    result = run_training(folder / "out", *all_flags, preexec=preexec)
    expect(
        result.code == StorageError.exit_code, f"ended with {result.code}: {result.output[-300:]}"
    )
    expect("No space left on device" in result.output, "does not say what is wrong")
    expect(str(root / "iter_0000004") in result.output, "does not say where")
    expect((root / TRACKER).read_text() == "2", "the tracker has moved")
    (root / "ballast").unlink(missing_ok=True)
    rerun = run_training(folder / "again", *all_flags, "--load", str(root))
    expect(rerun.code == 0, f"cannot go on: {rerun.output[-300:]}")
    expect("iteration        3/       6" in rerun.output, "did not go on at iteration 3")
    expect((root / TRACKER).read_text() == "6", "did not save again")
    expect(not list(root.glob("*tmp*")), "temporary files are left")


# System calls to fail, and which call of a save to start with.
_FAILING = (("pwrite", 0), ("pwrite", 4), ("fsync", 0), ("fsync", 1), ("fsync", 2), ("mkdir", 0),
            ("rename", 0), ("replace", 0))  # fmt: skip
_ON_MAIN = {("fsync", 2), ("mkdir", 0), ("rename", 0), ("replace", 0)}  # only rank 0 makes these


@contextmanager
def _failing(call: str, number: int) -> Iterator[None]:
    original, calls = getattr(os, call), 0

    def fail(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*arguments, **keywords)

    setattr(os, call, fail)
    try:
        yield
    finally:
        setattr(os, call, original)


def _fail_everywhere(layout: Layout, folder: Path, rounds: int) -> list[tuple[str, str | None]]:
    """Try every case on this rank; return each name and what went wrong."""
    results = []
    rank = layout.world.rank
    beside = layout.for_thread(TIMEOUT)
    for round_index in range(rounds):
        for background in (False, True):
            for victim in (0, 1):
                for call, call_index in _FAILING:
                    if victim and (call, call_index) in _ON_MAIN:
                        continue
                    name = f"{call} {call_index} of rank {victim}, "
                    name += f"background {background}, {round_index}"
                    case = _Case(folder / name, layout, beside, background)
                    problem = case.run(call, call_index, is_victim=rank == victim)
                    results.append((name, problem))
                    layout.world.barrier()
    return results


class _Case:
    """A failing save between two that succeed."""

    def __init__(self, root: Path, layout: Layout, beside: Layout, background: bool) -> None:
        self._root, self._layout = root, layout
        self._saver = None
        if background:
            self._saver = BackgroundSaver(
                root, self._state(0), layout, beside, Device.cpu(), keep=None,
                report=lambda *_: None,
            )  # fmt: skip

    def _state(self, seed: int) -> State:
        rank = self._layout.world.rank
        state = {f"{name}.{rank}": entry for name, entry in make_state(seed + rank).items()}
        return state | {"model.copy": Entry.whole(make_state(seed)["random"].tensor)}

    def _save(self, iteration: int) -> None:
        state = self._state(iteration)
        if self._saver is None:
            save(self._root, iteration, state, {}, self._layout)
        else:
            self._saver.start(iteration, state, {}, since=time.perf_counter())

    def _settle(self) -> None:
        if self._saver is not None:
            self._saver.wait()
        self._layout.world.barrier()

    def run(self, call: str, call_index: int, *, is_victim: bool) -> str | None:
        """Return what is wrong, or `None` if the failure was reported and nothing was published."""
        self._save(1)
        self._settle()
        try:
            if is_victim:
                with _failing(call, call_index):
                    self._save(2)
                    if self._saver is not None:
                        self._saver.wait()
            else:
                self._save(2)
                if self._saver is not None:
                    self._saver.wait()
            problem: str | None = "no error was told"
        except StorageError as error:
            problem = None if "Input/output error" in str(error) else str(error)
        self._layout.world.barrier()
        tracker = (self._root / TRACKER).read_text()
        if tracker != "1":
            problem = f"the tracker says {tracker}"
        self._layout.world.barrier()
        self._save(3)
        self._settle()
        if (self._root / TRACKER).read_text() != "3":
            problem = "the next save was not made"
        return problem


def failing_disk(folder: Path, count: int) -> Trials:
    """Try row 9: an I/O error in any writer's call on any rank, in foreground and background."""
    trials = Trials()
    answers = run_distributed(2, _fail_everywhere, folder, count)
    for (name, first), (_, second) in zip(*answers, strict=True):
        with trials.trial(name):
            expect(first is None and second is None, f"rank 0: {first}, rank 1: {second}")
    return trials


def shared_folders(folder: Path, count: int) -> Trials:
    """Try row 26: what other users, owners and file systems of a folder do to a run."""
    trials = Trials()
    for number in range(count):
        for case in (_second_job, _after_a_killed_job, _read_only, _removed, _gone):
            for flags in ((), ("--async-save",)):
                inner = folder / f"{case.__name__.strip('_')}{number}{''.join(flags)}"
                inner.mkdir()
                inner.chmod(0o755)
                with trials.trial(inner.name):
                    case(inner, flags)
                shutil.rmtree(inner, ignore_errors=True)
    return trials


def _long_training(folder: Path, flags: tuple[str, ...]) -> Command:
    save_flags = ("--save", str(folder / "save"), *_SAVE, "--keep-latest", "2")
    return train_command(folder / "long", *save_flags, "--train-iters", "100000", *flags)


def _second_job(folder: Path, flags: tuple[str, ...]) -> None:
    with _long_training(folder, flags) as first:
        first.wait_for_output("successfully saved")
        result = run_training(folder / "second", "--save", str(folder / "save"), *_SAVE, *flags)
        expect(result.code == CheckpointError.exit_code, f"the second ended with {result.code}")
        expect(f"process {first.pid}" in result.output, "the first is not named")
        os.kill(first.pid, signal.SIGTERM)
        code = first.end().code
        expect(code == EXIT_SAVED_ON_SIGNAL, f"the first ended with {code} on SIGTERM")


def _after_a_killed_job(folder: Path, flags: tuple[str, ...]) -> None:
    with _long_training(folder, flags) as first:
        first.wait_for_output("successfully saved")
    load_flags = ("--save", str(folder / "other"), *_SAVE, "--load", str(folder / "save"))
    result = run_training(folder / "second", *load_flags, "--override-opt_param-scheduler")
    expect(result.code == 0, result.output[-300:])
    rerun = run_training(folder / "third", "--save", str(folder / "save"), *_SAVE, *flags)
    expect(rerun.code == 0, f"the folder stays locked: {rerun.output[-300:]}")


def _read_only(folder: Path, flags: tuple[str, ...]) -> None:
    (folder / "save").mkdir(mode=0o555)
    preexec = (lambda: os.setuid(_NOBODY)) if os.getuid() == 0 else None
    (folder / "out").touch()
    result = run_training(
        folder / "out", "--save", str(folder / "save"), *_SAVE, *flags, preexec=preexec
    )
    expect(result.code == StorageError.exit_code, f"ended with {result.code}")
    expect("Permission denied" in result.output, result.output[-300:])
    expect("iteration        1/" not in result.output, "trained first")


def _removed(folder: Path, flags: tuple[str, ...]) -> None:
    """Remove the folder; the next save creates it again."""
    with _long_training(folder, flags) as run:
        run.wait_for_output("successfully saved")
        shutil.rmtree(folder / "save", ignore_errors=True)
        time.sleep(0.1)
        os.kill(run.pid, signal.SIGTERM)
        result = run.end()
    if result.code == StorageError.exit_code:  # it was removed during a save, or twice
        expect("No such file or directory" in result.output, result.output[-300:])
        return
    expect(result.code == EXIT_SAVED_ON_SIGNAL, f"ended with {result.code}: {result.output[-300:]}")
    load_flags = ("--load", str(folder / "save"), "--train-iters", "100000", "--exit-interval", "1")
    rerun = run_training(folder / "again", *load_flags)
    expect("successfully loaded" in rerun.output, rerun.output[-300:])


def _gone(folder: Path, flags: tuple[str, ...]) -> None:
    """Replace the folder with a file; the run ends and says so."""
    with _long_training(folder, flags) as run:
        run.wait_for_output("successfully saved")
        (folder / "save").rename(folder / "moved")
        (folder / "save").touch()
        result = run.end()
    expect(result.code == StorageError.exit_code, f"ended with {result.code}")
    expect(str(folder / "save") in result.output, "does not say where")
    reader = run_training(folder / "again", "--load", str(folder / "moved"), "--finetune")
    expect(reader.code == 0, "what was saved before does not load")
