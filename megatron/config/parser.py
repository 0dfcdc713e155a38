"""Parsing of the command line and the YAML file into one checked `RunConfig`.

    translate old flags -> read values -> override YAML and defaults -> resolve -> check

The mistakes found on the way are collected and raised as one `ConfigError`. If a file or checkpoint
cannot be read, nothing after it is checked.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from megatron.config import deepspeed, yaml_file
from megatron.config.arguments import (
    ParsedFlag,
    add_flags,
    add_group,
    from_values,
    split,
    title_of,
    value_of,
)
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import RULES, Rule, find_notices, find_problems
from megatron.config.data_files import DATA_FILES, read_data_files, read_retro_workdir
from megatron.config.fields import Field, FlagInfo, by_spelling, fields_of
from megatron.config.model import ROTARY_FREQUENCIES, UNLEARNED_POSITIONS, with_article
from megatron.config.other_flags import explain, other_flags, translate
from megatron.config.resolve import (
    forget_derived,
    longest_sequence,
    resolve,
    without_unused_sizes,
)
from megatron.config.run import (
    Findings,
    RunConfig,
    RunOptions,
    field_at,
    flatten,
    narrow,
    sections,
    values_of,
    with_values,
)
from megatron.errors import ConfigError, UserError

ReadCheckpoint = Callable[[CheckpointConfig], Mapping[str, Any]]
Result = TypeVar("Result")

# Common flags of a program that starts from a trained model, in addition to its own flags.
_COMMON_WITH_A_MODEL = (
    *("load", "ckpt_step", "micro_batch_size", "seq_length", "bf16", "fp16", "seed"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
)
# Current flags that accepted different values, or had a different meaning, in older versions.
_READ_IN_CONTEXT = ("--apply-query-key-layer-scaling", "--lr-decay-style", "--profile")
_CONFIG = Field("config", str, False, False, None, FlagInfo(), "YAML file with flag values.")
_DEEPSPEED = Field(
    *("deepspeed_config", str, False, False, None, FlagInfo(names=" ".join(deepspeed.NAMES))),
    "DeepSpeed's JSON file, whose keys are read as flags (docs/deepspeed.md).",
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The flags that a program accepts, reads and checks. The defaults are those of pretraining.

    Attributes:
        name: The name that `--help` shows.
        extra: Dataclasses of the program's own flags.
        find_start: For programs that start from a trained model, a function that takes the values
            on the command line, by field name, and returns the run to which YAML and flags are
            applied. By default, they are applied to the default values.
        rules: The rules to apply.
        reads: For programs that do not train, a function that takes the values on the command line,
            by field name, and returns the fields that have an effect in the program or are refused
            by name, as "section.field". Other fields are accepted, and one notice names them.
            `None` means all fields.
        check_extra: A function that returns the mistakes in the instances of `extra`.
        flags_of_other_tasks: Flags that belong only to other tasks of the program, with the names
            of those tasks.
    """

    name: str = "pretrain_gpt.py"
    extra: Sequence[type] = ()
    find_start: Callable[[Mapping[str, Any]], RunOptions] | None = None
    rules: Sequence[Rule] = RULES
    reads: Callable[[Mapping[str, Any]], Collection[str] | None] = lambda given: None
    check_extra: Callable[..., Iterable[str]] = lambda *extra: ()
    flags_of_other_tasks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ParsedRun:
    """The result of `parse_config`.

    Attributes:
        config: The resolved and checked configuration.
        notices: Lines for rank 0 to print once, such as those about flags that have no effect.
        extra: An instance of each dataclass in `Program.extra`, in the same order.
    """

    config: RunConfig
    notices: tuple[str, ...] = ()
    extra: tuple[Any, ...] = ()


@dataclass
class _CommandLine(Findings):
    """The values on the command line by field name, and the findings about the run.

    Attributes:
        given: The values.
        program_fields: Names of the program's own fields. Their values are not assigned to run
            fields of the same name.
    """

    program_fields: frozenset[str] = frozenset()
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """The values of a run's fields, by "section.field"."""
        given = self.given.keys() - self.program_fields
        names = ((path, entry.name) for path, entry, _ in values_of(RunOptions()))
        return {path: self.given[name] for path, name in names if name in given}

    def attempt(self, step: Callable[[], Result]) -> Result:
        """Run a step on which all later ones depend, and return its result.

        Raises:
            UserError: The step failed. The mistakes found so far are reported together with its
                error.
        """
        try:
            return step()
        except UserError as error:
            if self.problems:
                raise ConfigError([*self.problems, str(error)]) from None
            raise


def parse_config(
    argv: Sequence[str],
    *,
    world_size: int,
    architecture: str = "gpt",
    program: Program = Program(),
    read_checkpoint: ReadCheckpoint | None = None,
) -> ParsedRun:
    """Read, resolve and check the configuration of a run. With --help, print help and exit.

    Args:
        argv: The command line, without the program's name.
        world_size: The number of launched processes. --dry-run-world-size replaces it.
        architecture: The kind of network that the program trains.
        program: The flags that the program accepts, reads and checks.
        read_checkpoint: A function that takes the options for checkpoints and returns the shape of
            the network in --load, by "section.field", for --use-checkpoint-args. These values
            override flags, except for a longer context and, with --finetune, rotary settings.

    Raises:
        ConfigError: The command line, a file or the resulting run has mistakes. The error lists all
            of them or, if a file cannot be read, those found before it.
        UserError: `find_start` or `read_checkpoint` failed.
    """
    has_model = program.find_start is not None
    help_if_asked(program.name, program.extra, trains=not has_model, argv=argv)
    line = _read_command_line(argv, program)

    # Apply the YAML file, DeepSpeed's file, flags, data files and the checkpoint, in this order.
    start = _find_start(architecture, program, line)
    with_yaml = _with_yaml_file(start, world_size, line)
    deepspeed_file = _read_deepspeed_file(line)
    with_flags = with_values(with_yaml, {**deepspeed_file.values, **line.values})
    dry_run_size = with_flags.training.dry_run_world_size if with_flags.training.dry_run else None
    processes = dry_run_size or world_size
    batch_sizes = deepspeed.batch_sizes(with_flags, deepspeed_file, processes, line)
    with_sizes = with_values(with_flags, batch_sizes)
    unread = _unused_values(with_sizes, start, program.reads(line.given), line)
    with_data = with_values(with_sizes, read_data_files(with_sizes, line.values, unread, line))
    requested = with_values(with_data, read_retro_workdir(with_data, line))
    saved = _from_checkpoint(requested, read_checkpoint, has_model, line)
    resolved = resolve(without_unused_sizes(with_values(requested, saved), line), processes)

    trained, expected = resolved.model.architecture, start.model.architecture
    if trained != expected:
        line.problems.append(
            f"the network is {with_article(trained)}, and {program.name} trains "
            f"{with_article(expected)}: run pretrain_{trained}.py"
        )
    problems = find_problems(resolved, processes, line.unknown_fields, program.rules)
    line.problems += deepspeed_file.explain(problems)
    extra: tuple[Any, ...] = tuple(
        from_values(config_type, line.given) for config_type in program.extra
    )
    line.problems += program.check_extra(*extra)
    if line.problems:
        raise ConfigError(line.with_origins())

    # Nothing may depend on values that the program does not read. The contents of data files have
    # already replaced the flags that name the files.
    config = resolve(with_values(resolved, unread | dict.fromkeys(DATA_FILES)), processes)
    not_given = with_values(start, saved)  # values that do not come from the user
    notices = (*line.notices, *find_notices(config, processes, not_given))
    return ParsedRun(narrow(config, RunConfig), notices, extra)


def help_if_asked(
    program: str,
    extra: Sequence[type] = (),
    *,
    trains: bool = True,
    argv: Sequence[str] | None = None,
) -> None:
    """Print help and end the process if the command line asks for help.

    Programs call this before they import torch, which takes a second.

    Args:
        program: The program's file or command.
        extra: Dataclasses of the program's own flags.
        trains: Whether the program trains a model. Otherwise it starts from a trained one.
        argv: The arguments after the program's name, or `None` for this process's own.
    """
    names = {flag.name for flag in split(sys.argv[1:] if argv is None else argv)}
    if names & {"-h", "--help", "--help-all"}:
        show_help(program, extra, trains=trains, everything="--help-all" in names)
        raise SystemExit(0)


def show_help(
    program: str, extra: Sequence[type] = (), *, trains: bool = True, everything: bool = False
) -> None:
    """Print the most common flags, or all flags grouped by section.

    Args:
        program: The program's file or command, for the usage line.
        extra: Dataclasses of the program's own flags, all of which are shown.
        trains: Whether the program trains a model. If not, it starts from a trained one.
        everything: Whether to show all flags.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [--config run.yaml] [flags]",
        description="Flags override the YAML file, and the YAML file overrides defaults.",
        epilog="A switch --x that is off by default also takes --no-x, to override the YAML file. "
        "Flags of Megatron-LM that are not listed are translated, ignored, or refused with a "
        "reason; docs/compatibility.md has all of them."
        if everything
        else "These are the most common flags; --help-all lists all of them.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="Show the most common flags.")
    parser.add_argument("--help-all", action="store_true", help="Show all flags.")
    parser.add_argument("--config", metavar="FILE", help="YAML file with flag values.")
    all_fields = [field for section in sections().values() for field in fields_of(section)]
    if everything:
        # A program's own flag takes the place of a general one of the same name.
        own = {name for section in extra for field in fields_of(section) for name in field.names}
        for section in sections().values():
            fields = (field for field in fields_of(section) if own.isdisjoint(field.names))
            add_group(parser, title_of(section), fields)
    elif trains:
        common = (field for field in all_fields if field.info.is_common or field.info.required)
        add_group(parser, "Used most", common)
    else:
        common = (field for field in all_fields if field.name in _COMMON_WITH_A_MODEL)
        optional = (replace(field, info=replace(field.info, required="")) for field in common)
        add_group(parser, "Used most", optional)
    for section in extra:
        add_flags(parser, section)
    parser.print_help()


def asks_for_mpi(argv: Sequence[str]) -> bool:
    """Return whether the world size, which `parse_config` needs, comes from mpirun's variables."""
    return asks_for("parallel.use_mpi", argv, ["--deepspeed_mpi"])


def asks_for(path: str, argv: Sequence[str], old_names: Collection[str] = ()) -> bool:
    """Return whether the command line or its YAML file turns a switch on.

    Mistakes are ignored here, because `parse_config`, called later, reports them.

    Args:
        path: The field, as "section.field".
        argv: The command line.
        old_names: Old names of the switch.
    """
    flags, field = split(argv), field_at(path)
    switches = [flag.name for flag in flags if flag.name in (*field.spellings, *old_names)]
    if switches:
        return switches[-1] not in field.off_names
    files = [flag.values[0] for flag in flags if flag.name == "--config" and flag.values]
    try:
        values = yaml_file.read(Path(files[-1]), Findings()) if files else {}
    except ConfigError:
        return False
    return bool(values.get(path, False))


@functools.cache
def _fields_of_runs() -> dict[str, Field]:
    """Return the fields of a run by each spelling of their flags."""
    return by_spelling(sections().values())


def _read_command_line(argv: Sequence[str], program: Program) -> _CommandLine:
    own, flags = by_spelling(program.extra), split(argv)
    line = _CommandLine(program_fields=frozenset(field.name for field in own.values()))
    names = {flag.name for flag in flags}
    known = {"--config": _CONFIG} | dict.fromkeys(deepspeed.NAMES, _DEEPSPEED)
    known |= _fields_of_runs() | own
    without_field: dict[str, Field] = {}
    if names - {"", *known} or names & {*_READ_IN_CONTEXT, *program.flags_of_other_tasks}:
        without_field = {
            field.name: field
            for field in other_flags().unsupported
            if field.name not in known and field.name not in program.flags_of_other_tasks
        }
        known |= without_field
        deepspeed.check_flags(flags, line)
        flags = translate(flags, line, {*own, *program.flags_of_other_tasks})
        flags = _drop_unknown(flags, known, program.flags_of_other_tasks, line)
    _find_contradictions(flags, known, line)
    stray_values = []
    for flag in flags:
        if not flag.name:
            stray_values += [f"{word!r} does not belong to a flag: drop it" for word in flag.values]
            continue
        field = known[flag.name]
        try:
            value = value_of(field, flag)
            if field.info.adds:
                value = (*line.given.get(field.name, ()), *value)
            line.given[field.name] = value
        except ValueError as error:
            line.problems.append(f"{flag}: {error}")
            line.unknown_fields.add(field.name)
        if not (field.is_switch or field.many):
            stray_values += [
                f"{word!r} does not belong to a flag ({flag.name} takes one value): drop it"
                for word in flag.values[1:]
            ]
    line.problems += stray_values
    _report_flags_without_field(without_field, line)
    return line


def _drop_unknown(
    flags: Sequence[ParsedFlag],
    known: Mapping[str, Field],
    flags_of_other_tasks: Mapping[str, str],
    findings: Findings,
) -> list[ParsedFlag]:
    """Return the known flags, and report the others.

    The fields that misspelled flags probably meant are added to `findings.unknown_fields`.
    """
    for flag in flags:
        if flag.name in flags_of_other_tasks:
            findings.problems.append(
                f"{flag.name} belongs to {flags_of_other_tasks[flag.name]}: drop it"
            )
        elif flag.name and flag.name not in known:
            problem, match = explain(flag.name, known)
            findings.problems.append(problem)
            if match in known:
                findings.unknown_fields.add(known[match].name)
    return [flag for flag in flags if not flag.name or flag.name in known]


def _find_contradictions(
    flags: Sequence[ParsedFlag], known: Mapping[str, Field], findings: Findings
) -> None:
    """Report fields that two spellings set differently. A repeated spelling is no contradiction."""
    last: dict[str, ParsedFlag] = {}
    for flag in flags:
        if not flag.name:
            continue
        other = last.get(known[flag.name].name, flag)
        if other.name != flag.name and (other.values != flag.values or not flag.values):
            findings.problems.append(f"{other} and {flag} contradict each other: use one of them")
        last[known[flag.name].name] = flag


def _report_flags_without_field(without_field: Mapping[str, Field], line: _CommandLine) -> None:
    """Report Megatron's flags that have no field, as refused or as having no effect."""
    for name, entry in without_field.items():
        value = line.given.get(name, entry.default)
        if value != entry.default:
            flag = name if value is True else entry.spell(value)
            is_refused = entry in other_flags().refused
            lines = line.problems if is_refused else line.notices
            lines.append(f"{flag}: {entry.help}")


def _find_start(architecture: str, program: Program, line: _CommandLine) -> RunOptions:
    """Return the run to which YAML and flags are applied."""
    defaults = with_values(RunOptions(), {"model.architecture": architecture})
    find = program.find_start
    if find is None:
        return defaults
    return with_values(defaults, flatten(line.attempt(lambda: find(line.given))))


def _with_yaml_file(start: RunOptions, world_size: int, line: _CommandLine) -> RunOptions:
    """Apply the values of --config, if it is given."""
    if "config" not in line.given:
        return start
    count = line.given.get("dry_run_world_size") if line.given.get("dry_run") else None
    path = Path(line.given["config"])
    values = line.attempt(lambda: yaml_file.read(path, line, count or world_size))
    return forget_derived(with_values(start, values), world_size)


def _read_deepspeed_file(line: _CommandLine) -> deepspeed.DeepSpeedFile:
    """Return the values of DeepSpeed's file, if one is given."""
    path = line.given.get(_DEEPSPEED.name)
    if path is None:
        return deepspeed.DeepSpeedFile()
    return line.attempt(lambda: deepspeed.read(Path(path), line.values, line))


def _unused_values(
    requested: RunOptions, start: RunOptions, reads: Collection[str] | None, findings: Findings
) -> dict[str, Any]:
    """Return the starting values of the fields that have no effect in this program.

    A notice names the flags that were given for such fields.
    """
    if reads is None:
        return {}
    unread = {path: value for path, value in flatten(start).items() if path not in reads}
    requested_values = flatten(requested)
    fields = [field_at(path) for path, value in unread.items() if requested_values[path] != value]
    if fields:
        names = ", ".join(field.display_name for field in fields)
        findings.notices.append(f"these flags have no effect here: {names}")
    return unread


def _from_checkpoint(
    config: RunOptions, read: ReadCheckpoint | None, has_model: bool, line: _CommandLine
) -> dict[str, Any]:
    """Return the values that --use-checkpoint-args changes, by "section.field", and report them."""
    checkpoint = config.checkpoint
    if not checkpoint.use_checkpoint_args or checkpoint.load is None:
        return {}
    if read is None and has_model:  # this program always reads the network from its checkpoint
        line.notices.append("--use-checkpoint-args: the network always comes from the checkpoint")
        return {"checkpoint.use_checkpoint_args": False}
    if read is None:
        line.problems.append(
            "--use-checkpoint-args: this program does not read checkpoints: drop it"
        )
        return {}
    values = dict(line.attempt(lambda: read(checkpoint)))
    requested, default, file = flatten(config), flatten(RunOptions()), line.given.get("config")
    in_file = {path for path in values if file is not None and requested[path] != default[path]}
    _keep_requested_length(values, config, in_file | line.values.keys(), line)
    values = {path: value for path, value in values.items() if value != requested[path]}
    adopted = []
    for path, value in values.items():
        flag = field_at(path).spell(value)
        if path not in line.values and path not in in_file:
            adopted.append(flag)
            continue
        source = "" if path in line.values else f" of --config {file}"
        line.notices.append(
            f"{field_at(path).spell(requested[path])}{source} is overridden: --use-checkpoint-args "
            f"takes {flag} from {checkpoint.load}"
        )
    if adopted:
        line.notices.append("--use-checkpoint-args: from the checkpoint: " + ", ".join(adopted))
    return values


def _keep_requested_length(
    values: dict[str, Any], config: RunOptions, given: Collection[str], findings: Findings
) -> None:
    """Drop the checkpoint's maximum length if a longer one is requested.

    This requires position encodings without weights, such as rotary ones. In finetuning, values
    given for the rotary base and scaling also override those of the checkpoint (`check_network`).
    """
    path = "model.max_position_embeddings"
    saved_length, kind = values.get(path), values.get("model.position_embedding_type")
    requested_length = max(
        config.model.max_position_embeddings or 0, longest_sequence(config.data) or 0
    )
    if kind in UNLEARNED_POSITIONS and saved_length is not None and requested_length > saved_length:
        values.pop(path)
        findings.notices.append(
            f"--max-position-embeddings {requested_length}: longer than the checkpoint's "
            f"{saved_length}; positions of --position-embedding-type {kind} have no weights"
        )
    if config.checkpoint.finetune:
        for path in {f"model.{name}" for name in ROTARY_FREQUENCIES} & set(given):
            values.pop(path, None)
