"""--split: shares and document bounds."""

from __future__ import annotations

import pytest

from megatron.data.splits import parse_split, split_bounds
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "documents", "bounds"),
    [
        ("969, 30, 1", 1000, (0, 969, 999, 1000)),
        ("949,50,1", 100, (0, 95, 100, 100)),
        ("90/5/5", 1000, (0, 900, 950, 1000)),
        ("1", 7, (0, 7, 7, 7)),
        ("0,1", 7, (0, 0, 7, 7)),
        ("1,1,1", 8, (0, 2, 5, 8)),  # rounds to 3, 6, 9: one too many, taken from each bound
        ("1,1", 5, (0, 3, 5, 5)),  # 2.5 is rounded to even: 2, 4, 4, one too few
        ("0,1,1", 3, (0, 0, 1, 3)),  # 0, 0, 2, 4, one too many; the first cannot go below zero
        ("1,1,1", 0, (0, 0, 0, 0)),
    ],
)
def test_bounds(text: str, documents: int, bounds: tuple[int, ...]) -> None:
    assert split_bounds(text, documents) == bounds


def test_shares_add_up_to_one() -> None:
    assert parse_split("3,1") == (0.75, 0.25, 0.0)


@pytest.mark.parametrize("text", ["", "a,b", "0,0,0", "-1,2", "1,2,3,4", "nan", "inf,1"])
def test_mistakes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        parse_split(text)
