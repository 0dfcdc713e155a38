"""Corpora that are named in a file: --data-args-path and --per-split-data-args-path.

The words in the file take the place of the flags that it stands for as soon as flags and YAML file
are read. So a saved config.yaml names the corpora themselves, and caches, fingerprints and
positions are those of a run that named them on its command line.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.data import SPLIT_NAMES
from megatron.config.run import RunOptions, field_at, flatten

_WHOLE, _EACH = "data.data_args_path", "data.per_split_data_args_path"
# What names a file, and what the file stands for.
DATA_FILES: Mapping[str, tuple[str, ...]] = {
    _WHOLE: ("data.data_path",),
    _EACH: tuple(f"data.{split}_data_path" for split in SPLIT_NAMES),
}
_REMEDY = {
    _WHOLE: "give a text file with the words of --data-path, separated by white space",
    _EACH: 'give a JSON file such as {"train": ["0.3", "A", "0.7", "B"], "valid": "C", '
    '"test": null}, where null is no data',
}
_MOST_BYTES = 1 << 26  # a million corpora; what is larger is data, and no list of it


@dataclass
class Words:
    """What the files say.

    Attributes:
        values: by "section.field"; None for a file that is overruled.
        problems: one line for each that cannot be taken.
        notices: lines about what is taken and not used.
        spoilt: names of the fields that are not known for this reason.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    spoilt: set[str] = field(default_factory=set)


def read_data_files(
    config: RunOptions, by_flag: Collection[str], unread: Collection[str] = ()
) -> Words:
    """Return the words of the files that a run names. Flags win over the YAML file.

    Args:
        config: as asked for.
        by_flag: what of it stands on the command line, by "section.field".
        unread: what the program does not read.
    """
    words, values = Words(), flatten(config)
    for path, stands_for in DATA_FILES.items():
        file = values[path]
        if file is None or path in unread:
            continue
        others = [other for other in stands_for if values[other] is not None]
        flags = [other for other in others if other in by_flag]
        if flags and path not in by_flag:
            words.values[path] = None
            continue
        if flags or (others and path not in by_flag):
            names = ", ".join(field_at(other).names[0] for other in flags or others)
            problem = (
                f"{field_at(path).spell(file)} cannot be combined with {names}: use one of them"
            )
        else:
            problem = _read(path, Path(file), words) or ""
        if problem:
            words.problems.append(problem)
            words.spoilt.update(name.partition(".")[2] for name in (path, *stands_for))
            # That there is no corpus would follow.
            words.spoilt.add("data_path")
    return words


def _read(path: str, file: Path, words: Words) -> str | None:
    """Take the words of a file, or return what is wrong with it."""
    named = f"{field_at(path).names[0]} {file}"
    try:
        text = _text_of(file)
        if path == _WHOLE:
            words.values[DATA_FILES[path][0]] = _some(tuple(text.split()))
            return None
        content = _object_of(text)
        for split, taken in zip(SPLIT_NAMES, DATA_FILES[path], strict=True):
            words.values[taken] = _words_of(split, content[split])
    except ValueError as error:
        return f"{named}: {error}: {_REMEDY[path]}"
    rest = ", ".join(repr(key) for key in content if key not in SPLIT_NAMES)
    if rest:
        words.notices.append(f"{named}: {rest} has no effect")
    return None


def _text_of(file: Path) -> str:
    """Read a file.

    Raises:
        ValueError: It cannot be read, or is not text.
    """
    try:
        with open(file, "rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    if len(data) > _MOST_BYTES:
        raise ValueError(f"is larger than {_MOST_BYTES:,} bytes")
    try:
        return data.decode("utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None


def _object_of(text: str) -> dict[str, Any]:
    """Parse a JSON object with a key for each split.

    Raises:
        ValueError: It is not JSON, not an object, or lacks a key or has one twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"has {', '.join(map(repr, twice))} twice")
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=once)
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
    """Return a split's words, from a text or a list of texts and numbers, or `None` for null.

    Raises:
        ValueError: It is neither.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return _some(tuple(value.split()), f"{split!r} ")
    texts = value if isinstance(value, list) else [value]
    wrong = [x for x in texts if isinstance(x, bool) or not isinstance(x, str | int | float)]
    if wrong or not isinstance(value, list):
        shown = json.dumps((wrong or texts)[0])
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        raise ValueError(f"{split!r} holds {shown}, which is neither a string nor a list of words")
    return _some(tuple(map(str, value)), f"{split!r} ")


def _some(words: tuple[str, ...], what: str = "") -> tuple[str, ...]:
    """Return the words.

    Raises:
        ValueError: There are none.
    """
    if not words:
        raise ValueError(f"{what}contains no words")
    return words
