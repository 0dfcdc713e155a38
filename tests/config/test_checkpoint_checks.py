"""Checks of saving and loading: each mistake with the line that the user sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.config.model import ModelOptions
from megatron.config.rules_legacy import (
    needs_engine,
    unsupported_by_core,
    unsupported_by_legacy,
    unused_by_core,
)
from tests.config.command import problems

_LINES = [
    (
        "--save here",
        "--save here needs --save-interval: give iterations between checkpoints, or minutes as "
        "--save-interval-in-mins",
    ),
    (
        "--save /runs/\udce9 --save-interval 5",
        r"--save '/runs/\udce9': the path '/runs/\udce9' is not UTF-8: rename it",
    ),
    (
        "--tensorboard-dir /l/\udce9",
        r"--tensorboard-dir '/l/\udce9': the path '/l/\udce9' is not UTF-8: rename it",
    ),
    (
        "--data-cache-path /c/\udce9",
        r"--data-cache-path '/c/\udce9': the path '/c/\udce9' is not UTF-8: rename it",
    ),
    (
        "--save here --save-interval-in-mins 0",
        "--save-interval-in-mins 0.0: must be above 0",
    ),
    (
        "--save here --save-interval 5 --ckpt-format legacy --optimizer sgd "
        "--use-distributed-optimizer",
        "--ckpt-format legacy with --use-distributed-optimizer: Megatron-LM's file stores Adam's "
        "states, not those of --optimizer sgd: drop one of the three flags",
    ),
    *(
        (
            f"--save here --save-interval 5 --ckpt-format {kind} --optimizer muon",
            f"--ckpt-format {kind} with --optimizer muon: its states cannot be written in "
            "Megatron-LM's formats: use --ckpt-format native, or --no-save-optim",
        )
        for kind in ("legacy", "torch_dist")
    ),
    (
        "--save here --save-interval 5 --ckpt-format legacy --position-embedding-type yarn",
        "--rope-type yarn: Megatron-LM 23.08, the target of --ckpt-format legacy, does not "
        "support this network: use --ckpt-format native",
    ),
    *(
        (
            f"--save here --save-interval 5 --ckpt-format torch_dist {flags}",
            f"--ckpt-format torch_dist with --rope-type yarn with {other}: Megatron Core does not "
            "support it: use --ckpt-format native",
        )
        for flags, other in (
            ("--position-embedding-type yarn --mtp-num-layers 1", "--mtp-num-layers 1"),
            (
                "--position-embedding-type rope --rope-type yarn "
                "--yarn-original-max-position-embeddings 8 --rotary-percent 0.5",
                "--rotary-percent 0.5",
            ),
        )
    ),
    (
        "--save here --save-interval 5 --ckpt-format torch_dist --freeze embedding layers.0",
        "--ckpt-format torch_dist with --freeze layers.0: Megatron Core stores the optimizer "
        "states of all layers in one tensor: freeze the same weights in every layer, use "
        "--ckpt-format native, or add --no-save-optim",
    ),
    (
        "--save here --save-interval 5 --ckpt-format legacy --use-distributed-optimizer "
        "--freeze embedding",
        "--ckpt-format legacy with --use-distributed-optimizer and --freeze embedding: "
        "Megatron-LM's file stores the optimizer states of all weights: drop one of the three, use "
        "--ckpt-format native, or add --no-save-optim",
    ),
    (
        "--save here --save-interval 5 --ckpt-format legacy --qk-layernorm",
        "--qk-layernorm: Megatron-LM 23.08, the target of --ckpt-format legacy, does not support "
        "such weights: use --ckpt-format native",
    ),
    (
        "--save here --save-interval 5 --ckpt-format legacy --num-layers 4 "
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
        "--ckpt-format legacy: Megatron-LM 23.08 gives every stage the same number of layers, but "
        "here they have 1, 3: use --ckpt-format native",
    ),
    ("--save here --save-interval 5 --keep-latest 0", "--keep-latest 0: must be at least 1"),
    (
        "--exit-on-missing-checkpoint",
        "--exit-on-missing-checkpoint requires --load: add it, or drop the flag",
    ),
    (
        "--save here --save-interval 5 --save-retain-interval 0",
        "--save-retain-interval 0: must be at least 1",
    ),
    (
        "--save here --save-interval 5 --save-retain-interval 12",
        "--save-retain-interval 12 is not divisible by --save-interval 5: use 10 or 15",
    ),
    (
        "--save here --save-interval 5 --save-retain-interval 2",
        "--save-retain-interval 2 is not divisible by --save-interval 5: use 5",
    ),
    (
        "--save here --save-interval-in-mins 5 --save-retain-interval 2",
        "--save-retain-interval 2 requires --save-interval: use a divisor of 2",
    ),
    ("--ckpt-step 5", "--ckpt-step 5 requires --load: add it, or drop the flag"),
    ("--load here --ckpt-step -1", "--ckpt-step -1: must be at least 0"),
    (
        "--pretrained-checkpoint base",
        "--pretrained-checkpoint base requires --load: add it, or drop the flag",
    ),
    (
        "--load here --pretrained-checkpoint base --finetune",
        "--pretrained-checkpoint cannot be combined with --finetune: a restart would begin again: "
        "drop one",
    ),
    (
        "--load here --pretrained-checkpoint base --ckpt-step 0",
        "--pretrained-checkpoint cannot be combined with --ckpt-step: a restart would not "
        "continue: drop one",
    ),
    (
        "--lr-wsd-branch-from old --save new --load new --save-interval 5 --lr-decay-style WSD "
        "--lr-wsd-decay-iters 2 --train-iters none --pretrained-checkpoint base",
        "--pretrained-checkpoint cannot be combined with --lr-wsd-branch-from: a branch has the "
        "weights of its trunk: drop one",
    ),
    (
        "--no-initialization",
        "--no-initialization requires --load: add it, or drop the flag",
    ),
    (
        "--use-checkpoint-args",
        "--use-checkpoint-args requires --load: add it, or drop the flag",
    ),
]


@pytest.mark.parametrize(("words", "line"), _LINES, ids=[words for words, _ in _LINES])
def test_a_mistake_and_its_line(words: str, line: str) -> None:
    lines = problems(words, world_size=8)
    assert line in lines
    assert len(lines) == 1 or "pipeline-model-parallel-size" in words  # has its own rules


_DELTA = {"experimental_attention_variant": "gated_delta_net"}
_DELTA_OF_CORE = {**_DELTA, "normalization": "RMSNorm", "swiglu": True}
_OWN_MAMBA = {"mamba_norm": False, "norm_epsilon": 1e-6}
_ROUTER_BIAS = {"moe_router_bias": True, "num_experts": (4,)}
_ROPE_SCALING = {"use_rope_scaling": True}
_YARN = {"rope_type": "yarn"}
_UNROUNDED = {**_YARN, "yarn_correction_range_round_to_int": False}
# The network, what Megatron Core does not support of it, and what Megatron-LM 23.08 does not.
_NETWORKS: list[tuple[dict[str, Any], list[str], list[str] | None]] = [
    ({}, [], None),
    *(
        (values, [name], None)
        for values, name in (
            ({"position_embedding_type": "relative"}, "--position-embedding-type relative"),
            ({"position_embedding_type": "alibi"}, "--position-embedding-type alibi"),
            ({"geglu": True}, "--geglu"),
            ({"relu": True}, "--relu"),
            ({"num_experts": (4, 8)}, "--num-experts 4 8"),
            ({"mlp_type": "residual"}, "--mlp-type residual"),
            ({"scale_decoder_outputs": True}, "--scale-decoder-outputs"),
            ({"add_output_bias": False}, "--disable-output-bias"),
            ({"softmax_scale": 0.5}, "--softmax-scale 0.5"),
            ({"attn_logit_softcapping": 3.0}, "--attn-logit-softcapping 3.0"),
            ({"final_logit_softcapping": 3.0}, "--final-logit-softcapping 3.0"),
            ({"window_rotary_base": 5.0}, "--window-rotary-base 5.0"),
            ({"norm_placement": "after"}, "--norm-placement after"),
            ({"scale_embeddings": True}, "--scale-embeddings"),
            ({"parallel_residual": True}, "--parallel-residual"),
            ({"layernorm_bias": False}, "--disable-layernorm-bias"),
            ({"add_bias_attention": False}, "--disable-bias-attention"),
            ({"lm_head_bias": True}, "--lm-head-bias"),
            ({"logit_scale": 2.0}, "--logit-scale 2.0"),
            ({"parallel_mamba": True}, "--parallel-mamba"),
            ({"embed_layernorm": True}, "--embed-layernorm"),
            ({"rope_type": "longrope"}, "--rope-type longrope"),
            ({"rope_type": "dynamic"}, "--rope-type dynamic"),
            ({"rope_type": "proportional"}, "--rope-type proportional"),
            ({"attention_chunk_size": 8}, "--attention-chunk-size 8"),
            ({"attention_temperature_scale": 0.1}, "--attention-temperature-scale 0.1"),
            ({"qk_l2_norm": True, "no_rope_freq": "4"}, "--qk-l2-norm with --no-rope-freq"),
        )
    ),
    ({"position_embedding_type": "rope", "rope_type": "rope", "num_experts": (4,)}, [], None),
    ({"qk_l2_norm": True, "rotary_seq_len_interpolation_factor": 2}, [], None),
    ({"no_rope_freq": "4", "apply_layernorm_1p": True}, [], None),
    ({"apply_residual_connection_post_layernorm": True},
     ["--apply-residual-connection-post-layernorm"], []),
    ({"qk_layernorm": True}, [], None),
    ({"qk_layernorm_scope": "each-head", **_OWN_MAMBA}, [], None),
    ({"qk_layernorm": True, "qk_layernorm_scope": "each-head"},
     ["--qk-layernorm-scope each-head"], None),
    (_ROPE_SCALING, [], None),
    ({"rope_high_freq_factor": 2.0}, [], None),
    ({**_ROPE_SCALING, "rope_high_freq_factor": 2.0}, ["--rope-high-freq-factor 2"], None),
    (_ROUTER_BIAS, [], ["--moe-router-bias"]),
    ({**_ROUTER_BIAS, "add_bias_linear": False},
     ["--moe-router-bias with --disable-bias-linear"], None),
    ({**_ROUTER_BIAS, "add_bias_linear": False, "num_experts": None}, [], None),
    ({**_ROUTER_BIAS, "add_bias_linear": False, "moe_router_bias": False}, [], None),
    (_YARN, [], ["--rope-type yarn"]),
    (_UNROUNDED, [], ["--rope-type yarn"]),
    ({**_YARN, "rotary_percent": 0.5, "mtp_num_layers": 1},
     ["--rope-type yarn with --rotary-percent 0.5", "--rope-type yarn with --mtp-num-layers 1"],
     ["--rope-type yarn"]),
    ({**_YARN, "rotary_percent": 0.5, "mtp_num_layers": 1, "multi_latent_attention": True}, [],
     ["--rope-type yarn"]),
    ({"multi_latent_attention": True, "yarn_correction_range_round_to_int": False}, [], None),
    *(
        ({"multi_latent_attention": True, **values}, [f"--multi-latent-attention with {name}"],
         [*older, f"--multi-latent-attention with {name}"])
        for values, name, older in (
            ({"no_rope_freq": "4"}, "--no-rope-freq 4", []),
            ({"rotary_seq_len_interpolation_factor": 2},
             "--rotary-seq-len-interpolation-factor 2", []),
            (_ROPE_SCALING, "--use-rope-scaling", []),
            (_UNROUNDED, "--no-yarn-correction-range-round-to-int", ["--rope-type yarn"]),
        )
    ),
    (_DELTA_OF_CORE, [], None),
    *(
        (values, [f"--experimental-attention-variant gated_delta_net with {name}"], None)
        for values, name in (
            ({**_DELTA_OF_CORE, "apply_layernorm_1p": True}, "--apply-layernorm-1p"),
            ({**_DELTA, "swiglu": True}, "--normalization LayerNorm"),
            ({**_DELTA, "normalization": "RMSNorm"}, "an activation other than --swiglu"),
        )
    ),
    ({"hybrid_layer_pattern": "**", **_OWN_MAMBA}, [], ["--hybrid-layer-pattern **"]),
    *(
        ({"hybrid_layer_pattern": "M*", name: value}, [f"--hybrid-layer-pattern M* with {flag}"],
         ["--hybrid-layer-pattern M*", f"--hybrid-layer-pattern M* with {flag}"])
        for name, value, flag in (
            ("multi_latent_attention", True, "--multi-latent-attention"),
            ("qk_layernorm", True, "--qk-layernorm"),
            ("qk_l2_norm", True, "--qk-l2-norm"),
            ("mamba_norm", False, "--disable-mamba-norm"),
            ("norm_epsilon", 1e-6, "--norm-epsilon 1e-06"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("values", "core", "legacy"), _NETWORKS, ids=str)
def test_what_megatron_does_not_support_of_a_network(
    values: dict[str, Any], core: list[str], legacy: list[str] | None
) -> None:
    """Without a list of its own, Megatron-LM 23.08 supports what Megatron Core does."""
    model = replace(ModelOptions(), **values)
    assert list(unsupported_by_core(model)) == core
    assert list(unsupported_by_legacy(model)) == (core if legacy is None else legacy)
    only_with_engine = {"experimental_attention_variant", "hybrid_layer_pattern"}
    assert needs_engine(model) == bool(only_with_engine & values.keys())


@pytest.mark.parametrize(("is_scaled", "factor"), [(True, 8.0), (True, 16.0), (False, 16.0)])
def test_core_s_own_script_scales_by_eight(is_scaled: bool, factor: float) -> None:
    model = replace(ModelOptions(), use_rope_scaling=is_scaled, rope_scaling_factor=factor)
    assert [line.partition(":")[0] for line in unused_by_core(model)] == (
        ["--rope-scaling-factor 16"] if is_scaled and factor != 8 else []
    )
