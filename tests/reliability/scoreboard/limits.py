"""Row 39: input that is merely large, little memory, and logs whose readers leave."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
from tests.reliability.scoreboard.score import Trials, expect
from tests.repository import ROOT
from tests.training.toy import TOY

_LIMIT = 120.0  # seconds
_KINDS = (CheckpointError, ConfigError, DataError, OutputClosedError, ShortageError, StorageError)
_CODES = {EXIT_OK, *(kind.exit_code for kind in _KINDS)}
_SHARED = 'mount -t tmpfs -o size={size}k none /dev/shm && exec "$@"'


def merely_large(folder: Path, count: int) -> Trials:
    """Draw sizes, limits and closing times; each trial is a whole command in a new interpreter."""
    trials = Trials.with_seeds(count)
    attacks = (_preprocess, _train_tokenizer, _little_memory, _little_shared_memory, _reader_leaves)
    for seed in range(count):
        draw = random.Random(seed)
        attack = attacks[seed % len(attacks)]
        inner = folder / str(seed)
        inner.mkdir()
        with trials.trial(f"{attack.__name__.strip('_')}, seed {seed}"):
            trials.note(f"ended with {attack(inner, draw)}")
    return trials


def _run(words: list[str], limit: int | None = None, lines: int | None = None) -> int:
    """Run a command, check how it ends, and return its exit code.

    Args:
        words: The command.
        limit: The bytes of its address space, if they are bounded.
        lines: How many lines of its output are read before the pipe is closed; `None` for all.
    """

    if limit is not None:
        words = ["sh", "-c", f'ulimit -v {limit // 1024} && exec "$@"', "sh", *words]
    process = subprocess.Popen(
        words, cwd=ROOT, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    if lines is not None:
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        process.stdout.close()
        process.stdout = None
    try:
        _, said = process.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    expect(process.returncode in _CODES, f"ended with {process.returncode}: {said[-300:]}")
    expect("Traceback" not in said, f"a traceback: {said[-300:]}")
    last = said.splitlines()[-1] if said else ""
    begins = last.startswith(("error: ", "WARNING: the program that read"))
    expect(process.returncode == EXIT_OK or begins, f"no reason: {said[-300:]}")
    return process.returncode


def _large_file(folder: Path, draw: random.Random) -> Path:
    """Write some small documents and a large one, in any format."""
    filling = draw.choice(["x", "word ", "é", "a b\n", '"\\'])
    large = filling * (int(2 ** draw.uniform(20, 26)) // len(filling))
    texts = ["small"] * draw.randrange(3) + [large] + ["small"] * draw.randrange(3)
    path = folder / f"a{draw.choice(['.jsonl', '.jsonl.gz', '.jsonl.zst', '.parquet', '.txt'])}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": texts}), path)
    elif path.suffix == ".txt":
        path.write_text(large)
    else:
        pack = {".gz": lambda data: gzip.compress(data, 1), ".zst": zstandard.compress}
        path.write_bytes(pack.get(path.suffix, bytes)(lines))
    return path


def _untouched(files: list[Path], work: Callable[[], int]) -> int:
    """Write files, run a command that replaces them, and check that it replaces all or none."""
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"before")
    code = work()
    replaced = [file.read_bytes() != b"before" for file in files]
    expect(replaced == [code == EXIT_OK] * len(files), f"code {code}, replaced: {replaced}")
    return code


def _preprocess(folder: Path, draw: random.Random) -> int:
    vocab = {character: i for i, character in enumerate(byte_of_character())}
    (folder / "v.json").write_text(json.dumps(vocab | {"<|endoftext|>": 256}))
    (folder / "m.txt").write_text("#version: 0.2\n")
    words = [sys.executable, "tools/preprocess_data.py", "--input", str(_large_file(folder, draw))]
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(folder / "v.json")]
    words += ["--merge-file", str(folder / "m.txt"), "--output-prefix", str(folder / "out" / "x")]
    words += ["--overwrite", "--max-line-mb", str(draw.choice([1, 8, 64, 500]))]
    words += ["--workers", "2"] * draw.randrange(2) + ["--on-error", "skip"] * draw.randrange(2)
    files = [folder / "out" / f"x_text_document.{ending}" for ending in ("bin", "idx")]
    limit = int(draw.uniform(3e8, 3e9))
    return _untouched(files, lambda: _run(words, limit))


def _train_tokenizer(folder: Path, draw: random.Random) -> int:
    words = [sys.executable, "tools/train_tokenizer.py", "--input", str(_large_file(folder, draw))]
    words += ["--output-dir", str(folder / "out"), "--overwrite", "--vocab-size", "300"]
    words += ["--max-line-mb", str(draw.choice([1, 8, 64]))]
    files = [folder / "out" / name for name in ("vocab.json", "merges.txt", "tokenizer.json")]
    limit = int(draw.uniform(3e8, 2e9))
    return _untouched(files, lambda: _run(words, limit))


def _training(folder: Path, iterations: int, *flags: str) -> list[str]:
    save = ["--save", str(folder / "run"), "--load", str(folder / "run"), "--save-interval", "2"]
    count = ["--train-iters", str(iterations), "--eval-iters", "0", "--lr-decay-iters", "99"]
    return [sys.executable, "pretrain_gpt.py", *TOY, *save, *count, *flags]


def _goes_on(folder: Path, work: Callable[[], int]) -> int:
    """Run a command on a checkpoint, and check that the next run continues at the newest one."""
    expect(_run(_training(folder, 2)) == EXIT_OK, "the first run fails")
    code = work()
    expect(int((folder / "run" / TRACKER).read_text()) >= 2, "the tracker went back")
    expect(_run(_training(folder, 3, "--exit-interval", "1")) == EXIT_OK, "the next run fails")
    return code


def _little_memory(folder: Path, draw: random.Random) -> int:
    workers = str(draw.choice([0, 2]))
    words = _training(folder, 6, "--num-workers", workers, "--hidden-size", "32")
    limit = int(2 ** draw.uniform(27, 31))
    return _goes_on(folder, lambda: _run(words, limit))


def _little_shared_memory(folder: Path, draw: random.Random) -> int:
    mount = _SHARED.format(size=draw.choice([4, 8, 16, 32, 64, 256]))
    words = ["env", "unshare", "-rm", "sh", "-c", mount, "sh"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        return _little_memory(folder, draw)  # user namespaces are not allowed here
    words += _training(folder, 6, "--num-workers", str(draw.choice([1, 2, 3])))
    return _goes_on(folder, lambda: _run(words))


def _reader_leaves(folder: Path, draw: random.Random) -> int:
    words, lines = _training(folder, 10_000), draw.randrange(40)
    return _goes_on(folder, lambda: _run(words, lines=lines))
