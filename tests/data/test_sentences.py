"""Sentence maps on disk: they have Megatron's names, and no map replaces a different one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron.config.data import DataConfig, TokenizerConfig
from megatron.data import sentences
from megatron.data.bert import build_bert_datasets
from megatron.data.indexed import idx_path
from megatron.data.sentences import MappedSentences
from megatron.parallel.layout import Layout
from megatron.tokenizer.build import build_tokenizer
from tests.data.corpus import request_for, write_sentences, write_vocabulary
from tests.distributed import run_distributed


def rows_of(config: DataConfig, vocabulary: Path, **changes: object) -> list[list[int]]:
    """Return the training rows for the flags."""
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(vocabulary))
    )
    arguments: dict = {
        "seed": 7,
        "seq_length": 64,
        "samples": (100, 0, 0),
        "binary_head": True,
        **changes,
    }
    dataset = build_bert_datasets(
        request_for(config, arguments), tokenizer=tokenizer, **arguments
    ).train
    source: MappedSentences = dataset.source  # type: ignore[union-attr]
    return np.asarray(source.rows).tolist()


@pytest.fixture(name="corpus")
def _corpus(tmp_path: Path) -> tuple[DataConfig, Path]:
    prefix = write_sentences(tmp_path / "x")
    return (
        DataConfig(seq_length=16, data_path=(str(prefix),), split="1"),
        write_vocabulary(tmp_path / "vocab.txt"),
    )


def maps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.npy"))


NAME = "x_train_indexmap_100mns_61msl_0.10ssp_7s.npy"


def test_a_map_is_kept_beside_the_data_and_found_again(
    corpus: tuple[DataConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(*corpus)
    assert maps(tmp_path) == [NAME]
    assert np.load(tmp_path / NAME).tolist() == rows  # as Megatron opens it
    monkeypatch.setattr(sentences, "build_sentence_map", None)  # would fail
    assert rows_of(*corpus) == rows


def test_other_settings_of_one_name_get_their_own_maps(
    corpus: tuple[DataConfig, Path], tmp_path: Path
) -> None:
    """Megatron would use the first map for all three."""
    config, vocabulary = corpus
    first = rows_of(config, vocabulary)
    no_head = rows_of(config, vocabulary, binary_head=False)
    part = rows_of(dataclasses.replace(config, split="80,20"), vocabulary)
    assert first != no_head != part != first
    assert len(maps(tmp_path)) == 3
    assert maps(tmp_path)[0] == NAME
    assert rows_of(config, vocabulary) == first
    assert rows_of(config, vocabulary, binary_head=False) == no_head


def test_a_map_of_megatrons_is_compared_and_kept(
    corpus: tuple[DataConfig, Path], tmp_path: Path
) -> None:
    """It has no digest: a map that equals ours gets one, and any other is left alone."""
    rows = rows_of(*corpus)
    digest = (tmp_path / NAME).with_suffix(".sha256")
    expected = digest.read_text()
    digest.unlink()
    assert rows_of(*corpus) == rows
    assert maps(tmp_path) == [NAME]
    assert digest.read_text() == expected
    digest.unlink()
    theirs = np.array(rows[::-1], np.uint32)
    np.save(tmp_path / NAME, theirs)
    for _ in range(2):
        assert rows_of(*corpus) == rows
        assert np.load(tmp_path / NAME).tolist() == rows[::-1]
        assert len(maps(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["zeros", "cut", "split", "older", "empty", "swapped"])
def test_a_map_that_cannot_be_the_one_is_built_again(
    corpus: tuple[DataConfig, Path], tmp_path: Path, damage: str
) -> None:
    rows = rows_of(*corpus)
    path = tmp_path / NAME
    content = bytearray(path.read_bytes())
    match damage:
        case "zeros":
            content[600:900] = bytes(300)
        case "cut":
            del content[600:]
        case "empty":
            content.clear()
    path.write_bytes(content)
    if damage == "swapped":  # all sums and bounds are unchanged
        np.save(path, np.array([rows[1], rows[0], *rows[2:]], np.uint32))
    if damage == "split":  # Megatron's, for other documents
        np.save(path, np.array([row for row in rows if row[0] > 20] * 2, np.uint32))
    if damage == "older":
        np.save(path, np.array(rows[::-1], np.uint32))
        before = idx_path(str(tmp_path / "x")).stat().st_mtime - 10
        os.utime(path, (before, before))
    assert rows_of(*corpus) == rows


def test_a_folder_for_caches(corpus: tuple[DataConfig, Path], tmp_path: Path) -> None:
    config, vocabulary = corpus
    rows = rows_of(dataclasses.replace(config, data_cache_path=str(tmp_path / "c")), vocabulary)
    assert maps(tmp_path) == []
    assert maps(tmp_path / "c") == [NAME]
    assert rows_of(config, vocabulary) == rows


def test_a_folder_that_cannot_be_written_to(
    corpus: tuple[DataConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    config = dataclasses.replace(corpus[0], data_cache_path=str(tmp_path / "file"))
    rows = rows_of(config, corpus[1])
    assert "--data-cache-path" in capsys.readouterr().err
    assert rows == rows_of(*corpus)


def _build_in_a_job(layout: Layout, config: DataConfig, vocabulary: Path) -> int:
    """Return the number of maps that this rank built."""
    built = 0
    plain = sentences.build_sentence_map

    def counted(*args: object) -> object:
        nonlocal built
        built += 1
        return plain(*args)  # type: ignore[arg-type]

    sentences.build_sentence_map = counted  # type: ignore[assignment]
    barrier: Callable[[], None] = dist.barrier
    rows_of(config, vocabulary, is_builder=dist.get_rank() == 0, barrier=barrier)
    return built


def test_one_rank_builds(corpus: tuple[DataConfig, Path]) -> None:
    assert run_distributed(2, _build_in_a_job, *corpus) == [1, 0]
