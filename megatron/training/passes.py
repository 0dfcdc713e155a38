"""Forward and backward passes of micro-batches through this process's model parts.

A pipeline schedule orders the passes. A model that is not split is a pipeline of one stage, with
the same schedule and executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache, partial

import torch
from torch import Tensor

from megatron.config import RunConfig
from megatron.data.gpt import shorten
from megatron.parallel.layout import Layout
from megatron.parallel.pipeline import schedule as pipeline
from megatron.parallel.pipeline.executor import ForwardStep, completing_operations, run_schedule
from megatron.parallel.pipeline.schedule import Operation, Schedule
from megatron.parallel.pipeline.weight_gradients import wave_of
from megatron.parallel.random import derive_seed, micro_batch_seed
from megatron.training.forward import DirectForward, TrainingForward
from megatron.training.recipe import Batch
from megatron.training.run import Run

_BACKWARD = {"backward", "backward_input", "backward_weight"}


@lru_cache(maxsize=8)
def _schedule(
    kind: pipeline.ScheduleKind, stages: int, chunks: int, micro_batches: int, trains: bool
) -> Schedule:
    schedule = pipeline.make_schedule(kind, stages, chunks, micro_batches)
    return schedule if trains else pipeline.forward_only(schedule)


def schedule_of(run: Run, micro_batches: int, *, trains: bool = True) -> Schedule:
    """Return the operations of every stage for `micro_batches` micro-batches.

    Args:
        run: The run.
        micro_batches: The number of micro-batches.
        trains: Whether the schedule includes backward passes.
    """
    kind = pipeline.schedule_kind(run.config.parallel, len(run.parts))
    return _schedule(kind, run.layout.pipeline.size, len(run.parts), micro_batches, trains)


def message_shape(
    config: RunConfig, layout: Layout, tokens: int, sequences: int
) -> tuple[int, int, int]:
    """Return the shape of a message between pipeline stages: this rank's shard of `[s, b, h]`.

    Retro's messages also contain the hidden states of all neighbors.

    Args:
        config: The run's configuration.
        layout: The grid of processes as this process sees it.
        tokens: The number of tokens that the model reads from a sample.
        sequences: The number of sequences in a sample.
    """
    ranks = layout.context.size * layout.sequence.size
    length = (tokens + config.model.neighbor_tokens(tokens)) // ranks
    return length, config.training.micro_batch_size * sequences, config.model.hidden_size


class Passes:
    """The forward and backward passes of an update, or the forward passes of an evaluation batch.

    Args:
        run: The model's parts and their settings.
        batches: This rank's micro-batches. `count` of them are used.
        count: The number of micro-batches.
        first_sample: The index of the first sample in the sample order; `None` means that
            dropout is not seeded.
        scale: A function that scales the summed losses before the backward pass.
        forward: A replacement for the recipe's forward that computes something other than losses,
            or that computes the losses in another way (`forward.TrainingForward`).
        length: The number of tokens to use from each sample; `None` means all.
        micro_batch: The number of samples in a micro-batch; `None` means --micro-batch-size.
        counts_labels: Whether to count labels even without --calculate-per-token-loss.

    Attributes:
        losses: The losses by log name, one value per micro-batch; empty if the last part of the
            model is on another process.
        sample_ids: The sample ids, one list per micro-batch.
        counts_labels: Whether the labels that count in the loss are counted, which gives each loss
            its weight.
        counted: If `counts_labels` is true, the number of these labels in each micro-batch, as fp64
            scalars on the device, even if the last part of the model is on another process;
            otherwise empty.
        labels: The number of all labels in a micro-batch, whether they count or not; 0 until it is
            known, and if `counts_labels` is false.
        micro_batches: In updates with --rerun-mode, the micro-batches, which `repeated` needs;
            otherwise empty.
        fingerprints: In updates with --rerun-mode, a fingerprint of each output, by part of the
            model: the sum of squares of hidden states, or the square of the summed absolute losses.
    """

    def __init__(
        self,
        run: Run,
        batches: Iterator[Batch],
        count: int,
        *,
        first_sample: int | None = None,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
        forward: TrainingForward | None = None,
        length: int | None = None,
        micro_batch: int | None = None,
        counts_labels: bool = False,
    ) -> None:
        """Prepare to take micro-batches."""
        self.losses: dict[str, list[Tensor]] = {}
        self.sample_ids: list[list[int]] = []
        self.counts_labels = counts_labels or run.config.training.calculate_per_token_loss
        self.counted: list[Tensor] = []
        self.labels = 0
        self.micro_batches: list[Batch] = []
        self.fingerprints: dict[int, list[Tensor]] = {}
        is_update = first_sample is not None
        self._records = is_update and run.config.reliability.rerun_mode != "disabled"
        self._run, self._batches, self._count = run, batches, count
        self._first_sample, self._scale = first_sample, scale
        self._forward = forward or DirectForward(run.recipe.forward)
        self._length, self._micro_batch = length, micro_batch or run.batches.micro_batch
        self._loaded: dict[int, Batch] = {}
        self._first_output: Tensor | None = None

    def repeated(self, scale: Callable[[Tensor], Tensor]) -> Passes:
        """Return the same passes, to be run again after the gradients have been zeroed.

        Args:
            scale: A function that scales the summed losses before the backward pass.
        """
        assert self._records, "--rerun-mode keeps the micro-batches"
        return Passes(
            self._run,
            iter(self.micro_batches),
            self._count,
            first_sample=self._first_sample,
            scale=scale,
            forward=self._forward,
            length=self._length,
        )

    def begin(self) -> None:
        """Run the first forward pass ahead of time. This process must hold the whole model."""
        journal = self._run.layout.journal
        with torch.enable_grad(), self._run.timers.measure("forward-backward"):
            journal.enter("first forward pass, ahead of time")
            self._first_output = self._step(0, 0, None)
            journal.enter("end of the pass")

    def forward_backward(self) -> None:
        """Run all passes, and accumulate the gradients. Collective over the pipeline."""
        operations = schedule_of(self._run, self._count)[self._run.layout.pipeline.rank]
        last = set(completing_operations(operations).values())
        clock = self._run.operation_clock
        if clock is not None:
            clock.start()
        with ExitStack() as contexts:  # the context managers around the current operation

            def before(operation: Operation) -> None:
                self._run.layout.journal.enter(operation)
                contexts.close()
                if clock is not None:
                    clock.before(operation)
                if operation.kind not in _BACKWARD:
                    return
                self._scale_router_losses(operation.micro_batch)
                contexts.enter_context(self._run.timers.measure("backward-compute", level=2))
                contexts.enter_context(
                    self._run.gradients.micro_batch(
                        is_last=operation in last, wave=wave_of(operation)
                    )
                )

            self._run_operations(operations, before)
        self._run.layout.journal.enter("end of the passes")
        if clock is not None:
            clock.stop()

    def forward(self) -> None:
        """Compute only the losses. Collective over the pipeline."""
        layout, schedule = self._run.layout, schedule_of(self._run, self._count, trains=False)
        self._run_operations(schedule[layout.pipeline.rank], layout.journal.enter)

    def _run_operations(
        self, operations: pipeline.Operations, before: Callable[[Operation], None]
    ) -> None:
        run = self._run
        steps: list[ForwardStep] = [partial(self._step, chunk) for chunk in range(len(run.parts))]
        channel = run.channel
        if channel is not None and self._length is not None:
            shape = message_shape(run.config, run.layout, self._length, run.recipe.head.sequences)
            channel = channel.with_shapes(lambda micro_batch: shape)
        if channel is not None:
            channel = channel.with_samples(self._micro_batch, run.batches.micro_batch)
        # The first passes load kernels, and so may all passes of a mixture, because the kernel of a
        # product depends on how many tokens an expert gets.
        is_new = channel is not None and channel.is_first_use(0)
        run_schedule(
            operations,
            steps,
            channel,
            weight_gradients=run.weight_gradients,
            before=before,
            ahead=not is_new and not run.config.model.num_experts,
        )

    def _step(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Run one part's forward pass, and return hidden states or the scaled loss."""
        if self._first_output is not None:
            output, self._first_output = self._first_output, None
            return output
        run = self._run
        batch = self._batch(micro_batch, is_last_use=chunk == len(run.parts) - 1)
        self._seed(chunk, micro_batch)
        with run.timers.measure("forward-compute", level=2):
            inputs = (batch, hidden, run.config, run.tokenizer, run.layout)
            is_last = micro_batch == self._count - 1
            result = self._forward(run.parts[chunk], *inputs, is_last=is_last)
        if self._records:
            outputs = [result] if isinstance(result, Tensor) else list(result.values())
            with torch.no_grad():
                norms = [torch.linalg.vector_norm(x.detach(), dtype=torch.float32) for x in outputs]
                part = chunk * run.layout.pipeline.size + run.layout.pipeline.rank
                self.fingerprints.setdefault(part, []).append(torch.stack(norms).sum().square())
        if isinstance(result, Tensor):
            return result
        return self._record(result, micro_batch)

    def _record(self, terms: Mapping[str, Tensor], micro_batch: int) -> Tensor:
        for name, value in terms.items():
            self.losses.setdefault(name, []).append(value.detach())
        loss = torch.stack(list(terms.values())).sum()
        if self.counted:
            loss = loss * (self.counted[micro_batch] / self.labels).float()
        return self._scale(loss / self._count)

    def _scale_router_losses(self, micro_batch: int) -> None:
        """Make the backward pass scale the router losses as it scales this micro-batch's loss."""
        routers = self._run.layers.routers
        if routers.loss_scale is None:
            return
        weight = torch.ones_like(routers.loss_scale)
        if self.counted:
            weight = (self.counted[micro_batch] / self.labels).float()
        routers.loss_scale.copy_(self._scale(weight / self._count))

    @property
    def weights(self) -> Tensor | None:
        """The fraction of each micro-batch's labels that count in the loss, `[micro-batches]` fp32.

        It is `None` if labels are not counted, so that all micro-batches have the same weight.
        Otherwise each loss was multiplied by its fraction.
        """
        return (torch.stack(self.counted) / self.labels).float() if self.counted else None

    def _seed(self, chunk: int, micro_batch: int) -> None:
        """Seed dropout by sample, model part and context rank, regardless of the order."""
        if self._first_sample is None:
            return
        run = self._run
        first = self._first_sample + micro_batch * run.batches.samples_per_pass
        first += run.layout.data.rank * run.batches.micro_batch
        seed = micro_batch_seed(run.progress.dropout_seed, first)
        run.layers.routers.seed = seed
        part = chunk * run.layout.pipeline.size + run.layout.pipeline.rank
        position = (part, run.layout.context.rank)
        run.device.seed(derive_seed(seed, "place", *position) if any(position) else seed)

    def _batch(self, micro_batch: int, *, is_last_use: bool) -> Batch:
        """Return a micro-batch on the device, and release it after its last use on this process."""
        while len(self.sample_ids) <= micro_batch:
            loading = f"loading of micro-batch {len(self.sample_ids)}"
            with (
                self._run.timers.measure("batch-generator", level=2),
                self._run.layout.journal.inside(loading),
            ):
                batch = next(self._batches)
            if self._records:
                self.micro_batches.append(batch)
            target = self._run.device.torch_device
            batch = {
                name: value if name == "id" else value.to(target, non_blocking=True)
                for name, value in batch.items()
            }
            if self._length is not None:
                batch = shorten(batch, self._length)
            if self.counts_labels:
                # Every process counts labels, because each divides its gradients by the total.
                mask = self._run.recipe.loss_mask(batch, self._run.config, self._run.tokenizer)
                self.labels = mask.numel()
                self.counted.append(mask.sum(dtype=torch.float64))
            self._loaded[len(self.sample_ids)] = batch
            self.sample_ids.append(batch["id"].tolist())
        return self._loaded.pop(micro_batch) if is_last_use else self._loaded[micro_batch]
