"""Checks of corpora and splits: each mistake with the line that the user sees."""

from __future__ import annotations

import pytest

from tests.config.command import parse, problems


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "no corpus: give --data-path PREFIX, or --mock-data to train on generated tokens"),
        (
            "--data-path 1 b 2",
            "--data-path has 3 words: give one prefix, or pairs WEIGHT PREFIX WEIGHT PREFIX ...",
        ),
        (
            "--data-path a 0.5 b 0.5",
            "--data-path: 'a', 'b' must be a weight above 0: give pairs WEIGHT PREFIX WEIGHT "
            "PREFIX ...",
        ),
        ("--data-path", "--data-path: give a prefix, or WEIGHT PREFIX WEIGHT PREFIX ..."),
        (
            "--data-path a --valid-data-path b --train-data-path c",
            "--data-path is split by --split and cannot be combined with --train-data-path, "
            "--valid-data-path: use one kind of path",
        ),
        (
            "--valid-data-path b",
            "--valid-data-path without --train-data-path leaves nothing to train on: add it",
        ),
    ],
)
def test_corpora(words: str, line: str) -> None:
    assert problems(words, without=["--mock-data"]) == [line]


@pytest.mark.parametrize("text", ["100,0,0", "969, 30, 1", "98/2", "1", "0.9,0.1"])
def test_splits_that_are_fine(text: str) -> None:
    assert parse(f"--split '{text}'").config.data.split == text


@pytest.mark.parametrize("text", ["a,b", "-1,2", "1,2,3,4", ""])
def test_splits_that_are_not(text: str) -> None:
    (line,) = problems(f"--split '{text}'")
    assert line.startswith("--split")
