"""tools/checkpoint/util.py and inspect.py as users of Megatron-LM call them.

What is given wrong, or only half, is said in terms of their flags, and nothing is left behind.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.hf.models import CASES, tensors_of, write_folder
from tests.tools.test_checkpoint_util import convert
from tools.checkpoint import inspect, util


@pytest.fixture
def gpt(golden: Path) -> Path:
    """Megatron-LM's own checkpoint: 5,000 entries in 5,120 rows, 4 layers, 4 heads."""
    return golden / "gpt_tp2pp2_fp32" / "ckpt"


def test_a_model_of_another_class_says_so(tmp_path, capsys):
    case = CASES["llama"]
    tensors = tensors_of(case)
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:2].clone()
    config = {**case.config, "architectures": ["LlamaForSequenceClassification"]}
    folder = write_folder(tmp_path / "a", config, tensors)
    assert convert("hf", "native", folder, tmp_path / "b") == 4
    text = capsys.readouterr().err
    assert "names the class LlamaForSequenceClassification, which is not read" in text
    assert "LlamaForCausalLM is; lm_head.weight is missing" in text


def test_an_adapter_is_to_be_merged_first(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CASES["llama"].config))
    save_file({"q_proj.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    assert convert("hf", "native", tmp_path, tmp_path / "b") == 4
    assert "merge both first" in capsys.readouterr().err


def test_families_of_another_kind_are_not_listed(golden, tmp_path, capsys):
    words = ["--model-type", "BERT", "--loader", "megatron", "--saver", "hf"]
    words += ["--load-dir", str(golden / "bert_fp32" / "ckpt"), "--save-dir", str(tmp_path / "o")]
    assert util.main(words) == 4
    text = capsys.readouterr().err
    assert "apply_residual_connection_post_layernorm is False, a bert model has True" in text
    assert "llama" not in text


@pytest.mark.parametrize("tool", ["inspect", "diff", "util"])
def test_where_there_is_none_it_says_where_one_is(golden, gpt, tool, tmp_path, capsys):
    def refusal(path: Path) -> str:
        if tool == "util":
            assert convert("megatron", "native", path, tmp_path / "o") == 4
        else:
            words = ["diff", str(path), str(gpt)] if tool == "diff" else [str(path)]
            assert inspect.main(words) == 4
        return capsys.readouterr().err

    assert f"give {gpt}" in refusal(gpt.parent)
    assert "there is no such folder" in refusal(golden / "nowhere")
    assert "a file: give the folder" in refusal(golden / "data" / "speeches.jsonl")
