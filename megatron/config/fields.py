"""What a configuration dataclass says about its fields; text and YAML turned into values."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

from megatron.config.flag import FlagInfo

_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")
_LARGEST = 2**63 - 1  # what files, tensors and the length of a dataset hold
_EXPECTED = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a configuration dataclass.

    Attributes:
        name: the attribute, the argparse destination and the key in YAML.
        kind: int, float, str or bool: type of the value, or of each value where `many`.
        optional: None is a value too.
        many: a tuple of values.
        default: the value where nothing is asked for.
        info: help, unit, spellings.
    """

    name: str
    kind: type
    optional: bool
    many: bool
    default: Any
    info: FlagInfo

    @property
    def is_switch(self) -> bool:
        """The flag takes no value."""
        return self.kind is bool and not self.optional

    @property
    def names(self) -> tuple[str, ...]:
        """Spellings that give a value, or turn a switch on; none of what is no flag."""
        if not self.info.is_flag:
            return ()
        return self.info.names or ("--" + self.name.replace("_", "-"),)

    @property
    def off_names(self) -> tuple[str, ...]:
        """Spellings that turn a switch off: Megatron's own, or `--no-` and the name."""
        if self.info.off:
            return self.info.off
        if self.is_switch and not self.name.startswith("no_"):
            return ("--no-" + self.names[0].removeprefix("--"),)
        return ()

    @property
    def shown(self) -> str:
        """The spelling that asks for something other than the default."""
        return self.off_names[0] if self.default is True else self.names[0]

    def spell(self, value: Any) -> str:
        """A value as one would give it as a flag: `--lr 0.1`, `--swiglu`, `--no-swiglu`."""
        if self.is_switch and self.names and (value or self.off_names):
            return self.names[0] if value else self.off_names[0]
        unset = '""' if self.kind is str else "none"
        words = value if isinstance(value, tuple | list) else (unset if value is None else value,)
        return " ".join([self.names[0] if self.names else self.name, *map(_word, words)])


def _word(value: Any) -> str:
    """10000 and not 10000.0, as far as that is the same number."""
    is_short = isinstance(value, float) and float(f"{value:g}") == value
    return f"{value:g}" if is_short else str(value)


@functools.cache
def fields_of(config_type: type) -> tuple[Field, ...]:
    """The flags of a dataclass whose fields are made by `flag()`: of options, if those differ."""
    hints = typing.get_type_hints(config_type)
    return tuple(_field(entry, hints[entry.name]) for entry in dataclasses.fields(config_type))


def _field(entry: dataclasses.Field[Any], hint: Any) -> Field:
    optional = False
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        optional = True
    many = typing.get_origin(hint) is tuple
    kind = typing.get_args(hint)[0] if many else hint
    info = entry.metadata["flag"]
    assert kind in _EXPECTED, f"{entry.name}: no flag for values of type {kind}"
    assert many == info.many, f"{entry.name}: many goes with a tuple"
    return Field(entry.name, kind, optional, many, entry.default, info)


def nearest(word: str, known: Iterable[str], others: Iterable[str] = ()) -> str | None:
    """The known word that a misspelt or shortened one stands for; None where none is near.

    Parts of a long flag, as in `--tensor-parallel`, say more than a similar sound.

    Args:
        word: as written.
        known: what it may stand for.
        others: what it may stand for too, where no known word is as near.
    """
    import difflib  # only mistakes need it

    groups = [list(known), list(others)]
    parts = word.lstrip("-").split("-")
    for words in groups:
        if near := difflib.get_close_matches(word, words, n=1, cutoff=0.8):
            return near[0]
        longer = [flag for flag in words if set(parts) <= set(flag.lstrip("-").split("-"))]
        if longer:
            return min(longer, key=len)
    for words in groups:
        if near := difflib.get_close_matches(word, words, n=1, cutoff=0.6):
            return near[0]
    return None


def suggestion(word: str, known: Iterable[str]) -> str:
    """`: did you mean X?`, or nothing where no known word is near."""
    near = nearest(word, known)
    return f": did you mean {near}?" if near else ""


def from_text(field: Field, text: str) -> Any:
    """One value as written on a command line.

    What YAML sets can be unset again: by `none`, or by nothing where a value is text.

    Raises:
        ValueError: the message says what was expected.
    """
    unset = "" if field.kind is str else "none"
    if field.optional and not field.many and text == unset:
        return None
    value = field.info.convert(text) if field.info.convert else text_to(field.kind, text)
    check_choice(field.info.choices, value)
    return value


def text_to(kind: type, text: str) -> Any:
    """`text` as int, float, bool or str.

    Raises:
        ValueError: the message says what was expected.
    """
    word = text.strip().lower()
    if kind is bool and word in _TRUE_WORDS + _FALSE_WORDS:
        return word in _TRUE_WORDS
    if kind is not bool:
        try:
            value: Any = kind(text)
        except ValueError:
            pass
        else:
            _check_size(value)
            if kind is not float or math.isfinite(value):
                return value
    raise ValueError(f"expected {_EXPECTED[kind]}, got {text!r}")


def _check_size(value: Any) -> None:
    """Refuse a whole number that is beyond 64 bits, whatever it counts.

    Raises:
        ValueError: the message says how large it may be.
    """
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"expected a whole number of 64 bits (at most {_LARGEST}), got {value}")


def check_choice(choices: tuple[Any, ...] | None, value: Any) -> None:
    """Refuse a value that is not among the choices.

    Raises:
        ValueError: the message lists the choices.
    """
    if choices is None or value in choices:
        return
    words = [str(choice) for choice in choices]
    hint = suggestion(str(value), words)
    raise ValueError(f"expected one of {', '.join(words)}, got {str(value)!r}{hint}")


def from_yaml(field: Field, value: Any) -> Any:
    """A field's value as read from YAML.

    YAML calls `1e-5` text, and leaves list items such as blend weights as numbers: both are taken.

    Raises:
        ValueError: the message says what was expected.
    """
    if value is None:
        if field.optional:
            return None
        raise ValueError(f"expected {_EXPECTED[field.kind]}, got nothing")
    if not field.many:
        return _scalar_from_yaml(field, value)
    items = value if isinstance(value, list) else [value]
    if field.kind is str:
        items = [str(item) if _is_number(item) else item for item in items]
    return tuple(_scalar_from_yaml(field, item) for item in items)


def _scalar_from_yaml(field: Field, value: Any) -> Any:
    if isinstance(value, str):
        return from_text(field, value)
    if field.kind is float and _is_number(value):
        value = float(value)
    endless = isinstance(value, float) and not math.isfinite(value)
    if type(value) is not field.kind or endless:
        quote = ": put it in quotes" if field.kind is str and _is_number(value) else ""
        raise ValueError(f"expected {_EXPECTED[field.kind]}, got {value!r}{quote}")
    _check_size(value)
    check_choice(field.info.choices, value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
