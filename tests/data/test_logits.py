"""Files of a teacher's logits: their bytes, headers and sizes, and damage of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.data import logits as files
from megatron.errors import DataError
from megatron.tokenizer import build_tokenizer
from tests.config.command import parse

_WRITE_AGAIN = "delete it and write it again with --logits-save-dir"
_HEADER = files.LogitsHeader(
    seed=1,
    seq_length=3,
    tokenizer="t",
    vocab_size=9,
    separates_documents=[False, True],
    temperature=2.0,
    top_k=2,
    top_p=None,
    top_p_min_k=1,
    dtype="fp16",
    samples=5,
    samples_per_file=2,
    teacher="t",
)
_TOKENS = [{"text": np.arange(4) + 7 * i, "id": i} for i in range(5)]


def _write(folder: Path, header: files.LogitsHeader = _HEADER) -> list[dict[str, np.ndarray]]:
    """Write a folder of 5 samples with 0, 1 or 2 entries at a position, and return the samples."""
    (folder / files.HEADER).write_text(json.dumps(asdict(header)))
    written = []
    for i in range(5):
        ids = torch.tensor([[8, i], [-1, -1], [i, -1]])
        values = torch.where(ids >= 0, -0.5 - ids / 4, -torch.inf)
        rest = torch.tensor([-3.0, 0.0, -1.0]) - i * torch.tensor([1, 0, 1])
        written.append({files.TOP_IDS: ids, files.TOP_VALUES: values, files.TOP_REST: rest})
    for part in header.files():
        digests = [files.digest_of_tokens(_TOKENS[i]) for i in part]
        samples = [written[i] for i in part]
        files.write_file(header.path(folder, part.start), header, samples, digests)
    return [{name: value.numpy() for name, value in one.items()} for one in written]


def _dataset(folder: Path, **changed: Any) -> files.TeacherLogitsDataset:
    return files.TeacherLogitsDataset(_TOKENS, folder, _HEADER, **changed)


def test_the_samples_read_are_those_written(tmp_path: Path) -> None:
    written = _write(tmp_path)
    dataset = _dataset(tmp_path)
    assert len(dataset) == 5
    for i in (3, 0, 4, 1, 2):
        sample = dataset[i]
        assert sample["id"] == i
        assert sample["text"] is _TOKENS[i]["text"]
        for name, expected in written[i].items():
            found = np.asarray(sample[name])
            assert found.dtype == (np.int32 if name == files.TOP_IDS else np.float32)
            assert np.array_equal(found, expected), (i, name)
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(str(tmp_path)) <= 1  # files that were read are closed


def test_the_content_of_a_file(tmp_path: Path) -> None:
    """Folders are kept for long, so these bytes must not change from one version to the next."""
    _write(tmp_path)
    names = [f"logits-{first:012d}.safetensors" for first in (0, 2, 4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "logits.json"]
    found = load_file(tmp_path / names[1])
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()} == {
        "ids": (torch.int16, [8, 2, 2, 8, 3, 3]),
        "values": (torch.float16, [-2.5, -1.0, -1.0, -2.5, -1.25, -1.25]),
        "counts": (torch.int32, [[2, 0, 1], [2, 0, 1]]),
        "starts": (torch.int64, [0, 3, 6]),
        "rest": (torch.float32, [[-5.0, 0.0, -3.0], [-6.0, 0.0, -4.0]]),
        "tokens": (torch.int64, [-2723448155977578714, -1409019256561326849]),
        "checks": (torch.int64, [8297231209751020940, -5371083981495006485]),
    }
    for vocabulary, stored in ((65_536, torch.int16), (65_537, torch.int32)):
        _write(tmp_path, replace(_HEADER, vocab_size=vocabulary))
        assert load_file(tmp_path / names[0])["ids"].dtype == stored


@pytest.mark.parametrize(
    ("length", "top_k", "kept", "per_file"),
    [
        (8, 5, 5, 256),
        (1024, 64, 64, 256),  # 2**24 entries
        (1024, 65, 65, 252),
        (1 << 20, 15, 15, 1),
        (1 << 20, 8, 8, 2),
        (1 << 23, 8, 8, 1),  # more entries in a sample than a file should have
        (1 << 20, 1000, 101, 1),  # of a vocabulary of 101
    ],
)
def test_a_file_holds_about_16_million_entries(
    length: int, top_k: int, kept: int, per_file: int
) -> None:
    words = "--teacher-load t --logits-save-dir s --kd-temperature 1.5 --seed 6 --seq-length"
    options = "--logits-save-top-p 0.75 --logits-save-top-p-min-k 3 --logits-save-dtype bf16"
    config = parse(f"{words} {length} --logits-save-top-k {top_k} {options}").config
    tokenizer = build_tokenizer(config.tokenizer)
    header = files.new_header(config, tokenizer, samples=40, teacher="folder")
    assert header == files.LogitsHeader(
        seed=6,
        seq_length=length,
        tokenizer=tokenizer.fingerprint(),
        vocab_size=101,
        separates_documents=[False, False],
        temperature=1.5,
        top_k=kept,
        top_p=0.75,
        top_p_min_k=3,
        dtype="bf16",
        samples=40,
        samples_per_file=per_file,
        teacher="folder",
        format="megatron-top-logits-1",
    )


@pytest.mark.parametrize("name", ["seq_length", "samples", "samples_per_file", "top_k"])
def test_numbers_in_a_header_are_positive_integers(name: str, tmp_path: Path) -> None:
    path = tmp_path / files.HEADER
    for number in (0, -1, True, 2.0, "2", None):
        path.write_text(json.dumps({**asdict(_HEADER), name: number}))
        with pytest.raises(DataError, match=r"logits.json is damaged \(a value has the wrong type"):
            files.read_header(tmp_path, "--logits-load-dir")
    path.write_text(json.dumps({**asdict(_HEADER), name: 1}))
    assert files.read_header(tmp_path, "--x") == replace(_HEADER, **{name: 1})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, ""),
        ("{", "Expecting"),
        ("[1]", "the format is not megatron-top-logits-1"),
        (json.dumps({**asdict(_HEADER), "format": "megatron-top-logits-2"}), "the format is not"),
        (json.dumps({**asdict(_HEADER), "dtype": "int8"}), "a value has the wrong type"),
        (json.dumps({**asdict(_HEADER), "more": 1}), "unexpected keyword argument 'more'"),
        (json.dumps({"format": files.FORMAT}), "missing 13 required"),
    ],
)
def test_damaged_headers_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / files.HEADER).write_text(text)
    with pytest.raises(DataError, match=rf"logits.json is damaged \(.*{reason}.*\): delete the fo"):
        files.read_header(tmp_path, "--logits-load-dir")


def test_a_header_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--x .*: there is no logits.json: give a folder that"):
        files.read_header(tmp_path, "--x")
    (tmp_path / files.HEADER).mkdir()
    with pytest.raises(DataError, match="--x .*: there is no logits.json: give a folder that"):
        files.read_header(tmp_path, "--x")
    with pytest.raises(DataError, match=r"logits.json cannot be read \(File name too long\): make"):
        files.read_header(Path("x" * 300), "--x")


def test_a_folder_is_continued_only_with_the_same_settings(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    files.begin_folder(folder, _HEADER)
    text = (folder / files.HEADER).read_text()
    assert json.loads(text) == asdict(_HEADER)
    assert text.startswith('{\n  "seed": 1,\n')
    assert text.endswith("\n}\n")
    before = (folder / files.HEADER).stat().st_mtime_ns
    files.begin_folder(folder, _HEADER)
    assert (folder / files.HEADER).stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"with seed 1 \(here 2\), top_p None \(here 0.5\): give"):
        files.begin_folder(folder, replace(_HEADER, seed=2, top_p=0.5))


def _damage(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the first file of a folder so that its digests still match."""
    path = _HEADER.path(folder, 0)
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    parts = [files._sample_tensors(tensors, i) for i in range(2)]
    tensors["checks"] = torch.tensor([files._digest(*one) for one in parts])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["ids"].__setitem__(0, 9), "an id is outside the vocabulary"),
        (lambda t: t.update(ids=t["ids"].int() - 9), "an id is outside the vocabulary"),
        (lambda t: t.update(counts=t["counts"][:, :2]), "2 tokens and 3 remainders, expected 3"),
        (lambda t: t.update(rest=t["rest"][:, :2]), "3 tokens and 2 remainders, expected 3"),
        (
            lambda t: t.update(counts=torch.tensor([[3, -1, 1]] * 2)),
            "the numbers of entries do not add up",
        ),
        (
            lambda t: t.update(counts=torch.tensor([[2, 1, 1]] * 2)),
            "the numbers of entries do not add up",
        ),
        (
            lambda t: t.update(counts=torch.tensor([[2, 0, 0]] * 2)),
            "the numbers of entries do not add up",
        ),
    ],
)
def test_damage_that_the_digests_cannot_show(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    _write(tmp_path)
    _damage(tmp_path, change)
    with pytest.raises(DataError, match=rf"is damaged \({message}\): {_WRITE_AGAIN}"):
        _dataset(tmp_path)[0]


def test_samples_that_a_folder_does_not_hold(tmp_path: Path) -> None:
    _write(tmp_path)
    dataset = files.TeacherLogitsDataset([*_TOKENS, _TOKENS[0]], tmp_path, _HEADER)
    assert dataset[4]["id"] == 4
    with pytest.raises(DataError, match="has the logits of 5 samples, but sample 5 is needed"):
        dataset[5]
    swapped = files.TeacherLogitsDataset(_TOKENS[::-1], tmp_path, _HEADER)
    assert swapped[2]["id"] == 2
    with pytest.raises(DataError, match="sample 3 has different tokens than when"):
        swapped[3]
    assert list(files.missing_files(tmp_path, _HEADER)) == []
    for first in (0, 4):
        _HEADER.path(tmp_path, first).unlink()
    assert list(files.missing_files(tmp_path, _HEADER)) == [range(2), range(4, 5)]
    with pytest.raises(DataError, match=r"logits-000000000004.safetensors is missing: run the"):
        _dataset(tmp_path)[4]


def test_what_cannot_be_read_is_reported_once_and_has_no_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = _write(tmp_path)
    _HEADER.path(tmp_path, 4).unlink()
    _damage(tmp_path, lambda t: t["ids"].fill_(9))
    dataset = _dataset(tmp_path, ignores_errors=True)
    for i in (0, 1, 4):
        sample = dataset[i]
        assert sample["text"] is _TOKENS[i]["text"]
        assert sample[files.TOP_IDS].tolist() == [[-1, -1]] * 3
        assert sample[files.TOP_VALUES].tolist() == [[-np.inf, -np.inf]] * 3
        assert sample[files.TOP_REST].tolist() == [0.0] * 3
    assert np.array_equal(dataset[2][files.TOP_IDS], written[2][files.TOP_IDS])
    said = capsys.readouterr().err
    assert said.count("--logits-load-ignore-errors: only the sample's tokens are used") == 1
    assert "logits-000000000000.safetensors is damaged" in said


@pytest.mark.parametrize("ignores", [False, True])
def test_files_may_be_missing_only_if_errors_are_ignored(ignores: bool, tmp_path: Path) -> None:
    words = f"--logits-load-dir {tmp_path}" + ignores * " --logits-load-ignore-errors"
    config = parse(words, "--seq-length 3").config
    tokenizer = build_tokenizer(config.tokenizer)
    settings = files.sample_settings(config, tokenizer)
    _write(tmp_path, replace(_HEADER, **settings))
    assert files.with_logits(_TOKENS, config, tokenizer).ignores_errors is ignores
    _HEADER.path(tmp_path, 2).unlink()
    if ignores:
        assert files.with_logits(_TOKENS, config, tokenizer)[1]["top_ids"][0].tolist() == [8, 1]
    else:
        with pytest.raises(DataError, match="1 of 3 files are missing: run the command"):
            files.with_logits(_TOKENS, config, tokenizer)
