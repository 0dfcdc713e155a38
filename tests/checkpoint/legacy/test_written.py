"""What we write for Megatron-LM besides tensors: settings of optimizers, and random states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.legacy.writer import (
    device_state,
    group_settings,
    megatron_rows,
    notices,
    random_states,
    unsupported_schedule,
)
from tests.config.command import parse

_COMMON = {
    "lr_mult": 1.0,
    "maximize": False,
    "foreach": False,
    "differentiable": False,
    "fused": None,
}


@pytest.mark.parametrize("decays", [True, False])
def test_groups_of_parameters_have_the_settings_of_pytorch_and_apex(decays: bool) -> None:
    decay = (
        {"wd_mult": 1.0, "weight_decay": 0.3} if decays else {"wd_mult": 0.0, "weight_decay": 0.0}
    )
    flags = "--weight-decay 0.3 --adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-6"
    meta: dict[str, Any] = {"schedule": {"max_lr": 0.5}, "optimizer": {"step": 7}}
    assert group_settings(parse(flags).config, meta, decays=decays) == _COMMON | decay | {
        "lr": 0.5,
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "bias_correction": True,
        "amsgrad": False,
        "capturable": False,
        "decoupled_weight_decay": True,
        "step": 7,
    }
    config = parse("--optimizer sgd --sgd-momentum 0.7 --weight-decay 0.3").config
    assert group_settings(config, {"schedule": {}}, decays=decays) == _COMMON | decay | {
        "lr": 1e-3,
        "momentum": 0.7,
        "dampening": 0,
        "nesterov": False,
    }


def _words(state: torch.Tensor) -> list[int]:
    return [int.from_bytes(bytes(part.tolist()), "little") for part in state.split(8)]


def test_random_states_differ_by_stage_and_by_tensor_rank_as_in_megatron() -> None:
    """The distance between stages is 100. Tensor ranks have seeds of their own from 2718."""
    found = random_states(5, 3, 2, 1)
    assert found["random_rng_state"] == random.Random(205).getstate()
    kind, keys, *rest = np.random.RandomState(205).get_state(legacy=True)
    assert found["np_rng_state"] == (kind, tuple(map(int, keys)), *rest)
    assert found["torch_rng_state"].equal(torch.Generator().manual_seed(205).get_state())
    assert _words(found["cuda_rng_state"]) == [205, 3 << 32]
    tracked = found["rng_tracker_states"]
    assert list(tracked) == ["model-parallel-rng"]
    assert _words(tracked["model-parallel-rng"]) == [205 + 2718 + 1, 3 << 32]
    last = (1 << 31) - 1
    assert _words(device_state(1, last)) == [1, last << 32]
    assert _words(device_state(1, last + 3)) == [1, 2 << 32]  # it has 63 bits


def test_schedules_that_megatron_lacks_are_named() -> None:
    for schedule, named in (
        ({}, ""),
        ({"max_lr": 1, "lr_in_tokens": False, "lr_decay_tokens": None}, ""),
        ({"decoupled_lr": 1, "lr_in_tokens": True}, "a --decoupled-lr"),
        ({"lr_in_tokens": True}, "a schedule in tokens (--lr-decay-tokens)"),
        ({"lr_decay_tokens": 0}, "a schedule in tokens (--lr-decay-tokens)"),
    ):
        assert unsupported_schedule(schedule) == named


@pytest.mark.parametrize(("vocabulary", "rows"), [(1, 48), (48, 48), (49, 96), (100, 144)])
def test_the_vocabulary_is_padded_by_megatron_s_rule(vocabulary: int, rows: int) -> None:
    flags = "--make-vocab-size-divisible-by 24 --tensor-model-parallel-size 2"
    assert megatron_rows(vocabulary, parse(flags, world_size=2).config) == rows


def test_settings_that_megatron_ignores_are_told() -> None:
    later = "Megatron-LM 23.08 does not support it; later versions do"
    rope = "--position-embedding-type rope"
    flags = f"{rope} --rotary-base 500000 --use-rope-scaling --window-size 4,0 --no-rope-freq 2"
    flags += " --softmax-type off-by-one --qk-l2-norm --normalization RMSNorm"
    assert list(notices(parse(flags).config.model)) == [
        "--rotary-base 500000: Megatron-LM 23.08 always uses 10000; later versions accept the flag",
        f"--use-rope-scaling: {later}",
        f"--window-size 4,0: {later}",
        f"--no-rope-freq 2: {later}",
        f"--softmax-type off-by-one: {later}",
        f"--qk-l2-norm: {later}",
        "--normalization RMSNorm: Megatron-LM 23.08 supports it only with --transformer-impl "
        "transformer_engine; its Llama-2 fork always does",
    ]
    for flags in ("", rope):
        assert not list(notices(parse(flags).config.model))
