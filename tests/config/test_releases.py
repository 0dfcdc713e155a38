"""Every flag of every release is read, translated, or reported by name, and never ignored.

`megatron_releases.json` has the names in the training parsers of Megatron-LM's releases
(arguments.py, those of its inference and Model Optimizer, and what Core makes from dataclasses), of
both Megatron-DeepSpeeds, and of all commits in between, each name under the first that had it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config.deepspeed import NAMES
from megatron.config.fields import Field, by_spelling
from megatron.config.other_flags import other_flags
from megatron.config.run import sections
from megatron.errors import ConfigError
from tests.config.command import parse

_FILE = Path(__file__).with_name("megatron_releases.json")
_RELEASES: dict[str, list[str]] = json.loads(_FILE.read_text())
_FIELDS = {*by_spelling(sections().values()), *NAMES}


def test_the_record_is_whole() -> None:
    names = [name for flags in _RELEASES.values() for name in flags]
    assert (len(names), len(set(names))) == (1239, 1239)
    assert {"v0.1", "v1.0", "23.08", "core_v0.19.0"} <= _RELEASES.keys()


@pytest.mark.parametrize("release", _RELEASES)
def test_every_flag_of_a_release_is_known(release: str) -> None:
    """Tests of fields, old names and removed flags check the result of each."""
    table = other_flags()
    known = {flag.name for flag in (*table.unsupported, *table.translated)} | _FIELDS
    known |= {flag.name for flag in table.removed if flag.value is None}
    assert set(_RELEASES[release]) - known == set()


@pytest.mark.parametrize("part", ["refused", "accepted"])
def test_no_flag_without_a_field_is_ignored(part: str) -> None:
    """Anything but Megatron's default leads to a line that begins with the flag."""
    flags = getattr(other_flags(), part)
    asks = [flag for flag in flags if not (flag.is_switch and flag.default)]  # not --no-x
    assert [flag.name for flag in asks if not _answers(flag)] == []


def _answers(flag: Field) -> bool:
    words = [flag.name]
    if not flag.is_switch:
        others = [choice for choice in flag.info.choices or () if choice != flag.default]
        words.append(str(others[0] if others else {int: 7, float: 0.7}.get(flag.kind, "true")))
    try:
        lines = list(parse(*words).notices)
    except ConfigError as error:
        lines = error.problems
    return [line.partition(": ")[::2] for line in lines] in (
        [(" ".join(words), flag.help)],
        [(flag.name, flag.help)],
    )
