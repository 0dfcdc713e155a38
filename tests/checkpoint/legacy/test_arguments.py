"""Megatron-LM's command line in a file, read as our settings and written from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.legacy.arguments import (
    legacy_config,
    legacy_run_settings,
    megatron_arguments,
    megatron_meta,
    plain_arguments,
    saved_iteration,
    step_count,
)
from megatron.checkpoint.legacy.unpickler import Namespace, Opaque, TensorRef
from megatron.config.yaml_file import to_dict
from megatron.errors import CheckpointError
from tests.config.command import parse


def test_scalars_enums_and_flat_lists_are_kept() -> None:
    args = Namespace()
    kind = Opaque("AttnMaskType", ("padding", 1))
    args.fields = {
        "none": None,
        "text": "a",
        "number": 1.5,
        "list": [1, "b"],
        "tuple": (True, kind),
        "enum": kind,
        "of another": Opaque("x", (kind,)),
        "nested": [[1]],
        "dict": {},
        "long": [0] * 10_000,
        "longer": [0] * 10_001,
    }
    assert plain_arguments(args) == {
        "none": None,
        "text": "a",
        "number": 1.5,
        "list": [1, "b"],
        "tuple": [True, "AttnMaskType(padding, 1)"],
        "enum": "AttnMaskType(padding, 1)",
        "long": [0] * 10_000,
    }
    assert plain_arguments(None) == {}


@pytest.mark.parametrize(
    ("args", "samples"),
    [
        ({"consumed_train_samples": 7, "global_batch_size": 4}, 7),
        ({"global_batch_size": 4, "batch_size": 5}, 12),
        ({"batch_size": 5}, 15),
        ({"batch_size": 5, "world_size": 8, "model_parallel_size": 2}, 60),
    ],
)
def test_samples_seen_are_saved_or_follow_from_the_iterations(
    args: dict[str, Any], samples: int
) -> None:
    def meta(**more: Any) -> Any:
        values: dict[str, Any] = {"rows": 6, "config": {}, "optimizer": None, "schedule": None}
        return megatron_meta(args | {"skipped_train_samples": 2}, iteration=3, **values | more)

    expected = {"consumed_train_samples": samples, "skipped_train_samples": 2, "schedule": {}}
    assert meta().items() >= {**expected, "iteration": 3, "padded_vocab_size": 6}.items()
    released = meta(is_release=True)
    assert (released["consumed_train_samples"], released["skipped_train_samples"]) == (0, 0)
    schedule = {"max_lr": 0.1, 5: True, "nested": {}}
    assert meta(schedule=schedule)["schedule"] == {"max_lr": 0.1, "5": True}
    for tokens, kept in ((0, True), (-1, False), (True, False), (None, False)):
        args["consumed_train_tokens"] = tokens
        assert ("consumed_train_tokens" in meta()) == kept
    with pytest.raises(CheckpointError, match="does not say how many samples were seen"):
        megatron_meta({}, iteration=3, rows=1, config={}, optimizer=None, schedule=None)


def test_iterations_and_steps_are_numbers() -> None:
    path = Path("x")
    assert (saved_iteration(0, path), saved_iteration(3, path)) == (0, 3)
    for value in (-1, True, 1.0, None):
        with pytest.raises(CheckpointError, match=f"x: iteration {value}"):
            saved_iteration(value, path)
    assert (step_count({2.0}, path, 9), step_count(set(), path, 9)) == (2, 9)
    with pytest.raises(CheckpointError, match=r"x: step counts differ: \[1.0, 2.0\]"):
        step_count({2.0, 1.0}, path, 9)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"hidden_size": 12, "num_attention_heads": 3}, {"kv_channels": 4, "ffn_hidden_size": 48}),
        (
            {"hidden_size": 12, "num_attention_heads": 3, "kv_channels": 5, "ffn_hidden_size": 7},
            {},
        ),
        ({"hidden_size": 12, "num_attention_heads": None}, {"num_attention_heads": None}),
        ({"layernorm_epsilon": 1e-6}, {"norm_epsilon": 1e-6}),
        ({"layernorm_epsilon": 1e-6, "norm_epsilon": 1e-7}, {}),
        ({"add_bias_linear": True, "add_qkv_bias": True}, {"add_qkv_bias": None}),
        ({"add_bias_linear": False, "add_qkv_bias": True}, {}),
        ({"use_rotary_position_embeddings": True}, {"position_embedding_type": "rope"}),
        ({"add_position_embedding": False}, {"position_embedding_type": "none"}),
        ({"add_position_embedding": True}, {}),
        ({"add_position_embedding": None}, {}),
        ({"add_position_embedding": False, "position_embedding_type": "rope"}, {}),
    ],
)
def test_settings_of_the_network_follow_from_those_of_every_version(
    args: dict[str, Any], expected: dict[str, Any]
) -> None:
    model = legacy_config(args, "gpt")["model"]
    given = {key: value for key, value in args.items() if key not in _OTHERS}
    wanted = {"architecture": "gpt", **given, **expected}
    assert model == {key: value for key, value in wanted.items() if value is not None}


_OTHERS = ("layernorm_epsilon", "use_rotary_position_embeddings", "add_position_embedding")


@pytest.mark.parametrize(
    ("args", "rounding"),
    [
        ({}, None),
        ({"ckpt_format": "torch"}, "bounds"),
        ({"dist_ckpt_format": "torch_dist"}, "bounds"),
        ({"ckpt_format": "torch", "blend_schedule": "x"}, None),
        ({"ckpt_format": "torch", "split_rounding": "sizes"}, "sizes"),
        ({"split_rounding": "other"}, None),
    ],
)
def test_the_version_tells_how_splits_were_rounded(
    args: dict[str, Any], rounding: str | None
) -> None:
    assert legacy_config(args, "gpt")["data"].get("split_rounding") == rounding


def test_other_settings_of_a_run_are_taken_over() -> None:
    args = {"adam_beta1": 0.8, "use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8"}
    assert legacy_config(args, "gpt")["optimizer"] == {"adam_beta1": 0.8}
    retro = {"retro_num_neighbors": 2, "retro_gpt_chunk_length": 8}
    found = [legacy_config(retro, kind)["model"] for kind in ("gpt", "retro")]
    assert found == [
        {"architecture": "gpt"},
        {"architecture": "retro", "retro_num_neighbors": 2, "retro_chunk_length": 8},
    ]
    args = {"tokenizer_type": "Unknown", "vocab_file": "v", "fp16": True, "bf16": None, "lr": 1}
    assert legacy_run_settings(args) == {
        "tokenizer": {"vocab_file": "v"},
        "data": {},
        "precision": {"fp16": True},
    }
    args = {"tokenizer_type": "NullTokenizer", "seq_length": 8}
    assert legacy_run_settings(args) == {
        "tokenizer": {"tokenizer_type": "NullTokenizer"},
        "data": {"seq_length": 8},
        "precision": {},
    }


_SPLIT = """
    --num-layers 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 2 --position-embedding-type rope
    --eval-interval 10 --eval-iters 2 --global-batch-size 8
"""


def test_our_settings_are_written_with_the_fields_that_megatron_needs() -> None:
    config = parse(_SPLIT, world_size=8).config
    meta = {
        "iteration": 29,
        "consumed_train_samples": 72,
        "skipped_train_samples": 3,
        "consumed_train_tokens": 5,
        "legacy_args": {"seed": 99, "rank": 7, "hysteresis": 4},
    }
    options = {"rows": 64, "dtype": torch.bfloat16, "data_parallel": 2}
    args = vars(megatron_arguments(config, meta, **options))
    ours = {name: value for part in to_dict(config).values() for name, value in part.items()}
    assert {key: value for key, value in args.items() if key not in ours or ours[key] != value} == {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "transformer_impl": "local",
        "DDP_impl": "local",
        "layernorm_epsilon": 1e-5,
        "add_position_embedding": True,
        "encoder_num_layers": 8,
        "encoder_seq_length": 128,
        "padded_vocab_size": 64,
        "use_rotary_position_embeddings": True,
        "consumed_valid_samples": 2 * 2 * 8,
        "transformer_pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "world_size": 8,
        "rank": 0,
        "consumed_train_samples": 72,
        "skipped_train_samples": 3,
        "consumed_train_tokens": 5,
        "seed": 99,
        "hysteresis": 4,
    }
    assert "model_type" not in args
    assert args["num_layers_per_virtual_pipeline_stage"] == 2
    plain = vars(megatron_arguments(parse().config, {}, **{**options, "dtype": torch.float32}))
    split = ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
    assert [plain[name] for name in (*split, "pipeline_model_parallel_split_rank")] == [None] * 3
    assert (plain["fp16"], plain["bf16"], plain["world_size"]) == (False, False, 2)
    assert (plain["consumed_train_samples"], plain["skipped_train_samples"]) == (0, 0)


def test_references_to_tensors_are_no_settings() -> None:
    args = Namespace()
    args.fields = {"x": object.__new__(TensorRef), "y": 1}
    assert plain_arguments(args) == {"y": 1}
