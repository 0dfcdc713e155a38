"""Row 39: input that is merely large, little memory, and logs whose readers exit.

Importing torch takes seconds, so most trainings are forks of this process, which has imported it.
They run the same script, under limits that are set in the fork. The other commands, and a share of
the trainings, are new interpreters, so limits also apply while they import.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import random
import resource
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import IO

import pyarrow
import zstandard
from pyarrow import parquet

from megatron.checkpoint.find import TRACKER
from megatron.errors import (
    EXIT_OK,
    CheckpointError,
    ConfigError,
    DataError,
    OutputClosedError,
    ShortageError,
    StorageError,
)
from megatron.tokenizer.fast_bpe import byte_of_character
from tests.distributed import start_method
from tests.launch import start_ranks
from tests.reliability.scoreboard.score import Attempt, Trials, expect, within
from tests.repository import ROOT
from tests.training.toy import TOY

_LIMIT = 240  # seconds
_WORKERS = 6
_NEW_INTERPRETER_SHARE = 0.05  # the share of trainings that are new interpreters
_KINDS = (CheckpointError, ConfigError, DataError, OutputClosedError, ShortageError, StorageError)
_CODES = {EXIT_OK, *(kind.exit_code for kind in _KINDS)}
_SUCCESS = f"ended with {EXIT_OK}"
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000  # flags of unshare
_PRIVATE = 0x44000  # for mount: MS_REC | MS_PRIVATE


def merely_large(folder: Path, count: int) -> Trials:
    """Try row 39: run commands with random sizes, limits and closing times."""
    trials = Trials.with_seeds(count)
    attacks = (_preprocess, _train_tokenizer, _little_memory, _little_shared_memory, _reader_exits)
    first = _training(folder, 2)
    expect(_run(first, folder)[0] == _SUCCESS, "the first run fails")
    attempts: list[Attempt] = []
    for seed in range(count):
        attack = attacks[seed % len(attacks)]
        name = f"{attack.__name__.strip('_')}, seed {seed}"
        attempts.append((name, partial(_attempt, attack, folder / str(seed), seed)))
    trials.side_by_side(attempts, _WORKERS)
    return trials


def _attempt(
    attack: Callable[[Path, random.Random], list[str]], folder: Path, seed: int
) -> list[str]:
    folder.mkdir()
    ending, kind = attack(folder, random.Random(seed))
    return [f"{attack.__name__.strip('_').replace('_', ' ')}, {ending}", kind]


def _check_end(code: int, errors: str, *, new_interpreter: bool) -> list[str]:
    """Check how a command ended, and return its trial's notes."""
    expect(code in _CODES, f"ended with {code}: {errors[-300:]}")
    expect("Traceback" not in errors, f"a traceback: {errors[-300:]}")
    last_line = errors.splitlines()[-1] if errors else ""
    is_explained = last_line.startswith(("error: ", "WARNING: the program that read"))
    expect(code == EXIT_OK or is_explained, f"no reason: {errors[-300:]}")
    return [f"ended with {code}", "new interpreters" if new_interpreter else "forks"]


def _read(stream: IO[str], lines: int | None) -> None:
    """Read this many lines of a stream and close it; `None` reads all lines."""
    with stream:
        if lines is None:
            stream.read()
        else:
            for _ in range(lines):
                stream.readline()


def _run(
    argv: list[str],
    folder: Path,
    *,
    limit: int | None = None,
    shared_kib: int | None = None,
    lines: int | None = None,
    new_interpreter: bool = False,
) -> list[str]:
    """Run `python words...`, check how it ends, and return notes.

    Args:
        argv: A file and its flags.
        folder: Where output may be written.
        limit: The limit on its address space in bytes, if any. In a fork, which has imported
            everything, it is added to what the process already has.
        shared_kib: The size of its /dev/shm in KiB, if it differs from the system's.
        lines: How many lines of its output are read before the pipe is closed; `None` for all.
        new_interpreter: Whether it is a new interpreter rather than a fork of this process.
    """

    def preexec() -> None:
        os.chdir(ROOT)
        if shared_kib is not None:
            _mount_shared_memory(shared_kib)
        if limit is not None:
            pages = 0 if new_interpreter else int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + limit,) * 2)

    with tempfile.TemporaryDirectory(dir=folder) as inner, within(_LIMIT):
        output, errors = Path(inner, "output"), Path(inner, "errors")
        os.mkfifo(output)
        [process] = start_ranks(
            argv, os.environ, [output], [errors], preexec=preexec, new_interpreter=new_interpreter
        )
        try:
            _read(output.open(errors="replace"), lines)
            process.join()
        finally:
            process.kill()
            process.join()
        code, errors_text = process.exitcode or EXIT_OK, errors.read_text(errors="replace")
    return _check_end(code, errors_text, new_interpreter=new_interpreter)


def _mount_shared_memory(size: int) -> None:
    """Give only this process a /dev/shm of this many KiB."""
    system, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()

    def expect_zero(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), "a namespace of its own")

    expect_zero(system.unshare(_NEW_USER | _NEW_MOUNTS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    expect_zero(system.mount(None, b"/", None, _PRIVATE, None))
    expect_zero(system.mount(b"none", b"/dev/shm", b"tmpfs", 0, f"size={size}k".encode()))


@cache
def _can_mount() -> bool:
    """Return whether a process may have its own /dev/shm here."""
    process = start_method().Process(target=_mount_shared_memory, args=(64,))
    process.start()
    process.join()
    return process.exitcode == 0


def _large_file(folder: Path, rng: random.Random) -> Path:
    """Write some small documents and a large one, in any format."""
    pattern = rng.choice(["x", "word ", "é", "a b\n", '"\\'])
    large = pattern * (int(2 ** rng.uniform(20, 26)) // len(pattern))
    texts = ["small"] * rng.randrange(3) + [large] + ["small"] * rng.randrange(3)
    path = folder / f"a{rng.choice(['.jsonl', '.jsonl.gz', '.jsonl.zst', '.parquet', '.txt'])}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": texts}), path)
    elif path.suffix == ".txt":
        path.write_text(large)
    else:
        compress = {".gz": lambda data: gzip.compress(data, 1), ".zst": zstandard.compress}
        path.write_bytes(compress.get(path.suffix, bytes)(lines))
    return path


def _untouched(files: list[Path], work: Callable[[], list[str]]) -> list[str]:
    """Write files, run a command that replaces them, and check that it replaces all or none."""
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"before")
    notes = work()
    succeeded = _SUCCESS in notes
    replaced = [file.read_bytes() != b"before" for file in files]
    expect(replaced == [succeeded] * len(files), f"{notes}, replaced: {replaced}")
    return notes


def _preprocess(folder: Path, rng: random.Random) -> list[str]:
    vocab = {character: i for i, character in enumerate(byte_of_character())}
    (folder / "v.json").write_text(json.dumps(vocab | {"<|endoftext|>": 256}))
    (folder / "m.txt").write_text("#version: 0.2\n")
    argv = [str(ROOT / "tools/preprocess_data.py"), "--input", str(_large_file(folder, rng))]
    argv += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(folder / "v.json")]
    argv += ["--merge-file", str(folder / "m.txt"), "--output-prefix", str(folder / "out" / "x")]
    argv += ["--overwrite", "--max-line-mb", str(rng.choice([1, 8, 64, 500]))]
    argv += ["--workers", "2"] * rng.randrange(2) + ["--on-error", "skip"] * rng.randrange(2)
    files = [folder / "out" / f"x_text_document.{ending}" for ending in ("bin", "idx")]
    limit = int(rng.uniform(3e8, 3e9))
    return _untouched(files, lambda: _run(argv, folder, limit=limit, new_interpreter=True))


def _train_tokenizer(folder: Path, rng: random.Random) -> list[str]:
    argv = [str(ROOT / "tools/train_tokenizer.py"), "--input", str(_large_file(folder, rng))]
    argv += ["--output-dir", str(folder / "out"), "--overwrite", "--vocab-size", "300"]
    argv += ["--max-line-mb", str(rng.choice([1, 8, 64]))]
    files = [folder / "out" / name for name in ("vocab.json", "merges.txt", "tokenizer.json")]
    limit = int(rng.uniform(3e8, 2e9))
    return _untouched(files, lambda: _run(argv, folder, limit=limit, new_interpreter=True))


def _training(folder: Path, iterations: int, *flags: str) -> list[str]:
    save = ["--save", str(folder / "run"), "--load", str(folder / "run"), "--save-interval", "2"]
    count = ["--train-iters", str(iterations), "--eval-iters", "0", "--lr-decay-iters", "99"]
    return [str(ROOT / "pretrain_gpt.py"), *TOY, *save, *count, *flags]


def _continues(folder: Path, work: Callable[[], list[str]]) -> list[str]:
    """Run a command on a checkpoint, and check that the next run continues from the newest one."""
    shutil.copytree(folder.parent / "run", folder / "run")
    notes = work()
    expect(int((folder / "run" / TRACKER).read_text()) >= 2, "the tracker went back")
    next_run = _training(folder, 3, "--exit-interval", "1")
    expect(_SUCCESS in _run(next_run, folder), "the next run fails")
    return notes


def _little_memory(folder: Path, rng: random.Random) -> list[str]:
    workers, new_interpreter = str(rng.choice([0, 2])), rng.random() < _NEW_INTERPRETER_SHARE
    argv = _training(folder, 6, "--num-workers", workers, "--hidden-size", "32")
    limit = int(2 ** (rng.uniform(27, 31) if new_interpreter else rng.uniform(20, 32)))
    return _continues(
        folder, lambda: _run(argv, folder, limit=limit, new_interpreter=new_interpreter)
    )


def _little_shared_memory(folder: Path, rng: random.Random) -> list[str]:
    if not _can_mount():
        return _little_memory(folder, rng)
    size = rng.choice([4, 8, 16, 32, 64, 256])
    new_interpreter = rng.random() < _NEW_INTERPRETER_SHARE
    argv = _training(folder, 6, "--num-workers", str(rng.choice([1, 2, 3])))
    return _continues(
        folder, lambda: _run(argv, folder, shared_kib=size, new_interpreter=new_interpreter)
    )


def _reader_exits(folder: Path, rng: random.Random) -> list[str]:
    argv, lines = _training(folder, 10_000), rng.randrange(40)
    new_interpreter = rng.random() < _NEW_INTERPRETER_SHARE
    return _continues(
        folder, lambda: _run(argv, folder, lines=lines, new_interpreter=new_interpreter)
    )
