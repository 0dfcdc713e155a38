"""Which differences between a checkpoint and a run are refused, and what the message says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.compatibility import check_network, check_states, network_differences
from megatron.config.yaml_file import to_dict
from megatron.errors import CheckpointError
from tests.config.command import parse

ROPE = "--position-embedding-type rope --max-position-embeddings 256"


def _reader(flags: str = "", legacy: Any = None, **model: Any) -> Any:
    """Return what is checked of a checkpoint of a run with these flags and changes."""
    config = to_dict(parse(flags).config)
    config["model"] |= model
    return SimpleNamespace(path=Path("folder"), meta={"config": config, "legacy_args": legacy})


def _error(flags: str, reader: Any, flag: str = "--load", **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_network(parse(flags).config, reader, flag, **options)
    return str(caught.value)


def test_differing_settings_are_listed_with_a_remedy() -> None:
    reader = _reader("--num-layers 2 --swiglu", without_meaning=1)
    lines = ["--num-layers is 4 here and 2 in the checkpoint", "--swiglu is off here and on in the"]
    found = _error("", reader)
    assert found.startswith("--load folder: the checkpoint is for a different network:\n  ")
    assert all(line in found for line in lines)
    assert found.endswith(
        "give the checkpoint's values, or --use-checkpoint-args to take them from the checkpoint"
    )
    other = _error("", reader, "--pretrained-checkpoint")
    assert other.startswith("--pretrained-checkpoint folder: ")
    assert other.endswith("\ngive the checkpoint's values")
    assert check_network(parse().config, _reader()) == []
    empty: Any = SimpleNamespace(path=Path("folder"), meta={"config": {}})
    assert check_network(parse().config, empty) == []


@pytest.mark.parametrize(
    ("flags", "saved", "named"),
    [
        (ROPE, {"max_position_embeddings": 512}, None),
        (
            "--max-position-embeddings 256",
            {"max_position_embeddings": 512},
            "max_position_embeddings",
        ),
        ("--num-experts 4", {"num_experts": 4}, None),  # in older checkpoints
        ("--num-experts 4", {"num_experts": 8}, "num_experts"),
        ("--num-experts 4 --moe-layer-freq 2", {"moe_layer_freq": "[1,0,1,0]"}, None),
        ("--num-experts 4 --moe-layer-freq 2", {"moe_layer_freq": "[1,0,0,0]"}, "moe_layer_freq"),
        ("--num-experts 4 --moe-layer-freq 2", {"moe_layer_freq": "[1]"}, "moe_layer_freq"),
        ("--num-experts 4 --ffn-hidden-size 8", {"moe_ffn_hidden_size": 8}, None),
        ("--num-experts 4 --ffn-hidden-size 8", {"moe_ffn_hidden_size": 9}, "moe_ffn_hidden_size"),
        ("--window-size 4,0", {"window_attn_skip_freq": "[1,1,1,1]"}, None),
        ("--window-size 4,0", {"window_attn_skip_freq": "[1,1,1,0]"}, "window_attn_skip_freq"),
        (f"{ROPE} --no-rope-freq 4", {"no_rope_freq": "[0,0,0,1]"}, None),
        (f"{ROPE} --no-rope-freq 4", {"no_rope_freq": "[0,0,1,1]"}, "no_rope_freq"),
    ],
    ids=str,
)
def test_settings_are_compared_by_what_they_mean(
    flags: str, saved: dict[str, Any], named: str | None
) -> None:
    found = network_differences(parse(flags).config.model, _reader(flags, **saved))
    assert list(found) == ([] if named is None else [named])


def test_finetuning_allows_what_the_weights_can_adapt_to() -> None:
    scaled = f"{ROPE} --rotary-base 500000"
    reason = "the rotary frequencies differ from those that the weights were trained with"
    assert check_network(parse(scaled).config, _reader(ROPE), finetunes=True) == [
        f"  --finetune: --rotary-base is 500000.0 here and 10000.0 in the checkpoint: {reason}"
    ]
    assert "; --finetune adapts to other rotary frequencies, from iter" in _error(
        scaled, _reader(ROPE)
    )
    both = _error(f"{scaled} --swiglu", _reader(ROPE), finetunes=True)
    assert "--rotary-base" in both
    assert "--finetune adapts" not in both
    assert "--finetune" not in _error("--swiglu", _reader())
    lora = "--lora-rank 4"
    assert check_network(parse(lora).config, _reader(), finetunes=True) == []
    assert "; --finetune adds adapters to its weights" in _error(lora, _reader())
    assert "--finetune adds" not in _error(lora, _reader("--lora-rank 8"))
    assert "--lora-rank is 4 here and 8" in _error(lora, _reader("--lora-rank 8"), finetunes=True)


def _changed(**model: Any) -> Any:
    config = parse().config
    return replace(config, model=replace(config.model, **model))


@pytest.mark.parametrize(
    ("run", "saved", "is_allowed"),
    [
        ({"architecture": "retro", "retro_add_retriever": True}, {}, True),
        ({"architecture": "retro"}, {}, False),
        (
            {"architecture": "retro", "retro_add_retriever": True},
            {"architecture": "bert"},
            False,
        ),
        ({}, {"architecture": "retro"}, False),
        ({"reward_head": True}, {"reward_head": False}, True),
        ({}, {"reward_head": True}, False),
    ],
    ids=str,
)
def test_a_gpt_may_become_a_retro_model_or_a_reward_model_by_finetuning(
    run: dict[str, Any], saved: dict[str, Any], is_allowed: bool
) -> None:
    config, reader = _changed(**run), _reader(**saved)
    if is_allowed:
        assert check_network(config, reader, finetunes=True) == []
    for finetunes in (False, True)[: 1 + (not is_allowed)]:
        with pytest.raises(CheckpointError, match="different network"):
            check_network(config, reader, finetunes=finetunes)


@pytest.mark.parametrize(
    ("flags", "saved", "legacy", "line"),
    [
        ("", "", None, None),
        ("--optimizer sgd", "", None, "--optimizer is sgd here and adam in the checkpoint"),
        ("--bf16", "", None, "--bf16 is on here and off in the checkpoint"),
        ("--fp16", "--bf16", None, "--fp16 is on here and off in the checkpoint"),
        (
            "--optimizer sgd --sgd-momentum 0.9",
            "--optimizer sgd --sgd-momentum 0",
            None,
            "--sgd-momentum is 0.9 here and 0.0 in the checkpoint",
        ),
        ("--optimizer sgd --sgd-momentum 0", "--optimizer sgd --sgd-momentum 0.9", None, None),
        ("--optimizer sgd --sgd-momentum 0", "--optimizer sgd --sgd-momentum 0", None, None),
        ("", None, {"optimizer": "sgd"}, "--optimizer is adam here and sgd in the checkpoint"),
        ("", None, {"optimizer": None}, None),
        ("", "", {"optimizer": "sgd"}, None),  # our settings count
    ],
)
def test_states_fit_the_optimizer_and_the_precision(
    flags: str, saved: str | None, legacy: Any, line: str | None
) -> None:
    reader = _reader(saved or "", legacy)
    if saved is None:
        reader.meta["config"] = {}
    config = parse(flags).config
    if line is None:
        check_states(config, reader)
        return
    with pytest.raises(CheckpointError) as caught:
        check_states(config, reader)
    found = str(caught.value)
    assert found.startswith("--load folder: the optimizer's states are from a different run:\n  ")
    assert line in found
    assert found.endswith("(--finetune: from iteration 0)")
