"""The optimizer's settings and counters in Megatron Core's `common.pt`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.checkpoint.core.writer import CoreFiles
from megatron.checkpoint.entries import Entry
from megatron.checkpoint.store import Snapshot
from megatron.parallel.layout import Layout
from tests.config.command import parse

_DENSE = ("embedding.word.weight", "layers.0.mlp.down.weight", "layers.0.mlp.down.bias")
_EXPERTS = ("layers.0.mlp.experts.up.weight", "layers.0.mlp.experts.up.bias")
_META: dict[str, Any] = {
    "iteration": 3,
    "consumed_train_samples": 12,
    "schedule": {"max_lr": 0.5, "min_lr": 0.25},
    "optimizer": {"step": 2, "loss_scale": {"scale": 8, "growth_tracker": 1}},
}


def _common(flags: str, *names: str, meta: Any = _META, master: bool = False) -> dict[str, Any]:
    """Return `common.pt` of a network of one layer with these parameters."""
    world = 2 if "expert-model" in flags else 1
    config = parse(f"--num-layers 1 {flags}", without=["--num-layers"], world_size=world).config
    shapes = {name: (4,) if "bias" in name or "norm" in name else (4, 4) for name in names}
    shapes |= {name: (4, *shapes[name]) for name in names if ".experts." in name}
    state = {f"model.{name}": Entry.whole(torch.zeros(shape)) for name, shape in shapes.items()}
    if master:
        state["optimizer.embedding.word.weight.master"] = Entry.whole(torch.zeros(4, 4))
    snapshot = Snapshot.take(3, state, meta, Layout.single())
    return CoreFiles(config, snapshot).common()


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ("--transformer-impl local", True),
        ("--transformer-impl transformer_engine", False),
        ("--transformer-impl transformer_engine --optimizer sgd", True),
        ("--transformer-impl local --optimizer sgd", True),
    ],
)
def test_steps_are_counted_where_the_optimizer_s_class_reads_them(flags: str, counts: bool) -> None:
    optimizer = _common(flags, *_DENSE)["optimizer"]
    assert set(optimizer) == {"state", "param_groups"}
    steps = {name: value.item() for name, value in optimizer["state"].items()}
    assert steps == ({"common_step": 2.0} if counts else {})
    groups = [(group["wd_mult"], group["max_lr"]) for group in optimizer["param_groups"]]
    assert groups == [(1.0, 0.5), (0.0, 0.5)]


def test_16_bit_and_distributed_optimizers_have_a_layout_of_their_own() -> None:
    tree = _common("--bf16", *_DENSE, master=True)
    assert set(tree["optimizer"]) == {"optimizer", "grad_scaler"}
    scaler = tree["optimizer"]["grad_scaler"]
    assert (scaler["scale"].tolist(), scaler["growth_tracker"]) == ([8.0], 1)
    assert set(tree["optimizer"]["optimizer"]) == {"state", "param_groups"}
    assert "distrib_optim_sharding_type" not in tree["content_metadata"]
    tree = _common("--use-distributed-optimizer", *_DENSE)
    sharding = tree["content_metadata"]["distrib_optim_sharding_type"]
    assert tree["optimizer"]["param_state_sharding_type"] == sharding
    assert set(tree["optimizer"]["optimizer"]) == {"param_groups"}
    assert tree["content_metadata"]["chained_optim_avoid_prefix"] is True
    assert tree["content_metadata"]["singleton_local_shards"] is False
    assert (tree["iteration"], tree["opt_param_scheduler"]) == (3, _META["schedule"])
    without = _common("", *_DENSE, meta={**_META, "optimizer": None})
    assert "optimizer" not in without
    assert "opt_param_scheduler" not in without


_MIXTURE = "--num-experts 4 --moe-router-topk 2"


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ("", {0: [(False, 1.0), (False, 0.0)]}),
        (
            "--expert-model-parallel-size 2",
            {0: [(False, 1.0), (False, 0.0)], 1: [(True, 1.0), (True, 0.0)]},
        ),
    ],
)
def test_experts_that_are_divided_have_an_optimizer_of_their_own(
    flags: str, groups: dict[int, list[tuple[bool, float]]]
) -> None:
    names = (*_DENSE[:1], "final_norm.weight", *_EXPERTS)
    found = _common(f"{_MIXTURE} {flags}", *names)["optimizer"]
    optimizers = found if len(groups) > 1 else {0: found}
    assert {
        index: [(group["is_expert_parallel"], group["wd_mult"]) for group in one["param_groups"]]
        for index, one in optimizers.items()
    } == groups
