"""DeepSeek's folders: unsupported keys are refused by name; published models have the right
size."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.huggingface.deepseek import partly_rotated
from megatron.checkpoint.huggingface.families import families, family_for, mismatches
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.huggingface.settings import Settings
from megatron.checkpoint.huggingface.writer import Export
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, narrow
from megatron.config.yaml_file import from_dict
from megatron.errors import CheckpointError
from megatron.models.gpt import GPTModel
from megatron.models.plans import model_plan
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint.verify import transformers_model
from tests.checkpoint.huggingface.deepseek import YARN
from tests.checkpoint.huggingface.models import CASES, HIDDEN, LAYERS, tensors_of, write_folder


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05: only 1e-06"),
        ("deepseek v3", {"rope_interleave": False}, "rope_interleave false: only true"),
        ("deepseek v3", {"num_key_value_heads": 2}, "num_key_value_heads 2: only 4"),
        ("deepseek v3", {"norm_topk_prob": False}, "norm_topk_prob false: only true"),
        ("deepseek v3", {"num_experts_per_tok": 1}, "num_experts_per_tok 1: only 2 or more"),
        ("deepseek v3", {"n_group": 5}, "n_group 5: does not fit 12 experts"),
        ("deepseek v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim 5: channels rotate in pairs"),
        ("deepseek v3", {"quantization_config": {}}, "quantization_config: not supported"),
        ("deepseek v3", {"attention_bias": True}, "attention_bias true: only false"),
        ("deepseek v3", {"rope_scaling": {**YARN, "mscale": 0}}, "only together with mscale"),
        (
            "deepseek v3",
            {"rope_scaling": {**YARN, "attention_factor": 2}},
            "is not supported together with mscale_all_dim",
        ),
        ("deepseek v2", {"topk_method": "noaux_tc"}, 'topk_method "noaux_tc": supported'),
        ("deepseek v2", {"moe_layer_freq": 2}, "moe_layer_freq 2: only 1"),
        ("deepseek v2", {"q_lora_rank": None}, r"q_proj\.weight is missing"),
        ("deepseek v2", {"n_shared_experts": None}, "n_shared_experts null: expected"),
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


def test_rotating_channels_keep_their_partners() -> None:
    form = partly_rotated(5, 4)
    theirs = torch.arange(10.0).unsqueeze(1)
    ours = form.join([theirs])
    assert ours.flatten().tolist() == [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]
    assert torch.equal(form.split(ours)[0], theirs)


def test_what_the_family_cannot_express_is_named() -> None:
    config = CASES["deepseek v3 with yarn"].config
    family = families()["deepseek_v3"]
    model = family.read(Settings(config, "config.json")).model
    assert family_for(model, 70, None).name == "deepseek_v3"
    for changes in (
        {"moe_router_score_function": "softmax"},
        {"norm_epsilon": 1e-5},
        {"multi_latent_attention": False},
        {"moe_router_group_score_topk": 1},
        {"moe_shared_expert_intermediate_size": None},
        {"moe_layer_freq": "[1,0]"},
        {"mscale": 0.0},
        {"qk_layernorm": False},
        {"moe_router_enable_expert_bias": False},
    ):
        found = mismatches(family, replace(model, **changes), 70)
        assert any(line.startswith(f"{name} is ") for name in changes for line in found), changes


def test_published_models_have_their_size() -> None:
    config = {
        **CASES["deepseek v2, greedy"].config,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
    }
    assert _parameters(config) == 15_706_484_224  # DeepSeek-V2-Lite


def _parameters(config: dict[str, Any]) -> int:
    family = families()[config["model_type"]]
    described = family.read(Settings(config, "config.json"))
    assert not mismatches(family, described.model, described.vocab)
    rules = family.rules(described.model, described.vocab)
    return sum(math.prod(shape) for rule in rules for shape in rule.shapes())


def _with_depth(folder: Path, *, changed: str = "", left_out: str = "") -> Path:
    """Write a folder with a layer for multi-token prediction, as in DeepSeek-V3's own files."""
    case = CASES["deepseek v3"]
    tensors, at = tensors_of(case), f"model.layers.{LAYERS}"
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.startswith(f"model.layers.{LAYERS - 1}.")]:
        twin = name.replace(f"layers.{LAYERS - 1}.", f"layers.{LAYERS}.")
        tensors[twin] = torch.randn(tensors[name].shape, generator=generator)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{at}.{name}.weight"] = torch.randn(HIDDEN, generator=generator)
    tensors[f"{at}.eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
    tensors[f"{at}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{at}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if changed:
        tensors[f"{at}.{changed}"] += 1
    if left_out:
        del tensors[f"{at}.{left_out}"]
    return write_folder(folder, {**case.config, "num_nextn_predict_layers": 1}, tensors)


def test_layers_for_further_tokens_are_read_and_written(tmp_path: Path) -> None:
    folder = _with_depth(tmp_path / "theirs")
    reader = HFReader(folder)
    model = narrow(resolve(from_dict(reader.meta["config"], ""), 1), ModelRun).model
    assert model.mtp_num_layers == 1
    network = GPTModel(
        model_plan(model, reader.vocab), BuildContext(Layout.single(), dtype=torch.float32)
    )
    shapes = {f"model.{name}": p.shape for name, p in network.named_parameters()}
    held = {name: reader.tensors[name].shape for name in reader.names()}
    assert {name: shape for name, shape in held.items() if "expert_bias" not in name} == shapes

    export = Export(reader, reader.family, model, reader.vocab)
    theirs = load_file(folder / "model.safetensors")
    ours = {name: tensor.read() for name, tensor in export.tensors().items()}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert export.config(None)["num_nextn_predict_layers"] == 1


def test_verification_leaves_out_the_layers_that_transformers_lacks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = transformers_model(HFReader(_with_depth(tmp_path / "a")))
    assert len(model.model.layers) == LAYERS


def test_files_may_lack_the_layers_that_config_json_names(tmp_path: Path) -> None:
    case = CASES["deepseek v3"]
    config = {**case.config, "num_nextn_predict_layers": 1}
    reader = HFReader(write_folder(tmp_path, config, tensors_of(case)))
    assert reader.meta["config"]["model"]["mtp_num_layers"] is None
    assert not any(".mtp." in name for name in reader.names())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"changed": "embed_tokens.weight"}, r"2\.embed_tokens\.weight differs from model\.embed"),
        ({"changed": "shared_head.head.weight"}, "head.weight differs from lm_head.weight"),
        ({"left_out": "eh_proj.weight"}, r"2\.eh_proj\.weight is missing"),
    ],
    ids=str,
)
def test_damaged_layers_for_further_tokens_are_refused(
    changes: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        HFReader(_with_depth(tmp_path, **changes))
    # Copies may be missing.
    HFReader(_with_depth(tmp_path / "without", left_out="embed_tokens.weight"))
