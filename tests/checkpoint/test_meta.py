"""The metadata that a checkpoint may contain: types, bounds, and agreement with its tensors."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.meta import check_meta
from megatron.errors import CheckpointError

META: dict[str, Any] = {
    "iteration": 3,
    "consumed_train_samples": 12,
    "skipped_train_samples": 1,
    "useful_seconds": 1.5,
    "padded_vocab_size": 8,
    "optimizer": {
        "step": 3,
        "loss_scale": {"scale": 8.0, "growth_tracker": 1, "hysteresis_tracker": -1},
    },
    "average": {"kind": "ema", "count": 2},
    "schedule": {"num_steps": 12, "lr_warmup_steps": 1.0, "lr_decay_style": "cosine"},
    "rng": {"seed": 5},
    "text": {"plan": "x", "places": [[[0, 1, 2, 3]]]},
    "config": {"model": {"num_layers": 2}},
    "another": [1],
}
_TABLE = "model.embedding.word.weight"


def _check(meta: Any, written_as: str = "native", rows: int | None = 8) -> None:
    tensors = {} if rows is None else {_TABLE: SimpleNamespace(shape=(rows, 4))}
    reader: Any = SimpleNamespace(meta=meta, iteration=3, tensors=tensors, format=written_as)
    check_meta(reader)


def _with(path: str, value: Any) -> Any:
    meta: Any = copy.deepcopy(META)
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    part = meta
    for key in keys:
        part = part[key]
    part[last] = value
    return meta


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("consumed_train_samples", [0, (1 << 63) - 1], [-1, 1 << 63, 1.5, "1", None, True]),
        ("useful_seconds", [0, 0.5], [-0.1, "1"]),
        ("optimizer", [None], [1]),
        ("optimizer.step", [0, (1 << 63) - 1], [-1, 1 << 63, None]),
        ("optimizer.loss_scale", [{}], [{"scale": 1.0}, None, {"more": 1}]),
        ("optimizer.loss_scale.scale", [0, 2.0**24], [-1, None]),
        ("optimizer.loss_scale.growth_tracker", [0], [-1]),
        ("average", [None, {"kind": "lawa", "count": 0}], [{"kind": "swa", "count": 0}, {}]),
        ("average.count", [0], [-1]),
        ("schedule.num_steps", [0, float(1 << 63)], [-1, 2.0**64, None]),
        ("schedule.lr_warmup_steps", [None, 0, float(1 << 63)], [-1, 2.0**64]),
        ("schedule.max_lr", [None, 0.5, -1.0], ["1"]),
        ("schedule.lr_in_tokens", [True], [None, 1]),
        ("schedule.lr_decay_style", ["linear", None], ["other"]),
        ("schedule.lr_wsd_decay_style", ["cosine", None], ["other"]),
        ("schedule.wd_incr_style", ["constant", None], ["other"]),
        ("schedule.decay_style", ["linear", None], ["other"]),
        ("rng.seed", [0, (1 << 32) - 1], [-1, 1 << 32]),
        ("text.places.0.0", [[-1] * 4, [2**62] * 5], [[-2] * 4, [2**62 + 1] * 4, [0] * 3, [0] * 6]),
        ("skipped_train_samples", [0], [-1]),
        ("config", [{"model": {}}], [{"model": {"num_layers": "x"}}, {"model": 1}, None]),
        ("iteration", [3], [2]),
        ("padded_vocab_size", [8], [7]),
    ],
)
def test_values_are_checked(path: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        _check(_with(path, value))
    first = path.split(".", maxsplit=1)[0]
    for value in bad:
        with pytest.raises(CheckpointError, match=rf"^meta\.{first}"):
            _check(_with(path, value))


def test_a_schedule_is_needed_with_an_optimizer() -> None:
    message = "meta.schedule is missing or has no num_steps, but there is an optimizer's state"
    for schedule in (None, {}, {"max_lr": 1.0}):
        with pytest.raises(CheckpointError, match=message):
            _check(_with("schedule", schedule))
        _check({**_with("schedule", schedule), "optimizer": None})
    _check(_with("schedule", {"num_iters": 3}))


@pytest.mark.parametrize("written_as", ["legacy", "core", "deepspeed"])
def test_other_programs_may_have_other_styles_and_settings(written_as: str) -> None:
    _check(_with("schedule.lr_decay_style", "other"), written_as)
    training = {"model": {"num_layers": 2}, "training": {"seed": "x"}}
    _check(_with("config", training), written_as)
    with pytest.raises(CheckpointError, match="^meta.config"):
        _check(_with("config", training))
    with pytest.raises(CheckpointError, match="^meta.config"):
        _check(_with("config", {"model": {"num_layers": "x"}}), written_as)


def test_the_vocabulary_is_compared_with_the_table_if_there_is_one() -> None:
    _check(META, rows=None)
    with pytest.raises(CheckpointError, match=r"^meta.padded_vocab_size is 8, but 9 in the checkp"):
        _check(META, rows=9)
