"""The page of layouts is exactly what the command writes: one row per layout."""

from __future__ import annotations

import re

import pytest

from megatron.errors import ConfigError, NumericsError, StorageError
from tests.parity.layouts import LAYOUTS, LOSS_TOLERANCE, NORM_TOLERANCE, Difference
from tests.parity.mixtures import IN_FP32, MixtureCase
from tests.repository import ROOT
from tools import compare_layouts

PAGE = ROOT / "docs" / "layouts.md"


def _tables(text: str) -> list[list[list[str]]]:
    """Return each table's rows of cells, without the two header lines."""
    tables: list[list[list[str]]] = []
    for line in text.splitlines():
        if line.startswith("| layout |"):
            tables.append([])
        elif line.startswith("|") and not line.startswith("| ---"):
            tables[-1].append(re.split(r" (?<!\\)\| ", line[2:-2]))
    return tables


def _check_numbers(rows: list[list[str]]) -> None:
    for *_, loss, norm, machine in rows:
        assert 0 <= float(loss) <= LOSS_TOLERANCE
        assert 0 <= float(norm) <= NORM_TOLERANCE
        assert "torch" in machine


def test_the_page_has_a_row_for_each_layout_and_nothing_else():
    text = PAGE.read_text(encoding="utf-8")
    rows, _ = _tables(text)
    names = [compare_layouts.cells(case, Difference(0, 0), "")[:3] for case in LAYOUTS]
    assert [row[:3] for row in rows] == names, "run tools/compare_layouts.py --out docs/layouts.md"
    _check_numbers(rows)
    before, after = compare_layouts.page([], [], "").split("\n\n## Mixtures of experts\n")
    assert text.startswith(before)
    assert after in text


def test_the_page_has_layouts_of_mixtures_with_all_axes_and_stages():
    """The page only has cases of the tests, though perhaps not the newest."""
    _, rows = _tables(PAGE.read_text(encoding="utf-8"))
    found = {"norm": 0.0, "lm loss": 0.0, "biases": 0.0}
    cases = [compare_layouts.mixture_cells(case, found, "")[:3] for case in IN_FP32]
    assert all(row[:3] in cases for row in rows)
    assert len({tuple(row[:3]) for row in rows}) == len(rows) >= 80
    _check_numbers(rows)
    for axis in ("expert 4", "expert_tensor 1", "tensor 4", "context 4", "pipeline 4"):
        assert any(axis in row[0] for row in rows), axis
    flags = ["--sequence-parallel", "--num-layers-per-virtual-pipeline-stage"]
    flags += [f"--zero-stage {stage}" for stage in (1, 2, 3)]
    for flag in flags:
        assert sum(flag in row[2] for row in rows) >= 5, flag


def test_the_command_compares_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tests.parity.layouts.LAYOUTS", LAYOUTS[:1])
    monkeypatch.setattr("tests.parity.mixtures.IN_FP32", (MixtureCase(2, expert=2),))
    out = tmp_path / "page.md"
    compare_layouts.main(["--out", str(out)])
    (dense,), (mixture,) = _tables(out.read_text(encoding="utf-8"))
    _check_numbers([dense, mixture])
    assert mixture[:3] == ["expert 2 x data 2", "2", ""]
    name, processes, flags, loss, norm, machine = dense
    assert (name, processes, flags) == ("data 2", "2", "")
    assert 0 < float(loss) <= LOSS_TOLERANCE
    assert 0 < float(norm) <= NORM_TOLERANCE
    assert machine == compare_layouts.machine()
    assert f"wrote {out}" in capsys.readouterr().out


@pytest.mark.parametrize("difference", [Difference(2e-5, 0), Difference(0, float("inf"))])
def test_a_layout_that_differs_is_no_page(tmp_path, monkeypatch, capsys, difference):
    monkeypatch.setattr("tests.parity.layouts.compare", lambda case: difference)
    monkeypatch.setattr("tests.parity.mixtures.IN_FP32", ())
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


def test_a_page_that_cannot_be_written_is_reported_at_once(tmp_path, capsys):
    place = tmp_path / "no folder" / "page.md"
    assert compare_layouts.main(["--out", str(place)]) == StorageError.exit_code
    assert capsys.readouterr().err.startswith(f"error: --out {place} cannot be written")


@pytest.mark.parametrize("found", [{"lm loss": 2e-5}, {"norm": 2e-4}, {"biases": 1e-9}])
def test_a_mixture_that_differs_is_no_page(tmp_path, monkeypatch, capsys, found):
    monkeypatch.setattr("tests.parity.layouts.LAYOUTS", ())
    monkeypatch.setattr("tests.parity.mixtures.IN_FP32", (MixtureCase(2, expert=2),))
    differing = {"lm loss": 0.0, "norm": 0.0, "biases": 0.0, **found}
    monkeypatch.setattr("tests.parity.mixtures.differences", lambda case: differing)
    assert compare_layouts.main(["--out", str(tmp_path / "page.md")]) == NumericsError.exit_code
    assert "2 processes, mixture, expert 2 x data 2" in capsys.readouterr().err
