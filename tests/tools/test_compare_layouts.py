"""The page of layouts is what the command writes: a row a layout, and nothing else."""

from __future__ import annotations

import re

import pytest

from megatron.errors import ConfigError, NumericsError, StorageError
from tests.parity.layouts import LAYOUTS, LOSS_TOLERANCE, NORM_TOLERANCE, Difference
from tests.repository import ROOT
from tools import compare_layouts

PAGE = ROOT / "docs" / "layouts.md"


def _rows(text: str) -> list[list[str]]:
    """Cells of every row of the table, without its two heading lines."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [re.split(r" (?<!\\)\| ", line[2:-2]) for line in lines[2:]]


def test_the_page_has_a_row_for_each_layout_and_nothing_else():
    text = PAGE.read_text(encoding="utf-8")
    rows = _rows(text)
    names = [compare_layouts.cells(case, Difference(0, 0), "")[:3] for case in LAYOUTS]
    assert [row[:3] for row in rows] == names, "run tools/compare_layouts.py --out docs/layouts.md"
    for *_, loss, norm, machine in rows:
        assert 0 <= float(loss) <= LOSS_TOLERANCE
        assert 0 <= float(norm) <= NORM_TOLERANCE
        assert "torch" in machine
    heading = compare_layouts.page([], "")
    assert text.startswith(heading)
    assert text.count("\n") == heading.count("\n") + len(LAYOUTS)


def test_the_command_compares_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tests.parity.layouts.LAYOUTS", LAYOUTS[:1])
    out = tmp_path / "page.md"
    compare_layouts.main(["--out", str(out)])
    ((name, processes, flags, loss, norm, machine),) = _rows(out.read_text(encoding="utf-8"))
    assert (name, processes, flags) == ("data 2", "2", "")
    assert 0 < float(loss) <= LOSS_TOLERANCE
    assert 0 < float(norm) <= NORM_TOLERANCE
    assert machine == compare_layouts.machine()
    assert f"wrote {out}" in capsys.readouterr().out


@pytest.mark.parametrize("difference", [Difference(2e-5, 0), Difference(0, float("inf"))])
def test_a_layout_that_differs_is_no_page(tmp_path, monkeypatch, capsys, difference):
    monkeypatch.setattr("tests.parity.layouts.compare", lambda case: difference)
    out = tmp_path / "page.md"
    out.write_text("as it was")
    assert compare_layouts.main(["--out", str(out)]) == ConfigError.exit_code
    assert f"--out: {out} already exists" in capsys.readouterr().err
    assert compare_layouts.main(["--out", str(out), "--overwrite"]) == NumericsError.exit_code
    assert "8 processes, tensor 4 x pipeline 2 --sequence-parallel: " in capsys.readouterr().err
    assert out.read_text() == "as it was"


def test_a_page_needs_a_place(capsys):
    with pytest.raises(SystemExit):
        compare_layouts.main([])
    assert "--out" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_told_at_once(tmp_path, capsys):
    place = tmp_path / "no folder" / "page.md"
    assert compare_layouts.main(["--out", str(place)]) == StorageError.exit_code
    assert capsys.readouterr().err.startswith(f"error: --out {place} cannot be written")
