"""Read any part of any tensor in a checkpoint, and restore a run's tensors from a checkpoint."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint import manifest, shard
from megatron.checkpoint.entries import DTYPES, Box, Json, State, flatten
from megatron.checkpoint.manifest import MANIFEST, ManifestError, TensorPiece
from megatron.checkpoint.mapped import MappedFile
from megatron.checkpoint.retention import lock_for_reading
from megatron.checkpoint.shard import Placement
from megatron.checkpoint.trust import open_trusted
from megatron.config.retriever import TOWERS
from megatron.device import Device, StagingBuffers
from megatron.errors import CheckpointError
from megatron.parallel.quantized import PackedWeight

SHOWN = 10  # largest number of problems listed in a message
_ROWS = 4096  # number of rows read at a time
_WORDS = "embedding.word.weight"
_TABLES = (
    *(_WORDS, *(f"{tower}.{_WORDS}" for tower in TOWERS)),
    *("output.weight", "output.bias"),
    *("output.adapter.weight.b", "output.adapter.weight.magnitude"),
)


class TensorMeta(NamedTuple):
    """The shape and dtype of a whole tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        """Return a description such as "float32 [5120, 64]"."""
        return manifest.describe(str(self.dtype).removeprefix("torch."), self.shape)


class Reader(ABC):
    """The common interface of opened checkpoints in all formats.

    Attributes:
        format: "native", "legacy", "core", "deepspeed" or "hf".
        path: The checkpoint's folder.
        iteration: Training steps taken.
        meta: Metadata that the run saved with its tensors (`meta.Meta`). For files of other
            programs, `megatron_meta` and `HFReader` derive it from what they contain.
        tensors: The shape and dtype of every tensor, by name.
        allow_foreign: Whether files owned by other users are accepted
            (--allow-foreign-checkpoints), including those that are read later from the same folder.
    """

    format: str
    path: Path
    iteration: int
    meta: Json
    tensors: Mapping[str, TensorMeta]
    allow_foreign: bool = False

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self.tensors)

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor.

        Raises:
            CheckpointError: There is no tensor with this name.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype.

        Raises:
            CheckpointError: There is no tensor with this name.
        """
        self.global_shape(name)
        return self.tensors[name].dtype

    def read(
        self, name: str, box: Box | None = None, *, global_shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Return a part of a tensor, on the CPU.

        The result may be mapped pages of the file, which are read from disk when they are first
        used: do not write to it.

        Args:
            name: The tensor's name.
            box: The part to read. None reads the whole tensor.
            global_shape: The shape that the whole tensor must have. None accepts any.

        Raises:
            CheckpointError: There is no such tensor, the whole tensor has a different shape, or a
                file proves to be damaged.
        """
        shape = self.global_shape(name)
        if global_shape not in (None, shape):
            sizes = f"has shape {list(shape)}, but this run needs {list(global_shape or ())}"
            remedy = "give the checkpoint's network flags (--use-checkpoint-args reads them)"
            raise CheckpointError(f"{self.path}: {name} {sizes}: {remedy}")
        part = box or Box.whole(shape)
        assert part.fits(shape), f"{name}: {part} outside {shape}"
        return self._read(name, part)

    def chunks(self, name: str) -> list[Box]:
        """Return boxes that tile a tensor in row-major order.

        A caller that reads the tensor box by box needs memory for only one box at a time.

        Args:
            name: The tensor's name.
        """
        return [Box.whole(self.global_shape(name))]

    def read_chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Read and yield the parts of a tensor, one for each box in `chunks(name)`.

        Args:
            name: The tensor's name.
        """
        for box in self.chunks(name):
            yield self.read(name, box)

    @abstractmethod
    def _read(self, name: str, box: Box) -> torch.Tensor:
        """Read a box that lies inside the tensor."""


class NativeReader(Reader):
    """A checkpoint that `store.write_checkpoint` wrote.

    Opening it checks the manifest and the file sizes; `verify` checks every byte. While the reader
    exists, no other job's `--keep-latest` or `--save-retain-interval` deletes the checkpoint,
    unless the file system lacks locks.
    """

    format = "native"

    def __init__(self, path: Path, *, allow_foreign: bool = False) -> None:
        """Open a checkpoint's folder.

        Args:
            path: The folder.
            allow_foreign: Accept files owned by other users.

        Raises:
            CheckpointError: The manifest is invalid, a file is missing, refused or has the wrong
                size, or the checkpoint is being deleted.
        """
        self.path, self.allow_foreign = path, allow_foreign
        try:
            weakref.finalize(self, os.close, lock_for_reading(path))
        except OSError as error:
            raise CheckpointError(f"{MANIFEST}: cannot be read: {error.strerror}") from error
        self.manifest = _load_manifest(path, allow_foreign)
        self.iteration = self.manifest.iteration
        self.meta = self.manifest.meta
        tensors = self.manifest.tensors.items()
        self.tensors = {name: TensorMeta(info.shape, DTYPES[info.dtype]) for name, info in tensors}
        self._files = {}
        for name, info in self.manifest.files.items():
            file = self._files[name] = MappedFile(path / name, allow_foreign=allow_foreign)
            if file.size != info.bytes:
                size = f"{file.size:,} bytes instead of {info.bytes:,}"
                raise CheckpointError(f"{name}: damaged: {size}")

    def verify(
        self, rank: int = 0, ranks: int = 1, *, only: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Compare the tensors' bytes with their digests, and the files' headers with the manifest.

        Args:
            rank: Index of the share to verify.
            ranks: Number of shares into which the work is divided.
            only: A function that returns whether to verify the tensor with this name. Headers are
                always verified.

        Raises:
            CheckpointError: The bytes of a tensor or header have changed, the tensors in a file
                (their names, positions, shapes or dtypes) differ from the manifest, or a file was
                replaced or cannot be read. The message names the file and, if there is one, the
                tensor.
        """
        files, tensors = self.manifest.files, self.manifest.tensors
        placements: dict[str, dict[str, Placement]] = {file: {} for file in files}
        spans = [  # all byte ranges with a digest
            (
                "the header",
                TensorPiece(file, (), (), 0, info.header_bytes, info.header_sha256),
            )
            for file, info in files.items()
        ]
        for name, tensor in tensors.items():
            keys = manifest.keys_in_files(name, [piece.file for piece in tensor.pieces])
            for key, piece in zip(keys, tensor.pieces, strict=True):
                placements[piece.file][key] = _placement(tensor.dtype, piece)
                if only(name):
                    spans.append((name, piece))
        loads, own_spans = [0] * ranks, []
        for span in sorted(spans, key=lambda span: -span[1].bytes):
            lightest = loads.index(min(loads))
            loads[lightest] += span[1].bytes + 1
            if lightest == rank:
                own_spans.append(span)

        def verify(span: tuple[str, TensorPiece]) -> None:
            name, piece = span
            try:
                digest = self._files[piece.file].digest(piece.start, piece.bytes)
            except OSError as error:
                raise CheckpointError(f"{piece.file}: cannot be read: {error.strerror}") from error
            if digest != piece.sha256:
                raise CheckpointError(f"{piece.file}: damaged: {name} does not match its digest")
            if piece.start == 0:  # the header
                self._check_header(piece.file, placements[piece.file])

        with ThreadPoolExecutor(shard.THREADS) as pool:
            try:
                for _ in pool.map(verify, own_spans):
                    pass
            except CheckpointError:
                pool.shutdown(cancel_futures=True)
                raise

    def _check_header(self, file: str, expected: Mapping[str, Placement]) -> None:
        """Check that a file's header, which other programs rely on, matches the manifest."""
        actual = self._files[file].header()

        def describe(placement: Placement) -> str:
            return (
                f"{manifest.describe(placement.dtype, placement.shape)} at byte {placement.start}"
            )

        for key, placement in expected.items():
            if actual.get(key) != placement:
                description = describe(actual[key]) if key in actual else "no tensor with this name"
                raise CheckpointError(
                    f"{file}: contains {description} where {MANIFEST} says {describe(placement)}: "
                    f"{key}"
                )
        unlisted = actual.keys() - expected.keys()
        if unlisted:
            raise CheckpointError(
                f"{file}: contains {min(unlisted)}, which {MANIFEST} does not list"
            )

    def _read(self, name: str, box: Box) -> torch.Tensor:
        tensor = self.manifest.tensors[name]

        def part_of(piece: TensorPiece, part: Box) -> torch.Tensor:
            whole = self._files[piece.file].tensor(_placement(tensor.dtype, piece))
            return whole[part.slices_in(piece.box)]

        for piece in tensor.pieces:
            if piece.box.intersect(box) == box:
                return part_of(piece, box)  # a view of the file's mapped pages
        result = torch.empty(box.shape, dtype=self.dtype(name))
        for piece in tensor.pieces:
            overlap = piece.box.intersect(box)
            if overlap is not None:
                result[overlap.slices_in(box)] = part_of(piece, overlap)
        return result


def _placement(dtype: str, piece: TensorPiece) -> Placement:
    return Placement(dtype, piece.shape, piece.start, piece.bytes)


def _load_manifest(path: Path, allow_foreign: bool) -> manifest.Manifest:
    file = path / MANIFEST
    try:
        with open_trusted(file, allow_foreign=allow_foreign) as stream:
            data = stream.read(manifest.MAX_BYTES + 1)
        if len(data) > manifest.MAX_BYTES:
            raise CheckpointError(f"{MANIFEST}: larger than {manifest.MAX_BYTES:,} bytes")
        return manifest.parse(data)
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: cannot be read: {error.strerror}") from error
    except ManifestError as error:
        raise CheckpointError(f"{MANIFEST}: {error}") from error


class WrappedReader(Reader):
    """A checkpoint that presents the tensors of another one differently.

    Subclasses replace `tensors` and `meta` where theirs differ.
    """

    def __init__(self, reader: Reader) -> None:
        """Wrap an opened checkpoint."""
        self._reader = reader
        self.format, self.path, self.iteration = reader.format, reader.path, reader.iteration
        self.allow_foreign, self.meta = reader.allow_foreign, reader.meta
        self.tensors = reader.tensors


class PaddedReader(WrappedReader):
    """A checkpoint whose vocabulary tables are presented with a different number of rows.

    Megatron-LM pads to a multiple of --make-vocab-size-divisible-by times the tensor-parallel size,
    so the number of rows in its files differs from ours and from file to file.

    Rows of the file beyond `rows` are left out. Rows that the file lacks belong to no vocabulary
    entry, but take part in the softmax. In a weight (its fp32 master, its average), these rows are
    the mean of the entries' rows; in the optimizer's moments, they are zero. The logit of a mean
    row is the mean logit, whose exponential is at most the mean of the exponentials (Jensen's
    inequality), so a padding row gets no more than an even share of the probability. A row of zeros
    has the logit 0 and would get nearly all of GPT-2's probability, because GPT-2's other logits
    are far below 0.
    """

    def __init__(self, reader: Reader, *, rows: int, entries: int) -> None:
        """Wrap a checkpoint.

        Args:
            reader: The opened checkpoint.
            rows: Number of rows that the vocabulary tables should have.
            entries: Number of entries in the tokenizer's vocabulary.

        Raises:
            CheckpointError: The checkpoint has fewer rows than the tokenizer has entries.
        """
        super().__init__(reader)
        self._entries = entries
        self.tensors = dict(reader.tensors)
        for name in filter(is_vocabulary_table, reader.names()):
            (stored_rows, *width), dtype = reader.tensors[name]
            if stored_rows < entries:
                raise CheckpointError(
                    f"{reader.path}: {name} has {stored_rows} rows, but the tokenizer has "
                    f"{entries} entries: give the vocabulary files that the checkpoint was trained "
                    "with"
                )
            self.tensors[name] = TensorMeta((rows, *width), dtype)

    def chunks(self, name: str) -> list[Box]:
        """Return boxes that tile a tensor in row-major order; one box for a vocabulary table.

        Args:
            name: The tensor's name.
        """
        return super().chunks(name) if is_vocabulary_table(name) else self._reader.chunks(name)

    def _read(self, name: str, box: Box) -> torch.Tensor:
        stored = self._reader.tensors[name].shape
        if stored == self.tensors[name].shape:
            return self._reader.read(name, box)
        (first, *offset), (rows, *shape) = box.offset, box.shape
        part = torch.zeros(box.shape, dtype=self.tensors[name].dtype)
        count = min(rows, max(0, stored[0] - first))
        if count < rows and (not name.startswith("optimizer.") or name.endswith(".master")):
            mean = self._mean_row(name)
            part[:] = mean[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        if count:
            part[:count] = self._reader.read(name, Box(box.offset, (count, *shape)))
        return part

    def _mean_row(self, name: str) -> torch.Tensor:
        """Return the fp32 mean [h] of the entries' rows, or the mean [] of a bias.

        The table is read in chunks of rows, because no rank has memory for all of it.
        """
        stored = self._reader.tensors[name].shape
        total = torch.zeros(stored[1:], dtype=torch.float64)
        for start in range(0, self._entries, _ROWS):
            shape = (min(_ROWS, self._entries - start), *stored[1:])
            rows = self._reader.read(name, Box((start, *(0 for _ in stored[1:])), shape))
            total += rows.sum(0, dtype=torch.float64)
        return (total / self._entries).float()


def is_vocabulary_table(name: str) -> bool:
    """Return whether a tensor is a vocabulary table, or an optimizer state or average of one."""
    return name.partition(".")[2].startswith(_TABLES)


def restore(
    reader: Reader,
    entries: State,
    *,
    prefixes: Iterable[str] = (),
    cast: bool = False,
    cast_prefixes: tuple[str, ...] = (),
) -> None:
    """Copy the checkpoint's values into the entries' tensors, in place.

    Names, shapes and dtypes are checked before anything is changed.

    Args:
        reader: The opened checkpoint.
        entries: The tensors to fill; each rank passes its own.
        prefixes: Prefixes (such as "model.") under which every tensor of the checkpoint must have
            an entry. Pass them only on ranks that hold the whole model, not with pipeline
            parallelism.
        cast: Allow a different dtype in the checkpoint.
        cast_prefixes: Prefixes under which a different dtype is allowed even without `cast`.

    Raises:
        CheckpointError: Tensors are missing or unexpected, or have a different shape or dtype. The
            message lists up to `SHOWN` of them, and nothing has been changed. The error is also
            raised if a file proves to be damaged later, when some tensors may have been filled.
    """
    problems = find_problems(
        reader, entries, prefixes=prefixes, cast=cast, cast_prefixes=cast_prefixes
    )
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(
            f"{reader.path} does not fit this run: " + "; ".join(problems[:SHOWN]) + more
        )
    # A native checkpoint's values are read from disk only when they are copied, so copy several
    # at a time.
    copying: deque[Future[None]] = deque()
    buffers = StagingBuffers(shard.PIECE)
    with ThreadPoolExecutor(shard.THREADS) as pool:
        for name, entry in flatten(entries):
            tensor, is_packed = entry.tensor, isinstance(entry.tensor, PackedWeight)
            if is_packed:  # at most one tensor at a time exists in the wider format
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            for chunk in reader.chunks(name):
                overlap = chunk.intersect(entry.box)
                if overlap is None:
                    continue
                values = reader.read(name, overlap, global_shape=entry.global_shape)
                target = tensor[overlap.slices_in(entry.box)]
                copying.append(pool.submit(_copy, target, values, buffers))
                if len(copying) > shard.THREADS:  # limits the values that wait in memory
                    copying.popleft().result()
            if is_packed:
                while copying:
                    copying.popleft().result()
                entry.tensor.copy_(tensor)
        for future in copying:
            future.result()


@torch.no_grad()  # the setting is per thread
def _copy(tensor: Tensor, values: Tensor, buffers: StagingBuffers) -> None:
    is_plain = tensor.is_contiguous() and values.is_contiguous() and tensor.numel() > 0
    if tensor.device.type == "cpu" or tensor.dtype != values.dtype or not is_plain:
        with Device(tensor.device).as_current():  # a new thread's current device is the first GPU
            tensor.copy_(values)
    else:
        buffers.for_device(tensor.device).upload(shard.bytes_of(values), shard.bytes_of(tensor))


def find_problems(
    reader: Reader,
    entries: State,
    *,
    prefixes: Iterable[str] = (),
    cast: bool = False,
    cast_prefixes: tuple[str, ...] = (),
) -> list[str]:
    """Return the reasons why `restore` would refuse a checkpoint, without reading its tensors.

    Args:
        reader: The opened checkpoint.
        entries: The tensors to fill.
        prefixes: Prefixes under which every tensor of the checkpoint must have an entry.
        cast: Allow a different dtype in the checkpoint.
        cast_prefixes: Prefixes under which a different dtype is allowed even without `cast`.

    Returns:
        One line for each tensor that is missing, unexpected, or has a different shape or dtype.
    """
    stored, under = reader.tensors, tuple(prefixes)
    problems = [f"{name} is missing" for name in sorted(entries.keys() - stored.keys())]
    problems += [
        f"{name} does not exist in this network"
        for name in sorted(stored.keys() - entries.keys())
        if name.startswith(under)
    ]
    for name, entry in sorted(flatten(entries), key=lambda pair: pair[0]):
        expected = TensorMeta(tuple(entry.global_shape), entry.tensor.dtype)
        stored_meta = stored.get(name, expected)
        may_cast = cast or name.startswith(cast_prefixes)
        if expected.shape != stored_meta.shape or (
            expected.dtype != stored_meta.dtype and not may_cast
        ):
            problems.append(f"{name} is {stored_meta}, not {expected}")
    return list(dict.fromkeys(problems))
