"""What is known of a flag of Megatron's that no field stands for, and families of such flags."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_KINDS: dict[str, type] = {"int": int, "float": float, "str": str}
_ENTRY = re.compile(
    r"--(?P<no>\[no-\])?(?P<name>[\w-]+)"
    r"(?::(?P<kind>int|float|str))?(?:=(?P<default>.+?))?(?P<many>\.\.\.)?"
)


@dataclass(frozen=True)
class KnownFlag:
    """A flag of Megatron's that no field stands for.

    Attributes:
        name: its spelling.
        reason: one line for the user.
        kind: type of its value; None: it takes none.
        default: Megatron's, which passes; None passes for flags without value or default.
        choices: the accepted values.
        many: it takes any number of values.
    """

    name: str
    reason: str
    kind: type | None = None
    default: Any = None
    choices: tuple[str, ...] | None = None
    many: bool = False


def family(reason: str, names: str) -> tuple[KnownFlag, ...]:
    """Flags with one answer.

    Args:
        reason: why, and what to do instead.
        names: each as it is written, and what it takes:

            --name            nothing: a switch
            --[no-]name       nothing, with an opposite that is what Megatron does anyway
            --name:int        a value of that type (int, float, str), with no default
            --name=0.5        a value, whose default says the type; `:str=1` where it does not
            --name=a|b        one of these, the default first
            --name:int...     any number of values
    """
    return tuple(flag for entry in names.split() for flag in _read(entry, reason))


def _read(entry: str, reason: str) -> tuple[KnownFlag, ...]:
    match = _ENTRY.fullmatch(entry)
    assert match is not None, f"{entry} is no entry of a family"
    name, text = match["name"], match["default"]
    if match["no"]:
        opposite = KnownFlag(f"--no-{name}", reason, default=True)
        return (KnownFlag(f"--{name}", reason), opposite)
    if match["kind"] is None and text is None:
        return (KnownFlag(f"--{name}", reason),)
    choices = tuple(text.split("|")) if text and "|" in text else None
    default = choices[0] if choices else text
    kind = _KINDS[match["kind"]] if match["kind"] else _kind_of(default or "")
    value = None if default is None else kind(default)
    many = bool(match["many"])
    if many:
        value = () if value is None else (value,)
    return (KnownFlag(f"--{name}", reason, kind, value, choices, many),)


def _kind_of(text: str) -> type:
    """int, float or str: the first that can be read from `text`."""
    for kind in (int, float):
        try:
            kind(text)
        except ValueError:
            continue
        return kind
    return str
