"""What a downloaded folder may contain, and what is refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.reader import HFReader
from megatron.errors import CheckpointError
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder

LLAMA = CASES["llama"]


def folder_with(tmp_path: Path, name: str = "llama", **changes: Any) -> Path:
    case = CASES[name]
    return write_folder(tmp_path, {**case.config, **changes}, tensors_of(case))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "mamba"}, "model_type 'mamba' is not supported: choose from llama,"),
    ("llama", {"hidden_act": "relu"}, 'hidden_act "relu": only "silu" is supported'),
    ("llama", {"attention_bias": True}, "attention_bias true: only false"),
    ("llama", {"mlp_bias": True}, "mlp_bias true: only false"),
    ("llama", {"hidden_size": "32"}, 'hidden_size "32": expected an integer'),
    ("llama", {"hidden_size": True}, "hidden_size true: expected an integer"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000: expected an integer"),
    ("llama", {"num_attention_heads": -4}, "num_attention_heads -4: expected an integer"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3: does not divide 4 heads"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps null: expected a number above 0"),
    ("llama", {"rope_theta": 1e400}, "rope_theta Infinity: expected a number above 0"),
    ("llama", {"rope_theta": float("nan")}, "rope_theta NaN: expected a number above 0"),
    ("llama", {"rope_theta": 10**400}, "expected a number above 0"),
    ("llama", {"rope_theta": True}, "rope_theta true: expected a number above 0"),
    ("llama", {"rms_norm_eps": "1e-5"}, 'rms_norm_eps "1e-5": expected a number above 0'),
    ("llama", {"hidden_size": 32.0}, "hidden_size 32.0: expected an integer"),
    ("llama", {"hidden_size": 10**400}, "expected an integer"),
    ("llama", {"vocab_size": float("nan")}, "vocab_size NaN: expected an integer"),
    ("llama", {"attention_dropout": -1.0}, "attention_dropout -1.0: expected a number in [0, 1)"),
    ("llama", {"attention_dropout": 10**400}, "expected a number in [0, 1)"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings 1: expected true or false"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: not supported"),
    ("llama", {"auto_map": {"AutoModel": "evil.Evil"}}, "auto_map: not supported"),
    ("llama", {"_attn_implementation_internal": "x/y"}, "_attn_implementation_internal: not"),
    (
        "llama",
        {"rope_scaling": {"type": "longrope", "factor": 4.0}},
        'type "longrope": supported: d',
    ),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        "factor 0.5: must be at least 1",
    ),
    (
        "llama 3.2",
        {
            "rope_scaling": {
                **CASES["llama 3.2"].config["rope_scaling"],
                "original_max_position_embeddings": 4096,
            }
        },
        "original_max_position_embeddings 4096: only 8192",
    ),
    ("mistral", {"num_key_value_heads": None}, "num_key_value_heads null: expected an integer"),
    ("qwen2", {"layer_types": ["linear_attention"] * 2}, "linear_attention is not supported"),
    ("qwen2", {"use_mrope": True}, "use_mrope true: only false"),
    ("gpt2", {"pruned_heads": {"0": [1]}}, "only {} is supported"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved true: only false"),
    ("qwen3", {"attention_bias": True}, "attention_bias true: only false"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx true: only false"),
    ("gpt2", {"activation_function": "relu"}, 'activation_function "relu": supported: gelu'),
    ("gpt2", {"n_head": 5}, "n_head 5: does not divide n_embd 32"),
    ("llama", {"intermediate_size": 40}, "config.json says [40, 32]"),
    ("llama", {"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
    ("llama", {"num_hidden_layers": 1}, "does not exist in a llama model"),
    ("llama", {"tie_word_embeddings": True}, "lm_head.weight differs from the word embeddings"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=str)
def test_what_our_network_cannot_express_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        HFReader(folder_with(tmp_path, name, **changes))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


# Keys in published folders that do not affect the network.
PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"use_mrope": False}),  # Qwen2.5
    ("llama", {"is_llama_config": True, "rope_interleaved": False}),  # SmolLM2
    ("llama", {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
    ("llama", {"max_length": 4096, "temperature": 0.9, "top_p": 0.6}),  # the first Llama 2's
    ("gpt2", {"n_special": 0, "predict_special_tokens": True}),  # gpt2-medium
    ("gpt2", {"_num_labels": 1, "gradient_checkpointing": False}),  # distilgpt2
    ("llama", {"max_sequence_length": 2048}),  # the first LLaMA's
    ("gpt2", {"num_labels": 2, "pruned_heads": {}, "use_bfloat16": False}),  # written in 2019
]


@pytest.mark.parametrize(("name", "keys"), PUBLISHED, ids=str)
def test_keys_of_published_folders_are_known(
    name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    plain = HFReader(folder_with(tmp_path / "plain", name))
    found = HFReader(folder_with(tmp_path / "published", name, **keys))
    assert found.meta["config"] == plain.meta["config"]


def test_all_misfitting_tensors_are_shown_at_once(tmp_path: Path) -> None:
    tensors = tensors_of(LLAMA)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(16, 32).bfloat16()
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError) as caught:
        HFReader(write_folder(tmp_path, LLAMA.config, tensors))
    for text in ("norm.weight is F8_E4M3: only", "have several types", "lm_head.weight is missing"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("window", "flag"), [(8, "7,0"), (23, "22,0"), (24, None), (4096, None), (None, None)]
)
def test_a_window_is_read_if_it_limits_attention(window, flag, tmp_path: Path) -> None:
    reader = HFReader(folder_with(tmp_path, "mistral", sliding_window=window))
    model = reader.meta["config"]["model"]
    assert model.get("window_size") == flag
    assert model["max_position_embeddings"] == 24


def _refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        HFReader(folder)
    return str(caught.value)


def test_pickles_are_named_and_not_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in _refusal(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "neither model.safetensors nor" in _refusal(folder)


@pytest.mark.parametrize(
    "place", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 3]
)
def test_an_index_names_files_of_its_folder_only(place: Any, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", LLAMA.config, tensors_of(LLAMA), shards=2)
    write_folder(tmp_path, LLAMA.config, tensors_of(LLAMA))
    (tmp_path / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = place
    index.write_text(json.dumps(content))
    assert "is not a valid shard name" in _refusal(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_links_out_of_the_folder_are_not_followed(file: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model")
    (folder / file).rename(tmp_path / file)
    (folder / file).symlink_to(tmp_path / file)
    assert "a link out of the folder" in _refusal(folder)


def test_the_hub_s_cache_is_read(tmp_path: Path) -> None:
    """Its snapshots are links to the blobs of the same model."""
    folder = folder_with(tmp_path / "models--x--y" / "snapshots" / "0123")
    blobs = tmp_path / "models--x--y" / "blobs"
    blobs.mkdir()
    for file in list(folder.iterdir()):
        os.rename(file, blobs / f"digest-{file.name}")
        file.symlink_to(Path("../../blobs") / f"digest-{file.name}")
    assert HFReader(folder).vocab == LLAMA.config["vocab_size"]


def test_an_index_that_lies_is_found_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, LLAMA.config, tensors_of(LLAMA), shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["more"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert "index and files disagree about more" in _refusal(folder)


def test_an_index_may_be_as_large_as_those_of_real_mixtures(tmp_path: Path) -> None:
    """A config.json has at most 1 MiB, but DeepSeek-V3's index has 9 MB."""
    folder = write_folder(tmp_path, LLAMA.config, tensors_of(LLAMA), shards=2)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.ljust(32 << 20))
    assert HFReader(folder).vocab == LLAMA.config["vocab_size"]
    index.write_text(text.ljust((32 << 20) + 1))
    assert "index.json: larger than 33,554,432 bytes" in _refusal(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "1" * 2_000_000], ids=range(5))
def test_a_damaged_config_is_an_error_not_a_traceback(text: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "config.json").write_text(text)
    assert "config.json" in _refusal(folder)


def test_a_truncated_file_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    file = folder_with(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "not a safetensors file" in _refusal(tmp_path)
