"""Gated delta nets in Megatron Core's files: names, row order, optimizer states and settings."""

import pytest
import torch

from megatron.checkpoint.core.arguments import core_arguments, core_config
from megatron.checkpoint.loading import open_checkpoint
from megatron.config.attention import DELTA_FIELDS, delta_net_layers
from megatron.config.model import ModelConfig
from megatron.config.rules_legacy import unsupported_flags
from megatron.errors import CheckpointError
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

KEY_HEADS, VALUE_HEADS, KEY, VALUE, TOKENS, HIDDEN = 2, 4, 6, 5, 3, 32
DELTA = f"""
    --experimental-attention-variant gated_delta_net --linear-attention-freq 2
    --linear-num-key-heads {KEY_HEADS} --linear-num-value-heads {VALUE_HEADS}
    --linear-key-head-dim {KEY} --linear-value-head-dim {VALUE}
    --linear-conv-kernel-dim {TOKENS}
    --attention-output-gate --qk-layernorm --group-query-attention --num-query-groups 2
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --ffn-hidden-size 40
""".split()
MIXTURE = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 12 --moe-layer-freq [1,1,0,1]
    --moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate
""".split()
NETWORKS = {"dense": DELTA, "mixture": [*DELTA, *MIXTURE], "bf16": [*DELTA, "--bf16"]}
_LAYOUTS = {
    "16 bits": ("bf16", 2, {}, "--use-distributed-optimizer"),
    "TP 2": ("mixture", 2, {"tensor": 2}, "--tensor-model-parallel-size 2"),
    "PP 2": ("dense", 2, {"pipeline": 2}, "--pipeline-model-parallel-size 2"),
    "DP 4, ZeRO 3": ("dense", 4, {}, "--zero-stage 3"),
    "EP 2, ZeRO 1": (
        "mixture",
        2,
        {"expert": 2},
        "--expert-model-parallel-size 2 --use-distributed-optimizer",
    ),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_layout_saves_and_loads_the_same_bits(natives, tmp_path, layout):
    network, processes, sizes, flags = _LAYOUTS[layout]
    words = [*SAVE, *NETWORKS[network], *flags.split()]
    resave_both_ways(natives(network), words, tmp_path, processes, sizes)


KEYS, VALUES = KEY_HEADS * KEY, VALUE_HEADS * VALUE
# The rows of Core's parts of the input projection. The convolution reads the first three.
_PARTS = {
    "query": KEYS,
    "key": KEYS,
    "value": VALUES,
    "z": VALUES,
    "beta": VALUE_HEADS,
    "alpha": VALUE_HEADS,
}
_RATIO = VALUE_HEADS // KEY_HEADS


def _our_row(part, row):
    """Return the row of our input projection for a row of one of Core's parts."""
    head, offset = divmod(row, _PARTS[part] // KEY_HEADS)
    before = 0
    for name, rows in _PARTS.items():
        if name == part:
            break
        before += rows // KEY_HEADS
    return head * sum(_PARTS.values()) // KEY_HEADS + before + offset


def _our_channel(part, row):
    """Return the channel of our convolution for a row of one of Core's parts."""
    head, offset = divmod(row, _PARTS[part] // KEY_HEADS)
    before = {"query": 0, "key": KEY, "value": 2 * KEY}[part]
    return head * (2 * KEY + _RATIO * VALUE) + before + offset


def test_names_shapes_and_rows_are_those_of_core_s_layers(natives, tmp_path):
    run_distributed(1, resave, natives("mixture"), [*SAVE, *NETWORKS["mixture"]], tmp_path)
    held, objects = stored_tensors(open_checkpoint(tmp_path).path)
    ours = read_all(natives("mixture"))
    start = "decoder.layers.2.self_attention."
    expected = {
        "in_proj.layer_norm_weight": (HIDDEN,),
        **{f"in_proj.weight.{part}": (rows, HIDDEN) for part, rows in _PARTS.items()},
        **{f"conv1d.weight.{part}": (_PARTS[part], 1, TOKENS) for part in list(_PARTS)[:3]},
        "A_log": (VALUE_HEADS,),
        "dt_bias": (VALUE_HEADS,),
        "out_norm.weight": (VALUE,),
        "out_proj.weight": (HIDDEN, VALUES),
    }
    found = {
        name.removeprefix(start): tuple(value.shape)
        for name, value in held.items()
        if name.startswith(start)
    }
    assert found == expected
    for kind in ("", "exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.state.{kind}.{start}" if kind else start

        def native(name, kind=kind):
            layer = f"layers.2.attention.{name}"
            return ours[f"optimizer.{layer}.{kind}" if kind else f"model.{layer}"]

        for name in expected:
            stored = held[prefix + name]
            if name.startswith(("in_proj.weight.", "conv1d.weight.")):
                part = name.rpartition(".")[2]
                is_input = name.startswith("in_proj")
                whole = native("input.weight" if is_input else "convolution.weight")
                to_ours = _our_row if is_input else _our_channel
                rows = [to_ours(part, row) for row in range(_PARTS[part])]
                assert torch.equal(stored.flatten(1), whole[rows]), name
        for name, same in {
            "A_log": "decay",
            "dt_bias": "time_step",
            "out_norm.weight": "norm.weight",
            "out_proj.weight": "output.weight",
        }.items():
            assert torch.equal(held[prefix + name], native(same)), name
    names = {name.partition("._extra_state/")[0] for name in objects if name.startswith(start)}
    assert {name.removeprefix(start) for name in names} == {"in_proj", "out_norm", "out_proj"}
    # Layers are never stacked, and those with attention keep its names.
    assert "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight" in held
    assert "decoder.layers.2.mlp.linear_fc1.layer_norm_weight" in held
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in held


_SHAPES = {
    "decoder.final_layernorm.weight": (16,),
    "decoder.layers.0.input_layernorm.weight": (16,),
    "decoder.layers.0.mlp.linear_fc1.weight": (48, 16),
    "decoder.layers.0.mlp.linear_fc2.weight": (16, 24),
    "decoder.layers.0.pre_mlp_layernorm.weight": (16,),
    "decoder.layers.0.self_attention.A_log": (6,),
    "decoder.layers.0.self_attention.conv1d.weight": (44, 1, 3),
    "decoder.layers.0.self_attention.dt_bias": (6,),
    "decoder.layers.0.self_attention.in_proj.weight": (80, 16),
    "decoder.layers.0.self_attention.out_norm.weight": (4,),
    "decoder.layers.0.self_attention.out_proj.weight": (16, 24),
    "embedding.word_embeddings.weight": (64, 16),
    "output_layer.weight": (64, 16),
}
_ARGS = {
    "num_layers": 1,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "kv_channels": 4,
    "max_position_embeddings": 12,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "experimental_attention_variant": "gdn",  # the name since 0.20
    "linear_attention_freq": [1],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
# The first four logits of eight tokens, computed on a CPU by the GPTModel of Megatron Core 0.16.1
# with its local layers around its gated delta net. With files of ours, the version of August 2026
# computes the same logits as this package.
_LOGITS = [
    [-0.12009, -0.145007, 0.258229, -0.100991],
    [-0.279927, 0.441662, -0.140817, -0.307515],
    [-0.884719, 0.734349, 0.185152, -0.910731],
    [-0.558358, -0.585669, 1.116287, -0.477747],
    [-0.020955, 0.377569, -0.33873, -0.054882],
    [-0.824119, 1.142278, -0.264056, -0.890728],
    [-0.691604, -0.095939, 0.782999, -0.649974],
    [0.667876, -0.479394, -0.211189, 0.68058],
]


def _file(parts=(10, 10, 24, 24, 6, 6)):
    """Return the tensors of the file that Core's sharded state dict describes."""
    weights = waves(_SHAPES)
    for module in ("in_proj", "conv1d"):
        name = f"decoder.layers.0.self_attention.{module}.weight"
        count = len(parts) if module == "in_proj" else 3
        rows = weights.pop(name).split(parts[:count])
        weights |= {
            f"{name}.{part}": value for part, value in zip(list(_PARTS)[:count], rows, strict=True)
        }
    return weights


def test_logits_are_those_that_core_computed(tmp_path):
    found = logits_here(tmp_path, _file(), {}, _ARGS)
    assert (found - torch.tensor(_LOGITS)).abs().max() < 1e-5


_IN = "decoder.layers.0.self_attention.in_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.pop(f"{_IN}.z"), "attention.input.weight has 56 rows instead of 80"),
        (
            lambda file: file.update({f"{_IN}.z": torch.zeros(23, 16)}),
            "attention.input.weight has 79 rows instead of 80",
        ),
        (
            lambda file: file.update({_IN: torch.zeros(80, 16)}),
            "attention.input.weight has 160 rows instead of 80",
        ),
        (
            lambda file: file.update({f"{_IN}.z": torch.zeros(24, 15)}),
            "expected query",
        ),
        (lambda file: file.update({f"{_IN}.z": file[f"{_IN}.z"].half()}), "all of one type"),
        (
            lambda file: file.update(
                {_IN: torch.cat([file.pop(name) for name in list(file) if _IN in name])}
            ),
            "expected query",
        ),
    ],
    ids=["missing", "short", "whole as well", "narrow", "half", "whole"],
)
def test_parts_that_do_not_make_up_a_projection_are_refused(tmp_path, change, message):
    file = _file()
    change(file)
    with pytest.raises(CheckpointError, match=message):
        logits_here(tmp_path, file, {}, _ARGS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma is True"),
        ({"swiglu": False}, "swiglu is False"),
        ({"experimental_attention_variant": "gdn2"}, "experimental_attention_variant is 'gdn2'"),
        ({"linear_num_key_heads": 4}, "linear_num_value_heads is 6, with 4 key heads"),
        ({"experimental_attention_variant": None}, "a network without gated delta nets"),
    ],
)
def test_networks_that_ours_cannot_compute_are_refused(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        logits_here(tmp_path, _file(), {}, {**_ARGS, **changes})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--apply-layernorm-1p", "with --apply-layernorm-1p"),
        ("--normalization LayerNorm", "with --normalization LayerNorm"),
    ],
)
def test_flags_that_core_computes_differently_are_not_written(flags, message):
    (refused,) = unsupported_flags(parse("--num-layers 4", " ".join(DELTA), flags).config.model)
    assert refused == f"--experimental-attention-variant gated_delta_net {message}"


@pytest.mark.parametrize("frequency", ["2", "[0,1,1,0]"])
def test_settings_are_written_as_core_has_them_and_read_again(frequency):
    flags = f"{' '.join(DELTA)} --linear-attention-freq {frequency}"
    config = parse("--num-layers 4", flags).config
    assert not list(unsupported_flags(config.model))
    meta = {"consumed_train_samples": 0, "iteration": 0}
    args = vars(core_arguments(config, meta, rows=1024, dtype=torch.float32, data_parallel=1))
    assert args["linear_attention_freq"] == ([1, 0, 1, 0] if frequency == "2" else [0, 1, 1, 0])
    model = ModelConfig(**{**vars(config.model), **core_config(args)["model"]})
    assert delta_net_layers(model, 4) == delta_net_layers(config.model, 4)
    for name in DELTA_FIELDS[1:]:
        assert getattr(model, name) == getattr(config.model, name), name


def test_local_layers_do_not_exist_in_core():
    words = "--save x --save-interval 2 --ckpt-format torch_dist --transformer-impl local"
    (problem,) = problems("--num-layers 4", *DELTA, words)
    assert "Megatron Core has gated delta nets and hybrid models only with" in problem
