"""Tokens per second with packed documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import benchmark_packing


def test_three_kinds_of_rows_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--seq-length 64 --document-tokens 9 --documents 301 --batches 20 --workers 0".split()
    assert benchmark_packing.main([*words, "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    kinds = re.findall(r"0 loading processes, ([\w ]+), ([\d.]+)% full: ([\d.]+) million", said)
    assert [kind for kind, *_ in kinds] == ["stream of documents", "conversations", "pairs"]
    assert all(90 < float(full) <= 100 and float(rate) > 0 for _, full, rate in kinds)


def test_numbers_that_are_too_small_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark_packing.main(["--documents", "1"]) != 0
    assert "--documents 1: give at least 2" in capsys.readouterr().err
