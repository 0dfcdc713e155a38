"""The chunk database: equal to the original's, its rules, damage to it, its memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from megatron.config.data import TokenizerConfig
from megatron.config.retro_preprocessing import RetroPreprocessing
from megatron.data.indexed import IndexedDatasetBuilder
from megatron.errors import ConfigError, DataError
from megatron.parallel.layout import Axis, Layout
from megatron.retro.blocks import plan_blocks
from megatron.retro.database import (
    ChunkCutter,
    ChunkDatabase,
    CorpusChunks,
    build_database,
    corpora_file,
    max_chunks,
    merged_file,
    plan_corpora,
    read_corpora,
)
from megatron.tokenizer import build_tokenizer
from tests.distributed import run_distributed
from tests.retro.corpus import (
    CHUNK,
    EOD,
    SILENT,
    cutter,
    options,
    random_documents,
    write_dataset,
)

ALONE = Axis()
SPLIT = "90,8,2"


def build(asked: RetroPreprocessing, world: Axis = ALONE) -> list[CorpusChunks]:
    return build_database(asked, plan_corpora(asked, SPLIT), cutter(), world)


def table(workdir: Path, name: str, key: str = "chunks") -> np.ndarray:
    with h5py.File(merged_file(workdir, name)) as file:
        found: np.ndarray = file[key][()]
    return found


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return each file's content without the folder's path, which the list of datasets contains."""
    path = str(folder).encode()
    return {name: (folder / name).read_bytes().replace(path, b"") for name in files_of(folder)}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "text_document", random_documents(50))


def test_the_database_of_the_recording_is_written_byte_for_byte(
    tmp_path: Path, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = golden / "retro_fp32" / "workdir"
    monkeypatch.chdir(golden)  # the recording names data/... relative to this folder
    asked = options(tmp_path, "1.0", "data/gpt_text_document", ntrain=2000, compatible=True)
    asked = replace(
        asked,
        stages=replace(asked.stages, retro_doc_block_size=200),
        gpt=replace(asked.gpt, retro_gpt_chunk_length=64),
    )
    gpt = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file="data/gpt2-tiny-vocab.json",
        merge_file="data/gpt2-tiny-merges.txt",
    )
    bert = TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase", vocab_file="data/bert-5000-vocab.txt"
    )
    cut = ChunkCutter(64, build_tokenizer(gpt), build_tokenizer(bert))
    build_database(asked, plan_corpora(asked, SPLIT), cut, ALONE)
    assert files_of(tmp_path) == [f"db/{name}" for name in files_of(recorded / "db")]
    for name in files_of(tmp_path):
        if name.endswith(".json"):
            ours = (tmp_path / name).read_text().replace(str(tmp_path), "retro_fp32/workdir")
            assert ours == (recorded / name).read_text()
            continue
        with h5py.File(tmp_path / name) as ours, h5py.File(recorded / name) as theirs:
            assert set(ours) == set(theirs)
            assert not ours.attrs
            for key in theirs:
                assert ours[key].dtype == theirs[key].dtype
                assert ours[key].shape == theirs[key].shape
                assert ours[key][()].tobytes() == theirs[key][()].tobytes()
                assert ours[key].chunks is None
                assert not ours[key].attrs


def test_the_original_s_own_folder_is_read(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(golden)
    database = ChunkDatabase(golden / "retro_fp32" / "workdir", 64, 5119)
    assert len(database) == 4965
    tokens = database.tokens(np.arange(len(database)))
    ends = database.rows(np.arange(len(database)))
    short = ends[:, 3] - ends[:, 2] < 64
    assert (tokens[short, -1] == 5119).all()
    assert (tokens[~short] != 5119).all()


def test_documents_are_cut_without_their_last_eod(tmp_path: Path) -> None:
    long = list(range(20))
    documents = [[*long, EOD], [EOD], [1, EOD, 2, EOD], [], [*long[:CHUNK], EOD], [3], [SILENT] * 3]
    prefix = write_dataset(tmp_path / "d", [*documents, *[[1]] * 3])
    asked = options(tmp_path / "w", prefix, ntrain=4, doc_block=100)
    (corpus,) = build(asked)
    with h5py.File(Path(corpus.db_dir) / "00-10.hdf5") as file:
        chunks, invalid = file["chunks_valid"][()], file["chunks_invalid"][()]
        offsets = file["doc_offsets"][()]
    assert chunks[:5].tolist() == [
        [0, 0, 8, 7],  # SILENT is one of them
        [0, 8, 16, 8],
        [0, 16, 20, 4],
        [2, 0, 3, 3],
        [4, 0, 8, 7],
    ]
    assert invalid.tolist() == [[6, 0, 3, 0]]
    assert offsets[:, 0].tolist() == list(range(10))
    assert offsets[:, 1].tolist() == [3, 3, 4, 4, 5, 6, 6, 7, 8, 9]
    assert max_chunks(plan_corpora(asked, SPLIT)[0][1], CHUNK) >= len(chunks) + 1


def test_chunks_are_read_padded_with_eod(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [[*range(11), EOD], *[[1, 2]] * 9])
    build(options(tmp_path / "w", prefix, ntrain=2))
    database = ChunkDatabase(tmp_path / "w", CHUNK, EOD)
    assert database.tokens([1, 0]).tolist() == [[8, 9, 10, *[EOD] * 5], list(range(8))]
    assert database.documents([2, 0]).tolist() == [[0, 1], [0, 0]]
    with pytest.raises(IndexError, match=r"train\.hdf5: chunks 0 to 10 of 10"):
        database.tokens([0, 10])


def test_tokens_outside_of_the_vocabulary_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a few evenly spaced chunks of a large table are compared with the vocabulary."""
    documents = [[i + 1, 90 if i in (4, 8) else 5] for i in range(10)]
    build(options(tmp_path / "w", write_dataset(tmp_path / "d", documents), ntrain=1))
    ChunkDatabase(tmp_path / "w", CHUNK, 0, vocab_size=91).check()
    ChunkDatabase(tmp_path / "w", CHUNK, 99).check()
    database = ChunkDatabase(tmp_path / "w", CHUNK, 0, vocab_size=90)
    with pytest.raises(DataError, match=r"d\.bin: document 4 holds the token id 90"):
        database.check()
    for chunks, document in ((2, 8), (3, 4), (1, None)):
        monkeypatch.setattr("megatron.retro.database._TOKENS_CHECKED", chunks)
        if document is None:
            database.check()
        else:
            with pytest.raises(DataError, match=f"document {document} holds"):
                database.check()
    build(options(tmp_path / "e", write_dataset(tmp_path / "empty", [[EOD]] * 10), ntrain=0))
    empty = ChunkDatabase(tmp_path / "e", CHUNK, EOD, vocab_size=1)
    empty.check()
    assert empty.tokens([]).shape == (0, CHUNK)


def test_two_datasets_are_merged_in_order(tmp_path: Path) -> None:
    one = write_dataset(tmp_path / "a" / "text", random_documents(30, seed=1))
    two = write_dataset(tmp_path / "b" / "text", random_documents(20, seed=2))
    asked = options(tmp_path / "w", "3", one, "1", two, ntrain=40)
    first, second = build(asked)
    assert (first.name, second.name) == ("text", "text-2")  # the original confuses them
    assert (first.n_chunks_sampled, second.n_chunks_sampled) == (30, 10)
    train = table(tmp_path / "w", "train")
    assert len(train) == first.n_chunks_train + second.n_chunks_train
    assert (train[:, 0] == np.repeat([0, 1], [first.n_chunks_train, second.n_chunks_train])).all()
    offsets = table(tmp_path / "w", "train", "doc_offsets").astype(int)
    assert offsets[:, 0].tolist() == [0] * 27 + [1] * 18
    for dataset, document, end in offsets:
        before = (train[:, 0] < dataset) | ((train[:, 0] == dataset) & (train[:, 1] <= document))
        assert end == before.sum()
    valid = table(tmp_path / "w", "valid")
    assert len(train) + len(valid) == first.n_chunks + second.n_chunks
    opened = [ChunkDatabase(tmp_path / "w", CHUNK, EOD, name) for name in ("train", "valid")]
    assert [len(database) for database in opened] == [len(train), len(valid)]
    sampled = table(tmp_path / "w", "sampled")
    places = [int(np.flatnonzero((train == row).all(1))[0]) for row in sampled]
    steps = np.diff(places)
    assert (steps > 0).all()
    assert places[29] > 0.9 * first.n_chunks_train  # spread over the whole dataset


def test_the_share_of_each_dataset(tmp_path: Path) -> None:
    """Without weights, datasets count by their tokens. All training chunks may be sampled."""
    one = write_dataset(tmp_path / "one", random_documents(30, seed=1))
    two = write_dataset(tmp_path / "two", random_documents(20, seed=2))
    empty = write_dataset(tmp_path / "empty", [[EOD]] * 20)
    asked = options(tmp_path / "w", one, two)
    (first, data), (second, other) = plan_corpora(asked, SPLIT)
    folder = f"{tmp_path / 'w'}/db/individual"
    assert first == CorpusChunks(
        data.num_tokens, one, f"{one}.bin", "one", f"{folder}/one", 30, 27, 0, 0, 0, 0
    )
    assert (second.ratio, second.n_docs_train) == (other.num_tokens, 18)
    assert plan_corpora(options(tmp_path, one), SPLIT)[0][0].ratio == 1.0
    # A dataset without chunks is in the list, but nothing is sampled from it.
    (count,) = (corpus.n_chunks_train for corpus in build(options(tmp_path / "all", one, ntrain=1)))
    asked = options(tmp_path / "w", "1", one, "0.001", empty, ntrain=count + 1)
    first, second = build(asked)
    assert (first.n_chunks_sampled, first.n_chunks_train) == (count, count)
    assert second[-4:] == (0, 0, 0, 0)
    train = table(tmp_path / "w", "train")
    assert len(train) == count
    assert np.array_equal(table(tmp_path / "w", "sampled"), train)
    with h5py.File(merged_file(tmp_path / "w", "valid")) as file:
        assert set(file) == {"chunks", "n_written"}
    # The list is written as by Megatron-LM.
    assert corpora_file(tmp_path / "w").read_text().startswith('[\n    {\n        "ratio": 1.0,\n')


def test_compatible_takes_the_first_chunks_and_a_percentage(tmp_path: Path, prefix: str) -> None:
    asked = options(tmp_path / "w", "1", prefix, compatible=True)
    (corpus,) = build_database(asked, plan_corpora(asked, "91,9,0"), cutter(), ALONE)
    assert corpus.n_docs_train == 45
    train = table(tmp_path / "w", "train")
    assert np.array_equal(table(tmp_path / "w", "sampled"), train[:20])
    for split, count in (("100,0,0", 50), ("98,2,0", 49), ("0.5,99.5", 0)):
        ((corpus, _),) = plan_corpora(options(tmp_path, "1", prefix, compatible=True), split)
        assert corpus.n_docs_train == count
    (mended, _), *_ = plan_corpora(options(tmp_path, prefix), "91,9,0")
    assert mended.n_docs_train == 46  # like GPT's samples: rounded, not truncated


@pytest.mark.parametrize("split", ["969,30,1", "0,100", "many", "100.5,0"])
def test_compatible_refuses_what_the_original_cannot_read(
    tmp_path: Path, prefix: str, split: str
) -> None:
    with pytest.raises(ConfigError, match=f"--split {split}.*percentage"):
        plan_corpora(options(tmp_path, "1", prefix, compatible=True), split)


def test_equal_names_are_refused_where_the_original_mixes_them(tmp_path: Path) -> None:
    one = write_dataset(tmp_path / "a" / "text", random_documents(5))
    two = write_dataset(tmp_path / "b" / "text", random_documents(5))
    with pytest.raises(ConfigError, match="two datasets are named text"):
        plan_corpora(options(tmp_path, "1", one, "1", two, compatible=True), SPLIT)


def test_too_many_training_chunks_are_refused(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ConfigError, match="--retro-index-ntrain 9999: the share of .*lower it"):
        build(options(tmp_path, prefix, ntrain=9999))


def test_sentences_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        builder.add_documents([1, 2, 3], [1, 2], [2])
    with pytest.raises(DataError, match="2 sequences in 1 documents.*--split-sentences"):
        plan_corpora(options(tmp_path, str(tmp_path / "d")), SPLIT)


def test_an_interrupted_build_continues_and_ends_the_same(tmp_path: Path, prefix: str) -> None:
    build(options(tmp_path / "whole", prefix))
    whole = contents_of(tmp_path / "whole")
    blocks = [name for name in whole if "individual" in name]
    for kept in range(len(blocks)):
        workdir = tmp_path / f"w{kept}"
        for name in blocks[:kept]:
            (workdir / name).parent.mkdir(parents=True, exist_ok=True)
            (workdir / name).write_bytes(whole[name])
        if kept:
            (workdir / blocks[kept - 1]).write_bytes(b"cut off")
        build(options(workdir, prefix))
        assert contents_of(workdir) == whole


def test_what_is_there_is_left_alone(tmp_path: Path, prefix: str) -> None:
    build(options(tmp_path / "w", prefix))
    hdf5 = sorted((tmp_path / "w").rglob("*.hdf5"))
    before = [path.stat().st_ino for path in hdf5]
    build(options(tmp_path / "w", prefix))
    assert [path.stat().st_ino for path in hdf5] == before


def _build_in_parallel(layout: Layout, workdir: Path, prefix: str) -> list[CorpusChunks]:
    return build(options(workdir, prefix, doc_block=7), layout.world)


def test_processes_build_the_same(tmp_path: Path, prefix: str) -> None:
    alone = build(options(tmp_path / "alone", prefix, doc_block=7))
    found = run_distributed(2, _build_in_parallel, tmp_path / "two", prefix)
    assert found[0] == found[1]
    assert [c._replace(db_dir="") for c in found[0]] == [c._replace(db_dir="") for c in alone]
    assert contents_of(tmp_path / "two") == contents_of(tmp_path / "alone")


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [
        *((0, 0, 19), (0, 0, 49), (0, 3, 0), (0, -1, 30)),
        *((1, 0, 99), (2, 0, 90), (2, 0, 0), (2, 0, 9), (3, 0, 0)),
    ],
)
def test_a_damaged_value_of_a_block_is_named(
    tmp_path: Path, prefix: str, column: int, row: int, value: int
) -> None:
    asked = options(tmp_path / "w", prefix)
    (corpus,) = build(asked)
    path = plan_blocks(Path(corpus.db_dir), 50, 10)[2].path
    with h5py.File(path, "r+") as file:
        file["chunks_valid"][row, column] = value
    with pytest.raises(DataError, match=f"{path.name} does not match .*delete it"):
        build(asked)


def test_a_block_of_other_data_is_named(tmp_path: Path, prefix: str) -> None:
    asked = options(tmp_path / "w", prefix)
    build(asked)
    write_dataset(Path(prefix), random_documents(50, seed=2))
    with pytest.raises(DataError, match=r"000-010\.hdf5 does not match"):
        build(asked)


def test_damage_of_the_merged_table_is_named(tmp_path: Path, prefix: str) -> None:
    workdir = tmp_path / "w"
    build(options(workdir, prefix))
    path = merged_file(workdir, "train")
    whole = path.read_bytes()
    with h5py.File(path, "r+") as file:
        file["chunks"][2, 0] = 5
        file["chunks"][3, 1] = 10**6
    database = ChunkDatabase(workdir, CHUNK, EOD)
    with pytest.raises(DataError, match=r"train\.hdf5: chunk 2 is not part of a document"):
        database.tokens([0, 1, 2])
    with pytest.raises(DataError, match=r"train\.hdf5: chunk 3 is not part of a document"):
        database.tokens([3])
    with h5py.File(path, "r+") as file:
        file["n_written"][0] = 5
    with pytest.raises(DataError, match="5 of .* chunks were written"):
        ChunkDatabase(workdir, CHUNK, EOD)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"train\.hdf5"):
        ChunkDatabase(workdir, CHUNK, EOD)
    path.unlink()
    with pytest.raises(DataError, match=r"train\.hdf5 does not exist.*db-build"):
        ChunkDatabase(workdir, CHUNK, EOD)


def test_another_dataset_in_the_place_of_the_first_is_named(tmp_path: Path, prefix: str) -> None:
    build(options(tmp_path / "w", prefix))
    write_dataset(Path(prefix), random_documents(49))
    with pytest.raises(DataError, match="made from 50 documents of .*, which now has 49"):
        ChunkDatabase(tmp_path / "w", CHUNK, EOD)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found[0].pop("n_docs"),
        lambda found: found[0].update(n_chunks=-1),
        lambda found: found[0].update(prefix=3),
        lambda found: found[0].update(ratio="much"),
        lambda found: found.append([]),
    ],
)
def test_a_damaged_list_of_datasets_is_named(
    tmp_path: Path, prefix: str, change: Callable[[list[dict[str, object]]], object]
) -> None:
    build(options(tmp_path / "w", prefix))
    path = corpora_file(tmp_path / "w")
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(DataError, match=r"indexed_dataset_infos\.json is damaged"):
        read_corpora(tmp_path / "w")
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"indexed_dataset_infos\.json: cannot be read"):
        read_corpora(tmp_path / "w")


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    def peak(documents: int) -> int:
        prefix = write_dataset(tmp_path / f"d{documents}", [range(1, 70)] * documents)
        asked = options(tmp_path / f"w{documents}", prefix, ntrain=1000, doc_block=200)
        tracemalloc.start()
        build(asked)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small = peak(400)
    assert peak(2400) < 1.3 * small
