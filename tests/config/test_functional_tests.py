"""The count of Megatron-LM's test configurations that are accepted, on a checkout made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config import functional_tests

_COMMON = {
    "--num-layers": 4,
    "--hidden-size": 64,
    "--num-attention-heads": 4,
    "--seq-length": 128,
    "--micro-batch-size": 4,
    "--lr": "1e-3",
    "--train-iters": 40,
    "--data-path": "${DATA_PATH}/text",
    "--vocab-file": "/of/no/file",
}


def _write(checkout: Path, name: str, mode: str, **flags: object) -> None:
    folder = checkout / "tests/functional_tests/test_cases" / name
    folder.mkdir(parents=True)
    given = _COMMON | {f"--{flag.replace('_', '-')}": value for flag, value in flags.items()}
    lines = [f"  {flag}: {value}" for flag, value in given.items()]
    text = "\n".join([f"MODE: {mode}", "MODEL_ARGS:", *lines])
    (folder / "model_config.yaml").write_text(text, encoding="utf-8")


def test_what_is_refused_is_listed_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, "gpt/plain", "pretraining", bf16="true", swiglu="false")
    pattern = "([0]*1+[1]*3)"
    _write(tmp_path, "moe/small", "pretraining", num_experts=4, moe_layer_freq=pattern)
    _write(tmp_path, "moe/wide", "pretraining", num_experts=16, expert_model_parallel_size=16)
    lists = '"[core_attn moe_act]"'
    _write(tmp_path, "moe/list", "pretraining", recompute_modules=lists, spiral="true")
    _write(tmp_path, "gpt/of two mistakes", "pretraining", debug="true", num_layers=0)
    _write(tmp_path, "gpt/served", "inference", debug="true")
    _write(tmp_path, "multimodal/other", "pretraining", debug="true")
    functional_tests.main([str(tmp_path)])
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "gpt/of two mistakes"
    assert {line.split()[0].rstrip(":") for line in out[1:3]} == {"--debug", "--num-layers"}
    assert out[3] == "moe/list"
    assert out[4:5] == ["    unknown flag --spiral: --help-all lists all flags"]
    assert out[-1] == "3 of 5 configurations are accepted"
    assert sorted(out[-2].split(", ")) == ["--debug 1", "--num-layers 1", "unknown 1"]
