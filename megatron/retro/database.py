"""The chunk database: every document of the corpus, divided into chunks of equal length.

    db/individual/NAME/A-B.hdf5         the chunks of documents A to B - 1 of a dataset:
        chunks_valid, chunks_invalid    document, first token, end, number of BERT tokens
        doc_offsets                     document, number of valid chunks up to its end
    db/merged/{train,valid,sampled}.hdf5    the rows of all datasets, with the dataset's index first
    db/indexed_dataset_infos.json       the datasets, with their numbers of documents and chunks

A document's end-of-document token belongs to no chunk. The last chunk of a document may be short.
Chunks without any BERT tokens are invalid. The table `train` contains the valid chunks of training
documents. Only these chunks can be retrieved, and a chunk's id is its row in this table. The table
`sampled` contains the chunks from which those that train the index are taken.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.fields import text_to
from megatron.config.retro_preprocessing import RetroPreprocessing
from megatron.data.datasets import parse_weighted_paths, split_bounds
from megatron.data.indexed import IndexedDataset, bin_path, idx_path
from megatron.data.sample import outside_vocabulary
from megatron.durable import replace_file, writing_to
from megatron.errors import ConfigError, DataError
from megatron.parallel.layout import Axis
from megatron.retro.blocks import (
    REBUILD_HINT,
    Arrays,
    DataSet,
    TableBlock,
    blocks_to_do,
    evenly_spaced,
    new_hdf5,
    on_first,
    open_hdf5,
    plan_blocks,
    read_block,
    write_block,
)
from megatron.tokenizer.base import Tokenizer

_TEXTS = 4096  # the number of chunks to decode to text at a time
_LENGTHS = 1 << 22  # the number of document lengths to read at a time
_MAX_JSON = 16 << 20  # bytes
_CHECKED = 1 << 27  # the number of table rows to check before training
_TOKENS_CHECKED = 256  # the number of chunks to compare with the vocabulary before training
_DATA_PATH = "--retro-gpt-data-path"


class CorpusChunks(NamedTuple):
    """A dataset in the database, as described in `indexed_dataset_infos.json`.

    Attributes:
        ratio: The weight of the dataset in the blend.
        prefix: The path of the dataset's files without `.bin` or `.idx`.
        path: The path of the `.bin` file.
        name: The name of the dataset's folder.
        db_dir: The folder of block files.
        n_docs: The number of documents.
        n_docs_train: The number of training documents, which come first.
        n_chunks: The number of valid chunks.
        n_chunks_train: The number of valid chunks in training documents.
        n_chunks_invalid: The number of chunks without any BERT tokens.
        n_chunks_sampled: The number of chunks in the table `sampled`.
    """

    ratio: float
    prefix: str
    path: str
    name: str
    db_dir: str
    n_docs: int
    n_docs_train: int
    n_chunks: int = 0
    n_chunks_train: int = 0
    n_chunks_invalid: int = 0
    n_chunks_sampled: int = 0


def corpora_file(workdir: Path) -> Path:
    """Return the path of the list of datasets."""
    return workdir / "db" / "indexed_dataset_infos.json"


def merged_file(workdir: Path, name: str) -> Path:
    """Return the path of a merged table: "train", "valid" or "sampled"."""
    return workdir / "db" / "merged" / f"{name}.hdf5"


def plan_corpora(
    options: RetroPreprocessing, split: str
) -> list[tuple[CorpusChunks, IndexedDataset]]:
    """Open the datasets of --retro-gpt-data-path, and count their documents.

    Args:
        options: The preprocessing options.
        split: The proportions of training, validation and test documents, such as "98,2,0". With
            --retro-compatible, the first is a percentage, and the number of training documents is
            rounded down.

    Raises:
        ConfigError: The flags cannot be parsed, or two datasets have the same name with
            --retro-compatible.
        DataError: A dataset is missing, damaged or divided into sentences.
    """
    compatible = options.stages.retro_compatible
    weighted_paths = options.gpt.retro_gpt_data_path or ()
    pairs = parse_weighted_paths(weighted_paths, _DATA_PATH)
    names = _folder_names([prefix for _, prefix in pairs], compatible=compatible)
    corpora = []
    for (weight, prefix), name in zip(pairs, names, strict=True):
        data = IndexedDataset(prefix)
        if data.num_documents != len(data):
            raise DataError(
                f"{idx_path(prefix)}: {len(data)} sequences in {data.num_documents} documents, but "
                "Retro needs one sequence per document: preprocess the text without "
                "--split-sentences"
            )
        ratio = weight if weight is not None else 1.0 if len(pairs) == 1 else data.num_tokens
        train = _training_documents(split, len(data), compatible=compatible)
        folder = os.path.join(str(options.stages.retro_workdir), "db", "individual", name)
        corpus = CorpusChunks(float(ratio), prefix, f"{prefix}.bin", name, folder, len(data), train)
        corpora.append((corpus, data))
    return corpora


def _folder_names(prefixes: Sequence[str], *, compatible: bool) -> list[str]:
    """Return the folder name of each dataset: the last component of its prefix.

    If several datasets have the same last component, a number is appended to tell them apart.
    Megatron-LM would mix their chunks.

    Raises:
        ConfigError: `compatible` is true, and several datasets have the same last component.
    """
    names: list[str] = []
    for prefix in prefixes:
        name = os.path.basename(prefix)
        if name in names:
            if compatible:
                raise ConfigError(
                    f"{_DATA_PATH} {prefix}: two datasets are named {name}, and with "
                    "--retro-compatible they would share a folder, as in Megatron-LM: rename one, "
                    "or drop the flag"
                )
            name = next(f"{name}-{i}" for i in itertools.count(2) if f"{name}-{i}" not in names)
        names.append(name)
    return names


def _training_documents(split: str, documents: int, *, compatible: bool) -> int:
    if not compatible:
        return split_bounds(split, documents)[1]
    try:
        fraction = text_to(float, split.split(",", maxsplit=1)[0]) / 100
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise ConfigError(
            f"--split {split}: with --retro-compatible, the first number must be the percentage of "
            "training documents, as in Megatron-LM: give 98,2,0, for example, or drop the flag"
        )
    return int(fraction * documents)


def max_chunks(data: IndexedDataset, chunk_length: int) -> int:
    """Return a tight upper bound on the number of chunks in a dataset."""
    return sum(
        int((-(-data.sequence_lengths[i : i + _LENGTHS] // chunk_length)).sum(dtype=np.int64))
        for i in range(0, len(data), _LENGTHS)
    )


class ChunkCutter(NamedTuple):
    """Divides documents into chunks.

    Attributes:
        length: The number of tokens in a chunk.
        gpt: The tokenizer of the datasets.
        bert: The tokenizer of the network that embeds chunks.
    """

    length: int
    gpt: Tokenizer
    bert: Tokenizer

    def spans(self, data: IndexedDataset, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the document, start and end of every chunk in documents `first` to `stop - 1`."""
        eod = self.gpt.eod
        for document in range(first, stop):
            size = int(data.sequence_lengths[document])
            if size and int(data.get(document, size - 1, 1)[0]) == eod:
                size -= 1
            for start in range(0, size, self.length):
                yield document, start, min(size, start + self.length)

    def count_bert_tokens(
        self, data: IndexedDataset, spans: Sequence[tuple[int, int, int]]
    ) -> list[int]:
        """Return the number of BERT tokens in each chunk.

        Args:
            data: The dataset.
            spans: The document, start and end of each chunk. Their texts must fit into memory.
        """
        texts = [
            self.gpt.detokenize(data.get(document, start, end - start).tolist())
            for document, start, end in spans
        ]
        return [len(ids) for ids in self.bert.tokenize_batch(texts)]

    def cut(self, data: IndexedDataset, first: int, stop: int) -> NDArray[np.uint32]:
        """Divide documents `first` to `stop - 1` into chunks.

        Returns:
            The document, first token, end, and number of BERT tokens of each chunk, `[n, 4]`.
        """
        spans = self.spans(data, first, stop)
        parts = [np.zeros((0, 4), np.uint32)]
        while batch := list(itertools.islice(spans, _TEXTS)):
            sizes = self.count_bert_tokens(data, batch)
            parts.append(np.column_stack([np.array(batch), sizes]).astype(np.uint32))
        return np.concatenate(parts)


def block_contents(block: TableBlock) -> Mapping[str, DataSet]:
    """Return the expected data sets of a block of documents."""
    return {
        "chunks_valid": DataSet("u4", (None, 4), may_be_flat=True),
        "chunks_invalid": DataSet("u4", (None, 4), may_be_flat=True),
        "doc_offsets": DataSet("u8", (block.rows, 2)),
    }


def make_block(block: TableBlock, data: IndexedDataset, cutter: ChunkCutter) -> Arrays:
    """Divide the documents of a block into chunks, and return the block's data sets by name."""
    chunks = cutter.cut(data, block.start, block.stop)
    is_valid = chunks[:, 3] > 0
    valid, invalid = chunks[is_valid], chunks[~is_valid]
    documents = np.arange(block.start, block.stop, dtype=np.uint64)
    ends = np.searchsorted(valid[:, 0], documents, side="right").astype(np.uint64)
    return {
        # Megatron-LM writes an empty table without columns.
        "chunks_valid": valid if len(valid) else np.zeros(0, np.uint32),
        "chunks_invalid": invalid if len(invalid) else np.zeros(0, np.uint32),
        "doc_offsets": np.column_stack([documents, ends]),
    }


def read_chunks(block: TableBlock, data: IndexedDataset, chunk_length: int) -> Arrays:
    """Read the data sets of a block, and check them against the dataset.

    Args:
        block: The block of documents.
        data: The dataset that was divided into chunks.
        chunk_length: The number of tokens in a chunk.

    Raises:
        DataError: The file is missing or damaged, or was made from different data.
    """
    arrays = read_block(block, block_contents)
    valid = arrays["chunks_valid"] = arrays["chunks_valid"].reshape(-1, 4)
    arrays["chunks_invalid"] = arrays["chunks_invalid"].reshape(-1, 4)
    documents, starts, ends, sizes = valid.astype(np.int64).T
    lengths = data.sequence_lengths[block.start : block.stop]
    offsets = arrays["doc_offsets"].astype(np.int64)
    fits = (
        bool(((block.start <= documents) & (documents < block.stop) & (sizes > 0)).all())
        and bool((np.diff(documents) >= 0).all())
        and bool(((starts < ends) & (ends - starts <= chunk_length)).all())
        and bool((ends <= lengths[documents - block.start]).all())
        and np.array_equal(offsets[:, 0], np.arange(block.start, block.stop))
        and np.array_equal(offsets[:, 1], np.searchsorted(documents, offsets[:, 0], side="right"))
    )
    if not fits:
        raise DataError(
            f"{block.path} does not match {data.prefix}: it is damaged or made from other data; "
            "delete it and run db-build again"
        )
    return arrays


def build_database(
    options: RetroPreprocessing,
    corpora: Sequence[tuple[CorpusChunks, IndexedDataset]],
    cutter: ChunkCutter,
    world: Axis,
) -> list[CorpusChunks]:
    """Write all missing files in `db/`. Collective.

    Args:
        options: The preprocessing options.
        corpora: The datasets, from `plan_corpora`.
        cutter: The object that divides documents into chunks.
        world: The processes that share the working folder.

    Returns:
        The datasets with their numbers of chunks.

    Raises:
        ConfigError: A dataset's share of --retro-index-ntrain exceeds its training chunks.
        DataError: A dataset or a file of the folder is damaged.
        StorageError: The folder cannot be written to.
    """
    size = options.stages.retro_doc_block_size
    blocks = [plan_blocks(Path(corpus.db_dir), corpus.n_docs, size) for corpus, _ in corpora]
    for (corpus, data), corpus_blocks in zip(corpora, blocks, strict=True):
        for block in blocks_to_do(corpus_blocks, block_contents, world, f"chunks of {corpus.name}"):
            write_block(block, make_block(block, data, cutter))
    merger = _Merger(options, [data for _, data in corpora], blocks)
    on_first(lambda: merger.write([corpus for corpus, _ in corpora]), world)
    return read_corpora(Path(str(options.stages.retro_workdir)))


class _Merger:
    """Writes the merged tables from the block files, with one block in memory at a time."""

    def __init__(
        self,
        options: RetroPreprocessing,
        datasets: Sequence[IndexedDataset],
        blocks: Sequence[Sequence[TableBlock]],
    ) -> None:
        self._workdir = Path(str(options.stages.retro_workdir))
        self._compatible = options.stages.retro_compatible
        self._length = options.gpt.retro_gpt_chunk_length
        self._ntrain = options.index.retro_index_ntrain or 0
        self._datasets, self._blocks = datasets, blocks

    def write(self, corpora: Sequence[CorpusChunks]) -> None:
        """Count the chunks, and write missing tables and the list of datasets."""
        counted = [self._count(i, corpus) for i, corpus in enumerate(corpora)]
        total = sum(corpus.ratio for corpus in counted)
        infos = [
            corpus._replace(n_chunks_sampled=int(self._ntrain * corpus.ratio / total))
            for corpus in counted
        ]
        for corpus in infos:
            if corpus.n_chunks_sampled > corpus.n_chunks_train:
                raise ConfigError(
                    f"--retro-index-ntrain {self._ntrain}: the share of {corpus.prefix} is "
                    f"{corpus.n_chunks_sampled} chunks, but its training documents have "
                    f"{corpus.n_chunks_train}: lower it, or give the dataset a lower weight"
                )
        for name, size in _table_sizes(infos).items():
            if not self._is_complete(name, size):
                self._merge(name, size, infos)
        path = corpora_file(self._workdir)
        with writing_to("--retro-workdir", path):
            replace_file(path, json.dumps([c._asdict() for c in infos], indent=4).encode())

    def _read(self, index: int) -> Iterator[Arrays]:
        data = self._datasets[index]
        return (read_chunks(block, data, self._length) for block in self._blocks[index])

    def _count(self, index: int, corpus: CorpusChunks) -> CorpusChunks:
        chunks = train = invalid = 0
        for arrays in self._read(index):
            valid = arrays["chunks_valid"]
            chunks, invalid = chunks + len(valid), invalid + len(arrays["chunks_invalid"])
            train += int((valid[:, 0] < corpus.n_docs_train).sum())
        return corpus._replace(n_chunks=chunks, n_chunks_train=train, n_chunks_invalid=invalid)

    def _is_complete(self, name: str, size: int) -> bool:
        try:
            with open_hdf5(merged_file(self._workdir, name), _merged_contents(size)) as sets:
                return int(sets["n_written"][0]) == size
        except (FileNotFoundError, DataError):
            return False

    def _merge(self, name: str, size: int, corpora: Sequence[CorpusChunks]) -> None:
        with new_hdf5(merged_file(self._workdir, name)) as file:
            table = file.create_dataset("chunks", (size, 5), "u4")
            written = 0
            for index, corpus in enumerate(corpora):
                train = 0  # the number of this dataset's training chunks before the block
                for arrays in self._read(index):
                    chunks = arrays["chunks_valid"]
                    is_train = chunks[:, 0] < corpus.n_docs_train
                    if name == "valid":
                        chunks = chunks[~is_train]
                    elif name == "train":
                        chunks = chunks[is_train]
                    else:
                        chosen = self._sampled(corpus, train, train + int(is_train.sum()))
                        chunks = chunks[chosen - train]
                    train += int(is_train.sum())
                    table[written : written + len(chunks), 0] = index
                    table[written : written + len(chunks), 1:] = chunks
                    written += len(chunks)
            assert written == size, (name, written, size)
            if name == "train":
                self._merge_offsets(file, corpora)
            file.create_dataset("n_written", data=np.array([size], np.uint64))

    def _sampled(self, corpus: CorpusChunks, first: int, stop: int) -> NDArray[np.int64]:
        """Return which of the chunks `first` to `stop - 1` the table `sampled` contains, `[n]`."""
        count, total = corpus.n_chunks_sampled, corpus.n_chunks_train
        if self._compatible:
            return np.arange(first, min(stop, count), dtype=np.int64)
        if not total:
            return np.zeros(0, np.int64)
        # The chunks k * total // count for all k below count are evenly spaced over the dataset.
        steps = np.arange(-(-first * count // total), -(-stop * count // total), dtype=np.int64)
        return steps * total // count

    def _merge_offsets(self, file: Any, corpora: Sequence[CorpusChunks]) -> None:
        documents = sum(corpus.n_docs_train for corpus in corpora)
        table = file.create_dataset("doc_offsets", (documents, 3), "u8")
        written = chunks = 0
        for index, corpus in enumerate(corpora):
            for arrays in self._read(index):
                offsets = arrays["doc_offsets"]
                offsets = offsets[offsets[:, 0] < corpus.n_docs_train]
                if len(offsets):
                    part = slice(written, written + len(offsets))
                    table[part, 0] = index
                    table[part, 1] = offsets[:, 0]
                    table[part, 2] = offsets[:, 1] + np.uint64(chunks)
                    written, chunks = part.stop, chunks + int(offsets[-1, 1])


def _table_sizes(corpora: Sequence[CorpusChunks]) -> dict[str, int]:
    """Return the number of chunks in each merged table."""
    return {
        "train": sum(corpus.n_chunks_train for corpus in corpora),
        "valid": sum(corpus.n_chunks - corpus.n_chunks_train for corpus in corpora),
        "sampled": sum(corpus.n_chunks_sampled for corpus in corpora),
    }


def _merged_contents(size: int | None) -> Mapping[str, DataSet]:
    return {"chunks": DataSet("u4", (size, 5)), "n_written": DataSet("u8", (1,))}


def read_corpora(workdir: Path) -> list[CorpusChunks]:
    """Return the datasets of a database.

    Raises:
        DataError: The list is missing or damaged.
    """
    path = corpora_file(workdir)
    try:
        with path.open("rb") as file:
            entries = json.loads(file.read(_MAX_JSON))
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: the chunk database is incomplete; run tools/retro/main.py "
            "with --retro-tasks db-build"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); run db-build again") from None
    text_fields, number_fields = ("prefix", "path", "name", "db_dir"), CorpusChunks._fields[5:]
    is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    for entry in entries if is_list else [{}]:
        invalid = [name for name in text_fields if type(entry.get(name)) is not str]
        invalid += [n for n in number_fields if type(entry.get(n)) is not int or entry[n] < 0]
        invalid += ["ratio"] if type(entry.get("ratio")) not in (int, float) else []
        if invalid:
            raise DataError(
                f"{path} is damaged: invalid or missing {', '.join(invalid)}; run db-build again"
            )
    return [
        CorpusChunks(**{name: entry[name] for name in CorpusChunks._fields}) for entry in entries
    ]


class ChunkDatabase:
    """A reader of the chunks in a memory-mapped merged table.

    Args:
        workdir: The working folder.
        chunk_length: The number of tokens in a chunk, m.
        eod: The end-of-document token, with which short chunks are padded.
        name: The table: "train", "valid" or "sampled".
        vocab_size: The number of entries of the tokenizer. Token ids at or above it are rejected.
            `None` disables the check.

    Attributes:
        path: The file of the table.
        chunk_length: The number of tokens in a chunk, m.
        eod: The token with which short chunks are padded.

    Raises:
        DataError: A file is missing or damaged, or the files do not match.
    """

    def __init__(
        self,
        workdir: Path,
        chunk_length: int,
        eod: int,
        name: str = "train",
        vocab_size: int | None = None,
    ) -> None:
        """Open the table and the datasets to which it refers."""
        self.path, self.chunk_length, self.eod = merged_file(workdir, name), chunk_length, eod
        self._vocab_size = vocab_size
        corpora = read_corpora(workdir)
        size = _table_sizes(corpora)[name]
        try:
            with open_hdf5(self.path, _merged_contents(size)) as sets:
                written, offset = int(sets["n_written"][0]), sets["chunks"].id.get_offset()
        except FileNotFoundError:
            raise DataError(
                f"{self.path} does not exist: the chunk database is incomplete; run "
                "tools/retro/main.py with --retro-tasks db-build"
            ) from None
        except DataError as error:
            raise DataError(f"{error}; {REBUILD_HINT}") from None
        if written != size:
            raise DataError(
                f"{self.path}: only {written} of {size} chunks were written: run db-build again"
            )
        self._rows: NDArray[np.uint32] = np.zeros((0, 5), np.uint32)
        if size:
            mapped = np.memmap(self.path, "<u4", "r", offset, (size, 5))
            self._rows = mapped.view(np.ndarray)
        try:
            self._datasets = [IndexedDataset(corpus.prefix) for corpus in corpora]
        except DataError as error:
            raise DataError(
                f"{corpora_file(workdir)} names a dataset that cannot be read: {error}; restore "
                "the dataset, or enter its new path in this file"
            ) from None
        for corpus, data in zip(corpora, self._datasets, strict=True):
            if len(data) != corpus.n_docs:
                raise DataError(
                    f"{corpora_file(workdir)}: the database was made from {corpus.n_docs} "
                    f"documents of {corpus.prefix}, which now has {len(data)}: restore the "
                    "dataset, or make a new working folder"
                )

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self._rows)

    def rows(self, chunk_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the rows of chunks: dataset, document, first token, end, BERT length, `[n, 5]`.

        Raises:
            DataError: A row is damaged.
            IndexError: A chunk does not exist.
        """
        ids = np.asarray(chunk_ids, np.int64)
        if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < len(self)):
            raise IndexError(f"{self.path}: chunks {ids.min()} to {ids.max()} of {len(self)}")
        rows = self._rows[ids].astype(np.int64)
        wrong = self._outside(rows)
        if wrong.any():
            raise self._damaged(int(ids[wrong.argmax()]))
        return rows

    def _outside(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the rows `[n, 5]` do not lie within a document, bool `[n]`."""
        datasets, documents, starts, ends, _ = rows.T
        wrong = (starts >= ends) | (ends - starts > self.chunk_length)
        wrong |= datasets >= len(self._datasets)
        for index, data in enumerate(self._datasets):
            members = np.flatnonzero(datasets == index)
            exists = documents[members] < len(data)
            wrong[members[~exists]] = True
            members = members[exists]
            wrong[members] |= ends[members] > data.sequence_lengths[documents[members]]
        return wrong

    def check(self) -> None:
        """Check that the table and the datasets are intact and match.

        Rows are compared with the documents in one pass over the file, which takes 1.4 seconds and
        reads 2 GB for 100 million chunks. Tables of up to `_CHECKED` rows are compared completely,
        larger ones only in evenly spaced runs of at most about `_CHECKED` rows in total. Only the
        tokens of `_TOKENS_CHECKED` chunks are compared with the vocabulary, because reading all
        tokens would take too long.

        Raises:
            DataError: A row or the dataset is damaged, or made with a different tokenizer.
        """
        for rows in evenly_spaced(len(self), _CHECKED):
            wrong = self._outside(self._rows[rows].astype(np.int64))
            if wrong.any():
                raise self._damaged(rows.start + int(wrong.argmax()))
        chosen = np.unique(np.linspace(0, max(0, len(self) - 1), _TOKENS_CHECKED, dtype=np.int64))
        self.tokens(chosen[: len(self)])

    def documents(self, chunk_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the indices of each chunk's dataset and document, `[n, 2]`.

        Raises:
            DataError: A row is damaged.
            IndexError: A chunk does not exist.
        """
        return self.rows(chunk_ids)[:, :2]

    def tokens(self, chunk_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the tokens of chunks, padded with EOD, `[n, m]`.

        Raises:
            DataError: A row or the dataset is damaged, or made with a different tokenizer.
            IndexError: A chunk does not exist.
        """
        rows = self.rows(chunk_ids)
        result = np.full((len(rows), self.chunk_length), self.eod, np.int64)
        for i, (dataset, document, start, end, _) in enumerate(rows.tolist()):
            data = self._datasets[dataset]
            result[i, : end - start] = data.get(document, start, end - start)
        if self._vocab_size is not None and result.max(initial=0) >= self._vocab_size:
            dataset, document = rows[result.max(axis=1).argmax(), :2].tolist()
            where = f"{bin_path(self._datasets[dataset].prefix)}: document {document}"
            raise outside_vocabulary(where, int(result.max()), self._vocab_size)
        return result

    def _damaged(self, chunk: int) -> DataError:
        return DataError(
            f"{self.path}: chunk {chunk} is not part of a document: the file is damaged or made "
            "from other data; delete it and run db-build again"
        )
