"""The index: Megatron's recorded one, every kind that faiss has, restarts, shares and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron.device import Device
from megatron.errors import ConfigError, DataError, StorageError
from megatron.parallel.layout import Axis, Layout
from megatron.retro.blocks import plan_blocks
from megatron.retro.embedding import Embedder
from megatron.retro.index import (
    ChunkTexts,
    IndexOptions,
    IndexPaths,
    add_to_index,
    faiss_threads,
    on_device,
    read_index,
    train_index,
)
from tests.distributed import run_distributed
from tests.retro.recorded import BLOCK, INDEX, WIDTH, Recorded, read

RECORDED = IndexOptions(
    INDEX,
    WIDTH,
    block_size=BLOCK,
    train_fraction=0.97,
    add_fraction=0.95,
    keep_training_vectors=True,
    keep_codes=True,
    threads=1,
    compatible=True,
)
OURS = IndexOptions("IVF8,Flat", 16, block_size=100, threads=1)
WORLD = Axis()


class Numbers:
    """Chunks whose content is their own number, and the tokenizer of their text."""

    eod = -1

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def tokens(self, chunk_ids: Any) -> NDArray[np.int64]:
        return np.array(chunk_ids)[:, None]

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(ids[0])


class FakeEmbedder(Embedder):
    """Gives chunk i the vector i of a table."""

    def __init__(self, table: NDArray[np.float32]) -> None:
        self.table, self.width, self.embedded = table, table.shape[1], 0

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.embedded += len(texts)
        return self.table[[int(text) for text in texts]]

    _tokenize = _vectors = None  # type: ignore[assignment]


def texts(count: int) -> ChunkTexts:
    numbers: Any = Numbers(count)
    return ChunkTexts(numbers, numbers)


def nobody() -> Embedder:
    raise AssertionError("nothing should be embedded")


@pytest.fixture(scope="module")
def table() -> NDArray[np.float32]:
    return np.random.RandomState(3).standard_normal((450, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def recorded(golden: Path) -> Recorded:
    return Recorded(golden)


def bytes_of(path: Path) -> bytes:
    return path.read_bytes()


def test_the_recorded_index(recorded: Recorded, tmp_path: Path):
    """Megatron's vectors and codes give the same files, byte for byte."""
    ours, theirs = IndexPaths(tmp_path, RECORDED), IndexPaths(recorded.workdir, RECORDED)
    shutil.copytree(theirs.training / "blocks", ours.training / "blocks")
    # The recorded vectors are 64 wide; Megatron would compute them again on a rerun.
    train_index(tmp_path, replace(RECORDED, compatible=False), texts(2000), nobody, WORLD)
    assert len(bytes_of(ours.merged)) == len(bytes_of(theirs.merged))
    for path in (ours.merged, ours.empty):
        path.unlink()
    blocks = plan_blocks(ours.training / "blocks", 2000, BLOCK)
    from megatron.retro.index import _train  # as a first run continues after its last block

    _train(ours, blocks)
    assert bytes_of(ours.merged) == bytes_of(theirs.merged)
    assert bytes_of(ours.empty) == bytes_of(theirs.empty)
    shutil.copytree(theirs.codes, ours.codes)
    add_to_index(tmp_path, RECORDED, texts(4965), nobody, WORLD)
    assert bytes_of(ours.added) == bytes_of(theirs.added)


def test_codes_of_the_recorded_vectors(recorded: Recorded, tmp_path: Path):
    """The sampled chunks are the database's first, so their vectors produce its first codes."""
    paths = IndexPaths(recorded.workdir, RECORDED)
    shutil.copytree(paths.folder, IndexPaths(tmp_path, RECORDED).folder)
    ours = IndexPaths(tmp_path, RECORDED)
    ours.added.unlink()
    shutil.rmtree(ours.codes)
    # Masks depend only on the place in a block, so the vectors are those of training.
    embedder = FakeEmbedder(recorded.embeddings())
    add_to_index(tmp_path, RECORDED, texts(2000), lambda: embedder, WORLD)
    for number in range(2):
        name = f"{number * BLOCK:05}-{(number + 1) * BLOCK:05}.hdf5"
        found, expected = read(ours.codes / name), read(paths.codes / name)
        np.testing.assert_array_equal(found, expected)


def test_the_recorded_index_is_read(recorded: Recorded):
    paths = IndexPaths(recorded.workdir, RECORDED)
    for mapped in (False, True):
        index = read_index(paths.added, RECORDED, mapped=mapped)
        assert index.ntotal == 4716
    _, found = index.search(recorded.embeddings()[:5], 1)
    assert found.shape == (5, 1)


@pytest.mark.parametrize(
    "factory",
    [
        *("Flat", "IVF8,Flat", "IVF8_HNSW4,Flat", "PQ4x4", "SQ8", "IDMap,Flat"),
        *("OPQ4_8,IVF4,PQ4x4", "PCA8,IVF4,SQ8", "PCA8,Flat", "IVF4,Flat,RFlat"),
        *("IVF4,PQ8x4fs", "PQ8x4fs", "IDMap2,IVF4,Flat"),
    ],
)
def test_every_kind_of_index(factory: str, table: NDArray[np.float32], tmp_path: Path):
    """An index built from blocks finds the same as one that is filled at once."""
    options = replace(OURS, factory=factory)
    embedder = FakeEmbedder(table)
    train_index(tmp_path, options, texts(300), lambda: embedder, WORLD)
    add_to_index(tmp_path, options, texts(450), lambda: embedder, WORLD)
    assert embedder.embedded == 750
    paths = IndexPaths(tmp_path, options)
    assert not paths.training.exists()
    assert not paths.codes.exists()
    expected = faiss.read_index(str(paths.empty))
    if "IDMap" in factory:
        expected.add_with_ids(table, np.arange(450))
    else:
        expected.add(table)
    found = read_index(paths.added, options).search(table[:50], 5)
    wanted = expected.search(table[:50], 5)
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-4)
    np.testing.assert_array_equal(found[1], wanted[1])


@pytest.mark.parametrize("factory", ["HNSW8", "PCA16,HNSW8"])
def test_graphs(factory: str, table: NDArray[np.float32], tmp_path: Path):
    """A graph depends on the blocks in which it grows, but finds nearly all neighbors."""
    options = replace(OURS, factory=factory)
    train_index(tmp_path, options, texts(300), lambda: FakeEmbedder(table), WORLD)
    add_to_index(tmp_path, options, texts(450), lambda: FakeEmbedder(table), WORLD)
    _, found = read_index(IndexPaths(tmp_path, options).added, options).search(table, 1)
    assert np.mean(found[:, 0] == np.arange(450)) > 0.9


def test_a_run_continues_after_any_block(table: NDArray[np.float32], tmp_path: Path):
    """Existing blocks are kept, and the index is the same."""
    options = replace(OURS, keep_training_vectors=True, keep_codes=True)
    paths, whole = IndexPaths(tmp_path / "a", options), IndexPaths(tmp_path / "b", options)
    for workdir in (paths.workdir, whole.workdir):
        train_index(workdir, options, texts(300), lambda: FakeEmbedder(table), WORLD)
        add_to_index(workdir, options, texts(450), lambda: FakeEmbedder(table), WORLD)
    assert bytes_of(paths.added) == bytes_of(whole.added)
    paths.empty.unlink()
    paths.merged.unlink()
    paths.added.unlink()
    (paths.training / "blocks/0100-0200.hdf5").unlink()
    (paths.codes / "0200-0300.hdf5").write_bytes(b"cut")
    embedder = FakeEmbedder(table)
    train_index(paths.workdir, options, texts(300), lambda: embedder, WORLD)
    add_to_index(paths.workdir, options, texts(450), lambda: embedder, WORLD)
    assert embedder.embedded == 200
    assert bytes_of(paths.added) == bytes_of(whole.added)
    add_to_index(paths.workdir, options, texts(450), nobody, WORLD)


def test_merged_vectors_are_used_if_they_are_complete(table: NDArray[np.float32], tmp_path: Path):
    options = replace(OURS, keep_training_vectors=True)
    paths = IndexPaths(tmp_path, options)
    train_index(tmp_path, options, texts(300), lambda: FakeEmbedder(table), WORLD)
    trained = bytes_of(paths.empty)
    paths.empty.unlink()
    shutil.rmtree(paths.training / "blocks")
    train_index(tmp_path, options, texts(300), nobody, WORLD)
    assert bytes_of(paths.empty) == trained
    paths.empty.unlink()
    paths.merged.write_bytes(bytes_of(paths.merged)[:-4])
    with pytest.raises(AssertionError, match="nothing should be embedded"):
        train_index(tmp_path, options, texts(300), nobody, WORLD)


def test_vectors_of_another_width_are_made_again_as_in_megatron(
    table: NDArray[np.float32], tmp_path: Path
):
    options = replace(OURS, keep_training_vectors=True)
    train_index(tmp_path, options, texts(300), lambda: FakeEmbedder(table), WORLD)
    paths = IndexPaths(tmp_path, options)
    paths.empty.unlink()
    paths.merged.unlink()
    train_index(tmp_path, options, texts(300), nobody, WORLD)
    paths.empty.unlink()
    paths.merged.unlink()
    embedder = FakeEmbedder(table)
    train_index(tmp_path, replace(options, compatible=True), texts(300), lambda: embedder, WORLD)
    assert embedder.embedded == 300


def test_shares(table: NDArray[np.float32], tmp_path: Path):
    """Megatron's share is the front of each block; ours skips single rows."""
    options = replace(OURS, factory="IVF4,Flat", add_fraction=0.8, train_fraction=0.5)
    found = {}
    for compatible in (False, True):
        asked = replace(options, compatible=compatible, keep_codes=True)
        workdir = tmp_path / str(compatible)
        train_index(workdir, asked, texts(300), lambda: FakeEmbedder(table), WORLD)
        add_to_index(workdir, asked, texts(450), lambda: FakeEmbedder(table), WORLD)
        index = read_index(IndexPaths(workdir, asked).added, asked)
        index.nprobe = 4
        found[compatible] = set(index.search(table, 1)[1][:, 0].tolist())
    front = [row for row in range(450) if row % 100 < (80 if row < 400 else 40)]
    assert found[True] == set(front)
    gaps = np.diff(sorted(found[False]))
    assert len(found[False]) == 360
    assert gaps.max() == 2


def test_faiss_base_of_megatron_leaves_nothing_out(table: NDArray[np.float32], tmp_path: Path):
    options = replace(OURS, type="faiss-base", add_fraction=0.5, compatible=True)
    train_index(tmp_path, options, texts(300), lambda: FakeEmbedder(table), WORLD)
    add_to_index(tmp_path, options, texts(450), lambda: FakeEmbedder(table), WORLD)
    assert read_index(IndexPaths(tmp_path, options).added, options).ntotal == 450


def test_the_exception_at_the_end(table: NDArray[np.float32], tmp_path: Path):
    options = replace(OURS, compatible=True)
    train_index(tmp_path, options, texts(300), lambda: FakeEmbedder(table), WORLD)
    with pytest.raises(ConfigError, match=r"remove\? .*--retro-index-no-delete-added-codes"):
        add_to_index(tmp_path, options, texts(450), lambda: FakeEmbedder(table), WORLD)
    assert IndexPaths(tmp_path, options).added.exists()
    assert IndexPaths(tmp_path, options).codes.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"factory": "IVFnonsense"},
            "--retro-index-str IVFnonsense: faiss cannot build such an index",
        ),
        (
            {"factory": "PQ5"},
            "--retro-index-str PQ5: faiss cannot build such an index for vectors of 16",
        ),
        ({"factory": "Flat", "add_fraction": 0.5}, "--retro-index-str IDMap,Flat"),
        ({"width": 24}, "--retro-index-nfeats 24: the vectors of the BERT have 16 numbers"),
        ({"factory": "IVF400,Flat"}, "cannot train it on 300 vectors .* larger --retro-index-nt"),
    ],
)
def test_what_cannot_be_built(
    table: NDArray[np.float32], tmp_path: Path, changes: dict[str, Any], message: str
):
    with pytest.raises((ConfigError, DataError), match=message):
        train_index(
            tmp_path, replace(OURS, **changes), texts(300), lambda: FakeEmbedder(table), WORLD
        )


def test_indexes_that_do_not_fit(table: NDArray[np.float32], tmp_path: Path):
    train_index(tmp_path, OURS, texts(300), lambda: FakeEmbedder(table), WORLD)
    path = IndexPaths(tmp_path, OURS).empty
    with pytest.raises(DataError, match="of 16 numbers, but --retro-index-nfeats is 24"):
        train_index(tmp_path, replace(OURS, width=24), texts(300), nobody, WORLD)
    path.chmod(0o666)
    with pytest.raises(DataError, match="other users may have written it"):
        read_index(path, OURS)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match="not an index, or damaged"):
        read_index(path, OURS)
    path.unlink()
    with pytest.raises(DataError, match="does not exist: run the task index-build again"):
        add_to_index(tmp_path, OURS, texts(450), nobody, WORLD)


def test_indexes_that_cannot_be_read_or_written(
    table: NDArray[np.float32], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(DataError, match="--retro-index-ntrain: there are no chunks on which"):
        train_index(tmp_path, OURS, texts(0), nobody, WORLD)
    path = IndexPaths(tmp_path, OURS).empty
    path.parent.mkdir(parents=True)
    faiss.write_index(faiss.index_factory(16, "IVF8,Flat"), str(path))
    with pytest.raises(DataError, match="is not trained: remove it and run the task index-build"):
        train_index(tmp_path, OURS, texts(300), nobody, WORLD)
    with pytest.raises(DataError, match=r"cannot be read \(Not a directory\): run the task"):
        read_index(path / "file", OURS)
    path.unlink()

    def full(*_: object) -> None:
        raise RuntimeError("Error in write at a.cpp:5: Error: 'x' failed: No space left on device")

    monkeypatch.setattr(faiss, "write_index", full)
    with pytest.raises(StorageError, match="'x' failed: No space left on device"):
        train_index(tmp_path, OURS, texts(300), lambda: FakeEmbedder(table), WORLD)
    assert [file.name for file in path.parent.iterdir()] == []


@pytest.mark.parametrize("fraction", [1.0, 0.7])
def test_codes_are_added_in_batches(
    table: NDArray[np.float32], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float
):
    options = replace(OURS, add_fraction=fraction)
    added = []
    for at_once in (1000, 30):
        monkeypatch.setattr("megatron.retro.index._ADDED_AT_ONCE", at_once)
        workdir = tmp_path / str(at_once)
        train_index(workdir, options, texts(300), lambda: FakeEmbedder(table), WORLD)
        add_to_index(workdir, options, texts(450), lambda: FakeEmbedder(table), WORLD)
        added.append(bytes_of(IndexPaths(workdir, options).added))
    assert added[0] == added[1]


def test_threads_of_faiss_are_limited_for_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron.retro.index.cores_per_process", lambda: 3)
    before = faiss.omp_get_max_threads()
    for threads, expected in ((2, 2), (None, 3)):
        with suppress(KeyError), faiss_threads(threads) as module:
            assert module is faiss
            assert faiss.omp_get_max_threads() == expected
            raise KeyError
        assert faiss.omp_get_max_threads() == before


def build_with(layout: Layout, workdir: Path, table: NDArray[np.float32]) -> int:
    embedder = FakeEmbedder(table)
    train_index(workdir, OURS, texts(300), lambda: embedder, layout.world)
    add_to_index(workdir, OURS, texts(450), lambda: embedder, layout.world)
    return embedder.embedded


def test_processes_share_the_work(table: NDArray[np.float32], tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    build_with(Layout.single(), one, table)
    shares = run_distributed(2, build_with, two, table)
    assert shares == [200 + 250, 100 + 200]
    assert bytes_of(IndexPaths(one, OURS).added) == bytes_of(IndexPaths(two, OURS).added)


def fail(layout: Layout, workdir: Path, table: NDArray[np.float32]) -> str:
    """Return each process's error if the first one cannot train."""
    options = replace(OURS, factory="IVF400,Flat")
    try:
        train_index(workdir, options, texts(300), lambda: FakeEmbedder(table), layout.world)
    except DataError as error:
        return str(error)
    return ""


def test_all_processes_end_if_the_first_one_fails(table: NDArray[np.float32], tmp_path: Path):
    first, second = run_distributed(2, fail, tmp_path, table)
    assert "cannot train it on 300 vectors" in first
    assert "the first process failed" in second


@pytest.fixture
def faiss_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Imitate a faiss build with one GPU; return the list in which calls are recorded."""
    called: list[str] = []

    def to_all(index: Any) -> Any:
        called.append("clustering")
        return index

    def to_one(resources: object, number: int, index: Any) -> Any:
        called.append(f"search on {number}")
        return faiss.clone_index(index)

    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", to_all, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", to_one, raising=False)
    return called


GPU = Device(torch.device("cuda", 0))


def test_training_clusters_on_gpus(
    table: NDArray[np.float32], tmp_path: Path, faiss_with_a_gpu: list[str]
):
    train_index(tmp_path, OURS, texts(300), lambda: FakeEmbedder(table), WORLD)
    assert faiss_with_a_gpu == ["clustering"]
    assert read_index(IndexPaths(tmp_path, OURS).empty, OURS).is_trained


def test_search_on_a_gpu(
    faiss_with_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    index = faiss.IndexFlatL2(16)
    assert on_device(index, Device.cpu(), 5) is index
    assert on_device(index, GPU, 5) is not index
    assert faiss_with_a_gpu == ["search on 0"]
    second = Device(torch.device("cuda", 1))
    assert on_device(index, second, 5) is index  # this machine has one
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    assert on_device(index, second, 5) is not index
    assert faiss_with_a_gpu == ["search on 0", "search on 1"]
    capsys.readouterr()

    def refuse(*_: object) -> None:
        raise RuntimeError("Error in f at g.cpp:1: Error: 'x' failed: This index is not on GPUs")

    monkeypatch.setattr(faiss, "index_cpu_to_gpu", refuse)
    assert on_device(index, GPU, 5) is index
    assert "the index stays on the CPU ('x' failed: This index is not on" in capsys.readouterr().out
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    assert on_device(index, GPU, 5) is index
    assert "this faiss cannot use GPUs: install a package that can" in capsys.readouterr().out
