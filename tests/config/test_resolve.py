"""Values derived from others."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from megatron.config.model import ModelConfig
from megatron.config.resolve import data_parallel_size, resolve
from megatron.config.run import (
    ModelRun,
    RunConfig,
    RunOptions,
    flatten,
    narrow,
    sections,
    with_values,
)
from megatron.errors import ConfigError
from tests.config.command import parse


@pytest.mark.parametrize(
    ("words", "path", "expected"),
    [
        ("", "model.ffn_hidden_size", 256),
        ("--swiglu", "model.ffn_hidden_size", 128),
        ("--geglu", "model.ffn_hidden_size", 128),
        ("--quick-geglu", "model.ffn_hidden_size", 256),
        ("--swiglu --ffn-hidden-size 200", "model.ffn_hidden_size", 200),
        ("", "model.kv_channels", 16),
        ("--kv-channels 8", "model.kv_channels", 8),
        ("", "model.max_position_embeddings", 128),
        ("--max-position-embeddings 512", "model.max_position_embeddings", 512),
        ("", "training.global_batch_size", 16),
        ("--global-batch-size 48", "training.global_batch_size", 48),
        ("", "training.recompute_granularity", None),
        ("--recompute-activations", "training.recompute_granularity", "selective"),
        ("", "optimizer.start_weight_decay", 0.01),
        ("--weight-decay 0.1", "optimizer.end_weight_decay", 0.1),
        ("", "data.dataloader_type", "single"),
        ("--dataloader-type cyclic", "data.dataloader_type", "cyclic"),
        ("", "precision.accumulate_allreduce_grads_in_fp32", False),
        ("--bf16", "precision.accumulate_allreduce_grads_in_fp32", True),
        ("--fp16", "precision.accumulate_allreduce_grads_in_fp32", False),
        ("--exit-signal-handler", "training.exit_signal_handler", True),
    ],
)
def test_derived_values(words: str, path: str, expected: Any) -> None:
    assert flatten(parse(words, world_size=4).config)[path] == expected


# Hidden size to MLP width as in Llama-2 style training: 8/3 h, in multiples of 64.
@pytest.mark.parametrize(("hidden", "ffn"), [(4096, 10880), (5120, 13632), (8192, 21824)])
def test_the_width_of_swiglu(hidden: int, ffn: int) -> None:
    config = with_values(RunOptions(), {"model.swiglu": True, "model.hidden_size": hidden})
    assert resolve(config, 1).model.ffn_hidden_size == ffn == int(4 * hidden * 2 / 3 / 64) * 64


@pytest.mark.parametrize(
    "words", ["", "--swiglu --bf16", "--recompute-activations", "--skip-train"]
)
def test_resolving_twice_changes_nothing(words: str) -> None:
    config = parse(words, world_size=2).config
    assert resolve(config, 2) == config


def test_what_cannot_be_derived_stays_unset() -> None:
    config = resolve(RunOptions(), 4)
    assert config.model.kv_channels is None
    assert config.training.global_batch_size is None
    broken = {"model.hidden_size": 64, "model.num_attention_heads": 0}
    assert resolve(with_values(RunOptions(), broken), 4).model.kv_channels is None


def test_evaluating_only_needs_no_length() -> None:
    config = parse("--skip-train --load folder", without=["--train-iters", "--lr"]).config
    assert config.training.train_iters == 0


@pytest.mark.parametrize(
    ("tensor", "pipeline", "world", "expected"),
    [(1, 1, 4, 4), (2, 2, 8, 2), (2, 1, 1, 1), (0, 1, 4, 1)],
)
def test_data_parallel_size(tensor: int, pipeline: int, world: int, expected: int) -> None:
    sizes = {
        "parallel.tensor_model_parallel_size": tensor,
        "parallel.pipeline_model_parallel_size": pipeline,
    }
    assert data_parallel_size(with_values(RunOptions(), sizes), world) == expected


def test_required_values_are_set_in_a_resolved_run() -> None:
    """A resolved run has the narrowed types; a missing value is refused by its flag."""
    config = parse("").config
    assert type(config) is RunConfig
    assert type(config.model) is ModelConfig
    assert flatten(narrow(resolve(config, 1), RunConfig)) == flatten(config)
    lacking = with_values(RunOptions(), flatten(config) | {"data.seq_length": None})
    with pytest.raises(ConfigError, match="--seq-length is required"):
        narrow(lacking, RunConfig)
    assert type(narrow(lacking, ModelRun)) is ModelRun


@pytest.mark.parametrize("name", sections())
def test_a_section_has_the_same_fields_before_and_after(name: str) -> None:
    """A narrowed field keeps its position and flag, and has no default that could hide mistakes."""
    wide, narrowed = sections()[name], get_type_hints(RunConfig)[name]
    assert [entry.name for entry in fields(wide)] == [entry.name for entry in fields(narrowed)]
    own = narrowed.__annotations__ if narrowed is not wide else {}
    assert all(entry.default is not None for entry in fields(narrowed) if entry.name in own)
