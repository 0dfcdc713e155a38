"""Chunks embedded and neighbors found per second."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tools import benchmark_retro

SMALL = [
    *("--layers", "1", "--hidden-size", "32", "--heads", "2", "--max-length", "64"),
    *("--chunks", "300", "--tokens", "20", "--batch-size", "4", "16", "--dtype", "fp32", "bf16"),
]


def run(*words: str) -> None:
    benchmark_retro.run(benchmark_retro.build_parser().parse_args([*SMALL, *words]))


def figures(pattern: str, text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(pattern, text)]


def test_embedding_and_search(capsys: Any):
    index = ["--vectors", "600", "--index-str", "IVF8_HNSW4,Flat", "--queries", "50"]
    run(*index, "--nprobe", "2", "8", "--threads", "1")
    text = capsys.readouterr().out
    rates = figures(r"([\d,]+) chunks/s, ", text)
    assert len(rates) == 4
    assert min(rates) > 0
    queries = figures(r"([\d,]+) queries/s on the CPU", text)
    assert len(queries) == 2
    assert min(queries) > 0


def test_operations(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    """The layers' forward pass takes 24 h^2 + 4 s h operations for each of s tokens."""
    ticks = iter(range(1000))
    monkeypatch.setattr(benchmark_retro.time, "perf_counter", lambda: next(ticks) * 1e-6)
    run("--vectors", "0", "--hidden-size", "512", "--chunks", "1", "--tokens", "60")
    text = capsys.readouterr().out
    h, s = 512, int(figures(r"([\d.]+) tokens per chunk", text)[0]) + 2
    expected = s * (24 * h * h + 4 * s * h) / 1e6  # TFLOP/s, within a microsecond
    found = figures(r"([\d.]+) TFLOP/s", text)
    assert found == pytest.approx([expected] * 4, abs=0.1)


def test_without_faiss(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "faiss", None)
    run("--chunks", "10")
    assert "not measured, because faiss is missing" in capsys.readouterr().out
