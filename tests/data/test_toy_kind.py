"""A sample kind defined outside the package: one module, which trains, blends and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megatron.config import RunConfig
from megatron.config.data import DataConfig
from megatron.data.datasets import DataRequest, Datasets
from megatron.data.indexed import IndexedDatasetBuilder
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.pretrain import main
from megatron.training.recipe import SampleCounts
from pretrain_gpt import GPTRecipe
from tests.data.toy_mirror import MirrorDataset, build_mirror_datasets
from tests.training.toy import TOY


class MirrorRecipe(GPTRecipe):
    """A GPT on mirrored documents."""

    program = "pretrain_mirror.py"

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Build mirrored documents. Collective."""
        request = DataRequest.of(config, samples, layout)
        return build_mirror_datasets(
            request, seq_length=config.data.seq_length, vocab_size=tokenizer.vocab_size
        )


def write_documents(prefix: Path) -> Path:
    """Write documents of eight tokens each, with a vocabulary of four words."""
    tokens = np.random.RandomState(1).randint(1, 5, (100, 8))
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(tokens.reshape(-1), np.full(100, 8), np.ones(100, int))
    return prefix


def run(folder: Path, *flags: str) -> dict[int, float]:
    """Return the training loss by iteration."""
    metrics = folder / "metrics.jsonl"
    words = [word for word in TOY if word != "--mock-data"]
    assert main(MirrorRecipe(), [*words, *flags, "--metrics-jsonl", str(metrics)]) == 0
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {r["iteration"]: r["lm loss"] for r in records if "lm loss" in r}


def test_splits_and_samples_follow_the_flags(tmp_path: Path) -> None:
    prefix = str(write_documents(tmp_path / "x"))

    def build(*path: str) -> Datasets:
        data = DataConfig(seq_length=15, data_path=path, split="80,20,0")
        request = DataRequest(data, seed=7, samples=(12, 4, 4))
        return build_mirror_datasets(request, seq_length=15, vocab_size=100)

    _, valid, test = build(prefix)
    assert isinstance(valid, MirrorDataset)
    assert (valid.part.split, valid.part.bounds, test) == ("valid", (80, 100), None)
    blended, _, _ = build("1", prefix, "3", prefix)
    assert blended is not None
    for i in range(12):
        text = blended[i]["text"].tolist()
        assert text[:8] == text[:7:-1]
        assert blended[i]["id"] == i


def test_it_trains_and_resumes_to_the_bit(tmp_path: Path) -> None:
    data = ("--data-path", str(write_documents(tmp_path / "x")), "--split", "80,20,0")
    once, twice = tmp_path / "once", tmp_path / "twice"
    for folder in (once, twice):
        folder.mkdir()
    losses = run(once, *data, "--train-iters", "60")
    assert losses[60] < 0.5 * losses[1]
    saved = ("--save", str(twice), "--load", str(twice), "--save-interval", "30")
    run(twice, *data, *saved, "--train-iters", "60", "--exit-interval", "30")
    again = run(twice, *data, *saved, "--train-iters", "60")
    assert again == losses
