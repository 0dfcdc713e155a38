"""Variants of Llama's layers: unsupported keys are refused by name, and published sizes match."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.huggingface.families import (
    differing_fields,
    families,
    family_for,
    mismatches,
)
from megatron.checkpoint.huggingface.peft import peft_names
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.huggingface.settings import Settings
from megatron.errors import CheckpointError
from megatron.models.adapters import adapted_layers
from megatron.models.plan import AttentionPlan
from megatron.models.plans import model_plan
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder

_SLIDING, _FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma", {"hidden_act": "relu"}, 'hidden_act "relu": only "gelu_pytorch_tanh"'),
        ("gemma 2", {"use_bidirectional_attention": True}, "use_bidirectional_attention true"),
        ("gemma 2", {"layer_types": [_SLIDING, "chunked"]}, "chunked is not supported"),
        ("gemma 2", {"layer_types": [_SLIDING]}, "has 1 entries for 2 layers"),
        ("gemma 2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0: expected a number"),
        ("gemma 2", {"attention_bias": True}, "attention_bias true: only false"),
        (
            "gemma 3",
            {"rope_parameters": {_SLIDING: {"rope_type": "linear", "factor": 2.0}}},
            "rope_type",
        ),
        ("gemma 3", {"rope_parameters": {"chunked": {}}}, "chunked: not supported"),
        ("phi 3", {"rope_scaling": {"type": "yarn"}}, 'type "yarn": only "default"'),
        (
            "phi 3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "expected a list of 3 numbers",
        ),
        ("phi 3", {"partial_rotary_factor": 0}, "partial_rotary_factor 0: expected a number"),
        ("olmo 2", {"attention_bias": True}, "attention_bias true: only false"),
        ("gpt-j", {"rotary_dim": 12}, "rotary_dim 12: must be even and at most 10"),
        ("gpt-j", {"rotary_dim": 5}, "rotary_dim 5: must be even"),
        ("gpt-j", {"activation_function": "relu"}, 'activation_function "relu": supported'),
        ("cohere 2", {"use_qk_norm": True}, "use_qk_norm true: only false"),
        ("cohere", {"attention_bias": True}, "attention_bias true: only false"),
        ("cohere 2", {"sliding_window": None}, "sliding_window null: must be a number"),
        ("cohere 2", {"use_parallel_block": False}, "use_parallel_block false: only true"),
        ("neox", {"attention_bias": False}, "attention_bias false: only true"),
        ("neox", {"hidden_act": "relu"}, 'hidden_act "relu": supported'),
        ("bloom", {"n_embed": 48}, "n_embed 48: differs from hidden_size 32"),
        ("bloom", {"n_head": 5}, "hidden_size 32: is not divisible by 5 heads"),
        ("falcon", {"activation": "relu"}, 'activation "relu": supported'),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "2: 2 requires new_decoder_architecture"),
        ("falcon", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ("falcon", {"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "must be at least 1"),
        ("falcon, new", {"parallel_attn": False}, "must be true if new_decoder_architecture is"),
        ("falcon, new", {"num_kv_heads": 3}, "num_kv_heads 3: does not divide 4 heads"),
        ("qwen3 next", {"layer_types": ["linear_attention", "x"]}, "x is not supported"),
        ("qwen3 next", {"layer_types": ["linear_attention"]}, "has 1 entries for 2 layers"),
        ("qwen3 next", {"linear_num_value_heads": 5}, "is not a multiple of 2 key heads"),
        ("qwen3 next", {"use_sliding_window": True}, "use_sliding_window true: only false"),
        ("gpt-oss", {"attention_bias": False}, "attention_bias false: only true"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha 1.5: only 1.702"),
        ("gpt-oss", {"experts_per_token": 2}, "experts_per_token 2: only 3"),
        ("gpt-oss", {"rope_scaling": None}, "rope_scaling null: is required"),
        ("gpt-oss", {"quantization_config": {}}, "quantization_config: not supported"),
        ("llama 4", {"num_experts_per_tok": 2}, "num_experts_per_tok 2: only 1"),
        ("llama 4", {"layer_types": [_FULL, _FULL]}, "only layers with rotary embeddings"),
        ("llama 4", {"no_rope_layers": [1]}, "no_rope_layers .1.: has 1 entries for 2 layers"),
        ("llama 4", {"moe_layers": []}, "moe_layers .*: at least one layer"),
        ("llama 4", {"attn_temperature_tuning": "no"}, "attn_temperature_tuning .no.: expected"),
        ("llama 4", {"attention_bias": True}, "attention_bias true: only false"),
        ("mamba 2", {"expand": 2}, "expand 2: times hidden_size is not num_heads"),
        ("mamba 2", {"conv_kernel": 3}, "conv_kernel 3: only 4 is supported"),
        ("mamba 2", {"time_step_limit": [0.01, 1.0]}, "time steps with limits"),
        ("mamba 2", {"n_groups": 3}, "n_groups 3: does not divide num_heads"),
        ("falcon h1", {"mamba_d_conv": 3}, "mamba_d_conv 3: only 4 is supported"),
        ("falcon h1", {"mamba_d_head": 8}, "mamba_d_head 8: only 7 is supported"),
        ("falcon h1", {"mamba_n_groups": 4}, "mamba_n_groups 4: does not divide 6 heads"),
        ("falcon h1", {"mlp_multipliers": [1.0]}, "expected a list of 2 numbers above 0"),
        ("falcon h1", {"projectors_bias": True}, "projectors_bias true: only false"),
        ("falcon h1", {"time_step_limit": [0.01, 1.0]}, "time steps with limits"),
        (
            "falcon h1 with a norm",
            {"mamba_norm_before_gate": True},
            "mamba_norm_before_gate true: must be false with mamba_rms_norm",
        ),
        ("nemotron h", {"layers_block_type": ["mamba2"]}, "mamba2 is not supported"),
        ("nemotron h", {"num_hidden_layers": 3}, "num_hidden_layers 3: only 2 is supported"),
        ("nemotron h", {"mlp_hidden_act": "silu"}, 'mlp_hidden_act "silu": only "relu2"'),
        ("nemotron h", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1: only 0"),
        ("nemotron h mixture", {"moe_latent_size": 8}, "experts on projected inputs"),
        ("nemotron h mixture", {"norm_topk_prob": False}, "norm_topk_prob false: only true"),
    ],
    ids=str,
)
def test_other_networks_are_refused_by_key(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = CASES[name]
    folder = write_folder(tmp_path, {**case.config, **changes}, tensors_of(case))
    with pytest.raises(CheckpointError, match=message):
        HFReader(folder)


@pytest.mark.parametrize(
    ("name", "first", "second", "differs"),
    [
        ("llama", {}, {"rotary_seq_len_interpolation_factor": 1}, False),
        ("llama", {}, {"rotary_seq_len_interpolation_factor": 2}, True),
        ("llama", {}, {"logit_scale": 1.0}, False),
        ("llama", {}, {"logit_scale": 2.0}, True),
        ("llama", {"kv_channels": 16}, {"softmax_scale": 0.25}, False),
        ("llama", {"kv_channels": 16}, {"softmax_scale": 0.5}, True),
        ("llama", {"add_bias_linear": True}, {"add_qkv_bias": True}, False),
        ("llama", {"add_bias_linear": False}, {"add_qkv_bias": True}, True),
        ("llama", {"window_size": "3,0"}, {"window_attn_skip_freq": "[1,1]"}, False),
        ("llama", {"window_size": "3,0"}, {"window_attn_skip_freq": "[1,0]"}, True),
        ("mixtral", {}, {"moe_router_num_groups": 1}, False),
        ("mixtral", {}, {"moe_router_num_groups": 2}, True),
        ("mixtral", {}, {"moe_router_group_topk": 1}, False),
        ("mixtral", {}, {"moe_router_topk_scaling_factor": 1.0}, False),
        ("mixtral", {}, {"moe_router_topk_scaling_factor": 2.0}, True),
        ("mixtral", {"ffn_hidden_size": 7}, {"moe_ffn_hidden_size": 7}, False),
        ("mixtral", {"ffn_hidden_size": 7}, {"moe_ffn_hidden_size": 8}, True),
        ("mixtral", {}, {"moe_layer_freq": "[1,1]"}, False),
        ("mixtral", {}, {"moe_layer_freq": "[1,0]"}, True),
        ("mixtral", {}, {"ffn_hidden_size": 9, "moe_ffn_hidden_size": None}, True),
        ("mixtral", {"moe_ffn_hidden_size": 7}, {"ffn_hidden_size": 9}, False),
        ("mixtral", {}, {"moe_router_group_score_topk": 1}, False),
        (
            "mixtral",
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 6},
            {"moe_router_group_score_topk": 3},
            False,
        ),
        (
            "mixtral",
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 6},
            {"moe_router_group_score_topk": 2},
            True,
        ),
    ],
    ids=str,
)
def test_networks_are_compared_by_the_meaning_of_their_flags(
    name: str, first: dict[str, Any], second: dict[str, Any], differs: bool
) -> None:
    """`second` has the changes of `first` too."""
    config = CASES[name].config
    family = families()[config["model_type"]]
    plain = replace(family.read(Settings(config, "config.json")).model, **first)
    found = differing_fields(family, plain, replace(plain, **second))
    assert bool(found) == differs, found


@pytest.mark.parametrize(
    ("pattern", "full", "kinds"),
    [
        ("[0,1,1]", 1, [_FULL, _SLIDING, _SLIDING]),
        ("[1,1,1]", 0, [_SLIDING] * 3),
        ("[0,0,1]", 2, [_FULL, _FULL, _SLIDING]),
    ],
)
def test_windows_of_later_layers_are_written_for_every_version(
    pattern: str, full: int, kinds: list[str]
) -> None:
    config = CASES["qwen2 with windows in later layers"].config
    model = families()["qwen2"].read(Settings(config, "config.json")).model
    changes = {"num_layers": 3, "window_size": "4,0", "window_attn_skip_freq": pattern}
    written = families()["qwen2"].write(replace(model, **changes), 70)
    assert (written["sliding_window"], written["use_sliding_window"]) == (5, True)
    assert (written["max_window_layers"], written["layer_types"]) == (full, kinds)
    without = families()["qwen2"].write(replace(model, window_size=None), 70)
    assert (without["sliding_window"], without["use_sliding_window"]) == (None, False)


_YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 3.0,
    "yarn_original_max_position_embeddings": 8,
}


@pytest.mark.parametrize(
    ("name", "family", "changes"),
    [
        ("gemma", "gemma", {"norm_placement": "both"}),
        ("gemma", "gemma", {"scale_embeddings": False}),
        ("gemma", "gemma", {"apply_layernorm_1p": False}),
        ("gemma", "gemma", {"softmax_scale": 0.5}),
        ("gemma", "gemma", {"final_logit_softcapping": 3.0}),
        ("gemma 2", "gemma2", {"norm_placement": "after"}),
        ("gemma 2", "gemma2", {"window_rotary_base": 7.0}),
        ("gemma 2", "gemma2", {"qk_layernorm": True}),
        ("gemma 2", "gemma2", {"softmax_type": "learnable"}),
        # `transformers` refuses a config.json whose query_pre_attn_scalar is not an integer.
        ("gemma 2", "gemma2", {"softmax_scale": 0.3}),
        ("gemma 3", "gemma3_text", {"softmax_scale": 1.5}),
        ("gemma 3", "gemma3_text", {"geglu": False, "swiglu": True}),
        ("olmo 2", "olmo2", {"norm_placement": "both"}),
        ("olmo 2", "olmo2", {"qk_layernorm_scope": "head"}),
        ("olmo 3", "olmo3", {"softmax_scale": 0.5}),
        # YaRN in all layers, and only in those without a window.
        ("olmo 3", "olmo3", {"window_rotary_base": None}),
        ("qwen2 with windows in later layers", "qwen2", {**_YARN, "window_rotary_base": 1000.0}),
        ("phi 3", "phi3", {"rotary_seq_len_interpolation_factor": 2}),
        ("phi 3 with longrope", "phi3", {"rotary_seq_len_interpolation_factor": 2}),
        (
            "llama",
            "llama",
            {
                "rope_type": "longrope",
                "longrope_original_max_position_embeddings": 8,
                "longrope_short_factor": (1.0,) * 4,
                "longrope_long_factor": (2.0,) * 4,
            },
        ),
        ("gpt-j", "gptj", {"add_bias_attention": True}),
        ("gpt-j", "gptj", {"lm_head_bias": False}),
        ("gpt-j", "gptj", {"shared_parallel_norm": False}),
        ("cohere", "cohere", {"layernorm_bias": True}),
        ("cohere", "cohere", {"normalization": "RMSNorm"}),
        ("cohere", "cohere", {"parallel_residual": False}),
        ("cohere", "cohere", {"final_logit_softcapping": 9.0}),
        ("cohere plus", "cohere", {"qk_layernorm_scope": "head"}),
        ("cohere 2", "cohere2", {"no_rope_freq": None}),
        ("neox", "gpt_neox", {"swiglu": True}),
        ("neox", "gpt_neox", {"logit_scale": 2.0}),
        ("neox", "gpt_neox", {"add_bias_linear": False}),
        ("bloom", "bloom", {"scale_alibi": True}),
        ("bloom", "bloom", {"embed_layernorm": False}),
        ("bloom", "bloom", {"position_embedding_type": "rope"}),
        ("falcon", "falcon", {"embed_layernorm": True}),
        ("falcon", "falcon", {"swiglu": True}),
        ("falcon with alibi", "falcon", {"scale_alibi": False}),
        ("qwen3 next", "qwen3_next", {"attention_output_gate": False}),
        ("qwen3 next", "qwen3_next", {"apply_layernorm_1p": False}),
        ("qwen3 next", "qwen3_next", {"add_qkv_bias": True}),
        ("llama 4", "llama4_text", {"window_size": "3,0", "attention_chunk_size": None}),
        ("llama 4", "llama4_text", {"moe_apply_probs_on_input": False}),
        ("llama 4", "llama4_text", {"moe_router_score_function": "softmax"}),
        ("llama 4", "llama4_text", {"moe_shared_expert_intermediate_size": None}),
        ("llama 4", "llama4_text", {"qk_l2_norm": False, "qk_layernorm": True}),
        ("mamba 2", "mamba2", {"hybrid_layer_pattern": "M*"}),
        ("mamba 2", "mamba2", {"position_embedding_type": "learned_absolute"}),
        ("nemotron h, older file", "nemotron_h", {"swiglu": True, "squared_relu": False}),
        ("falcon h1", "falcon_h1", {"parallel_mamba": False}),
        ("falcon h1", "falcon_h1", {"qk_layernorm": True}),
        ("falcon h1", "falcon_h1", {"softmax_scale": 0.5}),
        ("nemotron h", "nemotron_h", {"position_embedding_type": "rope"}),
        ("nemotron h mixture", "nemotron_h", {"moe_router_score_function": "softmax"}),
        ("gpt-oss", "gpt_oss", {"moe_router_bias": False}),
        ("gpt-oss", "gpt_oss", {"softmax_type": "off-by-one"}),
        ("gpt-oss", "gpt_oss", {"glu_linear_offset": 0.0}),
        ("gpt-oss", "gpt_oss", {"activation_func_clamp_value": None}),
        ("gpt-oss", "gpt_oss", {"add_bias_linear": False}),
    ],
    ids=str,
)
def test_what_a_family_cannot_express_is_named(
    name: str, family: str, changes: dict[str, Any]
) -> None:
    config = CASES[name].config
    model = families()[family].read(Settings(config, "config.json")).model
    assert family_for(model, 70, None).name == family
    found = mismatches(families()[family], replace(model, **changes), 70)
    assert any(line.startswith(f"{key} is ") for key in changes for line in found), found


def test_weights_of_experts_that_are_not_scaled_are_written_with_a_factor_of_1() -> None:
    family, config = families()["nemotron_h"], CASES["nemotron h mixture"].config
    model = family.read(Settings(config, "config.json")).model
    assert not mismatches(family, replace(model, moe_router_topk_scaling_factor=None), 70)


@pytest.mark.parametrize("name", CASES)
def test_a_network_has_one_activation_function(name: str) -> None:
    config = CASES[name].config
    model = families()[config["model_type"]].read(Settings(config, "config.json")).model
    flags = ("swiglu", "geglu", "quick_geglu", "squared_relu", "openai_gelu")
    assert sum(bool(getattr(model, flag)) for flag in flags) <= 1


@pytest.mark.parametrize("name", CASES)
def test_every_network_is_compared_with_every_family(name: str) -> None:
    """A family writes the nearest network that it can express, and reads it again."""
    config = CASES[name].config
    model = families()[config["model_type"]].read(Settings(config, "config.json")).model
    for family in families().values():
        found = mismatches(family, model, 70)
        assert not found or family.name != config["model_type"], found


_GEMMA_2 = {
    **CASES["gemma 2"].config,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "layer_types": None,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
_SCOUT = {
    **CASES["llama 4"].config,
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "interleave_moe_layer_step": 1,
    "layer_types": None,
    "max_position_embeddings": 10485760,
    "moe_layers": None,
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 202048,
}
_PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gemma-2b": (
        {
            **CASES["gemma"].config,
            "head_dim": 256,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "vocab_size": 256000,
        },
        2_506_172_416,
    ),
    "gemma-2-2b": (_GEMMA_2, 2_614_341_888),
    "gemma-3-1b": (
        {
            **CASES["gemma 3"].config,
            "head_dim": 256,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "layer_types": None,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
        999_885_952,
    ),
    "olmo-2-7b": (
        {
            **CASES["olmo 2"].config,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100352,
        },
        7_298_617_344,
    ),
    "phi-4": (
        {
            **CASES["phi 3"].config,
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 10,
            "vocab_size": 100352,
        },
        14_659_507_200,
    ),
    "pythia-1.4b": (
        {
            **CASES["neox"].config,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "vocab_size": 50304,
        },
        1_414_647_808,
    ),
    "gpt-j-6b": (
        {
            **CASES["gpt-j"].config,
            "n_embd": 4096,
            "n_head": 16,
            "n_layer": 28,
            "n_positions": 2048,
            "rotary_dim": 64,
            "vocab_size": 50400,
        },
        6_050_882_784,
    ),
    "c4ai-command-r-v01": (
        {
            **CASES["cohere"].config,
            "head_dim": None,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_attention_heads": 64,
            "num_hidden_layers": 40,
            "num_key_value_heads": 64,
            "vocab_size": 256000,
        },
        34_980_831_232,
    ),
    "c4ai-command-r-plus": (  # counted from its published sizes
        {
            **CASES["cohere plus"].config,
            "head_dim": None,
            "hidden_size": 12288,
            "intermediate_size": 33792,
            "num_attention_heads": 96,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "vocab_size": 256000,
        },
        103_810_674_688,
    ),
    "c4ai-command-r7b-12-2024": (
        {
            **CASES["cohere 2"].config,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "layer_types": None,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "vocab_size": 256000,
        },
        8_028_033_024,
    ),
    "stablelm-2-1.6b": (
        {
            **CASES["llama"].config,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "model_type": "stablelm",
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "num_key_value_heads": 32,
            "rms_norm_eps": None,
            "use_qkv_bias": True,
            "vocab_size": 100352,
        },
        1_644_515_328,
    ),
    "bloom-560m": (
        {
            **CASES["bloom"].config,
            "n_embed": 1024,
            "hidden_size": None,
            "num_attention_heads": 16,
            "n_head": None,
            "n_layer": 24,
            "vocab_size": 250880,
        },
        559_214_592,
    ),
    "falcon-7b": (
        {
            **CASES["falcon"].config,
            "ffn_hidden_size": None,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "num_kv_heads": 71,
            "vocab_size": 65024,
        },
        6_921_720_704,
    ),
    "qwen3-next-80b-a3b": (  # counted by transformers, without layers for multi-token prediction
        {
            **CASES["qwen3 next"].config,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "layer_types": None,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "moe_intermediate_size": 512,
            "num_attention_heads": 16,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "shared_expert_intermediate_size": 512,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        79_674_391_296,
    ),
    "llama-4-scout": (_SCOUT, 107_769_861_120),  # both counted by transformers, without images
    "llama-4-maverick": (
        {
            **_SCOUT,
            "attn_temperature_tuning": 4,
            "interleave_moe_layer_step": 2,
            "max_position_embeddings": 1048576,
            "num_local_experts": 128,
            "rope_scaling": None,
            "use_qk_norm": False,
        },
        400_711_848_960,
    ),
    "gpt-oss-20b": (
        {
            **CASES["gpt-oss"].config,
            "head_dim": 64,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "layer_types": None,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "sliding_window": 128,
            "vocab_size": 201088,
        },
        20_914_757_184,
    ),
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_models_have_their_size(name: str) -> None:
    config, expected = _PUBLISHED[name]
    family = families()[config["model_type"]]
    described = family.read(Settings(config, "config.json"))
    assert not mismatches(family, described.model, described.vocab)
    rules = family.rules(described.model, described.vocab)
    assert sum(math.prod(shape) for rule in rules for shape in rule.shapes()) == expected


def test_gpt_j_s_heads_turn_as_many_channels_as_its_file_says() -> None:
    """The share is stored as a fraction: 46 * (26 / 46) is below 26 in floating point."""
    family = families()["gptj"]
    for size, channels in ((46, 26), (47, 12), (49, 2), (64, 64), (256, 64)):
        config = {**CASES["gpt-j"].config, "n_embd": 2 * size, "n_head": 2, "rotary_dim": channels}
        model = family.read(Settings(config, "config.json")).model
        mixer = model_plan(model, 70).layers[0].mixer
        assert isinstance(mixer, AttentionPlan)
        assert mixer.rotary is not None
        assert mixer.rotary.channels == channels


def test_gemma_s_layers_have_windows_in_turns_without_layer_types() -> None:
    family = families()["gemma2"]
    model = family.read(Settings(_GEMMA_2, "config.json")).model
    assert model.window_size == "4095,0"
    assert model.window_attn_skip_freq == f"[{','.join(['1,0'] * 13)}]"
    without = {key: value for key, value in _GEMMA_2.items() if "softcapping" not in key}
    assert family.read(Settings(without, "config.json")).model.attn_logit_softcapping == 50


def test_llama_4_has_all_its_kinds_of_layers_without_their_lists() -> None:
    model = families()["llama4_text"].read(Settings(_SCOUT, "config.json")).model
    assert model.no_rope_freq == f"[{','.join(['0,0,0,1'] * 12)}]"
    assert model.moe_layer_freq == "1"
    assert (model.attention_chunk_size, model.rope_high_freq_factor) == (8192, 1)
    in_turns = {**_SCOUT, "interleave_moe_layer_step": 2, "attn_temperature_tuning": False}
    model = families()["llama4_text"].read(Settings(in_turns, "config.json")).model
    assert model.moe_layer_freq == f"[{','.join(['0,1'] * 24)}]"
    assert model.attention_temperature_scale is None


def test_adapters_of_experts_whose_matrices_peft_turns_around_are_refused() -> None:
    family = families()["llama4_text"]
    model = family.read(Settings(CASES["llama 4"].config, "config.json")).model
    model = replace(model, lora_rank=2, lora_target_modules=("*experts.up",))
    with pytest.raises(CheckpointError, match="PEFT takes its inputs for outputs"):
        peft_names(model, adapted_layers(model, 70), family, 70)
