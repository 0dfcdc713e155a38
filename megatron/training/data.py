"""Samples for this rank: how many a run needs, and micro-batches from any position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from megatron.config import RunConfig
from megatron.data.loader import build_loader
from megatron.data.samplers import build_sampler
from megatron.training.recipe import Batch, SampleCounts
from megatron.training.run import Run


def samples_needed(config: RunConfig, train_iterations: int) -> SampleCounts:
    """Training, validation and test samples of the whole run, as Megatron counts them."""
    batch = config.training.global_batch_size
    assert batch is not None
    evaluation = config.evaluation
    train = config.training.train_samples or train_iterations * batch
    evaluations = train_iterations // evaluation.eval_interval + 1
    return (
        train,
        evaluations * evaluation.eval_iters * batch,
        evaluation.eval_iters * batch,
    )


def batches_from(run: Run, dataset: Dataset[Any], *, consumed: int) -> Iterator[Batch]:
    """This rank's micro-batches after `consumed` samples of the global order."""
    sampler = build_sampler(
        run.config.data.dataloader_type or "single",
        total=len(dataset),  # type: ignore[arg-type]
        consumed=consumed,
        micro_batch=run.batches.micro_batch,
        rank=run.layout.data.rank,
        size=run.layout.data.size,
        sharding=run.config.data.data_sharding,
    )
    loader = build_loader(
        dataset,
        sampler,
        num_workers=run.config.data.num_workers,
        seed=run.config.training.seed,
        pin_memory=run.device.is_gpu,
    )
    return iter(loader)
