"""Rows 10 and 11: checkpoints that were damaged, and trackers that say the wrong thing."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.checkpoint.entries import Entry, State, flatten
from megatron.checkpoint.find import TRACKER, FoundCheckpoint
from megatron.checkpoint.loading import open_checkpoint, open_found
from megatron.checkpoint.reader import restore
from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout
from tests.checkpoint.states import make_state, save
from tests.distributed import run_distributed
from tests.reliability.scoreboard.commands import run_training
from tests.reliability.scoreboard.score import Trials, expect

_HOLE = 16 << 10  # bytes: a block of a disk that was never written
_RANKS = 2


def _state(iteration: int, rank: int) -> State:
    return {f"{n}.{rank}": e for n, e in make_state(_RANKS * iteration + rank, 64).items()}


def _whole(iteration: int) -> State:
    return _state(iteration, 0) | _state(iteration, 1)


def _save(layout: Layout, root: Path, iteration: int) -> None:
    save(root, iteration, _state(iteration, layout.world.rank), {"iteration": iteration}, layout)


def _flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _hole(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start : start + _HOLE] = bytes(len(data[start : start + _HOLE]))


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _append(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.randrange(1, 64))


def _swap(data: bytearray, rng: random.Random) -> None:
    """Swap two blocks, as a disk does that mixes up its addresses."""
    size = min(512, len(data) // 2)
    first, second = rng.randrange(len(data) - size), rng.randrange(len(data) - size)
    a, b = bytes(data[first : first + size]), bytes(data[second : second + size])
    data[first : first + size], data[second : second + size] = b, a


_DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(_flip, _flip, _flip, _hole, _cut, _append, _swap),
)


def two_checkpoints(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save two checkpoints of two ranks; return the newer's folder and the older's content."""
    for iteration in (1, 2):
        run_distributed(_RANKS, _save, folder, iteration)
    newest = folder / "iter_0000002"
    assert len(list(newest.iterdir())) == _RANKS + 1
    return newest, {name: entry.tensor for name, entry in flatten(_whole(1))}


def damaged_files(folder: Path, count: int) -> Trials:
    """Try row 10: damage is refused before a tensor changes; then the older checkpoint loads."""
    newest, older = two_checkpoints(folder)
    files = sorted(newest.iterdir())
    trials, rng = Trials(), random.Random(10)
    while trials.tried < count:
        file, damage = rng.choice(files), rng.choice(_DAMAGES)
        whole = file.read_bytes()
        data = bytearray(whole)
        damage(data, rng)
        if data == whole:  # a hole in zeros
            continue
        file.write_bytes(data)
        with trials.trial(f"{damage.__name__} {file.name}, trial {trials.tried}"):
            refused_and_replaced(newest, file.name, older)
        trials.note(f"of {file.name}")
        file.write_bytes(whole)
    reader = open_checkpoint(folder)
    assert reader is not None
    assert reader.iteration == 2  # all the damage has been mended
    return trials


def refused_and_replaced(newest: Path, file: str, older: dict[str, torch.Tensor]) -> None:
    """Check that a checkpoint with a damaged `file` is refused by name, and the older one loads."""
    try:
        open_found(FoundCheckpoint("native", 2, newest))
    except CheckpointError as error:
        expect(file in str(error), f"does not name the file: {error}")
    else:
        raise AssertionError("opened")
    live = {name: Entry.whole(torch.zeros_like(tensor)) for name, tensor in older.items()}
    reader = open_checkpoint(newest.parent)
    expect(reader is not None and reader.iteration == 1, "the older one was not taken")
    assert reader is not None
    restore(reader, live)
    expect(all(torch.equal(live[n].tensor, older[n]) for n in older), "other values were loaded")


# What the tracker may hold, torn or wrong, where iterations 2 and 4 are there.
TORN: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "of a missing iteration": b"12",
    "NUL": b"\0\0\0\0",
    "a folder's name": b"iter_0000002",
    "negative": b"-2",
    "a fraction": b"2.0",
    "binary": b"\xff\xfe2\x00",
    "ten megabytes": b"2" * 10_000_000,
    "two lines": b"2\n4",
    "a release that is not there": b"release",
    "half of a number in UTF-16": "4".encode("utf-16")[:3],
}
# What follows the tracker.
_SOUND = {"CRLF": b"2\r\n", "spaces": b" 2 ", "zeros": b"0000002"}


def torn_trackers(folder: Path, count: int) -> Trials:
    """Try row 11: the newest sound checkpoint loads; if there is none, the run does not start.

    Each with the program as a user starts it, its exit code and what it prints.
    """
    trials, root = Trials(), folder / "save"
    made = run_training(folder / "out", "--save", str(root), "--save-interval", "2")
    expect(made.code == 0, made.output[-300:])
    shutil.rmtree(root / "iter_0000006")
    ruined = folder / "ruined"
    shutil.copytree(root, ruined)
    for shard in ruined.rglob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1])
    cases = [(name, content, 4) for name, content in TORN.items()]
    cases += [(name, content, 2) for name, content in _SOUND.items()]
    for name, content, iteration in cases[:count]:
        with trials.trial(f"{name}, sound checkpoints"):
            _set_tracker(root, content)
            ended = run_training(folder / "out", "--load", str(root))
            expect(ended.code == 0, f"ended with {ended.code}")
            expect(f"at iteration {iteration} " in ended.output, "loaded another")
        with trials.trial(f"{name}, damaged checkpoints"):
            _set_tracker(ruined, content)
            ended = run_training(folder / "out", "--load", str(ruined))
            expect(ended.code == CheckpointError.exit_code, f"ended with {ended.code}")
            expect("iteration        1/" not in ended.output, "started from scratch")
            expect(str(ruined) in ended.output, "does not say where")
    return trials


def _set_tracker(root: Path, content: bytes | None) -> None:
    (root / TRACKER).unlink(missing_ok=True)
    if content is not None:
        (root / TRACKER).write_bytes(content)
