"""Recipes from the package and from the user's own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import yaml_file
from megatron.config.arguments import ParsedFlag, split
from megatron.config.fields import suggestion
from megatron.config.parser import parse_config
from megatron.config.run import Findings, RunOptions, values_of
from megatron.errors import ConfigError

FOLDER = Path(__file__).resolve().parent
_YAML = (".yaml", ".yml")
FILES = (*_YAML, ".json")  # file extensions of recipes


@dataclass(frozen=True)
class NamedRun:
    """A recipe: the values of a run, and facts about it.

    Attributes:
        name: The recipe's name, for example "gpt-125m".
        path: The YAML file for `--config`, or the Hugging Face folder or config.json.
        facts: The section `recipe` of the file, or what a config.json says instead.
        values: The values for one process, by "section.field".
        layouts: The numbers of processes for which the recipe has layouts, in ascending order.
    """

    name: str
    path: Path
    facts: Mapping[str, Any]
    values: Mapping[str, Any]
    layouts: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of parameters, or 0 if the file does not give it."""
        return int(self.facts.get("parameters", 0))

    @property
    def architecture(self) -> str:
        """The kind of network: gpt, bert, t5, retro or ict."""
        return str(self.values.get("model.architecture", "gpt"))


def is_huggingface(path: Path) -> bool:
    """Return whether a path ends with .json, existing or not, or is a folder with a config.json."""
    return path.suffix == ".json" or (path / "config.json").is_file()


def is_recipe(name: str) -> bool:
    """Return whether a name is that of a recipe, a YAML file, or a Hugging Face model.

    Files are recognized by their extension, even if they do not exist.
    """
    path = Path(name)
    return name in names() or path.suffix in _YAML or is_huggingface(path)


def names() -> list[str]:
    """Return the names of all recipes of the package, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str) -> NamedRun:
    """Return the recipe with this name, in this YAML file, or for this Hugging Face folder.

    Raises:
        CheckpointError: A config.json cannot be read, or its network is not supported.
        ConfigError: There is no such recipe, or its file is invalid.
    """
    if name in names():
        return read(FOLDER / f"{name}.yaml")
    path = Path(name)
    if path.suffix in _YAML:
        return read(path)
    if is_huggingface(path):
        from megatron.recipes.derive import describe_run

        facts, values = describe_run(path)
        folder = path.parent if path.suffix == ".json" else path
        return NamedRun(folder.resolve().name, path, facts, values, ())
    if path.is_dir():
        raise ConfigError(f"{name}: this folder has no config.json: name a recipe or a YAML file")
    hint = suggestion(name, names()) or ": `megatron recipes` lists all of them"
    raise ConfigError(f"no recipe is named {name!r}{hint}")


def read(path: Path) -> NamedRun:
    """Read the recipe in a YAML file.

    Raises:
        ConfigError: The file cannot be read, or is invalid.
    """
    findings = Findings()
    values = yaml_file.read(path, findings)
    if findings.problems:
        raise ConfigError(findings.problems)
    data = yaml_file.load("--config", path) or {}
    facts = data.get("recipe") or {}
    if not isinstance(facts, Mapping):
        raise ConfigError(f"{path}: recipe: expected `key: value` lines, got {facts!r}")
    for name in ("parameters", "vocabulary"):
        count = facts.get(name, 1)
        if type(count) is not int or count < 1:
            raise ConfigError(
                f"{path}: recipe.{name}: expected a whole number above 0, got {count!r}"
            )
    return NamedRun(path.stem, path, facts, values, tuple(sorted(data.get("layouts") or ())))


def as_script(args: Sequence[str]) -> tuple[str, list[str]]:
    """Return the kind of network and the flags for its training script.

    Args:
        args: The arguments after `megatron pretrain`. --gpus and the recipe are dropped from them,
            and the flags that stand for the recipe are added.

    Raises:
        UserError: Neither a recipe nor the flags of a network are given, several recipes or a
            recipe and --config are given, or the recipe is invalid.
    """
    given = split(args)
    flags = command_line_of([flag for flag in given if flag.name not in ("", "--gpus")])
    name = name_of(given)
    if name is None:
        if not set(flags) - {"--finetune"}:
            raise ConfigError(
                "no recipe: name one (`megatron recipes` lists them), a YAML file or a Hugging "
                "Face folder, or give all flags of the network"
            )
        return architecture_of(given), flags
    if "--config" in {flag.name for flag in given}:
        raise ConfigError(f"{name} and --config: both name a YAML file: give one of them")
    if is_huggingface(Path(name)):
        from megatron.recipes.derive import derive_flags

        architecture, derived = derive_flags(Path(name))
        return architecture, [*derived, *flags]
    recipe = find(name)
    return recipe.architecture, ["--config", str(recipe.path), *flags]


def architecture_of(given: Sequence[ParsedFlag]) -> str:
    """Return the kind of network that flags imply, for a run without a recipe.

    For example, `--retro-workdir` implies Retro. If the flags imply none or several, it is a GPT.
    """
    names = {flag.name for flag in given}
    architectures: set[str] = set()
    for _, field, _ in values_of(RunOptions()):
        if len(field.info.only_for) == 1 and names & set(field.spellings):
            architectures.update(field.info.only_for)
    return architectures.pop() if len(architectures) == 1 else "gpt"


class _InCheckpointError(Exception):
    """Raised to stop parsing if only a checkpoint describes the network."""


def check_flags(architecture: str, flags: Sequence[str], processes: int) -> None:
    """Check the flags of a script before its processes start.

    Nothing is checked with --use-checkpoint-args, because a checkpoint then describes the network.

    Args:
        architecture: The kind of network, which names the script.
        flags: The flags of the script.
        processes: The number of processes.

    Raises:
        ConfigError: One or more flags are wrong, or a file that they name cannot be read.
    """

    def stop(_: object) -> Mapping[str, Any]:
        raise _InCheckpointError

    with suppress(_InCheckpointError):
        parse_config(flags, world_size=processes, architecture=architecture, read_checkpoint=stop)


def name_of(given: Sequence[ParsedFlag]) -> str | None:
    """Return the name of the recipe: the word before all flags, or `None` if there is none.

    Raises:
        ConfigError: There are several such words.
    """
    values = [value for flag in given if not flag.name for value in flag.values]
    if len(values) > 1:
        raise ConfigError(f"{' '.join(values)}: give one recipe: `megatron recipes` lists them")
    return values[0] if values else None


def command_line_of(flags: Sequence[ParsedFlag]) -> list[str]:
    """Return flags as the words of a command line."""
    return [text for flag in flags for text in (flag.name, *flag.values)]


def format_count(number: object) -> str:
    """Return a number of parameters or tokens for a table, such as `6.74B`, or "" if not an int."""
    if not isinstance(number, int):
        return ""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return str(number)
