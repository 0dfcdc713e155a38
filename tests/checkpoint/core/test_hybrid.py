"""Hybrid models with Mamba-2 in Megatron Core's files: names, row order, states and settings."""

import pytest
import torch

from megatron.checkpoint.core.arguments import core_arguments, core_config
from megatron.checkpoint.loading import open_checkpoint
from megatron.config.hybrid import MAMBA_FIELDS
from megatron.config.rules_legacy import unsupported_by_legacy, unsupported_flags
from megatron.errors import CheckpointError
from megatron.tools.checkpoint import util
from tests.checkpoint.core.conftest import SAVE
from tests.checkpoint.core.recorded import (
    logits_here,
    resave,
    resave_both_ways,
    stored_tensors,
    waves,
)
from tests.checkpoint.states import read_all
from tests.config.command import parse, problems
from tests.distributed import run_distributed

GROUPS, HEADS, SIZE, STATE, TOKENS, HIDDEN = 2, 4, 6, 5, 4, 32
INNER = HEADS * SIZE
HYBRID = f"""
    --mamba-num-groups {GROUPS} --mamba-num-heads {HEADS} --mamba-head-dim {SIZE}
    --mamba-state-dim {STATE} --squared-relu --normalization RMSNorm
    --position-embedding-type none --disable-bias-linear --group-query-attention
    --num-query-groups 2 --untie-embeddings-and-output-weights --ffn-hidden-size 40
""".split()
MIXTURE = """
    --hybrid-layer-pattern ME*M --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 12
    --moe-shared-expert-intermediate-size 8 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
""".split()
NETWORKS = {
    "dense": [*HYBRID, "--hybrid-layer-pattern", "M-M*"],
    "mixture": [*HYBRID, *MIXTURE],
    "bf16": [*HYBRID, "--hybrid-layer-pattern", "M-M*", "--bf16"],
}
_LAYOUTS = {
    "TP 2": ("mixture", 2, {"tensor": 2}, "--tensor-model-parallel-size 2"),
    "PP 2": (
        "dense",
        2,
        {"pipeline": 2},
        "--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-|M*",
    ),
    "DP 4, ZeRO 3": ("dense", 4, {}, "--zero-stage 3"),
    "EP 2, ZeRO 1": (
        "mixture",
        2,
        {"expert": 2},
        "--expert-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "16 bits": ("bf16", 2, {}, "--use-distributed-optimizer"),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_layout_saves_and_loads_the_same_bits(natives, tmp_path, layout):
    network, processes, sizes, flags = _LAYOUTS[layout]
    words = [*SAVE, *NETWORKS[network], *flags.split()]
    resave_both_ways(natives(network), words, tmp_path, processes, sizes)


# The rows of Core's parts of the input projection. The convolution reads x, B and C.
_PARTS = {"z": INNER, "x": INNER, "B": GROUPS * STATE, "C": GROUPS * STATE, "dt": HEADS}


def _our_row(part, row, parts):
    """Return our row for a row of one of Core's parts. Our rows are ordered by group."""
    group, offset = divmod(row, parts[part] // GROUPS)
    before = 0
    for name, rows in parts.items():
        if name == part:
            break
        before += rows // GROUPS
    return group * sum(parts.values()) // GROUPS + before + offset


def test_names_shapes_and_rows_are_those_of_core_s_layers(natives, tmp_path):
    run_distributed(1, resave, natives("mixture"), [*SAVE, *NETWORKS["mixture"]], tmp_path)
    held, objects = stored_tensors(open_checkpoint(tmp_path).path)
    ours, start = read_all(natives("mixture")), "decoder.layers.3.mixer."
    convolved = {part: _PARTS[part] for part in ("x", "B", "C")}
    expected = {
        "in_proj.layer_norm_weight": (HIDDEN,),
        **{f"in_proj.weight.{part}": (rows, HIDDEN) for part, rows in _PARTS.items()},
        **{f"conv1d.weight.{part}": (rows, 1, TOKENS) for part, rows in convolved.items()},
        **{f"conv1d.bias.{part}": (rows,) for part, rows in convolved.items()},
        **dict.fromkeys(("A_log", "D", "dt_bias"), (HEADS,)),
        "norm.weight": (INNER,),
        "out_proj.weight": (HIDDEN, INNER),
    }
    found = {
        name.removeprefix(start): tuple(value.shape)
        for name, value in held.items()
        if name.startswith("decoder.layers.3.")
    }
    assert found == expected
    for kind in ("", "exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.state.{kind}.{start}" if kind else start

        def native(name, kind=kind):
            layer = f"layers.3.attention.{name}"
            return ours[f"optimizer.{layer}.{kind}" if kind else f"model.{layer}"]

        for name in expected:
            module, _, part = name.rpartition(".")
            if module in ("in_proj.weight", "conv1d.weight", "conv1d.bias"):
                whole = native(module.replace("in_proj", "input").replace("conv1d", "convolution"))
                parts = _PARTS if module == "in_proj.weight" else convolved
                rows = [_our_row(part, row, parts) for row in range(parts[part])]
                value = held[prefix + name]
                value = value.squeeze(1) if module == "conv1d.weight" else value
                assert torch.equal(value, whole[rows]), name
        for name, same in {
            "A_log": "decay",
            "D": "skip",
            "dt_bias": "time_step",
            "norm.weight": "norm",
            "out_proj.weight": "output.weight",
        }.items():
            assert torch.equal(held[prefix + name], native(same)), name
    assert {
        "decoder.final_norm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
    } <= held.keys()
    assert {name for name in objects if "experts" not in name and "rng" not in name} == {
        "decoder.final_norm._extra_state/shard_0_1",
        "decoder.layers.0.mixer.in_proj._extra_state/shard_0_1",
        "decoder.layers.0.mixer.out_proj._extra_state/shard_0_1",
        "decoder.layers.1.pre_mlp_layernorm._extra_state/shard_0_1",
        "decoder.layers.2.self_attention.core_attention._extra_state/shard_0_1",
        "decoder.layers.2.self_attention.linear_proj._extra_state/shard_0_1",
        "decoder.layers.2.self_attention.linear_qkv._extra_state/shard_0_1",
        "decoder.layers.3.mixer.in_proj._extra_state/shard_0_1",
        "decoder.layers.3.mixer.out_proj._extra_state/shard_0_1",
        "output_layer._extra_state/shard_0_1",
    }


def test_weights_that_core_keeps_in_fp32_are_written_in_fp32(natives, tmp_path):
    """They are written from the masters, and read both as 16-bit weights and as masters."""
    words = [*SAVE, *NETWORKS["bf16"], "--use-distributed-optimizer"]
    run_distributed(1, resave, natives("bf16"), words, tmp_path)
    held, _ = stored_tensors(open_checkpoint(tmp_path).path)
    ours = read_all(natives("bf16"))
    for name, same in {"A_log": "decay", "D": "skip"}.items():
        master = ours[f"optimizer.layers.0.attention.{same}.master"]
        assert held[f"decoder.layers.0.mixer.{name}"].dtype == torch.float32
        assert torch.equal(held[f"decoder.layers.0.mixer.{name}"], master)
        state = f"optimizer.state.param.decoder.layers.0.mixer.{name}"
        assert torch.equal(held[state], master)
    assert held["decoder.layers.0.mixer.dt_bias"].dtype == torch.bfloat16


def test_settings_are_written_as_core_has_them_and_read_again():
    config = parse(*NETWORKS["dense"], "--hybrid-layer-pattern", "M-|M*").config
    assert not list(unsupported_flags(config.model))
    assert list(unsupported_by_legacy(config.model)) == ["--hybrid-layer-pattern M-M*"]
    meta = {"consumed_train_samples": 0, "iteration": 0}
    args = vars(core_arguments(config, meta, rows=1024, dtype=torch.float32, data_parallel=1))
    assert args["is_hybrid_model"]
    assert args["hybrid_layer_pattern"] == args["hybrid_override_pattern"] == "M-M*"
    model = core_config(args)["model"]
    assert model["hybrid_layer_pattern"] == "M-M*"
    for name in MAMBA_FIELDS:
        assert model[name] == getattr(config.model, name), name


_SAVES = "--save x --save-interval 2 --ckpt-format torch_dist"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--qk-layernorm", "--hybrid-layer-pattern M-M* with --qk-layernorm: Megatron Core"),
        ("--disable-mamba-norm", "with --disable-mamba-norm: Megatron Core"),
        ("--norm-epsilon 1e-6", "with --norm-epsilon 1e-06: Megatron Core"),
        ("--bf16", "with Mamba-2 in 16 bits"),
        ("--transformer-impl local", "hybrid models only with Transformer Engine"),
    ],
)
def test_models_that_core_computes_differently_are_not_written(flags, message):
    (problem,) = problems(*NETWORKS["dense"], _SAVES, flags)
    assert message in problem


_SHAPES = {
    "decoder.final_norm.weight": (16,),
    "decoder.layers.0.mixer.A_log": (6,),
    "decoder.layers.0.mixer.D": (6,),
    "decoder.layers.0.mixer.conv1d.bias": (36,),
    "decoder.layers.0.mixer.conv1d.weight": (36, 1, 4),
    "decoder.layers.0.mixer.dt_bias": (6,),
    "decoder.layers.0.mixer.in_proj.weight": (66, 16),
    "decoder.layers.0.mixer.norm.weight": (24,),
    "decoder.layers.0.mixer.out_proj.weight": (16, 24),
    "decoder.layers.0.norm.weight": (16,),
    "decoder.layers.1.input_layernorm.weight": (16,),
    "decoder.layers.1.self_attention.linear_proj.weight": (16, 16),
    "decoder.layers.1.self_attention.linear_qkv.weight": (48, 16),
    "decoder.layers.2.mlp.linear_fc1.weight": (48, 16),
    "decoder.layers.2.mlp.linear_fc2.weight": (16, 24),
    "decoder.layers.2.pre_mlp_layernorm.weight": (16,),
    "embedding.word_embeddings.weight": (64, 16),
    "output_layer.weight": (64, 16),
}
_ARGS = {
    "num_layers": 3,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "kv_channels": 4,
    "max_position_embeddings": 12,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "add_bias_linear": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "none",
    "moe_layer_freq": 1,
    "hybrid_layer_pattern": "M*|-",
    "mamba_state_dim": 3,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_num_heads": 6,
}
# The first four logits of eight tokens, computed on a CPU by the MambaModel of Megatron Core 0.16.1
# with its local layers around its Mamba-2 mixer. With files of ours, the version of August 2026
# computes the same logits as this package.
_LOGITS = [
    [0.50216, -0.462859, -0.061224, 0.521183],
    [-0.04066, -0.080997, 0.117821, -0.031244],
    [-0.558214, 0.877928, -0.278131, -0.61297],
    [0.122881, -0.264432, 0.129027, 0.141517],
    [0.231252, -0.181026, -0.0588, 0.237041],
    [0.095684, 0.476808, -0.549909, 0.047055],
    [-0.615314, -0.442045, 1.036422, -0.545288],
    [1.340369, -0.274606, -1.078769, 1.302281],
]


def _file():
    """Return the tensors of the file that Core's sharded state dict describes."""
    weights, start = waves(_SHAPES), "decoder.layers.0."
    norm = weights.pop(f"{start}norm.weight")
    weights[f"{start}mixer.in_proj.layer_norm_weight"] = norm
    parts = {"z": 24, "x": 24, "B": 6, "C": 6, "dt": 6}
    convolved = {name: parts[name] for name in "xBC"}
    for name, rows in {
        "mixer.in_proj.weight": parts,
        "mixer.conv1d.weight": convolved,
        "mixer.conv1d.bias": convolved,
    }.items():
        pieces = weights.pop(start + name).split(list(rows.values()))
        weights |= {
            f"{start}{name}.{part}": piece for part, piece in zip(rows, pieces, strict=True)
        }
    return weights


def test_logits_are_those_that_core_computed(tmp_path):
    flags = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    found = logits_here(tmp_path, _file(), flags, _ARGS)
    assert (found - torch.tensor(_LOGITS)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_layer_pattern": None, "is_hybrid_model": True}, "is_hybrid_model is True"),
        ({"hybrid_layer_pattern": "M*G"}, "hybrid_layer_pattern is 'M.G': cannot read 'G'"),
        ({"hybrid_layer_pattern": "M*-/MM"}, "multi-token prediction"),
        ({"hybrid_layer_pattern": "M*--"}, "names 4 layers, but num_layers is 3"),
        ({"layernorm_epsilon": 1e-6}, "layernorm_epsilon is 1e-06"),
        ({"qk_layernorm": True}, "qk_layernorm is True"),
        ({"mtp_num_layers": 1}, "mtp_num_layers is 1"),
        ({"mamba_num_heads": 5}, "mamba_num_heads is 5, with 2 groups"),
        ({"mamba_num_heads": 8}, "attention.input.weight has 66 rows instead of"),
        ({"mamba_state_dim": "3"}, "mamba_state_dim is '3': it must be from 1"),
    ],
)
def test_models_that_ours_cannot_compute_are_refused(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        logits_here(tmp_path, _file(), {}, {**_ARGS, **changes})


def test_without_a_number_of_heads_core_has_twice_the_width(tmp_path):
    args = {**_ARGS, "mamba_num_heads": None, "mamba_head_dim": 4}
    with pytest.raises(CheckpointError, match="has 66 rows instead of 84"):  # 8 heads
        logits_here(tmp_path, _file(), {}, args)


def test_states_of_16_bit_models_are_converted_only_for_the_distributed_optimizer(
    natives, tmp_path
):
    words = ["--model-type", "GPT", "--loader", "native", "--saver", "torch_dist"]
    words += ["--load-dir", str(natives("bf16")), "--save-dir", str(tmp_path / "core")]
    with pytest.raises(CheckpointError, match="without --use-distributed-optimizer: convert only"):
        list(util.run(util.build_parser().read([*words, "--keep-optimizer"])))
    list(util.run(util.build_parser().read(words)))
    before, after = read_all(natives("bf16")), read_all(tmp_path / "core")
    assert after.keys() == {name for name in before if name.startswith("model.")}
    assert all(torch.equal(after[name], before[name]) for name in after)
