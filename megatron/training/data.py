"""Samples for this rank: how many a run needs, and micro-batches from any position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.config import RunConfig
from megatron.data.loader import CyclicSampler, SingleSampler, build_loader
from megatron.data.sample import SampleDataset
from megatron.errors import DataError
from megatron.training.recipe import Batch, SampleCounts
from megatron.training.run import Run


def samples_needed(config: RunConfig, train_iterations: int) -> SampleCounts:
    """Training, validation and test samples of the whole run, as Megatron counts them."""
    batch, evaluation = config.training.global_batch_size, config.evaluation
    train = config.training.train_samples or train_iterations * batch
    evaluations = train_iterations // evaluation.eval_interval + 1
    one_evaluation = evaluation.eval_iters * batch
    return train, evaluations * one_evaluation, one_evaluation


def batches_from(run: Run, dataset: SampleDataset, *, consumed: int) -> Iterator[Batch]:
    """This rank's micro-batches after `consumed` samples of the global order.

    Raises:
        DataError: once the dataset has no further micro-batch.
    """
    place = {
        "total_samples": len(dataset),
        "consumed_samples": consumed,
        "micro_batch": run.batches.micro_batch,
        "rank": run.layout.data.rank,
        "size": run.layout.data.size,
    }
    sampler: SingleSampler | CyclicSampler = SingleSampler(**place)
    if run.config.data.dataloader_type == "cyclic":
        sampler = CyclicSampler(**place, data_sharding=run.config.data.data_sharding)
    return _load(run.config, dataset, sampler, pin_memory=run.device.is_gpu)


def _load(
    config: RunConfig,
    dataset: SampleDataset,
    sampler: Iterable[list[int]],
    *,
    pin_memory: bool,
) -> Iterator[Batch]:
    """Does not hold the run, which holds this: a run that is done with is freed at once."""
    yield from build_loader(
        dataset,
        sampler,
        num_workers=config.data.num_workers,
        seed=config.training.seed,
        pin_memory=pin_memory,
    )
    raise DataError(
        f"the dataset of {len(dataset)} samples has ended: it was built for --train-iters "
        f"{config.training.train_iters}, --train-samples {config.training.train_samples}"
    )
