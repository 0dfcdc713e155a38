"""Which checkpoint is tried first, for every state of the tracker."""

import shutil
from pathlib import Path

import pytest

from megatron.checkpoint.find import (
    TRACKER,
    CheckpointFolder,
    checkpoint_at,
    list_checkpoints,
)
from megatron.checkpoint.loading import (
    checkpoints_below,
    open_any,
    open_checkpoint,
    open_folder,
    open_root,
)
from megatron.errors import CheckpointError
from tests.checkpoint.states import assert_loads, save_state

TORN = {
    "missing": None,
    "empty": b"",
    "of a missing iteration": b"12",
    "NUL": b"\0\0\0\0",
    "words": b"iter_0000002",
    "negative": b"-2",
    "fraction": b"2.0",
    "binary": b"\xff\xfe2\x00",
    "ten megabytes": b"2" * 10_000_000,
    "superscript": "²".encode(),
    "two lines": b"1\n2",
    "release, which does not exist": b"release",
}


@pytest.mark.parametrize("content", TORN.values(), ids=TORN.keys())
def test_a_torn_tracker_falls_back_to_the_newest(tmp_path, capsys, content):
    for iteration in (1, 2):
        save_state(tmp_path, iteration)
    (tmp_path / TRACKER).unlink()
    if content is not None:
        (tmp_path / TRACKER).write_bytes(content)
    assert assert_loads(tmp_path, [2]) == 2
    warning = capsys.readouterr().err
    assert "trying the newest complete checkpoint" in warning
    assert len(warning) < 500


def test_a_tracker_that_cannot_be_read_is_named_in_the_warning(tmp_path, capsys, monkeypatch):
    save_state(tmp_path, 1)

    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("megatron.checkpoint.find.open_plain", refuse)
    assert [checkpoint.iteration for checkpoint in list_checkpoints(tmp_path)] == [1]
    assert f"{TRACKER} cannot be read (Permission denied)" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"1", b"1\r\n", b"1\n", b" 1 ", b"0000001"])
def test_a_tracker_that_other_programs_wrote_is_followed(tmp_path, capsys, content):
    for iteration in (1, 2):
        save_state(tmp_path, iteration)
    (tmp_path / TRACKER).write_bytes(content)
    assert assert_loads(tmp_path, [1]) == 1
    assert not capsys.readouterr().err


def test_order_is_tracker_older_newer(tmp_path):
    for iteration in (1, 2, 3, 4):
        save_state(tmp_path, iteration)
    (tmp_path / TRACKER).write_text("3")
    assert [one.iteration for one in list_checkpoints(tmp_path)] == [3, 2, 1, 4]


def test_a_named_iteration_is_the_only_one_that_is_tried(tmp_path, capsys):
    for iteration in (1, 2, 3):
        save_state(tmp_path, iteration)
    (tmp_path / TRACKER).write_bytes(b"torn")
    (tmp_path / "release" / "mp_rank_00").mkdir(parents=True)
    reader = open_checkpoint(tmp_path, step=2)
    assert reader is not None
    assert (reader.iteration, reader.path) == (2, tmp_path / "iter_0000002")
    shard = next(reader.path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    said = r"^--ckpt-step 2: .*iter_0000002 is not used: .*damaged.*\n.*give another iteration"
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path, step=2)
    (tmp_path / "iter_0000005").mkdir()
    for step, why in (
        (4, ""),
        (
            5,
            " (iter_0000005 has neither manifest.json nor Megatron-LM's mp_rank folders nor "
            "Megatron Core's .metadata nor DeepSpeed's files)",
        ),
    ):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path, step=step)
        assert str(caught.value) == (
            f"--ckpt-step {step}: {tmp_path} holds no checkpoint of this iteration{why}: available "
            "iterations: 3, 2, 1: give one of them"
        )
    assert not capsys.readouterr().err


def test_an_iteration_that_cannot_be_there(tmp_path):
    for folder, said in (
        (
            save_state(tmp_path, 1),
            "is a single checkpoint: give --load the folder that contains it",
        ),
        (tmp_path / "missing", "there is no such folder"),
        (tmp_path / "iter_0000001" / "..", "available iterations: 1: give one of them"),
    ):
        with pytest.raises(CheckpointError, match=f"^--ckpt-step 2: .*{said}"):
            open_checkpoint(folder, step=2)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="iteration: the folder holds no checkpoint of"):
        open_checkpoint(empty, step=2)
    for iteration in range(3, 13):
        (empty / f"iter_{iteration:07d}" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match="iterations: 12, 11, 10, 9, 8, 7, 6, 5, 2 older ones:"
    ):
        open_checkpoint(empty, step=2)


def test_a_folder_of_hugging_face_has_no_iterations(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="^--ckpt-step 2: .* which has no iterations: drop"):
        open_root(tmp_path, step=2)


def test_nothing_is_found_in_a_folder_that_never_held_a_checkpoint(tmp_path):
    assert list_checkpoints(tmp_path / "missing") == []
    assert list_checkpoints(tmp_path) == []
    (tmp_path / "iter_0000001.tmp-0123").mkdir()  # a first save that was killed
    (tmp_path / "notes.txt").write_text("iter_0000002")
    assert list_checkpoints(tmp_path) == []
    assert open_checkpoint(tmp_path) is None


def test_only_incomplete_ones_are_an_error(tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    with pytest.raises(CheckpointError, match=r"iter_0000001 has neither manifest\.json nor"):
        list_checkpoints(tmp_path)


def test_a_tracker_without_its_checkpoint_is_an_error(tmp_path):
    shutil.rmtree(save_state(tmp_path, 3))
    with pytest.raises(CheckpointError, match="iter_0000003.*does not exist"):
        open_checkpoint(tmp_path)


def test_folders_without_permission_are_named(tmp_path, capsys, monkeypatch):
    save_state(tmp_path, 1)
    locked, stat = save_state(tmp_path, 2), Path.stat

    def refuse(path, **options):
        if locked in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    assert assert_loads(tmp_path, [1]) == 1
    told = "iter_0000002, which cannot be read: Permission denied; trying the newest complete"
    assert told in capsys.readouterr().err
    locked = tmp_path.parent  # as if this user could not look into it
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: cannot be read: Permission denied$"):
        open_any(tmp_path)


def test_deepspeeds_tracker_is_called_by_its_name(tmp_path, capsys):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "latest").write_text("global_step3")
    assert checkpoints_below(tmp_path / "runs") == ["a"]
    with pytest.raises(CheckpointError, match=": latest names 'global_step3', which does not"):
        list_checkpoints(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "a" / "global_step2").mkdir()
    (tmp_path / "runs" / "a" / "global_step2" / "mp_rank_00_model_states.pt").touch()
    assert len(list_checkpoints(tmp_path / "runs" / "a")) == 1
    assert "a: latest names global_step3, which is missing" in capsys.readouterr().err


def test_a_damaged_tracker_without_checkpoints_is_an_error(tmp_path):
    (tmp_path / TRACKER).write_bytes(b"")
    with pytest.raises(CheckpointError, match="is damaged"):
        list_checkpoints(tmp_path)


def test_torch_distributed_checkpoints_are_named(tmp_path):
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"torch\.distributed\.checkpoint"):
        open_checkpoint(tmp_path)


def test_a_replaced_checkpoint_counts_where_its_successor_is_missing(tmp_path, capsys):
    path = save_state(tmp_path, 5)
    path.rename(path.with_name(path.name + ".old-0123abcd"))
    assert assert_loads(tmp_path, [5]) == 5
    assert not capsys.readouterr().err
    save_state(tmp_path, 6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", "iter_0000006", TRACKER]


def test_a_folder_with_two_checkpoints_is_neither(tmp_path, capsys):
    """Megatron-LM saves into `iter_0000002` without checking what else is there."""
    for iteration in (1, 2):
        folder = save_state(tmp_path, iteration)
    (folder / "mp_rank_00").mkdir()
    assert assert_loads(tmp_path, [1]) == 1
    warning = capsys.readouterr().err
    assert (
        f"{TRACKER} names iter_0000002, which holds both manifest.json and mp_rank folders"
        in warning
    )
    with pytest.raises(CheckpointError, match="holds both"):
        checkpoint_at(folder)
    shutil.rmtree(tmp_path / "iter_0000001")
    with pytest.raises(CheckpointError, match="no complete checkpoint: .*holds both"):
        list_checkpoints(tmp_path)


def test_why_there_is_no_checkpoint(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs" / "notes").mkdir(parents=True)
    save_state(tmp_path / "runs" / "b", 1)
    save_state(tmp_path / "runs" / "c", 1)
    (tmp_path / "runs" / "a.tmp-0" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "runs" / "a.tmp-0" / TRACKER).write_text("1")
    (tmp_path / "runs" / "run.txt").touch()
    assert checkpoints_below(tmp_path / "runs") == ["b", "c"]
    assert checkpoints_below(tmp_path / "runs" / "b") == ["iter_0000001"]
    assert checkpoints_below(tmp_path / "file") == checkpoints_below(tmp_path / "none") == []
    better = tmp_path / "runs" / "b"
    for name, why in (
        ("none", "there is no such folder"),
        ("file", "it is a file: give the folder of checkpoints"),
        ("empty", "there is no checkpoint in this folder"),
        ("runs", f"there is no checkpoint in this folder, but its folder b has one: give {better}"),
    ):
        with pytest.raises(CheckpointError) as caught:
            open_any(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name}: {why}"
    assert open_any(better).iteration == open_any(better / "iter_0000001").iteration == 1


def test_checkpoints_are_verified_unless_the_user_opts_out(tmp_path):
    path = save_state(tmp_path, 1)
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    folder = CheckpointFolder("native", 1, path)
    for opens in (
        open_checkpoint,
        open_root,
        open_any,
        lambda _, **how: open_folder(folder, **how),
    ):
        with pytest.raises(CheckpointError, match="does not match its digest"):
            opens(tmp_path)
        assert opens(tmp_path, verify=False).iteration == 1
    copy = path.rename(tmp_path / "best")  # a name that says nothing about the iteration
    assert open_checkpoint(copy, verify=False).iteration == 1
    (tmp_path / "link").symlink_to(copy)
    found = open_checkpoint(tmp_path / "link", verify=False)
    assert (found.iteration, found.path) == (1, copy)


def test_a_long_reason_is_cut(tmp_path, monkeypatch):
    path = save_state(tmp_path, 1)

    def fails(*_, **__):
        raise KeyError("x" * 1000)

    monkeypatch.setattr("megatron.checkpoint.loading.NativeReader", fails)
    with pytest.raises(CheckpointError) as caught:
        open_folder(CheckpointFolder("native", 1, path))
    assert str(caught.value) == f"not a native checkpoint: KeyError: '{'x' * 489}"
