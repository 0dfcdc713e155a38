"""Perplexity of a Retro with right, shuffled and no neighbors, on Megatron-LM's recorded run."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError
from megatron.inference.load import load_gpt
from megatron.parallel.layout import Layout
from megatron.retro.dataset import NoNeighbors
from megatron.tasks import language_model
from megatron.tasks.neighbors import validation_samples
from tests.distributed import run_distributed
from tests.tasks.toy import evaluate, save_toy

WORDS = "--load retro_fp32/ckpt --retro-workdir retro_fp32/workdir --retro-eval-samples 32".split()


class Rows:
    """A table whose chunk i has the neighbors 10 i and 10 i + 1."""

    def __len__(self):
        return 5

    def rows(self, start, stop):
        return 10 * np.arange(start, stop)[:, None] + np.arange(2)


def test_no_chunk_has_neighbors():
    assert NoNeighbors(Rows()).rows(1, 3).tolist() == [[-1, -1], [-1, -1]]


@pytest.fixture
def recording(golden, tmp_path, monkeypatch):
    """A folder with the recorded run and its data, to which results and caches may be added."""
    shutil.copytree(golden / "data", tmp_path / "data")
    (tmp_path / "retro_fp32").mkdir()
    for name in ("ckpt", "workdir"):
        shutil.copytree(golden / "retro_fp32" / name, tmp_path / "retro_fp32" / name)
    monkeypatch.chdir(tmp_path)
    return golden / "retro_fp32"


@torch.no_grad()
def test_the_recorded_validation_loss(recording):
    """The original evaluated iteration 20 on the first 32 samples, with padding entries."""
    numbers = evaluate(Layout.single(), "PERPLEXITY", WORDS)
    run = json.loads((recording / "run.json").read_text())
    (recorded,) = (one["lm loss"] for one in run["validation"] if one["iteration"] == 20)
    parsed = language_model.parse("PERPLEXITY", WORDS, 1)
    folder, layout = "retro_fp32/ckpt", Layout.single()
    loaded = load_gpt(folder, Device.cpu(), layout, config=parsed.config, kinds=("retro",))
    dataset = validation_samples(parsed.config, loaded.tokenizer, layout)
    with_padding, without = [], []
    for i in range(32):
        text, neighbors = (torch.from_numpy(dataset[i][name]) for name in ("text", "neighbors"))
        (logits,) = loaded.model(text[None, :-1].long(), neighbors[None])
        with_padding.append(F.cross_entropy(logits, text[1:].long()).item())
        entries = logits[:, : loaded.tokenizer.vocab_size]
        without.append(F.cross_entropy(entries, text[1:].long()).item())
    assert np.mean(with_padding) == pytest.approx(recorded, rel=1e-5)
    assert numbers["loss"] == pytest.approx(np.mean(without), rel=1e-5)
    others = {numbers["loss, shuffled neighbors"], numbers["loss, no neighbors"]}
    assert len(others | {numbers["loss"]}) == 3
    assert numbers["tokens"] == 32 * 256


def test_refusals(recording, tmp_path):
    with pytest.raises(ConfigError, match="--retro-workdir is required"):
        language_model.parse("PERPLEXITY", ["--load", "retro_fp32/ckpt"], 1)
    with pytest.raises(CheckpointError, match="holds a retro, but a gpt is needed"):
        language_model.parse("LAMBADA", ["--load", "retro_fp32/ckpt"], 1)
    with pytest.raises(ConfigError, match="--valid-data: a Retro is evaluated on"):
        language_model.parse("PERPLEXITY", [*WORDS, "--valid-data", "data"], 1)
    toy = save_toy(str(tmp_path / "toy"))
    with pytest.raises(ConfigError, match="--retro-workdir .* is only for RETRO"):
        language_model.parse("PERPLEXITY", ["--load", toy, *WORDS[2:4]], 1)


def test_the_layout_does_not_matter(recording):
    words = [*WORDS, "--micro-batch-size", "3"]
    expected = evaluate(Layout.single(), "PERPLEXITY", words)
    split = [*words, "--pipeline-model-parallel-size", "3"]
    for numbers in run_distributed(3, evaluate, "PERPLEXITY", split, pipeline=3):
        assert numbers == pytest.approx(expected, rel=1e-5)
