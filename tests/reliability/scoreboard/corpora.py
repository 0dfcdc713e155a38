"""Rows 22 to 25: truncated and changed datasets, bad lines, and settings unlike a checkpoint's."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from megatron.data.indexed import IndexedDataset, bin_path, idx_path
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.tokenizer.fast_bpe import byte_of_character
from megatron.tools import preprocess_data
from megatron.training.pretrain import main
from pretrain_gpt import GPTRecipe
from tests.data.corpus import write_corpus
from tests.reliability.scoreboard.commands import run_tool, run_training
from tests.reliability.scoreboard.score import Trials, expect
from tests.training.toy import TOY

_SECONDS = 5.0
_REFUSALS = (CheckpointError.exit_code, ConfigError.exit_code, DataError.exit_code)
_ODD_TEXTS = ("", "\u0000", "ab" * 500, "\U0001f600 \u200d", "line\u2028separator")
_BAD_LINES = (b"{", b"[1, 2]", b'{"text": 3}', b'{"text": "\xff"}', b"null", b'{"other": "a"}')
# Settings that must not change when a run resumes.
_CHANGES = (
    ("--hidden-size", "64"),
    ("--num-layers", "3"),
    ("--num-attention-heads", "2"),
    ("--ffn-hidden-size", "96"),
    ("--vocab-size", "120"),
    ("--swiglu",),
    ("--normalization", "RMSNorm"),
    ("--disable-bias-linear",),
    ("--position-embedding-type", "rope"),
    ("--untie-embeddings-and-output-weights",),
    ("--group-query-attention", "--num-query-groups", "2"),
    ("--optimizer", "sgd"),
)


def cut_corpora(folder: Path, count: int) -> Trials:
    """Try row 22: truncate each file of a dataset at random places."""
    trials, rng = Trials("seed 22"), random.Random(22)
    prefix = write_corpus(folder / "text", documents=1000)
    for i in range(count):
        path = (bin_path, idx_path)[i % 2](prefix)
        original = path.read_bytes()
        cut = rng.randrange(len(original))
        with trials.trial(f"{path.suffix} cut at byte {cut}"):
            path.write_bytes(original[:cut])
            start = time.monotonic()
            try:
                IndexedDataset(prefix)
            except DataError as error:
                expect(str(path) in str(error), f"the file is not named: {error}")
            else:
                raise AssertionError("it was opened")
            expect(time.monotonic() - start < _SECONDS, "too late")
            if i < 2:  # the whole program
                flags = [flag for flag in TOY if flag != "--mock-data"]
                flags += ["--vocab-size", "1000", "--train-iters", "2", "--data-path", str(prefix)]
                result = run_tool(folder / "out", lambda given: main(GPTRecipe(), given), *flags)
                expect(result.code == DataError.exit_code, f"{result.code}: {result.output}")
                expect("iteration        1/" not in result.output, "it trained")
        path.write_bytes(original)
        trials.note(path.suffix)
    return trials


def _documents(prefix: Path) -> list[bytes]:
    data = IndexedDataset(prefix)
    return [data.get(number).tobytes() for number in range(len(data))]


def changed_indexes(folder: Path, count: int) -> Trials:
    """Try row 23: change a byte of the index."""
    trials, rng = Trials("seed 23"), random.Random(23)
    prefix = write_corpus(folder / "text", documents=1000)
    expected, path = _documents(prefix), idx_path(prefix)
    original = path.read_bytes()
    for i in range(count):
        # Half of the changes are in the header, whose 34 bytes would otherwise be hit too rarely.
        offset = rng.randrange(34 if i % 2 else len(original))
        value = (original[offset] + rng.randrange(1, 256)) % 256
        with trials.trial(f"byte {offset} is {value}"):
            path.write_bytes(original[:offset] + bytes([value]) + original[offset + 1 :])
            try:
                actual = _documents(prefix)
            except DataError as error:
                expect(str(prefix) in str(error), f"the dataset is not named: {error}")
                trials.note("refused")
            else:
                expect(actual == expected, "other tokens")
                trials.note("a bound between documents moved, or nothing changed")
    return trials


def bad_lines(folder: Path, count: int) -> Trials:
    """Try row 24: corpora of `count` lines, one in a hundred of them bad."""
    trials = Trials.with_seeds(4)
    for seed in range(4):
        rng, source, clean = random.Random(seed), folder / "in.jsonl", folder / "clean.jsonl"
        bad_numbers = set(rng.sample(range(count), max(1, count // 100)))
        good = []
        with source.open("wb") as file:
            for number in range(count):
                text = rng.choice((*_ODD_TEXTS, " ".join(rng.choices("abcdefg", k=20))))
                line = json.dumps({"text": text}).encode()
                line = rng.choice(_BAD_LINES) if number in bad_numbers else line
                good += [] if number in bad_numbers else [line]
                file.write(line + b"\n")
        clean.write_bytes(b"".join(line + b"\n" for line in good))
        expected = _preprocessed(folder, clean, workers=1, skips=False)[1]
        expect(expected, "no output of good lines")
        for workers in (1, 2, 4):
            with trials.trial(f"seed {seed}, {workers} workers"):
                output, files = _preprocessed(folder, source, workers=workers, skips=True)
                expect(
                    f"{len(bad_numbers)} bad lines skipped" in output,
                    f"another count: {output[-300:]}",
                )
                expect(files == expected, "other bytes than from the good lines alone")
        with trials.trial(f"seed {seed}, refused"):
            output, files = _preprocessed(folder, source, workers=2, skips=False)
            expect(
                f"in.jsonl:{min(bad_numbers) + 1}: " in output,
                f"the line is not named: {output[-300:]}",
            )
            expect(not files, "output was left")
        trials.note("lines", count)
    return trials


def _preprocessed(
    folder: Path, source: Path, *, workers: int, skips: bool
) -> tuple[str, dict[str, bytes]]:
    """Return what preprocessing printed, and the files that it left."""
    output = folder / "preprocessed"
    output.mkdir()
    vocab = {character: i for i, character in enumerate(byte_of_character())}
    (folder / "v.json").write_text(json.dumps(vocab | {"<|endoftext|>": 256}))
    (folder / "m.txt").write_text("#version: 0.2\n")
    args = ["--input", str(source), "--output-prefix", str(output / "x"), "--append-eod"]
    args += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(folder / "v.json")]
    args += ["--merge-file", str(folder / "m.txt"), "--workers", str(workers)]
    args += ["--on-error", "skip"] if skips else []
    result = run_tool(folder / "out", preprocess_data.main, *args)
    files = {path.name: path.read_bytes() for path in output.iterdir()}
    for path in output.iterdir():
        path.unlink()
    output.rmdir()
    return result.output, files


def other_settings(folder: Path, count: int) -> Trials:
    """Try row 25: a run resumes with settings that do not fit the checkpoint."""
    trials, save = Trials(), str(folder / "save")
    flags = ("--save", save, "--load", save, "--save-interval", "2")
    first = run_training(folder / "out", *flags, "--exit-interval", "2")
    expect(first.code == 0, f"no checkpoint: {first.output[-300:]}")
    digest = _state_of(folder / "save")
    for change in _CHANGES[:count]:
        with trials.trial(" ".join(change)):
            result = run_training(folder / "out", *flags, *change)
            expect(result.code in _REFUSALS, f"ended with {result.code}: {result.output[-300:]}")
            message = result.output.partition("error: ")[2]
            flag_word = change[0].removeprefix("--").removeprefix("disable-").split("-")[0]
            expect(
                flag_word in message.replace("_", "-"), f"the difference is not named: {message}"
            )
            expect("iteration        3/" not in result.output, "it trained")
            expect(_state_of(folder / "save") == digest, "the checkpoints changed")
    return trials


def _state_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*.safetensors")}
