"""Neighbors: Megatron's samples, folders and neighbors, restarts, several corpora, refusals."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.config.data import DataConfig
from megatron.config.retro_preprocessing import RetroIndexConfig, RetroPreprocessing
from megatron.data.datasets import DataRequest
from megatron.data.indexed import IndexedDatasetBuilder
from megatron.device import Device
from megatron.errors import ConfigError, DataError
from megatron.parallel.layout import Axis, Layout
from megatron.retro.embedding import Embedder, EmbedderOptions, Masking, build_embedder
from megatron.retro.index import IndexOptions, IndexPaths
from megatron.retro.neighbors import (
    QueryChunks,
    QueryOptions,
    Searcher,
    neighbors_folder,
    open_searcher,
    query_chunks,
    query_neighbors,
)
from tests.distributed import run_distributed
from tests.retro.recorded import BLOCK, CHUNK, INDEX, WIDTH, Recorded, read

SPLITS = ("train", "valid", "test")
INDEXED = IndexOptions(
    INDEX, WIDTH, block_size=BLOCK, train_fraction=0.97, add_fraction=0.95, threads=1
)
QUERY = QueryOptions(queried=50, saved=8, nprobe=4, ef_search=32, block_size=BLOCK)
CPU, WORLD = Device.cpu(), Axis()


@pytest.fixture(scope="module")
def recorded(golden: Path) -> Recorded:
    return Recorded(golden)


@pytest.fixture
def data(recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with "data", because the recorded names depend on how paths are written."""
    (tmp_path / "data").mkdir()
    for ending in ("bin", "idx"):
        name = f"data/gpt_text_document.{ending}"
        shutil.copyfile(recorded.golden / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def request(*paths: str) -> DataRequest:
    """Return a request for 40 iterations of 16 samples, with 2 evaluation batches every 20."""
    config = DataConfig(
        data_path=paths or ("1.0", "data/gpt_text_document"), split="90,8,2", seq_length=256
    )
    return DataRequest(config, 1234, (640, 96, 32))


def chunks_of(recorded: Recorded, *paths: str, compatible: bool = True) -> dict[str, QueryChunks]:
    return query_chunks(
        request(*paths),
        seq_length=256,
        chunk_length=CHUNK,
        tokenizer=recorded.gpt_tokenizer(),
        compatible=compatible,
    )


def recorded_rows(recorded: Recorded, folder: str) -> NDArray[np.int64]:
    paths = sorted((recorded.workdir / "query" / folder).iterdir())
    return np.concatenate([read(path, "neighbors") for path in paths])


def test_samples_and_folders(recorded: Recorded, data: Path):
    """Sample indices have Megatron's names and bytes, folders have its hashes."""
    chunks = chunks_of(recorded)
    assert {split: len(one) for split, one in chunks.items()} == dict(
        zip(SPLITS, (2576, 388, 132), strict=True)
    )
    names = {neighbors_folder(data, split, one.dataset).name for split, one in chunks.items()}
    assert names == {path.name for path in (recorded.workdir / "query").iterdir()}
    ours = data / "data/index-cache"
    for path in (recorded.golden / "retro_fp32/index-cache").iterdir():
        assert (ours / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("split", SPLITS)
def test_the_recorded_neighbors(recorded: Recorded, data: Path, split: str):
    """Compare the neighbors from Megatron's vectors and index before and after the filter."""
    chunks = chunks_of(recorded)[split]
    folder = recorded.golden / "retro_fp32/query_embeddings"
    vectors = np.load(folder / f"{split}_embeddings.npy")
    unfiltered = np.load(folder / f"{split}_unfiltered_neighbors.npy")
    searcher = open_searcher(recorded.workdir, INDEXED, recorded.database("train"), QUERY, CPU)
    assert np.mean(searcher.search(vectors) == unfiltered) >= 0.99
    expected = recorded_rows(recorded, neighbors_folder(data, split, chunks.dataset).name)
    np.testing.assert_array_equal(searcher.filtered(unfiltered, chunks, 0), expected)
    assert np.mean(searcher.neighbors(vectors, chunks, 0) == expected) >= 0.99


def test_the_recorded_query_vectors(recorded: Recorded, data: Path):
    """A query's text is masked by its place in its block, like the database's."""
    chunks = chunks_of(recorded)["test"]
    options = EmbedderOptions(
        "megatron",
        str(recorded.golden / "bert_fp32/ckpt"),
        recorded.bert_tokenizer,
        batch_size=32,
        max_length=128,
        masking=Masking(1234, 0.15),
    )
    found = build_embedder(options, CPU).embed(chunks.texts(0, len(chunks)))
    path = recorded.golden / "retro_fp32/query_embeddings/test_embeddings.npy"
    np.testing.assert_allclose(found, np.load(path), rtol=1e-6, atol=1e-6)


class RecordedEmbedder(Embedder):
    """Gives the recorded vectors of a split's chunks in order."""

    width = WIDTH

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self.vectors, self.blocks = vectors, 0

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.blocks += 1
        found, self.vectors = np.split(self.vectors, [len(texts)])
        return found

    _tokenize = _vectors = None  # type: ignore[assignment]


def query(
    recorded: Recorded,
    workdir: Path,
    splits: dict[str, QueryChunks],
    embedder: Embedder,
    options: QueryOptions = QUERY,
) -> None:
    query_neighbors(
        workdir,
        INDEXED,
        options,
        splits,
        database=recorded.database("train"),
        build_embedder=lambda: embedder,
        device=CPU,
        world=WORLD,
    )


def test_blocks(recorded: Recorded, data: Path):
    """The files have Megatron's names and bytes; a run continues after any of them."""
    added = IndexPaths(data, INDEXED).added
    added.parent.mkdir(parents=True)
    shutil.copyfile(IndexPaths(recorded.workdir, INDEXED).added, added)
    splits = {"train": chunks_of(recorded)["train"]}
    vectors = np.load(recorded.golden / "retro_fp32/query_embeddings/train_embeddings.npy")
    embedder = RecordedEmbedder(vectors)
    query(recorded, data, splits, embedder)
    assert embedder.blocks == 3
    folder = neighbors_folder(data, "train", splits["train"].dataset)
    theirs = recorded.workdir / "query" / folder.name
    assert [path.name for path in sorted(folder.iterdir())] == [
        path.name for path in sorted(theirs.iterdir())
    ]
    for path in folder.iterdir():
        assert np.mean(read(path, "neighbors") == read(theirs / path.name, "neighbors")) >= 0.99
    missing = folder / "01000-02000.hdf5"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    missing.unlink()
    embedder = RecordedEmbedder(vectors[1000:2000])
    query(recorded, data, splits, embedder)
    assert embedder.blocks == 1
    np.testing.assert_array_equal(
        read(missing, "neighbors"), read(theirs / missing.name, "neighbors")
    )
    assert {path for path in folder.iterdir() if path.read_bytes() != before[path]} <= {missing}


def query_in(layout: Layout, golden: Path, workdir: Path) -> int:
    """Query one split in several processes, each with the vectors of its own blocks."""
    os.chdir(workdir)
    recorded = Recorded(golden)
    vectors = np.load(golden / "retro_fp32/query_embeddings/train_embeddings.npy")
    blocks = np.split(vectors, [1000, 2000])[layout.world.rank :: 2]
    embedder = RecordedEmbedder(np.concatenate(blocks))
    query_neighbors(
        workdir,
        INDEXED,
        QUERY,
        {"train": chunks_of(recorded)["train"]},
        database=recorded.database("train"),
        build_embedder=lambda: embedder,
        device=CPU,
        world=layout.world,
    )
    return embedder.blocks


def test_processes_share_the_blocks(recorded: Recorded, data: Path):
    added = IndexPaths(data, INDEXED).added
    added.parent.mkdir(parents=True)
    shutil.copyfile(IndexPaths(recorded.workdir, INDEXED).added, added)
    assert run_distributed(2, query_in, recorded.golden, data) == [2, 1]
    (folder,) = (data / "query").iterdir()
    for path in folder.iterdir():
        theirs = read(recorded.workdir / "query" / folder.name / path.name, "neighbors")
        assert np.mean(read(path, "neighbors") == theirs) >= 0.99


def test_neighbors_that_are_missing(recorded: Recorded, data: Path):
    """If the index finds too few, or the sample itself contains them all, -1 is stored."""
    chunks, database = chunks_of(recorded)["train"], recorded.database("train")
    searcher = Searcher(None, database, replace(QUERY, saved=4))
    _, documents = chunks.documents(0)
    own = np.flatnonzero(np.isin(database.rows[:, 1], documents))[:2]
    others = np.flatnonzero(~np.isin(database.rows[:, 1], documents))[:3]
    found = np.array([[own[0], others[0], -1, own[1], others[1], others[2], -1], [-1] * 7])
    expected = [[*others[:3], -1], [-1] * 4]
    np.testing.assert_array_equal(searcher.filtered(found, chunks, 0), expected)
    few = searcher.filtered(found[:, :2], chunks, 0)
    np.testing.assert_array_equal(few, [[others[0], -1, -1, -1], [-1] * 4])


def test_corpora_without_a_split_keep_their_numbers(recorded: Recorded, data: Path):
    """A corpus too small for validation data shifts the numbers in Megatron's filter."""
    with IndexedDatasetBuilder("data/small", np.dtype(np.uint16)) as builder:
        builder.add_documents(np.arange(300), [300], [0, 1])
    paths = ("0.1", "data/small", "0.9", "data/gpt_text_document")
    for compatible, number in ((True, 0), (False, 1)):
        chunks = chunks_of(recorded, *paths, compatible=compatible)
        assert chunks["valid"].documents(0)[0] == number
        corpora = {chunks["train"].documents(sample)[0] for sample in range(20)}
        assert corpora == {0, 1}


def test_what_does_not_fit(recorded: Recorded, data: Path):
    database, splits = recorded.database("train"), chunks_of(recorded)
    smaller = replace(database, rows=database.rows[:4000])
    with pytest.raises(DataError, match="has 4716 chunks, but the database has 4000"):
        open_searcher(recorded.workdir, INDEXED, smaller, QUERY, CPU)
    almost = replace(database, rows=database.rows[:4800])
    searcher = open_searcher(recorded.workdir, INDEXED, almost, QUERY, CPU)
    vectors = np.load(recorded.golden / "retro_fp32/query_embeddings/train_embeddings.npy")
    with pytest.raises(DataError, match="they belong to different data; build the index again"):
        searcher.search(vectors)
    with pytest.raises(ConfigError, match="--retro-query-num-neighbors-save 60 is more than"):
        query(recorded, data, splits, RecordedEmbedder(vectors), replace(QUERY, saved=60))
    with pytest.raises(DataError, match="added_0.970_0.950.faissindex does not exist"):
        query(recorded, data, splits, RecordedEmbedder(vectors))
    with pytest.raises(ConfigError, match="256 is not a multiple of --retro-gpt-chunk-length 60"):
        query_chunks(request(), seq_length=256, chunk_length=60, tokenizer=recorded.gpt_tokenizer())


def test_an_index_is_searched_with_its_settings(tmp_path: Path) -> None:
    """An index without inverted lists has no --retro-query-nprobe."""
    faiss = pytest.importorskip("faiss")
    options = IndexOptions("HNSW4,Flat", 4, threads=1)
    path = IndexPaths(tmp_path, options).added
    path.parent.mkdir(parents=True)
    index = faiss.index_factory(4, options.factory)
    faiss.write_index(index, str(path))
    with pytest.raises(DataError, match="has 0 chunks, but the database has 1: they belong"):
        open_searcher(tmp_path, options, range(1), QUERY, CPU)  # type: ignore[arg-type]
    index.add(np.ones((1, 4), np.float32))
    faiss.write_index(index, str(path))
    searcher = open_searcher(tmp_path, options, range(1), QUERY, CPU)  # type: ignore[arg-type]
    assert faiss.downcast_index(searcher._index).hnsw.efSearch == QUERY.ef_search
    assert searcher.search(np.zeros((1, 4), np.float32)).tolist() == [[0, *[-1] * 49]]


def test_settings_begin_with_the_defaults_of_the_flags() -> None:
    flags = RetroPreprocessing(index=RetroIndexConfig(retro_index_str="Flat"))
    assert QueryOptions.of(flags) == QueryOptions()
    assert IndexOptions.of(flags) == IndexOptions("Flat", 1024)


def test_no_more_neighbors_are_stored_than_found(tmp_path: Path) -> None:
    def run(saved: int, compatible: bool = False) -> None:
        query_neighbors(
            tmp_path,
            INDEXED,
            replace(QUERY, saved=saved, queried=8, compatible=compatible),
            {},
            database=None,  # type: ignore[arg-type]
            build_embedder=lambda: pytest.fail("an embedder was loaded"),
            device=CPU,
            world=WORLD,
        )

    run(8)
    with pytest.raises(ConfigError, match="--retro-query-num-neighbors-save 9 is more than .* 8:"):
        run(9)
    run(9, compatible=True)
