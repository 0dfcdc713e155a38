"""A second computation of suspicious updates (`--rerun-mode`): is a machine or the data at fault?

An update is suspicious if its loss or gradients are not finite, or if it is a spike (`--on-spike`).
Such an update is not applied, so its passes can run again with the same samples, weights and
dropout. If the results differ, there was a transient fault. If they are the same, the cause is
the data, or a machine that makes the same error every time.

Each rank also records a fingerprint of the output of each pass, and of each bucket of its own
gradients. The fingerprints show where the two computations diverge.
"""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.checkpoint.exchange import JsonExchange
from megatron.optimizer.optimizer import StepResult
from megatron.parallel.collectives import all_gather
from megatron.parallel.gradients import GradientBuffer
from megatron.training.passes import Passes
from megatron.training.run import Run
from megatron.training.spikes import NORM

_TOLERANCE = 0.01  # relative; a GPU may add up the same values in a different order
_NO_PART = 2**31 - 1  # an index after the last part of the model


@dataclass(frozen=True)
class Rerun:
    """The result of a second computation of an update.

    With --rerun-mode report_stats, only the losses are compared. There are then no gradient norms,
    ranks or hosts, and `undo` does nothing.

    Attributes:
        first: The losses and the gradient norm of the first computation.
        second: The losses and the gradient norm of the second computation.
        is_same: Whether both results are the same, up to the order of additions.
        ranks: If the results differ, the ranks whose own values changed first; empty if only sums
            over ranks changed.
        hosts: The machines of `ranks` or, if it is empty, of all ranks.
        undo: A function that returns the run to its position before the update.
    """

    first: dict[str, float]
    second: dict[str, float]
    is_same: bool
    ranks: list[int]
    hosts: list[str]
    undo: Callable[[], None] = field(compare=False, repr=False, default=lambda: None)


def is_close(first: float, second: float, tolerance: float) -> bool:
    """Return whether two values are equal up to a relative tolerance.

    Any two values that are not finite count as equal.

    Args:
        first: A value.
        second: The value to compare with.
        tolerance: The largest difference, relative to the larger value.
    """
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.isfinite(first) == math.isfinite(second)
    return abs(first - second) <= tolerance * max(abs(first), abs(second))


def first_to_differ(
    forward: Sequence[int], backward: Sequence[bool], stages: Sequence[int]
) -> list[int]:
    """Return the ranks at which two computations diverge, or none if nothing has changed.

    If the forward pass is at fault, the outputs of the faulty part of the model and of all later
    parts change. If no output changes, the gradients of the faulty stage and of all stages before
    it change.

    Args:
        forward: For each rank, the first part of the model whose output changed, or `_NO_PART`.
        backward: For each rank, whether its own gradients changed.
        stages: The pipeline stage of each rank.
    """
    if min(forward) < _NO_PART:
        return [rank for rank, part in enumerate(forward) if part == min(forward)]
    changed = [rank for rank, has_changed in enumerate(backward) if has_changed]
    last = max((stages[rank] for rank in changed), default=0)
    return [rank for rank in changed if stages[rank] == last]


class Reruns:
    """The second computation of suspicious updates.

    Args:
        run: The run.
        reduce: A function that averages the gradients of the passes and returns their losses, by
            log name, and the divisor of the gradients. Collective.
    """

    def __init__(
        self, run: Run, reduce: Callable[[Passes], tuple[dict[str, float], Tensor | None]]
    ) -> None:
        """Gather the name of each rank's machine. Collective."""
        self._run, self._reduce = run, reduce
        exact = run.config.training.deterministic_mode or not run.device.is_gpu
        self._tolerance = 0.0 if exact else _TOLERANCE
        self._hosts: list[str] = JsonExchange(run.layout.world).gather(platform.node())
        # With PyTorch's DDP, only averaged gradients are available, not this rank's own.
        buffer, is_own_buffer = run.gradients, run.config.parallel.ddp_impl == "local"
        self._buffer = buffer if is_own_buffer and isinstance(buffer, GradientBuffer) else None
        self._first_losses: dict[str, float] = {}

    def begin(self, passes: Passes) -> None:
        """Store the state that an update will change. Its passes may have begun, but not ended."""
        run = self._run
        self._passes, self._scale = passes, run.optimizer.scale
        self._before = replace(run.progress)
        self._biases = [bias.clone() for bias in self._router_biases]
        self._pop_fingerprints()

    @property
    def _router_biases(self) -> list[Tensor]:
        """The biases of this rank's routers."""
        return [s.bias for s in self._run.layers.routers.states if s.bias is not None]

    def _pop_fingerprints(self) -> list[Tensor]:
        """Return the fingerprints of this rank's gradients, and start recording again."""
        return [] if self._buffer is None else self._buffer.pop_fingerprints()

    def is_suspicious(self, result: StepResult) -> bool:
        """Return whether the result of an update calls for a second computation."""
        return result.found_spike or (result.found_nonfinite and not result.overflow)

    def recompute(
        self, losses: Mapping[str, float], norm: float, next_passes: Passes | None
    ) -> Rerun:
        """Compute the last update again, without applying it. Collective.

        Args:
            losses: The losses of the first computation, by log name.
            norm: The gradient norm of the first computation.
            next_passes: The passes of the next update, if they have begun. They are discarded, and
                their samples are returned to the run.
        """
        run, passes, gradients = self._run, self._passes, self._pop_fingerprints()
        run.layout.journal.enter("second computation of the update")
        if next_passes is not None:
            run.train_batches = itertools.chain(next_passes.micro_batches, run.train_batches)
        second, scores = self._run_again()
        first = {name: losses.get(name, norm) for name in scores}
        second_gradients = self._pop_fingerprints()
        evidence = self._evidence(
            passes.fingerprints, second.fingerprints, gradients, second_gradients
        )
        stages = list(map(run.layout.stage_of, run.layout.world.ranks))
        ranks = first_to_differ(*evidence, stages)
        is_same = not ranks and all(
            is_close(first[name], scores[name], self._tolerance) for name in scores
        )
        hosts = dict.fromkeys(self._hosts[rank] for rank in ranks or run.layout.world.ranks)
        return Rerun(first, scores, is_same, ranks, list(hosts), self._undo)

    def compute_first(self, passes: Passes) -> Passes:
        """Run an update's passes for comparison, and return the same passes for the update itself.

        Collective. Used with --rerun-mode report_stats.
        """
        run = self._run
        with self._earlier_biases():
            passes.forward_backward()
            self._first_losses, _ = self._reduce(passes)
        run.gradients.zero()
        run.forward.begin_update()
        return passes.repeated(run.optimizer.scale_loss)

    def compare_with_first(self, losses: Mapping[str, float]) -> Rerun:
        """Compare the losses of `compute_first` with those of the update itself."""
        second = {name: losses[name] for name in self._first_losses}
        is_same = all(is_close(self._first_losses[name], second[name], 0.0) for name in second)
        return Rerun(self._first_losses, second, is_same, [], [])

    def _run_again(self) -> tuple[Passes, dict[str, float]]:
        """Run the passes again, and return them with their losses and gradient norm."""
        run = self._run
        with self._earlier_biases():
            run.layers.routers.pop_losses()  # those recorded by the next update's passes
            run.gradients.zero()
            run.forward.begin_update()
            second = self._passes.repeated(lambda loss: loss * self._scale.value)
            second.forward_backward()
            losses, share = self._reduce(second)
            norm = run.optimizer.gradient_norm(self._scale.value, share)
        return second, {**losses, NORM: norm}

    @contextmanager
    def _earlier_biases(self) -> Iterator[None]:
        """Run the body with the routers' earlier biases, and discard what the routers record."""
        states = self._run.layers.routers.states
        current = [bias.clone() for bias in self._router_biases]
        loads = [state.load.clone() for state in states]
        self._set(self._router_biases, self._biases)
        yield
        self._run.layers.routers.pop_losses()
        self._set(self._router_biases, current)
        self._set([state.load for state in states], loads)

    @staticmethod
    def _set(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)

    def _evidence(
        self,
        outputs: Mapping[int, Sequence[Tensor]],
        outputs_again: Mapping[int, Sequence[Tensor]],
        gradients: Sequence[Tensor],
        gradients_again: Sequence[Tensor],
    ) -> tuple[list[int], list[bool]]:
        """Return the arguments `forward` and `backward` of `first_to_differ`. Collective."""
        parts = [
            part for part, values in outputs.items() if self._differ(values, outputs_again[part])
        ]
        local = [min(parts, default=_NO_PART), int(self._differ(gradients, gradients_again))]
        table = all_gather(torch.tensor([local]), self._run.layout.world)
        return table[:, 0].tolist(), table[:, 1].bool().tolist()

    def _differ(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
        if not first:
            return False
        numbers = (torch.stack(list(tensors)).tolist() for tensors in (first, second))
        return not all(is_close(a, b, self._tolerance) for a, b in zip(*numbers, strict=True))

    def _undo(self) -> None:
        """Restore the state before the update, so that it can be saved."""
        run = self._run
        vars(run.progress).update(vars(self._before))
        run.optimizer.restore_scale(self._scale)
        self._set(self._router_biases, self._biases)
