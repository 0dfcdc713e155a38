"""The mark beside files for Megatron-LM that we have written: that all are there, and which.

Megatron-LM writes over the files of an iteration one by one, in place, and does not look at the
mark. So the mark names every file with a digest of its directory, which holds the size and the
CRC-32 of each of its records: what has been written over is known at once, without reading it.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from megatron.checkpoint.find import COMPLETE
from megatron.checkpoint.shard import digest_of
from megatron.errors import CheckpointError

_NOTE = (
    "All files are here, as listed. --keep-latest may delete them while they are as listed; who "
    "reads them locks this file."
)
_MAX_BYTES = 16 << 20


def mark_of(folder: Path) -> bytes:
    """What the mark of a checkpoint's folder holds; its files are written.

    Raises:
        OSError: one cannot be read.
    """
    return json.dumps({"note": _NOTE, "files": _files(folder)}, indent=1).encode() + b"\n"


def is_marked(folder: Path) -> bool:
    """Whether the files of a checkpoint's folder are exactly those that we wrote.

    False without a mark, and where another program has written all of them anew.

    Raises:
        CheckpointError: it has written some of them: they are of two saves.
        OSError: one cannot be read.
    """
    listed = _listed(folder / COMPLETE)
    if not listed:
        return False
    found = _files(folder)
    if found == listed:
        return True
    kept = sorted(name for name in listed if found.get(name) == listed[name])
    if not kept:
        return False
    others = sorted((found.keys() | listed.keys()) - set(kept))
    raise CheckpointError(
        f"{folder}: files of two saves: {_some(kept)} as this program wrote it, {_some(others)} "
        f"written or removed since: take another checkpoint, or delete {folder / COMPLETE} to have "
        "the files read as they are"
    )


def _listed(mark: Path) -> dict[str, str]:
    """Digests by file; nothing without a mark, or where it tells none."""
    try:
        with mark.open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
        files = content["files"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return {}
    is_plain = isinstance(files, dict) and all(type(value) is str for value in files.values())
    return files if is_plain else {}


def _files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): _digest(path) for path in folder.glob("mp_rank_*/*.pt")}


def _digest(path: Path) -> str:
    """Of a file's directory; "" where it has none, as one that is half written."""
    if path.is_symlink():
        return ""
    try:
        with zipfile.ZipFile(path) as archive:
            records = [(one.filename, one.file_size, one.CRC) for one in archive.infolist()]
    except zipfile.BadZipFile:
        return ""
    return digest_of(json.dumps(records).encode())


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{rest}"
