"""argparse made from configuration dataclasses: names, types, defaults and grouped help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from megatron.config.command_line import split
from megatron.config.fields import Field, fields_of, from_text, suggestion
from megatron.config.flag import FlagInfo
from megatron.config.refused import HONOURED, REFUSED, KnownFlag
from megatron.errors import ConfigError

Config = TypeVar("Config")


class ToolParser(argparse.ArgumentParser):
    """A tool's command line: its mistakes end with the code of a ConfigError, without the usage.

    Args:
        prog: the tool's file.
        doc: what it does.
        gone: flags of Megatron's tool that this one lacks, and what to do instead.
        shows_defaults: --help appends them.
    """

    def __init__(
        self,
        prog: str,
        doc: str | None,
        gone: Mapping[str, str] | None = None,
        *,
        shows_defaults: bool = False,
    ) -> None:
        formatter: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter
        if shows_defaults:
            formatter = argparse.ArgumentDefaultsHelpFormatter
        super().__init__(prog=prog, description=doc, formatter_class=formatter, allow_abbrev=False)
        self._gone = dict(gone or {})

    def read(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """What was given, None: on this process's command line. Leaves where it is mistaken.

        Unknown flags come first, all of them: one that is misspelt is then not called missing.
        """
        words = list(sys.argv[1:] if argv is None else argv)
        flags = words[: words.index("--")] if "--" in words else words  # behind it are none
        names = [given.name for given in split(flags)]
        # With a space it is a text, for argparse too.
        unknown = [
            name
            for name in names
            if name and " " not in name and name not in self._option_string_actions
        ]
        if unknown and not {"-h", "--help"} & set(names):
            self.error("\nerror: ".join(map(self._unknown, unknown)))
        return self.parse_args(words)

    def _unknown(self, name: str) -> str:
        if name in self._gone:
            return f"{name}: {self._gone[name]}"
        hint = suggestion(name, self._option_string_actions) or ": --help lists all flags"
        return f"unknown flag {name}{hint}"

    def error(self, message: str) -> NoReturn:
        self.exit(ConfigError.exit_code, f"error: {message}\n")


class _Switch(argparse.Action):
    """A flag without value: True, or False by one of its `off` spellings."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, off: Sequence[str], **rest: Any
    ) -> None:
        super().__init__(option_strings, dest, nargs=0, **rest)
        self.off = off

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string not in self.off)


def add_flags(parser: argparse.ArgumentParser, config_type: type) -> None:
    """Add a help group with the flags of a dataclass.

    Flags that are not given leave no trace in the namespace; `from_namespace` fills defaults in.
    """
    title = (config_type.__doc__ or config_type.__name__).splitlines()[0].rstrip(".")
    group = parser.add_argument_group(title)
    for field in fields_of(config_type):
        if field.names:
            _add_flag(group.add_argument, field)


def from_namespace(config_type: type[Config], namespace: argparse.Namespace) -> Config:
    """The dataclass with what was given on the command line, and defaults for the rest."""
    return config_type(**given_values(config_type, namespace))


def given_values(config_type: type, namespace: argparse.Namespace) -> dict[str, Any]:
    """Field name to value, for what was given on the command line only."""
    given = vars(namespace)
    values = {
        field.name: given[field.name] for field in fields_of(config_type) if field.name in given
    }
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def _add_flag(add: Callable[..., Any], field: Field) -> None:
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    help_text = _help(field)
    if field.is_switch:
        shown = field.names + field.info.off
        hidden = tuple(name for name in field.off_names if name not in shown)
        add(*shown, action=_Switch, off=field.off_names, help=help_text, **options)
        if hidden:
            help_text = argparse.SUPPRESS
            add(*hidden, action=_Switch, off=hidden, help=help_text, **options)
        return
    add(
        *field.names,
        type=_reader(field),
        nargs="*" if field.many else None,
        metavar=_metavar(field),
        help=help_text,
        **options,
    )


def _reader(field: Field) -> Any:
    """Text to value, with argparse's kind of error."""

    def read(text: str) -> Any:
        try:
            return from_text(field, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _metavar(field: Field) -> str:
    if field.info.choices:
        return "{" + ",".join(str(choice) for choice in field.info.choices) + "}"
    if field.kind is bool:
        return "{true,false}"
    return {int: "N", float: "X", str: "TEXT"}[field.kind]


def _help(field: Field) -> str:
    """Help, unit and default in one line; `%` is argparse's own sign."""
    facts = [field.info.unit] if field.info.unit else []
    facts.append(f"default: {default_text(field)}")
    return f"{field.info.help} ({'; '.join(facts)})".replace("%", "%%")


def flag_destinations(config_types: Iterable[type]) -> dict[str, str]:
    """Every spelling that the parser knows, to the field (or known flag) that it sets."""
    names = {"-h": "help", "--help": "help", "--config": "config"}
    names |= {flag.name: flag.name for flag in (*REFUSED, *HONOURED)}
    for field in (field for config_type in config_types for field in fields_of(config_type)):
        names |= dict.fromkeys((*field.names, *field.off_names), field.name)
    return names


def default_text(field: Field) -> str:
    """The default as help and documentation print it."""
    if field.default is None or field.default == ():
        return "unset"
    if field.is_switch:
        return "on" if field.default else "off"
    if field.many:
        return " ".join(str(value) for value in field.default)
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def add_known_flags(
    parser: argparse.ArgumentParser, config_types: Iterable[type], given: Collection[str]
) -> None:
    """Megatron's flags without a field, kept out of the help, under their own names.

    A flag that one program has a field for (in `config_types`) is only known to the others. Only
    those that are `given` on the command line are added: there are hundreds, and most runs have
    none.
    """
    taken = {name for each in config_types for field in fields_of(each) for name in field.names}
    wanted = set(given) - taken
    for flag in (flag for flag in (*REFUSED, *HONOURED) if flag.name in wanted):
        options: dict[str, Any] = {
            "dest": flag.name,
            "default": argparse.SUPPRESS,
            "help": argparse.SUPPRESS,
        }
        if flag.kind is None:
            parser.add_argument(flag.name, action="store_true", **options)
        else:
            nargs = "*" if flag.many else None
            parser.add_argument(flag.name, type=_reader(_field_of(flag)), nargs=nargs, **options)


def _field_of(flag: KnownFlag) -> Field:
    assert flag.kind is not None
    info = FlagInfo(help=flag.reason, choices=flag.choices, many=flag.many)
    return Field(flag.name, flag.kind, True, flag.many, flag.default, info)
