"""Bounds of the settings of a request."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.inference.request import MAX_LENGTH_PENALTY, MAX_SEED, Request, RequestError, Sampling


def _sampling(**changes: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": 1, **changes})


@pytest.mark.parametrize(
    ("name", "fits", "beyond", "told"),
    [
        ("max_new_tokens", (0, 10**12), (-1,), "0 or more"),
        ("temperature", (0, 1e-9, 1e9), (-1e-9,), "0 (greedy) or more"),
        ("top_k", (0, 10**9), (-1,), "0 (all) or more"),
        ("top_p", (0, 1), (-0.01, 1.01), "0 (all) to 1"),
        ("top_p_decay", (0, 1), (-0.01, 1.01), "0 (none) to 1"),
        ("top_p_bound", (0, 1), (-0.01, 1.01), "0 (none) to 1"),
        ("repetition_penalty", (1e-300, 1e9), (0, -1), "more than 0"),
        ("seed", (0, MAX_SEED, None), (-1, MAX_SEED + 1), "0 to 9223372036854775807"),
        ("beam_width", (1, 1000), (0,), "1 (no beam search) or more"),
        ("length_penalty", (-20, 20), (-20.1, 20.1), "-20 to 20"),
        ("top_logprobs", (0, 100), (-1, 101), "0 to 100"),
    ],
)
def test_a_setting_within_and_outside_its_bounds(
    name: str, fits: tuple[Any, ...], beyond: tuple[Any, ...], told: str
) -> None:
    for value in fits:
        assert getattr(_sampling(**{name: value}), name) == value
    for value in beyond:
        with pytest.raises(RequestError) as caught:
            _sampling(**{name: value})
        assert str(caught.value) == f"{name} {value}: give {told}"


def test_what_has_no_bounds_of_its_own() -> None:
    assert MAX_LENGTH_PENALTY == 20
    for name in ("temperature", "top_p", "repetition_penalty", "length_penalty"):
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(RequestError, match="one of the numbers is not finite"):
                _sampling(**{name: value})
    with pytest.raises(RequestError, match="stop_sequences contains an empty sequence"):
        _sampling(stop_sequences=((1,), ()))
    _sampling(stop_sequences=((1,), (2, 3)))
    with pytest.raises(RequestError, match="beam_width 2 with max_new_tokens 0: give at least one"):
        _sampling(beam_width=2, max_new_tokens=0)
    _sampling(beam_width=1, max_new_tokens=0)
    _sampling(beam_width=2, max_new_tokens=1)
    with pytest.raises(RequestError, match="the prompt is empty: give at least one token"):
        Request("a", (), _sampling())
    assert Request("a", (0,), _sampling()).adapter == 0
