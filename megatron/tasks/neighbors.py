"""The perplexity of a Retro with the right neighbors, with those of other chunks, and without any.

The samples are the validation samples of the working folder, whose neighbors are known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.command import say
from megatron.config import ParsedRun, RunConfig
from megatron.config.retro import ARGUMENTS, read_arguments
from megatron.data.datasets import DataRequest
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.inference.load import load_gpt
from megatron.inference.score import Sample, Scorer
from megatron.parallel.layout import Layout
from megatron.retro.dataset import (
    NeighborRows,
    NoNeighbors,
    RetroDataset,
    ShuffledNeighbors,
    build_retro_datasets,
)
from megatron.tasks.evaluation import publish, say_start
from megatron.tasks.results import Numbers, TaskProgress, megatron_line
from megatron.tokenizer import Tokenizer

TASK = "PERPLEXITY"
_EMPTY = ", no neighbors"
# What the model reads, by the words that are added to a number's name.
_READ: dict[str, Callable[[NeighborRows], NeighborRows]] = {
    "": lambda table: table,
    ", shuffled neighbors": ShuffledNeighbors,
    _EMPTY: NoNeighbors,
}


def evaluate_neighbors(parsed: ParsedRun, device: Device, layout: Layout) -> Numbers:
    """Score the samples three times and report. Return the numbers on all ranks. Collective.

    Raises:
        UserError: The checkpoint or the working folder must be changed.
    """
    config = parsed.config
    options, own = parsed.extra
    assert config.checkpoint.load is not None, "a rule requires it"
    loaded = load_gpt(
        config.checkpoint.load, device, layout, config=config, row_by_row=False, kinds=("retro",)
    )
    dataset = validation_samples(config, loaded.tokenizer, layout)
    count = min(own.retro_eval_samples or len(dataset), len(dataset))
    length = config.data.seq_length
    data = (
        f"{config.data.retro_workdir}: {count:,} of {len(dataset):,} validation samples, "
        f"{count * dataset.per_sample:,} chunks with {config.model.retro_num_neighbors} neighbors"
    )
    say_start(TASK, loaded, device, data)
    scorer = Scorer(loaded, device, config.training.micro_batch_size)
    is_main = layout.world.rank == 0
    started = time.monotonic()
    numbers: Numbers = {}
    for name, read in _READ.items():
        if is_main:
            say(f"scoring with {name.strip(', ') or 'the right neighbors'} ...")
        texts = dataset.texts if name != _EMPTY else replace(dataset.texts, compatible=False)
        of_these = replace(dataset, table=read(dataset.table), texts=texts)
        samples = [_sample(of_these, i) for i in range(count)]
        progress = TaskProgress(shown=is_main, log_interval=config.logging.log_interval)
        total = -sum(score.log_probability for score in scorer.score(samples, progress))
        loss = total / (count * length)
        numbers[f"loss{name}"] = loss
        numbers[f"perplexity{name}"] = math.exp(loss) if loss < 700 else math.inf
    seconds = time.monotonic() - started
    found = dataset.table.rows(0, count * dataset.per_sample)
    numbers["neighbors found"] = float((found >= 0).mean())
    numbers["tokens"] = count * length
    if is_main:
        say(megatron_line(TASK, {"loss": "avg loss", "perplexity": "ppl"}, numbers))
    details = {"options": asdict(own), "seconds": round(seconds, 3)}
    publish(TASK, loaded, options, numbers, details)
    return numbers


def validation_samples(config: RunConfig, tokenizer: Tokenizer, layout: Layout) -> RetroDataset:
    """Build the validation samples that the working folder was made for. Collective.

    Args:
        config: The resolved evaluation, with --retro-workdir.
        tokenizer: The tokenizer of the model.
        layout: The processes, the first of which writes indices that are missing.

    Raises:
        ConfigError: The folder does not say how many samples it was made for, or it has none.
        DataError: Data or a file of the folder is missing or damaged, or they do not fit together.
    """
    assert config.data.retro_workdir is not None, "a rule requires it"
    told = read_arguments(config.data.retro_workdir)
    request = DataRequest(
        config.data,
        config.training.seed,
        (0, _count_samples(config.data.retro_workdir, told), 0),
        is_builder=layout.world.rank == 0,
        barrier=layout.wait_for_all,
    )
    dataset = build_retro_datasets(request, config.model, tokenizer, batch_size=1).valid
    if not isinstance(dataset, RetroDataset):
        raise ConfigError(
            f"--retro-workdir {config.data.retro_workdir} was made without validation samples: "
            "make it with a split that has some, and --retro-gpt-eval-iters of at least 1"
        )
    return dataset


def _count_samples(workdir: str, told: dict[str, Any]) -> int:
    """Return the number of validation samples of the run that the folder was made for."""

    def read(name: str) -> int:
        value = told.get(name)
        if type(value) is not int:
            raise ConfigError(
                f"--retro-workdir {workdir}: {Path(workdir) / ARGUMENTS} lacks {name}, so the "
                "number of its validation samples is unknown: make the folder again with "
                "tools/retro/main.py"
            )
        return value

    batch = read("global_batch_size")
    by_samples = told.get("train_samples") is not None
    iterations = read("train_samples") // batch if by_samples else read("train_iters")
    evaluations = iterations // max(read("retro_gpt_eval_interval"), 1) + 1
    return evaluations * read("retro_gpt_eval_iters") * batch


def _sample(dataset: RetroDataset, i: int) -> Sample:
    text = dataset.samples[i]["text"]
    return Sample(text, len(text) - 1, partial(_neighbors, dataset, i))


def _neighbors(dataset: RetroDataset, i: int) -> Any:
    first = i * dataset.per_sample
    return dataset.texts.tokens(dataset.table.rows(first, first + dataset.per_sample))
