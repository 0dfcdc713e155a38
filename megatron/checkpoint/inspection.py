"""Describe the checkpoints in a folder, and compare two checkpoints in any format."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import find
from megatron.checkpoint.entries import boxes_of_range
from megatron.checkpoint.huggingface.files import is_model_folder
from megatron.checkpoint.loading import open_folder, open_hf, why_no_checkpoint
from megatron.checkpoint.reader import NativeReader, Reader, is_vocabulary_table
from megatron.durable import TEMPORARY
from megatron.errors import CheckpointError

_ELEMENTS = 4 << 20  # elements of a tensor compared at a time
# Counters in the metadata of every format.
_COUNTERS = ("iteration", "consumed_train_samples", "padded_vocab_size")


def compare(first: Reader, second: Reader, *, only: str = "") -> tuple[list[str], int]:
    """Compare two checkpoints: first their tensors, then their counters and configurations.

    Args:
        first: An opened checkpoint.
        second: Another opened checkpoint.
        only: Compare only tensors whose names begin with this prefix. "" compares all tensors, and
            the counters and settings that both checkpoints record.

    Returns:
        A line for each difference, and the number of tensors that are equal: in shape, in dtype,
        and bit for bit, except for the signs of zeros and the bits of NaNs.

    Raises:
        CheckpointError: No tensor's name begins with `only`, or a checkpoint is damaged.
    """
    lines, equal = list[str](), 0
    first_names, second_names = (
        {n for n in reader.tensors if n.startswith(only)} for reader in (first, second)
    )
    if only and not first_names | second_names:
        kinds = {f"{name.partition('.')[0]}." for name in (*first.tensors, *second.tensors)}
        raise CheckpointError(
            f"--only {only}: no tensor's name begins with this: names begin with "
            f"{', '.join(sorted(kinds))}"
        )
    for reader, unmatched in (
        (first, first_names - second_names),
        (second, second_names - first_names),
    ):
        lines += [f"{name}: only in {reader.path}" for name in sorted(unmatched)]
    for name in sorted(first_names & second_names):
        line = _compare_tensor(first, second, name)
        if line is None:
            equal += 1
        else:
            lines.append(f"{name}: {line}")
    if not only:  # Megatron's files store fewer settings, so only keys in both are compared
        sides = _settings(first.meta), _settings(second.meta)
        for key in sorted(sides[0].keys() & sides[1].keys()):
            if sides[0][key] != sides[1][key]:
                values = (json.dumps(side[key], sort_keys=True) for side in sides)
                lines.append(f"{key}: {' -> '.join(values)}")
    return lines, equal


def _compare_tensor(first: Reader, second: Reader, name: str) -> str | None:
    """Return how a tensor differs, or None if it does not, reading it one part at a time."""
    meta, other_meta = first.tensors[name], second.tensors[name]
    parts = [] if meta == other_meta else [f"{meta} -> {other_meta}"]
    differs = meta.shape != other_meta.shape
    if differs and not (is_vocabulary_table(name) and meta.shape[1:] == other_meta.shape[1:]):
        return parts[0]
    shape = min(meta.shape, other_meta.shape)
    total, changed, largest = math.prod(shape), 0, 0.0
    for start in range(0, total, _ELEMENTS):
        for box in boxes_of_range(shape, start, min(start + _ELEMENTS, total)):
            count, difference = _differences(first.read(name, box), second.read(name, box))
            changed += count
            largest = difference if math.isnan(difference) else max(largest, difference)
    if changed:
        parts.append(f"{changed:,} of {total:,} values changed, by at most {largest:.3g}")
    elif differs:
        parts.append("the rows that both have are the same")
    return ", ".join(parts) or None


def _differences(first: Tensor, second: Tensor) -> tuple[int, float]:
    """Return how many values differ, and the largest difference. Two NaNs count as equal."""
    if first.dtype == second.dtype and torch.equal(first, second):
        return 0, 0.0
    first, second = first.double(), second.double()
    differs = (first != second) & ~(first.isnan() & second.isnan())
    count = int(differs.sum())
    return count, (first - second).abs()[differs].max().item() if count else 0.0


def _settings(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the counters and the configuration in a checkpoint's metadata as a flat dict."""
    settings = {key: meta[key] for key in _COUNTERS if meta.get(key) is not None}
    for part in ("optimizer", "schedule"):
        if isinstance(meta.get(part), dict):
            settings |= {f"{part}.{key}": value for key, value in meta[part].items()}
    for section, values in (meta.get("config") or {}).items():
        settings |= {f"config.{section}.{key}": value for key, value in values.items()}
    return settings


def summarize(
    root: Path, *, verify: bool, details: bool, allow_foreign: bool = False
) -> tuple[list[str], bool]:
    """Describe every checkpoint in a folder, without loading tensors into memory.

    Args:
        root: Folder of checkpoints, one checkpoint, or a Hugging Face folder.
        verify: Read all files and verify their digests.
        details: Also list the tensors and the metadata.
        allow_foreign: Accept files owned by other users (--allow-foreign-checkpoints).

    Returns:
        The lines of the description, and whether all complete checkpoints are intact and the
        tracker, if there is one, names one of them.

    Raises:
        CheckpointError: The folder contains no complete checkpoint or is a file; or it is a Hugging
            Face folder that cannot be opened.
    """
    if is_model_folder(root):
        # Opening the folder has compared names, shapes and dtypes with config.json.
        reader = open_hf(root, allow_foreign=allow_foreign)
        state = "fits config.json, content not verified: the format has no digests"
        headline = f"{root}  {reader.architecture}  {len(reader.names())} tensors  {state}"
        return [headline, *(_details(reader) if details else ())], True
    if os.path.isfile(root):
        raise CheckpointError(f"{root}: {why_no_checkpoint(root)}")
    single = find.checkpoint_at(root)
    if single is not None:
        return _summarize_all([single], verify=verify, details=details, allow_foreign=allow_foreign)
    # Read the tracker before listing checkpoints, because a job may save another one meanwhile.
    named, complaint = find.read_tracker(root)
    checkpoints = find.list_checkpoints(root, quiet=True)
    if not checkpoints:
        raise CheckpointError(f"{root}: {why_no_checkpoint(root)}")
    problems = find.scan(root)[1]
    incomplete = [f"{name} {problem}: never loaded" for name, problem in problems.items()]
    incomplete += [
        f"{path.name}: a save that has not finished, never loaded"
        for path in sorted(root.glob(f"*{TEMPORARY}*"))
        if path.is_dir()
    ]
    if named is not None and find.tracked_checkpoint(checkpoints, named) is None:
        complaint = f"which {'is incomplete' if named in problems else 'does not exist'}"
    first = f"{root}: the tracker names {named or 'nothing'}" + (f", {complaint}" * bool(complaint))
    lines, all_intact = _summarize_all(
        checkpoints, verify=verify, details=details, allow_foreign=allow_foreign
    )
    return [first, *lines, *incomplete], all_intact and complaint is None


def _summarize_all(
    checkpoints: Sequence[find.CheckpointFolder],
    *,
    verify: bool,
    details: bool,
    allow_foreign: bool,
) -> tuple[list[str], bool]:
    lines: list[str] = []
    all_intact = True
    for folder in checkpoints:
        try:
            reader = open_folder(folder, verify=verify, allow_foreign=allow_foreign)
        except CheckpointError as error:
            lines.append(f"{folder.path.name}  {folder.format}  cannot be used: {error}")
            all_intact = False
            continue
        parts = [folder.path.name, folder.format, f"{len(reader.names())} tensors"]
        if isinstance(reader, NativeReader):
            files = reader.manifest.files
            axes = ", ".join(f"{axis} {size}" for axis, size in reader.manifest.layout.items())
            total = sum(info.bytes for info in files.values())
            parts += [
                f"{total:,} bytes in {len(files)} file{'s' * (len(files) > 1)}",
                f"saved by {axes}",
            ]
            parts.append(reader.manifest.created)
        state = "verified" if verify else "sizes match, content not verified"
        lines.append("  ".join([*parts, state]))
        lines += _details(reader) if details else ()
    return lines, all_intact


def _details(reader: Reader) -> Iterator[str]:
    for key, value in sorted(reader.meta.items()):
        if key == "config" and isinstance(value, dict):  # long, so print one line per section
            for section, fields in sorted(value.items()):
                yield f"  {key}.{section}: {json.dumps(fields, sort_keys=True)}"
        else:
            yield f"  {key}: {json.dumps(value, sort_keys=True)}"
    for name, meta in sorted(reader.tensors.items()):
        yield f"  {name}  {meta}"
