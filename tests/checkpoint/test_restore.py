"""Filling a state: everything is checked before anything is changed."""

import pytest
import torch

from megatron.checkpoint.entries import Entry
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.reader import restore
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
    restore(open_checkpoint(tmp_path), {"model.norm.weight": wide}, cast=True)
    assert torch.equal(wide.tensor, make_state(1)["model.norm.weight"].tensor.float())
