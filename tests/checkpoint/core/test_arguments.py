"""Command lines stored in checkpoints for Megatron Core."""

from functools import partial

import pytest
import torch

from megatron.checkpoint.core.arguments import core_arguments, core_config, layer_frequency
from megatron.checkpoint.legacy.arguments import legacy_config
from megatron.config.attention import YARN_FIELDS, layer_windows
from megatron.config.model import ModelConfig
from megatron.config.rules_legacy import (
    unsupported_by_core,
    unsupported_by_legacy,
    unsupported_flags,
)
from megatron.errors import CheckpointError
from tests.config.command import parse

MIXTURE = "--num-experts 8 --moe-expert-capacity-factor 1.5"


@pytest.mark.parametrize(
    ("flags", "over_all"),
    [
        ("", False),
        ("--moe-router-pre-softmax", True),
        ("--moe-router-gating deepspeed --moe-router-topk 1", True),
        ("--moe-router-gating deepspeed --moe-router-topk 2", False),
        ("--moe-router-gating deepspeed --moe-router-topk 3", False),
    ],
)
def test_core_computes_what_a_network_with_deepspeed_s_gating_computes(flags, over_all):
    config = parse(MIXTURE, flags).config
    meta = {"consumed_train_samples": 0, "iteration": 0}
    args = core_arguments(config, meta, rows=1024, dtype=torch.float32, data_parallel=1)
    assert args.moe_router_pre_softmax == over_all
    assert args.moe_token_dropping is False


@pytest.mark.parametrize(
    ("frequency", "layers"), [("", None), ("--window-attn-skip-freq 2", [1, 0, 1, 0])]
)
def test_windows_are_written_as_core_has_them_and_read_again(frequency, layers):
    config = parse(f"--num-layers 4 --window-size 7,0 {frequency}").config
    meta = {"consumed_train_samples": 0, "iteration": 0}
    args = core_arguments(config, meta, rows=1024, dtype=torch.float32, data_parallel=1)
    assert args.window_size == (7, 0)
    assert args.window_attn_skip_freq == layers
    model = ModelConfig(**{**vars(config.model), **core_config(vars(args))["model"]})
    assert layer_windows(model, 4) == layer_windows(config.model, 4)


def test_how_the_run_split_its_documents_is_read():
    """Files of Megatron-LM 23.08 do not have --ckpt-format; our files have all our settings."""
    megatrons = {"num_layers": 2}
    assert core_config(megatrons)["data"] == {}
    for name in ("ckpt_format", "dist_ckpt_format"):
        assert core_config({**megatrons, name: "torch_dist"})["data"] == {
            "split_rounding": "bounds"
        }
    meta = {"consumed_train_samples": 0, "iteration": 0}
    for flags, read in (
        ("", {}),
        ("--split-rounding sizes", {"split_rounding": "sizes"}),
        ("--split-rounding bounds", {"split_rounding": "bounds"}),
    ):
        config = parse(flags).config
        args = core_arguments(config, meta, rows=1024, dtype=torch.float32, data_parallel=1)
        assert core_config(vars(args))["data"] == read


def test_a_network_without_positions_is_written_as_core_can_load_it():
    """Core compares add_position_embedding and refuses False for networks without positions."""
    config = parse("--position-embedding-type none").config
    before = {"position_embedding_type": "learned_absolute", "add_position_embedding": False}
    for meta in ({}, {"legacy_args": before}):
        args = vars(core_arguments(config, meta, rows=1024, dtype=torch.float32, data_parallel=1))
        assert args["position_embedding_type"] == "none"
        assert args["add_position_embedding"] is True
        assert core_config(args)["model"]["position_embedding_type"] == "none"


def test_rotary_embeddings_with_no_position_embedding_are_read_as_rotary():
    """--no-position-embedding only means that there is no table of positions."""
    config = parse("--position-embedding-type rope").config
    args = vars(core_arguments(config, {}, rows=1024, dtype=torch.float32, data_parallel=1))
    args |= {"add_position_embedding": False, "use_rotary_position_embeddings": False}
    for read in (core_config, partial(legacy_config, architecture="gpt")):
        assert read(args)["model"]["position_embedding_type"] == "rope"
        older = {**args, "position_embedding_type": "learned_absolute"}
        assert read(older)["model"]["position_embedding_type"] == "none"


def test_what_llama_4_shares_with_core_is_written_and_read_again():
    """Core normalizes queries and keys in all layers, or in none."""
    flags = "--num-layers 4 --position-embedding-type rope --qk-l2-norm"
    config = parse(f"{flags} {MIXTURE} --moe-router-topk 1 --moe-apply-probs-on-input").config
    assert not list(unsupported_flags(config.model))
    meta = {"consumed_train_samples": 0, "iteration": 0}
    args = vars(core_arguments(config, meta, rows=1024, dtype=torch.float32, data_parallel=1))
    found = core_config(args)["model"]
    assert found["qk_l2_norm"] is found["moe_apply_probs_on_input"] is True
    with pytest.raises(CheckpointError, match="qk_l2_norm is True: such networks"):
        core_config({**args, "no_rope_freq": [0, 0, 0, 1]})
    mixed = parse(f"{flags} --no-rope-freq 4 --attention-chunk-size 8").config.model
    refused = ["--qk-l2-norm with --no-rope-freq", "--attention-chunk-size 8"]
    assert sorted(unsupported_flags(mixed)) == sorted(refused)


@pytest.mark.parametrize(
    "name",
    [
        "moe_mlp_glu_interleave_size",
        "moe_shared_expert_glu_interleave_size",
        "moe_router_topk_limited_devices",
    ],
)
def test_experts_with_other_rows_or_routers_are_refused(name):
    """The tensors have the same names and shapes as without these settings."""
    config = parse(MIXTURE).config
    args = vars(core_arguments(config, {}, rows=1024, dtype=torch.float32, data_parallel=1))
    core_config({**args, name: None})
    with pytest.raises(CheckpointError, match=f"{name} is 32: such networks are not supported"):
        core_config({**args, name: 32})


@pytest.mark.parametrize(
    ("flags", "frequency"),
    [
        ("--num-experts 8 8 8 8", 1),
        ("--num-experts 8 8 1 8", [1, 1, 0, 1]),
        ("--num-experts 8 1 --moe-layer-freq 2", [1, 0, 0, 0]),
        ("--num-experts 8 --moe-layer-freq 2", 2),
    ],
)
def test_a_layer_of_one_expert_among_others_is_dense(flags, frequency):
    """Core has a single number of experts, so such a network is written as a pattern."""
    model = parse(f"--num-layers 4 {flags}").config.model
    assert layer_frequency(model) == frequency
    assert not list(unsupported_flags(model))
    several = parse("--num-layers 4 --num-experts 8 4 1 8").config.model
    assert list(unsupported_flags(several)) == ["--num-experts 8 4 1 8"]


@pytest.mark.parametrize(("flags", "expected"), [("", False), ("--disable-bias-linear", True)])
def test_core_turns_on_biases_of_queries_with_all_others(flags, expected):
    """Our --add-qkv-bias is off if all linear layers have biases."""
    config = parse(f"--num-layers 4 {flags} {'--add-qkv-bias' if expected else ''}").config
    meta = {"consumed_train_samples": 0, "iteration": 0}
    args = core_arguments(config, meta, rows=1024, dtype=torch.float32, data_parallel=1)
    model = core_config({**vars(args), "add_qkv_bias": True})["model"]
    assert model.get("add_qkv_bias", False) is config.model.add_qkv_bias is expected


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("", []),
        ("--moe-router-bias", []),
        (
            "--moe-router-bias --disable-bias-linear",
            ["--moe-router-bias with --disable-bias-linear"],
        ),
    ],
)
def test_core_s_routers_have_biases_if_all_linear_layers_have_them(flags, refused):
    model = parse(f"{MIXTURE} {flags}").config.model
    assert list(unsupported_flags(model)) == refused
    expected = [*refused, *["--moe-router-bias"] * (flags == "--moe-router-bias")]
    assert list(unsupported_by_legacy(model)) == expected


_YARN = """
    --rotary-scaling-factor 8 --mscale 0.5 --mscale-all-dim 0.75 --yarn-beta-fast 16
    --yarn-beta-slow 2 --no-yarn-correction-range-round-to-int
"""


@pytest.mark.parametrize("numbers", ["", _YARN])
def test_yarn_is_a_type_of_positions_in_core(numbers):
    config = parse(f"--num-layers 4 --position-embedding-type yarn {numbers}").config
    assert not list(unsupported_by_core(config.model))
    meta = {"consumed_train_samples": 0, "iteration": 0}
    args = vars(core_arguments(config, meta, rows=1024, dtype=torch.float32, data_parallel=1))
    assert args["position_embedding_type"] == "yarn"
    assert args["use_rotary_position_embeddings"] is False
    assert args["rotary_scaling_factor"] == (8 if numbers else 1)
    found = core_config(args)["model"]
    for name in ("position_embedding_type", "rotary_percent", *YARN_FIELDS):
        assert found.get(name, getattr(ModelConfig, name)) == getattr(config.model, name), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_interleaved": True}, "rotary_interleaved is True"),
        ({"rotary_seq_len_interpolation_factor": 2}, "interpolation_factor is 2"),
        ({"position_embedding_type": "rope"}, "rotary_scaling_factor is 4"),
    ],
)
def test_settings_beside_yarn_that_core_would_not_use_are_refused(changes, message):
    args = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, **changes}
    with pytest.raises(CheckpointError, match=message):
        core_config(args)
    found = core_config({"position_embedding_type": "yarn", "yarn_beta_fast": None})["model"]
    assert (found["yarn_beta_fast"], found["yarn_original_max_position_embeddings"]) == (32, 4096)


@pytest.mark.parametrize("flag", ["", "--apply-residual-connection-post-layernorm"])
def test_a_network_that_core_would_compute_differently_is_refused(flag):
    model = parse(f"--num-layers 4 {flag}").config.model
    assert list(unsupported_by_core(model)) == flag.split()
    assert list(unsupported_by_legacy(model)) == []


@pytest.mark.parametrize(
    ("factor", "notices"),
    [
        ("8", []),
        (
            "32",
            [
                "--rope-scaling-factor 32: Megatron Core's pretrain_gpt.py computes with 8, "
                "regardless of the flag: give its GPTModel rope_scaling_factor=32"
            ],
        ),
    ],
)
def test_a_factor_that_core_s_script_does_not_read_is_reported(factor, notices):
    flags = f"--position-embedding-type rope --use-rope-scaling --rope-scaling-factor {factor}"
    parsed = parse(f"{flags} --save x --save-interval 1 --ckpt-format torch_dist")
    assert list(unsupported_by_core(parsed.config.model)) == []
    assert [line for line in parsed.notices if "GPTModel" in line] == notices
