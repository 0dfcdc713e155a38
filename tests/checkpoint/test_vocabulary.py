"""Vocabulary tables of another size: entries are kept, padding takes at most an even share."""

import math
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.entries import Box, Entry
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.reader import PaddedReader, is_vocabulary_table
from megatron.errors import CheckpointError
from tests.checkpoint.states import read_whole, save_state

ENTRIES, HIDDEN = 50, 8
NAME = "embedding.word.weight"
KINDS = (f"model.{NAME}", f"optimizer.{NAME}.exp_avg", f"optimizer.{NAME}.master")


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, torch.Tensor]:
    tables = {kind: torch.randn(ENTRIES, HIDDEN) - 3 for kind in KINDS}
    save_state(tmp_path, 1, {kind: Entry.whole(table) for kind, table in tables.items()})
    return tables


def padded(tmp_path: Path, rows: int, entries: int = ENTRIES) -> PaddedReader:
    reader = open_checkpoint(tmp_path)
    assert reader is not None
    return PaddedReader(reader, rows=rows, entries=entries)


@pytest.mark.parametrize("at_once", [4096, 25, 7])
def test_rows_that_are_missing_are_the_mean_of_the_entries(
    tmp_path: Path, tables, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.checkpoint.reader._ROWS", at_once)
    reader = padded(tmp_path, 64)
    assert reader.chunks(KINDS[0]) == [Box.whole((64, HIDDEN))]
    for kind, table in tables.items():
        found = read_whole(reader, kind)
        mean = table.mean(0) if "exp_avg" not in kind else torch.zeros(HIDDEN)
        assert torch.equal(found[:ENTRIES], table)
        torch.testing.assert_close(found[ENTRIES:], mean.expand(14, HIDDEN))


def test_any_part_reads_as_in_the_whole(tmp_path: Path, tables) -> None:
    reader = padded(tmp_path, 64)
    whole = read_whole(reader, KINDS[0])
    beyond = slice(56, 64), slice(1, 7)
    for rows, columns in ((slice(0, 16), slice(0, 8)), (slice(48, 64), slice(2, 5)), beyond):
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        wanted = Box((rows.start, columns.start), shape)
        part = reader.read(KINDS[0], wanted, global_shape=(64, HIDDEN))
        assert torch.equal(part, whole[rows, columns])


def test_a_bias_is_padded_like_its_weight(tmp_path: Path) -> None:
    bias = torch.arange(4.0).half()
    state = {"model.output.bias": Entry.whole(bias), "model.norm.bias": Entry.whole(bias)}
    save_state(tmp_path, 1, state)
    reader = padded(tmp_path, 6, 3)
    found = read_whole(reader, "model.output.bias")
    assert found.dtype == torch.float16
    assert found.tolist() == [0, 1, 2, 3, 1, 1]  # the mean of the three entries
    assert read_whole(reader, "model.norm.bias").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "is_table"),
    [
        ("model.embedding.word.weight", True),
        ("average.embedding.word.weight", True),
        ("optimizer.output.weight.exp_avg", True),
        ("model.output.bias", True),
        ("model.output.adapter.weight.b", True),
        ("model.output.adapter.weight.a", False),
        ("model.output.adapter.weight.magnitude", True),
        ("model.embedding.position.weight", False),
        ("model.layers.0.output.weight", False),
        ("embedding.word.weight", False),
    ],
)
def test_which_tensors_are_vocabulary_tables(name: str, is_table: bool) -> None:
    assert is_vocabulary_table(name) == is_table


def test_padding_gets_no_more_than_an_even_share_of_the_probability(tmp_path: Path, tables) -> None:
    """This holds for any hidden state, even if the logits of all entries are far below zero."""
    weight = read_whole(padded(tmp_path, 64), KINDS[0])
    states = torch.randn(1000, HIDDEN).abs() * 5  # logits around -100
    logits = states @ weight.t()
    more = logits.logsumexp(-1) - logits[:, :ENTRIES].logsumexp(-1)
    assert logits[:, :ENTRIES].mean() < -50
    assert more.max() <= math.log(64 / ENTRIES) + 1e-5


def test_rows_beyond_are_left_out_and_entries_never(tmp_path: Path, tables) -> None:
    assert torch.equal(read_whole(padded(tmp_path, 48, 48), KINDS[0]), tables[KINDS[0]][:48])
    with pytest.raises(CheckpointError, match="has 50 rows, but the tokenizer has 51 entries"):
        padded(tmp_path, 64, 51)
