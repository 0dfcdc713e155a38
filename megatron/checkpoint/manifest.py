"""manifest.json: everything a reader must know and can check before it trusts a byte.

The manifest is written last and names every file with its size, every tensor with its pieces
and their digests, and carries a digest of itself. A folder without one is not a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.entries import DTYPES, Box, Json, dtype_size, is_tiled
from megatron.checkpoint.shard import digest_of

MANIFEST = "manifest.json"
FORMAT = "megatron-native"
VERSION = 1
MAX_BYTES = 1 << 30  # a manifest of a million shards is a tenth of this

_FILE_NAME = re.compile(r"rank_\d{5,}(_\d+)?\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ManifestError(ValueError):
    """What is wrong with a manifest, in words."""


@dataclass(frozen=True)
class FileInfo:
    """A shard: its size, and the size and digest of its header (both in bytes)."""

    size: int
    header_size: int
    header_digest: str


@dataclass(frozen=True)
class TensorPiece:
    """Part of a tensor: which file holds it, which indices it covers, where its bytes are."""

    file: str
    box: Box
    start: int
    size: int
    digest: str


@dataclass(frozen=True)
class TensorInfo:
    """A whole tensor: safetensors' type name, shape, and pieces that tile it."""

    dtype: str
    global_shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


def keys_in_files(name: str, files: Iterable[str]) -> list[str]:
    """Under which key each piece of a tensor stands in its file, from the pieces' files in order.

    The tensor's name; "name#1", "name#2", ... for further pieces in the same file.
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
        iteration: training steps taken.
        created: UTC time, ISO 8601.
        layout: sizes of the grid that wrote it, by axis name.
        files: shards by file name.
        tensors: by entry name.
        meta: what training wants back; JSON.
    """

    iteration: int
    created: str
    layout: dict[str, int]
    files: dict[str, FileInfo]
    tensors: dict[str, TensorInfo]
    meta: Json

    def check(self) -> None:
        """Raise ManifestError unless files, tensors and pieces agree with each other."""
        for name in self.files:
            if not _FILE_NAME.fullmatch(name):
                raise ManifestError(f"{name!r} is no name for a shard")
        filled = {name: info.header_size for name, info in self.files.items()}
        for name, tensor in self.tensors.items():
            _check_tensor(name, tensor, self.files)
            for piece in tensor.pieces:
                filled[piece.file] += piece.size
        for name, info in self.files.items():
            if filled[name] != info.size:
                raise ManifestError(f"{name} has {info.size} bytes, its tensors {filled[name]}")


def _check_tensor(name: str, tensor: TensorInfo, files: dict[str, FileInfo]) -> None:
    if tensor.dtype not in DTYPES:
        raise ManifestError(f"{name} has unknown type {tensor.dtype!r}")
    if not is_tiled(tensor.global_shape, (piece.box for piece in tensor.pieces)):
        raise ManifestError(f"the pieces of {name} do not make up {list(tensor.global_shape)}")
    for piece in tensor.pieces:
        if piece.file not in files:
            raise ManifestError(f"{name} lies in {piece.file}, which the manifest does not list")
        if piece.size != piece.box.volume * dtype_size(tensor.dtype):
            raise ManifestError(f"{name} in {piece.file} has a wrong size")
        info = files[piece.file]
        if not info.header_size <= piece.start <= info.size - piece.size:
            raise ManifestError(f"{name} lies outside {piece.file}")


def dump(manifest: Manifest) -> bytes:
    """The file's bytes. ValueError where meta is not JSON (NaN and infinity are not)."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "iteration": manifest.iteration,
        "created": manifest.created,
        "layout": manifest.layout,
        "meta": manifest.meta,
        "files": {
            name: {
                "bytes": info.size,
                "header_bytes": info.header_size,
                "header_sha256": info.header_digest,
            }
            for name, info in sorted(manifest.files.items())
        },
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.global_shape),
                "pieces": [_dump_piece(piece) for piece in tensor.pieces],
            }
            for name, tensor in sorted(manifest.tensors.items())
        },
    }
    return _sign(body)


def _sign(body: dict[str, Any]) -> bytes:
    """JSON text whose first key is the digest of the text without it."""
    return _text({"sha256": digest_of(_text(body)), **body})


def _text(value: Json) -> bytes:
    return (json.dumps(value, allow_nan=False) + "\n").encode("ascii")


def _dump_piece(piece: TensorPiece) -> dict[str, Json]:
    return {
        "file": piece.file,
        "offset": list(piece.box.offset),
        "shape": list(piece.box.shape),
        "start": piece.start,
        "bytes": piece.size,
        "sha256": piece.digest,
    }


def parse(data: bytes) -> Manifest:
    """The manifest in a file's bytes, checked.

    Raises:
        ManifestError: it is not ours, of a later version, altered, or contradicts itself.
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
    manifest = _build(body)
    manifest.check()
    return manifest


def _build(body: dict[str, Any]) -> Manifest:
    # The digest only excludes accidents, so types are checked as well.
    files = {
        name: FileInfo(
            _count(info, "bytes"), _count(info, "header_bytes"), _digest(info, "header_sha256")
        )
        for name, info in _get(body, "files", dict).items()
    }
    tensors = {
        name: TensorInfo(
            dtype=_get(tensor, "dtype", str),
            global_shape=_counts(tensor, "shape"),
            pieces=tuple(_build_piece(piece) for piece in _get(tensor, "pieces", list)),
        )
        for name, tensor in _get(body, "tensors", dict).items()
    }
    return Manifest(
        iteration=_count(body, "iteration"),
        created=_get(body, "created", str),
        layout=_get(body, "layout", dict),
        files=files,
        tensors=tensors,
        meta=_get(body, "meta", dict),
    )


def _build_piece(piece: Any) -> TensorPiece:
    return TensorPiece(
        file=_get(piece, "file", str),
        box=Box(_counts(piece, "offset"), _counts(piece, "shape")),
        start=_count(piece, "start"),
        size=_count(piece, "bytes"),
        digest=_digest(piece, "sha256"),
    )


def _get(record: Any, key: str, kind: type) -> Any:
    value = record.get(key) if isinstance(record, dict) else None
    if type(value) is not kind:
        raise ManifestError(f"{key!r} is missing or not a {kind.__name__}")
    return value


def _count(record: Any, key: str) -> int:
    value = _get(record, key, int)
    if value < 0:
        raise ManifestError(f"{key!r} is negative")
    return int(value)


def _counts(record: Any, key: str) -> tuple[int, ...]:
    values = _get(record, key, list)
    if not all(type(value) is int and value >= 0 for value in values):
        raise ManifestError(f"{key!r} is not a list of sizes")
    return tuple(values)


def _digest(record: Any, key: str) -> str:
    value = _get(record, key, str)
    if not _DIGEST.fullmatch(value):
        raise ManifestError(f"{key!r} is not a SHA-256 digest")
    return str(value)


def describe(dtype: str, shape: Iterable[int]) -> str:
    """A tensor in words: "F32 [5120, 64]"."""
    return f"{dtype} {list(shape)}"
