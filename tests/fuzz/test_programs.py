"""The random pickles that test the reader of old checkpoints."""

from __future__ import annotations

import pickle
import random

import pytest

from megatron.checkpoint.legacy.unpickler import read_pickle
from megatron.errors import CheckpointError
from tests.fuzz.programs import Program, plain, random_tree, walk


def test_well_formed_programs_are_read_to_their_end() -> None:
    """Otherwise they would be refused at the first instructions and test little."""
    programs = [program for program in map(Program, range(60)) if not program.is_hostile]
    values, reasons = [], []
    for program in programs:
        try:
            values.append(walk(read_pickle(program.finish(), "x")))
        except CheckpointError as error:
            reasons.append(str(error))
    assert len(values) > 0.8 * len(programs)
    assert all("levels" in reason or "calls" in reason for reason in reasons)
    assert max(values) > 1000


def test_hostile_programs_are_refused_for_many_reasons() -> None:
    reasons = set()
    for program in map(Program, range(200)):
        if program.is_hostile:
            try:
                walk(read_pickle(program.finish(), "x"))
            except CheckpointError as error:
                reasons.add(str(error).split("run: ")[1][:12])
    assert len(reasons) > 20


@pytest.mark.parametrize("number", range(100))
def test_a_random_tree_is_read_as_it_was_pickled(number: int) -> None:
    tree = random_tree(random.Random(number))
    for protocol in (2, 3, 4, 5):
        assert plain(read_pickle(pickle.dumps(tree, protocol), "x")) == plain(tree)
