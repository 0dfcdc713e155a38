"""Mixtures of experts: a rank reads only its own experts, and wrong files are refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.entries import Box, Entry
from megatron.checkpoint.huggingface.families import families, family_for, mismatches
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.huggingface.settings import Settings
from megatron.checkpoint.reader import restore
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, narrow
from megatron.config.yaml_file import from_dict
from megatron.errors import CheckpointError
from tests.checkpoint.huggingface.models import CASES, HIDDEN, Tensors, tensors_of, write_folder
from tests.tools.test_checkpoint_util import convert

LAYER = "model.layers.1.block_sparse_moe"
UP, DOWN = "model.layers.1.mlp.experts.up.weight", "model.layers.1.mlp.experts.down.weight"


def _folder(path: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    case = CASES["mixtral"]
    given = tensors_of(case) if tensors is None else tensors
    return write_folder(path, {**case.config, **changes}, given)


def test_gate_and_up_of_each_expert_are_stacked(tmp_path: Path) -> None:
    reader, theirs = HFReader(_folder(tmp_path)), tensors_of(CASES["mixtral"])
    assert reader.global_shape(UP) == (6, 2, 22, HIDDEN)
    for expert in range(6):
        gate, up = reader.read(UP)[expert]
        assert torch.equal(gate, theirs[f"{LAYER}.experts.{expert}.w1.weight"])
        assert torch.equal(up, theirs[f"{LAYER}.experts.{expert}.w3.weight"])
        down = theirs[f"{LAYER}.experts.{expert}.w2.weight"]
        assert torch.equal(reader.read(DOWN)[expert], down)


def test_a_part_is_read_from_the_tensors_of_its_experts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = HFReader(_folder(tmp_path))
    whole, loaded = reader.read(UP), list[str]()
    load = type(reader._files[f"{LAYER}.gate.weight"]).load
    names = {id(held): name for name, held in reader._files.items()}

    def noted(held: Any) -> torch.Tensor:
        loaded.append(names[id(held)])
        return load(held)

    monkeypatch.setattr(type(reader._files[f"{LAYER}.gate.weight"]), "load", noted)
    wanted = Box((2, 0, 11, 0), (3, 2, 11, HIDDEN))
    assert torch.equal(reader.read(UP, wanted), whole[2:5, :, 11:])
    expected = [
        f"{LAYER}.experts.{expert}.{w}.weight" for expert in (2, 3, 4) for w in ("w1", "w3")
    ]
    assert loaded == expected


def test_a_conversion_and_a_load_read_one_expert_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither holds all experts of a layer."""
    largest, read = 0, HFReader._read

    def watched(reader: HFReader, name: str, wanted: Box) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, wanted.volume if ".experts." in name else 0)
        return read(reader, name, wanted)

    monkeypatch.setattr(HFReader, "_read", watched)
    folder = _folder(tmp_path / "original")
    assert convert("hf", "native", folder, tmp_path / "native") == 0
    assert largest == 2 * 22 * HIDDEN
    assert convert("hf", "hf", folder, tmp_path / "again") == 0
    assert largest == 2 * 22 * HIDDEN
    values = torch.zeros(3, 2, 22, HIDDEN)  # for one expert-parallel rank
    reader = HFReader(folder)
    restore(reader, {UP: Entry(values, (6, 2, 22, HIDDEN), (3, 0, 0, 0))})
    assert largest == 2 * 22 * HIDDEN
    assert torch.equal(values, reader.read(UP)[3:])


def test_megatron_s_files_have_no_place_for_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("hf", "megatron", _folder(tmp_path / "a"), tmp_path / "b") != 0
    assert "mlp.experts.down.weight does not exist in Megatron-LM" in capsys.readouterr().err


def _without(name: str) -> Tensors:
    return {key: value for key, value in tensors_of(CASES["mixtral"]).items() if key != name}


def test_wrong_files_are_refused_by_name(tmp_path: Path) -> None:
    missing = f"{LAYER}.experts.4.w3.weight"
    with pytest.raises(CheckpointError, match=rf"{missing} is missing"):
        HFReader(_folder(tmp_path / "missing", _without(missing)))
    name = f"{LAYER}.experts.2.w2.weight"
    wide = {**_without(name), name: torch.zeros(HIDDEN, 23)}
    with pytest.raises(CheckpointError, match=rf"{name} is .*config.json says \[32, 22\]"):
        HFReader(_folder(tmp_path / "wide", wide))
    one_more = {**_without(""), f"{LAYER}.experts.6.w1.weight": torch.zeros(22, HIDDEN)}
    with pytest.raises(CheckpointError, match=r"experts\.6\.w1\.weight does not exist"):
        HFReader(_folder(tmp_path / "more", one_more))
    half = {**_without(name), name: torch.zeros(HIDDEN, 22).half()}
    with pytest.raises(CheckpointError, match="have several types"):
        HFReader(_folder(tmp_path / "half", half))
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(CheckpointError, match=rf"{fused} contains all experts .* save_pretrained"):
        HFReader(_folder(tmp_path / "fused", {**_without(""), fused: torch.zeros(6, 44, HIDDEN)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 0}, "num_local_experts 0: expected an integer from 1"),
        ({"num_local_experts": 10**6}, "num_local_experts 1000000: expected an integer from 1 to"),
        ({"num_experts": 5}, "num_experts 5: only 6"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7: expected an integer from 1 to 6"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok null: expected"),
        ({"n_shared_experts": 1}, "n_shared_experts: not supported"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu": only "silu"'),
    ],
    ids=str,
)
def test_other_networks_are_refused_by_key(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        HFReader(_folder(tmp_path, **changes))


def test_the_number_of_experts_has_two_names(tmp_path: Path) -> None:
    folder = _folder(tmp_path, num_local_experts=None, num_experts=6)
    assert HFReader(folder).meta["config"]["model"]["num_experts"] == [6]


def _qwen(path: Path, name: str = "qwen2 mixture", **changes: Any) -> Path:
    case = CASES[name]
    return write_folder(path, {**case.config, **changes}, tensors_of(case))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [2]}, r"mlp_only_layers \[2\]: expected a list of integers"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers \[true\]: expected a list of integers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0: expected an integer from 1"),
        ({"mlp_only_layers": []}, r"layers\.0\.mlp\.gate\.weight is missing"),
        ({"moe_intermediate_size": 11}, r"experts\.0\.gate_proj\.weight is .* says \[11, 32\]"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size null"),
        ({"qkv_bias": False}, r"q_proj\.bias does not exist"),
        ({"norm_topk_prob": 1}, "norm_topk_prob 1: expected true or false"),
        ({"model_type": "qwen3_moe"}, "shared_expert_intermediate_size: not supported"),
    ],
    ids=str,
)
def test_other_networks_of_qwen_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        HFReader(_qwen(tmp_path, **changes))


@pytest.mark.parametrize(
    ("step", "dense", "pattern"),
    [(1, [], "1"), (1, [0], "[0,1]"), (2, [], "[0,1]"), (3, [], "[0,0]")],
)
def test_mixture_layers_are_those_of_transformers(
    step: int, dense: list[int], pattern: str
) -> None:
    config = {**CASES["qwen3 mixture"].config, "decoder_sparse_step": step}
    config["mlp_only_layers"] = dense
    family = families()["qwen3_moe"]
    model = family.read(Settings(config, "config.json")).model
    assert model.moe_layer_freq == pattern
    assert not mismatches(family, model, 70)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv 8.0: clipped queries, keys and values are not supported"),
        ({"head_dim": 16}, "head_dim 16: only 8 is supported"),
        ({"norm_topk_prob": "no"}, 'norm_topk_prob "no": expected true or false'),
        ({"attention_bias": True}, "attention_bias true: only false"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: not supported"),
        ({"num_key_value_heads": 4}, r"k_norm\.weight is F32 \[16\], but config.json says \[32\]"),
    ],
    ids=str,
)
def test_other_networks_of_olmoe_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = CASES["olmoe"]
    folder = write_folder(tmp_path, {**case.config, **changes}, tensors_of(case))
    with pytest.raises(CheckpointError, match=message):
        HFReader(folder)


def test_families_differ_in_what_is_normalized_together(tmp_path: Path) -> None:
    case = CASES["olmoe"]
    folder = write_folder(tmp_path, case.config, tensors_of(case))
    assert family_for(_model(folder), 70, None).name == "olmoe"
    by_head = _model(folder, qk_layernorm_scope="head")
    assert family_for(by_head, 70, None).name == "qwen3_moe"
    assert "qk_layernorm_scope is head, but a olmoe model has projection" in mismatches(
        families()["olmoe"], by_head, 70
    )
    wide = mismatches(families()["olmoe"], _model(folder, kv_channels=12), 70)
    assert wide == ["kv_channels is 12, but a olmoe model has 8"]


def test_what_transformers_5_writes_for_no_window_is_no_window(tmp_path: Path) -> None:
    folder = _qwen(tmp_path, sliding_window=0, max_window_layers=28)
    assert _model(folder).window_size is None


def _model(folder: Path, **changes: Any) -> Any:
    config = HFReader(folder).meta["config"]
    config["model"] |= changes
    return narrow(resolve(from_dict(config, "a"), 1), ModelRun).model


def test_a_network_that_means_the_same_is_written(tmp_path: Path) -> None:
    """A pattern of ones, an explicit expert width, and a dense width that no layer uses."""
    folder = _folder(tmp_path)
    model = _model(
        folder,
        moe_layer_freq="([1]*2)",
        moe_ffn_hidden_size=22,
        ffn_hidden_size=128,
        num_experts=[6, 6],  # one number per layer
    )
    family = family_for(model, 70, None)
    assert family.name == "mixtral"
    written = family.write(model, 70)
    expected = json.loads((folder / "config.json").read_text())
    for key in ("intermediate_size", "num_local_experts", "num_experts_per_tok"):
        assert written[key] == expected[key], key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layer_freq": "2"}, r"moe_layer_freq is 2, but a mixtral model has 1"),
        ({"num_experts": [6, 4]}, r"num_experts is \(6, 4\), but a mixtral model has \(6,\)"),
        ({"moe_router_pre_softmax": True}, "moe_router_pre_softmax is True"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function is sigmoid"),
        ({"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size is 8"),
        ({"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor is 2.5"),
    ],
    ids=str,
)
def test_what_the_family_cannot_express_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = _model(_folder(tmp_path), **changes)
    with pytest.raises(CheckpointError, match=message):
        family_for(model, 70, "mixtral")


def test_settings_of_experts_mean_nothing_to_a_dense_network(tmp_path: Path) -> None:
    case = CASES["llama"]
    model = _model(write_folder(tmp_path, case.config, tensors_of(case)), moe_router_topk=5)
    assert family_for(model, 70, None).name == "llama"
    found = mismatches(family_for(_model(_folder(tmp_path / "b")), 70, None), model, 70)
    assert "num_experts is None, but a mixtral model has (1,)" in found


# The networks of published models, with their numbers of tensors and parameters.
_PUBLISHED: list[tuple[dict[str, Any], int, int]] = [
    (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "vocab_size": 32000,
        },
        995,
        46_702_792_704,
    ),
    (
        {
            "model_type": "qwen2_moe",
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_window_layers": 21,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        4659,
        14_315_784_192,
    ),
    (
        {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        18867,
        30_532_122_624,
    ),
    (
        {
            "model_type": "olmoe",
            "attention_bias": False,
            "clip_qkv": None,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "vocab_size": 50304,
        },
        3219,
        6_919_161_856,
    ),
]


@pytest.mark.parametrize(
    ("config", "tensors", "parameters"), _PUBLISHED, ids=["8x7B", "A2.7B", "30B-A3B", "1B-7B"]
)
def test_published_models_have_their_size(
    config: dict[str, Any], tensors: int, parameters: int
) -> None:
    common = {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    family = families()[config["model_type"]]
    described = family.read(Settings({**common, **config}, "config.json"))
    rules = family.rules(described.model, described.vocab)
    shapes = [shape for rule in rules for shape in rule.shapes()]
    assert len(shapes) == sum(len(rule.hf_names) for rule in rules) == tensors
    assert sum(math.prod(shape) for shape in shapes) == parameters
    assert not mismatches(family, described.model, described.vocab)
