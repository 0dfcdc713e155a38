"""tools/convert_dataset.py: old formats, parts that are joined again, numpy shards, mistakes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.data import indexed
from megatron.data.datasets import DataRequest
from megatron.data.gpt import build_gpt_datasets
from megatron.data.indexed import IndexedDataset
from megatron.tools import merge_datasets
from tests.data.test_indexed import read_all, write_cached, write_random
from tools import convert_dataset


def convert(*words: object) -> int:
    return convert_dataset.main([str(word) for word in words])


def as_cached(prefix: Path, target: Path) -> None:
    """Write a dataset in the older format, like its builder."""
    data = IndexedDataset(prefix)
    lengths, count = data.sequence_lengths, len(data)
    numbers = [1, 4, 4, count, count, len(data.document_indices), *range(count + 1)]
    numbers += [0, *np.cumsum(lengths), *lengths, *data.document_indices]
    tokens = np.concatenate([data.get(i) for i in range(count)]).astype("<i4")
    write_cached(target, b"TNTIDX\0\0" + np.array(numbers, "<i8").tobytes(), tokens.tobytes())


def test_an_old_dataset_converts_and_trains(tmp_path, monkeypatch):
    """A run's samples are the same before and after."""
    monkeypatch.setattr(indexed, "_MAX_DOCUMENTS", 33)
    monkeypatch.setattr(indexed, "_CHUNK", 100)
    write_random(tmp_path / "a")
    as_cached(tmp_path / "a", tmp_path / "old")
    assert convert("--input", tmp_path / "old", "--output-prefix", tmp_path / "n" / "new") == 0
    assert IndexedDataset(tmp_path / "n" / "new").dtype == np.int32
    words = ("--vocab-size", 50257, "--output-prefix", tmp_path / "small")
    assert convert("--input", tmp_path / "old", *words) == 0
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"small{suffix}").read_bytes() == (tmp_path / f"a{suffix}").read_bytes()
    samples = []
    for prefix in (tmp_path / "old", tmp_path / "small"):
        request = DataRequest(DataConfig(seq_length=16, data_path=(str(prefix),)), 1234, (50, 0, 0))
        dataset = build_gpt_datasets(request, seq_length=16, vocab_size=50257).train
        samples.append([dataset[i]["text"].tolist() for i in range(50)])
    assert samples[0] == samples[1]


@pytest.mark.parametrize(
    ("words", "parts"), [(("--parts", 12), 12), (("--documents-per-part", 33), 7)]
)
def test_parts_join_again(tmp_path, words, parts):
    write_random(tmp_path / "whole")
    folder = tmp_path / "parts"
    assert convert("--input", tmp_path / "whole", "--output-prefix", folder / "p", *words) == 0
    names = sorted(path.stem for path in folder.glob("*.idx"))
    digits = len(str(parts - 1))
    assert names == [f"p_{i:0{digits}}" for i in range(parts)]
    joined = str(tmp_path / "joined")
    assert merge_datasets.main(["--input", str(folder), "--output-prefix", joined]) == 0
    listed = ["--datasets", *(str(folder / name) for name in names)]
    again = str(tmp_path / "again")
    assert merge_datasets.main([*listed, "--output-prefix", again]) == 0
    for suffix in (".bin", ".idx"):
        want = (tmp_path / f"whole{suffix}").read_bytes()
        assert Path(joined + suffix).read_bytes() == Path(again + suffix).read_bytes() == want


def test_numpy_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(convert_dataset, "_SHARD_TOKENS", 3)
    np.save(tmp_path / "b.npy", np.array([1, 2, 0, 3, 0, 4], np.uint16))
    np.save(tmp_path / "a.npy", np.array([[5, 6], [7, 8]], np.int64))
    for eod, flags in (
        ([[5, 6], [7, 8], [1, 2, 0, 3, 0, 4]], ()),
        ([[5, 6], [7, 8], [1, 2, 0], [3, 0], [4]], ("--eod-id", 0)),
    ):
        words = ("--input", tmp_path, "--output-prefix", tmp_path / "out", "--overwrite", *flags)
        assert convert(*words) == 0
        assert read_all(tmp_path / "out") == eod
    assert IndexedDataset(tmp_path / "out").dtype == np.int32


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--input a", 9, "--output-prefix: .*out.idx already exists"),
        ("--input a a", 9, "tools/merge_datasets.py joins several"),
        ("--input a --overwrite --vocab-size 0", 9, "--vocab-size 0: give at least 1"),
        ("--input a --parts 500", 9, "--parts 500: the dataset has 200 documents"),
        ("--input a --parts 2 --documents-per-part 2", 9, "give only one of them"),
        ("--input a --eod-id 0", 9, "--eod-id is for .npy files"),
        ("--input out --overwrite", 6, "is the input: give another name"),
        ("--input words.npy --overwrite", 6, "words.npy: an array .* expected token ids"),
        ("--input object.npy --overwrite", 6, "object.npy: not a .npy file of numbers"),
        ("--input cut.npy --overwrite", 6, "cut.npy: not a .npy file of numbers, or truncated"),
        ("--input text.npy --overwrite", 6, "text.npy: not a .npy file of numbers"),
        ("--input low.npy --overwrite", 6, "low.npy: negative token id -1 at position 1"),
        ("--input big.npy --overwrite", 6, "token id 70000 does not fit uint16"),
        ("--input none.npy --overwrite", 6, "dataset none.npy: none.npy.idx does not exist"),
    ],
)
def test_mistakes_are_named_and_write_nothing(tmp_path, monkeypatch, capsys, words, code, message):
    import re

    monkeypatch.chdir(tmp_path)
    write_random(tmp_path / "a")
    write_random(tmp_path / "out", sequences=1)
    np.save("words.npy", np.array(["a"]))
    np.save("object.npy", np.array([{}], object), allow_pickle=True)
    np.save("low.npy", np.array([1, -1]))
    np.save("big.npy", np.array([70000]))
    np.save("good.npy", np.arange(100))
    Path("cut.npy").write_bytes(Path("good.npy").read_bytes()[:200])
    Path("text.npy").write_text("words")
    flags = ["--vocab-size", "50257"] if "big" in words else []
    before = {path: path.read_bytes() for path in Path().iterdir()}
    try:
        found = convert(*words.split(), "--output-prefix", "out", *flags)
    except SystemExit as error:
        found = error.code
    assert found == code
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert len(error.splitlines()) == 1
    assert {path: path.read_bytes() for path in Path().iterdir()} == before
