"""Plans of corpora: their defaults, and mistakes in YAML files."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.corpora.plan import STEPS, CorpusPlan, QualityStep, default_steps, plan_from_dict
from megatron.errors import ConfigError


def test_a_plan_without_settings_has_those_of_the_documentation() -> None:
    """Changed defaults would change the plans of corpora that are already begun."""
    plan = plan_from_dict({"input": "a", "steps": dict.fromkeys(STEPS)}, "plan.yaml")
    found = plan.to_dict()
    tokenizer = found["steps"]["tokenize"].pop("tokenizer")
    assert isinstance(tokenizer, dict)
    assert found == {
        "input": ["a"],
        "steps": {
            "urls": {"also_domains": []},
            "extract": {"min_characters": 1},
            "fix": {"newlines": True},
            "language": {"keep": ["en"], "probability": 0.3},
            "quality": {
                "min_words": 50,
                "max_words": 100_000,
                "min_word_length": 3.0,
                "max_word_length": 10.0,
                "max_symbols": 0.1,
                "min_letters": 0.8,
                "stop_words": 2,
                "max_bullets": 0.9,
                "max_ellipses": 0.3,
                "max_repeated": 0.3,
            },
            "duplicates": {"ngram": 5, "bands": 40, "rows": 5, "similarity": 0.6, "seed": 1234},
            "tasks": {
                "files": [],
                "keys": [],
                "max_ngram": 13,
                "min_ngram": 8,
                "margin": 200,
                "min_characters": 200,
                "max_parts": 10,
            },
            "tokenize": {"append_eod": True},
        },
        "text_key": "text",
        "id_key": "id",
        "on_error": "stop",
    }
    assert plan_from_dict(plan.to_dict(), "plan.yaml") == plan


@pytest.mark.parametrize(
    ("languages", "quality"),
    [
        (("en",), QualityStep()),
        (("de",), QualityStep(stop_words=0)),
        (("en", "de"), QualityStep(stop_words=0)),
        (("en", "zh"), QualityStep(min_words=0, max_word_length=0.0, stop_words=0)),
        (("bo",), QualityStep(min_words=0, max_word_length=0.0, stop_words=0)),
    ],
)
def test_rules_of_english_prose_are_for_english(
    languages: tuple[str, ...], quality: QualityStep
) -> None:
    steps = default_steps(languages, seed=3)
    assert list(steps) == ["urls", "extract", "fix", "language", "quality", "duplicates"]
    assert steps["quality"] == quality
    assert (steps["language"].keep, steps["duplicates"].seed) == (languages, 3)
    assert default_steps()["duplicates"].seed == 1234


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "p.yaml: expected keys such as `input:` and `steps:`"),
        ({"input": ["a"]}, "p.yaml: steps: expected keys among urls, extract, fix, language"),
        ({"input": ["a"], "steps": ["urls"]}, "p.yaml: steps: expected keys among urls"),
        ({"input": ["a"], "steps": {"url": {}}}, "p.yaml: steps: unknown 'url'.*urls"),
        ({"input": ["a"], "steps": {"zzzz": {}}}, "unknown 'zzzz': choose one of urls, extract, "),
        ({"steps": {}}, "p.yaml: input is missing"),
        ({"input": [1], "steps": {}}, r"p.yaml.input: expected a list of strings, got \[1\]"),
        ({"input": 1, "steps": {}}, "p.yaml.input: expected a list of strings, got 1"),
        ({"input": "a", "steps": {}, "text_key": 1}, "p.yaml.text_key: expected str, got 1"),
        ({"input": "a", "steps": {}, "on_error": "go"}, "p.yaml: on_error 'go': give stop or skip"),
        ({"input": "a", "steps": {"fix": 3}}, "steps.fix: expected settings such as a: 1, got 3"),
        ({"input": "a", "steps": {"fix": {"newlines": 1}}}, "fix.newlines: expected bool, got 1"),
        ({"input": "a", "steps": {"extract": {"min_characters": -1}}}, "min_characters: -1 is neg"),
        ({"input": "a", "steps": {"quality": {"max_symbols": -0.5}}}, "max_symbols: -0.5 is neg"),
        ({"input": "a", "steps": {"language": {"keep": "EN"}}}, "--language EN: not one of the"),
        ({"input": "a", "steps": {"duplicates": {"rows": 0}}}, "duplicates.rows 0: give at least"),
    ],
)
def test_mistakes_in_a_plan_are_named(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_from_dict(data, "p.yaml")


def test_values_of_a_plan_may_be_zero_or_whole() -> None:
    steps = {"quality": {"max_symbols": 0, "min_letters": 1, "min_words": 0}}
    plan = plan_from_dict({"input": ("a", "b"), "steps": steps, "on_error": "skip"}, "p.yaml")
    assert plan == CorpusPlan(
        ("a", "b"),
        {"quality": QualityStep(max_symbols=0.0, min_letters=1.0, min_words=0)},
        on_error="skip",
    )
