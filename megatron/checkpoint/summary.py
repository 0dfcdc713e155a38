"""What a folder of checkpoints holds, in words, without loading a tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.checkpoint.any_format import nothing_at
from megatron.checkpoint.find import (
    REPLACED,
    Found,
    checkpoint_at,
    list_checkpoints,
    read_tracker,
    scan,
)
from megatron.checkpoint.hf.files import is_model_folder
from megatron.checkpoint.reader import NativeReader, Reader, open_found
from megatron.durable import TEMPORARY
from megatron.errors import CheckpointError


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
    from megatron.checkpoint.hf.reader import HFReader

    reader = HFReader(root)
    state = "fits config.json, content not verified: the format has no digests"
    headline = f"{root}  {reader.architecture}  {len(reader.names())} tensors  {state}"
    return [headline, *(f"  {line}" for line in _details(reader) if details)]


def _summarize_all(
    checkpoints: Sequence[Found], *, verify: bool, details: bool
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


def _headline(found: Found, reader: Reader, verified: bool) -> str:
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
