"""Block files: names, missing blocks, all kinds of damage, division over processes."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from megatron.errors import DataError, StorageError
from megatron.parallel.layout import Axis, Layout
from megatron.retro.blocks import (
    DataSet,
    TableBlock,
    blocks_to_do,
    missing_blocks,
    open_hdf5,
    plan_blocks,
    read_block,
    write_block,
)
from tests.distributed import run_distributed

ALONE = Axis()
WIDTH = 3


def contents(block: TableBlock) -> dict[str, DataSet]:
    return {"data": DataSet("f4", (block.rows, WIDTH))}


def rows_of(block: TableBlock) -> np.ndarray:
    return np.arange(block.start * WIDTH, block.stop * WIDTH, dtype=np.float32).reshape(-1, WIDTH)


def write_all(folder: Path, count: int = 10, size: int = 4) -> list[TableBlock]:
    blocks = plan_blocks(folder, count, size)
    for block in blocks:
        write_block(block, {"data": rows_of(block)})
    return blocks


@pytest.mark.parametrize(
    ("count", "size", "names"),
    [
        (500, 200, ["0000-0200", "0200-0400", "0400-0500"]),
        (388, 1000, ["0000-0388"]),
        (2576, 1000, ["00000-01000", "01000-02000", "02000-02576"]),
        (1000, 1000, ["0000-1000"]),
        (1, 10, ["0-1"]),
        (0, 10, []),
    ],
)
def test_names_are_those_of_the_original(
    tmp_path: Path, count: int, size: int, names: list[str]
) -> None:
    assert [block.path.stem for block in plan_blocks(tmp_path, count, size)] == names


def test_a_written_block_is_read_back_and_has_the_layout_of_the_original(tmp_path: Path) -> None:
    blocks = write_all(tmp_path / "new" / "folder")
    for block in blocks:
        assert np.array_equal(read_block(block, contents)["data"], rows_of(block))
    with h5py.File(blocks[0].path) as file:
        assert file["data"].chunks is None
        assert not file.attrs
        assert not file["data"].attrs
    assert {path.suffix for path in blocks[0].path.parent.iterdir()} == {".hdf5"}


def test_missing_and_damaged_blocks_are_found_and_good_ones_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = write_all(tmp_path)
    assert missing_blocks(blocks, contents, ALONE) == []
    blocks[0].path.unlink()
    blocks[2].path.write_bytes(blocks[2].path.read_bytes()[:-1])
    good = blocks[1].path.stat().st_mtime_ns
    assert missing_blocks(blocks, contents, ALONE) == [blocks[0], blocks[2]]
    warning = capsys.readouterr().err
    assert str(blocks[2].path) in warning
    assert "rebuilt" in warning
    for block in blocks_to_do(blocks, contents, ALONE):
        write_block(block, {"data": rows_of(block)})
    assert missing_blocks(blocks, contents, ALONE) == []
    assert blocks[1].path.stat().st_mtime_ns == good


def test_progress_counts_the_rows_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    monkeypatch.setattr("megatron.retro.blocks.sync_folder", flushed.append)
    blocks = plan_blocks(tmp_path, 10, 4)
    write_block(blocks[1], {"data": rows_of(blocks[1])})
    for block in blocks_to_do(blocks, contents, ALONE, "chunks of x"):
        write_block(block, {"data": rows_of(block)})
    assert flushed == [tmp_path] * 3
    shown = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if line]
    assert shown[0].startswith("chunks of x:  40%")
    assert "4/10" in shown[0]
    assert shown[-1].startswith("chunks of x: 100%")
    assert "10/10" in shown[-1]
    assert list(blocks_to_do(blocks, contents, ALONE, "chunks of x")) == []
    assert capsys.readouterr().err == ""


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    block = write_all(tmp_path, count=4)[0]
    before = block.path.read_bytes()
    with pytest.raises(TypeError):
        write_block(block, {"data": np.array([object()])})
    assert block.path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [block.path]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    block = plan_blocks(tmp_path / "file", 4, 4)[0]
    with pytest.raises(StorageError, match="--retro-workdir .*file"):
        write_block(block, {"data": rows_of(block)})


def _compressed(file: h5py.File) -> None:
    file.create_dataset("data", (4, WIDTH), "f4", chunks=(4, WIDTH), compression="gzip")


def _external(file: h5py.File) -> None:
    file.create_dataset("data", (4, WIDTH), "f4", external=[("/etc/passwd", 0, 48)])


def _virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((4, WIDTH), "f4")
    layout[:] = h5py.VirtualSource("other.hdf5", "data", (4, WIDTH))
    file.create_virtual_dataset("data", layout)


def _linked(file: h5py.File) -> None:
    file["data"] = h5py.ExternalLink("other.hdf5", "data")


def _unstored(file: h5py.File) -> None:
    file.create_dataset("data", (4, WIDTH), "f4")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_compressed, "not stored contiguously"),
        (_external, "not stored contiguously"),
        (_virtual, "not stored contiguously"),
        (_unstored, "not stored contiguously"),
        (_linked, "no data set 'data'"),
        (lambda file: file.create_group("data"), "is a group"),
        (
            lambda file: file.create_dataset("other", data=[1]),
            r"no data set 'data' \(the file has 'other'\)",
        ),
        (
            lambda file: file.create_dataset("data", data=np.zeros((4, 2), np.float32)),
            "has 4x2 values of float32, expected 4x3 of float32",
        ),
        (
            lambda file: file.create_dataset("data", data=np.zeros((4, 3))),
            "has 4x3 values of float64",
        ),
        (lambda file: file.create_dataset("data", data=np.float32(1)), "has  values of float32"),
    ],
)
def test_what_a_file_must_not_hold_is_refused_by_name(
    tmp_path: Path, make: object, message: str
) -> None:
    block = plan_blocks(tmp_path, 4, 4)[0]
    with h5py.File(block.path, "w") as file:
        make(file)  # type: ignore[operator]
    with pytest.raises(DataError, match=message) as caught:
        read_block(block, contents)
    assert str(block.path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not HDF5", b"\x89HDF\r\n\x1a\n" + bytes(9)])
def test_a_file_that_is_not_hdf5_is_named(tmp_path: Path, content: bytes) -> None:
    block = plan_blocks(tmp_path, 4, 4)[0]
    block.path.write_bytes(content)
    with pytest.raises(DataError, match=r"00-04\.hdf5: not a readable HDF5 file"):
        read_block(block, contents)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"00-04\.hdf5 does not exist.*tools/retro/main.py"):
        read_block(plan_blocks(tmp_path, 4, 4)[0], contents)


def test_no_flip_or_cut_of_a_file_escapes_as_another_error(tmp_path: Path) -> None:
    block = write_all(tmp_path, count=4)[0]
    whole = block.path.read_bytes()
    random = np.random.default_rng(1)
    errors = []
    for _ in range(300):
        data = bytearray(whole)
        for at in random.integers(0, len(whole), 3):
            data[at] ^= 1 << random.integers(8)
        block.path.write_bytes(bytes(data[: random.integers(len(data)) if at % 4 == 0 else None]))
        try:
            found = read_block(block, contents)["data"]
        except DataError as error:
            errors.append(str(error))
        else:
            assert (found.shape, found.dtype) == ((4, WIDTH), np.float32)
    assert len(errors) > 30
    assert all(str(block.path) in error for error in errors)


def test_a_flat_empty_table_is_accepted_only_where_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "file.hdf5"
    with h5py.File(path, "w") as file:
        file.create_dataset("none", data=np.zeros(0, np.uint32))
    with open_hdf5(path, {"none": DataSet("u4", (None, 4), may_be_flat=True)}) as sets:
        assert sets["none"].shape == (0,)
    with (
        pytest.raises(DataError, match="expected anyx4"),
        open_hdf5(path, {"none": DataSet("u4", (None, 4))}),
    ):
        pass


def _write_mine(layout: Layout, folder: Path) -> list[int]:
    blocks = plan_blocks(folder, 10, 2)
    mine = []
    for block in blocks_to_do(blocks, contents, layout.world):
        mine.append(block.start)
        write_block(block, {"data": rows_of(block)})
    assert all(block.path.exists() for block in blocks)  # including other processes'
    return mine


def test_processes_divide_what_is_missing(tmp_path: Path) -> None:
    done = plan_blocks(tmp_path, 10, 2)[1]
    write_block(done, {"data": rows_of(done)})
    before = done.path.stat().st_mtime_ns
    assert run_distributed(2, _write_mine, tmp_path) == [[0, 6], [4, 8]]
    assert done.path.stat().st_mtime_ns == before
