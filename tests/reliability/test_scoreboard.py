"""The scoreboard's rows, each tried a few times; `tools/scoreboard.py` tries them in full."""

from pathlib import Path

import pytest
import torch

from megatron import device
from megatron.errors import ConfigError
from tests.reliability.scoreboard import corpora, mute
from tests.reliability.scoreboard.rows import ROWS
from tests.reliability.scoreboard.score import Row, Trials, expect
from tools import scoreboard
from tools.scoreboard import result, try_row, with_results


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.quick], ids=lambda row: f"{row.number} {row.run.__name__}"
)
def test_a_promise_holds(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, seconds in ((mute, "_PROMISE"), (corpora, "_SECONDS")):
        monkeypatch.setattr(module, seconds, 60.0)  # other tests keep the machine busy
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
        trials = Trials.with_seeds(count)
        for number in range(count):
            with trials.trial(f"trial {number}"):
                expect(number != 1, "broken")
        trials.note("looks", 3)
        return trials

    row = Row(7, "done and held", run, full=3, quick=3)
    trials = try_row(row, 3)
    assert trials.failures == ["trial 1: AssertionError: broken"]
    line = result(row, trials, "0123abc, today")
    assert line == "| 7 | done and held | 2 of 3 |  | seeds 0 to 2; looks: 3 | 0123abc, today |"


def test_a_row_takes_the_place_of_its_last_result() -> None:
    mark = "<!-- scoreboard: written by tools/scoreboard.py -->"
    page = f"before\n{mark}\n<!-- end -->\nafter\n"
    for number, text in ((7, "first"), (5, "other"), (7, "second")):
        page = with_results(page, {number: f"| {number} | {text} |"}, "2 cores.")
    assert page.startswith(f"before\n{mark}\n\n2 cores.\n\n| # |")
    assert "\n| 5 | other |\n| 7 | second |\n" in page
    assert "first" not in page
    assert page.endswith("<!-- end -->\nafter\n")


def test_a_page_without_a_place_is_refused_before_anything_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoreboard, "try_row", lambda *_: pytest.fail("it was tried"))
    page = tmp_path / "page.md"
    for content, message in (
        (None, "No such file or directory: give a page to write into"),
        ("nothing\n", "the page has no lines <!-- scoreboard"),
        ("<!-- end -->\n<!-- scoreboard: written by tools/scoreboard.py -->\n", "no lines"),
    ):
        if content is not None:
            page.write_text(content)
        assert scoreboard.main(["--out", str(page), "--rows", "33"]) == 9
        error = capsys.readouterr().err
        assert error.startswith(f"error: --out {page}: ")
        assert message in error
    assert scoreboard.main(["--rows", "33", "999"]) == 9
    assert "error: --rows 999: choose from 1, 2, 3" in capsys.readouterr().err


def test_rows_for_gpus_are_refused_without_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    monkeypatch.setattr(scoreboard, "try_row", lambda *_: pytest.fail("it was tried"))
    assert scoreboard.main(["--rows", "13"]) == ConfigError.exit_code
    assert "--rows 13: it needs 1 GPU, and this machine has none" in capsys.readouterr().err
