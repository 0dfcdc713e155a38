"""Extra states and random states in Megatron Core's files."""

from __future__ import annotations

import pytest

from megatron.checkpoint.core.states import core_random_states, extra_states
from megatron.checkpoint.legacy.writer import device_state, random_states

_LAYER = "decoder.layers."
_CORE = f"{_LAYER}self_attention.core_attention"


@pytest.mark.parametrize(
    ("weight", "local", "engine"),
    [
        ("self_attention.linear_qkv", True, [_CORE]),
        ("self_attention.linear_kv_up_proj", True, [_CORE]),
        ("self_attention.linear_q_up_proj", True, []),
        ("self_attention.linear_proj", True, []),
        ("mlp.linear_fc1", True, []),
        ("mixer.in_proj", True, []),
        ("input_layernorm", False, []),
        ("self_attention.q_layernorm", False, []),
        ("mlp.router", None, []),
    ],
)
def test_modules_with_an_extra_state(weight: str, local: bool | None, engine: list[str]) -> None:
    """`local`: whether modules of every implementation have one; `None`: none has."""
    name = f"{_LAYER}{weight}"
    assert extra_states(f"{name}.weight", is_engine=False) == [name] * bool(local)
    expected = [] if local is None else [name, *engine]
    assert extra_states(f"{name}.weight", is_engine=True) == expected
    assert extra_states(f"{name}.bias", is_engine=True) == []


def test_random_states_of_experts_have_seeds_of_their_own() -> None:
    found = core_random_states(5, 3, 2, 1, expert=4, width=1)
    expected = random_states(5, 3, 2, 1)
    trackers, plain = found.pop("rng_tracker_states"), expected.pop("rng_tracker_states")
    assert found.keys() == expected.keys()
    assert trackers["model-parallel-rng"].equal(plain["model-parallel-rng"])
    for name, seed in (("data-parallel-rng", 205), ("expert-parallel-rng", 205 + 1024 + 400 + 1)):
        assert trackers[name].equal(device_state(seed, 3)), name
