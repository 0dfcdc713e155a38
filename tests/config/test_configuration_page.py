"""docs/configuration.md agrees with the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.parser import parse_config
from megatron.config.run import sections
from megatron.errors import ConfigError

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
_TINY = str(_ROOT / "examples" / "gpt_tiny.yaml")


def test_every_section_is_described() -> None:
    assert [name for name in sections() if f"`{name}`" not in _PAGE] == []


def test_the_mistakes_shown_are_what_a_user_sees() -> None:
    words = f"--config {_TINY} --hiden-size 3 --lr abc --global-batch-size 48 --save runs"
    with pytest.raises(ConfigError) as caught:
        parse_config(words.split(), world_size=8)
    shown = [line for line in _PAGE.splitlines() if line.startswith("error: ")]
    assert shown == [f"error: {problem}" for problem in caught.value.problems]


def test_the_tiny_run_is_valid() -> None:
    parsed = parse_config(["--config", _TINY], world_size=2)
    assert parsed.config.training.global_batch_size == 8
    assert parsed.notices == ()
