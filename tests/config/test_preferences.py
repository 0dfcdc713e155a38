"""Flags of training on preferences."""

from __future__ import annotations

import pytest

from megatron.config.parser import parse_config
from megatron.errors import EXIT_OK, ConfigError
from megatron.training.pretrain import main
from pretrain_gpt import GPTRecipe
from tests.finetuning.toy_pairs import FILE, PAIRS
from tests.training.toy import TOY

WORDS = [*(word for word in TOY if word != "--mock-data"), *PAIRS, "--data-path", str(FILE)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--no-calculate-per-token-loss", "dpo requires --calculate-per-token-loss"),
        (
            "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
            "use --cross-entropy-fusion-impl native",
        ),
        ("--truncation split", "answers are compared as a whole: use keep-start"),
        ("--logits-load-dir x", "cannot be combined with distillation: drop --teacher-load"),
        ("--no-sft", "--preference-loss dpo requires --sft"),
        ("--preference-beta 0", "--preference-beta 0.0: must be above 0"),
        ("--preference-label-smoothing 0.5", "must be at least 0 and below 0.5"),
    ],
)
def test_what_preferences_refuse(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config([*WORDS, *words.split()], world_size=1, architecture="gpt")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--simpo-gamma 1", "--simpo-gamma 1 has no effect without --preference-loss simpo"),
        (
            "--preference-loss orpo --preference-label-smoothing 0.1",
            "has no effect without --preference-loss dpo, robust or simpo",
        ),
        (
            "--preference-loss simpo --reference-log-probs x",
            "has no effect without --preference-loss dpo, ipo, hinge, robust or kto",
        ),
        (
            "--kto-desirable-weight 2",
            "--kto-desirable-weight 2 has no effect without --preference-loss kto",
        ),
        ("--hidden-dropout 0.1", "--hidden-dropout 0.1 with --preference-loss dpo: the reference"),
    ],
)
def test_flags_of_other_losses_are_reported(words: str, told: str) -> None:
    parsed = parse_config([*WORDS, *words.split()], world_size=1, architecture="gpt")
    assert any(told in notice for notice in parsed.notices)


def test_pretraining_names_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(GPTRecipe(), [*WORDS, "--no-exit-signal-handler"]) != EXIT_OK
    assert "run finetune.py or megatron finetune" in capsys.readouterr().err
