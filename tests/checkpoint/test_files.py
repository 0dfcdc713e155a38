"""Large shares: several files per process, tensors in pieces."""

import hashlib
import os

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint import plan, shard, store
from megatron.checkpoint.entries import Entry, boxes_of_range
from megatron.checkpoint.find import TRACKER
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.plan import describe, files_of, make_plan, share_of
from megatron.checkpoint.reader import NativeReader
from megatron.errors import StorageError
from megatron.parallel.layout import Layout
from tests.checkpoint.states import assert_holds, make_state, read_whole, save, save_state
from tests.distributed import run_distributed

FILES = [f"rank_00000{number}.safetensors" for number in ("", "_1", "_2", "_3")]
WHOLE = torch.arange(600.0).reshape(5, 40, 3)


@pytest.fixture
def large(monkeypatch):
    """Lower the limits: a share of 256 bytes has four files."""
    monkeypatch.setattr(plan, "_LARGE", 64)


def _names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)


def test_tensors_are_written_hashed_and_verified_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(shard, "PIECE", 7)  # not a multiple of any element size
    path = save_state(tmp_path, 1)
    data, held = (path / FILES[0]).read_bytes(), NativeReader(path).manifest.tensors
    for name, (piece,) in ((name, info.pieces) for name, info in held.items()):
        span = data[piece.start : piece.start + piece.bytes]
        assert piece.sha256 == hashlib.sha256(span).hexdigest(), name
    assert_holds(open_checkpoint(tmp_path), make_state(1))
    (path / FILES[0]).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    save_state(tmp_path, 0)
    assert open_checkpoint(tmp_path).iteration == 0


def test_a_large_share_goes_to_files_of_about_one_size(tmp_path, large):
    state = make_state(3, hidden=32)
    path = save_state(tmp_path, 3, state)
    assert _names(path) == sorted(FILES)
    found = {}
    for name in FILES:
        found |= load_file(path / name)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], entry.tensor) for name, entry in state.items())
    assert_holds(open_checkpoint(tmp_path), state)
    (path / FILES[2]).write_bytes((path / FILES[2]).read_bytes()[:-1])
    save_state(tmp_path, 2)
    assert open_checkpoint(tmp_path).iteration == 2


def test_files_share_the_bytes():
    state = {f"{i}": Entry.whole(torch.empty(1 << 28, device="meta")) for i in range(21)}  # 21 GiB
    state["small"] = Entry.whole(torch.empty(7, device="meta"))
    agreed = make_plan([describe(state)])
    files, tensors = files_of(agreed, 0), share_of(agreed, state, 0)
    assert sorted(key for keys in files.values() for key in keys) == sorted(tensors)
    sizes = [sum(tensors[key].nbytes for key in keys) for keys in files.values()]
    assert sorted(files) == sorted(FILES)
    assert max(sizes) == 6 << 30
    one = {"a": Entry.whole(torch.empty((2 << 28) - 1, device="meta"))}
    assert files_of(make_plan([describe(one)]), 0) == {FILES[0]: ["a"]}


def _ranges(layout):
    """Return elements [13, 300) and [300, 587) of a tensor as boxes, and copies of another."""
    rank, edges = layout.world.rank, [0, 300, 600]
    start, end = edges[rank], edges[rank + 1]
    boxes = boxes_of_range((5, 40, 3), start, end)
    parts = WHOLE.flatten()[start:end].split([box.volume for box in boxes])
    moment = [
        Entry(part.view(box.shape), (5, 40, 3), box.offset)
        for part, box in zip(parts, boxes, strict=True)
    ]
    return {"moment": moment, "copy": Entry.whole(WHOLE), "whole": Entry.whole(WHOLE + 1)}


def _save_ranges(layout, root):
    save(root, 1, _ranges(layout), {}, layout)
    reader = open_checkpoint(root, layout=layout)
    return [
        torch.equal(read_whole(reader, name), WHOLE + (name == "whole")) for name in _ranges(layout)
    ]


def test_several_processes_with_several_files_each(tmp_path, large):
    assert run_distributed(2, _save_ranges, tmp_path) == [[True] * 3] * 2
    held = NativeReader(tmp_path / "iter_0000001").manifest
    assert len(held.files) == 4  # as many as there are tensors to write
    pieces = held.tensors["moment"].pieces
    assert len(pieces) > 2
    assert len({piece.file for piece in pieces}) == 2  # a process writes its pieces to one file


@pytest.mark.parametrize("name", FILES)
def test_a_disk_that_fails_for_one_of_the_files(tmp_path, large, monkeypatch, name):
    save_state(tmp_path, 1)
    write = store.write_shard

    def fail(path, *rest):
        if path.name == name:
            raise OSError(28, os.strerror(28))
        return write(path, *rest)

    monkeypatch.setattr(store, "write_shard", fail)
    with pytest.raises(StorageError, match=f"{name}: No space left"):
        save(tmp_path, 2, make_state(2), {}, Layout.single())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", TRACKER]
    assert (tmp_path / TRACKER).read_bytes() == b"1"
    assert_holds(open_checkpoint(tmp_path), make_state(1))
