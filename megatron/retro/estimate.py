"""Estimates of the disk space and time that preprocessing will take."""

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
from megatron.retro.database import ChunkCutter, max_chunks
from megatron.retro.embedding import DecodedChunks, Embedder

_MEASURED_CHUNKS = 1024  # the number of chunks to cut when measuring the speed
_MEASURED_BATCHES = 4  # the number of batches to embed when measuring the speed
_ID = 8  # bytes of an id in an index


class Amount(NamedTuple):
    """The amount of data that a stage produces.

    Attributes:
        chunks: The number of chunks that the stage cuts or embeds.
        size: The number of bytes that the stage leaves on disk.
        temporary: The number of bytes that the stage writes and later removes.
    """

    chunks: int
    size: int
    temporary: int = 0


def plan_amounts(
    options: RetroPreprocessing, datasets: Sequence[IndexedDataset], queries: int
) -> dict[str, Amount]:
    """Return the amount of data that each stage produces, by the name of the stage.

    The number of chunks is an upper bound, computed from the lengths of documents.

    Args:
        options: The preprocessing options.
        datasets: The datasets of the chunk database.
        queries: The number of chunks in all samples of the GPT run.
    """
    index, width = options.index, options.index.retro_index_nfeats
    chunks = sum(max_chunks(data, options.gpt.retro_gpt_chunk_length) for data in datasets)
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
    """Return the number of bytes per chunk in the index, without the id."""
    width, factory = options.index.retro_index_nfeats, options.index.retro_index_str
    if factory is None:
        return 0
    with packages_of("retro"):
        import faiss
    try:
        return int(faiss.index_factory(width, factory).sa_code_size())
    except RuntimeError:
        # The index stores vectors, or the string is invalid, which index-train reports.
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
    """Estimate the disk space and time of the stages, and return the estimates as panel rows.

    Speeds are measured. A warning is printed if the disk has less space than the stages need.

    Args:
        options: The preprocessing options.
        datasets: The datasets of the chunk database.
        queries: The number of chunks in each split's samples.
        cutter: The object that divides documents into chunks.
        embedder: A function that loads the embedder. It is called only if a stage needs it.
        processes: The number of processes that share the work.
    """
    stages = options.stages.stages
    amounts = plan_amounts(options, datasets, sum(queries.values()))
    planned = {stage: amounts[stage] for stage in stages}
    documents, tokens = sum(map(len, datasets)), sum(data.num_tokens for data in datasets)
    size = sum(amount.size for amount in planned.values())
    peak = size + max(amount.temporary for amount in planned.values())
    workdir = Path(str(options.stages.retro_workdir))
    parent = next(
        path for path in (workdir.absolute(), *workdir.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(parent).free
    if peak > free:
        warn(
            f"--retro-workdir {workdir}: the stages need up to {_size(peak)}, but {_size(free)} "
            "are free: free space, or give a folder on another disk"
        )
    rows = [
        ("data", f"{documents:,} documents, {tokens:,} tokens"),
        ("chunks", f"at most {amounts['db-build'].chunks:,}"),
    ]
    if queries:
        counts = ", ".join(f"{count:,} {split}" for split, count in queries.items())
        rows.append(("chunks of samples", counts))
    rows.append(("disk", f"{_size(size)}, temporarily {_size(peak)}; {_size(free)} free"))
    largest = max(datasets, key=lambda data: data.num_tokens)
    if "db-build" in planned:
        start, middle = time.perf_counter(), len(largest) // 2
        spans = list(
            itertools.islice(cutter.spans(largest, middle, len(largest)), _MEASURED_CHUNKS)
        )
        cutter.count_bert_tokens(largest, spans)
        speed = max(1, len(spans)) / (time.perf_counter() - start) * processes
        rows.append(("db-build", _duration(planned["db-build"].chunks, speed)))
    embedding = sum(amount.chunks for stage, amount in planned.items() if stage != "db-build")
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


def _embedding_speed(
    data: IndexedDataset, cutter: ChunkCutter, embedder: Embedder, batch: int
) -> float:
    """Measure how many chunks this process embeds per second, after a warm-up batch."""
    spans = itertools.islice(
        cutter.spans(data, len(data) // 2, len(data)), _MEASURED_BATCHES * batch
    )
    tokens = [data.get(document, start, end - start) for document, start, end in spans]
    rows = np.full((max(1, len(tokens)), cutter.length), cutter.gpt.eod, np.int64)
    for row, ids in zip(rows, tokens, strict=False):
        row[: len(ids)] = ids
    embedder.embed(DecodedChunks(rows[:batch], cutter.gpt))
    start = time.perf_counter()
    embedder.embed(DecodedChunks(rows, cutter.gpt))
    return len(rows) / (time.perf_counter() - start)
