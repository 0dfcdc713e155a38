"""Megatron-DeepSpeed jobs start unchanged: as dry runs at full size, and for real at toy size."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import run_ranks
from tests.repository import ROOT, command_environment

JOBS = sorted(Path(__file__).parent.glob("*.sh"))
# Replaces the launcher and records its arguments.
_LAUNCHER = """#!/bin/sh
printf '%s\\0' "$@" > words
"""
# Given last, so that they take precedence.
_SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-samples 12 "
    "--tensor-model-parallel-size 1 --save-interval 2 --eval-interval 2 --eval-iters 1 "
    "--log-interval 1 --distributed-backend gloo"
).split()
_SMALL_TOKENS = "--train-tokens 10000 --lr-warmup-tokens 64 --lr-decay-tokens 10000".split()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write a corpus and a vocabulary, and return the jobs' variables that name them."""
    from tokenizers import ByteLevelBPETokenizer

    from megatron.data.indexed import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("corpus")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["some words"], vocab_size=300, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(folder))
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(folder / "corpus_text_document", np.uint16) as builder:
        for _ in range(200):
            builder.add_documents(generator.integers(3, 200, size=50), [50], [1])
    names = {"DATA_PATH": "corpus_text_document", "VOCAB_FILE": "vocab.json"}
    names |= {"MERGE_FILE": "merges.txt"}
    return {variable: str(folder / name) for variable, name in names.items()}


def start(job: Path, folder: Path, files: dict[str, str]) -> list[str]:
    """Run a job's script in a folder and return the launcher's arguments after our script."""
    (folder / "bin").mkdir()
    launcher = folder / "bin" / "deepspeed"
    launcher.write_text(_LAUNCHER)
    launcher.chmod(0o755)
    path = f"{launcher.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **files, "PATH": path}
    subprocess.run(["bash", str(job)], cwd=folder, env=environment, check=True, timeout=240)
    words = (folder / "words").read_text().split("\0")[:-1]
    return words[words.index("pretrain_gpt.py") + 1 :]


def processes_of(job: Path) -> int:
    (count,) = re.findall(r"^# processes: (\d+)$", job.read_text(), re.MULTILINE)
    return int(count)


def small(config: dict[str, Any]) -> dict[str, Any]:
    """Return the job's DeepSpeed configuration with batch sizes for two processes."""
    config |= {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
    if "gradient_accumulation_steps" in config:
        config["gradient_accumulation_steps"] = 2
    config.get("curriculum_learning", {}).update(min_difficulty=8, max_difficulty=32)
    return config


def run(words: list[str], count: int) -> str:
    done = run_ranks([str(ROOT / "pretrain_gpt.py"), *words], command_environment(), count)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_there_are_jobs_of_three_sizes() -> None:
    assert {job.name.split("_")[1] for job in JOBS} == {"125M", "1.3B", "13B"}
    assert all(os.access(job, os.X_OK) for job in JOBS)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_job_starts_as_it_is(
    job: Path, tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = start(job, tmp_path, files)
    monkeypatch.chdir(tmp_path)
    count = processes_of(job)
    text = run([*words, "--dry-run", "--dry-run-world-size", str(count)], 1)
    assert "Dry run: the configuration is valid" in text
    assert f"{count} processes: " in text
    (line,) = [line for line in text.splitlines() if ".json: read as --" in line]
    assert "--initial-loss-scale " in line
    for flag in ("--deepspeed", *{"--no-pipeline-parallel", "--profile-backward"} & {*words}):
        assert len(re.findall(f"^note: {flag} is a flag of Megatron-DeepSpeed", text, re.M)) == 1


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_job_runs_at_toy_size(
    job: Path, tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = start(job, tmp_path, files)
    (config,) = tmp_path.glob("ds_*.json")
    (tmp_path / "small.json").write_text(json.dumps(small(json.loads(config.read_text()))))
    monkeypatch.chdir(tmp_path)
    more = _SMALL_TOKENS if "--train-tokens" in words else []
    if "--rampup-batch-size" in words:
        more = "--rampup-batch-size 2 2 6 --lr-decay-samples 12 --lr-warmup-samples 2".split()
        more += "--pipeline-model-parallel-size 2".split()
    (flag,) = {*words} & {"--deepspeed_config", "--deepspeed-config"}
    text = run([*words, *_SMALL, *more, flag, "small.json"], 2)
    assert len(re.findall(r" iteration +\d+/", text)) >= 3
    assert "successfully saved checkpoint" in text
    (tensorboard,) = (tmp_path / "tensorboard").iterdir()
    assert list(tensorboard.glob("events.*"))
    if "flops_profiler" in config.read_text():
        assert list((tensorboard / "profile").iterdir())
    if "curriculum_learning" in config.read_text():
        assert "curriculum" in text
