"""Command lines: splitting into flags, parsing for a tool, and the text of `--help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.fields import Field, fields_of, from_text, suggestion
from megatron.errors import ConfigError

Config = TypeVar("Config")
MAX_LINE_MB = 64


@dataclass(frozen=True)
class ParsedFlag:
    """A flag as typed, with the words after it. The name is "" for words that follow no flag."""

    name: str
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the flag as it was typed."""
        return " ".join((self.name, *self.values)).strip()


def split(argv: Sequence[str]) -> list[ParsedFlag]:
    """Split `--lr 0.1 --fp16` into two flags, each with the values that follow it.

    Only `-h` and words that begin with two hyphens are flags.
    """
    flags: list[ParsedFlag] = []
    for argument in argv:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            flags.append(ParsedFlag(name, (value,) if equals else ()))
        elif argument == "-h" or not flags:
            flags.append(ParsedFlag(argument) if argument == "-h" else ParsedFlag("", (argument,)))
        else:
            last = flags.pop()
            flags.append(ParsedFlag(last.name, (*last.values, argument)))
    return flags


def value_of(field: Field, flag: ParsedFlag) -> Any:
    """Return the value that a flag gives to its field. Extra words are ignored.

    Raises:
        ValueError: The message says what was expected.
    """
    if field.is_switch:
        if flag.values:
            raise ValueError("takes no value")
        return flag.name not in field.off_names
    if field.many:
        return tuple(from_text(field, argument) for argument in flag.values)
    if not flag.values:
        raise ValueError("expected one argument")
    return from_text(field, flag.values[0])


class _Group:
    """A help group that also records the spellings of its flags in a list."""

    def __init__(self, group: Any, spellings: list[str]) -> None:
        self._group, self._spellings = group, spellings

    def add_argument(self, *names: str, **options: Any) -> Any:
        self._spellings += [name for name in names if name.startswith("-")]
        return self._group.add_argument(*names, **options)


class ToolParser(argparse.ArgumentParser):
    """A parser for a tool's command line.

    A mistake ends the process like a `ConfigError`, without a usage line.

    Args:
        prog: The tool's file or command.
        doc: A description of the tool.
        removed: Flags of Megatron's tool that this tool lacks, each with what to do instead.
        shows_defaults: Whether --help shows the defaults.
    """

    def __init__(
        self,
        prog: str,
        doc: str | None,
        removed: Mapping[str, str] | None = None,
        *,
        shows_defaults: bool = False,
    ) -> None:
        """Create a parser that has no flags yet."""
        formatter: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter
        if shows_defaults:
            formatter = argparse.ArgumentDefaultsHelpFormatter
        self._removed = dict(removed or {})
        self._spellings: list[str] = []
        super().__init__(prog=prog, description=doc, formatter_class=formatter, allow_abbrev=False)

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """Add a flag or a positional argument, as argparse does."""
        self._spellings += [name for name in names if name.startswith("-")]
        return super().add_argument(*names, **options)

    def add_argument_group(self, *args: Any, **options: Any) -> Any:
        """Add a group with its own heading, as argparse does."""
        group = super().add_argument_group(*args, **options)
        # argparse creates two groups of its own before it adds --help.
        return _Group(group, self._spellings) if self._spellings else group

    def add_trust(self) -> None:
        """Add --allow-foreign-checkpoints, for a tool that reads checkpoints."""
        fields = {field.name: field for field in fields_of(CheckpointConfig)}
        field = fields["allow_foreign_checkpoints"]
        self.add_argument(field.names[0], action="store_true", help=field.help)

    def read(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse a command line, by default this process's. Exit after a mistake or --help.

        Unknown flags are reported first, so that a misspelled required flag is not reported as
        missing.
        """
        arguments = list(sys.argv[1:] if argv is None else argv)
        # Words after -- are not flags.
        flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
        names = [flag.name for flag in split(flags)]
        problems = []
        for name in names:
            # Like argparse, treat a word with a space as text.
            if not name or " " in name or name in self._spellings:
                continue
            hint = suggestion(name, self._spellings) or ": --help lists all flags"
            remedy = self._removed.get(name)
            problems.append(f"{name}: {remedy}" if remedy else f"unknown flag {name}{hint}")
        if problems and not {"-h", "--help"} & set(names):
            self.error("\nerror: ".join(problems))
        return self.parse_args(arguments)

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit."""
        self.exit(ConfigError.exit_code, f"error: {message}\n")


class _Switch(argparse.Action):
    """A flag that takes no value: its `off` spellings store False, the others True."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, off: Sequence[str], **options: Any
    ) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)
        self.off = off

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string not in self.off)


def title_of(config_type: type) -> str:
    """Return the heading of a section in help and documentation."""
    return (config_type.__doc__ or config_type.__name__).splitlines()[0].rstrip(".")


def add_flags(parser: argparse.ArgumentParser, config_type: type, *, prefix: str = "") -> None:
    """Add a help group with the flags of a dataclass.

    Args:
        parser: The parser to extend.
        config_type: The dataclass.
        prefix: A prefix for the fields' names in the namespace, to distinguish fields of the same
            name in several dataclasses.
    """
    add_group(parser, title_of(config_type), fields_of(config_type), prefix=prefix)


def add_group(
    parser: argparse.ArgumentParser, title: str, fields: Iterable[Field], *, prefix: str = ""
) -> None:
    """Add a help group with the flags of these fields. Fields without a flag are left out.

    Flags that are not given are absent from the namespace. `from_values` fills in defaults.

    Args:
        parser: The parser to extend.
        title: The heading of the group.
        fields: The fields to add, in this order.
        prefix: A prefix for the fields' names in the namespace (see `add_flags`).
    """
    group = parser.add_argument_group(title)
    for field in fields:
        options: dict[str, Any] = {"action": _Switch, "off": field.off_names}
        if not field.is_switch:
            kinds: dict[type, str] = {int: "N", float: "X", str: "TEXT", bool: "{true,false}"}
            choices = ",".join(map(str, field.info.choices or ()))
            options = {
                "type": _reader(field),
                "metavar": f"{{{choices}}}" if choices else kinds[field.kind],
            }
            options["nargs"] = "*" if field.many else None
        if field.names:
            options |= {"dest": prefix + field.name, "default": argparse.SUPPRESS}
            options["help"] = _help(field)
            group.add_argument(*field.documented_names, **options)


def add_max_line_mb(group: Any) -> None:
    """Add --max-line-mb, which bounds the memory of tools that read text."""
    group.add_argument(
        "--max-line-mb",
        type=int,
        default=MAX_LINE_MB,
        metavar="N",
        help="Maximum size of a line, Parquet row or text file in MiB. A longer one is treated as "
        "a bad line, because encoding it takes 5 to 25 times as much memory (default: "
        f"{MAX_LINE_MB}).",
    )


def minimum_problems(options: argparse.Namespace, **minimums: float) -> list[str]:
    """Return an error message for each flag with a value that is too small.

    Args:
        options: The command line.
        minimums: The smallest allowed value by the flag's name. Flags without a value are skipped.
    """
    problems = []
    for name, minimum in minimums.items():
        value = getattr(options, name)
        values = value if isinstance(value, list) else [value]
        if any(item is not None and not item >= minimum for item in values):  # also rejects NaN
            text = " ".join(f"{item:g}" for item in values)
            problems.append(f"--{name.replace('_', '-')} {text}: give at least {minimum:g}")
    return problems


def prefix_problems(options: argparse.Namespace) -> list[str]:
    """Return an error message if --output-prefix is empty."""
    if options.output_prefix:
        return []
    return [
        '--output-prefix "": give the beginning of the names of the output files, such as '
        "data/corpus"
    ]


def from_values(config_type: type[Config], values_by_name: Mapping[str, Any]) -> Config:
    """Return an instance of a dataclass from values by field name, with defaults for the others.

    Names of other fields are ignored, and lists become tuples.
    """
    kind: type = config_type
    names = [field.name for field in fields_of(kind) if field.name in values_by_name]
    values = {name: values_by_name[name] for name in names}
    return config_type(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def _reader(field: Field) -> Any:
    """Return a function that parses a value from text and raises the error argparse expects."""

    def read(text: str) -> Any:
        try:
            return from_text(field, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _help(field: Field) -> str:
    """Return help, unit and default in one line, with `%` escaped for argparse."""
    facts = [fact for fact in (field.info.required, field.info.unit) if fact]
    if default_text(field) != "unset":
        facts.append(f"default: {default_text(field)}")
    suffix = f" ({'; '.join(facts)})" if facts else ""
    return f"{field.help}{suffix}".replace("%", "%%")


def default_text(field: Field) -> str:
    """Return the default as help and documentation print it."""
    if field.default is None or field.default == ():
        return "unset"
    if field.is_switch:
        return "on" if field.default else "off"
    if field.many:
        return " ".join(str(value) for value in field.default)
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
