"""Retro's training step compared with a GPT's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import benchmark_retro_training


def test_both_networks_are_measured(tmp_path: Path, capsys: Any) -> None:
    words = ["--workload", "demo", "--layers", "6", "--precision", "fp32"]
    words += ["--iterations", "1", "--warmup", "1", "--output", str(tmp_path / "numbers.json")]
    assert benchmark_retro_training.main(words) == 0
    assert "of expected" in capsys.readouterr().out
    found = json.loads((tmp_path / "numbers.json").read_text())
    gpt, retro = found["gpt"], found["retro"]
    assert retro["parameters"] > gpt["parameters"]
    assert retro["gigaflops per token"] > gpt["gigaflops per token"]
    for one in (gpt, retro):
        rate = one["tokens/s"] * one["gigaflops per token"] / 1e3
        assert one["TFLOP/s"] == pytest.approx(rate)
