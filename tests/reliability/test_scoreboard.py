"""The scoreboard's rows, each tried a few times; `tools/scoreboard.py` tries them in full."""

from pathlib import Path

import pytest
import torch

from tests.reliability.scoreboard.rows import ROWS
from tests.reliability.scoreboard.score import Row, Trials, expect
from tools.scoreboard import replaced, table, try_row


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.quick], ids=lambda row: f"{row.number} {row.run.__name__}"
)
def test_a_promise_holds(row: Row) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # forked processes start clean
    try:
        trials = try_row(row, row.quick)
    finally:
        torch.set_num_threads(threads)
    assert not trials.failures
    assert trials.passed == trials.tried > 0


def test_a_promise_that_breaks_is_counted() -> None:
    def run(folder: Path, count: int) -> Trials:
        trials = Trials()
        for number in range(count):
            with trials.trial(f"trial {number}"):
                expect(number != 1, "broken")
        trials.note("looks", 3)
        return trials

    row = Row(7, "done and held", run, full=3, quick=3)
    trials = try_row(row, 3)
    assert trials.failures == ["trial 1: AssertionError: broken"]
    text = table([(row, trials)], "Commit x.")
    assert "| 7 | done and held | 2 of 3 | 0.0 s | looks: 3 |" in text
    page = "before\n<!-- scoreboard: written by tools/scoreboard.py -->\nold\n<!-- end -->\nafter\n"
    assert replaced(replaced(page, "x\n"), text).count("| 7 |") == 1
    assert replaced(page, text).startswith("before\n")
    assert replaced(page, text).endswith("<!-- end -->\nafter\n")
    assert "old" not in replaced(page, text)
    with pytest.raises(SystemExit, match="has no lines"):
        replaced("nothing\n", text)
