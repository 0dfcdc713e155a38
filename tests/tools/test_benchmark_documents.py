"""Separate packed documents compared with whole sequences: what is launched, and a toy run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.config import parse_config
from megatron.data.indexed import IndexedDataset
from tools import benchmark_documents
from tools.bench.workloads import WORKLOADS, corpus_prefix

_TOY = "--workload demo --precision fp32 --seq-length 128 --document-tokens 16"


def test_both_ways_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*_TOY.split(), *"--iterations 1 --warmup 1 --repeat 1 --output".split()]
    words += [str(tmp_path), "--", "--num-workers", "0"]
    assert benchmark_documents.main(words) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("demo run 1, whole sequences: ")
    assert second.startswith("demo run 1, documents apart: ")
    assert "documents apart train at " in last


@pytest.mark.parametrize(("name", "micro", "step"), [("S", 2, 2), ("L", 1, 4), ("demo", 1, 1)])
def test_a_step_has_the_workload_s_tokens(name: str, micro: int, step: int) -> None:
    options = benchmark_documents.build_parser().parse_args(["--workload", name])
    flags = benchmark_documents._flags(options, Path("x"))
    config = parse_config([*flags, "--train-iters", "1"], world_size=1).config
    assert config.data.seq_length == config.model.max_position_embeddings == 8192
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (micro, step)


def test_the_corpus_has_documents_of_the_mean_length(tmp_path: Path) -> None:
    prefix = corpus_prefix(tmp_path, WORKLOADS["demo"], document_tokens=50)
    data = IndexedDataset(prefix)
    lengths = [len(data.get(i)) for i in range(len(data))]
    assert np.mean(lengths) == pytest.approx(50, rel=0.05)
    assert corpus_prefix(tmp_path, WORKLOADS["demo"]) != prefix


def test_a_number_below_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark_documents.main(["--document-tokens", "0"]) != 0
    assert "--document-tokens 0: give at least 1" in capsys.readouterr().err
