"""tools/merge_datasets.py: order, content and mistakes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.tools import merge_datasets
from tools import convert_dataset


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> None:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_documents(document, [len(document)] * bool(document), [bool(document)])


def merge(folder: Path, prefix: Path, *flags: str) -> int:
    return merge_datasets.main(["--input", str(folder), "--output-prefix", str(prefix), *flags])


def test_sorted_by_name_and_again(tmp_path):
    write(tmp_path / "b", [[4, 5], [6]])
    write(tmp_path / "a", [[1, 2, 3], []])
    write(tmp_path / "a_2", [[9]])
    write(tmp_path / "other" / "whole", [[1, 2, 3], [], [9], [4, 5], [6]])
    # On the second run, the first result is in the folder and must not be joined to itself.
    for flags in ((), ("--overwrite",)):
        assert merge(tmp_path, tmp_path / "whole", *flags) == 0
        for suffix in (".bin", ".idx"):
            got = (tmp_path / f"whole{suffix}").read_bytes()
            assert got == (tmp_path / "other" / f"whole{suffix}").read_bytes()
    assert IndexedDataset(tmp_path / "whole").document_indices.tolist() == [0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "there are no .bin and .idx files"),
        (
            lambda folder: write(folder / "b", [[1]], np.int32),
            "b contains int32, but .*a contains uint16",
        ),
        (lambda folder: (folder / "b.bin").write_bytes(b""), "b.idx is missing; restore it"),
        (lambda folder: (folder / "a.bin").write_bytes(b"1"), "a.bin: 1 bytes, expected 2"),
    ],
)
def test_mistakes_are_named(tmp_path, capsys, make, message):
    import re

    folder = tmp_path / "in"
    folder.mkdir()
    if "no .bin" not in message:
        write(folder / "a", [[1]])
    make(folder)
    assert merge(folder, tmp_path / "out") == 6
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.glob("out*"))


def test_a_dataset_of_the_folder_is_not_replaced(tmp_path, capsys):
    write(tmp_path / "a", [[1]])
    write(tmp_path / "b", [[2, 3]])
    before = (tmp_path / "a.bin").read_bytes()
    assert merge(tmp_path, tmp_path / "a") == 6
    assert f"--output-prefix {tmp_path}/a is a dataset in --input" in capsys.readouterr().err
    assert (tmp_path / "a.bin").read_bytes() == before


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_an_existing_dataset_is_not_replaced(tmp_path, capsys, ending):
    write(tmp_path / "in" / "a", [[1]])
    (tmp_path / f"out.{ending}").write_text("mine")
    assert merge(tmp_path / "in", tmp_path / "out") == 9
    assert (
        f"--output-prefix: {tmp_path}/out.{ending} already exists: choose another name, or give "
        "--overwrite to replace it"
    ) in capsys.readouterr().err
    assert (tmp_path / f"out.{ending}").read_text() == "mine"
    assert merge(tmp_path / "in", tmp_path / "out", "--overwrite") == 0
    assert IndexedDataset(tmp_path / "out").get(0).tolist() == [1]


def test_missing_folder(tmp_path, capsys):
    assert merge(tmp_path / "nowhere", tmp_path / "out") == 6
    assert "nowhere: not a folder" in capsys.readouterr().err


def test_an_empty_prefix_would_write_files_without_a_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in" / "a", [[1]])
    message = '--output-prefix "": give the beginning of the names of the output files'
    for main, source in ((merge_datasets.main, "in"), (convert_dataset.main, "in/a")):
        assert main(["--input", source, "--output-prefix", ""]) == 9
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
