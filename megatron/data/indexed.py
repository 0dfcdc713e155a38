"""The memory-mapped indexed dataset: `<prefix>.bin` (token ids) and `<prefix>.idx` (where).

A *sequence* is a run of tokens (a sentence, or a whole document for GPT); a *document* is a run of
sequences. The bytes are those of Megatron-LM's MMIDIDX format, little-endian:

    9s magic | u64 version | u8 dtype code | u64 N sequences | u64 D = documents + 1
    i32 [N] tokens of each sequence | i64 [N] byte offset of each in .bin | i64 [D] first sequence

The format has no checksum. What it repeats is compared at open (file sizes, offsets against
lengths), so a cut file or a damaged header, length or offset is refused before training starts.
What it says once cannot be checked: a flipped bit in a token id, or a moved document boundary.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.durable import sync_folder
from megatron.errors import DataError, StorageError

_MAGIC = b"MMIDIDX\x00\x00"
_CACHED_MAGIC = b"TNTIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_WRITE_BEHIND = 1 << 20  # bytes of .bin between two calls that start writing to the disk
_CHUNK = 1 << 22  # elements a step, so that memory stays flat for any number of sequences
_DTYPES: dict[int, type[np.number[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """File of the token ids."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """File of the lengths and offsets."""
    return Path(f"{os.fspath(prefix)}.idx")


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """Smallest token type that Megatron picks for a vocabulary: uint16 below 65,500, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class _Index(NamedTuple):
    """The content of an .idx file, as views of the mapped bytes."""

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]  # [N] tokens
    pointers: NDArray[np.int64]  # [N] bytes
    documents: NDArray[np.int64]  # [D] sequences


class IndexedDataset:
    """Read access to one `.bin`/`.idx` pair. Cheap to send to another process: it reopens there.

    Args:
        prefix: path without `.bin` and `.idx`.

    Raises:
        DataError: a file is missing, of another format, truncated or inconsistent: all that the
            format repeats is compared, in one pass over the .idx.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self._open(validate=True)

    def _open(self, *, validate: bool) -> None:
        _require_files(self.prefix)
        index = _read_index(idx_path(self.prefix))
        if validate:
            _check_index(self.prefix, index)
        self.dtype = index.dtype
        self.sequence_lengths = index.lengths
        self.pointers = index.pointers
        self.document_indices = index.documents
        self._tokens = _map(bin_path(self.prefix), index.dtype)

    def __getstate__(self) -> dict[str, str]:
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.prefix = state["prefix"]
        self._open(validate=False)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens in the .bin file."""
        return len(self._tokens)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens `[length]` of sequence `i` from `offset` on; to its end without `length`.

        Raises:
            DataError: a token id is negative, so the file is damaged or of another dtype.
            IndexError: the range is not inside the sequence.
        """
        available = int(self.sequence_lengths[i]) - offset
        length = available if length is None else length
        if not 0 <= length <= available or offset < 0:
            raise IndexError(
                f"{self.prefix}: sequence {i} has {available + offset} tokens, asked for "
                f"{length} from {offset}"
            )
        start = int(self.pointers[i]) // self.dtype.itemsize + offset
        tokens = self._tokens[start : start + length]
        if self.dtype.kind == "i" and length and int(tokens.min()) < 0:
            raise DataError(
                f"{bin_path(self.prefix)}: sequence {i} holds the token id {int(tokens.min())}; "
                "ids are never negative, so this file or the dtype in its .idx is damaged: "
                "restore it, or preprocess the text again"
            )
        return tokens


def _require_files(prefix: str) -> None:
    try:
        missing = [path for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    except OSError as error:  # the name is too long, or a folder may not be searched
        raise DataError(f"dataset {prefix}: cannot be looked up: {error.strerror}") from None
    if not missing:
        return
    if prefix.endswith((".bin", ".idx")):
        raise DataError(f"dataset {prefix}: give the path without {prefix[-4:]}")
    import difflib  # only mistakes need it

    folder = Path(prefix).parent
    known = sorted(str(path)[:-4] for path in folder.glob("*.idx")) if folder.is_dir() else []
    close = difflib.get_close_matches(prefix, known, n=5, cutoff=0.4) or known[:5]
    hint = f"datasets in that folder: {', '.join(close)}" if close else f"no dataset in {folder}"
    raise DataError(f"dataset {prefix}: {missing[0]} does not exist; {hint}")


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The whole file as a read-only array of `dtype`."""
    # mmap refuses an empty file, which a corpus without tokens legally has.
    if path.stat().st_size < dtype.itemsize:
        return np.empty(0, dtype)
    count = path.stat().st_size // dtype.itemsize
    mapped = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    # A plain array over the same mapping: slicing np.memmap's subclass costs ten times as much.
    return mapped.view(np.ndarray)


def _read_index(path: Path) -> _Index:
    """Parse the header and cut the mapped file into its arrays.

    Raises:
        DataError: the file is not MMIDIDX version 1 of token ids, or has not the size it announces.
    """
    raw = _map(path, np.dtype(np.uint8))
    start = bytes(raw[: _HEADER.size])
    if start.startswith(_CACHED_MAGIC):
        raise DataError(
            f"{path}: this is the old cached/lazy format (TNTIDX), which cannot be trained on: "
            "preprocess the text again with tools/preprocess_data.py"
        )
    if not start.startswith(_MAGIC):
        raise DataError(
            f"{path}: not an index file: it starts with {start[:9]!r}, expected {_MAGIC!r}"
        )
    if len(start) < _HEADER.size:
        raise DataError(f"{path}: {len(raw)} bytes, shorter than the header of {_HEADER.size}")
    _, version, code, sequences, documents = _HEADER.unpack(start)
    if version != _VERSION:
        raise DataError(f"{path}: format version {version}, expected {_VERSION}")
    if code not in _DTYPES or np.dtype(_DTYPES[code]).kind == "f":
        raise DataError(
            f"{path}: dtype code {code} is not an integer type "
            "(1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16)"
        )
    _check_index_size(path, len(raw), sequences, documents)
    pointers = _HEADER.size + 4 * sequences
    return _Index(
        dtype=np.dtype(_DTYPES[code]),
        lengths=raw[_HEADER.size : pointers].view("<i4"),
        pointers=raw[pointers : pointers + 8 * sequences].view("<i8"),
        documents=raw[pointers + 8 * sequences :].view("<i8"),
    )


def _check_index_size(path: Path, actual: int, sequences: int, documents: int) -> None:
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if actual == expected + sequences and sequences > 0:
        raise DataError(
            f"{path}: {sequences} bytes of modes follow the index: a multimodal dataset, which "
            "text training does not read; use a text dataset"
        )
    if actual != expected:
        raise DataError(
            f"{path}: {actual} bytes, expected {expected} for {sequences} sequences and "
            f"{documents} document bounds: the file is truncated or damaged; copy it again or "
            "preprocess the text again"
        )
    if documents == 0:
        raise DataError(f"{path}: no document bounds; expected at least 1: the file is damaged")


def _check_index(prefix: str, index: _Index) -> None:
    """Compare everything that the format says twice.

    Raises:
        DataError: with file, position, expected and actual value of the first difference.
    """
    path, itemsize = idx_path(prefix), index.dtype.itemsize
    total = 0
    for start in range(0, len(index.lengths), _CHUNK):
        lengths = index.lengths[start : start + _CHUNK].astype(np.int64)
        _refuse_first(path, "length of sequence", start, lengths, lengths < 0, ">= 0")
        ends = total + np.cumsum(lengths * itemsize)
        pointers = index.pointers[start : start + _CHUNK]
        expected = ends - lengths * itemsize
        _refuse_first(path, "offset of sequence", start, pointers, pointers != expected, expected)
        total = int(ends[-1])
    actual = bin_path(prefix).stat().st_size
    if actual != total:
        raise DataError(
            f"{bin_path(prefix)}: {actual} bytes, expected {total} ({total // itemsize} tokens of "
            f"{index.dtype}) according to {path}: one of the two is truncated, damaged or of "
            "another dataset; copy both again or preprocess the text again"
        )
    _check_documents(path, index)


def _check_documents(path: Path, index: _Index) -> None:
    """Document bounds rise from 0 to the number of sequences."""
    previous = 0
    for start in range(0, len(index.documents), _CHUNK):
        bounds = index.documents[start : start + _CHUNK].astype(np.int64)
        before = np.concatenate([[previous], bounds[:-1]])
        _refuse_first(path, "document bound", start, bounds, bounds < before, "not to fall")
        previous = int(bounds[-1])
    for position, expected in ((0, 0), (-1, len(index.lengths))):
        if int(index.documents[position]) != expected:
            raise DataError(
                f"{path}: {'first' if position == 0 else 'last'} document bound is "
                f"{int(index.documents[position])}, expected {expected}: the file is damaged"
            )


def _refuse_first(
    path: Path,
    what: str,
    start: int,
    values: NDArray[Any],
    wrong: NDArray[np.bool_],
    expected: NDArray[np.int64] | str,
) -> None:
    """Raise for the first position where `wrong` is set; `start` is the chunk's first position."""
    if not wrong.any():
        return
    at = int(wrong.argmax())
    want = expected if isinstance(expected, str) else int(expected[at])
    raise DataError(
        f"{path}: {what} {start + at} is {int(values[at])}, expected {want}: the file is "
        "damaged; copy it again or preprocess the text again"
    )


class IndexedDatasetBuilder:
    """Writes a `.bin`/`.idx` pair; nothing stands under the final names before `finalize()`.

    Memory stays flat: lengths and document bounds are spilled to temporary files beside the
    output. As a context manager it finalizes on success and removes its files on an exception.

    Args:
        prefix: path without `.bin` and `.idx`; its folder is created.
        dtype: type of the stored token ids, see `best_dtype`.

    Raises:
        StorageError: the folder cannot be written to, or the disk is full.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype[Any] | type[Any]) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        self._code = _dtype_code(self.dtype)
        self.num_sequences = 0
        self.num_documents = 0
        self.num_tokens = 0
        self._started = 0  # bytes of .bin that are on their way to the disk
        with _storage_errors(self.prefix):
            bin_path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            self._tokens = self._create("bin")
            self._lengths = self._create("lengths")
            self._documents = self._create("documents")
            self._index = self._create("idx")

    def _create(self, suffix: str) -> BinaryIO:
        # In the same folder, so that the last step is a rename; by process, so that two runs
        # never write into one file.
        return open(f"{self.prefix}.{suffix}.tmp-{os.getpid()}", "w+b", buffering=1 << 20)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._tokens.closed:
            self.finalize()

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int]) -> None:
        """Append one document: its tokens `[sum(lengths)]` and the length of each sequence."""
        self.add_documents(tokens, lengths, [len(lengths)])

    def add_documents(
        self, tokens: ArrayLike, lengths: ArrayLike, sequences_per_document: ArrayLike
    ) -> None:
        """Append many documents at once.

        Args:
            tokens: ids of all documents back to back, `[sum(lengths)]`.
            lengths: tokens of each sequence, `[sum(sequences_per_document)]`.
            sequences_per_document: sequences of each document, zero allowed, `[documents]`.

        Raises:
            DataError: an id does not fit the dataset's dtype, or a sequence is too long.
            StorageError: the disk is full.
        """
        ids = _cast(tokens, self.dtype, f"{self.prefix}: token id")
        sizes = _cast(lengths, np.dtype(np.int32), f"{self.prefix}: sequence length")
        counts = np.asarray(sequences_per_document, np.int64)
        assert int(sizes.sum(dtype=np.int64)) == len(ids), "lengths do not add up to the tokens"
        assert int(counts.sum()) == len(sizes), "documents do not add up to the sequences"
        self._append(sizes, self.num_sequences + np.cumsum(counts))
        with _storage_errors(self.prefix):
            self._tokens.write(ids.data)
            self.num_tokens += len(ids)
            self._start_writing()

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Append the whole content of another dataset.

        Raises:
            DataError: the other dataset is damaged or of another dtype.
            StorageError: the disk is full.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{other.prefix}: token type {other.dtype}, but {self.prefix} is written as "
                f"{self.dtype}: only datasets of one tokenizer can be joined"
            )
        first = self.num_sequences
        none = np.empty(0, np.int64)
        for start in range(0, len(other), _CHUNK):
            self._append(other.sequence_lengths[start : start + _CHUNK], none)
        for start in range(1, len(other.document_indices), _CHUNK):
            bounds = other.document_indices[start : start + _CHUNK]
            self._append(np.empty(0, np.int32), first + bounds)
        with _storage_errors(self.prefix), open(bin_path(prefix), "rb") as source:
            shutil.copyfileobj(source, self._tokens, 1 << 24)
        self.num_tokens += other.num_tokens

    def _start_writing(self) -> None:
        """Let the disk begin with what is there, so that the fsync of `finalize` waits for little.

        Only a hint: Linux starts to write a range of a file that it is told not to keep, and
        keeps what is not written yet. An error of the disk still comes out of that fsync.
        """
        written = self.num_tokens * self.dtype.itemsize
        if written - self._started < _WRITE_BEHIND or not hasattr(os, "posix_fadvise"):
            return
        self._tokens.flush()
        with contextlib.suppress(OSError):
            count = written - self._started
            os.posix_fadvise(self._tokens.fileno(), self._started, count, os.POSIX_FADV_DONTNEED)
        self._started = written

    def _append(self, lengths: NDArray[np.int32], bounds: NDArray[np.int64]) -> None:
        """Spill sequence lengths and absolute document bounds."""
        with _storage_errors(self.prefix):
            self._lengths.write(np.ascontiguousarray(lengths).data)
            self._documents.write(np.ascontiguousarray(bounds).data)
        self.num_sequences += len(lengths)
        self.num_documents += len(bounds)

    def finalize(self) -> None:
        """Write the index, flush everything to the disk and give both files their names.

        Raises:
            StorageError: the disk is full; the temporary files are removed.
        """
        try:
            with _storage_errors(self.prefix):
                self._write_index()
                for file in (self._tokens, self._index):
                    file.flush()
                    os.fsync(file.fileno())
                # Without an .idx there is no dataset: an old one must not meet the new .bin.
                idx_path(self.prefix).unlink(missing_ok=True)
                os.replace(self._tokens.name, bin_path(self.prefix))
                os.replace(self._index.name, idx_path(self.prefix))
                sync_folder(bin_path(self.prefix).parent)
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove what is still temporary. Does nothing after `finalize()`."""
        for file in (self._tokens, self._lengths, self._documents, self._index):
            # Closing flushes, which fails again on a full disk; the file goes anyway.
            with contextlib.suppress(OSError):
                file.close()
            Path(file.name).unlink(missing_ok=True)

    def _write_index(self) -> None:
        header = _HEADER.pack(
            _MAGIC, _VERSION, self._code, self.num_sequences, self.num_documents + 1
        )
        self._index.write(header)
        for lengths in _chunks(self._lengths, np.dtype("<i4")):
            self._index.write(lengths.data)
        end = 0
        for lengths in _chunks(self._lengths, np.dtype("<i4")):
            size = lengths.astype(np.int64) * self.dtype.itemsize
            ends = end + np.cumsum(size)
            self._index.write((ends - size).data)
            end = int(ends[-1])
        self._index.write(struct.pack("<q", 0))
        for bounds in _chunks(self._documents, np.dtype("<i8")):
            self._index.write(bounds.data)


def _dtype_code(dtype: np.dtype[Any]) -> int:
    for code, known in _DTYPES.items():
        if np.dtype(known) == dtype and dtype.kind != "f":
            return code
    raise DataError(f"token ids cannot be stored as {dtype}: use uint16 or int32")


def _cast(values: ArrayLike, dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """A contiguous array of `dtype`; refuses a value that would wrap around."""
    array = np.asarray(values)
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    if array.size:
        limits = np.iinfo(dtype)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise DataError(
                f"{what} {low if low < limits.min else high} does not fit {dtype} "
                f"({limits.min} to {limits.max})"
            )
    return np.ascontiguousarray(array, dtype)


def _chunks(file: BinaryIO, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Read a spilled file from its start, `_CHUNK` elements at a time."""
    file.seek(0)
    while data := file.read(_CHUNK * dtype.itemsize):
        yield np.frombuffer(data, dtype)


@contextlib.contextmanager
def _storage_errors(prefix: str) -> Iterator[None]:
    """Turn an operating system error into one that names the dataset."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"dataset {prefix}: cannot write {error.filename or 'it'}: {error.strerror}"
            "; free space or choose another output folder"
        ) from error
