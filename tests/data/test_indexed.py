"""The indexed dataset: bytes of the format, damaged files, builder, real files."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.data import indexed
from megatron.data.indexed import IndexedDataset, IndexedDatasetBuilder, best_dtype, bin_path
from megatron.errors import DataError, StorageError

# Documents [[1, 2], [3, 4, 5]] and [[7]], as Megatron-LM writes them for a vocabulary of 50,257.
FIXTURE_IDX = bytes.fromhex(
    "4d4d49444944580000 0100000000000000 08 0300000000000000 0300000000000000"
    "02000000 03000000 01000000 0000000000000000 0400000000000000 0a00000000000000"
    "0000000000000000 0200000000000000 0300000000000000"
)
FIXTURE_BIN = bytes.fromhex("010002000300040005000700")
# Documents [[1, 2], [3, 4, 5]], [[7]] and [], as Megatron-LM 2.5 writes them with --dataset-impl
# cached (and lazy): header, dimension offsets, data offsets, sizes, documents.
CACHED_IDX = bytes.fromhex(
    "544e544944580000 0100000000000000 0400000000000000 0400000000000000 0300000000000000"
    "0300000000000000 0400000000000000"
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000"
    "0000000000000000 0200000000000000 0500000000000000 0600000000000000"
    "0200000000000000 0300000000000000 0100000000000000"
    "0000000000000000 0200000000000000 0300000000000000 0300000000000000"
)
CACHED_BIN = np.array([1, 2, 3, 4, 5, 7], "<i4").tobytes()


def write_cached(prefix: Path, idx: bytes = CACHED_IDX, tokens: bytes = CACHED_BIN) -> Path:
    indexed.idx_path(prefix).write_bytes(idx)
    indexed.bin_path(prefix).write_bytes(tokens)
    return prefix


def write_random(prefix: Path, *, sequences: int = 200, dtype: type = np.uint16) -> np.ndarray:
    """Write a dataset of one-sequence documents, some empty; return its tokens."""
    random = np.random.RandomState(0)
    lengths = random.randint(0, 20, sequences)
    tokens = random.randint(0, 50000, lengths.sum())
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        builder.add_documents(tokens, lengths, np.ones(sequences, int))
    return tokens


def read_all(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data.get(i).tolist() for i in range(len(data))]


def test_writes_the_fixture_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    prefix = folder / "fixture"
    with IndexedDatasetBuilder(prefix, best_dtype(50257)) as builder:
        builder.add_documents(np.array([1, 2, 3, 4, 5]), [2, 3], [2])
        builder.add_documents([7], [1], [1])
    assert indexed.idx_path(prefix).read_bytes() == FIXTURE_IDX
    assert indexed.bin_path(prefix).read_bytes() == FIXTURE_BIN
    assert sorted(path.name for path in folder.iterdir()) == ["fixture.bin", "fixture.idx"]
    with IndexedDatasetBuilder(folder / "other", np.uint16):
        pass


def test_reads_the_fixture_bytes(tmp_path: Path) -> None:
    prefix = tmp_path / "fixture"
    Path(f"{prefix}.idx").write_bytes(FIXTURE_IDX)
    Path(f"{prefix}.bin").write_bytes(FIXTURE_BIN)
    data = IndexedDataset(prefix)
    assert data.dtype == np.uint16
    assert len(data) == 3
    assert data.num_tokens == 6
    assert data.sequence_lengths.tolist() == [2, 3, 1]
    assert data.sequence_lengths.dtype == np.int32
    assert data.pointers.tolist() == [0, 4, 10]
    assert data.document_indices.tolist() == [0, 2, 3]
    assert data.document_indices.dtype == np.int64
    assert data.get(1).tolist() == [3, 4, 5]
    assert data.get(1, offset=1).tolist() == [4, 5]
    assert data.get(1, offset=1, length=1).tolist() == [4]
    with pytest.raises(IndexError):
        data.get(1, offset=1, length=3)


def test_reads_the_older_format(tmp_path: Path) -> None:
    data = IndexedDataset(write_cached(tmp_path / "old"))
    assert (data.dtype, len(data), data.num_tokens) == (np.int32, 3, 6)
    assert [data.get(i).tolist() for i in range(3)] == [[1, 2], [3, 4, 5], [7]]
    assert data.get(1, offset=1, length=2).tolist() == [4, 5]
    assert data.document_indices.tolist() == [0, 2, 3, 3]
    assert copy.copy(data).get(2).tolist() == [7]
    with IndexedDatasetBuilder(tmp_path / "new", np.int32) as builder:
        builder.add_index(tmp_path / "old")
    with IndexedDatasetBuilder(tmp_path / "direct", np.int32) as builder:
        builder.add_documents([1, 2, 3, 4, 5, 7], [2, 3, 1], [2, 1, 0])
    for path in (indexed.idx_path, bin_path):
        assert path(tmp_path / "new").read_bytes() == path(tmp_path / "direct").read_bytes()


@pytest.mark.parametrize(
    ("lengths", "bounds"),
    [([2, 0, 1, 3, 0], [0, 2, 5]), ([2, 0, 1, 3], [0, 2, 4]), ([], [0]), ([0], [0, 1])],
)
def test_documents_of_the_oldest_files_end_with_an_empty_sequence(
    tmp_path: Path, lengths: list[int], bounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "_CHUNK", 3)
    count, ends = len(lengths), [0, *np.cumsum(lengths)]
    numbers = np.array([1, 4, 4, count, count, *range(count + 1), *ends, *lengths], "<i8")
    prefix = write_cached(
        tmp_path / "old", b"TNTIDX\0\0" + numbers.tobytes(), bytes(4 * sum(lengths))
    )
    data = IndexedDataset(prefix)
    assert data.document_indices.tolist() == bounds
    assert [len(data.get(i)) for i in range(len(data))] == lengths


def test_an_older_file_may_hold_no_document_but_has_bounds(tmp_path: Path) -> None:
    numbers = np.array([1, 4, 4, 0, 0, 1, 0, 0, 0], "<i8")
    data = IndexedDataset(write_cached(tmp_path / "old", b"TNTIDX\0\0" + numbers.tobytes(), b""))
    assert (len(data), data.num_documents) == (0, 0)
    numbers = np.array([1, 4, 4, 0, 0, 0, 0, 0], "<i8")
    with pytest.raises(DataError, match="72 bytes, expected 72 for 0 sequences and 0 document bou"):
        IndexedDataset(write_cached(tmp_path / "old", b"TNTIDX\0\0" + numbers.tobytes(), b""))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (1, 2, "format version 2, expected 1"),
        (2, 7, "dtype code 7 is not an integer type"),
        (3, 2, "2 bytes per token, expected 4 for int32"),
        (4, 4, "3 dimensions for 4 sequences, expected one per sequence"),
        (6, 5, "176 bytes, expected 184 for 3 sequences and 5 document bounds"),
        (6, 0, "176 bytes, expected 144 for 3 sequences and 0 document bounds"),
        (7, 1, "dimension offset 0 is 1, expected 0"),
        (8, 2, "dimension offset 1 is 2, expected 1"),
        (12, 3, "offset of sequence 1 is 3, expected 2"),
        (14, 7, "offset of sequence 3 is 7, expected 6"),
        (15, 2**40, "length of sequence 0 is 1099511627776, expected 0 to 2147483647"),
        (15, -1, "length of sequence 0 is -1, expected 0 to 2147483647"),
        (19, 4, "document bound 2 is 3, expected at least the previous"),
        (21, 2, r"document bound 3 is 2, expected at least the previous"),
        (18, -1, "document bound 0 is -1, expected at least the previous"),
        (18, 1, r"the first and last document bounds are \[1, 3\], expected \[0, 3\]"),
    ],
)
def test_a_damaged_older_index_is_refused(
    tmp_path: Path, at: int, value: int, message: str
) -> None:
    numbers = np.frombuffer(CACHED_IDX, "<i8").copy()
    numbers[at] = value
    with pytest.raises(DataError, match=f"old.idx: {message}"):
        IndexedDataset(write_cached(tmp_path / "old", numbers.tobytes()))


def test_a_truncated_older_dataset_is_refused(tmp_path: Path) -> None:
    for size in range(8, len(CACHED_IDX)):
        with pytest.raises(DataError, match="truncated"):
            IndexedDataset(write_cached(tmp_path / "old", CACHED_IDX[:size]))
    for size, message in ((55, "55 bytes, shorter than the header"), (56, "56 bytes, expected")):
        with pytest.raises(DataError, match=f"old.idx: {message}"):
            IndexedDataset(write_cached(tmp_path / "old", CACHED_IDX[:size]))
    with pytest.raises(DataError, match="old.bin: 20 bytes, expected 24"):
        IndexedDataset(write_cached(tmp_path / "old", tokens=CACHED_BIN[:-4]))


def test_bulk_equals_one_by_one(tmp_path: Path) -> None:
    random = np.random.RandomState(1)
    documents = [random.randint(0, 9, n).tolist() for n in random.randint(0, 4, 50)]
    with IndexedDatasetBuilder(tmp_path / "single", np.int32) as builder:
        for lengths in documents:
            builder.add_documents(np.arange(sum(lengths)), lengths, [len(lengths)])
    with IndexedDatasetBuilder(tmp_path / "bulk", np.int32) as builder:
        flat = np.concatenate([np.arange(sum(lengths)) for lengths in documents])
        sizes = np.array([n for lengths in documents for n in lengths])
        builder.add_documents(flat, sizes, [len(lengths) for lengths in documents])
    for suffix in (".bin", ".idx"):
        single, bulk = (Path(f"{tmp_path / name}{suffix}") for name in ("single", "bulk"))
        assert single.read_bytes() == bulk.read_bytes()


def test_add_index_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_CHUNK", 7)  # many chunks even for a small file
    write_random(tmp_path / "a")
    write_random(tmp_path / "b", sequences=30)
    with IndexedDatasetBuilder(tmp_path / "joined", np.uint16) as builder:
        builder.add_index(tmp_path / "a")
        builder.add_documents([1, 2, 3], [1, 2], [2])
        builder.add_index(tmp_path / "b")
    assert read_all(tmp_path / "joined") == [
        *read_all(tmp_path / "a"),
        [1],
        [2, 3],
        *read_all(tmp_path / "b"),
    ]
    documents = IndexedDataset(tmp_path / "joined").document_indices
    assert documents.tolist() == [*range(201), *range(202, 233)]
    with (
        pytest.raises(DataError, match="token type uint16"),
        IndexedDatasetBuilder(tmp_path / "other", np.int32) as builder,
    ):
        builder.add_index(tmp_path / "a")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the hint is only given on Linux")
def test_hints_to_the_disk_cover_the_file_and_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = []

    def refuse(file: int, start: int, count: int, advice: int) -> None:
        assert os.fstat(file).st_size >= start + count, "only what is flushed can be written"
        ranges.append((start, start + count))
        raise OSError(errno.EINVAL, "no such hint here")

    monkeypatch.setattr(indexed, "_WRITE_BEHIND", 100)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    tokens = np.arange(1000, dtype=np.uint16)
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for start in range(0, 1000, 40):
            builder.add_documents(tokens[start : start + 40], [40], [1])
    assert ranges == [(start, start + 160) for start in range(0, 1920, 160)]
    assert bin_path(tmp_path / "x").read_bytes() == tokens.tobytes()


def test_documents_come_in_parts_of_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.RandomState(3)
    counts = random.randint(0, 4, 30)
    lengths = random.randint(0, 6, counts.sum())
    tokens = np.arange(lengths.sum())
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        builder.add_documents(tokens, lengths, counts)
    data, bounds = IndexedDataset(tmp_path / "x"), [0, *np.cumsum(counts)]
    ends = np.array([0, *np.cumsum(lengths)])
    assert data.num_documents == 30
    for chunk, most, first, end in (
        (9, 100, 0, 30),
        (1, 100, 3, 27),
        (1000, 4, 5, 29),
        (1000, 100, 29, 30),
        (12, 2, 1, 18),
        (9, 3, 7, 7),
    ):
        monkeypatch.setattr(indexed, "_CHUNK", chunk)
        monkeypatch.setattr(indexed, "_MAX_DOCUMENTS", most)
        parts = [*data.documents(first, end)]
        # Each part has as many documents as fit.
        expected, start = [], first
        while start < end:
            size = min(most, end - start)
            while size > 1 and ends[bounds[start + size]] - ends[bounds[start]] > chunk:
                size -= 1
            expected.append((start, start + size))
            start += size
        assert len(parts) == len(expected)
        for part, (low, high) in zip(parts, expected, strict=True):
            assert part.sequences_per_document.tolist() == counts[low:high].tolist()
            assert part.lengths.tolist() == lengths[bounds[low] : bounds[high]].tolist()
            assert part.tokens.tolist() == tokens[ends[bounds[low]] : ends[bounds[high]]].tolist()


def test_a_negative_token_is_named_by_document_or_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "_CHUNK", 5)
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        builder.add_documents([0, 1, 2, -3, 4, 5, 6, 0], [2, 0, 3, 3], [1, 1, 1, 1])
    data = IndexedDataset(tmp_path / "x")
    assert data.get(3).tolist() == [5, 6, 0]
    assert data.get(2, offset=1, length=0).tolist() == data.get(1).tolist() == []
    with pytest.raises(DataError, match=r"x.bin: negative token id -3 in sequence 2: this file"):
        data.get(2)
    parts = data.documents(0, 4)
    with pytest.raises(DataError, match="negative token id -3 in documents 0 to 2: this file"):
        next(parts)
    assert [part.tokens.tolist() for part in data.documents(3, 4)] == [[5, 6, 0]]
    assert [part.tokens.tolist() for part in data.documents(0, 2)] == [[0, 1]]
    with IndexedDatasetBuilder(tmp_path / "unsigned", np.uint16) as builder:
        builder.add_documents([65535], [1], [1])
    whole = IndexedDataset(tmp_path / "unsigned")
    assert whole.get(0).tolist() == [*whole.documents(0, 1)][0].tokens.tolist() == [65535]


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
            builder.add_documents([1], [1], [1])
            builder.add_index(tmp_path / "missing")

    with pytest.raises(DataError):
        write()
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/x"):
        IndexedDatasetBuilder(tmp_path / "file" / "x", np.uint16)


def test_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="70000 does not fit uint16"),
        IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder,
    ):
        builder.add_documents([1, 70000], [2], [1])


def test_best_dtype() -> None:
    assert best_dtype(65499) == np.uint16
    assert best_dtype(65500) == np.int32


def test_empty_dataset(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "empty", np.uint16):
        pass
    data = IndexedDataset(tmp_path / "empty")
    assert len(data) == data.num_tokens == data.size == data.num_documents == 0
    assert data.document_indices.tolist() == [0]


def test_reopens_in_another_process(tmp_path: Path) -> None:
    write_random(tmp_path / "x")
    data = IndexedDataset(tmp_path / "x")
    assert data.__getstate__() == {"prefix": str(tmp_path / "x")}  # not the data itself
    again = copy.copy(data)  # uses the same two methods as pickling
    assert all((again.get(i) == data.get(i)).all() for i in range(len(data)))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_idx_mutations_never_give_wrong_tokens(tmp_path: Path, dtype: type) -> None:
    """Set any byte of the index to any value, as in row 23 of docs/reliability.md."""
    write_random(tmp_path / "x", dtype=dtype)
    want = read_all(tmp_path / "x")
    path = indexed.idx_path(tmp_path / "x")
    good = path.read_bytes()
    random = np.random.RandomState(2)
    header = [(at, value) for at in range(34) for value in (0, 1, 3, 4, 5, 7, 8, 255)]
    anywhere = zip(random.randint(0, len(good), 300), random.randint(0, 256, 300), strict=True)
    refused = []
    for at, value in [*header, *anywhere]:
        path.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
        try:
            got = read_all(tmp_path / "x")
        except DataError as error:
            refused.append(str(error))
        else:
            assert got == want, f"byte {at} set to {value}: wrong tokens"
    assert len(refused) > 400  # the others wrote the same value, or moved a document bound
    assert all(str(tmp_path / "x") in message for message in refused)


def test_truncations_are_refused_at_open(tmp_path: Path) -> None:
    """Cut both files, as in row 22 of docs/reliability.md."""
    write_random(tmp_path / "x")
    for path in (indexed.bin_path(tmp_path / "x"), indexed.idx_path(tmp_path / "x")):
        good = path.read_bytes()
        for cut in np.linspace(0, len(good) - 1, 20).astype(int):
            path.write_bytes(good[:cut])
            with pytest.raises(DataError, match=str(path)):
                IndexedDataset(tmp_path / "x")
        path.write_bytes(good + b"\0\0")
        with pytest.raises(DataError, match=f"{len(good) + 2} bytes, expected {len(good)}"):
            IndexedDataset(tmp_path / "x")
        path.write_bytes(good)
    IndexedDataset(tmp_path / "x")


def test_a_multimodal_dataset_may_have_a_single_sequence(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_documents(np.array([1, 2]), np.array([2]), np.array([1]))
    with (tmp_path / "x.idx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match="1 bytes of modes follow the index: this is a multimodal"):
        IndexedDataset(tmp_path / "x")


def test_ids_at_the_ends_of_a_type_fit(tmp_path: Path) -> None:
    for kind, low, high in ((np.uint16, 0, 2**16 - 1), (np.int32, -(2**31), 2**31 - 1)):
        dtype = np.dtype(kind)
        assert indexed._cast([low, high], dtype, "token id").tolist() == [low, high]
        for value in (low - 1, high + 1):
            with pytest.raises(
                DataError, match=f"^token id {value} does not fit {dtype} .{low} to"
            ):
                indexed._cast([low, value, high], dtype, "token id")


def test_other_formats_are_named(tmp_path: Path) -> None:
    Path(tmp_path / "x.bin").write_bytes(FIXTURE_BIN)
    idx = tmp_path / "x.idx"
    for content, message in (
        (FIXTURE_IDX + b"\0\0\0", "multimodal"),
        (b"TNTIDX\0\0" + FIXTURE_IDX[8:], "x.idx: format version"),
        (FIXTURE_IDX[:17] + b"\x07" + FIXTURE_IDX[18:], "dtype code 7"),
        (b"PK" + FIXTURE_IDX, "not an index file"),
    ):
        idx.write_bytes(content)
        with pytest.raises(DataError, match=message):
            IndexedDataset(tmp_path / "x")


def test_the_longest_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_documents([1, 2, 3, 4], [1, 3], [2])
    monkeypatch.setattr(indexed, "_MAX_SEQUENCE_TOKENS", 3)
    assert read_all(tmp_path / "x") == [[1], [2, 3, 4]]
    monkeypatch.setattr(indexed, "_MAX_SEQUENCE_TOKENS", 2)
    with pytest.raises(DataError, match="length of sequence 1 is 3, expected 0 to 2: the file"):
        IndexedDataset(tmp_path / "x")


def test_a_missing_dataset_lists_at_most_five_others(tmp_path: Path) -> None:
    for name in ("a_document", "b", "c", "d", "e", "f", "corpus_text_document"):
        (tmp_path / f"{name}.idx").touch()

    def listed(name: str) -> list[str]:
        with pytest.raises(DataError, match=f"{name}.idx does not exist; datasets in that") as e:
            IndexedDataset(tmp_path / name)
        return [Path(path).name for path in str(e.value).partition("folder: ")[2].split(", ")]

    assert listed("xyz") == ["a_document", "b", "c", "corpus_text_document", "d"]
    # Only the names are compared, because all paths in a folder are similar.
    assert listed("corpus_txt_document") == ["corpus_text_document", "a_document"]


def test_a_missing_dataset_lists_similar_names(tmp_path: Path) -> None:
    write_random(tmp_path / "corpus_text_document")
    with pytest.raises(DataError, match="datasets in that folder: .*corpus_text_document"):
        IndexedDataset(tmp_path / "corpus_txt_document")
    with pytest.raises(DataError, match=r"without \.bin"):
        IndexedDataset(tmp_path / "corpus_text_document.bin")
    with pytest.raises(DataError, match="no dataset in"):
        IndexedDataset(tmp_path / "no" / "where")
    with pytest.raises(DataError, match="a.*: cannot be accessed .File name too long"):
        IndexedDataset("a" * 5000)  # such as another file's text under --data-args-path


def test_a_dataset_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random(tmp_path / "corpus")

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(
        DataError, match=r"corpus.idx: cannot be read \(Permission denied\): make it"
    ):
        IndexedDataset(tmp_path / "corpus")


@pytest.mark.parametrize(
    "name",
    [
        "data/binidx/meg-gpt2-openwebtext_text_document",
        "data/binidx/nvidia-train/test_text_document",
        "golden/data/gpt_text_document",
        "golden/data/bert_text_sentence",
    ],
)
def test_real_files_are_copied_to_the_byte(
    name: str, shared_data: Path, golden: Path, tmp_path: Path
) -> None:
    source = shared_data.parent / name
    data = IndexedDataset(source)
    with IndexedDatasetBuilder(tmp_path / "copy", data.dtype) as builder:
        builder.add_documents(
            np.concatenate([data.get(i) for i in range(len(data))]),
            data.sequence_lengths,
            np.diff(data.document_indices),
        )
    for suffix in (".bin", ".idx"):
        assert (
            Path(f"{tmp_path / 'copy'}{suffix}").read_bytes()
            == Path(f"{source}{suffix}").read_bytes()
        )


def test_links_under_temporary_names_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, suffixes = tmp_path / "victim", ("bin", "idx", "lengths", "documents")
    victim.write_text("precious")
    for suffix in suffixes:  # the former name of temporary files
        (tmp_path / f"out.{suffix}.tmp-{os.getpid()}").symlink_to(victim)
    tokens = write_random(tmp_path / "out")
    assert sum(read_all(tmp_path / "out"), []) == tokens.tolist()
    # A link is not followed even if an attacker has guessed the temporary name.
    monkeypatch.setattr(
        indexed, "unique_sibling", lambda path, kind: path.with_name(f"{path.name}.tmp")
    )
    for suffix in suffixes:
        (tmp_path / f"out.{suffix}.tmp").symlink_to(victim)
        with pytest.raises(StorageError, match=r"out\.\w+\.tmp: File exists"):
            write_random(tmp_path / "out")
        for left in tmp_path.glob("out.*.tmp"):
            left.unlink()
    assert victim.read_text() == "precious"
