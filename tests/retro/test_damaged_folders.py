"""Each kind of damage to a working folder is refused before training, with the file and remedy."""

import json
import shutil

import h5py
import pytest

from megatron.config.data import DataConfig
from megatron.data.datasets import corpus_fingerprint
from megatron.errors import DataError, UserError
from megatron.parallel.layout import Layout
from megatron.retro import blocks, database
from megatron.retro.database import ChunkDatabase, corpora_file, merged_file
from tests.retro.corpus import EOD, random_documents, write_dataset
from tests.training.test_retro import CHUNK, toy_workdir, words
from tests.training.toy import build_toy

AGAIN = "run tools/retro/main.py again"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tmp_path_factory.mktemp("retro") / "work"


@pytest.fixture(scope="module", autouse=True)
def made(whole):
    toy_workdir(whole.parent)


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "work")


def neighbors(folder):
    (path,) = folder.glob("query/train_*/*.hdf5")
    return path


def chunks(folder):
    return merged_file(folder, "train")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def put(path, name, place, value):
    with h5py.File(path, "r+") as file:
        file[name][place] = value


def replaced(path, name, change):
    with h5py.File(path, "r+") as file:
        values = file[name][()]
        del file[name]
        file[name] = change(values)


def told(path, **changes):
    found = json.loads(path.read_text())
    (found[0] if isinstance(found, list) else found).update(changes)
    path.write_text(json.dumps(found))


def of_other_data(folder):
    """Point the database to different data than the run's: as many documents, other tokens."""
    other = [[*document.tolist(), EOD] for document in random_documents(60, seed=2)]
    told(corpora_file(folder), prefix=write_dataset(folder / "other", other))


def with_tokens(folder, change):
    """Point the database to documents of the same lengths whose tokens `change` replaces."""
    documents = [[*document.tolist(), EOD] for document in random_documents(60)]
    changed = [[change(token) for token in document] for document in documents]
    told(corpora_file(folder), prefix=write_dataset(folder / "other", changed))


# How a folder is damaged, and the error: a file or flag, and the remedy.
DAMAGES = {
    "no block of neighbors": (
        lambda folder: neighbors(folder).unlink(),
        rf"query/train_.*\.hdf5 does not exist.*{AGAIN}",
    ),
    "truncated neighbors": (lambda f: cut(neighbors(f)), rf"query/train_.*\.hdf5: .*{AGAIN}"),
    "too few rows of neighbors": (
        lambda folder: replaced(neighbors(folder), "neighbors", lambda found: found[:-1]),
        rf"query/.*\.hdf5: 'neighbors' has 99x4 .* expected 100xany.*{AGAIN}",
    ),
    "too few neighbors": (
        lambda folder: replaced(neighbors(folder), "neighbors", lambda found: found[:, :1]),
        r"query/.*\.hdf5 has 1 neighbors per chunk, but --retro-num-neighbors 2",
    ),
    "neighbors of another type": (
        lambda folder: replaced(neighbors(folder), "neighbors", lambda found: found.astype("i4")),
        rf"query/.*\.hdf5: 'neighbors' has .* of int32.*{AGAIN}",
    ),
    "a neighbor that does not exist": (
        lambda folder: put(neighbors(folder), "neighbors", (-1, 0), 10**6),
        r"query/.*\.hdf5: .*1000000.*train\.hdf5 has \d+ chunks.*delete the folder query/",
    ),
    "a negative neighbor": (
        lambda folder: put(neighbors(folder), "neighbors", (50, 1), -2),
        r"query/.*\.hdf5: the neighbors are chunks -2 .*delete the folder query/",
    ),
    "no neighbors": (
        lambda folder: shutil.rmtree(folder / "query"),
        "has no neighbors for the 25 samples of the train split.*: preprocess with",
    ),
    "no database": (
        lambda folder: shutil.rmtree(folder / "db"),
        r"indexed_dataset_infos\.json does not exist.*--retro-tasks db-build",
    ),
    "no merged chunks": (
        lambda folder: chunks(folder).unlink(),
        r"train\.hdf5 does not exist.*--retro-tasks db-build",
    ),
    "truncated chunks": (lambda f: cut(chunks(f)), rf"merged/train\.hdf5: .*{AGAIN}"),
    "chunks of another width": (
        lambda folder: replaced(chunks(folder), "chunks", lambda found: found[:, :-1]),
        rf"train\.hdf5: 'chunks' has \d+x4 .*expected \d+x5.*{AGAIN}",
    ),
    "too few chunks": (
        lambda folder: replaced(chunks(folder), "chunks", lambda found: found[:-1]),
        rf"train\.hdf5: 'chunks' has \d+x5 .*{AGAIN}",
    ),
    "chunks of another type": (
        lambda folder: replaced(chunks(folder), "chunks", lambda found: found.astype("i8")),
        rf"train\.hdf5: 'chunks' has .* of int64.*{AGAIN}",
    ),
    "chunks that are not written": (
        lambda folder: put(chunks(folder), "n_written", 0, 3),
        r"train\.hdf5: only 3 of \d+ chunks were written: run db-build again",
    ),
    "a chunk of no dataset": (
        lambda folder: put(chunks(folder), "chunks", (-1, 0), 7),
        r"train\.hdf5: chunk \d+ is not part of a document.*delete it and run db-build",
    ),
    "a chunk of no document": (
        lambda folder: put(chunks(folder), "chunks", (-1, 1), 60),
        r"train\.hdf5: chunk \d+ is not part of a document.*delete it and run db-build",
    ),
    "a chunk after the end of its document": (
        lambda folder: put(chunks(folder), "chunks", (-1, slice(2, 4)), [50, 54]),
        r"train\.hdf5: chunk \d+ is not part of a document.*delete it and run db-build",
    ),
    "a chunk that is too long": (
        lambda folder: put(chunks(folder), "chunks", (0, 3), CHUNK + 1),
        r"train\.hdf5: chunk 0 is not part of a document.*delete it and run db-build",
    ),
    "an empty chunk": (
        lambda folder: put(chunks(folder), "chunks", (7, slice(2, 4)), [1, 1]),
        r"train\.hdf5: chunk 7 is not part of a document.*delete it and run db-build",
    ),
    "a damaged list of datasets": (
        lambda folder: corpora_file(folder).write_text("["),
        r"indexed_dataset_infos\.json: cannot be read",
    ),
    "a dataset that is gone": (
        lambda folder: told(corpora_file(folder), prefix=str(folder / "gone")),
        r"indexed_dataset_infos\.json names .*gone\.idx does not exist.*restore the dataset",
    ),
    "a dataset of another size": (
        lambda folder: told(corpora_file(folder), n_docs=59),
        r"infos\.json: .* made from 59 documents .* which now has 60: restore the dataset",
    ),
    "other data": (
        of_other_data,
        r"train\.hdf5: chunk \d+ is not part of a document.*other data",
    ),
    "another tokenizer": (
        lambda folder: with_tokens(folder, lambda token: token + 1000),
        r"other\.bin: document \d+ holds the token id 1\d\d\d.*use the tokenizer",
    ),
    "no arguments": (
        lambda folder: (folder / "args.json").unlink(),
        r"args\.json does not exist: make the folder",
    ),
    "another seed": (
        lambda folder: told(folder / "args.json", retro_gpt_seed=5),
        "no neighbors for the 25 samples of the train split.*: preprocess with",
    ),
    "another split": (
        lambda folder: told(folder / "args.json", retro_gpt_split="50,50,0"),
        "--split 100,0,0: --retro-workdir .* created with --split 50,50,0: drop the flag",
    ),
    "another length of samples": (
        lambda folder: told(folder / "args.json", retro_gpt_seq_length=8),
        "--seq-length 16: --retro-workdir .* created with --seq-length 8: drop the flag",
    ),
    "a chunk length that does not fit": (
        lambda folder: told(folder / "args.json", retro_gpt_chunk_length=8),
        rf"query/train_.* does not exist.*{AGAIN}",
    ),
    "a damaged length of blocks": (
        lambda folder: told(folder / "args.json", retro_block_size=0),
        r"args\.json: retro_block_size: must be at least 1.*restore it",
    ),
}


def test_the_whole_folder_is_accepted(folder):
    build_toy(Layout.single(), words(str(folder)), "retro")


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_before_training(folder, name):
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(UserError, match=f"(?s){message}"):
        build_toy(Layout.single(), words(str(folder)), "retro")


def test_the_database_s_data_must_be_that_of_the_run(folder, whole):
    digest = corpus_fingerprint(
        DataConfig(data_path=(str(whole.parent / "corpus"),), seq_length=16)
    )
    told(folder / "args.json", retro_made_from={"data": digest})
    build_toy(Layout.single(), words(str(folder)), "retro")
    with_tokens(folder, lambda token: token // 2)
    with pytest.raises(DataError, match=r"data .*/other of .*infos\.json has changed since"):
        build_toy(Layout.single(), words(str(folder)), "retro")


def test_a_folder_of_another_type_of_tokenizer_warns(folder, capsys):
    told(folder / "args.json", retro_gpt_tokenizer_type="GPT2BPETokenizer")
    build_toy(Layout.single(), words(str(folder)), "retro")
    shown = capsys.readouterr()
    assert "this run has --tokenizer-type NullTokenizer" in shown.out + shown.err


def test_evenly_spaced_rows_of_a_large_table_are_checked(folder, monkeypatch):
    monkeypatch.setattr(blocks, "_RUN", 10)
    monkeypatch.setattr(database, "_CHECKED", 100)  # of 337 chunks: every fourth run of 10
    for chunk, is_seen in ((0, True), (9, True), (10, False), (39, False), (40, True), (325, True)):
        put(chunks(folder), "chunks", (chunk, 0), 7)
        found = ChunkDatabase(folder, CHUNK, EOD)
        if is_seen:
            with pytest.raises(DataError, match=f"chunk {chunk} is not part"):
                found.check()
        put(chunks(folder), "chunks", (chunk, 0), 0)


@pytest.mark.parametrize("most", [1, 99, 100, 101, 1 << 30])
def test_the_runs_of_a_table(most, monkeypatch):
    monkeypatch.setattr(blocks, "_RUN", 10)
    runs = [range(100)[run] for run in blocks.evenly_spaced(100, most)]
    assert runs[0].start == 0
    assert max(map(len, runs)) <= 10
    rows = [row for run in runs for row in run]
    assert len(set(rows)) == len(rows)
    assert len(rows) == 100 if most >= 100 else len(rows) <= max(most, 10)
