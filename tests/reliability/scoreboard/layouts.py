"""Row 6: checkpoints of every layout, loaded into every layout."""

from __future__ import annotations

from pathlib import Path

from tests.parity.resharding import FEW, GRIDS, LOSS_TOLERANCE, all_pairs, relative_difference
from tests.reliability.scoreboard.score import Trials, expect


def all_layouts(folder: Path, count: int) -> Trials:
    """Try row 6: all pairs of `count` layouts; a small `count` takes those that differ most."""
    grids = GRIDS if count >= len(GRIDS) else FEW[:count]
    expected, results = all_pairs(grids, folder)
    trials = Trials()
    for (source, target), actual in results.items():
        with trials.trial(f"{source.name} into {target.name}"):
            expect(actual.differing == 0, f"{actual.differing} bytes differ")
            difference = relative_difference(actual.loss, expected)
            expect(difference <= LOSS_TOLERANCE, f"the next loss differs by {difference:.1e}")
    worst = max(relative_difference(actual.loss, expected) for actual in results.values())
    trials.note(f"layouts (largest difference of the next loss {worst:.1e})", len(grids))
    return trials
