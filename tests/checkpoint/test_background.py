"""Background saves: the same files, as of the time of the call, on all ranks or on none."""

import os
import threading
import time

import pytest
import torch

from megatron.checkpoint import background, store
from megatron.checkpoint.background import BackgroundSaver, SavedCheckpoint
from megatron.checkpoint.entries import Entry, flatten
from megatron.checkpoint.find import TRACKER
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.manifest import MANIFEST, parse
from megatron.device import Device
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.layout import Layout
from tests.checkpoint.states import assert_loads, make_state, meta_of, save, save_state
from tests.distributed import TIMEOUT, run_distributed


class Told:
    """Messages from a saver."""

    def __init__(self):
        self.outcomes = []

    def __call__(self, iteration, outcome):
        self.outcomes.append((iteration, outcome))


def _saver(root, state, layout=None, *, keep=None):
    layout, told = layout or Layout.single(), Told()
    saver = BackgroundSaver(
        root, state, layout, layout.for_thread(TIMEOUT), Device.cpu(), keep=keep, report=told
    )
    return saver, told


def _start(saver, iteration, state):
    return saver.start(iteration, state, meta_of(iteration), since=time.perf_counter())


def _files(folder):
    """Return every file's bytes, without the times in the manifest."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = parse(files.pop(MANIFEST))
    return files, manifest.files, manifest.tensors, manifest.meta, manifest.layout


def _save_both_ways(layout, root):
    rank = layout.world.rank
    own = make_state(3 + rank)
    state = {"model.copy": Entry.whole(torch.arange(3.0))}
    state |= {f"{name}.{rank}": entry for name, entry in own.items()}
    save(root / "now", 5, state, {"iteration": 5}, layout)
    saver, _ = _saver(root / "later", state, layout)
    _start(saver, 5, state)
    saver.wait()


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_are_those_of_a_save_in_the_foreground(tmp_path, ranks):
    run_distributed(ranks, _save_both_ways, tmp_path)
    now, later = (_files(tmp_path / name / "iter_0000005") for name in ("now", "later"))
    assert len(now[0]) == ranks
    assert now == later


def test_what_is_saved_is_the_state_of_the_call(tmp_path, monkeypatch):
    state, go_on = make_state(1), threading.Event()
    saver, told = _saver(tmp_path, state)
    write = store.write_shard

    def slow(*arguments):
        go_on.wait(240)
        return write(*arguments)

    monkeypatch.setattr(store, "write_shard", slow)
    # On a CPU, nothing is queued: the copies of stable entries are complete, too.
    names = ["model.layers.0.mlp.up.weight", "empty", "random"]
    saver.start(1, state, meta_of(1), since=time.perf_counter(), stable=names)
    assert saver.is_busy
    for _, entry in flatten(state):
        entry.tensor.zero_()  # training continues
    assert not (tmp_path / TRACKER).exists()
    go_on.set()
    saver.wait()
    assert not saver.is_busy
    assert assert_loads(tmp_path, [1]) == 1  # holds the values of make_state
    ((iteration, saved),) = told.outcomes
    assert isinstance(saved, SavedCheckpoint)
    assert (iteration, saved.path) == (1, tmp_path / "iter_0000001")
    assert saved.size == sum(e.tensor.nbytes for _, e in flatten(state))


def _fail_on_one_rank(layout, root):
    rank = layout.world.rank
    state = {f"model.{rank}": Entry.whole(torch.arange(5.0))}
    saver, told = _saver(root, state, layout)
    _start(saver, 1, state)
    saver.wait()
    write = store.write_shard

    def fail(path, *_):
        raise OSError(5, "Input/output error", str(path))

    store.write_shard = fail if rank == 1 else write
    try:
        _start(saver, 2, state)
        with pytest.raises(StorageError) as caught:
            saver.wait()
    finally:
        store.write_shard = write
    layout.world.barrier()  # rank 0 has cleaned up
    left = sorted(path.name for path in root.iterdir())
    tracker = (root / TRACKER).read_bytes()
    layout.world.barrier()
    _start(saver, 3, state)
    saver.wait()
    return str(caught.value), left, tracker, [type(outcome) for _, outcome in told.outcomes]


def test_one_writer_that_fails_publishes_nothing_and_all_ranks_learn_of_it(tmp_path):
    answers = run_distributed(2, _fail_on_one_rank, tmp_path)
    for said, left, tracker, _ in answers:
        assert "rank_00001.safetensors: Input/output error" in said
        assert left == ["iter_0000001", TRACKER]
        assert tracker == b"1"
    assert answers[0][0].startswith("rank 1: ")
    assert answers[0][3] == [SavedCheckpoint, StorageError, SavedCheckpoint]
    assert (tmp_path / TRACKER).read_bytes() == b"3"


@pytest.mark.parametrize("step", ["mkdir", "fsync", "rename", "replace"])
def test_a_failing_disk_is_reported_by_the_next_wait(tmp_path, monkeypatch, step):
    save_state(tmp_path, 1)
    state = make_state(2)
    saver, told = _saver(tmp_path, state)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        _start(saver, 2, state)
        with pytest.raises(StorageError, match="No space left"):
            saver.wait()
    assert isinstance(told.outcomes[0][1], StorageError)
    assert assert_loads(tmp_path, [1]) == 1
    saver.wait()  # reported once
    _start(saver, 2, state)
    saver.wait()
    assert assert_loads(tmp_path, [2]) == 2


def test_a_bug_in_the_background_ends_the_run(tmp_path, monkeypatch):
    state = make_state(1)
    saver, _ = _saver(tmp_path, state)
    monkeypatch.setattr(store, "write_shard", lambda *_: 1 / 0)
    _start(saver, 1, state)
    with pytest.raises(CheckpointError, match="iteration 1 failed .* division by zero"):
        saver.wait()


def _save_what_changed(layout, root):
    """Save three times: rank 0 has no tensors at first, but has some in the later saves."""
    rank = layout.world.rank
    states = [{f"model.{i}": Entry.whole(torch.full((5 + i,), float(i)))} for i in range(2)]
    saver, told = _saver(root, {} if rank == 0 else states[1], layout)
    sizes, nice = [saver.host_bytes], []
    write = saver._write

    def watched(*arguments):
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return write(*arguments)

    saver._write = watched
    for iteration in (1, 2, 3):
        state = {} if (iteration, rank) == (1, 0) else states[rank]
        # The reported pause is that of the rank that has waited longest.
        saver.start(iteration, state, meta_of(iteration), since=time.perf_counter() - 1000 * rank)
        sizes.append(saver.host_bytes)
        saver.wait()
    saved = [(one.iteration, one.size) for _, one in told.outcomes]
    assert all(1000 <= one.pause < 1500 for _, one in told.outcomes)
    assert all(0 < one.seconds < 500 for _, one in told.outcomes)
    if rank == 1:

        def short(*_):
            raise MemoryError("no host memory")

        background.HostBuffer = short  # only in this forked process
    with pytest.raises(MemoryError, match="no host memory"):
        saver.start(4, {}, meta_of(4), since=0)
    sizes.append(saver.host_bytes)
    return saved, sizes, nice, open_checkpoint(root, layout=layout).names()


def test_tensors_that_begin_during_a_run_are_saved(tmp_path):
    first, second = run_distributed(2, _save_what_changed, tmp_path)
    assert first[0] == [(1, 6 * 4), (2, 11 * 4), (3, 11 * 4)]
    assert second[0] == []  # the first rank tells
    header = second[1][0] - 6 * 4
    assert first[1] == [1, 1, header + 5 * 4, header + 5 * 4, 1]
    assert second[1] == [header + 6 * 4] * 4 + [0]
    assert first[2] == second[2] == [max(5, os.getpriority(os.PRIO_PROCESS, 0))] * 3
    assert first[3] == ["model.0", "model.1"]


def test_host_memory_is_used_again(tmp_path):
    state = make_state(1)
    saver, _ = _saver(tmp_path, state)
    address = saver._copy._buffer.data_ptr()
    for iteration in (1, 2):
        _start(saver, iteration, make_state(iteration))
        saver.wait()
        assert assert_loads(tmp_path, [iteration]) == iteration
    assert saver._copy._buffer.data_ptr() == address
