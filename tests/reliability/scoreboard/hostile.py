"""Rows 41 and 42: damaged input for every reader of bytes, and random programs for pickles."""

from __future__ import annotations

import pickle
import random
from functools import partial
from pathlib import Path

from megatron.checkpoint.legacy.unpickler import read_pickle
from tests.checkpoint.legacy.test_malicious import MARK
from tests.fuzz.harness import Outcome, Target, fuzz
from tests.fuzz.programs import Program, plain, random_tree, walk
from tests.fuzz.targets import TARGETS
from tests.reliability.scoreboard.score import Trials, expect

_SEED = 41
_BATCH = 500  # programs held in memory


def every_reader(_: Path, count: int) -> Trials:
    """Try row 41: damaged inputs for each target, in a process that must not hang or grow."""
    trials = Trials(f"seed {_SEED}")
    for target in TARGETS:
        _try(trials, target, count)
    trials.note("targets", len(TARGETS))
    return trials


def hostile_pickles(_: Path, count: int) -> Trials:
    """Try row 42: random programs, mutations of these and real pickles, and pickled trees."""
    trials = Trials(f"seed {_SEED}; programs and trees 0 and up")
    (real,) = [target for target in TARGETS if target.name == "pickle"]
    for first in range(0, count, _BATCH):
        numbers = range(first, min(first + _BATCH, count))
        seeds = partial(_programs, numbers)
        _try(trials, Target(f"programs {numbers}", seeds, _read, real.errors), 1)
    trials.note("programs", count)
    changed = Target("pickle", lambda: [*real.seeds(), *_programs(range(100))], _read, real.errors)
    _try(trials, changed, count // 5)
    trials.note("mutations", count // 5)
    for number in range(count // 5):
        with trials.trial(f"tree {number}"):
            tree = random_tree(random.Random(number))
            data = pickle.dumps(tree, protocol=2 + number % 4)
            expect(plain(read_pickle(data, "x")) == plain(tree), "it is read as something else")
    trials.note("trees", count // 5)
    return trials


def _programs(numbers: range) -> list[bytes]:
    return [Program(number).finish() for number in numbers]


def _try(trials: Trials, target: Target, count: int) -> None:
    """Count every input as a trial."""
    outcome = Outcome()
    with trials.trial(target.name):
        outcome = fuzz(target, count, _SEED)
        expect(not outcome.failure, f"{outcome.failure} for {outcome.example[:200]!r}")
    trials.tried += max(0, outcome.inputs - 1)
    trials.passed += max(0, outcome.inputs - 1)
    trials.worst = 0.0  # not known per input; the harness limits it
    trials.note("refused", outcome.refused)


def _read(data: bytes, folder: Path) -> None:
    try:
        walk(read_pickle(data, "x"))
    finally:
        expect(not (folder / MARK).exists(), "the pickle was executed")
