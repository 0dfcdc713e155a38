"""Latent attention in Megatron Core's files: names, row order, optimizer states and settings."""

import itertools

import pytest
import torch

from megatron.checkpoint.core.arguments import core_arguments, core_config
from megatron.checkpoint.core.rows import row_order
from megatron.checkpoint.loading import open_checkpoint
from megatron.config.attention import LATENT_FIELDS, YARN_FIELDS
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
from tests.config.command import parse
from tests.distributed import run_distributed

HEADS, HIDDEN, QUERY_RANK, RANK, STILL, ROTATED, VALUE = 4, 32, 24, 20, 12, 6, 14
LATENT = f"""
    --multi-latent-attention --kv-lora-rank {RANK} --qk-head-dim {STILL}
    --qk-pos-emb-head-dim {ROTATED} --v-head-dim {VALUE} --qk-layernorm
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --ffn-hidden-size 40
""".split()
MIXTURE = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 12 --moe-layer-freq [0,1,1,1]
    --moe-shared-expert-intermediate-size 8 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --mtp-num-layers 1
""".split()
YARN = """
    --rope-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8
    --yarn-beta-fast 2 --yarn-beta-slow 0.5 --mscale 0.5 --mscale-all-dim 0.75
""".split()
NETWORKS = {
    "DeepSeek-V2-Lite": LATENT,
    "DeepSeek-V3": [*LATENT, "--q-lora-rank", str(QUERY_RANK), *MIXTURE],
    "YaRN": [*LATENT, "--q-lora-rank", str(QUERY_RANK), *YARN],
    "learned positions": [*LATENT, "--position-embedding-type", "learned_absolute"],
}
# Network, processes, layout, flags. ZeRO divides rows without regard to heads.
_LAYOUTS = {
    "one process": ("DeepSeek-V2-Lite", 1, {}, "--transformer-impl local"),
    "TP 2": ("DeepSeek-V3", 2, {"tensor": 2}, "--tensor-model-parallel-size 2"),
    "PP 2": ("DeepSeek-V2-Lite", 2, {"pipeline": 2}, "--pipeline-model-parallel-size 2"),
    "PP 2, learned": ("learned positions", 2, {"pipeline": 2}, "--pipeline-model-parallel-size 2"),
    "DP 4, ZeRO 3": ("DeepSeek-V2-Lite", 4, {}, "--zero-stage 3"),
    "EP 2, ZeRO 1": (
        "DeepSeek-V3",
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


def _pairs(head, size):
    """Yield our row and Core's row for each row of a head whose last rows rotate."""
    for channel in range(size):
        yield head * size + channel, head * size + channel
    for channel in range(size - ROTATED, size):
        half, place = divmod(channel - (size - ROTATED), ROTATED // 2)
        yield head * size + channel, head * size + size - ROTATED + 2 * place + half


def _core_rows(value, heads, size):
    expected = torch.empty_like(value)
    for head in range(heads):
        for ours, cores in _pairs(head, size):
            expected[cores] = value[ours]
    return expected


_ATTENTION = {
    "linear_q_down_proj.weight": ("attention.query_down.weight", (QUERY_RANK, HIDDEN)),
    "linear_q_up_proj.weight": (
        "attention.query_up.weight",
        (HEADS * (STILL + ROTATED), QUERY_RANK),
    ),
    "linear_kv_down_proj.weight": ("attention.latent_down.weight", (RANK + ROTATED, HIDDEN)),
    "linear_kv_up_proj.weight": ("attention.latent_up.weight", (HEADS * (STILL + VALUE), RANK)),
    "linear_proj.weight": ("attention.output.weight", (HIDDEN, HEADS * VALUE)),
}
# The normalizations and their sizes by implementation of layers.
_NORMS = {
    "transformer_engine": {
        "linear_q_up_proj.layer_norm_weight": ("attention.query_norm.weight", (QUERY_RANK,)),
        "linear_kv_up_proj.layer_norm_weight": ("attention.latent_norm.weight", (RANK,)),
    },
    "local": {
        "q_layernorm.weight": ("attention.query_norm.weight", (QUERY_RANK,)),
        "kv_layernorm.weight": ("attention.latent_norm.weight", (RANK,)),
    },
}
_LINEARS = [f"linear_{name}_proj" for name in ("q_down", "q_up", "kv_down", "kv_up")]


@pytest.mark.parametrize("implementation", _NORMS)
def test_names_shapes_and_rows_are_those_of_core_s_layers(natives, tmp_path, implementation):
    words = [*SAVE, *NETWORKS["DeepSeek-V3"], "--transformer-impl", implementation]
    run_distributed(1, resave, natives("DeepSeek-V3"), words, tmp_path)
    held, objects = stored_tensors(open_checkpoint(tmp_path).path)
    ours, is_engine = read_all(natives("DeepSeek-V3")), implementation == "transformer_engine"
    layers = {f"decoder.layers.{layer}": f"layers.{layer}" for layer in range(4)}
    layers["mtp.layers.0.transformer_layer"] = "mtp.0.layer"
    for core_layer, native_layer in layers.items():
        is_dense = native_layer == "layers.0"
        mlp_norm = "pre_mlp_layernorm.weight"
        if is_dense and is_engine:
            mlp_norm = "mlp.linear_fc1.layer_norm_weight"
        attention = _ATTENTION | _NORMS[implementation]
        expected = {
            "input_layernorm.weight": ("attention_norm.weight", (HIDDEN,)),
            mlp_norm: ("mlp_norm.weight", (HIDDEN,)),
            **{f"self_attention.{name}": attention[name] for name in attention},
        }
        found = {
            name.removeprefix(f"{core_layer}.")
            for name in held
            if name.startswith(f"{core_layer}.") and ("norm" in name or "attention" in name)
        }
        assert found == set(expected)
        for name, (native, shape) in expected.items():
            assert held[f"{core_layer}.{name}"].shape == shape
            for core_kind, prefix, suffix in (
                ("", "model.", ""),
                ("optimizer.state.exp_avg.", "optimizer.", ".exp_avg"),
                ("optimizer.state.exp_avg_sq.", "optimizer.", ".exp_avg_sq"),
            ):
                value = ours[f"{prefix}{native_layer}.{native}{suffix}"]
                if "query_up" in native:
                    value = _core_rows(value, HEADS, STILL + ROTATED)
                if "latent_down" in native:
                    value = _core_rows(value, 1, RANK + ROTATED)
                assert torch.equal(held[f"{core_kind}{core_layer}.{name}"], value), name
        states = {f"self_attention.{name}" for name in (*_LINEARS, "linear_proj")}
        if is_engine:
            states |= {"input_layernorm", "self_attention.core_attention"}
            states |= set() if is_dense else {"pre_mlp_layernorm"}
        start = f"{core_layer}."
        names = {name.partition("._extra_state/")[0] for name in objects if start in name}
        of_attention = {name.removeprefix(start) for name in names if ".mlp." not in name}
        assert of_attention == states


_SHAPES = {
    "decoder.final_layernorm.weight": (16,),
    "decoder.layers.0.input_layernorm.weight": (16,),
    "decoder.layers.0.mlp.linear_fc1.weight": (48, 16),
    "decoder.layers.0.mlp.linear_fc2.weight": (16, 24),
    "decoder.layers.0.pre_mlp_layernorm.weight": (16,),
    "decoder.layers.0.self_attention.kv_layernorm.weight": (10,),
    "decoder.layers.0.self_attention.linear_kv_down_proj.weight": (14, 16),
    "decoder.layers.0.self_attention.linear_kv_up_proj.weight": (48, 10),
    "decoder.layers.0.self_attention.linear_proj.weight": (16, 24),
    "decoder.layers.0.self_attention.linear_q_down_proj.weight": (9, 16),
    "decoder.layers.0.self_attention.linear_q_up_proj.weight": (40, 9),
    "decoder.layers.0.self_attention.q_layernorm.weight": (9,),
    "embedding.word_embeddings.weight": (64, 16),
    "output_layer.weight": (64, 16),
}
_ARGS = {
    "num_layers": 1,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "max_position_embeddings": 12,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 9,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": None,  # YaRN
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "mscale": 0.5,
    "mscale_all_dim": 0.75,
}
# The first four logits of eight tokens, computed on a CPU by the GPTModel of Megatron Core 0.16.1
# with its local layers. The version of August 2026 (d98e8a64dd) computes the same.
_LOGITS = [
    [0.206776, 0.067771, -0.271337, 0.190714],
    [0.15686, 0.611592, -0.739484, 0.092867],
    [-0.64618, -0.211182, 0.84736, -0.596044],
    [0.062287, -0.562851, 0.473906, 0.111391],
    [0.425201, 0.36119, -0.769283, 0.371657],
    [-0.591295, 1.038336, -0.397861, -0.659319],
    [-0.370037, -0.695943, 1.033017, -0.288146],
    [1.944725, -0.764261, -1.216663, 1.923298],
]


def test_logits_are_those_that_core_computed(tmp_path):
    found = logits_here(tmp_path, waves(_SHAPES), {"attention_dropout": 0.0}, _ARGS)
    assert (found - torch.tensor(_LOGITS)).abs().max() < 1e-5


@pytest.mark.parametrize("heads", [1, 3])
def test_every_range_of_rows_is_found(heads):
    sizes = {"num_attention_heads": heads, "qk_head_dim": 5, "qk_pos_emb_head_dim": 6}
    model = {"multi_latent_attention": True, "kv_lora_rank": 5, **sizes}
    rows = heads * 11
    order = row_order(model, "mtp.0.layer.attention.query_up.weight", rows)
    cores = torch.full((rows,), -1)
    cores[order.positions] = torch.arange(rows)
    for start, stop in itertools.combinations(range(rows + 1), 2):
        seen = torch.full((stop - start,), -1)
        for _, first, count, index in order.runs(start, stop - start):
            seen[index] = cores[first : first + count]
        assert torch.equal(seen, torch.arange(start, stop))
    assert len(list(order.runs(0, rows))) == 1


_META = {"consumed_train_samples": 0, "iteration": 0}


@pytest.mark.parametrize("network", NETWORKS)
def test_settings_are_written_as_core_has_them_and_read_again(network):
    config = parse("--num-layers 4", " ".join(NETWORKS[network])).config
    model = config.model
    assert not list(unsupported_flags(model))
    args = vars(core_arguments(config, _META, rows=1024, dtype=torch.float32, data_parallel=1))
    assert args["kv_channels"] == VALUE
    if network == "YaRN":
        assert (args["rope_type"], args["original_max_position_embeddings"]) == ("yarn", 8)
        assert (args["beta_fast"], args["beta_slow"]) == (2, 0.5)
    again = core_config(args)["model"]
    for name in ("kv_channels", "position_embedding_type", *LATENT_FIELDS, *YARN_FIELDS):
        assert again.get(name, getattr(ModelConfig, name, None)) == getattr(model, name), name


PLAIN = {"rope_type": None, "mscale": 1.0, "mscale_all_dim": 0.0}


def _read(**changes):
    return core_config({**_ARGS, **changes})["model"]


def test_rotary_embeddings_are_yarn_s_unless_it_changes_nothing():
    defaults = {"rotary_scaling_factor": 40, "rope_type": None}
    bare = {name: value for name, value in _ARGS.items() if not name.startswith(("beta", "orig"))}
    assert (
        core_config({**bare, **defaults})["model"]["yarn_original_max_position_embeddings"] == 4096
    )
    assert "rope_type" not in core_config({**bare, "rotary_scaling_factor": 1.0, **PLAIN})["model"]
    assert _read(rotary_scaling_factor=1.0)["rope_type"] == "yarn"
    assert "rope_type" not in _read(rope_type="rope", mscale_all_dim=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "rope"}, "mscale_all_dim is 0.75: such networks"),
        ({"position_embedding_type": "relative"}, "position_embedding_type is"),
        ({"use_rope_scaling": True}, "use_rope_scaling is True"),
        ({"rotary_seq_len_interpolation_factor": 2}, "interpolation_factor is 2"),
        ({"no_rope_freq": [0]}, r"no_rope_freq is \[0\]"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ({"group_query_attention": True}, "group_query_attention is True"),
        ({"qk_pos_emb_head_dim": 3}, "qk_pos_emb_head_dim is 3: channels rotate in pairs"),
        ({"v_head_dim": "wide"}, "v_head_dim is 'wide': it must be from 1 to"),
        ({"qk_head_dim": 1 << 40}, "qk_head_dim is 1099511627776: it must be"),
        ({"multi_latent_attention": False}, "rotary_scaling_factor is 4.0: such networks"),
    ],
)
def test_networks_that_ours_cannot_compute_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        _read(**changes)


def test_scores_of_older_versions_are_refused():
    older = {name: value for name, value in _ARGS.items() if name != "rope_type"}
    with pytest.raises(CheckpointError, match="Megatron Core before 0.14"):
        core_config(older)


@pytest.mark.parametrize(
    "flags",
    [
        "--no-rope-freq 2",
        "--use-rope-scaling",
        "--rotary-seq-len-interpolation-factor 2",
        f"{' '.join(YARN)} --no-yarn-correction-range-round-to-int",
    ],
)
def test_flags_that_core_ignores_are_not_written(flags):
    model = parse("--num-layers 4", " ".join(LATENT), flags).config.model
    (refused,) = unsupported_flags(model)
    flag = flags.rpartition("--")[2] if "yarn" in flags else flags.removeprefix("--")
    assert refused == f"--multi-latent-attention with --{flag}"


_OTHER = {
    "rows": ({"num_attention_heads": 5}, "attention.query_up.weight has 40 rows instead of 50"),
    "attention": ({"multi_latent_attention": False}, "does not exist in a network with ordinary"),
}


@pytest.mark.parametrize("case", _OTHER)
def test_arguments_of_another_network_are_refused(tmp_path, case):
    changes, message = _OTHER[case]
    changes = {"rotary_scaling_factor": 1.0, **changes}
    with pytest.raises(CheckpointError, match=message):
        logits_here(tmp_path, waves(_SHAPES), {}, {**_ARGS, **changes})
