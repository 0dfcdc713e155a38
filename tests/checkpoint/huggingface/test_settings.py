"""The types and bounds of keys in a config.json."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.huggingface.families import families
from megatron.checkpoint.huggingface.settings import Settings, harmless, read_json
from megatron.errors import CheckpointError
from tests.checkpoint.huggingface.models import CASES

Read = Callable[[Settings], Any]
LARGEST = 16_777_216  # of any value


@pytest.mark.parametrize(
    ("read", "good", "bad", "expected"),
    [
        (
            lambda s: s.size("k"),
            [1, LARGEST],
            [0, -1, LARGEST + 1, 2.0, True, "2", [2], None],
            f"expected an integer from 1 to {LARGEST}",
        ),
        (lambda s: s.size("k", 5, 8), [8, None], [9], "expected an integer from 1 to 8"),
        (
            lambda s: s.number("k"),
            [1, 5e-324, sys.float_info.max],
            [0, -0.5, float("inf"), float("nan"), True, "1", None],
            "expected a number above 0",
        ),
        (
            lambda s: s.fraction("k", 0.5),
            [0, 0.999, None],
            [1, -0.1, False, "0"],
            r"expected a number in \[0, 1\)",
        ),
        (lambda s: s.boolean("k", True), [True, False, None], [0, "true"], "expected true or fals"),
        (
            lambda s: s.choice("k", {"a": 1, "b": 2}),
            ["a", "b"],
            ["c", 1, ["a"], None],
            "supported: a, b",
        ),
        (
            lambda s: s.strings("k"),
            [["a"], [], None],
            ["a", ["a", 1]],
            "expected a list of strings",
        ),
        (
            lambda s: s.indices("k", 3),
            [[0, 2], [], None],
            [[3], [-1], [True], 1],
            r"expected a list of integers in \[0, 3\)",
        ),
        (
            lambda s: s.numbers("k", 2),
            [[1, 0.5], [2.0, LARGEST - 1]],
            [[1], [1, 2, 3], [1, 0], [1, LARGEST], [True, 1], 1, None],
            "expected a list of 2 numbers above 0",
        ),
        (lambda s: s.section("k").values, [{"a": 1}, None], [[], 1], "expected an object"),
        (lambda s: s.must_be("k", False), [False, None], [True, "x"], "only false is supported"),
    ],
)
def test_values_of_other_types_and_beyond_bounds_are_refused(
    read: Read, good: Sequence[Any], bad: Sequence[Any], expected: str
) -> None:
    defaults = {5, 0.5, True}
    for value in good:
        settings = Settings({"k": value}, "config.json")
        found = read(settings)
        settings.refuse_unread_keys()
        if value is None:
            assert not found or found in defaults
    for value in bad:
        with pytest.raises(CheckpointError, match=f"^config.json: k .*: {expected}"):
            read(Settings({"k": value}, "config.json"))


def test_values_are_returned_as_they_are_used() -> None:
    values = {"a": 3, "b": 2, "c": "x", "d": [1, 2], "e": {"f": 0}, "g": None}
    settings = Settings(values, "config.json")
    assert settings.size("a", 7) == 3
    assert settings.number("b") == 2.0
    assert settings.choice("c", {"x": 9}) == 9
    assert settings.choice("absent", {"x": 9}, "x") == 9
    assert settings.numbers("d", 2) == (1.0, 2.0)
    with pytest.raises(CheckpointError, match="^config.json: e: f 0: expected an integer from"):
        settings.section("e").size("f")
    assert (settings.has("g"), settings.has("absent")) == (True, False)


def test_keys_that_are_not_read_are_named_together() -> None:
    values = {"use_cache": True, "z": 1, "a": 2, "read": 3, "ignored": 4, "empty": None}
    settings = Settings(values, "config.json")
    settings.must_be("read", 3)
    settings.ignore("ignored", "other")
    with pytest.raises(CheckpointError, match="^config.json: a, z: not supported, and may change"):
        settings.refuse_unread_keys()
    assert harmless(values) == {"use_cache": True}


@pytest.mark.parametrize(
    ("key", "bound"),
    [("num_hidden_layers", 16_384), ("num_attention_heads", 65_536), ("hidden_size", LARGEST)],
)
def test_layers_and_heads_have_bounds_of_their_own(key: str, bound: int) -> None:
    settings = Settings({**CASES["llama"].config, key: bound + 1}, "config.json")
    with pytest.raises(CheckpointError, match=f"{key} {bound + 1}: .* from 1 to {bound}$"):
        families()["llama"].read(settings)


def test_a_file_of_settings_has_at_most_a_mebibyte(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}'.ljust(1 << 20))
    assert read_json(path) == {"a": 1}
    path.write_text('{"a": 1}'.ljust((1 << 20) + 1))
    with pytest.raises(CheckpointError, match="config.json: larger than 1,048,576 bytes"):
        read_json(path)
