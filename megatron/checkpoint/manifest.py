"""manifest.json: everything that a reader must know, and can check, before it trusts any data.

The manifest is written last. It lists every file with its size, and every tensor with its pieces
and their digests, and contains a digest of itself. A folder without a manifest is not a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from annotated_types import Ge, Le, MaxLen

from megatron.checkpoint.entries import DTYPES, Box, Json, is_tiled
from megatron.checkpoint.shard import digest_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MANIFEST = "manifest.json"
FORMAT = "megatron-native"
VERSION = 1
MAX_BYTES = 1 << 30  # ten times the size of a manifest with a million shards

_FILE_NAME = re.compile(r"rank_\d{5,}(_\d+)?\.safetensors")

# The limits of these types are checked when a manifest is read (`parse`).
Size = Annotated[int, Ge(0), Le((1 << 63) - 1)]
Sizes = Annotated[tuple[Size, ...], MaxLen(8)]


class ManifestError(ValueError):
    """An error for a manifest that is damaged, contradictory or not in this program's format."""


# These records' fields have the same names and order as their JSON keys.
class FileInfo(NamedTuple):
    """A shard file: its size in bytes, and the size in bytes and SHA-256 of its header."""

    bytes: Size
    header_bytes: Size
    header_sha256: str


class TensorPiece(NamedTuple):
    """A part of a tensor.

    Attributes:
        file: The name of its shard file.
        offset: The index of its first element in the whole tensor.
        shape: Its shape.
        start: The offset of its first byte in the file.
        bytes: Its size in bytes.
        sha256: The digest of its bytes, in hexadecimal.
    """

    file: str
    offset: Sizes
    shape: Sizes
    start: Size
    bytes: Size
    sha256: str

    @property
    def box(self) -> Box:
        """The box of the whole tensor that the piece covers."""
        return Box(self.offset, self.shape)


class TensorInfo(NamedTuple):
    """A whole tensor: safetensors' name for its dtype, its shape, and the pieces that tile it."""

    dtype: str
    shape: Sizes
    pieces: tuple[TensorPiece, ...]


def keys_in_files(name: str, files: Iterable[str]) -> list[str]:
    """Return the safetensors key of each piece of a tensor.

    The key of the first piece in a file is the tensor's name. Further pieces in the same file have
    the keys "name#1", "name#2", ...

    Args:
        name: The tensor's name.
        files: The file of each piece, in order.
    """
    keys, seen = [], Counter[str]()
    for file in files:
        keys.append(f"{name}#{seen[file]}" if seen[file] else name)
        seen[file] += 1
    return keys


class Manifest(NamedTuple):
    """A checkpoint's table of contents.

    Attributes:
        iteration: Number of training steps taken.
        created: UTC time of the save, in ISO 8601.
        layout: Sizes of the grid of processes that wrote the checkpoint, by axis name.
        meta: JSON value that training needs to resume.
        files: Shards by file name.
        tensors: Tensors by entry name.
    """

    iteration: Size
    created: str
    layout: dict[str, Size]
    meta: dict[str, Json]
    files: dict[str, FileInfo]
    tensors: dict[str, TensorInfo]

    def check(self) -> None:
        """Check that files, tensors and pieces are consistent with each other.

        Raises:
            ManifestError: They are inconsistent. The message names the file or the tensor.
        """
        for name in self.files:
            if not _FILE_NAME.fullmatch(name):
                raise ManifestError(f"{name!r} is not a valid shard name")
        filled = {name: info.header_bytes for name, info in self.files.items()}
        for name, tensor in self.tensors.items():
            _check_tensor(name, tensor, self.files)
            for piece in tensor.pieces:
                filled[piece.file] += piece.bytes
        for name, (size, *_) in self.files.items():
            if filled[name] != size:
                expected = f"its header and tensors have {filled[name]}"
                raise ManifestError(f"{name} has {size} bytes, but {expected}")


def _check_tensor(name: str, tensor: TensorInfo, files: dict[str, FileInfo]) -> None:
    if tensor.dtype not in DTYPES:
        raise ManifestError(f"{name} has unknown type {tensor.dtype!r}")
    if not is_tiled(tensor.shape, (piece.box for piece in tensor.pieces)):
        raise ManifestError(f"the pieces of {name} do not cover {list(tensor.shape)}")
    for piece in tensor.pieces:
        if piece.file not in files:
            raise ManifestError(f"{name} is in {piece.file}, which the manifest does not list")
        if piece.bytes != piece.box.volume * DTYPES[tensor.dtype].itemsize:
            raise ManifestError(f"{name} in {piece.file} has the wrong size")
        info = files[piece.file]
        if not info.header_bytes <= piece.start <= info.bytes - piece.bytes:
            raise ManifestError(f"{name} lies outside {piece.file}")


def dump(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json.

    Raises:
        ValueError: The metadata contains NaN or infinity.
        TypeError: The metadata contains a value of a type that JSON lacks.
    """
    tensors = {
        name: {**tensor._asdict(), "pieces": [piece._asdict() for piece in tensor.pieces]}
        for name, tensor in sorted(manifest.tensors.items())
    }
    files = {name: info._asdict() for name, info in sorted(manifest.files.items())}
    body = {**manifest._asdict(), "files": files, "tensors": tensors}
    return _sign({"format": FORMAT, "version": VERSION, **body})


def _sign(body: dict[str, Any]) -> bytes:
    """Return JSON text whose first key is the digest of the text without that key."""
    return _text({"sha256": digest_of(_text(body)), **body})


def _text(value: Json) -> bytes:
    return (json.dumps(value, allow_nan=False) + "\n").encode("ascii")


def parse(data: bytes) -> Manifest:
    """Parse and check the bytes of manifest.json.

    Raises:
        ManifestError: The bytes are not a manifest of this program, have another format version,
            were altered, or are inconsistent.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"damaged: not JSON: {error}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ManifestError("not a manifest of this program")
    if body.get("version") != VERSION:
        version = body.get("version")
        raise ManifestError(f"format version {version!r}; this program reads version {VERSION}")
    claimed = body.pop("sha256", None)
    try:
        is_signed = claimed == digest_of(_text(body)) and data == _sign(body)
    except (ValueError, RecursionError) as error:  # NaN or infinity, which Python's parser accepts
        raise ManifestError(f"damaged: not JSON: {error}") from None
    if not is_signed:
        raise ManifestError("damaged: its digest does not match its content")
    # The digest detects only accidental changes, so types are checked as well.
    text = _text({key: body.get(key) for key in Manifest._fields})
    manifest: Manifest = validate(Manifest, text)
    manifest.check()
    return manifest


def validate(kind: Any, text: bytes) -> Any:
    """Parse JSON text into a value of this type, checking every annotation strictly.

    Raises:
        ManifestError: The text is not JSON, or a value is missing, has the wrong type or is out of
            range. The message names the first.
    """
    from pydantic import ValidationError

    try:
        return _schema(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ManifestError(f"{path:.200}: {first['msg']}") from None


@cache
def _schema(kind: Any) -> TypeAdapter[Any]:
    # Imported here because the import takes 70 ms, which only a run that loads should pay.
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def describe(dtype: str, shape: Iterable[int]) -> str:
    """Return the description of a tensor for messages, such as "F32 [5120, 64]"."""
    return f"{dtype} {list(shape)}"
