"""Retro's pretraining samples: GPT samples with the tokens of each chunk's neighbors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES
from megatron.config.retro import RetroOptions
from megatron.data.datasets import (
    DataRequest,
    Datasets,
    corpus_fingerprint,
    parse_weighted_paths,
)
from megatron.data.sample import Sample, SampleDataset
from megatron.errors import DataError, warn
from megatron.retro.blocks import DataSet, TableBlock, evenly_spaced, map_block, plan_blocks
from megatron.retro.database import ChunkDatabase, corpora_file, read_corpora
from megatron.retro.neighbors import NO_NEIGHBOR, neighbors_folder, query_datasets
from megatron.retro.workdir import read_arguments, read_digest
from megatron.tokenizer.base import Tokenizer

# The number of chunks whose neighbors are checked before training (2.7 GB at 20 neighbors each).
_CHECKED = 1 << 24

Ids = NDArray[np.int64]


class NeighborRows(Protocol):
    """A table of each chunk's k neighbors, as database row numbers, -1 for a missing one."""

    def __len__(self) -> int:
        """Return the number of chunks."""

    def rows(self, start: int, stop: int) -> Ids:
        """Return the neighbors of chunks `start` to `stop - 1`, `[stop - start, k]`."""


class NeighborTable:
    """A memory-mapped table of each chunk's neighbors, as database row numbers, nearest first.

    A missing neighbor is -1.

    Args:
        blocks: All blocks of a split's table, in order.
        num_neighbors: The number of neighbors to read for each chunk. The blocks may have more.

    Raises:
        DataError: A block is missing or damaged, or has fewer than `num_neighbors` neighbors per
            chunk.
    """

    def __init__(self, blocks: Sequence[TableBlock], num_neighbors: int) -> None:
        """Map the blocks into memory."""
        self._num_neighbors, self._blocks = num_neighbors, blocks
        self._arrays = [map_block(block, _contents)["neighbors"] for block in blocks]
        self._starts = [0, *accumulate(len(array) for array in self._arrays)]
        for block, array in zip(blocks, self._arrays, strict=True):
            if array.shape[1] < num_neighbors:
                raise DataError(
                    f"{block.path} has {array.shape[1]} neighbors per chunk, but "
                    f"--retro-num-neighbors {num_neighbors} asks for more: lower it, or build the "
                    "folder query/ again with a larger --retro-query-num-neighbors-save"
                )

    def __len__(self) -> int:
        """Return the number of chunks."""
        return self._starts[-1]

    def check(self, texts: NeighborTexts) -> None:
        """Check that all neighbors are in the database.

        The neighbors of all chunks, or of about 16 million chunks in evenly spaced runs if there
        are more, are read in one pass over the files. Other neighbors are checked when they are
        used.

        Args:
            texts: The tokens of neighbors, which refer to the database.

        Raises:
            DataError: A neighbor is not in the database.
        """
        limit = _CHECKED // max(1, len(self._arrays))
        for block, array in zip(self._blocks, self._arrays, strict=True):
            for rows in evenly_spaced(len(array), limit):
                texts.check(array[rows, : self._num_neighbors], f"{block.path}: ")

    def rows(self, start: int, stop: int) -> Ids:
        """Return the neighbors of chunks `start` to `stop - 1`, `[stop - start, k]`."""
        slices = [
            array[max(start - first, 0) : max(stop - first, 0), : self._num_neighbors]
            for array, (first, end) in zip(self._arrays, pairwise(self._starts), strict=True)
            if start < end and first < stop
        ]
        return np.concatenate(slices)


@dataclass(frozen=True)
class ShuffledNeighbors:
    """A table that gives each chunk the neighbors of a different chunk.

    A model that uses its neighbors predicts worse with this table than with the original.

    Attributes:
        table: The table of the correct neighbors, whose samples are in random order.
    """

    table: NeighborRows

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.table)

    def rows(self, start: int, stop: int) -> Ids:
        """Return the neighbors of chunks far from the given range, `[stop - start, k]`."""
        count = len(self.table)
        # The golden ratio keeps the distance from being a multiple or a simple fraction of a pass
        # over the data.
        first = (start + max(1, int(count * 0.618))) % count
        end = first + stop - start
        if end <= count:
            return self.table.rows(first, end)
        return np.concatenate((self.table.rows(first, count), self.table.rows(0, end - count)))


@dataclass(frozen=True)
class NeighborArray:
    """A table of neighbors in memory.

    Attributes:
        neighbors: The neighbors of every chunk, `[n, k]`, -1 for none.
    """

    neighbors: Ids

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.neighbors)

    def rows(self, start: int, stop: int) -> Ids:
        """Return the neighbors of chunks `start` to `stop - 1`, `[stop - start, k]`."""
        return self.neighbors[start:stop]


@dataclass(frozen=True)
class NoNeighbors:
    """A table in which no chunk has neighbors.

    Attributes:
        table: The table of the correct neighbors.
    """

    table: NeighborRows

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.table)

    def rows(self, start: int, stop: int) -> Ids:
        """Return -1 for all neighbors of chunks `start` to `stop - 1`, `[stop - start, k]`."""
        return np.full_like(self.table.rows(start, stop), NO_NEIGHBOR)


def _contents(block: TableBlock) -> dict[str, DataSet]:
    return {"neighbors": DataSet("i8", (block.rows, None))}


@dataclass(frozen=True)
class NeighborTexts:
    """A reader of the tokens of neighbors.

    A neighbor consists of r tokens: those of a retrieved chunk and of the chunks after it.

    Attributes:
        database: The chunks that can be retrieved.
        chunks: The number of chunks in a neighbor.
        compatible: Whether to read a missing neighbor as the database's last chunk followed by its
            first chunks, as Megatron-LM 23.08 does. Otherwise a missing neighbor is empty.
    """

    database: ChunkDatabase
    chunks: int
    compatible: bool = False

    def tokens(self, neighbors: Ids) -> Ids:
        """Return the tokens of neighbors `[..., k]`, padded with EOD, `[..., k, r]`.

        As in Megatron-LM, the chunks after the retrieved one may belong to the next document, and
        the database's last chunk is followed by its first.

        Raises:
            DataError: A neighbor is not in the database, or the database is damaged.
        """
        self.check(neighbors)
        rows = (neighbors[..., None] + np.arange(self.chunks)) % len(self.database)
        tokens = self.database.tokens(rows.ravel()).reshape(*neighbors.shape, -1)
        if not self.compatible:
            tokens[neighbors == NO_NEIGHBOR] = self.database.eod
        return tokens

    def check(self, neighbors: Ids, where: str = "") -> None:
        """Check that all neighbors are in the database.

        Args:
            neighbors: The rows of chunks in the database, or -1, of any shape.
            where: A prefix for the error message that names the file, such as "a.hdf5: ".

        Raises:
            DataError: A neighbor is not in the database.
        """
        if neighbors.size and not NO_NEIGHBOR <= neighbors.min() <= neighbors.max() < len(
            self.database
        ):
            raise DataError(
                f"{where}the neighbors are chunks {neighbors.min()} to {neighbors.max()}, but "
                f"{self.database.path} has {len(self.database)} chunks: one of the files is "
                "damaged or made from other data; delete the folder query/ and run "
                "tools/retro/main.py --retro-tasks query-pretraining-neighbors again"
            )


@dataclass(eq=False)
class RetroDataset:
    """GPT samples with `neighbors`, the tokens of each chunk's neighbors, `[l, k, r]`.

    Attributes:
        samples: The GPT samples, with `text`.
        table: The neighbors of all chunks of all samples.
        texts: The tokens of neighbors.
        chunks_per_sample: The number of chunks in a sample, l.
        controls: The same samples with different neighbors, by description, for evaluation
            (`ControlledDataset`).
    """

    samples: SampleDataset
    table: NeighborRows
    texts: NeighborTexts
    chunks_per_sample: int
    controls: Mapping[str, SampleDataset] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`, with the tokens of its neighbors.

        Raises:
            DataError: The data or a file of the working folder is damaged.
        """
        first = i * self.chunks_per_sample
        neighbors = self.table.rows(first, first + self.chunks_per_sample)
        return {**self.samples[i], "neighbors": self.texts.tokens(neighbors)}


def build_retro_datasets(
    request: DataRequest, model: RetroOptions, tokenizer: Tokenizer
) -> Datasets:
    """Build the datasets of --retro-workdir. Collective.

    Args:
        request: The data that the run needs. The working folder's seed replaces the request's.
        model: The network's options, including the length of a chunk.
        tokenizer: The tokenizer that produced the tokens.

    Raises:
        ConfigError: `args.json` cannot be read, or --data-path or --split cannot be parsed.
        DataError: The data or a file of the folder is missing or damaged, or they do not match.
    """
    data = request.data
    assert data.retro_workdir is not None, "a rule requires it"
    workdir = Path(data.retro_workdir)
    preprocessing = read_arguments(workdir)
    database = ChunkDatabase(
        workdir, model.chunk_length, tokenizer.eod, vocab_size=tokenizer.vocab_size
    )
    _check_origin(workdir, request, tokenizer, preprocessing.gpt.retro_gpt_tokenizer_type)
    if request.is_builder:  # other processes would read the same files
        database.check()
    retro_request = request._replace(seed=preprocessing.gpt.retro_gpt_seed)
    splits = query_datasets(
        retro_request, seq_length=data.seq_length, vocab_size=tokenizer.vocab_size
    )
    texts = NeighborTexts(database, model.retro_num_retrieved_chunks, data.retro_compatible)
    datasets: list[SampleDataset | None] = []
    for name, samples in zip(SPLIT_NAMES, splits, strict=True):
        if samples is None:
            datasets.append(None)
            continue
        folder = neighbors_folder(workdir, name, samples)
        if not folder.is_dir():
            raise DataError(
                f"--retro-workdir {workdir} has no neighbors for the {len(samples)} samples of the "
                f"{name} split ({folder.name} is missing in query/): preprocess with the "
                "--train-iters or --train-samples, --global-batch-size and evaluations of this "
                "run, or run with the values used in preprocessing"
            )
        chunks_per_sample = data.seq_length // model.chunk_length
        count = len(samples) * chunks_per_sample
        blocks = plan_blocks(folder, count, preprocessing.stages.retro_block_size)
        table = NeighborTable(blocks, model.retro_num_neighbors)
        if request.is_builder:
            table.check(texts)
        dataset = RetroDataset(samples, table, texts, chunks_per_sample)
        _ = dataset[0]  # fail now rather than at a later step
        if data.retro_eval_shuffled:
            shuffled = replace(dataset, table=ShuffledNeighbors(table))
            dataset.controls = {"with shuffled neighbors": shuffled}
        datasets.append(dataset)
    return Datasets(*datasets)


def _check_origin(
    workdir: Path, request: DataRequest, tokenizer: Tokenizer, recorded_type: str | None
) -> None:
    """Check that neither the data nor the tokenizer has changed since the folder was made.

    A folder made by Megatron-LM records only the type of the tokenizer, `recorded_type`.

    Raises:
        DataError: The data or the tokenizer has changed.
    """
    data = request.data
    paths = [path for _, path in parse_weighted_paths(data.data_path or (), "--data-path")]
    sources = [
        ("data", f"data of --data-path {' '.join(paths)}", corpus_fingerprint(data)),
        ("gpt_tokenizer", "tokenizer", tokenizer.fingerprint()),
    ]
    retrieved = [corpus.prefix for corpus in read_corpora(workdir)]
    if retrieved != paths:  # a dataset has been moved
        label = f"data {' '.join(retrieved)} of {corpora_file(workdir)}"
        sources.append(
            ("data", label, corpus_fingerprint(replace(data, data_path=tuple(retrieved))))
        )
    for name, label, current in sources:
        recorded = read_digest(workdir, name)
        if recorded and current and recorded != current:
            raise DataError(
                f"--retro-workdir {workdir}: the {label} has changed since the folder was made: "
                "restore it, or make a new folder with tools/retro/main.py"
            )
    tokenizer_type = tokenizer.fingerprint().partition(":")[0]
    is_known = read_digest(workdir, "gpt_tokenizer") is not None
    if request.is_builder and not is_known and recorded_type not in (None, tokenizer_type):
        warn(
            f"--retro-workdir {workdir} was made with --retro-gpt-tokenizer-type {recorded_type}, "
            f"but this run has --tokenizer-type {tokenizer_type}: this is correct only if both "
            "give the same token ids"
        )
