"""Batches: the samples of an update and of a whole run, and this rank's share of them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron.config import RunConfig
from megatron.config.run import evaluations_until, with_values
from megatron.config.training import TrainingConfig, read_batch_schedule
from megatron.data.loader import CyclicSampler, SingleSampler, build_loader
from megatron.data.sample import SampleDataset
from megatron.data.text_stream import extract_positions
from megatron.errors import DataError
from megatron.training.curriculum import Lengths, lengths_of, updates_of_length
from megatron.training.recipe import Batch, SampleCounts

if TYPE_CHECKING:
    from megatron.training.run import Progress, Run


class BatchStep(NamedTuple):
    """A global batch size, and the number of samples after which updates use it."""

    samples: int
    batch: int


def ramp_up(start: int, increment: int, samples: int, full: int) -> tuple[BatchStep, ...]:
    """Return the steps of --rampup-batch-size, spread evenly over the first samples.

    Args:
        start: The size of the first batch.
        increment: The number of samples that each step adds to the size.
        samples: The number of samples over which the batch grows.
        full: The size of the batch after that.
    """
    count = (full - start) // increment
    steps = [BatchStep(0, start)]
    for step in range(1, count + 1):
        # Megatron divides in floating point; doing the same makes every step fall on the same
        # update.
        first = max(0, step * samples // count - 1)
        while first <= samples and int(first / (samples / count)) < step:
            first += 1
        steps.append(BatchStep(first, start + step * increment))
    return tuple(steps)


@dataclass(frozen=True)
class BatchPlan:
    """The batch of every update of a run, as a function of the samples consumed before it.

    Attributes:
        micro_batch: The number of samples in one forward pass of one process.
        global_batch: The largest number of samples in one update over all processes.
        steps: The sizes of the batch in the course of the run, each with the number of samples
            after which updates use it (0 for the first). Empty for a constant batch.
        data_parallel: The number of processes that take different samples. Every batch divides
            evenly into one or more micro-batches per process.
        seq_length: The number of tokens in a sample.
        curriculum: The number of tokens of each sample that an update uses, or `None` if updates
            use whole samples.
    """

    micro_batch: int
    global_batch: int
    steps: tuple[BatchStep, ...] = ()
    data_parallel: int = 1
    seq_length: int = 1
    curriculum: Lengths | None = None

    def __post_init__(self) -> None:
        """Check that batches divide into micro-batches."""
        assert self.global_batch % self.samples_per_pass == 0, self

    @classmethod
    def from_config(cls, config: RunConfig, data_parallel: int) -> BatchPlan:
        """Return the plan that the flags describe. The rules have already checked the flags."""
        training, steps = config.training, tuple[BatchStep, ...]()
        if training.rampup_batch_size is not None:
            start, increment, samples = training.rampup_batch_size
            steps = ramp_up(start, increment, samples, training.global_batch_size)
        elif training.step_batch_size_schedule is not None:
            schedule = read_batch_schedule(training.step_batch_size_schedule)
            steps = tuple(BatchStep(t // config.data.seq_length, batch) for t, batch in schedule)
        return cls(
            training.micro_batch_size,
            training.global_batch_size,
            steps,
            data_parallel,
            config.data.seq_length,
            lengths_of(config),
        )

    @classmethod
    def for_evaluation(cls, config: RunConfig, data_parallel: int) -> BatchPlan:
        """Return the plan of an evaluation's batches, which always have the same size."""
        return cls(config.eval_micro_batch, config.eval_global_batch, data_parallel=data_parallel)

    @property
    def samples_per_pass(self) -> int:
        """The number of samples in one micro-batch over all data-parallel processes."""
        return self.micro_batch * self.data_parallel

    def global_batch_at(self, consumed_samples: int) -> int:
        """Return the number of samples in the update that follows `consumed_samples`."""
        return self._step_at(consumed_samples)[0]

    def micro_batches_at(self, consumed_samples: int) -> int:
        """Return the number of micro-batches per process in the update after `consumed_samples`."""
        return self.global_batch_at(consumed_samples) // self.samples_per_pass

    def length_at(self, iteration: int) -> int:
        """Return the sequence length of the update that follows `iteration` updates."""
        return self.seq_length if self.curriculum is None else self.curriculum.at(iteration + 1)

    def tokens_at(self, iteration: int, consumed_samples: int) -> int:
        """Return the number of tokens in the update after `iteration` updates.

        Args:
            iteration: The number of earlier updates.
            consumed_samples: The number of samples in these updates.
        """
        return self.global_batch_at(consumed_samples) * self.length_at(iteration)

    def iterations_of(self, training: TrainingConfig, start: Progress) -> int:
        """Return the number of updates in a run, including those before `start`.

        The number of tokens in earlier updates is taken from `start`, because these updates may
        have had other sequence lengths.

        Args:
            training: The flags that limit iterations, samples and tokens.
            start: The counters with which the run begins.
        """
        limits = [training.train_iters]
        if training.train_samples is not None:
            limits.append(self.iterations_for(training.train_samples))
        if training.train_tokens is not None:
            done = start.iteration, start.consumed_samples, start.consumed_tokens
            limits.append(self.iterations_for_tokens(training.train_tokens, *done))
        return min(limit for limit in limits if limit is not None)

    def in_iterations(self, config: RunConfig, samples: int) -> RunConfig:
        """Return a configuration with enough --train-iters to read at least `samples` samples."""
        iterations = self.iterations_for(samples + self.global_batch - 1)
        return with_values(config, {"training.train_iters": iterations})

    def iterations_for_tokens(
        self, train_tokens: int, iterations: int = 0, samples: int = 0, tokens: int = 0
    ) -> int:
        """Return the number of updates until at least `train_tokens` have been read.

        Args:
            train_tokens: The number of tokens.
            iterations: The number of updates already done.
            samples: The number of samples in these updates.
            tokens: The number of tokens in these updates.
        """
        while tokens < train_tokens:
            batch, updates = self._step_at(samples)
            update_tokens = self.tokens_at(iterations, samples)
            count = -(-(train_tokens - tokens) // update_tokens)
            if self.curriculum is not None:
                same_length = updates_of_length(self.curriculum, iterations + 1)
                count = count if same_length is None else min(count, same_length)
            count = min(count, updates or count)
            iterations, samples = iterations + count, samples + count * batch
            tokens += count * update_tokens
        return iterations

    def iterations_for(self, train_samples: int) -> int:
        """Return the number of whole updates in `train_samples`, excluding a partial last one."""
        iterations = consumed = 0
        while True:
            batch, updates = self._step_at(consumed)
            remaining = (train_samples - consumed) // batch
            if updates is None or remaining < updates:
                return iterations + remaining
            iterations, consumed = iterations + updates, consumed + updates * batch

    def _step_at(self, consumed: int) -> tuple[int, int | None]:
        """Return the size of the batch after `consumed` samples, and for how many updates it lasts.

        The second value is `None` if the size no longer changes.
        """
        if not self.steps:
            return self.global_batch, None
        index = bisect.bisect_right(self.steps, consumed, key=lambda step: step.samples)
        batch = self.steps[index - 1].batch
        if index == len(self.steps):
            return batch, None
        return batch, -(-(self.steps[index].samples - consumed) // batch)


def samples_needed(config: RunConfig, train_iterations: int, start: Progress) -> SampleCounts:
    """Return the numbers of training, validation and test samples of the run, as Megatron does.

    The training samples include those of earlier updates, whose batches may have been larger. With
    --full-validation, the number of validation samples is `None`: it depends on the data.

    Args:
        config: The run's configuration.
        train_iterations: The number of updates of the run.
        start: The counters with which the run begins.
    """
    batch, evaluation = config.training.global_batch_size, config.evaluation
    train = config.training.train_samples
    if train is None:
        remaining = train_iterations - start.iteration
        train = max(train_iterations * batch, start.consumed_samples + remaining * batch)
    evaluations = evaluation.count(train_iterations) + 1
    one_evaluation = evaluation.eval_iters * config.eval_global_batch
    validation = None if evaluation.full_validation else evaluations * one_evaluation
    return train, validation, one_evaluation


def evaluation_position(run: Run, iteration: int) -> int:
    """Return the number of validation samples consumed by evaluations up to an iteration.

    The result depends on the iteration and the flags alone, so a run resumed with the same flags
    evaluates on the samples that the uninterrupted run would have used. With --full-validation,
    every evaluation begins with the first sample.
    """
    if run.config.evaluation.full_validation:
        return 0
    done = evaluations_until(run.config, iteration)
    return done * run.config.evaluation.eval_iters * run.config.eval_global_batch


@dataclass(frozen=True)
class Share:
    """A replica's share of every global batch, if several jobs train one model (`quorum`).

    Attributes:
        index: The position of this replica among those that take part.
        count: The number of replicas that take part.
    """

    index: int = 0
    count: int = 1

    def of(self, micro_batches: int) -> range:
        """Return which of an update's micro-batches this replica computes."""
        return range(
            self.index * micro_batches // self.count, (self.index + 1) * micro_batches // self.count
        )


WHOLE = Share()


@dataclass(frozen=True)
class SharedSampler:
    """The micro-batches of a sampler that are in a replica's share of each update.

    Attributes:
        sampler: The sample indices of each micro-batch, as without other replicas.
        batches: The plan of the batches.
        consumed_samples: The number of samples before the first micro-batch.
        share: The replica's share.
    """

    sampler: Iterable[list[int]]
    batches: BatchPlan
    consumed_samples: int
    share: Share

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample indices of each micro-batch of this replica."""
        position, consumed = 0, self.consumed_samples
        count = self.batches.micro_batches_at(consumed)
        for indices in self.sampler:
            if position in self.share.of(count):
                yield indices
            position += 1
            if position == count:
                position, consumed = 0, consumed + self.batches.global_batch_at(consumed)
                count = self.batches.micro_batches_at(consumed)


def batches_from(
    run: Run,
    dataset: SampleDataset,
    *,
    consumed: int,
    micro_batch: int | None = None,
    order: str | None = None,
    share: Share = WHOLE,
) -> Iterator[Batch]:
    """Yield this rank's micro-batches, beginning at a position in the global sample order.

    Args:
        run: The run.
        dataset: The samples.
        consumed: The number of samples that all ranks together have consumed.
        micro_batch: The number of samples in a micro-batch; `None` means --micro-batch-size.
        order: The sample order, a value of --dataloader-type; `None` means the value of the flag.
        share: The share of each update's micro-batches, if they are training batches.

    Raises:
        DataError: The dataset has no further micro-batch.
    """
    axis, options = run.layout.data, run.config.data
    micro_batch = micro_batch or run.batches.micro_batch
    arguments = (len(dataset), consumed, micro_batch, axis.rank, axis.size)
    sampler: SingleSampler | CyclicSampler = SingleSampler(*arguments)
    if (order or options.dataloader_type) == "cyclic":
        sampler = CyclicSampler(*arguments, options.data_sharding)
    shared = SharedSampler(sampler, run.batches, consumed, share) if share.count > 1 else sampler
    return _load(run.config, dataset, shared, pin_memory=run.device.is_gpu)


def _load(
    config: RunConfig, dataset: SampleDataset, sampler: Iterable[list[int]], *, pin_memory: bool
) -> Iterator[Batch]:
    """Yield batches without a reference to the run, so that a finished run can be freed."""
    for batch in build_loader(
        dataset,
        sampler,
        num_workers=config.data.num_workers,
        seed=config.training.seed,
        pin_memory=pin_memory,
    ):
        yield extract_positions(batch, dataset)
    lengths = {
        "--train-iters": config.training.train_iters,
        "--train-samples": config.training.train_samples,
        "--train-tokens": config.training.train_tokens,
    }
    given = " ".join(f"{flag} {length}" for flag, length in lengths.items() if length is not None)
    raise DataError(f"the dataset of {len(dataset)} samples is exhausted: it was built for {given}")
