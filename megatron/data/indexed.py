"""The memory-mapped indexed dataset: `<prefix>.bin` (token ids) and `<prefix>.idx` (positions).

A *sequence* consists of consecutive tokens (a sentence, or a whole document for GPT), and a
*document* of consecutive sequences. The format is Megatron-LM's MMIDIDX, little-endian:

    9s magic | u64 version | u8 dtype code | u64 N sequences | u64 D = documents + 1
    i32 [N] tokens of each sequence | i64 [N] byte offset of each in .bin | i64 [D] first sequence

An .idx file in the older TNTIDX format (`--dataset-impl lazy` and `cached`, 2019 to 2023) can also
be read in place, but is never written. Its .bin file is the same:

    8s magic | u64 version | u64 dtype code | u64 bytes of a token | u64 N | u64 S = N | u64 D
    i64 [N + 1] 0, 1, 2, ... | i64 [N + 1] first token of each in .bin | i64 [N] tokens of each
    i64 [D] first sequence

The oldest files of this format have no D and no first sequences: an empty sequence ends a document.

The formats have no checksum. Values that are stored redundantly (file sizes, and offsets versus
lengths) are compared when a dataset is opened, so a truncated file or a damaged header, length or
offset is rejected before training starts. All other values cannot be checked: a flipped bit in a
token id or a moved document boundary goes unnoticed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.durable import TEMPORARY, create, sync_folder, unique_sibling, writing_to
from megatron.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_CACHED_MAGIC = b"TNTIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_CACHED_HEADER = struct.Struct("<8sQQQQQ")  # as in the oldest files; later ones append D
_WRITE_BEHIND = 1 << 20  # bytes of .bin between two calls that start writing to the disk
_MAX_SEQUENCE_TOKENS = np.iinfo(np.int32).max  # the maximum number of tokens in a sequence
_MAX_DOCUMENTS = 1 << 16  # the maximum number of documents read at a time
_CHUNK = 1 << 22  # elements per step, so that memory stays flat for any number of sequences
_DTYPE_NAMES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}
_DTYPES = {code: np.dtype(name) for code, name in _DTYPE_NAMES.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the file that holds the token ids."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the file that holds the lengths, offsets and document bounds."""
    return Path(f"{os.fspath(prefix)}.idx")


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return Megatron's token type: uint16 below 65,500 vocabulary entries, otherwise int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class DocumentTokens(NamedTuple):
    """Documents in the format that `IndexedDatasetBuilder.add_documents` expects.

    Attributes:
        tokens: The concatenated ids of all documents, `[tokens]`.
        lengths: The number of tokens in each sequence, `[sequences]`.
        sequences_per_document: The number of sequences in each document, `[documents]`.
    """

    tokens: NDArray[Any]
    lengths: NDArray[Any]
    sequences_per_document: NDArray[np.int64]


class IndexedDataset:
    """A reader of one `.bin`/`.idx` pair.

    It is cheap to send to another process, because only the prefix is sent.

    Args:
        prefix: The path without `.bin` or `.idx`.

    Raises:
        DataError: A file is missing, in another format, truncated or inconsistent.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        """Open the files and compare the values that the format stores redundantly."""
        self._open(os.fspath(prefix))
        self._check()

    def _open(self, prefix: str) -> None:
        _require_files(prefix)
        self.prefix = prefix
        index = self._index = _read_index(idx_path(prefix))
        self.dtype, self.sequence_lengths, self.pointers, self.document_indices = index[:4]
        self._tokens = map_file(bin_path(prefix), self.dtype)

    def __getstate__(self) -> dict[str, str]:
        """Return the prefix, from which another process can open the dataset."""
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict[str, str]) -> None:
        """Open the files again, without checking again that they are consistent."""
        self._open(state["prefix"])

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the .bin file."""
        return len(self._tokens)

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.num_tokens

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.document_indices) - 1

    def documents(self, first: int, end: int) -> Iterator[DocumentTokens]:
        """Yield a range of documents, at most 4 million tokens or one longer document at a time.

        Args:
            first: The index of the first document.
            end: The index of the document after the last one.

        Raises:
            DataError: A token id is negative.
        """
        sequence = int(self.document_indices[first])
        start = int(self.sequence_lengths[:sequence].sum(dtype=np.int64))
        while first < end:
            bounds = self.document_indices[first : min(end, first + _MAX_DOCUMENTS) + 1]
            lengths = self.sequence_lengths[bounds[0] : bounds[-1]]
            ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[bounds - bounds[0]]
            count = max(1, int(np.searchsorted(ends, _CHUNK, side="right")) - 1)
            tokens = self._tokens[start : start + int(ends[count])]
            if self.dtype.kind == "i" and len(tokens) and int(tokens.min()) < 0:
                raise self._negative(tokens, f"documents {first} to {first + count - 1}")
            counts = np.diff(bounds[: count + 1])
            yield DocumentTokens(tokens, lengths[: int(counts.sum())], counts)
            first, start = first + count, start + len(tokens)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return tokens of a sequence, `[length]`.

        Args:
            i: The index of the sequence.
            offset: The index of the first token in the sequence.
            length: The number of tokens. By default, all from `offset` to the end are returned.

        Raises:
            DataError: A token id is negative, so the file is damaged or has a different dtype.
            IndexError: The range extends beyond the sequence.
        """
        size = int(self.sequence_lengths[i])
        length = size - offset if length is None else length
        if not 0 <= offset <= offset + length <= size:
            raise IndexError(
                f"{self.prefix}: sequence {i} has {size} tokens, too few for {length} from {offset}"
            )
        start = int(self.pointers[i]) // self._index.unit + offset
        tokens = self._tokens[start : start + length]
        if self.dtype.kind == "i" and length and int(tokens.min()) < 0:
            raise self._negative(tokens, f"sequence {i}")
        return tokens

    def _negative(self, tokens: NDArray[Any], where: str) -> DataError:
        return DataError(
            f"{bin_path(self.prefix)}: negative token id {tokens.min()} in {where}: this file, or "
            "the dtype in its .idx file, is damaged: copy both again or preprocess the text again"
        )

    def _check(self) -> None:
        """Compare all values that the format stores redundantly.

        Raises:
            DataError: Two values differ. The message gives the file, the position, and the expected
                and actual values of the first difference.
        """
        path, itemsize = idx_path(self.prefix), self.dtype.itemsize
        total, unit = 0, self._index.unit
        for start in range(0, len(self), _CHUNK):
            lengths = self.sequence_lengths[start : start + _CHUNK].astype(np.int64)
            # Larger values could overflow the sum.
            invalid = (lengths < 0) | (lengths > _MAX_SEQUENCE_TOKENS)
            _refuse_first(
                f"{path}: length of sequence",
                start,
                lengths,
                invalid,
                f"0 to {_MAX_SEQUENCE_TOKENS}",
            )
            ends = total + np.cumsum(lengths * unit)
            stored, expected = self.pointers[start : start + len(ends)], ends - lengths * unit
            _refuse_first(
                f"{path}: offset of sequence", start, stored, stored != expected, expected
            )
            total = int(ends[-1])
        stored = self.pointers[len(self) :]
        _refuse_first(f"{path}: offset of sequence", len(self), stored, stored != total, f"{total}")
        for start in range(0, len(self._index.dimensions), _CHUNK):
            stored = self._index.dimensions[start : start + _CHUNK]
            expected = np.arange(start, start + len(stored))
            _refuse_first(f"{path}: dimension offset", start, stored, stored != expected, expected)
        total *= itemsize // unit
        actual = bin_path(self.prefix).stat().st_size
        if actual != total:
            raise DataError(
                f"{bin_path(self.prefix)}: {actual} bytes, expected {total} ({total // itemsize} "
                f"tokens of {self.dtype}) according to {path}: one of the two files is truncated, "
                "damaged or from another dataset; copy both again or preprocess the text again"
            )
        previous = 0
        for start in range(0, len(self.document_indices), _CHUNK):
            bounds = self.document_indices[start : start + _CHUNK]
            decreases = bounds < np.concatenate([[previous], bounds[:-1]])
            _refuse_first(
                f"{path}: document bound", start, bounds, decreases, "at least the previous"
            )
            previous = int(bounds[-1])
        stored, outer = self.document_indices[[0, -1]].tolist(), [0, len(self)]
        if stored != outer:
            raise DataError(
                f"{path}: the first and last document bounds are {stored}, expected {outer}: the "
                "file is damaged; copy it again or preprocess the text again"
            )


def _require_files(prefix: str) -> None:
    try:
        missing = [path for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    except OSError as error:  # the name is too long, or a folder cannot be searched
        raise DataError(
            f"dataset {prefix}: cannot be accessed ({error.strerror}): fix the path"
        ) from None
    if not missing:
        return
    if prefix.endswith((".bin", ".idx")):
        raise DataError(f"dataset {prefix}: give the path without {prefix[-4:]}")
    import difflib  # imported here because only an error needs it

    folder, name = Path(prefix).parent, Path(prefix).name
    existing = sorted(path.stem for path in folder.glob("*.idx")) if folder.is_dir() else []
    similar = difflib.get_close_matches(name, existing, n=5, cutoff=0.4) or existing[:5]
    suggestions = [str(folder / one) for one in similar]
    hint = (
        f"datasets in that folder: {', '.join(suggestions)}"
        if suggestions
        else f"no dataset in {folder}"
    )
    raise DataError(f"dataset {prefix}: {missing[0]} does not exist; {hint}")


def map_file(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Memory-map a whole file as a read-only array, `[items]`.

    Args:
        path: The file.
        dtype: The type of the items.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        count = path.stat().st_size // dtype.itemsize
        if not count:  # mmap rejects an empty file, which is valid for a corpus without tokens
            return np.empty(0, dtype)
        mapped = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}): make it readable, or copy it"
        ) from error
    # A plain array over the same mapping, because slicing an np.memmap takes ten times as long.
    return mapped.view(np.ndarray)


class _Index(NamedTuple):
    """The content of an .idx file, as views of the memory-mapped file.

    Attributes:
        dtype: The type of a token.
        lengths: The number of tokens in each sequence, `[N]` int32, or int64 in TNTIDX.
        pointers: The offset of each sequence in the .bin file, `[N]`, in bytes, or in tokens in
            TNTIDX. In TNTIDX, the end of the last sequence follows.
        bounds: The first sequence of each document, and the end of the last document, `[D]`.
        unit: The amount that one token adds to a pointer: its size in bytes, or 1 in TNTIDX.
        dimensions: In TNTIDX, the number of dimensions before each sequence, `[N + 1]`, which must
            be 0, 1, 2, ...; otherwise empty.
    """

    dtype: np.dtype[Any]
    lengths: NDArray[Any]
    pointers: NDArray[np.int64]
    bounds: NDArray[np.int64]
    unit: int
    dimensions: NDArray[np.int64]


def _read_index(path: Path) -> _Index:
    """Return the content of an .idx file of either format.

    Raises:
        DataError: The file is neither MMIDIDX nor TNTIDX of version 1 with token ids, or its size
            does not match its header.
    """
    raw = map_file(path, np.dtype(np.uint8))
    header = bytes(raw[: _HEADER.size])
    if header.startswith(_CACHED_MAGIC):
        return _read_cached_index(path, raw)
    if not header.startswith(_MAGIC):
        raise DataError(
            f"{path}: not an index file: it starts with {header[:9]!r}, not {_MAGIC!r}; give the "
            "prefix of a dataset that tools/preprocess_data.py wrote"
        )
    if len(header) < _HEADER.size:
        raise DataError(
            f"{path}: {len(raw)} bytes, shorter than the header ({_HEADER.size} bytes): the file "
            "is truncated; copy it again or preprocess the text again"
        )
    _, version, code, sequences, documents = _HEADER.unpack(header)
    dtype = _token_type(path, version, code)
    actual, expected = len(raw), _HEADER.size + 12 * sequences + 8 * documents
    if actual == expected + sequences and sequences > 0:
        raise DataError(
            f"{path}: {sequences} bytes of modes follow the index: this is a multimodal dataset, "
            "which is not supported; use a text dataset"
        )
    if actual != expected or documents == 0:
        raise _wrong_size(path, actual, expected, sequences, documents)
    lengths, offsets, bounds = np.split(raw[_HEADER.size :], np.cumsum([4, 8]) * sequences)
    pointers = offsets.view("<i8")
    no_dimensions = pointers[:0]
    return _Index(
        dtype, lengths.view("<i4"), pointers, bounds.view("<i8"), dtype.itemsize, no_dimensions
    )


def _read_cached_index(path: Path, raw: NDArray[np.uint8]) -> _Index:
    """Return the content of an .idx file in the TNTIDX format.

    Raises:
        DataError: The file is damaged, or has sequences of several dimensions.
    """
    first = _CACHED_HEADER.size
    if len(raw) < first + 8:
        raise DataError(
            f"{path}: {len(raw)} bytes, shorter than the header ({first + 8} bytes): the file is "
            "truncated; copy it again or preprocess the text again"
        )
    _, version, code, itemsize, sequences, sizes = _CACHED_HEADER.unpack(bytes(raw[:first]))
    dtype = _token_type(path, version, code)
    if itemsize != dtype.itemsize:
        raise DataError(
            f"{path}: {itemsize} bytes per token, expected {dtype.itemsize} for {dtype}: the file "
            "is damaged; copy it again or preprocess the text again"
        )
    if sizes != sequences:
        raise DataError(
            f"{path}: {sizes} dimensions for {sequences} sequences, expected one per sequence: "
            "this is not a text dataset, or it is damaged; preprocess the text again"
        )
    # In a file without D, the next number is the first of the dimensions, which is 0.
    expected = first + 8 * (3 * sequences + 2)
    has_bounds, documents = len(raw) != expected, 0
    if has_bounds:
        documents = int.from_bytes(bytes(raw[first : first + 8]), "little")
        first, expected = first + 8, expected + 8 + 8 * documents
    if len(raw) != expected or (has_bounds and documents == 0):
        raise _wrong_size(path, len(raw), expected, sequences, documents)
    values = raw[first:].view("<i8")
    dimensions, pointers, lengths, bounds = np.split(
        values, np.cumsum([sequences + 1, sequences + 1, sequences])
    )
    if not has_bounds:
        bounds = _bounds_by_empty_sequences(lengths)
    return _Index(dtype, lengths, pointers, bounds, 1, dimensions)


def _bounds_by_empty_sequences(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the document bounds of a file in which an empty sequence ends each document."""
    empty = [
        start + 1 + np.flatnonzero(lengths[start : start + _CHUNK] == 0)
        for start in range(0, len(lengths), _CHUNK)
    ]
    # Sequences after the last empty one also form a document.
    end = [len(lengths)] if len(lengths) and lengths[-1] else []
    return np.concatenate([[0], *empty, end]).astype(np.int64)


def _token_type(path: Path, version: int, code: int) -> np.dtype[Any]:
    if version != _VERSION:
        raise DataError(
            f"{path}: format version {version}, expected {_VERSION}: the file is damaged, or was "
            "not written by Megatron; copy it again or preprocess the text again"
        )
    if code not in _DTYPES:
        raise DataError(
            f"{path}: dtype code {code} is not an integer type "
            "(1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16): this dataset does not hold "
            "token ids, or it is damaged; copy it again or preprocess the text again"
        )
    return _DTYPES[code]


def _wrong_size(
    path: Path, actual: int, expected: int, sequences: int, documents: int
) -> DataError:
    return DataError(
        f"{path}: {actual} bytes, expected {expected} for {sequences} sequences and "
        f"{documents} document bounds: the file is truncated or damaged; copy it again or "
        "preprocess the text again"
    )


def _refuse_first(
    where: str, start: int, values: NDArray[Any], invalid: NDArray[np.bool_], expected: Any
) -> None:
    """Raise an error for the first wrong value in a chunk that begins at position `start`."""
    if invalid.any():
        i = int(invalid.argmax())
        expected_value = expected if isinstance(expected, str) else int(expected[i])
        raise DataError(
            f"{where} {start + i} is {int(values[i])}, expected {expected_value}: the file is "
            "damaged; copy it again or preprocess the text again"
        )


class IndexedDatasetBuilder:
    """A context manager that writes a `.bin`/`.idx` pair.

    Both files get their final names when the context exits, or are removed after an exception.
    Memory use stays flat, because lengths and document bounds are written to temporary files in the
    same folder.

    Args:
        prefix: The path without `.bin` or `.idx`. Its folder is created if necessary.
        dtype: The type of the stored token ids, as returned by `best_dtype`.

    Raises:
        DataError: Token ids cannot be stored as `dtype`.
        StorageError: The folder cannot be written to, or the disk is full.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype[Any] | type[Any]) -> None:
        """Create the temporary files."""
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in _CODES:
            raise DataError(f"token ids cannot be stored as {dtype}: use uint16 or int32")
        self.num_sequences = self.num_documents = self.num_tokens = 0
        self._started = 0  # bytes of .bin for which writing to the disk has started
        with writing_to("dataset", self.prefix):
            bin_path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            self._tokens, self._lengths, self._documents, self._index = map(
                self._create, ("bin", "lengths", "documents", "idx")
            )

    def _create(self, suffix: str) -> BinaryIO:
        # The file is in the same folder, so that the last step is a rename.
        return create(unique_sibling(Path(f"{self.prefix}.{suffix}"), TEMPORARY), buffering=1 << 20)

    def __enter__(self) -> IndexedDatasetBuilder:
        """Return the builder."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Write the index and move both files into place, or remove them after an exception.

        Raises:
            StorageError: The disk is full; the temporary files are removed.
        """
        try:
            if kind is None:
                with writing_to("dataset", self.prefix):
                    self._publish()
        finally:
            for file in (self._tokens, self._lengths, self._documents, self._index):
                # Closing flushes, which fails again on a full disk. The file is removed anyway.
                with contextlib.suppress(OSError):
                    file.close()
                Path(file.name).unlink(missing_ok=True)

    def add_documents(
        self, tokens: ArrayLike, lengths: ArrayLike, sequences_per_document: ArrayLike
    ) -> None:
        """Append many documents at once.

        Args:
            tokens: The concatenated ids of all documents, `[sum(lengths)]`.
            lengths: The number of tokens in each sequence, `[sum(sequences_per_document)]`.
            sequences_per_document: The number of sequences in each document, which may be zero,
                `[documents]`.

        Raises:
            DataError: An id does not fit the dataset's dtype, or a sequence is too long.
            StorageError: The disk is full.
        """
        ids = _cast(tokens, self.dtype, f"{self.prefix}: token id")
        sizes = _cast(lengths, np.dtype(np.int32), f"{self.prefix}: sequence length")
        counts = np.asarray(sequences_per_document, np.int64)
        assert int(sizes.sum(dtype=np.int64)) == len(ids), "lengths do not add up to the tokens"
        assert int(counts.sum()) == len(sizes), "documents do not add up to the sequences"
        self._append(sizes, self.num_sequences + np.cumsum(counts))
        with writing_to("dataset", self.prefix):
            self._tokens.write(ids.data)
        self.num_tokens += len(ids)
        self._start_writing()

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Append the whole content of the dataset at `prefix`.

        Raises:
            DataError: The other dataset is missing, damaged or has a different dtype.
            StorageError: The disk is full.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{other.prefix}: token type {other.dtype}, but {self.prefix} is written as "
                f"{self.dtype}: only datasets made with the same tokenizer can be joined"
            )
        first, bounds = self.num_sequences, other.document_indices[1:]
        for start in range(0, len(other), _CHUNK):
            lengths = other.sequence_lengths[start : start + _CHUNK]
            self._append(lengths.astype(np.int32), bounds[:0])
        for start in range(0, len(bounds), _CHUNK):
            self._append(np.empty(0, np.int32), first + bounds[start : start + _CHUNK])
        with writing_to("dataset", self.prefix), open(bin_path(prefix), "rb") as source:
            shutil.copyfileobj(source, self._tokens, 1 << 24)
        self.num_tokens += other.num_tokens

    def _start_writing(self) -> None:
        """Start writing to the disk, so that the fsync at the end takes little time.

        This is only a hint. When Linux is asked not to cache a range of a file, it starts to write
        that range and keeps the pages that are not written yet. The fsync still reports disk
        errors.
        """
        count = self.num_tokens * self.dtype.itemsize - self._started
        if count < _WRITE_BEHIND or not hasattr(os, "posix_fadvise"):
            return
        with writing_to("dataset", self.prefix):
            self._tokens.flush()
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._tokens.fileno(), self._started, count, os.POSIX_FADV_DONTNEED)
        self._started += count

    def _append(self, lengths: NDArray[np.int32], bounds: NDArray[np.int64]) -> None:
        """Append sequence lengths and absolute document bounds to their temporary files."""
        with writing_to("dataset", self.prefix):
            self._lengths.write(np.ascontiguousarray(lengths).data)
            self._documents.write(np.ascontiguousarray(bounds).data)
        self.num_sequences += len(lengths)
        self.num_documents += len(bounds)

    def _publish(self) -> None:
        counts = (self.num_sequences, self.num_documents + 1)
        self._index.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[self.dtype], *counts))
        for lengths in _chunks(self._lengths, np.dtype("<i4")):
            self._index.write(lengths.data)
        end = 0
        for lengths in _chunks(self._lengths, np.dtype("<i4")):
            size = lengths.astype(np.int64) * self.dtype.itemsize
            ends = end + np.cumsum(size)
            self._index.write((ends - size).data)
            end = int(ends[-1])
        self._index.write(bytes(8))  # the first document begins at sequence 0
        for bounds in _chunks(self._documents, np.dtype("<i8")):
            self._index.write(bounds.data)
        for file in (self._tokens, self._index):
            file.flush()
            os.fsync(file.fileno())
        # Remove an old .idx first, because it must never describe the new .bin.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._tokens.name, bin_path(self.prefix))
        os.replace(self._index.name, idx_path(self.prefix))
        sync_folder(bin_path(self.prefix).parent)


def _cast(values: ArrayLike, dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """Convert to a contiguous array of `dtype`, and reject a value that would wrap around."""
    array = np.asarray(values)
    if array.dtype != dtype and array.size:
        limits, low, high = np.iinfo(dtype), int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise DataError(
                f"{what} {low if low < limits.min else high} does not fit {dtype} "
                f"({limits.min} to {limits.max})"
            )
    return np.ascontiguousarray(array, dtype)


def _chunks(file: BinaryIO, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Yield the content of a temporary file, `_CHUNK` elements at a time."""
    file.seek(0)
    while data := file.read(_CHUNK * dtype.itemsize):
        yield np.frombuffer(data, dtype)
