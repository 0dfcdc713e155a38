"""What differs between two checkpoints of any format, a part of a tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.entries import Box, boxes_of_range
from megatron.checkpoint.manifest import describe
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.vocabulary import is_vocabulary_table

_ELEMENTS = 4 << 20  # of a tensor that are compared at a time
# What both meta data tell, whatever the format.
_COUNTERS = ("iteration", "consumed_train_samples", "padded_vocab_size")


@dataclass(frozen=True)
class Values:
    """How the values of a tensor differ.

    Attributes:
        changed: how many.
        total: of how many.
        largest: difference; nan where one side is no number.
    """

    changed: int
    total: int
    largest: float


@dataclass
class Comparison:
    """What was found.

    Attributes:
        lines: a line for each difference.
        equal: tensors that are the same, bit for bit but for zeros' signs.
    """

    lines: list[str] = field(default_factory=list)
    equal: int = 0


def compare(one: Reader, other: Reader, *, only: str = "") -> Comparison:
    """Tensors, then positions and configurations.

    Args:
        one: an opened checkpoint.
        other: another.
        only: compare tensors whose names begin so, and nothing else; "": everything.
    """
    result = Comparison()
    names = [{name for name in reader.names() if name.startswith(only)} for reader in (one, other)]
    for reader, there, here in ((one, names[0], names[1]), (other, names[1], names[0])):
        result.lines += [f"{name}: only in {reader.path}" for name in sorted(there - here)]
    for name in sorted(names[0] & names[1]):
        line = _compare_tensor(one, other, name)
        if line is None:
            result.equal += 1
        else:
            result.lines.append(f"{name}: {line}")
    if not only:
        result.lines += _compare_meta(one.meta, other.meta)
    return result


def _compare_tensor(one: Reader, other: Reader, name: str) -> str | None:
    """What differs; None: nothing."""
    forms = [
        describe(str(reader.dtype(name)).removeprefix("torch."), reader.global_shape(name))
        for reader in (one, other)
    ]
    shapes = [reader.global_shape(name) for reader in (one, other)]
    differs = shapes[0] != shapes[1]
    if differs and not (is_vocabulary_table(name) and shapes[0][1:] == shapes[1][1:]):
        return " -> ".join(forms)
    values = compare_values(one, other, name, min(shapes))
    parts = [" -> ".join(forms)] if forms[0] != forms[1] else []
    if values.changed:
        count = f"{values.changed:,} of {values.total:,} values changed"
        parts.append(f"{count}, by at most {values.largest:.3g}")
    elif differs:
        parts.append("the rows that both have are the same")
    return ", ".join(parts) or None


def compare_values(one: Reader, other: Reader, name: str, shape: tuple[int, ...]) -> Values:
    """Compare the first `shape` of a tensor in both, in parts."""
    total, changed, largest = math.prod(shape), 0, 0.0
    for start in range(0, total, _ELEMENTS):
        for box in boxes_of_range(shape, start, min(start + _ELEMENTS, total)):
            count, difference = _differences(*(_read(reader, name, box) for reader in (one, other)))
            changed += count
            largest = difference if math.isnan(difference) else max(largest, difference)
    return Values(changed, total, largest)


def _read(reader: Reader, name: str, box: Box) -> Tensor:
    return reader.read(name, box, global_shape=reader.global_shape(name))


def _differences(one: Tensor, other: Tensor) -> tuple[int, float]:
    """How many values differ, and by how much at most. Two that are no numbers are the same."""
    if one.dtype == other.dtype and torch.equal(one, other):
        return 0, 0.0
    one, other = one.double(), other.double()
    differs = (one != other) & ~(one.isnan() & other.isnan())
    count = int(differs.sum())
    return count, (one - other).abs()[differs].max().item() if count else 0.0


def _compare_meta(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """Counters, and what both configurations say: Megatron's files tell less than ours."""
    sides = [{**_counters(meta), **_settings(meta)} for meta in (one, other)]
    for key in sorted(sides[0].keys() & sides[1].keys()):
        if sides[0][key] != sides[1][key]:
            shown = (json.dumps(side[key], sort_keys=True) for side in sides)
            yield f"{key}: {' -> '.join(shown)}"


def _counters(meta: dict[str, Any]) -> dict[str, Any]:
    found = {key: meta[key] for key in _COUNTERS if meta.get(key) is not None}
    for room in ("optimizer", "schedule"):
        if isinstance(meta.get(room), dict):
            found |= {f"{room}.{key}": value for key, value in meta[room].items()}
    return found


def _settings(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        f"config.{section}.{key}": value
        for section, values in (meta.get("config") or {}).items()
        for key, value in values.items()
    }
