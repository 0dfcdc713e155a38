"""The file of flags without a field is well-formed, and is only read when it is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.config import other_flags as module
from megatron.config.fields import fields_of
from megatron.config.other_flags import other_flags, read_entry
from megatron.config.run import sections
from tests.config.command import parse, problems

_CONTENT: dict[str, Any] = json.loads(Path(module.__file__).with_suffix(".json").read_text())
_FIELDS = {
    name
    for section in sections().values()
    for field in fields_of(section)
    for name in (*field.names, *field.off_names)
}
_REMEDY = re.compile(r"\b(use|drop|give|save memory with|record passes with|name the key|load a)\b")


def test_the_file_has_its_parts() -> None:
    assert list(_CONTENT) == [
        *("refused", "accepted", "translated", "implied", "gone", "other_programs", "of_commands")
    ]
    for part in ("refused", "accepted"):
        assert all(set(family) == {"reason", "flags"} for family in _CONTENT[part])
    for old in _CONTENT["translated"]:
        assert (
            {"name", "era", "now", "becomes"}
            <= set(old)
            <= {*("name", "era", "now", "becomes", "program", "choices", "default", "requires")}
        )
    assert all(set(family) == {"remedy", "era", "flags"} for family in _CONTENT["gone"])


def test_every_entry_is_well_formed() -> None:
    for part in ("refused", "accepted"):
        for family in _CONTENT[part]:
            for entry in family["flags"]:
                for flag in read_entry(entry, family["reason"]):
                    assert re.fullmatch(r"--\w[\w-]*", flag.name)
                    assert flag.info.choices is None or flag.default in flag.info.choices
    for old in other_flags().translated:
        assert re.fullmatch(r"--\w[\w-]*", old.name)
        texts = [one if isinstance(one, str) else one["flag"] for one in old.becomes]
        assert all(text == "*" or text.startswith("--") for text in texts)
        conditional = [set(one) for one in old.becomes if not isinstance(one, str)]
        assert all(keys in ({"flag", "unless"}, {"flag", "when"}) for keys in conditional)
        values = {
            value
            for one in old.becomes
            if not isinstance(one, str)
            for value in one.get("when", ())
        }
        assert values <= {*old.choices}
        assert old.default is None or old.default in old.choices


def test_names_are_unique_and_no_field_has_one() -> None:
    table = other_flags()
    names = Counter(flag.name for flag in (*table.unsupported, *table.translated))
    names.update({(flag.name, flag.value) for flag in table.removed})
    names.update([*table.other_programs, *table.of_commands])
    assert [name for name, count in names.items() if count > 1] == []
    whole = {flag.name for flag in table.unsupported} | {*table.other_programs, *table.of_commands}
    whole |= {flag.name for flag in table.removed if flag.value is None}
    assert whole & _FIELDS == set()


def test_flags_that_older_versions_read_differently_are_listed() -> None:
    """If a command line has one of them, the file is read although the flag has a field."""
    from megatron.config.parser import _READ_IN_CONTEXT

    table = other_flags()
    names = {flag.name for flag in (*table.translated, *table.removed)}
    assert names & _FIELDS == {*_READ_IN_CONTEXT}


def test_every_refusal_ends_with_a_remedy() -> None:
    reasons = {family["reason"] for family in _CONTENT["refused"]}
    reasons |= {family["remedy"] for family in _CONTENT["gone"]} | {
        *_CONTENT["other_programs"].values(),
        *_CONTENT["of_commands"].values(),
    }
    assert [reason for reason in reasons if not _REMEDY.search(reason)] == []
    assert [r for r in reasons if r.endswith(".") or "not built" in r or "out of scope" in r] == []


def test_the_file_is_not_read_for_a_command_line_of_todays_flags() -> None:
    code = (
        "from megatron.config import other_flags, parser\n"
        "from tests.config.command import command\n"
        "parser.parse_config(command('--seed 3'), world_size=1)\n"
        "print(other_flags.other_flags.cache_info().currsize)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize(
    ("given", "meant"), [("--gpu", "--gpus"), ("--smal", "--small"), ("--tasks", "--task")]
)
def test_flags_of_commands_are_suggested_to_scripts(given: str, meant: str) -> None:
    remedy = other_flags().of_commands[meant]
    (line,) = problems(f"{given} 1")
    assert line == f"unknown flag {given}: did you mean {meant}? ({remedy})"
    assert problems(f"{meant} 1") == [f"unknown flag {meant}: {remedy}"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--lora-r", "use --lora-rank"),
        ("--model-path", "use --load"),
        ("--test-tokens", "--help-all lists all flags"),
        ("--no-tensor-parallel", "drop it: --tensor-model-parallel-size is 1 unless given"),
        ("--no-context-parallel", "--help-all lists all flags"),
    ],
)
def test_a_flag_of_another_meaning_is_no_suggestion(given: str, said: str) -> None:
    assert problems(f"{given} 3") == [f"unknown flag {given}: {said}"]


def test_the_remedy_of_2019s_corpora_names_todays_flag() -> None:
    for split in ("train", "valid", "test"):
        (line,) = problems(f"--{split}-data corpus")
        assert line.endswith(f"and use --{split}-data-path")


def test_an_old_style_of_decay_is_refused_and_todays_is_not() -> None:
    assert parse("--lr-decay-style cosine").notices == ()
    (line,) = problems("--lr-decay-style exponential")
    assert line.startswith("--lr-decay-style exponential was removed")
