"""manifest.json: everything that a reader must know and can check before it trusts any data.

The manifest is written last. It names every file with its size and every tensor with its pieces and
their digests, and carries a digest of itself. A folder without one is not a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.checkpoint.entries import DTYPES, Box, Json, is_tiled
from megatron.checkpoint.shard import digest_of

MANIFEST = "manifest.json"
FORMAT = "megatron-native"
VERSION = 1
MAX_BYTES = 1 << 30  # ten times the size of a manifest with a million shards

_FILE_NAME = re.compile(r"rank_\d{5,}(_\d+)?\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ManifestError(ValueError):
    """An error that says why a manifest is damaged, foreign or contradictory."""


class FileInfo(NamedTuple):
    """A shard file: its size, and the size (both in bytes) and digest of its header."""

    size: int
    header_size: int
    header_digest: str


@dataclass(frozen=True)
class TensorPiece:
    """A part of a tensor: its file, the indices it covers, and the position of its bytes."""

    file: str
    box: Box
    start: int
    size: int
    digest: str


@dataclass(frozen=True)
class TensorInfo:
    """A whole tensor: safetensors' type name, its shape, and the pieces that tile it."""

    dtype: str
    global_shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


def keys_in_files(name: str, files: Iterable[str]) -> list[str]:
    """Return the key of each piece of a tensor in the piece's file.

    The first piece in a file has the tensor's name as its key; further ones have "name#1",
    "name#2", ...

    Args:
        name: The tensor's name.
        files: The file of each piece, in order.
    """
    keys, seen = [], Counter[str]()
    for file in files:
        keys.append(f"{name}#{seen[file]}" if seen[file] else name)
        seen[file] += 1
    return keys


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents.

    Attributes:
        iteration: Training steps taken.
        created: UTC time, ISO 8601.
        layout: Sizes of the grid of processes that wrote the checkpoint, by axis name.
        files: Shards by file name.
        tensors: Tensors by entry name.
        meta: JSON value that training stored to be able to resume.
    """

    iteration: int
    created: str
    layout: dict[str, int]
    files: dict[str, FileInfo]
    tensors: dict[str, TensorInfo]
    meta: Json

    def check(self) -> None:
        """Check that files, tensors and pieces agree with each other.

        Raises:
            ManifestError: They contradict each other.
        """
        for name in self.files:
            if not _FILE_NAME.fullmatch(name):
                raise ManifestError(f"{name!r} is not a valid shard name")
        filled = {name: info.header_size for name, info in self.files.items()}
        for name, tensor in self.tensors.items():
            _check_tensor(name, tensor, self.files)
            for piece in tensor.pieces:
                filled[piece.file] += piece.size
        for name, info in self.files.items():
            if filled[name] != info.size:
                raise ManifestError(f"{name} has {info.size} bytes, but its tensors {filled[name]}")


def _check_tensor(name: str, tensor: TensorInfo, files: dict[str, FileInfo]) -> None:
    if tensor.dtype not in DTYPES:
        raise ManifestError(f"{name} has unknown type {tensor.dtype!r}")
    if not is_tiled(tensor.global_shape, (piece.box for piece in tensor.pieces)):
        raise ManifestError(f"the pieces of {name} do not cover {list(tensor.global_shape)}")
    for piece in tensor.pieces:
        if piece.file not in files:
            raise ManifestError(f"{name} is in {piece.file}, which the manifest does not list")
        if piece.size != piece.box.volume * DTYPES[tensor.dtype].itemsize:
            raise ManifestError(f"{name} in {piece.file} has a wrong size")
        info = files[piece.file]
        if not info.header_size <= piece.start <= info.size - piece.size:
            raise ManifestError(f"{name} lies outside {piece.file}")


def dump(manifest: Manifest) -> bytes:
    """Return the file's bytes.

    Raises:
        ValueError: The meta data cannot be written as JSON (NaN and infinity cannot).
    """
    body = {
        "format": FORMAT,
        "version": VERSION,
        "iteration": manifest.iteration,
        "created": manifest.created,
        "layout": manifest.layout,
        "meta": manifest.meta,
        "files": {
            name: dict(zip(_FILE_KEYS, info, strict=True))
            for name, info in sorted(manifest.files.items())
        },
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.global_shape),
                "pieces": [
                    dict(zip(_PIECE_KEYS, values, strict=True))
                    for one in tensor.pieces
                    for offset, shape in [(list(one.box.offset), list(one.box.shape))]
                    for values in [(one.file, offset, shape, one.start, one.size, one.digest)]
                ],
            }
            for name, tensor in sorted(manifest.tensors.items())
        },
    }
    return _sign(body)


def _sign(body: dict[str, Any]) -> bytes:
    """Return JSON text whose first key is the digest of the text without it."""
    return _text({"sha256": digest_of(_text(body)), **body})


def _text(value: Json) -> bytes:
    return (json.dumps(value, allow_nan=False) + "\n").encode("ascii")


def parse(data: bytes) -> Manifest:
    """Return the manifest in a file's bytes after checking it.

    Raises:
        ManifestError: The manifest is not ours, has a later version, was altered, or contradicts
            itself.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"damaged: not JSON: {error}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ManifestError("not a manifest of this program")
    if body.get("version") != VERSION:
        raise ManifestError(
            f"format version {body.get('version')!r}; this program reads version {VERSION}"
        )
    claimed = body.pop("sha256", None)
    if claimed != digest_of(_text(body)) or data != _sign(body):
        raise ManifestError("damaged: its digest does not match its content")
    # The digest rules out only accidents, so types are checked as well.
    files = {
        name: FileInfo(*(_get(info, key, kind) for key, kind in _FILE_KEYS.items()))
        for name, info in _get(body, "files", dict).items()
    }
    tensors = {
        name: TensorInfo(
            _get(tensor, "dtype", str),
            _get(tensor, "shape", "sizes"),
            tuple(_parse_piece(piece) for piece in _get(tensor, "pieces", list)),
        )
        for name, tensor in _get(body, "tensors", dict).items()
    }
    manifest = Manifest(
        iteration=_get(body, "iteration", "size"),
        created=_get(body, "created", str),
        layout=_get(body, "layout", dict),
        files=files,
        tensors=tensors,
        meta=_get(body, "meta", dict),
    )
    manifest.check()
    return manifest


def _parse_piece(piece: Any) -> TensorPiece:
    file, offset, shape, *rest = (_get(piece, key, kind) for key, kind in _PIECE_KEYS.items())
    return TensorPiece(file, Box(offset, shape), *rest)


# JSON keys of a file and of a piece, in the order of their records' fields, with their kinds.
_FILE_KEYS = {"bytes": "size", "header_bytes": "size", "header_sha256": "digest"}
_PIECE_KEYS: dict[str, str | type] = {
    "file": str,
    "offset": "sizes",
    "shape": "sizes",
    "start": "size",
    "bytes": "size",
    "sha256": "digest",
}
_TYPES: dict[str, type] = {"size": int, "sizes": list, "digest": str}


def _get(record: Any, key: str, kind: str | type) -> Any:
    """Return a record's value, checked: a JSON type, a "size", a tuple of "sizes" or a "digest"."""
    value: Any = record.get(key) if isinstance(record, dict) else None
    expected, found = _TYPES[kind] if isinstance(kind, str) else kind, type(value)
    if found is not expected:
        raise ManifestError(f"{key!r} is missing or not a {expected.__name__}")
    if kind == "size" and value < 0:
        raise ManifestError(f"{key!r} is negative")
    if kind == "sizes":
        if not all(type(one) is int and one >= 0 for one in value):
            raise ManifestError(f"{key!r} is not a list of sizes")
        return tuple(value)
    if kind == "digest" and not _DIGEST.fullmatch(value):
        raise ManifestError(f"{key!r} is not a SHA-256 digest")
    return value


def describe(dtype: str, shape: Iterable[int]) -> str:
    """Return a description of a tensor, such as "F32 [5120, 64]"."""
    return f"{dtype} {list(shape)}"
