"""Saving: what is on disk, what is read back, and what happens if the disk refuses."""

import hashlib
import json
import os
import re
import resource
import signal
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint import store
from megatron.checkpoint.entries import Box, Entry
from megatron.checkpoint.find import TRACKER
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.plan import make_plan
from megatron.checkpoint.reader import NativeReader
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.layout import Layout
from tests.checkpoint.states import (
    assert_holds,
    assert_loads,
    make_state,
    meta_of,
    read_whole,
    save,
    save_state,
)
from tests.distributed import run_distributed


def test_a_state_comes_back_bit_for_bit(tmp_path):
    state, meta = make_state(1), {**meta_of(7), "schedule": {"num_steps": 0.1 + 0.2}}
    path = save(tmp_path, 7, state, meta, Layout.single())
    assert path == tmp_path / "iter_0000007"
    assert (tmp_path / TRACKER).read_bytes() == b"7"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000007", TRACKER]
    reader = open_checkpoint(tmp_path)
    assert_holds(reader, state)
    assert reader.meta == meta


def test_every_box_of_a_tensor_can_be_read(tmp_path):
    state = make_state(1)
    save_state(tmp_path, 1, state)
    reader, name = open_checkpoint(tmp_path), "model.layers.0.mlp.up.weight"
    part = reader.read(name, Box((5, 2), (9, 3)), global_shape=(32, 8))
    assert torch.equal(part, state[name].tensor[5:14, 2:5])


def test_another_global_shape_is_refused_with_both_shapes(tmp_path):
    save_state(tmp_path, 1)
    reader = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"\[8\], but this run needs \[16\]"):
        reader.read("model.norm.weight", Box.whole((8,)), global_shape=(16,))
    with pytest.raises(CheckpointError, match="no tensor 'model.gone'"):
        reader.read("model.gone", Box.whole((1,)), global_shape=(1,))
    with pytest.raises(CheckpointError, match="no tensor 'model.gone'"):
        reader.dtype("model.gone")


def test_files_are_plain_safetensors_and_digests_are_sha256(tmp_path):
    state = make_state(3)
    path = save_state(tmp_path, 3, state)
    shard = path / "rank_00000.safetensors"
    loaded = load_file(shard)
    assert set(loaded) == set(state)
    assert all(torch.equal(loaded[name], entry.tensor) for name, entry in state.items())
    data, manifest = shard.read_bytes(), json.loads((path / "manifest.json").read_text())
    for tensor in manifest["tensors"].values():
        (piece,) = tensor["pieces"]
        span = data[piece["start"] : piece["start"] + piece["bytes"]]
        assert hashlib.sha256(span).hexdigest() == piece["sha256"]


def test_a_save_of_the_same_iteration_replaces_the_older_one(tmp_path):
    save_state(tmp_path, 5, make_state(1))
    save_state(tmp_path, 5, make_state(2))
    assert_holds(open_checkpoint(tmp_path), make_state(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", TRACKER]


def test_a_folder_that_another_program_wrote_is_not_replaced(tmp_path):
    theirs = tmp_path / "iter_0000005" / "mp_rank_00"
    theirs.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="did not write"):
        save_state(tmp_path, 5)
    assert theirs.exists()
    assert len(list(tmp_path.iterdir())) == 1


def _hold_half(layout):
    """Return rows split over tensor ranks, a tensor that all ranks have, and one of this rank."""
    whole = make_state(9)["model.layers.0.mlp.up.weight"].tensor
    rows = whole.chunk(layout.tensor.size)[layout.tensor.rank]
    start = layout.tensor.rank * rows.shape[0]
    return {
        "model.split": Entry(rows, tuple(whole.shape), (start, 0)),
        "model.copy": Entry.whole(whole),
        f"rng.{layout.world.rank}": Entry.whole(torch.tensor([layout.world.rank])),
    }


def _save_and_read(layout, root):
    save(root, 4, _hold_half(layout), {"rank": layout.world.rank}, layout)
    reader = open_checkpoint(root, layout=layout)
    return [read_whole(reader, name).tolist() for name in reader.names()], reader.meta


@pytest.mark.parametrize("tensor", [1, 2])
def test_two_ranks_save_one_checkpoint(tmp_path, tensor):
    whole = make_state(9)["model.layers.0.mlp.up.weight"].tensor.tolist()
    answers = run_distributed(2, _save_and_read, tmp_path, tensor=tensor)
    assert answers[0] == answers[1] == ([whole, whole, [0], [1]], {**meta_of(4), "rank": 0})
    manifest = NativeReader(tmp_path / "iter_0000004").manifest
    assert set(manifest.files) == {"rank_00000.safetensors", "rank_00001.safetensors"}
    writers = [piece.file for piece in manifest.tensors["model.copy"].pieces]
    assert len(writers) == 1  # copies are written once
    assert len(manifest.tensors["model.split"].pieces) == tensor


def _fail_on_the_second(layout, root):
    if layout.world.rank == 1:

        def full(*_):
            raise OSError(28, "No space left on device", str(root / "somewhere"))

        store.write_shard = full  # only in this forked process
    try:
        save(root, 8, _hold_half(layout), {}, layout)
    except StorageError as error:
        return str(error)
    return None


def test_one_ranks_full_disk_stops_the_save_on_all(tmp_path):
    save_state(tmp_path, 4)
    messages = run_distributed(2, _fail_on_the_second, tmp_path)
    assert all("somewhere: No space left on device" in message for message in messages)
    assert "rank 1" in messages[0]
    assert (tmp_path / TRACKER).read_bytes() == b"4"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000004", TRACKER]
    assert assert_loads(tmp_path, [4]) == 4


def _damage_one(layout, root):
    reader = open_checkpoint(root, layout=layout)
    return reader.iteration


def test_ranks_share_the_verification_and_agree_on_the_fallback(tmp_path, capfd):
    save_state(tmp_path, 1)
    path = save_state(tmp_path, 2)
    shard = path / "rank_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # only one rank reads these bytes
    shard.write_bytes(data)
    assert run_distributed(2, _damage_one, tmp_path) == [1, 1]
    assert capfd.readouterr().err.count("using iter_0000001 instead") == 1


@pytest.mark.parametrize("share", [0, 0.001, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 0.999])
def test_a_file_that_cannot_grow_changes_nothing(tmp_path, share):
    """RLIMIT_FSIZE stands in for a full disk: writes beyond a share of the largest file fail."""
    saved = save_state(tmp_path, 1)
    limit = int(share * max(file.stat().st_size for file in saved.iterdir()))
    child = os.fork()
    if child == 0:
        code = 9
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            save_state(tmp_path, 2)
        except StorageError as error:
            code = 0 if "iter_0000002" in str(error) or str(tmp_path) in str(error) else 8
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / TRACKER).read_bytes() == b"1"
    assert not list(tmp_path.glob("*tmp*"))
    assert assert_loads(tmp_path, [1]) == 1


def test_too_little_space_is_seen_before_writing(tmp_path, monkeypatch):
    class Disk:
        f_bavail, f_bfree, f_blocks, f_frsize = 10, 11, 12, 512

    monkeypatch.setattr(store.os, "statvfs", lambda _: Disk)
    with pytest.raises(StorageError, match="5,120 are free"):
        save_state(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_must_leave_some_space(tmp_path, monkeypatch):
    size = sum(entry.tensor.nbytes for entry in make_state(1).values())
    needed = size + (64 << 20)
    free = needed - 1
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    told = f"a checkpoint needs {size:,} bytes, and 67,108,864 .* but only {free:,} are free: make"
    with pytest.raises(StorageError, match=told):
        save_state(tmp_path, 1)
    free = needed
    mask = os.umask(0)
    try:
        path = save_state(tmp_path / "deep" / "folder", 1)
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o775  # a group can clean up


def test_what_interrupted_saves_left_is_removed(tmp_path):
    """A replaced checkpoint is back under its name if its replacement was never published."""
    save_state(tmp_path, 1)
    (tmp_path / "iter_0000001").rename(tmp_path / "iter_0000001.old-a")
    save_state(tmp_path, 2)
    assert assert_loads(tmp_path, [2]) == 2
    for name in ("iter_0000002.old-b", "iter_0000003.tmp-c", "release.tmp-d", "notes.tmp-e"):
        (tmp_path / name / "deeper").mkdir(parents=True)
    (tmp_path / f"{TRACKER}.tmp-f").touch()
    (tmp_path / "iter_notes.txt").touch()
    assert store.foreign_iterations(tmp_path) == []
    save_state(tmp_path, 4)
    kept = ["iter_0000001", "iter_0000002", "iter_0000004", "iter_notes.txt", "notes.tmp-e"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, TRACKER])
    assert open_checkpoint(tmp_path, step=1).iteration == 1


def test_a_replacement_that_fails_leaves_the_replaced_one(tmp_path, monkeypatch):
    save_state(tmp_path, 5, make_state(5))
    rename = os.rename

    def fails(source, target):
        if ".tmp-" in str(source):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(StorageError, match="Input/output error"):
        save_state(tmp_path, 5, make_state(6))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000005", TRACKER]
    assert_holds(open_checkpoint(tmp_path), make_state(5))


def test_the_checkpoints_of_other_programs(tmp_path):
    assert store.foreign_iterations(tmp_path / "none") == []
    save_state(tmp_path, 1)
    for name in ("iter_0000020", "iter_0000003", "iter_4", "release", "iter_0000005", "other"):
        (tmp_path / name).mkdir()
        if not name.endswith("5"):
            (tmp_path / name / "file").touch()
    assert store.foreign_iterations(tmp_path) == [3, 20]
    save_state(tmp_path, 5)  # an empty folder holds nothing that would be lost


def test_the_manifest_describes_the_save(tmp_path):
    state = {
        "model.a": Entry(torch.ones(2, 3), (2, 3), (0, 0)),
        "model.b": Entry.whole(torch.ones(())),
    }
    path = save(tmp_path, 7, state, {"rank": 0}, Layout.single())
    body = json.loads((path / "manifest.json").read_text())
    assert body["iteration"] == 7
    assert body["meta"]["rank"] == 0
    assert set(body["layout"].values()) == {1}
    assert list(body["layout"])[0] == "world"
    created = datetime.fromisoformat(body["created"])
    assert abs((datetime.now(UTC) - created).total_seconds()) < 600
    assert created.microsecond == 0
    (file,) = body["files"].values()
    data = (path / "rank_00000.safetensors").read_bytes()
    assert file["bytes"] == len(data)
    header = int.from_bytes(data[:8], "little") + 8
    assert file["header_bytes"] == header
    assert file["header_sha256"] == hashlib.sha256(data[:header]).hexdigest()
    assert header % 8 == 0
    (piece,) = body["tensors"]["model.a"]["pieces"]
    assert (piece["start"], piece["bytes"]) == (header, 24)


@pytest.mark.parametrize(
    ("keep_optimizer", "averages", "kept"),
    [
        (False, False, ["model.a"]),
        (True, False, ["fp8.a", "model.a", "optimizer.a"]),
        (False, True, ["average.a", "model.a", "snapshot.a"]),
        (True, True, ["average.a", "fp8.a", "model.a", "optimizer.a", "snapshot.a"]),
    ],
)
def test_the_tensors_that_a_conversion_takes(tmp_path, keep_optimizer, averages, kept):
    names = ("random.a", "snapshot.a", "average.a", "fp8.a", "model.a", "optimizer.a")
    save_state(tmp_path, 1, {name: Entry.whole(torch.ones(3)) for name in names})
    reader = open_checkpoint(tmp_path)
    state = store.state_of(reader, keep_optimizer=keep_optimizer, averages=averages)
    assert list(state) == kept


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        save_state(tmp_path / "file" / "checkpoints", 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_a_storage_error(tmp_path):
    save_state(tmp_path, 1)
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        save_state(tmp_path, 2)


@pytest.mark.parametrize("step", ["fsync", "rename", "replace"])
def test_a_failing_disk_is_never_reported_as_saved(tmp_path, monkeypatch, step):
    save_state(tmp_path, 1)

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(StorageError, match="Input/output error"):
            save_state(tmp_path, 2)
    assert (tmp_path / TRACKER).read_bytes() == b"1"
    assert not list(tmp_path.glob("*tmp*"))
    assert assert_loads(tmp_path, [1]) == 1


def test_everything_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """In a power failure, unflushed data is lost even if a later rename survives.

    Killing a process loses nothing that it has written, so only the order of calls shows this.
    """
    save_state(tmp_path, 1)
    calls = []

    def name_of(path):
        return re.sub(r"\.tmp-\w+", ".tmp", os.path.relpath(path, tmp_path))

    def trace(function, describe):
        call = getattr(os, function)

        def traced(*arguments):
            calls.append(f"{function} {describe(*arguments)}")
            return call(*arguments)

        monkeypatch.setattr(os, function, traced)

    def path_of(descriptor):
        inode = os.fstat(descriptor).st_ino
        return next(p for p in (tmp_path, *tmp_path.rglob("*")) if p.stat().st_ino == inode)

    trace("fsync", lambda descriptor: name_of(path_of(descriptor)))
    trace("rename", lambda _, to: name_of(to))
    trace("replace", lambda _, to: name_of(to))
    save_state(tmp_path, 2)
    assert calls == [
        "fsync iter_0000002.tmp/rank_00000.safetensors",
        "fsync iter_0000002.tmp",  # the names of this process's files
        "fsync iter_0000002.tmp/manifest.json",
        "fsync iter_0000002.tmp",
        "rename iter_0000002",
        "fsync .",
        f"fsync {TRACKER}.tmp",
        f"replace {TRACKER}",
        "fsync .",
    ]


def test_ranks_that_differ_about_a_tensor_are_our_mistake():
    here, there = ["a", "F32", [4], [0], [2]], ["a", "F32", [4], [2], [2]]
    plan = make_plan([[here], [there], [here]])
    assert [part.rank for part in plan.parts["a"]] == [0, 1]
    with pytest.raises(ValueError, match="ranks disagree about a"):
        make_plan([[here], [["a", "F16", [4], [2], [2]]]])
    with pytest.raises(ValueError, match="not tiled"):
        make_plan([[here]])


def test_copies_are_written_where_there_is_least_to_write():
    whole = [["a", "F32", [8], [0], [8]], ["b", "F32", [4], [0], [4]], ["c", "F32", [4], [0], [4]]]
    plan = make_plan([[*whole, ["own", "F32", [6], [0], [6]]], whole, whole])
    writers = {name: part.rank for name, (part,) in plan.parts.items()}
    assert writers == {"own": 0, "a": 1, "b": 2, "c": 2}


def test_meta_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        save(tmp_path, 1, make_state(1), {"loss": float("nan")}, Layout.single())
    assert not (tmp_path / TRACKER).exists()
