"""Old checkpoints are deleted; the newest and those being read stay."""

import hashlib
import json
import os
import zipfile
import zlib

import pytest

from megatron.checkpoint import store
from megatron.checkpoint.find import COMPLETE, TRACKER, CheckpointFolder, list_checkpoints
from megatron.checkpoint.loading import open_checkpoint, open_folder
from megatron.checkpoint.retention import (
    RetentionPolicy,
    is_as_listed,
    list_files,
    lock_for_reading,
    prune,
)
from megatron.checkpoint.shard import digest_of
from megatron.checkpoint.store import Snapshot, write_checkpoint
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.layout import Layout
from tests.checkpoint.states import assert_loads, make_state, meta_of, save_state


def _save(root, iteration, keep):
    state, meta = make_state(iteration), meta_of(iteration)
    snapshot = Snapshot.take(iteration, state, meta, Layout.single())
    write_checkpoint(root, snapshot, keep=keep)


def _iterations(root):
    return sorted(int(path.name[5:]) for path in root.glob("iter_*"))


def test_the_newest_stay(tmp_path):
    for iteration in range(1, 6):
        _save(tmp_path, iteration, RetentionPolicy(2))
        assert _iterations(tmp_path) == list(range(max(1, iteration - 1), iteration + 1))
    assert assert_loads(tmp_path, [5]) == 5


def test_what_a_run_that_went_back_left_stays(tmp_path):
    for iteration in (1, 2, 8, 9):
        save_state(tmp_path, iteration)
    _save(tmp_path, 3, RetentionPolicy(1))
    assert _iterations(tmp_path) == [3, 8, 9]
    assert assert_loads(tmp_path, [3]) == 3


@pytest.mark.parametrize(
    ("keep", "after"),
    [
        # Folders after each save: the previous one is deleted unless it is a multiple of 4.
        (RetentionPolicy(every=4), [[2], [4], [4, 6], [4, 8], [4, 8, 10], [4, 8, 12]]),
        (RetentionPolicy(1, every=4), [[2], [4], [4, 6], [4, 8], [4, 8, 10], [4, 8, 12]]),
        (RetentionPolicy(2, every=8), [[2], [2, 4], [4, 6], [6, 8], [8, 10], [8, 10, 12]]),
        (RetentionPolicy(3, every=2), [[2], [2, 4], [2, 4, 6], [2, 4, 6, 8], [*range(2, 11, 2)]]),
        (RetentionPolicy(), [[2], [2, 4]]),
    ],
)
def test_multiples_of_an_interval_stay(tmp_path, keep, after):
    for place, kept in enumerate(after, start=1):
        _save(tmp_path, 2 * place, keep)
        assert _iterations(tmp_path) == kept
    assert assert_loads(tmp_path, [2 * place]) == 2 * place


@pytest.mark.parametrize(
    ("keep", "kept"), [(RetentionPolicy(every=10), [1, 2, 4]), (RetentionPolicy(1, every=10), [4])]
)
def test_earlier_checkpoints_stay_where_no_number_is_given(tmp_path, keep, kept):
    """Megatron Core does the same. A script may add the flag in the middle of a run."""
    for iteration in (1, 2, 3):
        save_state(tmp_path, iteration)
    for _ in range(2):  # the second replaces its own, and has no predecessor
        _save(tmp_path, 4, keep)
        assert _iterations(tmp_path) == kept


def test_a_run_that_went_back_deletes_nothing_that_is_later(tmp_path):
    for iteration in (2, 4, 9):
        save_state(tmp_path, iteration)
    _save(tmp_path, 6, RetentionPolicy(every=100))
    assert _iterations(tmp_path) == [2, 4, 6, 9]
    _save(tmp_path, 8, RetentionPolicy(every=100))
    assert _iterations(tmp_path) == [2, 4, 8, 9]


def test_what_a_link_leads_to_stays(tmp_path):
    elsewhere = save_state(tmp_path / "elsewhere", 1)
    root = tmp_path / "root"
    save_state(root, 2)
    (root / "iter_0000001").symlink_to(elsewhere)
    (root / TRACKER).write_text("1")
    _save(root, 3, RetentionPolicy(every=10))
    _save(root, 4, RetentionPolicy(1))
    assert _iterations(root) == [1, 4]
    assert elsewhere.is_dir()


@pytest.mark.parametrize("keep", [RetentionPolicy(1), RetentionPolicy(every=10)])
def test_nothing_goes_before_its_successor_is_there(tmp_path, monkeypatch, keep):
    save_state(tmp_path, 1)

    def full(path, *rest):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_shard", full)
        with pytest.raises(StorageError, match="No space left"):
            _save(tmp_path, 2, keep)
    assert assert_loads(tmp_path, [1]) == 1
    loaded = []

    def pruned(root, *rest):
        loaded.append(assert_loads(root, [2]))
        assert _iterations(root) == [1, 2]
        return prune(root, *rest)

    monkeypatch.setattr(store, "prune", pruned)
    _save(tmp_path, 2, keep)
    assert (loaded, _iterations(tmp_path)) == ([2], [2])


def test_other_formats_and_folders_stay(tmp_path):
    for name in ("release/mp_rank_00", "iter_0000001/mp_rank_00", "iter_0000002", "notes"):
        (tmp_path / name).mkdir(parents=True)
    save_state(tmp_path, 3)
    _save(tmp_path, 4, RetentionPolicy(1))
    assert {path.name for path in tmp_path.iterdir()} == {
        *("release", "iter_0000001", "iter_0000002", "notes", "iter_0000004", TRACKER)
    }


def test_one_that_is_being_read_stays_until_it_is_not(tmp_path):
    save_state(tmp_path, 1)
    reader = open_checkpoint(tmp_path)
    _save(tmp_path, 2, RetentionPolicy(1))
    assert _iterations(tmp_path) == [1, 2]
    reader.verify()
    del reader
    _save(tmp_path, 3, RetentionPolicy(1))
    assert _iterations(tmp_path) == [3]


def test_one_that_is_being_deleted_is_not_opened(tmp_path, monkeypatch):
    first = save_state(tmp_path, 1)
    save_state(tmp_path, 2)

    def rename(source, target):
        with pytest.raises(CheckpointError, match="is being deleted"):
            open_folder(CheckpointFolder("native", 1, first))
        return os.replace(source, target)

    monkeypatch.setattr(os, "rename", rename)
    assert prune(tmp_path, 2, RetentionPolicy(1)) == [first]


@pytest.mark.parametrize("step", ["rename", "rmdir"])
def test_a_deletion_that_fails_costs_nothing(tmp_path, monkeypatch, capsys, step):
    save_state(tmp_path, 1)
    plain = getattr(os, step)

    def fail(path, *rest, **named):
        if "iter_0000001" in str(path):
            raise OSError(5, "Input/output error", str(path))
        return plain(path, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        _save(tmp_path, 2, RetentionPolicy(1))
    if step == "rename":
        assert "an old checkpoint was not deleted: Input/output error" in capsys.readouterr().err
        assert _iterations(tmp_path) == [1, 2]
    assert list_checkpoints(tmp_path)[0].iteration == 2
    _save(tmp_path, 3, RetentionPolicy(1))
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000003", TRACKER}


def test_a_folder_that_cannot_be_listed_costs_nothing(tmp_path, monkeypatch, capsys):
    """This happens on network file systems: one process would exit, and the others would wait."""
    save_state(tmp_path, 1)

    def fail(root):
        raise CheckpointError(f"{root}: cannot be read: Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("megatron.checkpoint.retention.scan", fail)
        _save(tmp_path, 2, RetentionPolicy(1))
    assert (
        "cannot be read: Stale file handle: old checkpoints were not deleted"
        in capsys.readouterr().err
    )
    assert _iterations(tmp_path) == [1, 2]


def test_files_are_listed_with_a_digest_of_their_zip_directory(tmp_path):
    index, data = tmp_path / ".metadata", tmp_path / "mp_rank_00" / "model.pt"
    data.parent.mkdir()
    index.write_bytes(b"index")
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("a", b"123")
    (tmp_path / "__0_0.distcp").write_bytes(b"incomplete")
    (tmp_path / "link.pt").symlink_to(data)
    (tmp_path / "other").write_bytes(b"not listed")
    text = list_files(tmp_path)
    records = json.dumps([["a", 3, zlib.crc32(b"123")]]).encode()
    assert json.loads(text)["files"] == {
        ".metadata": hashlib.sha256(b"index").hexdigest(),
        "mp_rank_00/model.pt": digest_of(records),
        "__0_0.distcp": "",
        "link.pt": "",
    }
    (tmp_path / COMPLETE).write_bytes(text)
    assert is_as_listed(tmp_path)
    index.write_bytes(b"other")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp and 2 more unchanged .*\.metadata w"):
        is_as_listed(tmp_path)
    (tmp_path / COMPLETE).write_text('{"files": {".metadata": "x"}}')
    assert not is_as_listed(tmp_path)  # all have been rewritten


def test_a_list_of_files_has_at_most_16_mebibytes(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"x")
    text = list_files(tmp_path)
    for length, is_read in ((16 << 20, True), ((16 << 20) + 1, False)):
        (tmp_path / COMPLETE).write_bytes(text.strip().rjust(length))
        assert is_as_listed(tmp_path) == is_read


def test_without_a_manifest_there_is_nothing_to_hold(tmp_path):
    with pytest.raises(FileNotFoundError):
        lock_for_reading(tmp_path)
