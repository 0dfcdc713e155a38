"""Safetensors files read through their mapping: positions, digests, damage, replaced files."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.checkpoint import mapped
from megatron.checkpoint.mapped import MappedFile
from megatron.errors import CheckpointError

_TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([1.5, -2], dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
    "scalar": torch.tensor(7, dtype=torch.int64),
}


def test_tensors_are_where_the_header_says(tmp_path: Path) -> None:
    save_file(_TENSORS, tmp_path / "x")
    file = MappedFile(tmp_path / "x")
    assert file.size == (tmp_path / "x").stat().st_size
    header = file.header()
    assert header.keys() == _TENSORS.keys()
    for name, tensor in _TENSORS.items():
        assert torch.equal(file.tensor(header[name]), tensor)
        assert file.tensor(header[name]).dtype == tensor.dtype


def _write(path: Path, header: Any, data: bytes, length: int | None = None) -> MappedFile:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return MappedFile(path)


def _entry(start: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_a_header_of_any_length_and_order_is_read(tmp_path: Path) -> None:
    data = struct.pack("<ff", 1.5, -2.5)
    for spaces in range(4):  # three of the lengths misalign the tensors
        text = json.dumps({"b": _entry(4, 8), "e": _entry(4, 4, shape=(0,)), "a": _entry(0, 4)})
        file = _write(tmp_path / "x", text.encode() + b" " * spaces, data)
        header = file.header()
        assert file.tensor(header["a"]).tolist() == [1.5]
        assert file.tensor(header["b"]).tolist() == [-2.5]
        assert file.tensor(header["e"]).shape == (0,)


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({"a": _entry(0, 4)}, bytes(4), 10**9, "a header of 1,000,000,000 bytes in a file of"),
        ({"a": _entry(0, 4)}, b"", 10**6, "a header of 1,000,000 bytes in a file of"),
        ({"a": _entry(0, 4, "F7")}, bytes(4), None, "a has the unknown type 'F7'"),
        ({"a": _entry(0, 8)}, bytes(8), None, "a has a wrong position or size"),
        ({"a": _entry(1, 5)}, bytes(5), None, "a has a wrong position or size"),
        ({"a": _entry(0, 4), "b": _entry(5, 9)}, bytes(9), None, "b has a wrong position or size"),
        ({"a": _entry(0, 4), "b": _entry(3, 7)}, bytes(7), None, "b has a wrong position or size"),
        ({"a": _entry(0, 4)}, bytes(5), None, "bytes, but header and tensors have"),
        ({"a": _entry(0, 4)}, bytes(3), None, "bytes, but header and tensors have"),
        (b"{", b"", None, ""),
    ],
)
def test_what_is_no_safetensors_file_is_refused(
    header: Any, data: bytes, length: int | None, message: str, tmp_path: Path
) -> None:
    file = _write(tmp_path / "x", header, data, length)
    with pytest.raises(CheckpointError, match=f"x: not a safetensors file: .*{message}"):
        file.header()


def test_a_header_may_fill_the_file(tmp_path: Path) -> None:
    assert _write(tmp_path / "x", {}, b"").header() == {}


@pytest.mark.parametrize("piece", [1, 7, 64, 1000])
def test_digests_of_parts(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "PIECE", piece)
    data = bytes(range(100))
    (tmp_path / "x").write_bytes(data)
    file = MappedFile(tmp_path / "x")
    for start, size in ((0, 100), (3, 64), (3, 63), (99, 1), (50, 0), (90, 20), (200, 5)):
        expected = hashlib.sha256(data[start : start + size]).hexdigest()
        assert file.digest(start, size) == expected, (start, size)


def test_a_file_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    save_file(_TENSORS, tmp_path / "x")
    file = MappedFile(tmp_path / "x")
    save_file({"a": _TENSORS["a"] + 1}, tmp_path / "y")
    (tmp_path / "y").replace(tmp_path / "x")
    assert torch.equal(file.tensor(file.header()["a"]), _TENSORS["a"])  # the mapping stays
    with pytest.raises(CheckpointError, match="x: replaced while it was read"):
        file.digest(0, 1)
    for name, message in (("none", "none: cannot be read: No such file"), (".", "not a regular")):
        with pytest.raises(CheckpointError, match=message):
            MappedFile(tmp_path / name)
