"""Open the newest checkpoint that verifies, and read any part of any tensor in it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from megatron.checkpoint import dtypes
from megatron.checkpoint.entries import Box, Json, check_request
from megatron.checkpoint.exchange import Exchange
from megatron.checkpoint.find import Found, checkpoint_at, checkpoint_of, list_checkpoints
from megatron.checkpoint.manifest import (
    MANIFEST,
    MAX_BYTES,
    Manifest,
    ManifestError,
    Piece,
    TensorInfo,
    describe,
    keys_in_files,
    parse,
)
from megatron.checkpoint.retention import hold_for_reading
from megatron.checkpoint.shard import THREADS, Placement, digest_of_range, parse_header
from megatron.errors import CheckpointError, warn
from megatron.parallel.layout import Layout


class Reader(Protocol):
    """What training and tools read from, whatever the format on disk.

    Attributes:
        format: "native" or "legacy".
        path: the checkpoint's folder.
        iteration: training steps taken.
        meta: what the run saved beside its tensors; see `megatron.checkpoint.legacy` for what is
            filled in from Megatron's files.
    """

    format: str
    path: Path
    iteration: int
    meta: Json

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor. CheckpointError where there is none of this name."""

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's number type. CheckpointError where there is none of this name."""

    def read(self, name: str, wanted: Box, *, global_shape: tuple[int, ...]) -> torch.Tensor:
        """The wanted part of a tensor, on the CPU, and not for writing to: it may be the pages of
        the file, which come from the disk when they are first used.

        Raises:
            CheckpointError: no such tensor, or the whole one has another shape than
                `global_shape`.
        """


def open_checkpoint(
    root: Path | str,
    *,
    step: int | None = None,
    verify: bool = True,
    layout: Layout | None = None,
) -> Reader | None:
    """The first checkpoint in `find.list_checkpoints` order that is sound; None in an empty folder.

    Where `root` is a checkpoint's own folder (`iter_0000100`), or an iteration is named, that one
    and no other.

    Collective over `layout`, where one is given: ranks share the work of verifying, and open the
    same checkpoint. The folder must be on a file system that all of them see.

    Args:
        root: folder of checkpoints, or one of them.
        step: the iteration of the one to open.
        verify: compare every digest; off: sizes and the manifest only.

    Raises:
        CheckpointError: all that there are, are damaged; says what is wrong with each. Or there is
            none of the iteration.
    """
    exchange = Exchange((layout or Layout.single()).world)
    root = Path(root).absolute()
    listed = exchange.on_main(lambda: [_to_json(one) for one in _candidates(root, step)])
    problems: list[str] = []
    for found in map(_from_json, listed):
        reader, problem = _try_open(found, exchange, verify)
        if reader is not None:
            if problems and exchange.is_main:
                warn("\n  ".join([*problems, f"using {found.path.name} instead"]))
            return reader
        problems.append(f"{found.path} is not used: {problem}")
    if not problems:
        return None
    if step is not None:  # the others have not been looked at
        raise CheckpointError(
            f"--ckpt-step {step}: {problems[0]}\n"
            "restore it from a copy, give another iteration, or drop the flag to take the newest"
        )
    raise CheckpointError(
        f"{root}: none of its checkpoints can be used:\n  "
        + "\n  ".join(problems)
        + "\nrestore one from a copy, or name an empty folder to start from scratch"
    )


def _candidates(root: Path, step: int | None) -> list[Found]:
    if step is not None:
        return [checkpoint_of(root, step)]
    itself = checkpoint_at(root)
    return list_checkpoints(root) if itself is None else [itself]


def _to_json(found: Found) -> Json:
    return [found.format, found.iteration, str(found.path)]


def _from_json(value: Json) -> Found:
    return Found(value[0], value[1], Path(value[2]))


def _try_open(found: Found, exchange: Exchange, verify: bool) -> tuple[Reader | None, str | None]:
    """A reader that every rank agrees on, or the first problem that any rank met. Collective."""
    reader: Reader | None = None
    problem = None
    try:
        reader = open_found(
            found, verify=verify, rank=exchange.world.rank, ranks=exchange.world.size
        )
    except CheckpointError as error:
        problem = str(error)
    problems = [text for text in exchange.gather(problem) if text is not None]
    return (None, problems[0]) if problems else (reader, None)


def open_found(found: Found, *, verify: bool = True, rank: int = 0, ranks: int = 1) -> Reader:
    """Open this one, without a fallback; verify this rank's share of it.

    Raises:
        CheckpointError: it is damaged, or of a kind that is not read.
    """
    if found.format == "legacy":
        from megatron.checkpoint.legacy.reader import LegacyReader

        try:
            return LegacyReader(found.path, verify=verify, rank=rank, ranks=ranks)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            # The tree comes from outside: what is no dict, or no number, can be anywhere in it.
            raise CheckpointError(f"not a tree of Megatron-LM: {error}") from error
    reader = NativeReader(found.path)
    if reader.iteration != found.iteration and found.path.name.startswith("iter_"):
        raise CheckpointError(f"{MANIFEST} is of iteration {reader.iteration}")
    if verify:
        reader.verify(rank, ranks)
    return reader


class _Span(NamedTuple):
    """Bytes of a file that have one digest."""

    file: str
    what: str
    start: int
    size: int
    digest: str


class NativeReader:
    """Reads what `store.save` wrote. Opening checks manifest and sizes, `verify` every byte.

    As long as there is a reader, `--keep-latest` of another job leaves the checkpoint alone.
    """

    format = "native"

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where the manifest or the size of a file is wrong."""
        self.path = path
        try:
            weakref.finalize(self, os.close, hold_for_reading(path))
        except OSError as error:
            raise CheckpointError(f"{MANIFEST}: cannot be read: {error.strerror}") from error
        self._files: dict[str, Any] = {}
        self.manifest = _load_manifest(path)
        self.iteration = self.manifest.iteration
        self.meta = self.manifest.meta
        for name, info in self.manifest.files.items():
            _check_size(path / name, info.size)

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Compare digests, and what files hold with what the manifest says of them: this rank's
        share of all, so that `ranks` ranks cover the checkpoint.

        Raises:
            CheckpointError: names the file and the tensor whose bytes have changed, or which is
                not in it as the manifest says.
        """
        described = _pieces_by_file(self.manifest)
        shares = [0] * ranks
        mine = []
        for span in sorted(self._ranges(), key=lambda span: -span.size):
            lightest = shares.index(min(shares))
            shares[lightest] += span.size + 1
            if lightest == rank:
                mine.append(span)

        def verify(span: _Span) -> None:
            self._verify(span)
            if span.start == 0:  # the header
                self._check_places(span, described[span.file])

        with ThreadPoolExecutor(THREADS) as pool:
            try:
                for _ in pool.map(verify, mine):
                    pass
            except CheckpointError:
                pool.shutdown(cancel_futures=True)
                raise

    def _verify(self, span: _Span) -> None:
        try:
            found = digest_of_range(self.path / span.file, span.start, span.size)
        except OSError as error:
            raise CheckpointError(f"{span.file}: cannot be read: {error.strerror}") from error
        if found != span.digest:
            raise CheckpointError(f"{span.file}: damaged: {span.what} does not match its digest")

    def _check_places(self, header: _Span, described: list[tuple[str, Placement]]) -> None:
        """Tensors are read by the file's own header, so it must say what the manifest says."""
        file = header.file
        try:
            self._open(file)  # refuses whatever reading would refuse
            with open(self.path / file, "rb") as stream:
                held = parse_header(stream.read(header.size))
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{file}: {error}") from error
        for key, place in described:
            if held.get(key) != place:
                found = _in_words(held[key]) if key in held else "nothing of this name"
                raise CheckpointError(
                    f"{file}: holds {found} where {MANIFEST} says {_in_words(place)}: {key}"
                )
        strangers = held.keys() - {key for key, _ in described}
        if strangers:
            raise CheckpointError(f"{file}: holds {min(strangers)}, which {MANIFEST} does not name")

    def _ranges(self) -> Iterator[_Span]:
        """All bytes that have a digest."""
        for file, info in self.manifest.files.items():
            yield _Span(file, "the header", 0, info.header_size, info.header_digest)
        for name, tensor in self.manifest.tensors.items():
            for piece in tensor.pieces:
                yield _Span(piece.file, name, piece.start, piece.size, piece.digest)

    def names(self) -> list[str]:
        return sorted(self.manifest.tensors)

    def global_shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).global_shape

    def dtype(self, name: str) -> torch.dtype:
        return dtypes.BY_NAME[self._info(name).dtype]

    def read(self, name: str, wanted: Box, *, global_shape: tuple[int, ...]) -> torch.Tensor:
        info = self._info(name)
        check_request(self.path, name, info.global_shape, global_shape, wanted)
        keys = keys_in_files(name, [piece.file for piece in info.pieces])
        for key, piece in zip(keys, info.pieces, strict=True):
            if piece.box.intersect(wanted) == wanted:
                return self._read_piece(key, piece, wanted)  # the file's own pages
        result = torch.empty(wanted.shape, dtype=dtypes.BY_NAME[info.dtype])
        for key, piece in zip(keys, info.pieces, strict=True):
            common = piece.box.intersect(wanted)
            if common is not None:
                part = self._read_piece(key, piece, common)
                result[common.within(wanted)] = part
        return result

    def _read_piece(self, key: str, piece: Piece, part: Box) -> torch.Tensor:
        try:
            file = self._open(piece.file)
            if part == piece.box:
                return file.get_tensor(key)
            return file.get_slice(key)[part.within(piece.box)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / piece.file}: {key}: {error}") from error

    def _open(self, file: str) -> Any:
        if file not in self._files:  # its header is long: it is read once
            self._files[file] = safe_open(self.path / file, framework="pt")
        return self._files[file]

    def _info(self, name: str) -> TensorInfo:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor {name!r}")
        return self.manifest.tensors[name]


def _pieces_by_file(manifest: Manifest) -> dict[str, list[tuple[str, Placement]]]:
    """What every file should hold: keys in its header, each with its place."""
    held: dict[str, list[tuple[str, Placement]]] = {file: [] for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        keys = keys_in_files(name, [piece.file for piece in tensor.pieces])
        for key, piece in zip(keys, tensor.pieces, strict=True):
            place = Placement(tensor.dtype, piece.box.shape, piece.start, piece.size)
            held[piece.file].append((key, place))
    return held


def _in_words(place: Placement) -> str:
    return f"{describe(place.dtype, place.shape)} at byte {place.start}"


def _load_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        if file.is_symlink() or file.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{MANIFEST}: not a plain file of reasonable size")
        return parse(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: cannot be read: {error.strerror}") from error
    except ManifestError as error:
        raise CheckpointError(f"{MANIFEST}: {error}") from error


def _check_size(file: Path, size: int) -> None:
    # A link could lead anywhere, and what it leads to is not what the folder's copy would hold.
    try:
        status = file.lstat()
    except OSError as error:
        raise CheckpointError(f"{file.name}: {error.strerror}") from error
    if not file.is_file() or file.is_symlink():
        raise CheckpointError(f"{file.name}: not a plain file")
    if status.st_size != size:
        raise CheckpointError(f"{file.name}: damaged: {status.st_size:,} bytes instead of {size:,}")
