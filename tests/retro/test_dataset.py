"""Neighbors of other chunks, which show what a model gains from the right ones."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.errors import DataError
from megatron.retro import dataset as module
from megatron.retro.dataset import NoNeighbors, ShuffledNeighbors


class Numbers:
    """A table whose chunk `i` has the neighbor `i`."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def rows(self, start, stop):
        assert 0 <= start < stop <= self._count  # a table of files has no empty range
        return np.arange(start, stop)[:, None]


@pytest.mark.parametrize("count", [2, 3, 8, 40, 120])
def test_shuffled_neighbors_are_those_of_other_chunks_each_once(count):
    table = ShuffledNeighbors(Numbers(count))
    step = next(n for n in (4, 3, 2) if count % n == 0)
    rows = np.concatenate([table.rows(i, i + step) for i in range(0, count, step)])[:, 0]
    assert sorted(rows) == list(range(count))
    assert len(table) == count
    assert (rows != np.arange(count)).all()


def test_shuffled_neighbors_are_of_another_place_in_a_second_pass_over_the_data():
    first, second = (ShuffledNeighbors(Numbers(200)).rows(i, i + 100)[:, 0] % 100 for i in (0, 100))
    assert (first != np.arange(100)).all()
    assert (second != np.arange(100)).all()


def test_shuffled_neighbors_are_a_golden_ratio_away():
    table = ShuffledNeighbors(Numbers(1000))
    assert table.rows(0, 3).ravel().tolist() == [618, 619, 620]
    assert table.rows(380, 384).ravel().tolist() == [998, 999, 0, 1]
    assert table.rows(380, 382).ravel().tolist() == [998, 999]
    assert table.rows(999, 1000).ravel().tolist() == [617]
    assert ShuffledNeighbors(Numbers(1)).rows(0, 1).ravel().tolist() == [0]  # there is no other


def test_without_neighbors_the_table_keeps_its_shape():
    table = NoNeighbors(Numbers(9))
    assert len(table) == 9
    assert table.rows(2, 5).tolist() == [[-1]] * 3
    assert table.rows(2, 5).dtype == np.int64


@pytest.mark.parametrize(
    ("is_builder", "digest", "recorded_type", "warns"),
    [
        (True, None, "GPT2BPETokenizer", True),
        (False, None, "GPT2BPETokenizer", False),
        (True, "NullTokenizer:1", "GPT2BPETokenizer", False),
        (True, None, "NullTokenizer", False),
        (True, None, None, False),
    ],
)
def test_a_folder_that_records_only_the_type_of_its_tokenizer(
    is_builder, digest, recorded_type, warns, monkeypatch, capsys
):
    monkeypatch.setattr(module, "read_corpora", lambda workdir: [])
    monkeypatch.setattr(module, "corpus_fingerprint", lambda data: None)
    monkeypatch.setattr(module, "read_digest", lambda workdir, name: digest)
    request = SimpleNamespace(data=DataConfig(seq_length=8), is_builder=is_builder)
    tokenizer = SimpleNamespace(fingerprint=lambda: "NullTokenizer:1")
    module._check_origin(Path("w"), request, tokenizer, recorded_type)
    told = "w was made with --retro-gpt-tokenizer-type GPT2BPETokenizer, but this run has "
    assert (told in capsys.readouterr().err) == warns


@pytest.mark.parametrize("changed", ["data", "gpt_tokenizer"])
def test_changed_data_and_tokenizers_are_named(changed, monkeypatch):
    recorded = {"data": "d", "gpt_tokenizer": "NullTokenizer:1"}
    monkeypatch.setattr(module, "read_corpora", lambda workdir: [])
    monkeypatch.setattr(module, "corpus_fingerprint", lambda data: "d")
    request = SimpleNamespace(data=DataConfig(seq_length=8), is_builder=True)
    tokenizer = SimpleNamespace(fingerprint=lambda: "NullTokenizer:1")
    monkeypatch.setattr(module, "read_digest", lambda workdir, name: recorded[name])
    module._check_origin(Path("w"), request, tokenizer, None)
    recorded[changed] = "other"
    label = {"data": "data of --data-path ", "gpt_tokenizer": "tokenizer"}[changed]
    with pytest.raises(DataError, match=f"w: the {label} has changed since the folder was made"):
        module._check_origin(Path("w"), request, tokenizer, None)
