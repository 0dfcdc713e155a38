"""One update: run micro-batches forward and backward, reduce, clip, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.command import print_line
from megatron.device import AsyncRead
from megatron.models.arithmetic import flops_per_token
from megatron.optimizer.optimizer import StepResult
from megatron.parallel.collectives import all_reduce
from megatron.training.batches import WHOLE
from megatron.training.expert_load import (
    ExpertLoad,
    expert_load_part,
    local_mixtures,
    mixtures_of,
)
from megatron.training.log_line import skipped_line
from megatron.training.passes import Passes
from megatron.training.recipe import ReportsMeans
from megatron.training.rerun import Rerun, Reruns
from megatron.training.run import Run
from megatron.training.spikes import NORM

_MIN_SHARE = 1e-30  # replaces a divisor of 0: if no label counts, gradients are 0 and must stay 0


@dataclass(frozen=True)
class UpdateResult(StepResult):
    """The part of an update's outcome that the host reads from the device.

    `found_nonfinite` is also true if a loss of the global batch is not finite.

    Attributes:
        losses: The losses of the global batch, by log name: means over micro-batches or, with
            --calculate-per-token-loss, over all labels that count. Losses of expert routers are
            means over micro-batches and mixture layers.
        layer_losses: The losses of each layer's expert router, by TensorBoard tag, with
            --moe-per-layer-logging; otherwise empty.
        exit_requested: Whether some rank asked to exit.
        save_due: Whether a checkpoint is due on some rank (`--save-interval-in-mins`).
        ordinary: Whether each micro-batch of this rank had a finite loss that is not a spike.
        expert_load: The load of the experts since the last log line; `None` between log lines, and
            without mixtures of experts.
    """

    losses: dict[str, float]
    layer_losses: dict[str, float]
    exit_requested: bool
    save_due: bool
    ordinary: list[bool]
    expert_load: ExpertLoad | None


@dataclass(frozen=True)
class StepOutcome(UpdateResult):
    """The outcome of one update, the same on every rank except for `sample_ids` and `ordinary`.

    Attributes:
        samples: The size of the global batch.
        tokens: The number of tokens that the model read, including padding. Of several replicas
            with --torchft-lighthouse, this one's.
        flops: The floating-point operations on these tokens in the whole model.
        length: The sequence length that the curriculum chose; `None` without a curriculum.
        loss_scale: The factor by which the loss was multiplied.
        spike: A description of the values that exceed their limits, if `found_spike`; otherwise
            empty.
        sample_ids: The sample ids of this rank, one list per micro-batch.
        rerun: The result of the second computation, if --rerun-mode required one.
    """

    samples: int
    tokens: int
    flops: float
    length: int | None
    loss_scale: float
    spike: str
    sample_ids: list[list[int]]
    rerun: Rerun | None = None


class Updates:
    """The sequence of updates in a run.

    Nothing in an update waits for the device except its end, where the host reads the result. The
    device would then be idle until the host has begun the next update: 7 of 315 ms with a 1.7B GPT
    on an H200. The next update's first forward pass is therefore queued before the wait. It depends
    only on the weights, which are final by then, whether this update was applied or skipped.
    """

    def __init__(self, run: Run) -> None:
        """Create the sequence, with no pass in progress."""
        self._run = run
        self._next: Passes | None = None
        mode = run.config.reliability.rerun_mode
        self._reports = mode == "report_stats"
        self._reruns = None if mode == "disabled" else Reruns(run, partial(_gradients_of, run))
        self._flops_per_token: dict[int, int] = {}  # by sequence length

    def make(self, *, look_ahead: bool) -> StepOutcome:
        """Consume one global batch and update the parameters. Collective.

        Args:
            look_ahead: Whether the next update may begin before this one's result is known.
        """
        while True:
            if self._run.quorum is not None:
                self._run.quorum.begin()
            outcome = self._try(look_ahead=look_ahead)
            if outcome is not None:
                return outcome

    def _try(self, *, look_ahead: bool) -> StepOutcome | None:
        """Do the work of `make`, or return `None` if the update must be computed again.

        Weights, optimizer states and counters have not changed then.
        """
        run, progress = self._run, self._run.progress
        journal = run.layout.journal
        journal.iteration = progress.iteration + 1
        samples = run.batches.global_batch_at(progress.consumed_samples)
        used_tokens = run.batches.tokens_at(progress.iteration, progress.consumed_samples)
        length = run.next_length
        loss_scale = run.optimizer.loss_scale
        passes = self._take_passes()
        with run.timers.measure("forward-backward"):
            passes.forward_backward()
        journal.enter("reduction of the gradients")
        with run.timers.measure("all-grads-sync"):
            reduce_gradients(run)
        share = None
        if run.config.training.calculate_per_token_loss:
            journal.enter("count of the tokens")
            share = counted_share(passes, run)
        if run.amax_history.layers:
            # This comes first: weights may be cast for the next update before they are gathered,
            # and the forward pass needs the scales before it needs the weights.
            journal.enter("update of the fp8 scales")
            run.amax_history.update(progress.iteration + 1)
        journal.enter("update of the routers' biases")
        run.layers.routers.update_biases(run.layout)
        journal.enter("reduction of the losses")
        reader = _OutcomeReader(run, passes)
        if run.quorum is not None and not run.quorum.averages(_averaged(run, reader)):
            return None
        journal.enter("optimizer step")
        with run.timers.measure("optimizer"):
            step_values = run.optimizer.begin_step(
                lr=run.schedules.learning_rate.at(run.schedule_position),
                weight_decay=run.schedules.weight_decay.at(run.schedule_position),
                decoupled_lr=run.schedules.decoupled_at(run.schedule_position),
                divisor=share,
                norm_limit=math.inf if run.spikes is None else run.spikes.limit(NORM),
                loss_is_spike=reader.loss_is_spike(),
            )
        run.layers.forget_weights()
        if run.timers.sections is not None:
            run.timers.sections.cut()
        reader.start(step_values)
        progress.iteration += 1
        progress.consumed_samples += samples
        progress.consumed_tokens += used_tokens
        if look_ahead and _may_look_ahead(run):
            self._begin_next()
        journal.enter("end of the iteration")
        result = reader.wait()
        if not all(map(math.isfinite, result.losses.values())):
            # The loss itself is not finite, so the loss scale is not the cause.
            result = replace(result, found_nonfinite=True, overflow=False)
        if result.applied:
            progress.scheduled_samples += samples
        spike = _watch_spikes(run, result)
        rerun = self._compare(result)
        data = run.config.data
        seq_length = length or data.seq_length
        own_samples = len(passes.sample_ids) * run.batches.samples_per_pass
        read_tokens = own_samples * run.recipe.head.sequences * (seq_length + data.decoder_tokens)
        return StepOutcome(
            **vars(result),
            samples=samples,
            tokens=read_tokens,
            flops=read_tokens * self._flops_of_token(seq_length),
            length=length,
            loss_scale=loss_scale,
            spike=spike,
            sample_ids=passes.sample_ids,
            rerun=rerun,
        )

    def _begin_next(self) -> None:
        """Queue the first forward pass of the next update."""
        run, journal = self._run, self._run.layout.journal
        journal.iteration = run.progress.iteration + 1
        self._next = _next_passes(run)
        self._next.begin()
        journal.iteration = run.progress.iteration

    def _take_passes(self) -> Passes:
        """Return the passes of this update, which may have begun. Collective."""
        passes, self._next = self._next or _next_passes(self._run), None
        if self._reruns is None:
            return passes
        self._reruns.begin(passes)
        return self._reruns.compute_first(passes) if self._reports else passes

    def _compare(self, result: UpdateResult) -> Rerun | None:
        """Compute the update again if its result is suspicious. Collective."""
        if self._reruns is None:
            return None
        if self._reports:
            return self._reruns.compare_with_first(result.losses)
        if self._reruns.is_suspicious(result):
            next_passes, self._next = self._next, None
            return self._reruns.recompute(result.losses, result.grad_norm, next_passes)
        return None

    def _flops_of_token(self, seq_length: int) -> int:
        """Return the floating-point operations per token, if samples have this length."""
        if seq_length not in self._flops_per_token:
            config = self._run.config
            self._flops_per_token[seq_length] = flops_per_token(
                self._run.plan,
                seq_length,
                config.data.decoder_seq_length,
                trains_adapters=config.model.lora_rank is not None,
            )
        return self._flops_per_token[seq_length]


def _watch_spikes(run: Run, result: UpdateResult) -> str:
    """Add the values of an applied update to the running medians, or describe a spike."""
    if run.spikes is None:
        return ""
    name = run.recipe.loss_names(run.config)[0]
    values = {name: result.losses[name], NORM: result.grad_norm}
    if result.applied and not result.found_nonfinite:
        run.spikes.add(values)
    return run.spikes.describe(values) if result.found_spike else ""


def skip_iteration(run: Run) -> None:
    """Skip the next iteration: consume its samples without updating weights or schedules.

    Every process does this on its own, without communication.
    """
    progress, journal = run.progress, run.layout.journal
    journal.iteration = progress.iteration + 1
    journal.enter("a skipped iteration")
    samples = run.batches.global_batch_at(progress.consumed_samples)
    for index in range(run.batches.micro_batches_at(progress.consumed_samples)):
        with journal.inside(f"loading of micro-batch {index}"):
            next(run.train_batches)
    tokens = run.batches.tokens_at(progress.iteration, progress.consumed_samples)
    progress.consumed_tokens += tokens
    progress.iteration += 1
    progress.consumed_samples += samples
    progress.skipped_samples += samples
    if run.is_log_rank:
        print_line(skipped_line(progress.iteration, run.train_iterations, samples))


def _averaged(run: Run, reader: _OutcomeReader) -> list[Tensor]:
    """Return what replicas of the model average: this process's gradients, and the losses."""
    return [*run.gradients.views(lambda _: True), reader.losses]


def _next_passes(run: Run) -> Passes:
    """Zero the gradients, and return the passes of the update after the consumed samples."""
    consumed = run.progress.consumed_samples
    for part in run.parts:
        if not part.training:  # 0.9 ms for the 400 modules of 32 layers, and rarely needed
            part.train()
    run.gradients.zero()
    run.forward.begin_update()
    share = WHOLE if run.quorum is None else run.quorum.share
    own = share.of(run.batches.micro_batches_at(consumed))
    return Passes(
        run,
        run.train_batches,
        len(own),
        first_sample=consumed + own.start * run.batches.samples_per_pass,
        scale=run.optimizer.scale_loss,
        forward=run.forward,
        length=run.next_length,
    )


def _may_look_ahead(run: Run) -> bool:
    """Return whether the next forward pass may start before this update's result is known.

    It may not if this is the last update or the next iteration is skipped, if the pass depends on
    another pipeline stage, if `TrainingForward.may_run_ahead` is false, if the loss scale can still
    change, or if this update may restore the weights of a checkpoint. It also may not if parts of
    an update are timed, because each update must be timed separately.
    """
    return (
        not run.finished
        and not run.skips_next
        and run.layout.pipeline.size == 1
        and len(run.parts) == 1
        and run.forward.may_run_ahead
        and not run.optimizer.scale_may_change
        and run.config.training.on_spike != "rewind"
        and run.quorum is None
        and run.config.logging.timing_log_level == 0
    )


class _OutcomeReader:
    """A single read of all results of an update, because each read makes the host wait."""

    def __init__(self, run: Run, passes: Passes) -> None:
        """Add up the losses over the ranks. Collective."""
        self._run = run
        flags = (run.exit.is_requested, run.save_clock.is_due)
        losses_by_layer = router_losses(run, len(passes.sample_ids))
        load = expert_load_part(run)
        self._router_size, self._load_size = losses_by_layer.numel(), load.numel()
        self._packed = pack_losses(passes, flags, run, torch.cat((losses_by_layer, load))).double()
        self._ordinary = _ordinary(passes, run)

    @property
    def losses(self) -> Tensor:
        """The mean of each loss over the replica's micro-batches, fp64: a view."""
        return self._packed[: len(self._run.recipe.loss_names(self._run.config))]

    def loss_is_spike(self) -> Tensor | None:
        """Return whether the first loss exceeds its limit. The others are only logged.

        The result is 0 or 1, fp64, or `None` without limits.
        """
        watch, config = self._run.spikes, self._run.config
        if watch is None:
            return None
        names, loss = self._run.recipe.loss_names(config), self._packed[0]
        if config.training.calculate_per_token_loss:
            loss = loss / self._packed[len(names)].clamp(min=_MIN_SHARE)
        return (loss > watch.limit(names[0])).double()

    def start(self, step_values: Tensor) -> None:
        """Start reading, together with the results of the optimizer's step."""
        parts = [step_values, self._packed, self._ordinary.double()]
        self._sizes = [part.numel() for part in parts]
        self._read = AsyncRead(torch.cat(parts))

    def wait(self) -> UpdateResult:
        """Wait for the device, and return the results."""
        values = iter(self._read.wait())
        step_values, packed, ordinary = (list(islice(values, size)) for size in self._sizes)
        end = len(packed) - self._load_size
        start = end - self._router_size
        counted = self._run.config.training.calculate_per_token_loss
        reduced = unpack_losses(packed[:start], self._run, counted=counted)
        router_means, layer_losses = unpack_router_losses(packed[start:end], self._run)
        exit_requested, save_due = reduced.flags
        return UpdateResult(
            **vars(self._run.optimizer.end_step(step_values)),
            losses=reduced.losses | router_means,
            layer_losses=layer_losses,
            exit_requested=exit_requested,
            save_due=save_due,
            ordinary=[value > 0 for value in ordinary],
            expert_load=ExpertLoad.of(self._run.plan, packed[end:]) if self._load_size else None,
        )


def _gradients_of(run: Run, passes: Passes) -> tuple[dict[str, float], Tensor | None]:
    """Average the gradients of the passes, and return the losses and the gradients' divisor."""
    reduce_gradients(run)
    share = counted_share(passes, run) if run.config.training.calculate_per_token_loss else None
    return reduce_losses(passes, [], run).losses, share


def reduce_gradients(run: Run) -> None:
    """Reduce the gradients of all micro-batches on all replicas to those of the global batch.

    Collective. The gradients of tied copies are added up first.
    """
    run.gradients.complete()
    for tie in run.ties:
        tie.add_up()
    run.gradients.reduce()


def counted_share(passes: Passes, run: Run) -> Tensor:
    """Return the fraction of the global batch's labels that count: a scalar fp64 on the device.

    Collective over the data axis. The loss of each micro-batch is multiplied by its own fraction,
    which is known when the loss is differentiated. The global fraction is known once all
    micro-batches are loaded, and then divides the average of the gradients. Only integers are
    summed, so all processes get the same bits.
    """
    counted = all_reduce(torch.stack(passes.counted).sum(), run.layout.data)
    labels = passes.labels * len(passes.counted) * run.layout.data.size
    return (counted / labels).clamp(min=_MIN_SHARE)


def _ordinary(passes: Passes, run: Run) -> Tensor:
    """Return whether each micro-batch's losses are finite and not spikes, `[micro-batches]`.

    Losses that another process computes count as ordinary.
    """
    ordinary = torch.ones(len(passes.sample_ids), dtype=torch.bool, device=run.device.torch_device)
    for name, values in passes.losses.items():
        losses = torch.stack(values)
        ordinary &= torch.isfinite(losses)
        if run.spikes is not None:
            ordinary &= losses.double() <= run.spikes.limit(name)  # inf except for the first loss
    return ordinary


def any_rank(flags: Sequence[bool], run: Run) -> list[bool]:
    """Return for each flag whether any rank has set it. Collective; waits for the device."""
    counts = torch.tensor(flags, dtype=torch.float32, device=run.device.torch_device)
    return [count > 0 for count in all_reduce(counts, run.layout.world).tolist()]


class ReducedLosses(NamedTuple):
    """The losses of a global batch, and the flags that are reduced along with them.

    Attributes:
        losses: The mean of each loss over the batch, by log name, or the values that
            `ReportsMeans.reported` computes from the means.
        weight: The fraction of the batch's labels that count in the loss, or 1 if they were not
            counted.
        flags: Whether any rank has set each flag.
    """

    losses: dict[str, float]
    weight: float
    flags: list[bool]


def reduce_losses(passes: Passes, flags: Sequence[bool], run: Run) -> ReducedLosses:
    """Reduce the losses and the flags over all ranks. Collective; waits for the device.

    Args:
        passes: The passes that computed the losses.
        flags: The flags of this rank.
        run: The run.
    """
    packed = pack_losses(passes, flags, run).tolist()
    return unpack_losses(packed, run, counted=passes.counts_labels)


def router_losses(run: Run, micro_batches: int) -> Tensor:
    """Return this rank's contribution to the expert routers' losses, and reset the losses.

    The contributions of all ranks add up to means over micro-batches: fp32, all losses of the first
    mixture layer in the order of `ExpertOptions.auxiliary_losses`, then those of the second, and so
    on.
    """
    none = torch.zeros(len(run.config.model.auxiliary_losses), device=run.device.torch_device)
    layers = dict.fromkeys(mixtures_of(run.plan), none)
    layers |= zip(local_mixtures(run), run.layers.routers.pop_losses(), strict=True)
    return torch.cat((none[:0], *layers.values())) / (micro_batches * run.layout.data.size)


def unpack_router_losses(
    values: Sequence[float], run: Run
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the losses of the expert routers by log name, and those of each layer by tag.

    The former are means over mixture layers. The latter are empty without --moe-per-layer-logging.
    All names and tags are Megatron Core's.

    Args:
        values: The sum over ranks of `router_losses`.
        run: The run.
    """
    names, layers = run.config.model.auxiliary_losses, list(mixtures_of(run.plan))
    by_layer = dict(zip(((layer, name) for layer in layers for name in names), values, strict=True))
    sums = {name: sum(by_layer[layer, name] for layer in layers) for name in names}
    means = {name: total / max(len(layers), 1) for name, total in sums.items()}
    if not run.config.model.moe_per_layer_logging:
        return means, {}
    return means, {f"moe/{name}_layer_{layer}": by_layer[layer, name] for layer, name in by_layer}


def pack_losses(
    passes: Passes, flags: Sequence[bool], run: Run, more: Tensor | None = None
) -> Tensor:
    """Return the losses on the device, and for each flag the number of ranks that set it.

    If labels were counted, losses are multiplied by their weights, and the mean weight is appended
    to them. This takes a single all-reduce over the world: the ranks with the last part of the
    model have the losses, and one tensor rank contributes on behalf of all. Each data and context
    rank contributes its mean over micro-batches.

    Args:
        passes: The passes that computed the losses.
        flags: The flags of this rank.
        run: The run.
        more: Further values, `[n]`, which are summed over all ranks and appended to the result.
    """
    layout, names = run.layout, run.recipe.loss_names(run.config)
    count = len(names) + passes.counts_labels
    packed = torch.zeros(count + len(flags), device=run.device.torch_device)
    if passes.losses and layout.tensor.is_first:
        zeros = torch.zeros(len(passes.sample_ids), device=packed.device)
        columns = [
            torch.stack(passes.losses[name]).float() if name in passes.losses else zeros
            for name in names
        ]
        weights = passes.weights
        if weights is not None:
            columns = [*(column * weights for column in columns), weights]
        means = torch.stack([column.mean() for column in columns])
        packed[:count] = means / (layout.data.size * layout.context.size)
    for index, flag in enumerate(flags, count):
        if flag:
            packed[index].fill_(1.0)  # assigning a Python number would wait for the device
    if more is not None:
        packed = torch.cat((packed, more))
    return all_reduce(packed, layout.world)


def unpack_losses(packed: Sequence[float], run: Run, *, counted: bool) -> ReducedLosses:
    """Return the losses and flags in the result of `pack_losses`.

    Args:
        packed: The result of `pack_losses`.
        run: The run.
        counted: Whether the passes counted labels.
    """
    values, weight = iter(packed), 1.0
    losses = dict(zip(run.recipe.loss_names(run.config), values, strict=False))
    if counted:
        weight = next(values)
        losses = {name: total / max(weight, _MIN_SHARE) for name, total in losses.items()}
    if isinstance(run.recipe, ReportsMeans):
        losses = run.recipe.reported(losses)
    return ReducedLosses(losses, weight, [count > 0 for count in values])
