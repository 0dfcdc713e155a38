"""Row 16: a rank stops, sleeps, waits for a sample or skips a collective operation."""

from __future__ import annotations

import random
import re
from pathlib import Path

from megatron.errors import HangError
from tests.reliability.processes import TIMEOUT, run_ranks
from tests.reliability.scoreboard.score import Trials, expect

_RANKS = 4
_DEADLINE = TIMEOUT + 10.0
_DATA: tuple[tuple[str, ...], ...] = ((), ("--DDP-impl", "torch"))  # every rank loads samples
_SPLIT: tuple[tuple[str, ...], ...] = (
    ("--tensor-model-parallel-size", "2"),
    ("--pipeline-model-parallel-size", "2"),
    ("--zero-stage", "3"),
)
# What a rank does, and the layouts in which the others then wait for it.
_FAULTS = {
    "stop": _DATA + _SPLIT,
    "sleep": _DATA + _SPLIT,
    "load": _DATA,
    "skip": _SPLIT[:1],
}


def hanging_ranks(folder: Path, count: int) -> Trials:
    """Try row 16: every rank ends in time, and one report names the rank and the operation."""
    trials = Trials.with_seeds(count)
    for seed in range(count):
        rng = random.Random(seed)
        kind = list(_FAULTS)[seed % len(_FAULTS)]
        flags = rng.choice(_FAULTS[kind])
        # Here rank 0 serves the store. Without it, every rank would report for itself (row 37).
        victim = rng.randrange(int(kind == "stop"), _RANKS)
        iteration = rng.choice((1, 2, 3))
        inner = folder / str(seed)
        inner.mkdir()
        with trials.trial(f"seed {seed}, {kind} of rank {victim}, {' '.join(flags)}"):
            _hang(inner, f"{kind}:{victim}:{iteration}", flags)
        trials.note(kind)
    return trials


def _hang(folder: Path, fault: str, flags: tuple[str, ...]) -> None:
    kind, victim, iteration = fault.split(":")
    outcomes = run_ranks(_RANKS, fault, folder, *flags)
    running = [outcome for outcome in outcomes if outcome is not None]
    errors = "".join(outcome.errors for outcome in running)
    expect((outcomes[int(victim)] is None) == (kind == "stop"), f"the fault missed: {errors}")
    expect(len(running) >= _RANKS - 1, f"a rank hangs: {errors}")
    codes = [outcome.code for outcome in running]
    seconds = [outcome.seconds for outcome in running]
    expect(codes == [HangError.exit_code] * len(running), f"codes {codes}: {errors}")
    expect(TIMEOUT < min(seconds) <= max(seconds) < _DEADLINE, f"after {seconds} s")
    expect(errors.count(f"error: hang in iteration {iteration}") == 1, f"not one report: {errors}")
    match = re.search(rf"rank {victim} did not join the \S+", errors)
    expect(match, f"rank and operation are not named: {errors}")
    expect("Traceback" not in errors, errors)
