"""What a preprocessing will take: files, disk and time, before it starts."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.command import PanelRow
from megatron.config.retro_preprocessing import RetroPreprocessing
from megatron.data.indexed import IndexedDataset
from megatron.errors import warn
from megatron.extras import packages_of
from megatron.retro.database import ChunkCutter, most_chunks
from megatron.retro.embedding import DecodedChunks, Embedder

_CUT = 1024  # chunks that are cut to measure the speed
_BATCHES = 4  # batches that are embedded to measure the speed
_ID = 8  # bytes of an id in an index


class Amount(NamedTuple):
    """What a stage makes.

    Attributes:
        chunks: The chunks that it cuts or embeds.
        size: The bytes that it writes and keeps.
        passing: The bytes that it removes at its end.
    """

    chunks: int
    size: int
    passing: int = 0


def plan_amounts(
    options: RetroPreprocessing, datasets: Sequence[IndexedDataset], queries: int
) -> dict[str, Amount]:
    """Return what each stage makes, by its name. Chunks are counted from the documents' lengths.

    Args:
        options: The options of the preprocessing.
        datasets: The datasets.
        queries: The chunks of all samples of the GPT's run.
    """
    index, width = options.index, options.index.retro_index_nfeats
    chunks = sum(most_chunks(data, options.gpt.retro_gpt_chunk_length) for data in datasets)
    documents = sum(map(len, datasets))
    sampled = index.retro_index_ntrain or 0
    vectors = 2 * 4 * width * sampled
    codes = chunks * _code_size(options)
    delete_vectors = index.retro_index_delete_training_embeddings
    delete_codes = index.retro_index_delete_added_codes
    saved = index.retro_query_num_neighbors_save
    return {
        "db-build": Amount(chunks, (16 + 20) * chunks + (16 + 24) * documents + 20 * sampled),
        "index-train": Amount(
            sampled, 0 if delete_vectors else vectors, vectors if delete_vectors else 0
        ),
        "index-add": Amount(
            chunks,
            codes + _ID * chunks + (0 if delete_codes else codes),
            codes if delete_codes else 0,
        ),
        "query-pretraining-neighbors": Amount(queries, queries * saved * 8),
    }


def _code_size(options: RetroPreprocessing) -> int:
    """Return the bytes that the index stores of a chunk."""
    width, factory = options.index.retro_index_nfeats, options.index.retro_index_str
    if factory is None:
        return 0
    with packages_of("retro"):
        import faiss
    try:
        return int(faiss.index_factory(width, factory).sa_code_size())
    except RuntimeError:  # it stores whole vectors, or is no index, which its stage reports
        return 4 * width


def describe_work(
    options: RetroPreprocessing,
    datasets: Sequence[IndexedDataset],
    queries: Mapping[str, int],
    *,
    cutter: ChunkCutter,
    embedder: Callable[[], Embedder],
    processes: int,
) -> list[PanelRow]:
    """Return the rows of the panel about data, disk and time, with speeds measured now.

    A warning says if the disk has less space than the stages need.

    Args:
        options: The options of the preprocessing.
        datasets: The datasets.
        queries: The chunks of each split's samples.
        cutter: How documents are cut into chunks.
        embedder: A function that loads what embeds texts. It is called if a stage needs it.
        processes: The number of processes that share the work.
    """
    stages = options.stages.stages
    amounts = plan_amounts(options, datasets, sum(queries.values()))
    mine = {stage: amounts[stage] for stage in stages}
    documents, tokens = sum(map(len, datasets)), sum(data.num_tokens for data in datasets)
    size = sum(amount.size for amount in mine.values())
    most = size + max(amount.passing for amount in mine.values())
    workdir = Path(str(options.stages.retro_workdir))
    parent = next(
        path for path in (workdir.absolute(), *workdir.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(parent).free
    if most > free:
        warn(
            f"--retro-workdir {workdir}: the stages need up to {_size(most)}, but {_size(free)} "
            "are free: free space, or give a folder on another disk"
        )
    rows = [
        ("data", f"{documents:,} documents, {tokens:,} tokens"),
        ("chunks", f"at most {amounts['db-build'].chunks:,}"),
    ]
    if queries:
        counts = ", ".join(f"{count:,} {split}" for split, count in queries.items())
        rows.append(("chunks of samples", counts))
    rows.append(("disk", f"{_size(size)}, at times {_size(most)}; {_size(free)} free"))
    largest = max(datasets, key=lambda data: data.num_tokens)
    if "db-build" in mine:
        speed = _cutting_speed(largest, cutter) * processes
        rows.append(("db-build", _duration(mine["db-build"].chunks, speed)))
    embedding = sum(amount.chunks for stage, amount in mine.items() if stage != "db-build")
    if embedding:
        batch = options.embedding.retro_bert_batch_size
        speed = _embedding_speed(largest, cutter, embedder(), batch) * processes
        rows.append(("embedding", _duration(embedding, speed)))
    return rows


def _duration(chunks: int, speed: float) -> str:
    return f"about {_time(chunks / speed)} for {chunks:,} chunks, at {speed:,.0f} chunks/s"


def _time(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(1, round(seconds))} s"


def _size(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 10**6:,.1f} MB"


def _cutting_speed(data: IndexedDataset, cutter: ChunkCutter) -> float:
    """Return the chunks that this process cuts in a second, from the middle of a dataset on."""
    start = time.perf_counter()
    places = list(itertools.islice(cutter.places(data, len(data) // 2, len(data)), _CUT))
    cutter.measure(data, places)
    return max(1, len(places)) / (time.perf_counter() - start)


def _embedding_speed(
    data: IndexedDataset, cutter: ChunkCutter, embedder: Embedder, batch: int
) -> float:
    """Return the chunks that this process embeds in a second, after a batch to warm up."""
    places = itertools.islice(cutter.places(data, len(data) // 2, len(data)), _BATCHES * batch)
    tokens = [data.get(document, start, end - start) for document, start, end in places]
    rows = np.full((max(1, len(tokens)), cutter.length), cutter.gpt.eod, np.int64)
    for row, found in zip(rows, tokens, strict=False):
        row[: len(found)] = found
    embedder.embed(DecodedChunks(rows[:batch], cutter.gpt))
    start = time.perf_counter()
    embedder.embed(DecodedChunks(rows, cutter.gpt))
    return len(rows) / (time.perf_counter() - start)
