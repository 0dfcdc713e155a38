"""Flags without a field: Megatron-LM's, old and current, and those of other programs.

`other_flags.json` contains them, grouped by how they are handled:

    refused         Megatron's flags for unsupported features, with what to do instead
    accepted        Megatron's flags that have no effect here, with the reason
    translated      flags of older versions, translated into current flags
    implied         current flags for the defaults of another program. They are added if one of
                    its flags was translated and the flag named by the key `with` is given
    gone            flags, or single values, of older versions that have no equivalent
    other_programs  other programs' names for Megatron's flags
    of_commands     flags of `megatron pretrain` and similar commands, which scripts do not accept

An entry of `refused` or `accepted` says which values its flag takes:

    --name            nothing: a switch
    --[no-]name       nothing: a switch whose opposite is what Megatron does by default
    --name:int        a value of that type (int, float, str, bool) without a default
    --name=0.5        a value whose default implies the type; `:str=1` states a different type
    --name=a|b        one of these, the default first
    --name:int...     any number of values

The file is read only when a command line contains a flag that belongs to no field, or one whose
meaning has changed.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.config.arguments import ParsedFlag
from megatron.config.experts import ExpertOptions
from megatron.config.fields import Field, FlagInfo, by_spelling, closest_match
from megatron.config.run import Findings

_FILE = Path(__file__).with_suffix(".json")
_KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
_ENTRY = re.compile(
    r"--(?P<no>\[no-\])?(?P<name>[\w-]+)"
    r"(?::(?P<kind>int|float|str|bool))?(?:=(?P<default>.+?))?(?P<many>\.\.\.)?"
)


@dataclass(frozen=True)
class OldFlag:
    """A flag of an older version that can be expressed with current flags.

    Attributes:
        name: The spelling.
        era: The versions that had it.
        now: Its current equivalent, for the documentation.
        becomes: Current flags, each with the words of its value. `*` is replaced by the words of
            the old flag or, within a word, by its only word. An entry with `unless` is left out if
            any flag listed there is given. An entry with `when` is left out unless the old flag's
            value is listed there.
        program: The program that accepts the flag, identified by its file and by another of its
            flags. If empty, all programs accept it.
        choices: The values that the flag takes. If empty, its current equivalent checks them.
        default: The value that needs no notice, because it is the default of the flag's program.
        requires: Flags of which at least one must be given too. If empty, none is needed.
    """

    name: str
    era: str
    now: str
    becomes: Sequence[str | Mapping[str, Any]]
    program: Sequence[str] = ()
    choices: Sequence[str] = ()
    default: str | None = None
    requires: Sequence[str] = ()

    def problem(self, flag: ParsedFlag, flags: Sequence[ParsedFlag]) -> str | None:
        """Return what is wrong with an occurrence of this flag, or `None`.

        Args:
            flag: The occurrence.
            flags: All flags on the command line.
        """
        if self.choices and " ".join(flag.values) not in self.choices:
            return f"{flag}: expected one of {', '.join(self.choices)}"
        if self.requires and not any(other.name in self.requires for other in flags):
            return f"{flag} requires {self.requires[0]}: add it, or drop the flag"
        return None

    def translate(self, flag: ParsedFlag, flags: Sequence[ParsedFlag]) -> list[ParsedFlag]:
        """Return the current flags for an occurrence of this flag.

        Args:
            flag: The occurrence.
            flags: All flags on the command line.
        """
        return _read(self.becomes, flag.values, flags)


def _read(
    entries: Sequence[str | Mapping[str, Any]], values: Sequence[str], flags: Sequence[ParsedFlag]
) -> list[ParsedFlag]:
    """Return the flags that entries in the notation of `OldFlag.becomes` describe."""
    result = []
    for entry in entries:
        options = {"flag": entry} if isinstance(entry, str) else entry
        text, unless, when = options["flag"], options.get("unless", ()), options.get("when")
        if any(flag.name in unless or str(flag) in unless for flag in flags):
            continue
        if when is not None and " ".join(values) not in when:
            continue
        words = [
            word
            for part in text.split()
            for word in (values if part == "*" else (part.replace("*", " ".join(values)),))
        ]
        name = words.pop(0) if text.startswith("--") else ""
        if name or words:
            result.append(ParsedFlag(name, tuple(words)))
    return result


@dataclass(frozen=True)
class RemovedFlag:
    """An old flag, or a single value of a flag, that has no current equivalent."""

    name: str
    era: str
    remedy: str
    value: str | None = None


@dataclass(frozen=True)
class OtherFlags:
    """The contents of `other_flags.json`, with one attribute for each group."""

    refused: tuple[Field, ...]
    accepted: tuple[Field, ...]
    translated: tuple[OldFlag, ...]
    implied: Mapping[str, Mapping[str, Any]]
    removed: tuple[RemovedFlag, ...]
    other_programs: Mapping[str, str]
    of_commands: Mapping[str, str]

    @property
    def unsupported(self) -> tuple[Field, ...]:
        """All of Megatron's flags that are refused by name or accepted without effect."""
        return (*self.refused, *self.accepted)


@functools.cache
def other_flags() -> OtherFlags:
    """Return the contents of `other_flags.json`, which is read once."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    refused, accepted = (
        tuple(
            flag
            for family in content[group]
            for entry in family["flags"]
            for flag in read_entry(entry, family["reason"])
        )
        for group in ("refused", "accepted")
    )
    return OtherFlags(
        refused,
        accepted,
        translated=tuple(OldFlag(**old) for old in content["translated"]),
        implied=content["implied"],
        removed=tuple(
            RemovedFlag(name, family["era"], family["remedy"], value or None)
            for family in content["gone"]
            for name, _, value in (entry.partition(" ") for entry in family["flags"])
        ),
        other_programs=content["other_programs"],
        of_commands=content["of_commands"],
    )


def read_entry(entry: str, reason: str) -> tuple[Field, ...]:
    """Return the flags that an entry of the file describes: one, or a switch and its opposite.

    Each is a field with the flag's name, the reason as its help, and a default that is accepted.
    """
    match = _ENTRY.fullmatch(entry)
    assert match is not None, f"{entry} describes no flag"
    name, text = f"--{match['name']}", match["default"]
    switch = Field(name, bool, False, False, False, FlagInfo(names=name), reason)
    if match["no"]:
        opposite = f"--no-{match['name']}"
        info = FlagInfo(names=opposite)
        return switch, replace(switch, name=opposite, default=True, info=info)
    if match["kind"] is None and text is None:
        return (switch,)
    choices = tuple(text.split("|")) if text and "|" in text else None
    default = choices[0] if choices else text
    kind = _KINDS[match["kind"]] if match["kind"] else _kind_of(default or "")
    value = None if default is None else default == "true" if kind is bool else kind(default)
    if match["many"]:
        value = () if value is None else (value,)
    info = FlagInfo(names=name, choices=choices)
    return (Field(name, kind, True, bool(match["many"]), value, info, reason),)


def _kind_of(text: str) -> type:
    """Return the first of int, float and str that can be read from `text`."""
    for kind in (int, float):
        try:
            kind(text)
        except ValueError:
            continue
        return kind
    return str


def translate(
    flags: Sequence[ParsedFlag], findings: Findings, own_flags: Container[str] = ()
) -> list[ParsedFlag]:
    """Return a command line with its old flags translated into current ones.

    Implied flags are added, and old flags with their default value are dropped.

    Args:
        flags: The command line.
        findings: The findings, to which a notice is added for each translated flag, and a problem
            for each flag that was removed, belongs to another program or has an invalid value.
        own_flags: Flags that only this program has, which are never treated as old.
    """
    table = other_flags()
    old = {flag.name: flag for flag in table.translated if flag.name not in own_flags}
    removed = {
        (flag.name, flag.value): flag for flag in table.removed if flag.name not in own_flags
    }
    result: list[ParsedFlag] = []
    eras = set()
    for flag in flags:
        value = flag.values[0] if flag.values else None
        removed_flag = removed.get((flag.name, None)) or removed.get((flag.name, value))
        entry = old.get(flag.name)
        if removed_flag is not None:
            flag_text = (
                f"{removed_flag.name} {removed_flag.value}"
                if removed_flag.value
                else removed_flag.name
            )
            findings.problems.append(
                f"{flag_text} was removed (last seen in {removed_flag.era}): {removed_flag.remedy}"
            )
        elif entry is None:
            result.append(flag)
        elif entry.program and entry.program[1] not in own_flags:
            findings.problems.append(
                f"{flag} is an old flag ({entry.era}) for {entry.program[0]} {entry.now}: "
                "run that, or drop it"
            )
        elif problem := entry.problem(flag, flags):
            findings.problems.append(problem)
        elif entry.default is not None and value == entry.default:
            continue
        else:
            translated = entry.translate(flag, flags)
            result += translated
            findings.origins |= {new.name: str(flag) for new in translated if new.name != flag.name}
            meaning = " ".join(str(flag) for flag in translated)
            effect = f"read as {meaning}" if meaning else f"which has no effect: {entry.now}"
            is_current = entry.era in ("Megatron-DeepSpeed", "Megatron Core")
            kind = f"a flag of {entry.era}" if is_current else f"an old flag ({entry.era})"
            findings.notices.append(f"{flag} is {kind}, {effect}")
            eras.add(entry.era)
    if "Megatron-DeepSpeed" in eras:
        result = _without_single_expert(result, findings)
    for era in sorted(eras & table.implied.keys()):
        if any(flag.name == table.implied[era]["with"] for flag in result):
            implied = _read(table.implied[era]["flags"], (), flags)
            result += implied
            findings.notices.append(f"defaults of {era}: {' '.join(map(str, implied))}")
    return result


def _without_single_expert(flags: list[ParsedFlag], findings: Findings) -> list[ParsedFlag]:
    """Drop the flags of experts if --num-experts is 1.

    In Megatron-DeepSpeed, this means a dense network.
    """
    experts = [flag for flag in flags if flag.name == "--num-experts"]
    if not experts or set(experts[-1].values) != {"1"}:
        return flags
    names = {*by_spelling([ExpertOptions]), "--expert-model-parallel-size"}
    dropped = " ".join(str(flag) for flag in flags if flag.name in names)
    findings.notices.append(
        "--num-experts 1 is a dense network in Megatron-DeepSpeed, so these flags are ignored: "
        f"{dropped}"
    )
    return [flag for flag in flags if flag.name not in names]


def explain(name: str, known: Mapping[str, Field]) -> tuple[str, str]:
    """Return a line about an unknown flag, and the flag that was probably meant, or "".

    Args:
        name: The flag as the user wrote it.
        known: The fields of the flags that the program knows, by spelling.
    """
    table = other_flags()
    spelled = name.replace("_", "-")
    owner = table.other_programs.get(spelled) or table.of_commands.get(spelled)
    if owner is not None:
        first = re.search(r"--[\w-]+", owner)
        return f"unknown flag {name}: {owner}", first.group() if first else ""
    refused = {flag.name: flag.help for flag in table.refused if known.get(flag.name) is flag}
    current = [word for word in known if word not in refused]
    old = [flag.name for flag in table.translated]
    match = closest_match(name, [*current, *old, *table.of_commands], refused)
    if match is None:
        return f"unknown flag {name}: --help-all lists all flags", ""
    reason = None if match in current else refused.get(match, table.of_commands.get(match))
    note = f" ({reason})" if reason else ""
    return f"unknown flag {name}: did you mean {match}?{note}", match
