"""The command line and the YAML file to one checked `RunOptions`.

    old flags translated  ->  argparse  ->  over YAML  ->  over defaults  ->  resolved  ->  checked

Every mistake found on the way is collected and raised as one `ConfigError`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron.config import yaml_file
from megatron.config.arguments import (
    Given,
    add_flag,
    add_flags,
    from_namespace,
    given_values,
    join,
    split,
)
from megatron.config.checks import RULES, Rule, find_notices, find_problems
from megatron.config.data_files import DATA_FILES, read_data_files
from megatron.config.fields import Field, FlagInfo, fields_of
from megatron.config.model import ROTARY_SPEED, WITHOUT_TABLE
from megatron.config.other_flags import OtherFlag, explain, other_flags, translate
from megatron.config.resolve import forget_derived, longest_sequence, resolve
from megatron.config.run import (
    RunConfig,
    RunOptions,
    field_at,
    flatten,
    narrow,
    sections,
    with_values,
)
from megatron.errors import ConfigError, UserError

ReadCheckpoint = Callable[[str, int | None], Mapping[str, Any]]
FindStart = Callable[[Mapping[str, Any]], RunOptions]
FindReads = Callable[[Mapping[str, Any]], Collection[str] | None]
Result = TypeVar("Result")

# What `--help` shows of a program that takes up a trained model, beside its own flags.
_COMMON_WITH_A_MODEL = (
    *("load", "ckpt_step", "micro_batch_size", "seq_length", "bf16", "fp16", "seed"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
)
# Flags with a field of which older versions took other values, or said something else.
_READ_IN_CONTEXT = ("--apply-query-key-layer-scaling", "--lr-decay-style")


@dataclass(frozen=True)
class ParsedRun:
    """What was asked for.

    Attributes:
        config: resolved and checked.
        notices: lines for rank 0 to print once: old flags, and flags with nothing to do.
        extra: an instance of each of `parse_config`'s extra dataclasses, in their order.
    """

    config: RunConfig
    notices: tuple[str, ...] = ()
    extra: tuple[Any, ...] = ()


@dataclass
class _CommandLine:
    """The command line as read, with the mistakes in it and the flags that they spoilt."""

    namespace: argparse.Namespace
    notices: list[str]
    problems: list[str]
    spoilt: set[str]

    def ask(self, work: Callable[[], Result]) -> Result:
        """What the rest depends on. Where that fails, the mistakes so far are told with it."""
        try:
            return work()
        except UserError as error:
            if self.problems:
                raise ConfigError([*self.problems, str(error)]) from None
            raise


def parse_config(
    argv: Sequence[str] | None = None,
    *,
    world_size: int,
    program: str = "pretrain_gpt.py",
    architecture: str = "gpt",
    extra: Iterable[type] = (),
    read_checkpoint: ReadCheckpoint | None = None,
    find_start: FindStart | None = None,
    rules: Sequence[Rule] = RULES,
    reads: FindReads = lambda given: None,
    check_extra: Callable[..., Iterable[str]] = lambda *extra: (),
    elsewhere: Mapping[str, str] | None = None,
) -> ParsedRun:
    """Read, resolve and check everything a user asked for.

    Args:
        argv: the words after the program's name; None: this process's own.
        world_size: launched processes.
        program: name for `--help`.
        architecture: the kind of network that the program trains.
        extra: dataclasses of further flags, for programs that need them.
        read_checkpoint: for --use-checkpoint-args: from --load and --ckpt-step to the network's
            shape, by "section.field" as `flatten` names it. These values win over flags.
        find_start: for programs that take up a trained model: what was given on the command line,
            by field name, to the run that YAML and flags change. None: the defaults.
        rules: what to check.
        reads: for programs that do not train: what was given on the command line, by field name,
            to what has an effect in them, or is refused by name, by "section.field". The rest is
            taken, and said in one line. None: all of it.
        check_extra: an instance of each of `extra` to the mistakes in them.
        elsewhere: flags that the program has for other purposes, to whose they are.

    Raises:
        ConfigError: all mistakes in the command line, the YAML file and the resulting run.
    """
    extra = tuple(extra)
    words = sys.argv[1:] if argv is None else argv
    line = _read_command_line(words, program, extra, elsewhere or {}, trains=find_start is None)
    start = with_values(RunOptions(), {"model.architecture": architecture})
    if find_start is not None:
        start = with_values(start, flatten(line.ask(lambda: find_start(vars(line.namespace)))))
    base = _read_yaml(getattr(line.namespace, "config", None), start, world_size, line)
    asked = with_values(base, _flag_values(line.namespace))
    unread = _unread(asked, start, reads(vars(line.namespace)), line)
    asked = _with_data_files(asked, unread, line)
    if read_checkpoint is None and find_start is not None:
        asked = _takes_network(asked, line)
    config = _from_checkpoint(asked, read_checkpoint, line)
    start = with_values(start, _changes(asked, config))  # which nobody asked for
    line.problems += _other_kind(config.model.architecture, architecture, program)
    size = config.training.dry_run_world_size if config.training.dry_run else None
    world_size = size or world_size
    config = resolve(config, world_size)
    others: tuple[Any, ...] = tuple(
        from_namespace(config_type, line.namespace) for config_type in extra
    )
    problems = [
        *line.problems,
        *find_problems(config, world_size, line.spoilt, rules),
        *check_extra(*others),
    ]
    if problems:
        raise ConfigError(problems)
    # So that nothing depends on it: a device's rules neither. What files said is taken.
    config = resolve(with_values(config, unread | dict.fromkeys(DATA_FILES)), world_size)
    notices = find_notices(config, world_size, start)
    return ParsedRun(narrow(config, RunConfig), notices=(*line.notices, *notices), extra=others)


def help_if_asked(
    program: str,
    extra: Sequence[type] = (),
    *,
    trains: bool = True,
    argv: Sequence[str] | None = None,
) -> None:
    """Print help and end the process if the command line asks for help.

    Training scripts call this before they import torch, which takes a second.

    Args:
        program: The program's file.
        extra: Dataclasses of the program's own flags.
        trains: Whether the program trains a model, or takes up a trained one.
        argv: The words after the program's name, or `None` for this process's own.
    """
    names = {flag.name for flag in split(sys.argv[1:] if argv is None else argv)}
    if names & {"-h", "--help", "--help-all"}:
        show_help(program, extra, trains=trains, everything="--help-all" in names)
        raise SystemExit(0)


def show_help(
    program: str, extra: Sequence[type] = (), *, trains: bool = True, everything: bool = False
) -> None:
    """Print the flags that are used most, or all flags in a group for each section.

    Args:
        program: The program's file.
        extra: Dataclasses of the program's own flags, all of which are shown.
        trains: Whether the program trains a model, or takes up a trained one.
        everything: Whether to show all flags.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [--config run.yaml] [flags]",
        description="Flags win over the YAML file, and the YAML file over defaults.",
        epilog="A switch --x that is off by default also takes --no-x, to overrule the YAML file. "
        "Flags of Megatron-LM that are not listed are translated or answered by name; "
        "docs/compatibility.md has all of them."
        if everything
        else "These are the flags that are used most; --help-all lists all of them.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="Show the flags used most.")
    parser.add_argument("--help-all", action="store_true", help="Show all flags.")
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same settings.")
    if everything:
        for section in sections().values():
            add_flags(parser, section)
    else:
        group = parser.add_argument_group("Used most")
        for section in sections().values():
            for field in fields_of(section):
                if trains and (field.info.is_common or field.info.required):
                    add_flag(group.add_argument, field)
                elif not trains and field.name in _COMMON_WITH_A_MODEL:
                    info = dataclasses.replace(field.info, required="")
                    add_flag(group.add_argument, dataclasses.replace(field, info=info))
    for section in extra:
        add_flags(parser, section)
    parser.print_help()


def build_parser(
    extra: Sequence[type] = (), given: Iterable[OtherFlag] = ()
) -> argparse.ArgumentParser:
    """Build the whole parser. It raises on the first mistake and never exits.

    Args:
        extra: Dataclasses of further flags.
        given: The flags without a field that are on the command line. There are hundreds, and most
            command lines have none of them.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    for section in (*sections().values(), *extra):
        add_flags(parser, section)
    for flag in given:
        # Under its own name, for no field is called so.
        if flag.kind is None:
            options: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS}
            parser.add_argument(flag.name, action="store_true", **options)
        else:
            info = FlagInfo(names=flag.name, choices=flag.choices)
            field = Field(flag.name, flag.kind, True, flag.many, flag.default, info, flag.reason)
            add_flag(parser.add_argument, field)
    return parser


def asks_for_mpi(argv: Sequence[str] | None = None) -> bool:
    """Whether the command line or its YAML file says --use-mpi.

    The world size must be known before `parse_config`, and this says where to read it. Mistakes are
    left for `parse_config` to report.
    """
    given = split(sys.argv[1:] if argv is None else argv)
    names = [flag.name for flag in given if flag.name in ("--use-mpi", "--no-use-mpi")]
    if names:
        return names[-1] == "--use-mpi"
    files = [flag.values[0] for flag in given if flag.name == "--config" and flag.values]
    if not files:
        return False
    try:
        content = yaml_file.read(Path(files[-1]))
    except ConfigError:
        return False
    return bool(content.values.get("parallel.use_mpi", False))


def _read_command_line(
    argv: Sequence[str],
    program: str,
    extra: Sequence[type],
    elsewhere: Mapping[str, str],
    *,
    trains: bool,
) -> _CommandLine:
    help_if_asked(program, extra, trains=trains, argv=argv)
    given = split(argv)
    names = {flag.name for flag in given}
    own = {name: field for field in _fields(extra) for name in (*field.names, *field.off_names)}
    fields = {
        name: field
        for field in _fields(sections().values())
        for name in (*field.names, *field.off_names)
    } | own
    destinations = {"--config": "config"} | {name: field.name for name, field in fields.items()}
    line = _CommandLine(argparse.Namespace(), [], [], set())
    others: dict[str, OtherFlag] = {}
    if names - {"", *destinations} or names & {*_READ_IN_CONTEXT, *elsewhere}:
        others = {
            flag.name: flag for flag in other_flags().answered if flag.name not in destinations
        }
        destinations |= {name: name for name in others}
        translation = translate(given, {*own, *elsewhere})
        line.notices, line.problems = translation.notices, translation.problems
        given = _drop_unknown(translation.flags, destinations, elsewhere, line)
    _find_contradictions(given, destinations, line)
    answered = [flag for name, flag in others.items() if name in {flag.name for flag in given}]
    parser = build_parser(extra, answered)
    while True:
        try:
            line.namespace, rest = parser.parse_known_args(join(given))
            break
        except argparse.ArgumentError as error:
            spellings = (error.argument_name or "").split("/")
            flag = next(
                (flag for flag in reversed(given) if flag.name in spellings), Given(spellings[0])
            )
            unwanted = error.message.startswith("ignored explicit argument")
            line.problems.append(f"{flag}: {'takes no value' if unwanted else error.message}")
            line.spoilt.update(destinations[name] for name in spellings)
            given = [flag for flag in given if flag.name not in spellings]
    single = {name for name, field in fields.items() if not (field.is_switch or field.many)}
    single |= {flag.name for flag in answered if flag.kind is not None and not flag.many}
    owners = {word: flag.name for flag in given if flag.name in single for word in flag.values[1:]}
    for word in rest:
        owner = f" ({owners[word]} takes one value)" if word in owners else ""
        line.problems.append(f"{word!r} belongs to no flag{owner}: drop it")
    _answer(answered, line)
    return line


def _fields(config_types: Iterable[type]) -> Iterable[Field]:
    """Return the fields of several dataclasses."""
    return (field for config_type in config_types for field in fields_of(config_type))


def _drop_unknown(
    flags: Sequence[Given],
    known: Mapping[str, str],
    elsewhere: Mapping[str, str],
    line: _CommandLine,
) -> list[Given]:
    """Return the known flags. What a misspelt one probably meant is not reported as missing too."""
    for flag in flags:
        if flag.name in elsewhere:
            line.problems.append(f"{flag.name} belongs to {elsewhere[flag.name]}: drop it")
        elif flag.name and flag.name not in known:
            problem, meant = explain(flag.name, known)
            line.problems.append(problem)
            line.spoilt.add(known.get(meant, ""))
    return [flag for flag in flags if not flag.name or flag.name in known]


def _find_contradictions(
    flags: Sequence[Given], destinations: Mapping[str, str], line: _CommandLine
) -> None:
    """Two spellings of one field with different values. The same spelling twice: the last wins."""
    last: dict[str, Given] = {}
    for flag in flags:
        if not flag.name:
            continue
        other = last.setdefault(destinations[flag.name], flag)
        if other.name != flag.name and (other.values != flag.values or not flag.values):
            line.problems.append(f"{other} and {flag} contradict each other: use one of them")
        last[destinations[flag.name]] = flag


def _answer(flags: Iterable[OtherFlag], line: _CommandLine) -> None:
    """Refuse Megatron's flags that have no field, or say that they change nothing."""
    refused = set(other_flags().refused) if flags else set()
    for flag in flags:
        value = getattr(line.namespace, flag.name, flag.default)
        value = tuple(value) if flag.many and value is not None else value
        if value == flag.default:
            continue
        words = value if isinstance(value, tuple) else () if value is True else (value,)
        shown = " ".join([flag.name, *(str(word) for word in words)])
        (line.problems if flag in refused else line.notices).append(f"{shown}: {flag.reason}")


def _other_kind(found: str, expected: str, program: str) -> list[str]:
    """A mistake, where a YAML file or a checkpoint is of another script's network."""
    if found == expected:
        return []
    return [f"the network is a {found}, and {program} trains a {expected}: run pretrain_{found}.py"]


def _read_yaml(
    path: str | None, start: RunOptions, world_size: int, line: _CommandLine
) -> RunOptions:
    """`start` with the file's values."""
    if path is None:
        return start
    try:
        content = yaml_file.read(Path(path))
    except ConfigError as error:
        # What it says is not known: whatever seems missing may stand there.
        raise ConfigError([*line.problems, *error.problems]) from None
    line.problems += content.problems
    line.spoilt |= content.spoilt
    return forget_derived(with_values(start, content.values), world_size)


def _flag_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """What the command line gives, by "section.field"."""
    return {
        f"{section}.{name}": value
        for section, config_type in sections().items()
        for name, value in given_values(config_type, namespace).items()
    }


def _changes(before: RunOptions, after: RunOptions) -> dict[str, Any]:
    """What another run has in its place, by "section.field"."""
    old = flatten(before)
    return {path: value for path, value in flatten(after).items() if value != old[path]}


def _unread(
    asked: RunOptions, start: RunOptions, reads: Collection[str] | None, line: _CommandLine
) -> dict[str, Any]:
    """What the program does not read, as if nobody had asked for it; says which of it was given."""
    if reads is None:
        return {}
    unread = {path: value for path, value in flatten(start).items() if path not in reads}
    given = flatten(asked)
    fields = [field_at(path) for path, value in unread.items() if given[path] != value]
    if fields:
        names = ", ".join(field.shown if field.is_switch else field.names[0] for field in fields)
        line.notices.append(f"these flags change nothing here: {names}")
    return unread


def _with_data_files(config: RunOptions, unread: Collection[str], line: _CommandLine) -> RunOptions:
    """With the corpora that stand in files, which stay named until all is checked."""
    words = read_data_files(config, _flag_values(line.namespace), unread)
    line.problems += words.problems
    line.notices += words.notices
    line.spoilt |= words.spoilt
    return with_values(config, words.values)


def _takes_network(config: RunOptions, line: _CommandLine) -> RunOptions:
    """Of programs that take up a trained model, which do what --use-checkpoint-args asks for."""
    if not config.checkpoint.use_checkpoint_args or config.checkpoint.load is None:
        return config
    line.notices.append("--use-checkpoint-args: the network is the checkpoint's in any case")
    return with_values(config, {"checkpoint.use_checkpoint_args": False})


def _stretch(
    values: dict[str, Any], config: RunOptions, given: Collection[str], line: _CommandLine
) -> None:
    """Let a checkpoint's positions go as far as is asked for, where they need no weights.

    In a finetuning rotary positions turn at the speed that was given, too: see `check_network`.
    """
    path = "model.max_position_embeddings"
    held, kind = values.get(path), values.get("model.position_embedding_type")
    asked = max(config.model.max_position_embeddings or 0, longest_sequence(config.data) or 0)
    if kind in WITHOUT_TABLE and held is not None and asked > held:
        values.pop(path)
        line.notices.append(
            f"--max-position-embeddings {asked}: longer than the checkpoint's {held}; positions of "
            f"--position-embedding-type {kind} have no weights"
        )
    if config.checkpoint.finetune:
        for path in {f"model.{name}" for name in ROTARY_SPEED} & set(given):
            values.pop(path, None)


def _from_checkpoint(
    config: RunOptions, read_checkpoint: ReadCheckpoint | None, line: _CommandLine
) -> RunOptions:
    checkpoint = config.checkpoint
    if not checkpoint.use_checkpoint_args or checkpoint.load is None:
        return config
    if read_checkpoint is None:
        line.problems.append("--use-checkpoint-args: this program reads no checkpoint: drop it")
        return config
    folder, step = checkpoint.load, checkpoint.ckpt_step
    values = dict(line.ask(lambda: read_checkpoint(folder, step)))
    before, default = flatten(config), flatten(RunOptions())
    by_flag, file = _flag_values(line.namespace), getattr(line.namespace, "config", None)
    in_file = {path for path in values if file is not None and before[path] != default[path]}
    _stretch(values, config, in_file | by_flag.keys(), line)
    taken = []
    for path, value in values.items():
        field = field_at(path)
        if value == before[path]:
            continue
        if path in by_flag or path in in_file:
            where = "" if path in by_flag else f" of --config {file}"
            line.notices.append(
                f"{field.spell(before[path])}{where} is overruled: --use-checkpoint-args takes "
                f"{field.spell(value)} from {checkpoint.load}"
            )
        else:
            taken.append(field.spell(value))
    if taken:
        line.notices.append("--use-checkpoint-args: from the checkpoint: " + ", ".join(taken))
    return with_values(config, values)
