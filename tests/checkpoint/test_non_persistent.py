"""Non-persistent checkpoints: written, copied, completed on other machines, verified."""

from __future__ import annotations

import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import non_persistent
from megatron.checkpoint.entries import Entry
from megatron.checkpoint.non_persistent import RUN, NonPersistentStore
from megatron.checkpoint.store import Snapshot
from megatron.errors import StorageError
from megatron.parallel.layout import Layout
from tests.checkpoint.states import assert_holds, make_state, meta_of
from tests.distributed import run_distributed

_FILES = [f"rank_{rank:05}.safetensors" for rank in range(4)]


def _save(store: NonPersistentStore, layout: Layout, iteration: int) -> Path:
    meta = {**meta_of(iteration), RUN: store.run}
    path = store.save(Snapshot.take(iteration, make_state(iteration), meta, layout))
    layout.world.barrier()  # for the rank that deletes the older ones
    return path


def _newest(store: NonPersistentStore, above: int = -1) -> int | None:
    reader = store.open_newest(above)
    if reader is None:
        return None
    assert_holds(reader, make_state(reader.iteration))
    return reader.iteration


def _lose(layout: Layout, root: Path, machine: int) -> None:
    """Replace a machine with an empty one."""
    if layout.world.rank == 2 * machine:
        shutil.rmtree(root)
        root.mkdir()
    layout.world.barrier()


def _damage(layout: Layout, path: Path) -> None:
    layout.world.barrier()  # others may still read it, and reading a truncated file is fatal
    if layout.world.rank == 0:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    layout.world.barrier()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _copied(layout: Layout, folder: Path) -> None:
    """Run two machines of two ranks, each of which keeps the other's files too."""
    root = folder / f"machine{layout.world.rank // 2}"
    store = NonPersistentStore(root, "a run", layout, copies=2)
    for iteration in (3, 5, 7):
        assert _save(store, layout, iteration) == root / f"iter_{iteration:07}"
    assert _names(root) == ["iter_0000005", "iter_0000007"]
    assert _names(root / "iter_0000007") == ["manifest.json", *_FILES]
    assert (_newest(store), _newest(store, above=7)) == (7, None)
    _lose(layout, root, 1)
    assert _newest(store) == 7
    assert _names(root / "iter_0000007") == ["manifest.json", *_FILES]
    assert _newest(NonPersistentStore(root, "another run", layout)) is None
    _lose(layout, root, 1)
    _damage(layout, folder / "machine0" / "iter_0000007" / _FILES[3])  # the only copy
    assert _newest(store) == 5
    store.delete_after(5)
    assert _names(root) == ["iter_0000005"]


def _alone(layout: Layout, folder: Path) -> None:
    """Run without copies: a lost machine loses the checkpoint; a full disk publishes nothing."""
    root = folder / f"machine{layout.world.rank // 2}"
    store = NonPersistentStore(root, "a run", layout)
    _save(store, layout, 4)
    rank = layout.world.rank
    own = _FILES[rank // 2 * 2 : rank // 2 * 2 + 2]
    assert _names(root / "iter_0000004") == ["manifest.json", *own]
    assert _newest(store) == 4  # completed on both machines
    assert _names(root / "iter_0000004") == ["manifest.json", *_FILES]
    _save(store, layout, 6)
    _lose(layout, root, 1)
    assert _newest(store) == 4
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, most[1]))
    with pytest.raises(StorageError):
        _save(store, layout, 8)
    resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert _newest(store, above=4) is None
    assert not [name for name in _names(root) if "tmp" in name]


def _shared(layout: Layout, folder: Path) -> None:
    store = NonPersistentStore(folder / "all", "a run", layout, is_shared=True)
    _save(store, layout, 2)
    assert _names(folder / "all" / "iter_0000002") == ["manifest.json", *_FILES]
    assert _newest(store) == 2
    _damage(layout, folder / "all" / "iter_0000002" / _FILES[1])
    assert _newest(store) is None


def _far(layout: Layout, folder: Path) -> None:
    """Run four machines that keep two copies on the next ones; files are sent in many parts."""
    rank = layout.world.rank
    root = folder / f"machine{rank}"
    non_persistent._PIECE = 1000  # only in this forked process
    store = NonPersistentStore(root, "a run", layout, copies=3, jump=3)
    # Ranks have files of different sizes, and those of the last have a last part of one byte.
    own = {f"own.{rank}": Entry.whole(torch.arange((3 - rank) * 1000).byte())}
    for iteration in (1, 2):
        meta = {**meta_of(iteration), RUN: store.run}
        store.save(Snapshot.take(iteration, own, meta, layout))
        layout.world.barrier()
    newest = root / "iter_0000002"
    kept = sorted({_FILES[(rank - jump) % 4] for jump in (0, 3, 6)})
    assert _names(newest) == ["manifest.json", *kept]
    whole = {name: (newest / name).read_bytes() for name in kept}
    # A file that is too short is copied again, and so is a machine's whole folder.
    if rank == 0:
        (newest / _FILES[0]).write_bytes(b"short")
        newest.rename(root / "iter_0000003")  # which is not what its manifest says
    if rank == 1:
        (newest / _FILES[1]).write_bytes(whole[_FILES[1]] + b"long")
    layout.world.barrier()
    reader = store.open_newest(-1)
    assert reader is not None
    assert reader.iteration == 2
    assert reader.names() == [f"own.{i}" for i in range(4)]
    assert _names(newest) == ["manifest.json", *_FILES]
    assert {name: (newest / name).read_bytes() for name in kept} == whole
    shutil.rmtree(root / "iter_0000003", ignore_errors=True)
    _fail(layout, store, newest)
    assert {name: (newest / name).read_bytes() for name in kept} == whole
    left = root / "iter_0000004.tmp-1"  # by a save that was killed
    left.mkdir()
    store.delete_after(1)
    assert _names(root) == ["iter_0000001"]


def _fail(layout: Layout, store: NonPersistentStore, newest: Path) -> None:
    """Let the disk of single machines fail while files are completed or copied."""
    rank, root = layout.world.rank, newest.parent

    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    # A machine that cannot store what it lost has nothing to read.
    if rank == 3:
        shutil.rmtree(newest)
    layout.world.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr(non_persistent, "_write", full)
        assert store.open_newest(1) is None
    # Now only the last file of a machine is damaged, and another one lacks the manifest.
    layout.world.barrier()
    assert store.open_newest(1) is not None
    layout.world.barrier()
    if rank == 0:
        (newest / _FILES[3]).write_bytes(b"short")
    if rank == 2:
        (newest / "manifest.json").unlink()
    layout.world.barrier()
    assert store.open_newest(1) is not None
    assert _names(newest) == ["manifest.json", *_FILES]

    for failing, step in ((1, "_write"), (2, "_read")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(non_persistent, step, full)
            with pytest.raises(StorageError, match=f"machine{failing}/.*: No space left on device"):
                _save(store, layout, 5)
        layout.world.barrier()
        assert _names(root) == ["iter_0000001", "iter_0000002"]


def _everything(layout: Layout, folder: Path) -> None:
    for number, part in enumerate((_copied, _alone, _shared, _far)):
        part(layout, folder / str(number))


def test_what_a_lost_machine_held_comes_from_its_copies(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_distributed(4, _everything, tmp_path)
    told = capfd.readouterr().err
    assert "iteration 7 is not used: rank_00003.safetensors: damaged:" in told
    assert "iteration 6 is not used: rank_00002.safetensors was lost" in told
    assert "iteration 2 is not used: [Errno 28] No space left on device: " in told
    assert "iteration 2 is not used: rank_00001.safetensors: damaged:" in told


def test_a_process_alone_needs_no_group(tmp_path: Path) -> None:
    store = NonPersistentStore(tmp_path, "a run", Layout.single(), copies=2)
    _save(store, Layout.single(), 1)
    for _ in range(2):  # the second replaces the first
        _save(store, Layout.single(), 2)
        assert _newest(store) == 2
    (tmp_path / "iter_0000002" / "manifest.json").write_text("{")
    assert _newest(store) == 1
