"""What a working folder was built from: kept, read, and compared before anything is done."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.retro_preprocessing import RetroPreprocessing
from megatron.errors import DataError, UserError
from megatron.retro.workdir import (
    FolderOrigin,
    arguments_file,
    check_folder,
    read_arguments,
    read_digest,
    remove_leftovers,
    write_arguments,
)
from tests.retro.corpus import options

ORIGIN = FolderOrigin("90,8,2", "digest", "GPT2BPETokenizer:1", "BertWordPieceLowerCase:2")


def changed(asked: RetroPreprocessing, **values: Any) -> RetroPreprocessing:
    """Return options with other values, wherever these fields are."""
    parts = {}
    for name in ("stages", "gpt", "embedding", "index"):
        part = getattr(asked, name)
        parts[name] = replace(part, **{k: v for k, v in values.items() if hasattr(part, k)})
    return RetroPreprocessing(**parts)


@pytest.fixture
def asked(tmp_path: Path) -> RetroPreprocessing:
    """Return the options of a folder that has all parts."""
    found = options(tmp_path, "1.0", "data/text")
    write_arguments(tmp_path, found, ORIGIN, {"seed": 1, "params_dtype": "torch.float32"})
    for part in ("db", "index", "query"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "file").touch()
    return found


def test_arguments_are_read_back(tmp_path: Path, asked: RetroPreprocessing) -> None:
    assert read_arguments(tmp_path) == asked
    found = json.loads(arguments_file(tmp_path).read_text())
    assert found["retro_tasks"] == ["build"]
    assert (found["seed"], found["retro_gpt_data_path"]) == (1, ["1.0", "data/text"])
    check_folder(tmp_path, asked, ORIGIN)


def test_the_digests_of_a_folder(tmp_path: Path, asked: RetroPreprocessing) -> None:
    workdir = tmp_path / "new" / "folder"
    assert read_digest(workdir, "data") is None
    write_arguments(workdir, asked, ORIGIN, {"seed": 1})
    path = arguments_file(workdir)
    assert path.read_text().startswith('{\n    "seed": 1,\n    "retro_workdir": ')
    found = {name: read_digest(workdir, name) for name in ORIGIN._fields}
    assert found == ORIGIN._asdict()
    assert read_digest(workdir, "model") is None
    for digests in ({"data": 5}, ["data"], None):
        path.write_text(json.dumps({"retro_made_from": digests}))
        assert read_digest(workdir, "data") is None


def test_the_original_s_arguments_are_read(golden: Path) -> None:
    workdir = golden / "retro_fp32" / "workdir"
    found = read_arguments(workdir)
    assert found.stages.retro_compatible
    assert found.gpt.retro_gpt_data_path == ("1.0", "data/gpt_text_document")
    assert found.index.retro_index_str == "IVF32_HNSW8,Flat"
    assert not found.index.retro_index_delete_added_codes
    check_folder(workdir, found, ORIGIN)
    moved = changed(found, retro_gpt_vocab_file="/elsewhere/gpt2-tiny-vocab.json")
    check_folder(workdir, moved, ORIGIN)
    with pytest.raises(DataError, match="--retro-gpt-vocab-file .* in the folder, other.json here"):
        check_folder(workdir, changed(found, retro_gpt_vocab_file="other.json"), ORIGIN)
    with pytest.raises(DataError, match="--retro-compatible True in the folder, False here"):
        check_folder(workdir, changed(found, retro_compatible=False), ORIGIN)


def test_a_folder_of_megatron_lm_has_names_instead_of_digests(
    tmp_path: Path, asked: RetroPreprocessing
) -> None:
    """It has Megatron-LM's bugs, and its files may have been moved."""
    names = {
        "retro_gpt_vocab_file": "data/vocab.json",
        "retro_gpt_merge_file": "data/merges.txt",
        "retro_bert_vocab_file": "data/bert.txt",
        "retro_compatible": True,
    }
    asked = changed(asked, **names)
    path = arguments_file(tmp_path)
    write_arguments(tmp_path, asked, ORIGIN, {"split": "90,8,2"})
    recorded = json.loads(path.read_text())
    del recorded["retro_made_from"], recorded["retro_compatible"]
    path.write_text(json.dumps(recorded))
    assert read_arguments(tmp_path) == asked
    origin = FolderOrigin("90,8,2", "other", "other:1", "other:2")
    check_folder(tmp_path, changed(asked, retro_gpt_vocab_file="/moved/vocab.json"), origin)
    other = {
        "retro_compatible": False,
        "retro_gpt_merge_file": "data/other.txt",
        "retro_gpt_tokenizer_model": "data/new.model",
        "retro_bert_vocab_file": None,
    }
    with pytest.raises(DataError) as caught:
        check_folder(tmp_path, changed(asked, **other), origin._replace(split="50,50"))
    assert str(caught.value).splitlines()[1:-1] == [
        "  db: --retro-gpt-split 90,8,2 in the folder, 50,50 here",
        "  db: --retro-compatible True in the folder, False here",
        "  db: --retro-gpt-merge-file data/merges.txt in the folder, data/other.txt here",
        "  db: --retro-gpt-tokenizer-model None in the folder, data/new.model here",
        "  db: --retro-bert-vocab-file data/bert.txt in the folder, None here",
    ]
    with pytest.raises(DataError, match=r"db: --split 90,8,2 in the folder, 50,50 here"):
        check_folder(tmp_path, asked, origin._replace(split="50,50"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"retro_gpt_data_path": ("1.0", "data/other")}, "--retro-gpt-data-path 1.0 data/text in"),
        ({"retro_gpt_data_path": ("2", "data/text")}, "db: --retro-gpt-data-path 1.0 data/text in"),
        ({"retro_gpt_seed": 5}, "query: --retro-gpt-seed 1234 in the folder, 5 here"),
        ({"retro_gpt_seq_length": 64}, "query: --retro-gpt-seq-length 32 in the folder, 64 here"),
        ({"retro_gpt_chunk_length": 4}, "db: --retro-gpt-chunk-length 8 in the folder, 4 here"),
        ({"retro_gpt_split": "80,18,2"}, "query: --retro-gpt-split 90,8,2 in the folder"),
        ({"retro_doc_block_size": 9}, "db: --retro-doc-block-size 10 in the folder, 9 here"),
        ({"retro_block_size": 9}, "index: --retro-block-size 16 in the folder, 9 here"),
        ({"retro_index_nfeats": 9}, "index: --retro-index-nfeats 1024 in the folder, 9 here"),
        ({"retro_compatible": True}, "db: --retro-compatible False in the folder, True here"),
    ],
)
def test_a_folder_made_with_other_flags_is_refused(
    tmp_path: Path, asked: RetroPreprocessing, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        check_folder(tmp_path, changed(asked, **values), ORIGIN)
    assert str(tmp_path) in str(caught.value)
    assert "another --retro-workdir" in str(caught.value)


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        (ORIGIN._replace(split="80,18,2"), "db: --retro-gpt-split 90,8,2 in the folder, 80,18,2"),
        (ORIGIN._replace(data="changed"), "the files here have the same names, but different"),
        (ORIGIN._replace(gpt_tokenizer="GPT2:9"), "--retro-gpt-vocab-file: the tokenizer has"),
        (ORIGIN._replace(bert_tokenizer="Bert:9"), "--retro-bert-vocab-file: the tokenizer has"),
    ],
)
def test_a_folder_made_from_other_files_is_refused(
    tmp_path: Path, asked: RetroPreprocessing, origin: FolderOrigin, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_folder(tmp_path, asked, origin)


@pytest.mark.parametrize("split", ["90,8,2,0", "90/8/2", " 90, 8,2"])
def test_a_split_may_be_written_in_another_way(
    tmp_path: Path, asked: RetroPreprocessing, split: str
) -> None:
    check_folder(tmp_path, changed(asked, retro_gpt_split=split), ORIGIN)


def test_all_differences_are_named_at_once(tmp_path: Path, asked: RetroPreprocessing) -> None:
    other = changed(asked, retro_gpt_seed=5, retro_gpt_seq_length=64, retro_block_size=3)
    with pytest.raises(DataError) as caught:
        check_folder(tmp_path, other, ORIGIN)
    lines = str(caught.value).splitlines()
    assert [line.split()[1] for line in lines[1:-1]] == [
        "--retro-block-size",
        "--retro-gpt-seed",
        "--retro-gpt-seq-length",
    ]


def test_flags_of_parts_that_are_not_there_may_change(
    tmp_path: Path, asked: RetroPreprocessing
) -> None:
    other = changed(asked, retro_gpt_seed=5, retro_block_size=3)
    (tmp_path / "query" / "file").unlink()
    with pytest.raises(DataError, match="--retro-block-size"):
        check_folder(tmp_path, other, ORIGIN)
    (tmp_path / "index" / "file").unlink()
    check_folder(tmp_path, other, ORIGIN)
    moved = changed(asked, retro_gpt_data_path=("1", "/elsewhere/text"))
    check_folder(tmp_path, moved, ORIGIN)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_damaged_arguments_are_named(
    tmp_path: Path, asked: RetroPreprocessing, content: bytes
) -> None:
    arguments_file(tmp_path).write_bytes(content)
    for check in (read_arguments, lambda folder: check_folder(folder, asked, ORIGIN)):
        with pytest.raises(UserError, match=r"args\.json"):
            check(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("retro_gpt_seq_length", "long"),
        ("retro_gpt_chunk_length", 0),
        ("retro_gpt_data_path", {"a": 1}),
        ("retro_compatible", 7),
    ],
)
def test_a_damaged_argument_is_named(
    tmp_path: Path, asked: RetroPreprocessing, key: str, value: object
) -> None:
    path = arguments_file(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(DataError, match=rf"args\.json: {key}: "):
        read_arguments(tmp_path)


def test_a_folder_without_arguments_is_refused_if_it_has_parts(
    tmp_path: Path, asked: RetroPreprocessing
) -> None:
    arguments_file(tmp_path).unlink()
    with pytest.raises(DataError, match=r"args\.json does not exist, but .* has db, index, query"):
        check_folder(tmp_path, asked, ORIGIN)
    with pytest.raises(DataError, match="is not a Retro working folder; make one"):
        read_arguments(tmp_path)
    check_folder(tmp_path / "new", asked, ORIGIN)


def test_only_a_killed_run_s_temporary_files_are_removed(tmp_path: Path) -> None:
    for name in ("db/merged/train.hdf5", "query/a/0-5.hdf5", "args.json", "run/iter_0000005"):
        for path in (tmp_path / name, tmp_path / f"{name}.tmp-5"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    remove_leftovers(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == [
        "args.json",
        "db/merged/train.hdf5",
        "query/a/0-5.hdf5",
        "run/iter_0000005",
        "run/iter_0000005.tmp-5",
    ]
