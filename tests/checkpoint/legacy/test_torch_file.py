"""Files in torch.save's format that we write and read without PyTorch's own functions."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.legacy import torch_file
from megatron.checkpoint.legacy.torch_file import (
    RankFile,
    TorchZip,
    append_torch_file,
    write_torch_file,
)
from megatron.checkpoint.legacy.unpickler import StorageRef, TensorRef
from megatron.errors import CheckpointError

TREE = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(3, dtype=torch.int16),
    "c": [torch.zeros(0, 4), torch.tensor(2.5, dtype=torch.bfloat16), {"text": 1}],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "name.pt"
    write_torch_file(made, TREE)
    return made


@pytest.mark.parametrize("large", [1 << 30, 1])  # with ZIP64 headers, which large records have
def test_records_are_aligned_whole_and_named_like_pytorch_s(
    large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_file, "_LARGE", large)
    monkeypatch.setattr(torch_file, "_CHUNK", 5)
    path = tmp_path / "name.pt"
    write_torch_file(path, TREE)
    archive = TorchZip(path)
    names = ["data.pkl", "byteorder", *(f"data/{key}" for key in range(4)), "version"]
    with zipfile.ZipFile(path) as plain:
        assert plain.namelist() == [f"name/{name}" for name in names]
        assert plain.testzip() is None
        for name in names:
            assert bytes(archive.record(name)) == plain.read(f"name/{name}")
    data = path.read_bytes()
    for name in names:
        assert archive._records[name][0] % 64 == 0
    assert bytes(archive.record("version")) == b"3\n"
    assert archive.record("data/0").nbytes == 24
    assert (data.count(b"FB") >= 7, data[:4]) == (True, b"PK\x03\x04")
    archive.verify()
    found = torch.load(path, weights_only=True, mmap=True)
    assert found["a"].equal(TREE["a"])
    assert found["b"].equal(TREE["b"])
    empty, scalar, rest = found["c"]
    assert (empty.shape, scalar.item(), scalar.dtype, rest) == (
        (0, 4),
        2.5,
        torch.bfloat16,
        {"text": 1},
    )


def test_tensors_are_views_of_the_file(path: Path) -> None:
    archive = TorchZip(path)
    tree = archive.tree()
    assert archive.load(tree["a"]).equal(torch.arange(6.0).view(2, 3))
    empty, scalar, _ = tree["c"]
    assert archive.load(empty).shape == (0, 4)
    assert (archive.number(scalar), archive.number(3), archive.number(0.5)) == (2.5, 3, 0.5)
    for value in (tree["b"], "x", True, float("inf"), float("nan"), None):
        with pytest.raises(CheckpointError, match="is not a finite number"):
            archive.number(value)
    storage = tree["a"].storage
    assert storage == StorageRef(torch.float32, "0", 6)
    column = TensorRef(storage, 1, (2,), (3,))
    assert archive.load(column).tolist() == [1, 4]
    for wrong in (
        StorageRef(torch.float32, "0", 5),
        StorageRef(torch.float16, "0", 6),
        StorageRef(torch.float32, "7", 6),
    ):
        with pytest.raises(CheckpointError, match="wrong size|'data/7' is missing"):
            archive.find(TensorRef(wrong, 0, (2,), (1,)))


@pytest.mark.parametrize("name", ["data/0", "data/3", "version", "data.pkl"])
def test_a_changed_record_is_found_and_named(path: Path, name: str) -> None:
    archive = TorchZip(path)
    start, _ = archive._records[name]
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    changed = TorchZip(path)
    with pytest.raises(CheckpointError, match=f"damaged: record '{name}' fails its CRC-32"):
        changed.verify()
    if name == "data.pkl":
        with pytest.raises(CheckpointError, match="fails its CRC-32"):
            changed.tree()
    else:
        changed.tree()


def test_files_within_a_file_are_read_where_they_are(tmp_path: Path) -> None:
    path, spans = tmp_path / "several", []
    with path.open("wb") as file:
        for number in range(3):
            start = file.tell()
            append_torch_file(file, {"x": torch.full((2,), float(number))})
            spans.append(slice(start, file.tell()))
    data = memoryview(bytearray(path.read_bytes()))
    for number, span in enumerate(spans):
        archive = TorchZip(path, window=data[span])
        assert archive.load(archive.tree()["x"]).tolist() == [number, number]
        assert torch.load(io.BytesIO(data[span]))["x"].tolist() == [number, number]
    with pytest.raises(CheckpointError, match="not a file of torch.save"):
        TorchZip(path, window=data[spans[0].start : spans[0].stop - 9])


def test_a_window_is_read_like_a_file() -> None:
    window = torch_file._Window(memoryview(b"0123456789"))
    assert window.seekable()
    assert (window.read(3), window.tell(), window.read()) == (b"012", 3, b"3456789")
    assert (window.seek(2), window.seek(3, io.SEEK_CUR), window.read(2)) == (2, 5, b"56")
    assert (window.seek(-4, io.SEEK_END), window.read(None), window.read(1)) == (6, b"6789", b"")
    assert (window.seek(0), window.read(0), window.tell()) == (0, b"", 0)
    with pytest.raises(OSError, match="before the start"):
        window.seek(-1)


def test_what_is_no_dict_is_refused(tmp_path: Path) -> None:
    for number, tree in enumerate(([1], 3)):
        path = tmp_path / str(number)
        write_torch_file(path, tree)
        with pytest.raises(CheckpointError, match="does not contain a dict"):
            TorchZip(path).tree()


def _patched(path: Path, at: int, value: bytes) -> None:
    """Change bytes of the first record's entry in the directory."""
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + at : entry + at + len(value)] = value
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (8, b"\x01", "compressed or encrypted"),  # a flag
        (10, b"\x08", "compressed or encrypted"),  # the method
        (20, struct.pack("<I", 1), "compressed or encrypted"),  # the compressed size
        (42, struct.pack("<I", 1), "is not where it should be"),  # the offset
    ],
)
def test_records_that_are_not_stored_as_they_are_are_refused(
    path: Path, at: int, value: bytes, message: str
) -> None:
    _patched(path, at, value)
    with pytest.raises(CheckpointError, match=message):
        TorchZip(path)


@pytest.mark.parametrize(
    ("tree", "chunks"),
    [
        ({"model": 1}, [1]),
        ({}, [None]),
        ({"model0": 1, "model1": 2, "model3": 4, "model": 5}, [1, 2]),
        ({f"model{index}": index for index in range(1001)}, [*range(1000)]),
    ],
)
def test_a_file_has_a_chunk_for_each_virtual_stage(
    path: Path, tree: dict[str, Any], chunks: list[Any]
) -> None:
    assert RankFile(0, 0, TorchZip(path), tree).chunks == chunks
