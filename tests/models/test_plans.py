"""How flags change a network's plan, where no result of a trained network would show it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.models.plan import HeadSpec, ModelPlan
from megatron.models.plans import model_plan
from tests.config.command import parse


def _plan(words: str, architecture: str = "gpt", **more: Any) -> ModelPlan:
    return model_plan(parse(words, architecture=architecture).config.model, 128, **more)


def _value(plan: Any, path: str) -> Any:
    """Return a value of a plan by its path, such as "layers.0.mlp.inner"."""
    for name in path.split("."):
        plan = plan[int(name)] if name.isdigit() else getattr(plan, name)
    return plan


_MIXTURE = "--num-experts 4 --moe-router-topk 2"
_ROUTER = "layers.0.mlp.router"
_BIASED = f"{_MIXTURE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "",
            {
                "layers.0.mixer.defers_bias": True,  # fused with dropout
                "layers.0.mlp.defers_bias": True,
                "layers.0.mixer.init.outputs": 2,
                "embedding.calls": 1,
                "embedding.ahead": 0,
                "embedding.token_types": 0,
                "embedding.scale": None,
                "embedding.positions": 128,
                "layers.0.mixer.rotary": None,
                "layers.0.mixer.causal": True,
                "encoder_layers": 0,
                "towers": 1,
            },
        ),
        (
            "--hidden-dropout 0",
            {"layers.0.mixer.defers_bias": False, "layers.0.mlp.defers_bias": False},
        ),
        (
            "--hybrid-layer-pattern M*M- --mamba-num-groups 1",
            {
                "layers.0.mixer.kind": "mamba",
                "layers.0.mixer.factors": (),
                "layers.0.mlp": None,
                "layers.1.mixer.kind": "attention",
                "layers.1.mlp": None,
                "layers.1.mixer.init.outputs": 1,
                "layers.3.mixer": None,
                "layers.3.mlp.kind": "dense",
            },
        ),
        (
            "--mtp-num-layers 2 --position-embedding-type rope",
            {
                "embedding.ahead": 2,
                "embedding.positions": 0,
                "heads.1.depths": 2,
                "heads.1.layer_offset": 4,
            },
        ),
        (
            _MIXTURE,
            {
                "layers.0.mlp.expert.defers_bias": False,
                "layers.0.mlp.expert.inner": 256,
                "layers.0.mlp.shared": None,
                f"{_ROUTER}.score": "softmax",
                f"{_ROUTER}.scores_all": False,
                f"{_ROUTER}.groups": 1,
                f"{_ROUTER}.groups_chosen": 1,
                f"{_ROUTER}.scale": 1.0,
                f"{_ROUTER}.bias_rate": None,
                f"{_ROUTER}.jitter": 0.0,
                f"{_ROUTER}.capacity": None,
                f"{_ROUTER}.eval_capacity": None,
                f"{_ROUTER}.gating": None,
            },
        ),
        (
            f"{_MIXTURE} --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 32 "
            "--moe-expert-capacity-factor 1.5 --moe-input-jitter-eps 0.02 "
            "--moe-router-num-groups 2 --moe-router-topk-scaling-factor 2.5 "
            "--moe-router-group-topk 1",
            {
                "layers.0.mlp.expert.inner": 48,
                "layers.0.mlp.shared.inner": 32,
                "layers.0.mlp.weighs_shared": False,
                f"{_ROUTER}.groups": 2,
                f"{_ROUTER}.groups_chosen": 1,
                f"{_ROUTER}.scale": 2.5,
                f"{_ROUTER}.jitter": 0.02,
                f"{_ROUTER}.capacity": 1.5,
            },
        ),
        (
            f"{_MIXTURE} --moe-aux-loss-coeff 1e-2",
            {f"{_ROUTER}.balancing": (("aux_loss", 0.01),), f"{_ROUTER}.counts_by_sample": False},
        ),
        (
            f"{_MIXTURE} --moe-router-load-balancing-type aux_loss seq_aux_loss "
            "--moe-aux-loss-coeff 1e-2 1e-3",
            {f"{_ROUTER}.counts_by_sample": True},
        ),
        (_BIASED, {f"{_ROUTER}.bias_rate": 1e-3}),
        (f"{_BIASED} --lora-rank 4", {f"{_ROUTER}.bias_rate": 0.0}),
        (
            f"{_MIXTURE} --moe-router-gating deepspeed",
            {
                f"{_ROUTER}.scores_all": True,
                f"{_ROUTER}.gating.samples": True,
                f"{_ROUTER}.gating.selects_randomly": True,
            },
        ),
        (
            "--num-experts 4 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
            {f"{_ROUTER}.score": "sigmoid", f"{_ROUTER}.scores_all": True},
        ),
        (
            f"{_MIXTURE} --moe-router-load-balancing-type sinkhorn",
            {f"{_ROUTER}.score": "softmax", f"{_ROUTER}.scores_all": True},
        ),
        (
            "--num-experts 4 --moe-router-topk 1 --mlp-type residual",
            {"layers.0.mlp.shared.inner": 256, "layers.0.mlp.weighs_shared": True},
        ),
        ("--position-embedding-type alibi --scale-alibi", {"layers.0.mixer.alibi": 0.25}),
        ("--position-embedding-type alibi", {"layers.0.mixer.alibi": 1.0}),
        ("--scale-embeddings", {"embedding.scale": math.sqrt(64)}),
        (
            "--position-embedding-type rope --rotary-percent 0.5",
            {
                "embedding.positions": 0,
                "layers.0.mixer.rotary.channels": 8,  # half of a head
                "layers.0.mixer.rotary.planes": None,
                "layers.0.mixer.rotary.scaling": None,
                "layers.0.mixer.rotary.dynamic": None,
            },
        ),
        (
            f"{_MIXTURE} --moe-expert-capacity-factor 1.5 --moe-token-drop-policy position",
            {f"{_ROUTER}.drops_last": True},
        ),
    ],
)
def test_what_flags_make_of_a_gpt(words: str, expected: dict[str, Any]) -> None:
    plan = _plan(words)
    assert {path: _value(plan, path) for path in expected} == expected


def test_the_other_architectures() -> None:
    t5 = _plan("--decoder-seq-length 64", "t5")
    assert (t5.embedding.calls, t5.encoder_layers, len(t5.layers)) == (2, 4, 8)
    assert [layer.cross_attention is not None for layer in t5.layers] == [False] * 4 + [True] * 4
    assert [_value(layer, "mixer.causal") for layer in t5.layers] == [False] * 4 + [True] * 4
    crossing = t5.layers[-1].cross_attention
    assert crossing is not None
    assert (crossing.causal, crossing.kv_heads, crossing.output_gate, crossing.qkv_bias) == (
        *(False, 4, False, False),
    )  # fmt: skip
    bert = _plan("", "bert")
    assert [head.kind for head in bert.heads] == ["pooler", "masked_token", "output", "binary_head"]
    assert (bert.embedding.token_types, bert.embedding.calls) == (2, 1)
    assert _value(bert, "heads.2.bias")
    assert not _value(bert, "layers.3.mixer.causal")
    plain = _plan("--bert-no-binary-head", "bert")
    assert [head.kind for head in plain.heads] == ["masked_token", "output"]
    assert plain.embedding.token_types == 0
    task = _plan("", "bert", head=HeadSpec(outputs=3))
    assert [head.kind for head in task.heads] == ["pooler", "task_head"]
    assert _value(task, "heads.1.in_fp32")
