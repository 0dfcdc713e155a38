"""Perplexity of a Retro model with correct neighbors, neighbors of other chunks, or no neighbors.

The samples are the validation samples of the working folder, whose neighbors are stored, or any
texts, whose neighbors are looked up in the index.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from megatron.command import print_line
from megatron.config import ParsedRun, RunConfig
from megatron.config.retro import ARGUMENTS, read_arguments
from megatron.data.datasets import DataRequest
from megatron.device import Device
from megatron.errors import ConfigError, DataError
from megatron.inference.load import Loaded, load_gpt
from megatron.inference.score import Sample, Score, Scorer
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Layout
from megatron.retro.dataset import (
    Ids,
    NeighborArray,
    NeighborRows,
    NeighborTexts,
    NoNeighbors,
    RetroDataset,
    ShuffledNeighbors,
    build_retro_datasets,
)
from megatron.retro.retriever import open_retriever
from megatron.tasks.evaluation import print_start, publish
from megatron.tasks.results import Metrics, TaskProgress, megatron_line
from megatron.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.tasks.language_model import Prepared

TASK = "PERPLEXITY"
_NO_NEIGHBORS = ", no neighbors"
_REPORTED = ("loss", "perplexity")  # the metrics that are reported for each kind of neighbors
# The neighbors that the model reads, by the suffix of the metric's name.
_NEIGHBOR_KINDS: dict[str, Callable[[NeighborRows], NeighborRows]] = {
    "": lambda table: table,
    ", shuffled neighbors": ShuffledNeighbors,
    _NO_NEIGHBORS: NoNeighbors,
}


class _Scored(NamedTuple):
    """The samples to score.

    Attributes:
        samples: The samples, without neighbors.
        rows: The start and end (exclusive) of each sample's chunks in the table.
        table: The correct neighbors of each chunk.
        texts: The tokens of the neighbors.
        summarize: A function that computes metrics, including "loss" and "perplexity".
        data: A description of the data.
    """

    samples: list[Sample]
    rows: list[tuple[int, int]]
    table: NeighborRows
    texts: NeighborTexts
    summarize: Callable[[Sequence[Score]], Metrics]
    data: str


def evaluate_neighbors(
    parsed: ParsedRun,
    device: Device,
    layout: Layout,
    prepare: Callable[[Tokenizer, int], Prepared] | None,
) -> Metrics:
    """Score the samples with each kind of neighbors, report, and return the metrics. Collective.

    Args:
        parsed: The command line.
        device: The device to run on.
        layout: The grid of processes and this process's position in it.
        prepare: A function that takes a tokenizer and a window size in tokens, and prepares the
            texts of --valid-data. `None` scores the validation samples of the working folder.

    Raises:
        UserError: The checkpoint, the texts or the working folder is invalid.
    """
    config = parsed.config
    options, task_options = parsed.extra
    assert config.checkpoint.load is not None, "a rule requires it"
    loaded = load_gpt(
        config.checkpoint.load, device, layout, config=config, row_by_row=False, kinds=("retro",)
    )
    if prepare is None:
        scored = _validation(loaded, task_options.retro_eval_samples)
    else:
        prepared = prepare(loaded.tokenizer, config.data.seq_length)
        scored = _with_neighbors(prepared, loaded, device, task_options.bert_embedder_load)
    print_start(TASK, loaded, device, scored.data)
    scorer = Scorer(loaded, device, config.training.micro_batch_size)
    is_main = layout.world.rank == 0
    started = time.monotonic()
    metrics: Metrics = {}
    other_metrics: Metrics = {}
    for name, select in _NEIGHBOR_KINDS.items():
        if is_main:
            print_line(f"scoring with {name.strip(', ') or 'the correct neighbors'} ...")
        table = select(scored.table)
        texts = scored.texts if name != _NO_NEIGHBORS else replace(scored.texts, compatible=False)
        samples = [
            sample._replace(neighbors=partial(_neighbors, table, texts, *rows))
            for sample, rows in zip(scored.samples, scored.rows, strict=True)
        ]
        progress = TaskProgress(enabled=is_main, log_interval=config.logging.log_interval)
        for key, value in scored.summarize(scorer.score(samples, progress)).items():
            if key in _REPORTED:
                metrics[f"{key}{name}"] = value
            elif not name:
                other_metrics[key] = value
    seconds = time.monotonic() - started
    neighbors = scored.table.rows(0, scored.rows[-1][1])
    metrics |= {"neighbors found": float((neighbors >= 0).mean()), **other_metrics}
    if is_main:
        print_line(megatron_line(TASK, {"loss": "avg loss", "perplexity": "ppl"}, metrics))
    details = {"options": asdict(task_options), "seconds": round(seconds, 3)}
    publish(TASK, loaded, options, metrics, details)
    return metrics


def _validation(loaded: Loaded, limit: int | None) -> _Scored:
    """Return the first `limit` validation samples of the working folder. `None` returns all."""
    config = loaded.config
    dataset = validation_samples(config, loaded.tokenizer, loaded.layout)
    count = min(limit or len(dataset), len(dataset))
    texts = [dataset.samples[i]["text"] for i in range(count)]
    size, tokens = dataset.chunks_per_sample, count * config.data.seq_length

    def summarize(scores: Sequence[Score]) -> Metrics:
        loss = -sum(score.log_probability for score in scores) / tokens
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"loss": loss, "perplexity": perplexity, "tokens": tokens}

    return _Scored(
        [Sample(text, len(text) - 1) for text in texts],
        [(i * size, (i + 1) * size) for i in range(count)],
        dataset.table,
        dataset.texts,
        summarize,
        f"{config.data.retro_workdir}: {count:,} of {len(dataset):,} validation samples, "
        f"{count * size:,} chunks with {config.model.retro_num_neighbors} neighbors",
    )


def _with_neighbors(
    prepared: Prepared, loaded: Loaded, device: Device, embedder: str | None
) -> _Scored:
    """Find the neighbors of the prepared samples. Each process searches for a share of the chunks.

    Raises:
        UserError: No text has a whole chunk, or the working folder is invalid.
    """
    config, world = loaded.config, loaded.layout.world
    chunk_length = config.model.chunk_length
    counts = [(len(sample.tokens) - 1) // chunk_length for sample in prepared.samples]
    ends = [0, *accumulate(counts)]
    if not ends[-1]:
        raise DataError(
            f"--valid-data: none of the texts has a whole chunk of {chunk_length} tokens, which is "
            "needed to find neighbors: give longer texts"
        )
    chunks = np.concatenate(
        [
            np.asarray(sample.tokens[: count * chunk_length], np.int64).reshape(-1, chunk_length)
            for sample, count in zip(prepared.samples, counts, strict=True)
        ]
    )
    retriever = open_retriever(config, loaded.tokenizer, device, embedder)
    neighbors = np.zeros((len(chunks), config.model.retro_num_neighbors), np.int64)
    local_rows = slice(*(len(chunks) * rank // world.size for rank in (world.rank, world.rank + 1)))
    if local_rows.start < local_rows.stop:
        neighbors[local_rows] = retriever.find(chunks[local_rows])
    all_neighbors = all_reduce(torch.from_numpy(neighbors).to(device.torch_device), world)
    return _Scored(
        prepared.samples,
        [*pairwise(ends)],
        NeighborArray(all_neighbors.cpu().numpy()),
        retriever.texts,
        prepared.summarize,
        f"{prepared.data}, {len(chunks):,} chunks with {neighbors.shape[1]} neighbors",
    )


def validation_samples(config: RunConfig, tokenizer: Tokenizer, layout: Layout) -> RetroDataset:
    """Build the validation samples for which the working folder was made. Collective.

    Args:
        config: The resolved evaluation, with --retro-workdir.
        tokenizer: The tokenizer of the model.
        layout: The processes. The first one writes missing indexes.

    Raises:
        ConfigError: The folder's `args.json` is missing, cannot be read or does not record the
            number of samples, or the folder has no validation samples.
        DataError: Data or a file of the folder is missing or damaged, or they do not match.
    """
    assert config.data.retro_workdir is not None, "a rule requires it"
    arguments = read_arguments(config.data.retro_workdir)
    count = _count_samples(config.data.retro_workdir, arguments)
    request = DataRequest.of(config, (0, count, 0), layout)
    dataset = build_retro_datasets(request, config.model, tokenizer).valid
    if not isinstance(dataset, RetroDataset):
        raise ConfigError(
            f"--retro-workdir {config.data.retro_workdir} was made without validation samples: "
            "make it with a split that has some, and --retro-gpt-eval-iters of at least 1"
        )
    return dataset


def _count_samples(workdir: str, arguments: dict[str, Any]) -> int:
    """Return the number of validation samples of the run for which the folder was made."""

    def read(name: str) -> int:
        value = arguments.get(name)
        if type(value) is not int:
            raise ConfigError(
                f"--retro-workdir {workdir}: {Path(workdir) / ARGUMENTS} lacks {name}, so the "
                "number of its validation samples is unknown: make the folder again with "
                "tools/retro/main.py"
            )
        return value

    batch = read("global_batch_size")
    by_samples = arguments.get("train_samples") is not None
    iterations = read("train_samples") // batch if by_samples else read("train_iters")
    evaluations = iterations // max(read("retro_gpt_eval_interval"), 1) + 1
    return evaluations * read("retro_gpt_eval_iters") * batch


def _neighbors(table: NeighborRows, texts: NeighborTexts, first: int, stop: int) -> Ids:
    """Return the tokens of the k neighbors of each of l chunks, `[l, k, r]`."""
    if first == stop:  # a text that is shorter than a chunk
        return np.empty((0, 1, 1), np.int64)
    return texts.tokens(table.rows(first, stop))
