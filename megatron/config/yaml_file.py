"""A run as a YAML file: sections are `RunOptions`'s fields, keys are the fields of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.config.fields import fields_of, from_yaml, suggestion
from megatron.config.run import RunOptions, sections, with_values
from megatron.errors import ConfigError


@dataclass
class Content:
    """What a file says.

    Attributes:
        values: by "section.field", those that could be read.
        problems: one line for each that could not.
        spoilt: field names of the latter.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    spoilt: set[str] = field(default_factory=set)


class _Loader(yaml.SafeLoader):
    """Plain values only; a key that stands twice would lose its first value in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if isinstance(name, str) and name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name!r} appears twice: keep one of them", key.start_mark
                )
            seen.add(name if isinstance(name, str) else None)
        return super().construct_mapping(node, deep)


def read(path: Path) -> Content:
    """Return every value and every mistake of a file.

    Raises:
        ConfigError: The file cannot be read, or is not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    try:
        data = _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from None
    return _read_sections({} if data is None else data, str(path))


def dump(config: RunOptions) -> str:
    """Return every value of a run as text that `read` can parse."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def to_dict(config: RunOptions) -> dict[str, dict[str, Any]]:
    """Return sections of plain values, suitable for YAML and JSON."""
    return {
        name: {
            entry.name: _plain(getattr(getattr(config, name), entry.name))
            for entry in fields_of(section)
        }
        for name, section in sections().items()
    }


def from_dict(data: Any, source: str) -> RunOptions:
    """Return the run that `to_dict` converted.

    Raises:
        ConfigError: unknown sections or keys, or values that do not fit; `source` names the file.
    """
    content = _read_sections(data, source)
    if content.problems:
        raise ConfigError(content.problems)
    return with_values(RunOptions(), content.values)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _read_sections(data: Any, path: str) -> Content:
    content = Content()
    if not isinstance(data, Mapping):
        content.problems.append(f"{path}: expected sections such as `model:`, got {data!r}")
        return content
    known = sections()
    for name, part in data.items():
        if name not in known:
            hint = suggestion(str(name), known) or f": sections are {', '.join(known)}"
            content.problems.append(f"{path}: unknown section {name}{hint}")
        elif part is not None and not isinstance(part, Mapping):
            content.problems.append(f"{path}: {name}: expected `key: value` lines, got {part!r}")
        else:
            _read_section(name, part or {}, path, content)
    return content


def _read_section(section: str, part: Mapping[Any, Any], path: str, content: Content) -> None:
    known = {entry.name: entry for entry in fields_of(sections()[section])}
    for key, value in part.items():
        if key not in known:
            hint = suggestion(str(key), known)
            content.problems.append(f"{path}: unknown key {section}.{key}{hint}")
            continue
        try:
            content.values[f"{section}.{key}"] = from_yaml(known[key], value)
        except ValueError as error:
            content.problems.append(f"{path}: {section}.{key}: {error}")
            content.spoilt.add(key)
