"""The search for the neighbors of every chunk in the pretraining samples.

    query/<split>_<md5>/<a>-<b>.hdf5    neighbors i64 [rows, k]: database rows, nearest first, or -1

The samples are the same as in pretraining. With l chunks of m tokens in a sample, row c contains
the neighbors of the chunk that begins at token (c % l) * m of sample c // l. The md5 is computed
from the names of the corpora's index files, so different samples have different folders. A chunk is
never a neighbor of a sample that contains tokens of the same document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.command import print_line
from megatron.config.data import SPLIT_NAMES
from megatron.config.retro_preprocessing import RetroPreprocessing
from megatron.data.blend import BlendedDataset
from megatron.data.datasets import DataRequest, Datasets, parse_weighted_paths
from megatron.data.gpt import GPTDataset, build_gpt_datasets
from megatron.data.sample import SampleDataset
from megatron.device import Device
from megatron.errors import ConfigError, DataError
from megatron.parallel.layout import Axis
from megatron.retro.blocks import DataSet, TableBlock, blocks_to_do, plan_blocks, write_block
from megatron.retro.embedding import DecodedChunks, Embedder, Vectors
from megatron.retro.index import (
    BuildEmbedder,
    ChunkTable,
    IndexOptions,
    IndexPaths,
    check_width,
    faiss_threads,
    on_device,
    read_index,
)
from megatron.tokenizer import Tokenizer

NO_NEIGHBOR = -1  # the row of a missing neighbor
_SEARCHED_AT_ONCE = 1000

Ids = NDArray[np.int64]


class Database(ChunkTable, Protocol):
    """A table of the chunks that can be retrieved."""

    def documents(self, chunk_ids: Ids) -> Ids:
        """Return the indices of each chunk's dataset and document, `[n, 2]`."""


@dataclass(frozen=True)
class QueryOptions:
    """Settings for the search for neighbors.

    Attributes:
        queried: The number of neighbors to request from the index.
        saved: The number of neighbors to store, k.
        nprobe: The number of lists that an index with inverted lists searches.
        ef_search: The size of the candidate list of an HNSW graph.
        block_size: The number of chunks in a block.
        compatible: Whether `saved` may exceed `queried`, as in Megatron-LM. The additional
            neighbors are stored as missing.
    """

    queried: int = 200
    saved: int = 20
    nprobe: int = 65536
    ef_search: int = 256
    block_size: int = 100_000
    compatible: bool = False

    @classmethod
    def of(cls, options: RetroPreprocessing) -> QueryOptions:
        """Return the search settings that the preprocessing options specify."""
        index = options.index
        return cls(
            queried=index.retro_query_num_neighbors_query,
            saved=index.retro_query_num_neighbors_save,
            nprobe=index.retro_query_nprobe,
            ef_search=index.retro_query_ef_search,
            block_size=options.stages.retro_block_size,
            compatible=options.stages.retro_compatible,
        )


def query_datasets(request: DataRequest, *, seq_length: int, vocab_size: int) -> Datasets:
    """Build the samples on which a Retro model is trained. Collective.

    Preprocessing and training must pass equal arguments. As in Megatron-LM, even a single corpus is
    a blend.

    Args:
        request: The data that the run needs.
        seq_length: The number of tokens in a sample, not counting the last label.
        vocab_size: The number of entries of the tokenizer.

    Raises:
        ConfigError: No data is given, or --data-path or --split cannot be parsed.
        DataError: A dataset is missing, damaged, too small or made with a different tokenizer.
    """
    blend_request = request._replace(blends_single=True)
    return build_gpt_datasets(blend_request, seq_length=seq_length, vocab_size=vocab_size)


def neighbors_folder(workdir: Path, split: str, dataset: SampleDataset) -> Path:
    """Return the folder for the neighbors of a split's chunks.

    Args:
        workdir: The working folder.
        split: "train", "valid" or "test".
        dataset: The samples, from `query_datasets`.
    """
    texts = [member.description.encode() for member in _members(dataset)]
    hashes = ",".join(hashlib.md5(text, usedforsecurity=False).hexdigest() for text in texts)
    digest = hashlib.md5(hashes.encode(), usedforsecurity=False).hexdigest()
    return workdir / "query" / f"{split}_{digest}"


def _members(dataset: SampleDataset) -> list[GPTDataset]:
    assert isinstance(dataset, BlendedDataset), "Retro samples are a blend"
    members = [member for member in dataset.datasets if isinstance(member, GPTDataset)]
    assert len(members) == len(dataset.datasets), "Retro samples come from indexed datasets"
    return members


class QueryChunks:
    """The chunks of a split's samples.

    Args:
        dataset: The samples, from `query_datasets`.
        seq_length: The number of tokens in a sample, not counting the last label.
        chunk_length: The number of tokens in a chunk, m.
        tokenizer: The tokenizer that produced the tokens.
        prefixes: The prefixes of the corpora, in the order of the database. If empty, corpora are
            numbered as in the blend and texts contain end-of-document tokens, as in Megatron-LM.

    Attributes:
        dataset: The samples.
        chunks_per_sample: The number of chunks in a sample, l.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        seq_length: int,
        chunk_length: int,
        tokenizer: Tokenizer,
        prefixes: Sequence[str] = (),
    ) -> None:
        """Store the samples, and number the corpora."""
        assert isinstance(dataset, BlendedDataset), "Retro samples are a blend"
        self.dataset, self.chunks_per_sample = dataset, seq_length // chunk_length
        self._members, self._length, self._tokenizer = _members(dataset), chunk_length, tokenizer
        self._compatible = not prefixes
        # A corpus without documents in this split is in the database but not in the blend.
        self._corpus_indices = [
            prefixes.index(member.data.prefix) if prefixes else i
            for i, member in enumerate(self._members)
        ]

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.dataset) * self.chunks_per_sample

    def tokens(self, chunk_ids: Ids) -> Ids:
        """Return the tokens of consecutive chunks, `[n, m]`.

        Args:
            chunk_ids: The indices of the chunks, consecutive and ascending, `[n]`.
        """
        first, last = (int(chunk_ids[end]) // self.chunks_per_sample for end in (0, -1))
        text = np.stack([self.dataset[sample]["text"] for sample in range(first, last + 1)])
        rows = text[:, : self.chunks_per_sample * self._length].reshape(-1, self._length)
        return rows[chunk_ids - first * self.chunks_per_sample]

    def texts(self, start: int, stop: int) -> DecodedChunks:
        """Return the texts of chunks `start` to `stop - 1`."""
        tokens = self.tokens(np.arange(start, stop))
        return DecodedChunks(tokens, self._tokenizer, keeps_ends=self._compatible)

    def documents(self, sample: int) -> tuple[int, Ids]:
        """Return the corpus index and the document indices `[documents]` of a sample."""
        member_index = int(self.dataset.index.datasets[sample])
        member = self._members[member_index]
        row = int(member.index.shuffle[int(self.dataset.index.samples[sample]) % len(member)])
        first, last = member.index.samples[row : row + 2, 0].tolist()
        documents = member.index.documents[first : last + 1].astype(np.int64)
        return self._corpus_indices[member_index], documents


class Searcher:
    """An index and its settings for finding the neighbors of chunks.

    Args:
        index: A filled faiss index.
        database: The chunks in the index.
        options: The settings of the search.
        threads: The maximum number of faiss threads. `None` uses this process's share of the
            cores.
    """

    def __init__(
        self, index: Any, database: Database, options: QueryOptions, threads: int | None = None
    ) -> None:
        """Store the index."""
        self._index, self._database = index, database
        self._options, self._threads = options, threads

    def search(self, vectors: Vectors) -> Ids:
        """Return the chunks nearest to vectors `[n, h]`, unfiltered, `[n, queried]`; -1 for none.

        Raises:
            DataError: The index contains a chunk that is not in the database.
        """
        with faiss_threads(self._threads):
            _, labels = self._index.search(vectors, self._options.queried)
        ids: Ids = labels
        if ids.max(initial=NO_NEIGHBOR) >= len(self._database):
            raise DataError(
                f"the index contains chunk {ids.max()}, but the database has only "
                f"{len(self._database)} chunks: they belong to different data; build the index "
                "again"
            )
        return ids

    def filtered(self, candidates: Ids, chunks: QueryChunks, first: int) -> Ids:
        """Keep the first `saved` candidates that are not in the documents of the chunk's sample.

        Args:
            candidates: The chunks nearest to n consecutive chunks, or -1, `[n, queried]`.
            chunks: The chunks of the split.
            first: The index of the first of the n chunks.

        Returns:
            The neighbors, `[n, saved]`, padded with -1.
        """
        queries = np.arange(first, first + len(candidates))
        samples = queries // chunks.chunks_per_sample
        is_kept = candidates != NO_NEIGHBOR
        origins = self._database.documents(np.where(is_kept, candidates, 0).ravel()).reshape(
            *candidates.shape, 2
        )
        for sample in np.unique(samples).tolist():
            rows = samples == sample
            corpus, documents = chunks.documents(sample)
            is_own = np.isin(origins[rows, :, 1], documents) & (origins[rows, :, 0] == corpus)
            is_kept[rows] &= ~is_own
        order = np.argsort(~is_kept, axis=1, kind="stable")[:, : self._options.saved]
        saved = np.full((len(candidates), self._options.saved), NO_NEIGHBOR, np.int64)
        saved[:, : order.shape[1]] = np.where(
            np.take_along_axis(is_kept, order, axis=1),
            np.take_along_axis(candidates, order, axis=1),
            NO_NEIGHBOR,
        )
        return saved

    def neighbors(self, vectors: Vectors, chunks: QueryChunks, first: int) -> Ids:
        """Return the neighbors of consecutive chunks, `[n, saved]`, padded with -1.

        Args:
            vectors: The vectors of the n chunks, `[n, h]`.
            chunks: The chunks of the split.
            first: The index of the first of the n chunks.
        """
        batches = [
            self.filtered(
                self.search(vectors[start : start + _SEARCHED_AT_ONCE]), chunks, first + start
            )
            for start in range(0, len(vectors), _SEARCHED_AT_ONCE)
        ]
        return np.concatenate(batches)


def open_searcher(
    workdir: Path, index: IndexOptions, database: Database, query: QueryOptions, device: Device
) -> Searcher:
    """Read the filled index and prepare it for searching.

    The index is copied to the GPU if faiss can search it there. Otherwise it is memory-mapped if
    its type supports this, so that processes on a machine share it.

    Raises:
        DataError: The index is missing, damaged, or belongs to a different database.
    """
    path = IndexPaths(workdir, index).added
    filled = read_index(path, index, mapped=True)
    if not 0 < filled.ntotal <= len(database):
        raise DataError(
            f"{path} has {filled.ntotal} chunks, but the database has {len(database)}: they "
            "belong to different data; remove the index and run the task index-build again"
        )
    with faiss_threads(index.threads) as faiss:
        for name, value in (("nprobe", query.nprobe), ("efSearch", query.ef_search)):
            try:
                faiss.ParameterSpace().set_index_parameter(filled, name, value)
            except RuntimeError:
                continue  # this type of index has no such setting
    searchable = on_device(filled, device, query.queried)
    return Searcher(searchable, database, query, index.threads)


def query_chunks(
    request: DataRequest,
    *,
    seq_length: int,
    chunk_length: int,
    tokenizer: Tokenizer,
    compatible: bool = False,
) -> dict[str, QueryChunks]:
    """Build the samples of each split, and return their chunks by split. Collective.

    Splits without samples are omitted.

    Args:
        request: The data that the run needs.
        seq_length: The number of tokens in a sample, not counting the last label.
        chunk_length: The number of tokens in a chunk.
        tokenizer: The tokenizer of the data.
        compatible: Whether to reproduce Megatron-LM's bugs.

    Raises:
        ConfigError: The chunk length does not divide the sequence length, no data is given, or
            --data-path or --split cannot be parsed.
        DataError: A dataset is missing, damaged, too small or made with a different tokenizer.
    """
    if seq_length % chunk_length:
        raise ConfigError(
            f"--retro-gpt-seq-length {seq_length} is not a multiple of --retro-gpt-chunk-length "
            f"{chunk_length}: change one of them"
        )
    datasets = query_datasets(request, seq_length=seq_length, vocab_size=tokenizer.vocab_size)
    paths = request.data.data_path or ()
    prefixes = [path for _, path in parse_weighted_paths(paths, "--retro-gpt-data-path")]
    return {
        split: QueryChunks(
            dataset,
            seq_length=seq_length,
            chunk_length=chunk_length,
            tokenizer=tokenizer,
            prefixes=() if compatible else prefixes,
        )
        for split, dataset in zip(SPLIT_NAMES, datasets, strict=True)
        if dataset is not None
    }


def query_neighbors(
    workdir: Path,
    index: IndexOptions,
    query: QueryOptions,
    splits: Mapping[str, QueryChunks],
    *,
    database: Database,
    build_embedder: BuildEmbedder,
    device: Device,
    world: Axis,
) -> None:
    """Find and store the neighbors of all chunks whose blocks are missing. Collective.

    Args:
        workdir: The working folder.
        index: The filled index.
        query: The settings of the search.
        splits: The chunks of each split, from `query_chunks`.
        database: The chunks that can be retrieved.
        build_embedder: A function that loads the embedder. It is called only if neighbors are
            missing.
        device: The device of this process.
        world: The processes that share the work.

    Raises:
        ConfigError: The number of neighbors to store exceeds the number requested from the index,
            and `query` is not compatible with Megatron-LM. Or the vectors do not have the index's
            width.
        DataError: The index is missing, damaged, or belongs to a different database.
        StorageError: A file cannot be written.
    """
    if query.saved > query.queried and not query.compatible:
        raise ConfigError(
            f"--retro-query-num-neighbors-save {query.saved} is more than "
            f"--retro-query-num-neighbors-query {query.queried}: raise the latter or lower the "
            "former"
        )

    def contents(block: TableBlock) -> dict[str, DataSet]:
        return {"neighbors": DataSet("i8", (block.rows, query.saved))}

    opened: tuple[Searcher, Embedder] | None = None
    for split, chunks in splits.items():
        folder = neighbors_folder(workdir, split, chunks.dataset)
        blocks = plan_blocks(folder, len(chunks), query.block_size)
        for block in blocks_to_do(blocks, contents, world):
            if opened is None:
                embedder = check_width(build_embedder(), index)
                opened = open_searcher(workdir, index, database, query, device), embedder
            searcher, embedder = opened
            vectors = embedder.embed(chunks.texts(block.start, block.stop))
            write_block(block, {"neighbors": searcher.neighbors(vectors, chunks, block.start)})
            print_line(
                f"  {split}: neighbors of {block.start:,} to {block.stop - 1:,} of {len(chunks):,}"
            )
