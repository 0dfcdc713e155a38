"""Fields of configuration dataclasses as flags: their attributes, and parsing of their values."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")
MAX_LAYERS = 10_000  # so that `t*999999999` in a layout string is an error instead of a hang
MAX_IDS = 2**31 - 1  # token ids and sample offsets are stored in 32 bits
MAX_WIDTH = 2**24  # the largest matrix dimension, so that products of two do not overflow
_MAX_DIVISORS = 1024  # the largest divisor that a message lists
_LARGEST = 2**63 - 1  # the limit for sizes of files, tensors and datasets
_EXPECTED = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A condition for a flag. If it is not met, the flag has no effect or is an error.

    Attributes:
        is_met: A function that returns whether the condition holds for a resolved run (a
            `RunOptions`).
        description: The flags that meet the condition, worded to follow "has no effect without"
            and "requires".
    """

    is_met: Callable[[Any], Any]
    description: str


# Conditions for flags of several groups.
CYCLIC = Requirement(lambda run: run.data.dataloader_type == "cyclic", "--dataloader-type cyclic")
RECOMPUTED = Requirement(
    lambda run: run.training.recompute_granularity == "full", "--recompute-granularity full"
)
HALF = Requirement(lambda run: run.precision.fp16 or run.precision.bf16, "--fp16 or --bf16")
LOADS = Requirement(lambda run: run.checkpoint.load is not None, "--load")
MIXTURE = Requirement(lambda run: run.model.num_experts, "--num-experts")
QK_NORM = Requirement(lambda run: run.model.qk_layernorm, "--qk-layernorm")
ROTARY = Requirement(lambda run: run.model.has_rotary_embeddings, "--position-embedding-type rope")
SAVES = Requirement(lambda run: run.checkpoint.save is not None, "--save")
SFT = Requirement(lambda run: run.finetuning.sft, "--sft")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlagInfo:
    """The attributes of a flag beyond its name, type, default and help.

    Attributes:
        unit: What the number counts, for example "tokens" or "minutes".
        names: Flag spellings separated by spaces, the preferred one first. If empty, `--` and the
            field's name.
        off: Spellings that turn a switch off. If empty, `--no-` and the preferred spelling.
        choices: The accepted values.
        convert: The function that parses the value, if not the usual one for its type.
        notice: A line that is printed once if the value is not the default. It is for flags that
            are accepted although they have no effect.
        at_least: The smallest value.
        above: A number that every value must exceed.
        below: A number that every value must stay below.
        at_most: The largest value.
        needs: The condition without which the flag has no effect.
        requires: The condition that must be met if the value is not the default.
        only_for: The kinds of network that the flag is for. If empty, all.
        is_common: Whether `--help` shows the flag; otherwise only `--help-all` does.
        required: The remark in `--help` on a flag that must be given. Such a flag is always shown.
        adds: Whether repeating the flag appends values instead of replacing them.
        is_flag: Whether the field has a flag. Without one, the program sets the value, and the
            YAML file stores it.
    """

    unit: str = ""
    names: str = ""
    off: str = ""
    choices: tuple[Any, ...] | None = None
    convert: Callable[[str], Any] | None = None
    notice: str | None = None
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    needs: Requirement | None = None
    requires: Requirement | None = None
    only_for: tuple[str, ...] = ()
    is_common: bool = False
    required: str = ""
    adds: bool = False
    is_flag: bool = True


def flag(default: Any, **info: Any) -> Any:
    """Return a dataclass field with a default and the given attributes of `FlagInfo`.

    A field that needs none of these attributes can have a plain default and is still a flag. The
    help of each field is in the docstring of its class, under `Attributes:`.
    """
    return dataclasses.field(default=default, metadata={"flag": FlagInfo(**info)})


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a configuration dataclass.

    Attributes:
        name: The attribute, the key in YAML, and the destination of the flag.
        kind: The type of the value, or of each of `many` values: int, float, str or bool.
        optional: Whether the value may be None.
        many: Whether the value is a tuple, and the flag takes any number of values.
        default: The value if none is given.
        info: Unit, spellings, bounds and other attributes.
        help: The help text: a few sentences, which name the off value if there is one.
    """

    name: str
    kind: type
    optional: bool
    many: bool
    default: Any
    info: FlagInfo
    help: str

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.kind is bool and not self.optional

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Spellings that give a value or turn a switch on; none if there is no flag."""
        if not self.info.is_flag:
            return ()
        return tuple(self.info.names.split()) or ("--" + self.name.replace("_", "-"),)

    @functools.cached_property
    def off_names(self) -> tuple[str, ...]:
        """Spellings that turn a switch off, if any: Megatron's own, or the name after `--no-`."""
        if self.info.off:
            return tuple(self.info.off.split())
        if self.names and self.is_switch and not self.name.startswith("no_"):
            return ("--no-" + self.names[0].removeprefix("--"),)
        return ()

    @functools.cached_property
    def spellings(self) -> tuple[str, ...]:
        """All spellings, including those that turn a switch off."""
        return self.names + self.off_names

    @property
    def documented_names(self) -> tuple[str, ...]:
        """Spellings that documentation lists, including `off_names` if the default is on."""
        return self.names + (self.off_names if self.default is True else ())

    @property
    def display_name(self) -> str:
        """The spelling to show for a value other than the default."""
        return self.off_names[0] if self.default is True else self.names[0]

    def spell(self, value: Any) -> str:
        """Return a value as messages show it: `--lr 0.1`, `--swiglu`, `--no-swiglu`."""
        return " ".join(word or '""' for word in self.to_args(value))

    def to_args(self, value: Any) -> list[str]:
        """Return a value as command-line arguments."""
        if self.is_switch and self.names and (value or self.off_names):
            return [self.names[0] if value else self.off_names[0]]
        unset = "" if self.kind is str else "none"
        values = value if isinstance(value, tuple | list) else (unset if value is None else value,)
        texts = [
            # Write 10000 instead of 10000.0 if that is the same number.
            f"{item:g}" if isinstance(item, float) and float(f"{item:g}") == item else str(item)
            for item in values
        ]
        texts = [str(value).lower()] if isinstance(value, bool) else texts
        return [self.names[0] if self.names else self.name, *texts]

    def out_of_bounds(self, value: Any) -> str:
        """Return the rule that a value violates, such as "must be at least 1", or ""."""
        if value is None:
            return ""
        info = self.info
        bounds = [
            (f"{words} {bound}", fits(value, bound))
            for words, bound, fits in (
                ("at least", info.at_least, operator.ge),
                ("above", info.above, operator.gt),
                ("at most", info.at_most, operator.le),
                ("below", info.below, operator.lt),
            )
            if bound is not None
        ]
        if all(fits for _, fits in bounds):
            return ""
        # "Below" says little without the lower bound.
        shown = [text for text, fits in bounds if not fits or info.below is not None]
        return f"must be {' and '.join(shown)}"


@functools.cache
def fields_of(config_type: type) -> tuple[Field, ...]:
    """Return the fields of a configuration dataclass, with their help."""
    hints = typing.get_type_hints(config_type)
    helps = attribute_docs(config_type)
    return tuple(
        _field(entry, hints[entry.name], helps.get(entry.name, ""))
        for entry in dataclasses.fields(config_type)
    )


def by_spelling(config_types: Iterable[type]) -> dict[str, Field]:
    """Return the fields of several dataclasses by each spelling of their flags."""
    return {
        name: field
        for config_type in config_types
        for field in fields_of(config_type)
        for name in field.spellings
    }


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the text of each name under `Attributes:` in the docstrings of a class and its bases.

    An entry of the class overrides the entry of a base.
    """
    texts: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        entries = inspect.cleandoc(owner.__doc__ or "").partition("\nAttributes:\n")[2]
        pairs = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", entries, re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in pairs}
    return texts


def _field(entry: dataclasses.Field[Any], hint: Any, help: str) -> Field:
    optional = False
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        optional = True
    many = typing.get_origin(hint) is tuple
    kind = typing.get_args(hint)[0] if many else hint
    assert kind in _EXPECTED, f"{entry.name}: no flag for values of type {kind}"
    assert help, f"{entry.name}: its class's docstring does not describe it under Attributes:"
    info = entry.metadata.get("flag", FlagInfo())
    return Field(entry.name, kind, optional, many, entry.default, info, help)


def closest_match(
    name: str, candidates: Iterable[str], fallbacks: Iterable[str] = ()
) -> str | None:
    """Return the known word that a misspelled or shortened word probably means, or None.

    The order of preference is a very similar word, the shortest flag that has all parts of `name`
    (as in `--tensor-parallel`), and a roughly similar word. A word that differs in a whole part
    means something else: `--train-epochs` is not `--train-iters`.

    Args:
        name: The word as the user wrote it.
        candidates: The words that it may mean.
        fallbacks: Other words, considered only if no candidate matches as closely.
    """
    import difflib  # needed only for error messages

    parts = _parts(name)

    def is_another(candidate: str) -> bool:
        own_parts, other_parts = parts - _parts(candidate), _parts(candidate) - parts
        return bool(own_parts and other_parts) and not all(
            difflib.get_close_matches(part, other_parts, cutoff=0.7) for part in own_parts
        )

    groups = [
        [candidate for candidate in group if not is_another(candidate)]
        for group in (candidates, fallbacks)
    ]
    for group in groups:
        if matches := difflib.get_close_matches(name, group, n=1, cutoff=0.8):
            return matches[0]
        if extensions := [flag for flag in group if parts <= _parts(flag)]:
            return min(extensions, key=lambda flag: len(_parts(flag)))  # the first of the shortest
    for group in groups:
        if matches := difflib.get_close_matches(name, group, n=1, cutoff=0.6):
            return matches[0]
    return None


def _parts(word: str) -> set[str]:
    """Return the hyphen-separated parts of a flag."""
    return set(word.lstrip("-").replace("_", "-").split("-"))


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `: did you mean X?`, or "" if no known word is close."""
    match = closest_match(word, known)
    return f": did you mean {match}?" if match else ""


def from_text(field: Field, text: str) -> Any:
    """Parse a value as it is written on a command line.

    An optional single value that YAML sets can be unset with `none` or, if it is a string, with an
    empty string. Bounds are not checked.

    Raises:
        ValueError: The message says what was expected.
    """
    unset = "" if field.kind is str else "none"
    if field.optional and not field.many and text == unset:
        return None
    value = field.info.convert(text) if field.info.convert else text_to(field.kind, text)
    check_choice(field.info.choices, value)
    return value


def text_to(kind: type, text: str) -> Any:
    """Convert text to int, float, bool or str.

    Raises:
        ValueError: The message says what was expected.
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
    """Reject an integer that does not fit in 64 bits.

    Raises:
        ValueError: The message says how large it may be.
    """
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"expected a whole number of 64 bits (at most {_LARGEST}), got {value}")


def check_choice(choices: tuple[Any, ...] | None, value: Any) -> None:
    """Reject a value that is not among the choices.

    Raises:
        ValueError: The message lists the choices.
    """
    if choices is None or value in choices:
        return
    words = [str(choice) for choice in choices]
    hint = suggestion(str(value), words)
    raise ValueError(f"expected one of {', '.join(words)}, got {str(value)!r}{hint}")


def from_yaml(field: Field, value: Any) -> Any:
    """Read a field's value from YAML.

    YAML reads `1e-5` as text, and leaves list items such as blend weights as numbers. Both are
    accepted, and so is a single value in place of a list. Bounds are not checked.

    Raises:
        ValueError: The message says what was expected.
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


def near_multiples(number: int, step: int) -> str:
    """Return the positive multiples of `step` nearest to a number, as text.

    For example, this is `32 or 64` for 48 and a step of 32.
    """
    below = number // step * step
    return " or ".join(str(value) for value in (below, below + step) if value)


def divisors(number: int) -> str:
    """Return the divisors of a number, up to 1024, as text: `1, 2, 3 or 6` for 6."""
    limit = min(number, _MAX_DIVISORS)
    values = [str(value) for value in range(1, limit + 1) if number % value == 0]
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
