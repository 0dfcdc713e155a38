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


_FULL = "--train-data-path a --full-validation"
_SETS = f"{_FULL} --multiple-validation-sets"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (_FULL, ["--full-validation requires validation data: give --valid-data-path, or drop it"]),
        (
            f"{_FULL} --valid-data-path 0.3 b 0.7 c",
            [
                "--full-validation uses every sample of all datasets, but --valid-data-path has "
                "weights: give prefixes alone, or drop --full-validation"
            ],
        ),
        (
            "--data-path 1 a 2 b --full-validation",
            [
                "--full-validation uses every sample of all datasets, but --data-path has weights: "
                "give --train-data-path, and --valid-data-path without weights, or drop "
                "--full-validation"
            ],
        ),
        (
            "--data-path a b --full-validation --multiple-validation-sets",
            [
                "--multiple-validation-sets evaluates each dataset of --valid-data-path: give "
                "--train-data-path and --valid-data-path, or drop the flag"
            ],
        ),
        (
            "--train-data-path a --valid-data-path b c --multiple-validation-sets",
            [
                "--multiple-validation-sets requires --full-validation: add it, or drop the flag",
            ],
        ),
        (
            f"{_FULL} --valid-data-path b c --validation-set-names b c",
            [
                "--validation-set-names b c requires --multiple-validation-sets: add it, or drop "
                "the flag"
            ],
        ),
        (
            f"{_SETS} --valid-data-path b c --validation-set-names b",
            [
                "--validation-set-names b: --valid-data-path has 2 datasets: give a name for each",
            ],
        ),
        *(
            (
                f"{_SETS} --valid-data-path b c --validation-set-names {names}",
                [
                    f"--validation-set-names {names.replace(chr(39), '')}: give different names "
                    "without spaces, because they are part of tags"
                ],
            )
            for names in ("b b", "b 'c d'")
        ),
        (
            f"{_FULL} --valid-data-path b --sft --preference-loss dpo --calculate-per-token-loss",
            [
                "--preference-loss dpo cannot be combined with --full-validation, which reads "
                "documents or conversations: use --eval-iters, and drop the flag"
            ],
        ),
        (
            f"{_FULL} --valid-data-path b --eval-iters 0 --eval-global-batch-size 6",
            [
                "--eval-global-batch-size 6 is not divisible by --micro-batch-size 4 x "
                "data-parallel size 1 = 4: give --eval-global-batch-size 4 or 8"
            ],
        ),
    ],
)
def test_validation_data_that_cannot_be_evaluated_in_full(words: str, lines: list[str]) -> None:
    assert problems(words, without=["--mock-data"]) == lines


def test_generated_tokens_cannot_be_evaluated_in_full() -> None:
    assert problems("--full-validation") == [
        "--full-validation cannot be combined with --mock-data, which has no end: drop it"
    ]


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_only_a_gpt_is_evaluated_in_full(architecture: str) -> None:
    words = "--data-path a --full-validation --decoder-seq-length 8"
    if architecture == "bert":
        words = "--data-path a --full-validation"
    lines = problems(words, without=["--mock-data"], architecture=architecture)
    expected = f"--full-validation is only for GPT, and this model is a {architecture.upper()}"
    assert f"{expected}: drop it" in lines


@pytest.mark.parametrize(
    "words",
    [
        "--train-data-path a --valid-data-path b c --full-validation --multiple-validation-sets "
        "--validation-set-names wiki code",
        "--data-path a b --full-validation",
        "--skip-train --valid-data-path b --full-validation",
    ],
)
def test_validation_data_that_can_be_evaluated_in_full(words: str) -> None:
    config = parse(f"{words} --eval-iters 0 --eval-interval 7", without=["--mock-data"]).config
    assert config.evaluation.takes_place
    assert config.evaluation.eval_interval == 7
