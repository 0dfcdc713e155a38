"""Filling a state: everything is checked before anything is changed."""

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.entries import Box, Entry
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.reader import Reader, TensorMeta, restore
from megatron.errors import CheckpointError
from tests.checkpoint.states import make_state, save_state


def test_values_are_copied_in_place(tmp_path):
    save_state(tmp_path, 1)
    state = make_state(2)
    restore(open_checkpoint(tmp_path), state, prefixes=("",))
    for name, entry in make_state(1).items():
        assert torch.equal(state[name].tensor, entry.tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.new": Entry.whole(torch.zeros(1))}, "model.new is missing"),
        ({"model.norm.weight": None}, "model.norm.weight does not exist"),
        (
            {"model.norm.weight": Entry.whole(torch.zeros(8))},
            r"is float16 \[8\], not float32 \[8\]",
        ),
        (
            {"model.norm.weight": Entry.whole(torch.zeros(9).half())},
            r"is float16 \[8\], not float16 \[9\]",
        ),
    ],
)
def test_nothing_changes_where_one_thing_does_not_fit(tmp_path, change, message):
    save_state(tmp_path, 1)
    state = {name: entry for name, entry in (make_state(2) | change).items() if entry is not None}
    before = {name: entry.tensor.clone() for name, entry in state.items()}
    with pytest.raises(CheckpointError, match=message):
        restore(open_checkpoint(tmp_path), state, prefixes=("model.",))
    assert all(torch.equal(entry.tensor, before[name]) for name, entry in state.items())


def test_a_cast_must_be_asked_for(tmp_path):
    save_state(tmp_path, 1)
    wide = Entry.whole(torch.zeros(8))
    reader, state = open_checkpoint(tmp_path), {"model.norm.weight": wide}
    with pytest.raises(CheckpointError, match=r"float16 \[8\], not float32 \[8\]$"):
        restore(reader, state, cast_prefixes=("optimizer.", "model.layers."))
    for asked in ({"cast": True}, {"cast_prefixes": ("model.norm",)}):
        wide.tensor.zero_()
        restore(reader, state, **asked)
        assert torch.equal(wide.tensor, make_state(1)["model.norm.weight"].tensor.float())


@pytest.mark.parametrize(
    ("count", "shown", "rest"), [(10, 10, ""), (11, 10, " and 1 more"), (15, 10, " and 5 more")]
)
def test_the_first_problems_are_listed(tmp_path, count, shown, rest):
    save_state(tmp_path, 1)
    state = {f"new.{i:02}": Entry.whole(torch.zeros(1)) for i in range(count)}
    with pytest.raises(CheckpointError) as caught:
        restore(open_checkpoint(tmp_path), state)
    listed = "; ".join(f"new.{i:02} is missing" for i in range(shown))
    assert str(caught.value) == f"{tmp_path / 'iter_0000001'} does not fit this run: {listed}{rest}"


class _InChunks(Reader):
    """A checkpoint of one tensor `[10, 4]` that is read in chunks of three rows."""

    path, tensors = Path("here"), {"a": TensorMeta((10, 4), torch.float32)}
    values = torch.arange(40.0).view(10, 4)

    def chunks(self, name):
        return [Box((start, 0), (min(3, 10 - start), 4)) for start in range(0, 10, 3)]

    def _read(self, name, box):
        return self.values[box.slices_in(Box.whole((10, 4)))]


@pytest.mark.parametrize("rows", [(0, 10), (4, 8), (0, 3), (9, 10), (2, 7)])
def test_chunks_are_copied_where_they_overlap(rows):
    first, stop = rows
    entry = Entry(torch.full((stop - first, 3), -1.0), (10, 4), (first, 1))
    restore(_InChunks(), {"a": entry})
    assert torch.equal(entry.tensor, _InChunks.values[first:stop, 1:])
    chunks = list(_InChunks().read_chunks("a"))
    assert [len(chunk) for chunk in chunks] == [3, 3, 3, 1]
    assert torch.equal(torch.cat(chunks), _InChunks.values)
