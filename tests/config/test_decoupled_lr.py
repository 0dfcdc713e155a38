"""`--decoupled-lr` and its minimum: what it can be combined with."""

from __future__ import annotations

import pytest

from tests.config.command import parse, problems

_LEGACY = "--decoupled-lr 0.5 --save x --save-interval 1 --ckpt-format legacy"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--decoupled-lr 1e-4 --decoupled-min-lr 1e-3",
            "--decoupled-min-lr 0.001 is above --decoupled-lr 0.0001: lower it",
        ),
        (
            "--min-lr 1e-4 --decoupled-lr 1e-5",
            "--min-lr 0.0001, which also applies to --decoupled-lr, is above --decoupled-lr 1e-05: "
            "give --decoupled-min-lr",
        ),
        (
            _LEGACY,
            "--ckpt-format legacy with --decoupled-lr 0.5: Megatron-LM 23.08 has no such "
            "learning rate, and its optimizer files cannot store one: use --ckpt-format native",
        ),
        (
            "--lr-warmup-init 1e-4 --decoupled-lr 1e-5",
            "--lr-warmup-init 0.0001 is above --decoupled-lr 1e-05: lower it",
        ),
        ("--decoupled-lr -1", "--decoupled-lr -1.0: must be at least 0"),
        (
            "--decoupled-lr 0.1 --decoupled-min-lr -1",
            "--decoupled-min-lr -1.0: must be at least 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(words: str, line: str) -> None:
    assert line in problems(words)


@pytest.mark.parametrize(
    "words",
    ["--min-lr 1e-4 --decoupled-lr 1e-5 --decoupled-min-lr 0", f"{_LEGACY} --no-save-optim"],
)
def test_what_fits_is_taken_without_a_word(words: str) -> None:
    assert parse(words).notices == ()


def test_a_minimum_of_nothing_is_reported() -> None:
    (line,) = parse("--decoupled-min-lr 1e-4").notices
    assert line == "--decoupled-min-lr 0.0001 has no effect without --decoupled-lr"
