"""A run as a YAML file, with a section per field of `RunOptions` and a key per field of a section.

Two more sections turn the file into a recipe: `layouts` contains, for each number of processes,
sections that override the others, and `recipe` describes the file (`megatron.recipes.catalog`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron.config.fields import Field, fields_of, from_yaml, suggestion
from megatron.config.run import Findings, RunOptions, flatten, sections, with_values
from megatron.errors import ConfigError

_ABOUT, _LAYOUTS = "recipe", "layouts"
_MAX_SIZE = 2 << 20  # characters of a file, and of its values with each alias written out
_NODE_SIZE = 64  # characters added for each value, because PyYAML takes 50 us for one
_MAX_DEPTH = 20  # PyYAML's time is quadratic in the depth
_MAX_DIGITS = 100  # digits of a number; parsing base 60 takes quadratic time


class _Loader(yaml.SafeLoader):
    """A loader of plain values of limited size.

    It rejects repeated keys, because all values but the last would be lost.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._size = 0
        self._sizes: dict[int, int] = {}  # size of each node, by its id

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, and limit the time and the memory that the file can take."""
        event, before = self.peek_event(), self._size
        self._depth += 1
        self._check(self._depth <= _MAX_DEPTH, f"more than {_MAX_DEPTH} levels", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            self._size += self._sizes.get(id(node), _MAX_SIZE)  # unknown inside the node itself
        else:
            text = node.value if isinstance(node, yaml.ScalarNode) else ""
            is_number = node is not None and node.tag.endswith((":int", ":float"))
            self._check(not is_number or len(text) <= _MAX_DIGITS, "a number is too long", event)
            self._size += _NODE_SIZE + len(text)
            self._sizes[id(node)] = self._size - before
        self._check(self._size <= _MAX_SIZE, "too many values, or an endless structure", event)
        return node

    def _check(self, condition: bool, problem: str, event: yaml.Event) -> None:
        if not condition:
            raise yaml.YAMLError(f"{problem}\n{event.start_mark}")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = self.construct_object(key)
            if not isinstance(name, Hashable):
                continue  # the superclass rejects it
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name!r} appears twice: keep one of them", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def read(path: Path, findings: Findings, world_size: int = 1) -> dict[str, Any]:
    """Read a file, return its values by "section.field", and add its mistakes to `findings`.

    Args:
        path: The file.
        findings: The findings, to which mistakes are added, and a notice if the file has layouts
            but none that fits.
        world_size: The number of processes, which selects one of a recipe's layouts.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or is too large.
    """
    data = load("--config", path)
    if not isinstance(data, Mapping):
        return read_sections({} if data is None else data, str(path), findings, sections())
    run = {name: part for name, part in data.items() if name not in (_ABOUT, _LAYOUTS)}
    values = read_sections(run, str(path), findings, sections())
    layouts = _read_layouts(data.get(_LAYOUTS), str(path), findings)
    chosen = layout_for(layouts, world_size)
    if chosen is not None:
        values |= layouts[chosen]
    elif layouts:
        findings.notices.append(
            f"{path} has layouts for {', '.join(map(str, layouts))} processes and their multiples, "
            f"not for {world_size}: the flags for layouts keep their defaults unless you give them"
        )
    return values


def layout_for(counts: Iterable[int], world_size: int) -> int | None:
    """Return which of a recipe's process counts to use on `world_size` processes, if any.

    This is the largest count that divides `world_size`, because a multiple of a count only adds
    replicas of the model.
    """
    return max((count for count in counts if world_size % count == 0), default=None)


def _read_layouts(data: Any, path: str, findings: Findings) -> dict[int, dict[str, Any]]:
    """Return the values of each layout by "section.field", by number of processes."""
    layouts: dict[int, dict[str, Any]] = {}
    if data is not None and not isinstance(data, Mapping):
        findings.problems.append(
            f"{path}: {_LAYOUTS}: expected numbers of processes with sections, got {data!r}"
        )
        return layouts
    for count, part in (data or {}).items():
        if type(count) is not int or count < 1:
            findings.problems.append(
                f"{path}: {_LAYOUTS}: expected a number of processes, got {count!r}"
            )
            continue
        layouts[count] = read_sections(
            part or {}, f"{path}: {_LAYOUTS}.{count}", findings, sections()
        )
    return layouts


def load(flag: str, path: Path) -> Any:
    """Return the plain values of the YAML file that a flag names, or `None` if it is empty.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or is too large.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_SIZE + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{flag} {path}: cannot be read: {reason}") from None
    if len(text) > _MAX_SIZE:
        raise ConfigError(f"{flag} {path}: larger than {_MAX_SIZE >> 20} MiB")
    try:
        return _Loader(text).get_single_data()
    except MemoryError:
        raise
    except Exception as error:  # PyYAML also raises other errors, for a 13th month or `!!int ""`
        raise ConfigError(f"{flag} {path}: not valid YAML: {error}") from None


def dump(config: RunOptions) -> str:
    """Return all values of a run as YAML text that `read` can parse."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def to_dict(config: RunOptions) -> dict[str, dict[str, Any]]:
    """Return a run as sections of plain values, suitable for YAML and JSON."""
    result: dict[str, dict[str, Any]] = {}
    for path, value in flatten(config).items():
        section, _, name = path.partition(".")
        plain = list(value) if isinstance(value, tuple) else value
        result.setdefault(section, {})[name] = plain
    return result


def from_dict(data: Any, source: str) -> RunOptions:
    """Convert the result of `to_dict` back to a run.

    Args:
        data: The sections of the run.
        source: The file that contains them, to be named in messages.

    Raises:
        ConfigError: There are unknown sections or keys, or values that do not fit.
    """
    findings = Findings()
    values = read_sections(data, source, findings, sections())
    if findings.problems:
        raise ConfigError(findings.problems)
    return with_values(RunOptions(), values)


def read_sections(
    data: Any, path: str, findings: Findings, known: Mapping[str, type]
) -> dict[str, Any]:
    """Return the values of a file by "section.field", and add its mistakes to `findings`.

    Args:
        data: The contents of the file, as plain values.
        path: The file, to be named in messages.
        findings: The findings, to which mistakes are added.
        known: The dataclass of each section, by its name.
    """
    values: dict[str, Any] = {}
    if not isinstance(data, Mapping):
        findings.problems.append(
            f"{path}: expected sections such as `{next(iter(known))}:`, got {data!r}"
        )
        return values
    for name, part in data.items():
        if name not in known:
            hint = suggestion(str(name), known) or f": sections are {', '.join(known)}"
            findings.problems.append(f"{path}: unknown section {name}{hint}")
        elif part is not None and not isinstance(part, Mapping):
            findings.problems.append(f"{path}: {name}: expected `key: value` lines, got {part!r}")
        else:
            fields = {entry.name: entry for entry in fields_of(known[name])}
            values |= _read_section(name, part or {}, path, findings, fields)
    return values


def _read_section(
    section: str, part: Mapping[Any, Any], path: str, findings: Findings, known: Mapping[str, Field]
) -> dict[str, Any]:
    values = {}
    for key, value in part.items():
        if key not in known:
            hint = suggestion(str(key), known)
            findings.problems.append(f"{path}: unknown key {section}.{key}{hint}")
            continue
        try:
            values[f"{section}.{key}"] = from_yaml(known[key], value)
        except ValueError as error:
            findings.problems.append(f"{path}: {section}.{key}: {error}")
            findings.unknown_fields.add(key)
    return values
