"""How a dataclass field becomes a command-line flag: `flag()` holds what the type cannot say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class FlagInfo:
    """What the parser, `--help`, YAML and the documentation need beyond name, type and default.

    Attributes:
        help: one sentence; names the off value where there is one.
        unit: what the number counts, for example "tokens" or "minutes".
        names: flag spellings, first the preferred one. Empty: `--` and the field's name.
        off: spellings that turn a field with default True off, for example `--no-x`.
        choices: the accepted values.
        many: takes any number of values (the field is a tuple).
        convert: text to value where the annotation's own type would not do.
        notice: printed once where the value is not the default, for a flag that is honoured in
            meaning: there is nothing here for it to change.
        is_flag: False for what only the YAML file holds: see `setting`.
    """

    help: str
    unit: str | None = None
    names: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    many: bool = False
    convert: Callable[[str], Any] | None = None
    notice: str | None = None
    is_flag: bool = True


def flag(
    default: Any,
    help: str,
    *,
    unit: str | None = None,
    names: str | Sequence[str] = (),
    off: str | Sequence[str] = (),
    choices: Sequence[Any] | None = None,
    many: bool = False,
    convert: Callable[[str], Any] | None = None,
    notice: str | None = None,
) -> Any:
    """A dataclass field with `default` that is also a command-line flag."""
    info = FlagInfo(
        help=help,
        unit=unit,
        names=_words(names),
        off=_words(off),
        choices=None if choices is None else tuple(choices),
        many=many,
        convert=convert,
        notice=notice,
    )
    return dataclasses.field(default=default, metadata={"flag": info})


def _words(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def setting(default: Any, help: str, *, choices: Sequence[Any]) -> Any:
    """A field that the program sets and the YAML file keeps; no flag."""
    info = FlagInfo(help=help, choices=tuple(choices), is_flag=False)
    return dataclasses.field(default=default, metadata={"flag": info})
