"""Checkpoints with links, FIFOs or devices, or of other users: refused by name, without a hang."""

import os
import shutil
import socket

import pytest
import torch

from megatron.checkpoint import loading
from megatron.checkpoint.entries import Entry
from megatron.checkpoint.find import TRACKER, list_checkpoints
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.loading import open_any, open_checkpoint
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.retention import is_as_listed
from megatron.errors import CheckpointError
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.checkpoint.legacy.megatron_files import Form, whole_model, write
from tests.checkpoint.states import (
    assert_holds,
    assert_loads,
    make_state,
    open_below,
    save,
    save_state,
)
from tests.distributed import run_distributed
from tools.checkpoint import inspect

SHARD = "rank_00000.safetensors"
OTHER = 12345  # a user ID
NOT_OTHERS = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def _fifo(path):
    os.mkfifo(path)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(path.parent)  # the path may be too long for a socket address
        one.bind(path.name)
        os.chdir(here)


def _device(path):
    os.symlink("/dev/zero", path)


def _folder(path):
    path.mkdir()


@pytest.fixture
def two(tmp_path):
    save_state(tmp_path, 1)
    return save_state(tmp_path, 2, make_state(2))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("make", [_fifo, _socket, _device, _folder])
@pytest.mark.parametrize("name", [MANIFEST, SHARD, "more", TRACKER])
def test_what_is_no_plain_file_is_never_waited_for(two, capsys, make, name):
    path = two.parent / TRACKER if name == TRACKER else two / name
    if path.exists():
        path.unlink()
    make(path)
    if name == TRACKER or (name, make) == ("more", _folder):
        assert assert_loads(two.parent, [2]) == 2
    else:
        assert assert_loads(two.parent, [1]) == 1
        assert "iter_0000002" in capsys.readouterr().err


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["complete", "mp_rank_00/model_optim_rng.pt"])
def test_none_of_megatron_s_files_is_waited_for(tmp_path, name):
    folder = write(tmp_path, Form(), whole_model(1))
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)
    if name == "complete":
        with pytest.raises(CheckpointError, match="not a regular file"):
            is_as_listed(folder)


def test_a_link_out_of_the_folder_is_refused_unless_it_is_named(two, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "iter_0000002"
    two.rename(elsewhere)
    two.symlink_to(elsewhere)
    assert assert_loads(two.parent, [1]) == 1
    assert open_any(two).iteration == 2
    assert assert_loads(two.parent, [2], allow_foreign=True) == 2


def test_a_link_inside_the_folder_is_followed(two):
    two.rename(two.parent / "kept")
    two.symlink_to("kept")
    assert assert_loads(two.parent, [2]) == 2


@pytest.mark.parametrize("name", [".", MANIFEST, SHARD])
def test_what_everybody_may_write_to_is_refused(two, capsys, name):
    path = two / name
    path.chmod(path.stat().st_mode | 0o002)
    assert assert_loads(two.parent, [1]) == 1
    told = capsys.readouterr().err
    assert "all users may write to it: chmod o-w" in told
    assert "or give --allow-foreign-checkpoints to load it anyway" in told
    assert assert_loads(two.parent, [2], allow_foreign=True) == 2


@NOT_OTHERS
@pytest.mark.parametrize("name", [".", MANIFEST, SHARD])
def test_what_another_user_owns_is_refused(two, capsys, name):
    os.chown(two / name, OTHER, OTHER)
    assert assert_loads(two.parent, [1]) == 1
    assert f"owned by another user (uid {OTHER})" in capsys.readouterr().err
    assert assert_loads(two.parent, [2], allow_foreign=True) == 2


def test_what_is_saved_without_a_mask_can_be_loaded(tmp_path):
    before = os.umask(0)
    try:
        save_state(tmp_path, 1)
    finally:
        os.umask(before)
    assert assert_loads(tmp_path, [1]) == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_hugging_face_folders_are_checked_alike(tmp_path, name):
    case = CASES["llama"]
    folder = write_folder(tmp_path / "hf", case.config, tensors_of(case))
    path = folder / name
    path.chmod(0o666)
    with pytest.raises(CheckpointError, match=f"{name}: all users may write to it"):
        HFReader(folder)
    HFReader(folder, allow_foreign=True)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError):
        open_any(folder)


def test_the_hub_s_cache_loads_through_its_links(tmp_path):
    case = CASES["llama"]
    made = write_folder(tmp_path / "made", case.config, tensors_of(case))
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "1", tmp_path / "models--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(made.iterdir()):
        shutil.copy(path, blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    assert HFReader(snapshot).names() == HFReader(made).names()


def test_a_tool_takes_the_flag(two, capsys):
    (two / SHARD).chmod(0o666)
    assert inspect.main([str(two)]) == CheckpointError.exit_code
    assert "give --allow-foreign-checkpoints" in capsys.readouterr().out
    assert inspect.main(["--allow-foreign-checkpoints", str(two)]) == 0
    assert inspect.main(["diff", str(two), str(two)]) == CheckpointError.exit_code
    assert inspect.main(["diff", "--allow-foreign-checkpoints", str(two), str(two)]) == 0


def test_only_opening_tells(two):
    """Listing opens no files: such a folder stays listed, and is refused when it is opened."""
    (two / SHARD).chmod(0o666)
    assert [one.iteration for one in list_checkpoints(two.parent)] == [2, 1]


def _exchange(path):
    """Swap in another file of the same size, as an attacker could after a check."""
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


def test_a_shard_that_is_exchanged_after_it_was_checked_is_never_read(two):
    reader = open_checkpoint(two.parent)
    _exchange(two / SHARD)
    assert_holds(reader, make_state(2))
    with pytest.raises(CheckpointError, match=f"{SHARD}: replaced while it was read"):
        reader.verify()


def test_a_hugging_face_shard_that_is_exchanged_after_it_was_checked_is_never_read(tmp_path):
    case = CASES["llama"]
    folder = write_folder(tmp_path / "hf", case.config, tensors_of(case))
    reader = open_any(folder)
    before = {name: reader.read(name).clone() for name in reader.names()}
    _exchange(folder / "model.safetensors")
    assert all(torch.equal(reader.read(name), values) for name, values in before.items())


@pytest.mark.parametrize("mode", [0o666, 0o644])
def test_a_file_is_judged_by_what_was_opened(two, monkeypatch, mode):
    """Checking the path first could check a different file than the one that is read."""
    (two / SHARD).chmod(mode)
    monkeypatch.setattr(loading, "check_folder", lambda folder, *, allow_foreign: None)
    assert assert_loads(two.parent, [1, 2]) == (2 if mode == 0o644 else 1)


def test_no_descriptor_stays_open_for_each_shard(tmp_path):
    """A checkpoint of a large run has more files than a process may hold open."""
    run_distributed(2, _save_rows, tmp_path)
    reader = open_checkpoint(tmp_path)
    assert reader.read("model.rows").tolist() == [[0.0] * 8, [1.0] * 8]
    assert len(reader.manifest.files) == 2
    assert open_below(tmp_path) == [str(reader.path / MANIFEST)]  # the lock on it


def _save_rows(layout, root):
    rank = layout.world.rank
    row = Entry(torch.full((1, 8), float(rank)), (2, 8), (rank, 0))
    save(root, 1, {"model.rows": row}, {}, layout)
