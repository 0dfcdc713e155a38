"""Files that set data flags: --data-args-path, --per-split-data-args-path and --retro-workdir.

Once the flags and the YAML file are read, the words in such a file become the values of the flags
that it replaces. A saved config.yaml therefore names the corpora themselves, and caches,
fingerprints and positions are the same as if the command line had named them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.data import SPLIT_NAMES
from megatron.config.retro import ARGUMENTS, read_arguments
from megatron.config.run import Findings, RunOptions, field_at, flatten
from megatron.errors import ConfigError

_WHOLE, _EACH = "data.data_args_path", "data.per_split_data_args_path"
# The fields that name a file, and the fields that each file sets.
DATA_FILES: Mapping[str, tuple[str, ...]] = {
    _WHOLE: ("data.data_path",),
    _EACH: tuple(f"data.{split}_data_path" for split in SPLIT_NAMES),
}
_REMEDY = {
    _WHOLE: "give a text file with the values of --data-path, separated by whitespace",
    _EACH: 'give a JSON file such as {"train": ["0.3", "A", "0.7", "B"], "valid": "C", '
    '"test": null}, where null means no data',
}
# Settings that follow from the arguments of Retro's working folder, with the arguments' names and
# types.
_RETRO_SETTINGS = {
    "model.retro_chunk_length": ("retro_gpt_chunk_length", int),
    "data.seq_length": ("retro_gpt_seq_length", int),
    "data.data_path": ("retro_gpt_data_path", list),
    "data.split": ("retro_gpt_split", str),
}
_MAX_BYTES = 1 << 26  # a million corpora; a larger file holds data, not a list of corpora


def read_data_files(
    config: RunOptions, by_flag: Collection[str], unread: Collection[str], findings: Findings
) -> dict[str, Any]:
    """Return the values that the data files of a run set, by "section.field".

    Flags override the YAML file. If they replace a data file that the YAML file names, the result
    sets the field of the data file to `None`.

    Args:
        config: The run as requested.
        by_flag: The fields that are given on the command line, by "section.field".
        unread: The fields that the program does not read.
        findings: The findings, to which mistakes and notices about keys without effect are added.
    """
    result: dict[str, Any] = {}
    values = flatten(config)
    for path, data_fields in DATA_FILES.items():
        file = values[path]
        if file is None or path in unread:
            continue
        given_fields = [field_path for field_path in data_fields if values[field_path] is not None]
        flags = [field_path for field_path in given_fields if field_path in by_flag]
        if flags and path not in by_flag:
            result[path] = None
            continue
        flag, problem = field_at(path).spell(file), ""
        if flags or (given_fields and path not in by_flag):
            names = ", ".join(field_at(field_path).names[0] for field_path in flags or given_fields)
            problem = f"{flag} cannot be combined with {names}: use one of them"
        else:
            try:
                result |= _read(path, Path(file), flag, findings)
            except ValueError as error:
                problem = f"{flag}: {error}: {_REMEDY[path]}"
        if problem:
            findings.problems.append(problem)
            # Include --data-path, so that a missing corpus is not reported as well.
            unknown = (path, *data_fields, "data.data_path")
            findings.unknown_fields |= {name.partition(".")[2] for name in unknown}
    return result


def _read(path: str, file: Path, flag: str, findings: Findings) -> dict[str, Any]:
    """Read a file, and return the values of the fields that it sets.

    Raises:
        ValueError: The file is not usable. The message says why.
    """
    text = _text_of(file)
    if path == _WHOLE:
        return {DATA_FILES[path][0]: _words(text.split())}
    content = _object_of(text)
    ignored = ", ".join(repr(key) for key in content if key not in SPLIT_NAMES)
    if ignored:
        findings.notices.append(f"{flag}: {ignored} has no effect")
    pairs = zip(DATA_FILES[path], SPLIT_NAMES, strict=True)
    return {name: _words_of(split, content[split]) for name, split in pairs}


def _text_of(file: Path) -> str:
    """Return a file's text.

    Raises:
        ValueError: The file cannot be read, is too large, or is not text.
    """
    try:
        with open(file, "rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    if len(data) > _MAX_BYTES:
        raise ValueError(f"is larger than {_MAX_BYTES:,} bytes")
    try:
        return data.decode("utf-8-sig")  # drops the byte order mark that some editors write
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None


def _object_of(text: str) -> dict[str, Any]:
    """Parse a JSON object with a key for each split.

    Raises:
        ValueError: The text is not a JSON object, lacks a key, or has a key twice.
    """

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        duplicates = sorted({key for key in keys if keys.count(key) > 1})
        if duplicates:
            raise ValueError(f"has {', '.join(map(repr, duplicates))} twice")
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=reject_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    missing = [repr(split) for split in SPLIT_NAMES if split not in content]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    return content


def _words_of(split: str, value: Any) -> tuple[str, ...] | None:
    """Return a split's words from a string or a list of strings and numbers, or `None` for null.

    Raises:
        ValueError: The value is something else.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return _words(value.split(), f"{split!r} ")
    items = value if isinstance(value, list) else [value]
    invalid = [x for x in items if isinstance(x, bool) or not isinstance(x, str | int | float)]
    if invalid or items is not value:
        example = json.dumps((invalid or items)[0])
        example = example if len(example) <= 40 else f"{example[:37]}..."
        raise ValueError(
            f"{split!r} contains {example}, which is neither a string nor a list of words"
        )
    return _words(list(map(str, items)), f"{split!r} ")


def _words(words: Sequence[str], prefix: str = "") -> tuple[str, ...]:
    """Return the words as a tuple.

    Raises:
        ValueError: There are no words.
    """
    if not words:
        raise ValueError(f"{prefix}contains no words")
    return tuple(words)


def read_retro_workdir(config: RunOptions, findings: Findings) -> dict[str, Any]:
    """Return the settings that follow from --retro-workdir, by "section.field".

    Args:
        config: The run as requested.
        findings: The findings, to which mistakes are added.
    """
    folder = config.data.retro_workdir
    if folder is None:
        return {}
    try:
        arguments = read_arguments(folder)
    except ConfigError as error:
        findings.problems.append(str(error))
        findings.unknown_fields.update(path.partition(".")[2] for path in _RETRO_SETTINGS)
        return {}
    requested = flatten(config)
    result: dict[str, Any] = {}
    for path, (name, kind) in _RETRO_SETTINGS.items():
        value, field = arguments.get(name), field_at(path)
        if type(value) is not kind or (kind is int and field.out_of_bounds(value)):
            findings.problems.append(
                f"--retro-workdir {folder}: {name} in its {ARGUMENTS} is {value!r:.80}: restore "
                "the file, or make the folder again with tools/retro/main.py"
            )
            findings.unknown_fields.add(field.name)
            continue
        result[path] = tuple(map(str, arguments[name])) if kind is list else value
        if requested[path] not in (field.default, result[path]):
            actual = field.spell(result[path])
            findings.problems.append(
                f"{field.spell(requested[path])}: --retro-workdir {folder} was created with "
                f"{actual}: drop the flag, or use the folder for that data"
            )
    return result
