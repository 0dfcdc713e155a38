"""Rows 10 and 11: damaged checkpoints, and trackers with wrong content."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.checkpoint.entries import Entry, State, flatten
from megatron.checkpoint.find import TRACKER, CheckpointFolder
from megatron.checkpoint.loading import open_checkpoint, open_folder
from megatron.checkpoint.reader import restore
from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout
from tests.checkpoint.states import make_state, save
from tests.distributed import run_distributed
from tests.reliability.scoreboard.commands import run_training
from tests.reliability.scoreboard.score import Trials, expect, within
from tests.reliability.scoreboard.untrusted import ATTACKS, META, SECONDS, put_special

_HOLE = 16 << 10  # bytes: a disk block that was never written
_RANKS = 2


def _state(iteration: int, rank: int) -> State:
    return {f"{n}.{rank}": e for n, e in make_state(_RANKS * iteration + rank, 64).items()}


def _whole(iteration: int) -> State:
    return _state(iteration, 0) | _state(iteration, 1)


def _save(layout: Layout, root: Path, iteration: int) -> None:
    save(root, iteration, _state(iteration, layout.world.rank), META, layout)


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
    """Swap two blocks, like a disk that mixes up its addresses."""
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


def _damage_bytes(newest: Path, rng: random.Random) -> str:
    """Damage one of the files, and return its name."""
    file, damage = rng.choice(sorted(newest.iterdir())), rng.choice(_DAMAGES)
    original = file.read_bytes()
    data = bytearray(original)
    while data == original:  # a hole among zeros changes nothing
        damage(data, rng)
    file.write_bytes(data)
    return file.name


def damaged_files(folder: Path, count: int) -> Trials:
    """Try row 10: damage is refused before a tensor changes; then the older checkpoint loads.

    Half of the trials damage the bytes of a file. The others do what only an attacker does: see
    `tests.reliability.scoreboard.untrusted`.
    """
    intact = folder / "sound"
    _, older = two_checkpoints(intact)
    trials, rng = Trials("seed 10"), random.Random(10)
    for i in range(count):
        root = folder / str(i) / "root"
        shutil.copytree(intact, root)
        newest = root / "iter_0000002"
        if rng.random() < 0.5:
            description = file_name = _damage_bytes(newest, rng)
            trials.note(f"damaged bytes of {file_name}")
        else:
            attack = rng.choice(ATTACKS)
            attack(newest, rng)
            description, file_name = attack.__name__, ""
            trials.note("made by an attacker")
        with trials.trial(f"{description}, trial {i}"), within(SECONDS):
            refused_and_replaced(newest, file_name, older)
        shutil.rmtree(root.parent)
    return trials


def refused_and_replaced(newest: Path, file: str, older: dict[str, torch.Tensor]) -> None:
    """Check that a checkpoint is refused by name, and that the older one loads.

    Args:
        newest: The folder of the checkpoint.
        file: The name of the damaged file, which the error must contain. Empty if any file will do.
        older: The content of the older checkpoint.
    """
    try:
        open_folder(CheckpointFolder("native", 2, newest))
    except CheckpointError as error:
        expect(file in str(error), f"does not name the file: {error}")
    else:
        raise AssertionError("opened")
    tensors = {name: Entry.whole(torch.zeros_like(tensor)) for name, tensor in older.items()}
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        reader = open_checkpoint(newest.parent)
    expect(newest.name in output.getvalue(), f"the folder is not named: {output.getvalue()}")
    expect(reader is not None and reader.iteration == 1, "the older one was not taken")
    assert reader is not None
    restore(reader, tensors)
    expect(all(torch.equal(tensors[n].tensor, older[n]) for n in older), "other values were loaded")


# What the tracker may contain, torn or wrong, if iterations 2 and 4 exist.
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
# Variants of a sound tracker, which are followed.
_VALID_TRACKERS = {"CRLF": b"2\r\n", "spaces": b" 2 ", "zeros": b"0000002"}


def torn_trackers(folder: Path, count: int) -> Trials:
    """Try row 11: the newest sound checkpoint loads; if there is none, the run does not start.

    Known cases are tried with the whole program, checking its exit code and what it prints.
    Random trackers are tried with the function that finds a checkpoint.
    """
    trials, root = Trials("seed 11"), folder / "save"
    first_run = run_training(folder / "out", "--save", str(root), "--save-interval", "2")
    expect(first_run.code == 0, first_run.output[-300:])
    shutil.rmtree(root / "iter_0000006")
    ruined = folder / "ruined"
    shutil.copytree(root, ruined)
    for shard in ruined.rglob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1])
    cases = [(name, content, 4) for name, content in TORN.items()]
    cases += [(name, content, 2) for name, content in _VALID_TRACKERS.items()]
    for name, content, iteration in cases[:count]:
        with trials.trial(f"{name}, sound checkpoints"):
            _set_tracker(root, content)
            result = run_training(folder / "out", "--load", str(root))
            expect(result.code == 0, f"ended with {result.code}")
            expect(f"at iteration {iteration} " in result.output, "loaded another")
        with trials.trial(f"{name}, damaged checkpoints"):
            _set_tracker(ruined, content)
            result = run_training(folder / "out", "--load", str(ruined))
            expect(result.code == CheckpointError.exit_code, f"ended with {result.code}")
            expect("iteration        1/" not in result.output, "started from scratch")
            expect(str(ruined) in result.output, "does not say where")
    trials.note("with the whole program", trials.tried)
    rng = random.Random(11)
    for number in range(count):
        _try_random_tracker(trials, number, root, ruined, rng)
    return trials


def _try_random_tracker(
    trials: Trials, number: int, root: Path, ruined: Path, rng: random.Random
) -> None:
    """Try a random tracker in a folder of sound checkpoints and in one of damaged ones."""
    special, content = rng.random() < 0.2, _random_tracker(rng)
    (root.parent / "elsewhere").write_bytes(content)
    seed = rng.random()
    for folder in (root, ruined):
        _set_tracker(folder, None if special else content)
        if special:
            description = put_special(
                folder / TRACKER, root.parent / "elsewhere", random.Random(seed)
            )
        else:
            description = repr(content[:40])
        with trials.trial(f"random tracker {number}, {description}"), within(SECONDS):
            try:
                reader = open_checkpoint(folder)
            except CheckpointError as error:
                expect(folder == ruined, f"sound ones are refused: {error}")
                expect(str(ruined) in str(error), f"does not say where: {error}")
            else:
                expect(folder == root, "a damaged one was opened")
                is_read = not special or description == "a link"
                expected = 2 if is_read and content.strip().lstrip(b"0") == b"2" else 4
                expect(reader is not None, "no checkpoint was found")
                assert reader is not None
                expect(reader.iteration == expected, f"loaded {reader.iteration}, not {expected}")
        trials.note(f"random: {description if special else 'content'}")


def _random_tracker(rng: random.Random) -> bytes:
    """Return what a torn write, a stranger or another program may leave in a tracker."""
    number = rng.choice((b"2", b"3", b"4", b"6", b"-2", b"9" * 12, b"9" * 13, b"9" * 5000))
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(60))
        case 1:
            return number[: rng.randrange(len(number) + 1)] + rng.randbytes(rng.randrange(4))
        case 2:
            text = rng.choice(("iter_000000{}", "../{}", "/{}", "{}.0", "+{}", "{}_0", "0x{}"))
            return text.format(rng.choice((2, 4))).encode()
        case 3:
            return rng.choice((b"NaN", b"Infinity", b"1e999", b"release", b"{}", b"null", b"[4]"))
        case 4:
            return rng.choice("2\u0662\uff12\u00b2\u2461").encode(rng.choice(("utf-8", "utf-16")))
        case _:
            return rng.choice((b"", b" ", b"\n", b"0")) * rng.randrange(9) + number


def _set_tracker(root: Path, content: bytes | None) -> None:
    tracker = root / TRACKER
    if tracker.is_dir() and not tracker.is_symlink():
        tracker.rmdir()
    tracker.unlink(missing_ok=True)
    if content is not None:
        tracker.write_bytes(content)
