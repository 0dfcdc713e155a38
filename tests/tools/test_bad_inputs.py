"""Dozens of kinds of bad input to the tools that create datasets.

Each ends with exit code 6 and one line with the file, usually the place in it, and a remedy.
Nothing is left behind, under a final name or any other.
"""

from __future__ import annotations

import bz2
import gzip
import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from megatron.tools import merge_datasets, preprocess_data, split_json, train_tokenizer
from tests.data.test_indexed import (
    CACHED_IDX,
    FIXTURE_BIN,
    FIXTURE_IDX,
    write_cached,
    write_random,
)
from tests.files import parquet_table
from tools import convert_dataset, presplit_sentences_json

_GOOD = b'{"text": "1 2"}\n{"text": "3"}\n'
_NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
_NOISE = random.Random(1).randbytes(5000).hex().encode()


def _zst(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def _line(text: bytes) -> bytes:
    return _GOOD + text + b"\n"


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


def _write(**files: bytes) -> None:
    for name, content in files.items():
        Path(name.replace("_", ".")).write_bytes(content)


# File name, content, message, which names the line number, its first byte and the remedy.
_SKIP = r"\(line starts at byte 30\); fix the line, or skip bad lines with --on-error skip"
_CUT = "unreadable or truncated: .*; copy the file again"
_TEXTS = [
    ("a.jsonl", _line(b'{"text": "\xff"}'), rf"a.jsonl:3: bad UTF-8 \(byte 10 of .*{_SKIP}"),
    ("a.jsonl", _line(b'{"text": "a"'), rf"a.jsonl:3: broken JSON \(.*{_SKIP}"),
    ("a.jsonl", _line(b'{"text": "\\ud800"}'), rf"a.jsonl:3: .*half a surrogate pair.*{_SKIP}"),
    ("a.jsonl", _line(b"[" * 99999), rf"a.jsonl:3: broken JSON \(nested too deeply\) {_SKIP}"),
    ("a.jsonl", _line(b"[1]"), rf"a.jsonl:3: expected a JSON object, found a list {_SKIP}"),
    ("a.jsonl", _line(b'{"body": "a"}'), rf"a.jsonl:3: no key 'text' {_SKIP}"),
    ("a.jsonl", _line(b'{"text": null}'), rf"a.jsonl:3: 'text' is null, expected a st.*{_SKIP}"),
    ("a.jsonl", _line(b'{"text": [1]}'), rf"a.jsonl:3: 'text' is a list, expected a.*{_SKIP}"),
    ("a.jsonl", _line(b'{"text": "word"}'), rf"a.jsonl:3: .* found 'word': fix the text.*{_SKIP}"),
    ("a.jsonl", _line(b"1" * 2**21), "a.jsonl:3: the line is longer than 1 MiB .* --max-line-mb"),
    ("all", _line(b"text"), rf"all:3: broken JSON .*{_SKIP}"),
    ("a.txt", b"1 \xff", "a.txt: not UTF-8 at byte 2: convert the file"),
    ("a.txt", b"1 " * 2**20, r"a.txt:1: the line is longer than 1 MiB .* raise --max-line-mb"),
    (
        "a.jsonl.gz",
        gzip.compress(_GOOD)[:-9],
        f"a.jsonl.gz: {_CUT}",
    ),
    ("a.jsonl.gz", _GOOD, "a.jsonl.gz: unreadable or truncated: Not a gzipped file"),
    ("a.jsonl.gz", _flipped(gzip.compress(_GOOD), -6), "a.jsonl.gz: .* CRC check failed"),
    (
        "a.jsonl.gz",
        _flipped(gzip.compress(_NOISE), 600),
        f"a.jsonl.gz: {_CUT}",
    ),
    ("a.jsonl.bz2", bz2.compress(_NOISE)[:-50], f"a.jsonl.bz2: {_CUT}"),
    ("a.jsonl.bz2", _GOOD, f"a.jsonl.bz2: {_CUT}"),
    ("a.jsonl.bz2", bz2.compress(_GOOD) + b"more", f"a.jsonl.bz2: {_CUT}"),
    (
        "a.jsonl.zst",
        _zst(_NOISE)[:-50],
        f"a.jsonl.zst: {_CUT}",
    ),
    ("a.jsonl.zst", _GOOD, f"a.jsonl.zst: {_CUT}"),
    (
        "a.parquet",
        parquet_table(body=["1"]),
        "--json-keys text: no such column in .*a.parquet: choose one of body",
    ),
    ("a.parquet", parquet_table(text=[1]), "a.parquet:1: 'text' is a number, expected a string"),
    (
        "a.parquet",
        parquet_table(text=["1"])[:-9],
        r"a.parquet: not a readable parquet file \(.*\); copy",
    ),
    ("a.parquet", _GOOD, r"a.parquet: not a readable parquet file \(.*\); copy"),
    ("a.csv", b"text\n1\n", "a.csv: unknown suffix; expected .*; rename the file"),
    ("README", b"text", "README: unknown suffix"),
]


@pytest.fixture
def fails(tmp_path, monkeypatch, capsys):
    """Run a tool that must not leave output; return its one-line error."""
    monkeypatch.chdir(tmp_path)

    def run(tool, *words: str, code: int = 6) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert tool.main([*words]) == code
        assert sorted(path for path in tmp_path.rglob("*") if path.name != "out") == before
        assert not list(tmp_path.glob("out/*"))
        lines = capsys.readouterr().err.splitlines()
        (line,) = [line for line in lines if "Punkt" not in line]
        assert line.startswith("error: ")
        return line

    return run


@pytest.mark.parametrize(("name", "content", "message"), _TEXTS, ids=range(len(_TEXTS)))
@pytest.mark.parametrize("workers", ["0", "1"])
def test_preprocessing(fails, tmp_path, name, content, message, workers):
    (tmp_path / name).write_bytes(content)
    words = ("--input", name, "--output-prefix", "out/x", *_NULL, "--max-line-mb", "1")
    flags = ("--workers", workers) if workers != "0" else ()
    line = fails(preprocess_data, *words, *flags)
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (lambda: None, "no.jsonl", "no.jsonl: no such file or folder"),
        (lambda: os.mkdir("empty"), "empty", "empty: this folder contains no file with a known"),
        (lambda: os.symlink("no", "l.jsonl"), "l*", "l.jsonl: this is a link to a file that does"),
        (
            lambda: Path("a.jsonl").write_bytes(_GOOD),
            "a.jsonl ./a.jsonl",
            "a.jsonl: .* given twice",
        ),
    ],
)
def test_names_of_inputs(fails, make, words, message):
    make()
    line = fails(preprocess_data, "--input", *words.split(), "--output-prefix", "out/x", *_NULL)
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: write_cached(Path("a"), CACHED_IDX[:-8]), "a.idx: .* truncated or damaged; copy"),
        (lambda: write_cached(Path("a"), tokens=b""), "a.bin: 0 bytes, expected 24 .* copy both"),
        (
            lambda: write_cached(Path("a"), _flipped(CACHED_IDX, 16)),
            "a.idx: dtype code 251 is not an integer .* copy it again",
        ),
        (
            lambda: _write(a_idx=_flipped(FIXTURE_IDX, 0), a_bin=FIXTURE_BIN),
            "a.idx: not an index file: it starts with .* give the prefix",
        ),
        (lambda: _write(a_idx=FIXTURE_IDX), "dataset a: a.bin does not exist"),
        (
            lambda: np.save("a.npy", np.ones(3)),
            "a.npy: an array .* of float64.* write it again",
        ),
        (lambda: np.save("a.npy", np.array([1, -2])), "a.npy: negative token id -2 at position 1"),
        (lambda: _write(a_npy=b"\x93NUMPY"), "a.npy: not a .npy file of numbers, or truncated"),
    ],
)
def test_conversion(fails, make, message):
    make()
    name = "a.npy" if Path("a.npy").exists() else "a"
    line = fails(convert_dataset, "--input", name, "--output-prefix", "out/x")
    assert re.search(message, line), line


@pytest.mark.parametrize("words", [("--input", "in"), ("--datasets", "in/a", "in/b")])
def test_merging(fails, words):
    write_random(Path("in/a"))
    write_random(Path("in/b"), dtype=np.int32)
    line = fails(merge_datasets, *words, "--output-prefix", "out/x")
    assert re.search("in/b contains int32, but in/a contains uint16: .* convert it with", line)
    Path("in/b.bin").write_bytes(b"1")
    line = fails(merge_datasets, *words, "--output-prefix", "out/x")
    assert re.search("in/b.bin: 1 bytes, expected .* copy both again", line)


@pytest.mark.parametrize("tool", ["train", "split", "presplit"])
def test_the_other_tools(fails, tool):
    Path("a.jsonl").write_bytes(_line(b'{"text": "\xff"}'))
    Path("a.json").write_bytes(gzip.compress(_GOOD))
    if tool == "train":
        line = fails(train_tokenizer, "a.jsonl", "out")
        assert "a.jsonl:3: bad UTF-8 (byte 10 of the line); fix or remove the line" in line
    elif tool == "split":
        line = fails(split_json, "--input_files", "a.json", "--output_dir", "out")
        assert "a.json: this file is compressed: decompress it first" in line
    else:
        line = fails(presplit_sentences_json, "a.jsonl", "out")
        assert "a.jsonl:3: bad UTF-8 (byte 10 of the line); fix or remove the line" in line


@pytest.mark.parametrize(
    ("flags", "files", "message"),
    [
        (
            "--vocab-file v --tokenizer-type BertWordPieceLowerCase",
            (b"a\n",),
            "v: no entry .*; give a",
        ),
        ("--vocab-file v --tokenizer-type EncDecTokenizer", (b"a\n",), "v: no entry <unk>"),
        ("--vocab-file v --tokenizer-type EncDecTokenizer", (b"\xff\n",), "v: not a UTF-8 text"),
        (
            "--vocab-file v --merge-file m --tokenizer-type GPT2BPETokenizer",
            (b"[",),
            "v: not a JSON",
        ),
        (
            "--tokenizer-model v --tokenizer-type GPTSentencePieceTokenizer",
            (b"words",),
            "v: not a SentencePiece model",
        ),
        (
            "--tokenizer-model v --tokenizer-type HuggingFaceTokenizer",
            (json.dumps({"model": 1}).encode(),),
            "v: not a Hugging Face tokenizer.json",
        ),
    ],
)
def test_vocabularies(fails, flags, files, message):
    Path("v").write_bytes(files[0])
    Path("m").write_bytes(b"#version: 0.2\n")
    Path("a.jsonl").write_bytes(_GOOD)
    line = fails(preprocess_data, "--input", "a.jsonl", "--output-prefix", "out/x", *flags.split())
    assert re.search(message, line), line
