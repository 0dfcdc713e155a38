"""A save killed at any point leaves the old or the new checkpoint whole; the next save works."""

import os
import random
import signal
import time

import pytest

from megatron.checkpoint import plan
from megatron.checkpoint.find import TRACKER, list_checkpoints
from megatron.checkpoint.reader import NativeReader
from tests.checkpoint.killing import assert_recovers, kill_at, run_forked
from tests.checkpoint.states import assert_holds, assert_loads, make_state, save, save_state


@pytest.mark.parametrize("files", [1, 4])
def test_a_save_killed_at_every_system_call_resumes(tmp_path, monkeypatch, files):
    if files > 1:
        monkeypatch.setattr(plan, "_LARGE", 64)  # bytes
    loaded = set()
    for boundary in range(100):
        root = tmp_path / str(boundary)
        save_state(root, 10)

        def doomed(root=root, boundary=boundary):
            kill_at(boundary)
            save_state(root, 20)

        status = run_forked(doomed)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        loaded.add(assert_recovers(root, [10, 20]))
    assert boundary > 15  # the save did go through our hooks
    assert len(list((root / "iter_0000020").glob("rank_*"))) == files
    assert status == 0
    assert loaded == {10, 20}


def test_a_replacing_save_killed_at_every_system_call_resumes(tmp_path):
    """The iteration was saved before: values are old or new, never a mixture."""
    old, new = make_state(1), make_state(2)
    for boundary in range(100):
        root = tmp_path / str(boundary)
        save_state(root, 10, old)

        def doomed(root=root, boundary=boundary):
            kill_at(boundary)
            save_state(root, 10, new)

        status = run_forked(doomed)
        reader = NativeReader(list_checkpoints(root)[0].path)
        reader.verify()
        try:
            assert_holds(reader, old)
        except AssertionError:
            assert_holds(reader, new)
        save_state(root, 10, new)
        assert {p.name for p in root.iterdir()} == {TRACKER, "iter_0000010"}
        if status == 0:
            break
    assert boundary > 15
    assert status == 0


@pytest.mark.parametrize("seed", range(15))
def test_a_save_killed_at_a_random_time_resumes(tmp_path, seed):
    def run():
        for iteration in range(11, 1000):
            save_state(tmp_path, iteration)

    save_state(tmp_path, 10)
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    time.sleep(random.Random(seed).uniform(0.01, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    newest = int((tmp_path / TRACKER).read_text())
    assert assert_loads(tmp_path, [newest]) == newest
    save_state(tmp_path, 2000)
    assert not list(tmp_path.glob("*tmp*"))


def _two_ranks(rank, store_file, root):
    """Run one of two ranks that save; the second is killed while it writes."""
    import torch.distributed as dist

    from megatron.checkpoint import store
    from megatron.parallel.layout import Layout

    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=2)
    layout = Layout.at(rank, 2).connect("cpu")
    state = {f"model.{rank}": make_state(20)["random"]}
    if rank == 1:
        write = store.write_shard

        def doomed(path, *rest):
            write(path, *rest)
            os.kill(os.getpid(), signal.SIGKILL)

        store.write_shard = doomed
    save(root, 20, state, {}, layout)


def test_a_rank_killed_while_saving_publishes_nothing(tmp_path):
    root = tmp_path / "checkpoints"
    save_state(root, 10)
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            code = 0
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's warnings
                _two_ranks(rank, tmp_path / "store", root)
            except Exception:
                code = 3
            finally:
                os._exit(code)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [3, -signal.SIGKILL]  # the other rank notices and fails
    assert assert_recovers(root, [10]) == 10
