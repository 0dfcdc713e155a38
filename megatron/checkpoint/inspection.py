"""What a folder of checkpoints holds, and how two checkpoints of any format differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.entries import Box, boxes_of_range
from megatron.checkpoint.find import (
    REPLACED,
    FoundCheckpoint,
    checkpoint_at,
    list_checkpoints,
    read_tracker,
    scan,
)
from megatron.checkpoint.huggingface.files import is_model_folder
from megatron.checkpoint.loading import nothing_at, open_found
from megatron.checkpoint.manifest import describe
from megatron.checkpoint.reader import NativeReader, Reader, is_vocabulary_table
from megatron.durable import TEMPORARY
from megatron.errors import CheckpointError

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


def summarize(root: Path, *, verify: bool, details: bool) -> tuple[list[str], bool]:
    """Lines about every checkpoint of a folder; whether all are sound and the tracker names one.

    Args:
        root: folder of checkpoints, or one checkpoint, or a folder of Hugging Face.
        verify: read everything and compare digests.
        details: list the tensors and what else the checkpoint says.

    Raises:
        CheckpointError: the folder holds none that is complete.
    """
    if is_model_folder(root):
        return _summarize_hf(root, details=details), True
    if root.is_file():
        raise CheckpointError(f"{root}: {nothing_at(root)}")
    single = checkpoint_at(root)
    if single is not None:
        return _summarize_all([single], verify=verify, details=details)
    # Before the list: a job may save meanwhile, and what verifying takes is long enough for that.
    named, complaint = read_tracker(root)
    checkpoints = list_checkpoints(root, quiet=True)
    if not checkpoints:
        raise CheckpointError(f"{root}: {nothing_at(root)}")
    incomplete = [f"{problem}: never loaded" for problem in scan(root)[1]]
    incomplete += [
        f"{path.name}: a save that has not finished, never loaded"
        for path in sorted(root.glob(f"*{TEMPORARY}*"))
        if path.is_dir()
    ]
    if named is not None and all(
        found.path.name.split(REPLACED)[0] != named for found in checkpoints
    ):
        is_there = any(problem.split()[0] == named for problem in incomplete)
        complaint = "which is incomplete" if is_there else "which is not there"
    first = f"{root}: the tracker names {named or 'nothing'}" + (f": {complaint}" * bool(complaint))
    lines, sound = _summarize_all(checkpoints, verify=verify, details=details)
    return [first, *lines, *incomplete], sound and complaint is None


def _summarize_hf(root: Path, *, details: bool) -> list[str]:
    """Names, shapes and types were compared with config.json; there are no digests."""
    from megatron.checkpoint.huggingface.reader import HFReader

    reader = HFReader(root)
    state = "fits config.json, content not verified: the format has no digests"
    headline = f"{root}  {reader.architecture}  {len(reader.names())} tensors  {state}"
    return [headline, *(f"  {line}" for line in _details(reader) if details)]


def _summarize_all(
    checkpoints: Sequence[FoundCheckpoint], *, verify: bool, details: bool
) -> tuple[list[str], bool]:
    lines: list[str] = []
    sound = True
    for found in checkpoints:
        try:
            reader = open_found(found, verify=verify)
        except CheckpointError as error:
            lines.append(f"{found.path.name}  {found.format}  cannot be used: {error}")
            sound = False
            continue
        lines.append(_headline(found, reader, verify))
        if details:
            lines.extend(f"  {line}" for line in _details(reader))
    return lines, sound


def _headline(found: FoundCheckpoint, reader: Reader, verified: bool) -> str:
    state = "verified" if verified else "sizes match, content not verified"
    parts = [found.path.name, found.format, f"{len(reader.names())} tensors"]
    if isinstance(reader, NativeReader):
        total = sum(info.size for info in reader.manifest.files.values())
        axes = ", ".join(f"{axis} {size}" for axis, size in reader.manifest.layout.items())
        parts += [f"{total:,} bytes in {len(reader.manifest.files)} file(s)", f"saved by {axes}"]
        parts.append(reader.manifest.created)
    return "  ".join([*parts, state])


def _details(reader: Reader) -> Iterator[str]:
    for key, value in sorted(reader.meta.items()):
        if key == "config" and isinstance(value, dict):  # a line a section: they are long
            for section, fields in sorted(value.items()):
                yield f"{key}.{section}: {json.dumps(fields, sort_keys=True)}"
        else:
            yield f"{key}: {json.dumps(value, sort_keys=True)}"
    for name in reader.names():
        dtype = str(reader.dtype(name)).removeprefix("torch.")
        yield f"{name}  {dtype} {list(reader.global_shape(name))}"
