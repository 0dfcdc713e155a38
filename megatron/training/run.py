"""The components of one training run (`Run`), and its counters (`Progress`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from dataclasses import dataclass

from torch import nn

from megatron.config import RunConfig
from megatron.data.datasets import Datasets
from megatron.device import Device
from megatron.models.plan import ModelPlan
from megatron.optimizer.norms import parameters_norm
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.schedule import Schedules
from megatron.parallel.fp8 import AmaxHistory
from megatron.parallel.layout import Layout
from megatron.parallel.pipeline.p2p import PipelineChannel
from megatron.parallel.pipeline.weight_gradients import WeightGradientQueue
from megatron.parallel.registry import LayerRegistry
from megatron.parallel.replicas import Gradients
from megatron.parallel.tied import Tie
from megatron.processes.ending import ExitRequest
from megatron.tokenizer.base import Tokenizer
from megatron.training.batches import BatchPlan
from megatron.training.forward import TrainingForward
from megatron.training.quorum import Quorum
from megatron.training.recipe import Batch, Recipe
from megatron.training.run_record import RunRecord
from megatron.training.spikes import SpikeWatch
from megatron.training.timers import OperationClock, SaveClock, Timers


@dataclass
class Progress:
    """Counters that are saved in a checkpoint.

    Attributes:
        iteration: The number of updates tried so far, including skipped iterations.
        consumed_samples: The number of training samples read so far: the position in the sample
            order.
        consumed_tokens: The number of tokens in these samples that were used.
        skipped_samples: The number of samples that were passed over without an update, by
            --iterations-to-skip or --on-spike rewind.
        scheduled_samples: The number of samples in successful updates: the position in the
            schedules.
        dropout_seed: The seed that, with the position in the sample order, determines dropout
            masks.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_samples: int = 0
    scheduled_samples: int = 0
    dropout_seed: int = 0


@dataclass
class ParallelModel:
    """The parts of the model on this process and everything that trains them.

    Attributes:
        plan: The plan of the whole network.
        parts: The parts of the model.
        layers: The registry of the parts' layers.
        ties: The parameters that other pipeline stages also hold.
        amax_history: The amaxes that set the scales of fp8 layers; empty with current scaling.
        weight_gradients: The queue in which a zero-bubble schedule defers weight gradients.
        gradients: The gradients of the parts.
        forward: A function that runs a micro-batch through a part in training.
        optimizer: The optimizer that turns gradients into new weights.
    """

    plan: ModelPlan
    parts: list[nn.Module]
    layers: LayerRegistry
    ties: list[Tie]
    amax_history: AmaxHistory
    weight_gradients: WeightGradientQueue
    gradients: Gradients
    forward: TrainingForward
    optimizer: Optimizer


@dataclass(kw_only=True)
class Run(ParallelModel):
    """Everything that a step, a callback or a checkpoint needs, built once by `build.build_run`.

    Attributes:
        config: The run's configuration.
        recipe: The model, data and loss of the script that trains.
        device: The device on which this process computes.
        layout: The grid of processes as this process sees it.
        tokenizer: The run's tokenizer.
        schedules: The schedules of learning rate and weight decay.
        channel: The channel to the neighboring pipeline stages; `None` without a pipeline.
        batches: The plan of the batches: the number and the length of the samples in each update.
        train_iterations: The number of iterations of the run, including those before a restart.
        datasets: The training, validation and test datasets.
        exit: A request to exit early, because of a signal, a time limit, a file, or closed output.
        save_clock: The clock of --save-interval-in-mins.
        timers: The timers of --timing-log-level, with the clock of --log-straggler.
        spikes: The limits for losses and gradient norms; `None` with --on-spike none.
        operation_clock: The clock of --log-pipeline-bubble, if given.
        progress: The counters that checkpoints store.
        train_batches: This rank's micro-batches, from its position in the sample order.
        pretrained: The checkpoint of a different network that supplied the initial weights, if any.
        save_at: Iterations after which to save, regardless of the interval, because an epoch ends.
        corpus: The fingerprint of the training data; `None` on ranks other than 0, with
            --skip-train, and if there is no corpus (for example, if tokens are generated).
        record: The run's identity, and when it was first started; `None` without --save.
        useful_seconds: The seconds spent in the iterations so far. An iteration that was repeated
            after a restart counts once.
        was_resumed: Whether this start continues an earlier one.
        quorum: The other replicas of the model, with --torchft-lighthouse.
    """

    config: RunConfig
    recipe: Recipe
    device: Device
    layout: Layout
    tokenizer: Tokenizer
    schedules: Schedules
    channel: PipelineChannel | None
    batches: BatchPlan
    train_iterations: int
    datasets: Datasets
    exit: ExitRequest
    save_clock: SaveClock
    timers: Timers
    spikes: SpikeWatch | None
    operation_clock: OperationClock | None
    progress: Progress
    train_batches: Iterator[Batch] = iter(())
    pretrained: str | None = None
    save_at: Set[int] = frozenset()
    corpus: str | None = None
    record: RunRecord | None = None
    quorum: Quorum | None = None
    useful_seconds: float = 0.0
    was_resumed: bool = False

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all parts with their global names."""
        for part in self.parts:
            yield from part.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all parts."""
        return (parameter for _, parameter in self.named_parameters())

    def parameters_norm(self) -> float:
        """Return the L2 norm of all parameters of the model. Collective; waits for the device."""
        self.optimizer.wait_for_weights()
        shard = self.gradients.part if self.gradients.shares_weights else None
        return parameters_norm(self.parameters(), self.layout, shard=shard)

    @property
    def next_length(self) -> int | None:
        """The sequence length of the next update in tokens; `None` without a curriculum."""
        has_curriculum = self.batches.curriculum is not None
        return self.batches.length_at(self.progress.iteration) if has_curriculum else None

    @property
    def schedule_position(self) -> int:
        """The position of the next update in the schedules, in samples or tokens."""
        if self.schedules.learning_rate.in_tokens:
            return self.progress.consumed_tokens
        return self.progress.scheduled_samples

    @property
    def goodput(self) -> float | None:
        """The fraction of the time since the first start that the retained iterations took.

        It is `None` without --save, and if this machine's clock is behind that of the machine on
        which the run was first started.
        """
        if self.record is None:
            return None
        elapsed = time.time() - self.record.began
        return (
            None if elapsed <= 0 or elapsed < self.useful_seconds else self.useful_seconds / elapsed
        )

    @property
    def is_log_rank(self) -> bool:
        """Whether this is the last rank, which writes the log because it has the loss."""
        return self.layout.world.is_last

    @property
    def skips_next(self) -> bool:
        """Whether --iterations-to-skip includes the next iteration."""
        return self.progress.iteration in (self.config.training.iterations_to_skip or ())

    @property
    def finished(self) -> bool:
        """Whether all requested training is done. A final partial batch is not trained on."""
        training, progress = self.config.training, self.progress
        tokens, samples = training.train_tokens, training.train_samples
        if self.config.data.retro_cyclic_train_iters is not None:
            return progress.iteration >= self.train_iterations
        if tokens is not None and progress.consumed_tokens >= tokens:
            return True
        if samples is not None:
            batch = self.batches.global_batch_at(progress.consumed_samples)
            return progress.consumed_samples + batch > samples
        if training.train_iters is None:
            return False  # only the number of tokens ends the run
        return progress.iteration >= self.train_iterations
