"""The optimizer: fp32 weights updated in place, 16-bit weights through fp32 master weights.

A step runs entirely on the device: norm, clipping, the non-finite check and the update follow one
another without involving the host, which can read the outcome at any later time.

With --optimizer-cpu-offload, fp32 weights (master weights or copies) and moments are in host
memory. The update runs on the host, after all gradients have been copied there, and then the new
weights are copied back. With --overlap-cpu-optimizer-d2h-h2d, the host updates some weights while
others are being copied.

If the gradients are sharded over the processes that hold the same weights (ZeRO), master weights
and moments exist only for this process's shard. The process updates its shard of the weights and
gathers the other shards.

fp16 gradients below 3e-8 are rounded to zero. The loss is therefore multiplied by a scale before
the backward pass, and the gradients are divided by this scale before the update (`LossScale`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.device import CopyStream, QueuedCopy
from megatron.kernels.library import KernelLibrary, find_library
from megatron.kernels.tensor_sums import choose_tensor_sums
from megatron.optimizer.averages import new_average
from megatron.optimizer.groups import ParameterGroup
from megatron.optimizer.norms import is_counted_here, state_sizes, sum_over_model
from megatron.optimizer.packed import FORMATS, PackedTensor, State, values_of
from megatron.optimizer.rules import OffloadedUpdate, OverlappedUpdate, on_host
from megatron.optimizer.update import MatrixShard, Step, Update, UpdateTensors
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import spec_of
from megatron.parallel.replicas import Gradients, SharedWeights

_CURVES = {
    "exp_avg": "momentum",
    "momentum_buffer": "momentum",
    "exp_avg_sq": "variance",
}  # Megatron-DeepSpeed's names
GROWTH = 2.0  # the factor by which the loss scale grows or shrinks
CLIP_EPS = 1e-6  # added to the norm before dividing by it, as in Megatron
# Numbers that make the random rounding of each kind of state independent of the others.
_SALTS = {"master": 1, "exp_avg": 2, "exp_avg_sq": 3}


@dataclass(frozen=True)
class LossScale:
    """A factor by which the loss is multiplied: constant, or dynamic for fp16.

    A dynamic scale is halved after overflows and doubled after iterations without overflow. The
    object is immutable: `update` returns the next scale.

    Attributes:
        value: The current scale. 1 means no scaling.
        is_dynamic: Whether the scale changes. Otherwise only `value` is used.
        minimum: The lower bound of the scale.
        window: The number of consecutive iterations without overflow after which the scale doubles.
        hysteresis: The number of overflows, not necessarily consecutive, at which the scale is
            first halved. Every later overflow halves it again.
        overflows_left: The number of overflows left until the scale is halved. Only a doubling
            resets this number to `hysteresis`.
        clean_iterations: The number of iterations since the last overflow or doubling.
    """

    value: float = 1.0
    is_dynamic: bool = False
    minimum: float = 1.0
    window: float = 1000
    hysteresis: int = 2
    overflows_left: int = 2
    clean_iterations: int = 0

    @property
    def can_shrink(self) -> bool:
        """Whether the scale can still become smaller."""
        return self.is_dynamic and self.value > self.minimum

    def update(self, *, found_overflow: bool) -> LossScale:
        """Return the scale of the next iteration.

        Args:
            found_overflow: Whether any gradient of this iteration was not finite.
        """
        if not self.is_dynamic:
            return self
        if found_overflow:
            left = self.overflows_left - 1
            value = max(self.value / GROWTH, self.minimum) if left <= 0 else self.value
            return replace(self, value=value, clean_iterations=0, overflows_left=left)
        clean = self.clean_iterations + 1
        if clean < self.window:
            return replace(self, clean_iterations=clean)
        doubled = self.value * GROWTH
        return replace(self, value=doubled, clean_iterations=0, overflows_left=self.hysteresis)

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint, under Megatron's names.

        The state of a constant scale is empty, because the flags set the scale.
        """
        if not self.is_dynamic:
            return {}
        return {
            "scale": self.value,
            "growth_tracker": self.clean_iterations,
            "hysteresis_tracker": self.overflows_left,
        }

    def with_state(self, state: dict[str, Any]) -> LossScale:
        """Return this scale with a saved state.

        If this scale or the saved scale is constant, this scale is returned unchanged.

        Args:
            state: The result of `state()`, possibly in an earlier run.
        """
        if not (state and self.is_dynamic):
            return self
        return replace(
            self,
            value=float(state["scale"]),
            clean_iterations=int(state["growth_tracker"]),
            overflows_left=int(state["hysteresis_tracker"]),
        )


def loss_scale_of(precision: PrecisionConfig) -> LossScale:
    """Return the loss scale that the flags specify.

    The scale is constant with --loss-scale in 16-bit training, dynamic in other fp16 training, and
    otherwise 1.
    """
    if precision.loss_scale is not None and (precision.fp16 or precision.bf16):
        return LossScale(precision.loss_scale)
    return LossScale(
        precision.initial_loss_scale if precision.fp16 else 1.0,
        is_dynamic=precision.fp16,
        minimum=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        overflows_left=precision.hysteresis,
    )


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step.

    Attributes:
        applied: Whether weights and state changed. Otherwise they are bitwise unchanged.
        grad_norm: The global L2 norm of the unscaled gradients, before clipping.
        found_nonfinite: Whether the gradients of any rank contained inf or nan.
        found_spike: Whether the norm or a loss was too large, although all gradients were finite.
        overflow: Whether any gradient was not finite and a dynamic loss scale can still shrink in
            response, which is a normal part of fp16 training.
        zeros: The number of gradient elements of the whole model that are exactly zero; `None` if
            not counted.
    """

    applied: bool
    grad_norm: float
    found_nonfinite: bool
    found_spike: bool
    overflow: bool
    zeros: int | None


class _OwnedWeight(NamedTuple):
    """The part of a parameter that this process updates.

    Attributes:
        name: The name of the parameter.
        parameter: The model's parameter.
        part: The tensor to update: the parameter itself, or a 1-D view of its shard. It is empty if
            this process owns no rows (`joins_rows`).
        dtype: The dtype in which the forward pass uses the parameter.
        weight: The part in fp32 (the part itself, or a copy of it), or a packed copy.
        state: The state tensors by name, in fp32 or packed.
    """

    name: str
    parameter: nn.Parameter
    part: Tensor
    dtype: torch.dtype
    weight: State
    state: dict[str, State]


@dataclass(frozen=True)
class _OwnedGroup:
    """The part of a parameter group that this process updates.

    Attributes:
        group: The whole group, whose rule and settings apply to these weights.
        weights: The weights that this process updates.
    """

    group: ParameterGroup
    weights: list[_OwnedWeight]

    @classmethod
    def allocate(
        cls, group: ParameterGroup, gradients: Gradients, config: OptimizerConfig
    ) -> _OwnedGroup:
        """Allocate master weights and states for the parts that this process updates.

        Args:
            group: The parameter group.
            gradients: The gradient buffer, which determines these parts.
            config: The formats of the states, and whether they are in host memory.
        """
        rule, offload = group.rule, config.optimizer_cpu_offload
        joins = rule.joins_rows and gradients.shares_weights

        def new(kind: str, part: Tensor, first: int) -> State:
            state_format = config.state_format(kind)
            if state_format == "fp32":
                if offload:
                    return on_host(part, torch.float32).zero_()
                return torch.zeros_like(part, dtype=torch.float32)
            return PackedTensor(
                part,
                FORMATS[state_format],
                on_host=offload,
                roots=kind == "exp_avg_sq",
                first=first,
                salt=_SALTS[kind],
            )

        weights = []
        for name, p in zip(group.names, group.parameters, strict=True):
            part, owned = gradients.part(p), gradients.owned(p)
            if not owned.size and gradients.is_sharded and not joins:
                continue
            assert joins or not rule.needs_whole or owned.size == p.numel(), (
                f"{name}: its update rule needs the whole tensor, but this process has a shard"
            )
            is_own = part.dtype == torch.float32 and not offload
            weight = part if is_own else new("master", part, owned.start)
            state = {kind: new(kind, part, owned.start) for kind in rule.state_names}
            weights.append(_OwnedWeight(name, p, part, gradients.compute_dtype(p), weight, state))
        return cls(group, weights)

    def bind(
        self,
        gradients: Gradients,
        layout: Layout,
        library: KernelLibrary | None,
        config: OptimizerConfig,
        queues: tuple[CopyStream, CopyStream],
    ) -> Update:
        """Return the group's update, bound to its tensors.

        Args:
            gradients: The gradient buffer.
            layout: The grid of processes as this process sees it.
            library: Compiled kernels; `None` means PyTorch's operations.
            config: The settings for offloading.
            queues: The queue for copies to the host and the queue for copies to the device.
        """
        rule, rows = self.group.rule, gradients.shares_weights
        parameters = [owned.parameter for owned in self.weights]

        def shaped(tensors: Iterable[Any]) -> list[Any]:
            if not rule.needs_whole or rows:
                return list(tensors)
            return [t.view(p.shape) for t, p in zip(tensors, parameters, strict=True)]

        parts, shards = shaped(owned.part for owned in self.weights), list[MatrixShard]()
        if rule.joins_rows:
            for spec in map(spec_of, parameters):
                tensor, replicas = layout.tensor, layout.replica
                if spec.is_expert:
                    tensor, replicas = layout.expert_tensor, layout.expert_replica
                shares_rows = rows and replicas.size > 1
                shards.append(MatrixShard(spec, tensor, replicas if shares_rows else None))
        tensors = UpdateTensors(
            shaped(owned.weight for owned in self.weights),
            [None if part.dtype == torch.float32 else part for part in parts],
            shaped(map(gradients.gradient, parameters)),
            {
                kind: shaped(owned.state[kind] for owned in self.weights)
                for kind in rule.state_names
            },
            shards,
        )
        if config.overlap_cpu_optimizer_d2h_h2d:
            return OverlappedUpdate(rule, tensors, parts, queues=queues)
        if config.optimizer_cpu_offload:
            return OffloadedUpdate(rule, tensors, parts)
        return rule.bind(tensors, library)


class Optimizer:
    """An optimizer that updates weights with the gradients in a buffer.

    Args:
        groups: All parameters of the gradient buffer, in groups.
        gradients: The gradient buffer. It must be reduced before `begin_step` is called.
        config: The settings for clipping, offloading, state formats and averages.
        precision: The settings for the loss scale.
        layout: The grid of processes as this process sees it.
        weights: The object that gathers updated weights if gradients are sharded
            (`gradients.share_weights`); otherwise `None`.
        count_zeros: Whether to count the gradient elements that are exactly zero in every step.

    Attributes:
        gradients: The gradient buffer.
        average: The average of the weights; `None` if the flags request none.
        steps: The number of updates applied so far.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        gradients: Gradients,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        layout: Layout,
        *,
        weights: SharedWeights | None = None,
        count_zeros: bool = False,
    ) -> None:
        """Allocate master weights and states for the parameters that this process updates."""
        assert (weights is not None) == gradients.is_sharded, (
            "pass weights if and only if gradients are sharded"
        )
        self.gradients = gradients
        self._clip = config.clip_grad
        self._layout = layout
        self._count_zeros = count_zeros
        self._scale = loss_scale_of(precision)
        self._shared_weights = weights
        self._offload = config.optimizer_cpu_offload
        self._groups = [_OwnedGroup.allocate(g, gradients, config) for g in groups]
        counted_parameters = [
            p
            for g in groups
            for p in g.parameters
            if is_counted_here(p, layout, is_sharded=gradients.is_sharded)
        ]
        self._counted_elements = sum(gradients.owned(p).size for p in counted_parameters)
        counted_ids = {id(p) for p in counted_parameters}
        self._device = groups[0].parameters[0].device
        library = find_library(self._device).library
        queues = CopyStream(self._device), CopyStream(self._device)
        self._updates = [
            (own.group, own.bind(gradients, layout, library, config, queues))
            for own in self._groups
            if own.weights  # with shards, a process may hold no part of a parameter
        ]
        counted_views = gradients.views(lambda p: id(p) in counted_ids)
        self._gradient_sums = choose_tensor_sums(
            counted_views, self._device, library, counts=count_zeros
        )
        # With a rule that joins rows, a process may own no rows of a parameter.
        self._owned_weights = [
            owned for own in self._groups for owned in own.weights if owned.part.numel()
        ]
        self.average = new_average(config, [owned.weight for owned in self._owned_weights])
        self.steps = 0
        self._reader: QueuedCopy | None = None  # a copy of weights and states that is not done
        self.reload_masters()

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss is multiplied before the backward pass."""
        return self._scale.value

    @property
    def scale(self) -> LossScale:
        """The loss scale, with its counters."""
        return self._scale

    def restore_scale(self, scale: LossScale) -> None:
        """Restore an earlier loss scale, because the steps since then are discarded."""
        self._scale = scale

    @torch.no_grad()
    def gradient_norm(self, scale: float, divisor: Tensor | None = None) -> float:
        """Return the global L2 norm of the reduced gradients. Collective; waits for the device.

        Args:
            scale: The factor by which the loss was multiplied.
            divisor: A number by which the gradients must be divided, in addition to `scale`: fp64
                [] on the device; `None` means 1.
        """
        return float(self._measure(scale if divisor is None else scale * divisor)[0])

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the loss scale, for the backward pass."""
        return loss if self.loss_scale == 1.0 else loss * self.loss_scale

    @property
    def scale_may_change(self) -> bool:
        """Whether `end_step` may change the loss scale for the next iteration."""
        return self._scale.is_dynamic

    @torch.no_grad()
    def begin_step(
        self,
        lr: float,
        weight_decay: float,
        *,
        decoupled_lr: float | None = None,
        divisor: Tensor | None = None,
        norm_limit: float = math.inf,
        loss_is_spike: Tensor | None = None,
    ) -> Tensor:
        """Unscale, clip and apply the gradients, or change nothing if they are not finite.

        An update whose norm exceeds `norm_limit` also changes nothing. Collective over the world;
        all ranks agree on the outcome. The gradients are not preserved. The host waits for the
        device only with --optimizer-cpu-offload.

        Args:
            lr: The learning rate.
            weight_decay: The weight decay of the groups to which it applies.
            decoupled_lr: The learning rate of the decoupled groups; `None` means `lr`.
            divisor: A number by which the gradients must be divided, in addition to the loss scale:
                fp64 [] on the device, the same on all ranks; `None` means 1.
            norm_limit: The largest norm, before clipping, with which the update is applied.
            loss_is_spike: 1 if the loss is a spike, which skips the update, otherwise 0: fp64 [] on
                the device; `None` means 0.

        Returns:
            The argument of `end_step`, fp64 [4] on the device: the norm, the number of zeros (if
            they are counted), and 0 or 1 for non-finite gradients and for a spike.
        """
        if self._shared_weights is not None:
            self._shared_weights.settle()  # waits for gathers that no forward pass has waited for
        scale = self.loss_scale if divisor is None else self.loss_scale * divisor
        norm, zeros, nonfinite = self._measure(scale)
        spike = torch.zeros_like(norm) if loss_is_spike is None else loss_is_spike
        spike = torch.maximum(spike, (norm > norm_limit).double())
        flags = all_reduce(torch.stack([nonfinite, spike]), self._layout.world, dist.ReduceOp.MAX)
        excess = torch.ones_like(norm)  # the divisor that reduces the norm to the clipping limit
        if self._clip > 0:
            excess = ((norm + CLIP_EPS) / self._clip).clamp(min=1.0)
        device = torch.device("cpu") if self._offload else self._device
        self._wait_for_reader()
        step = Step(
            lr=lr,
            count=torch.full((), self.steps + 1, dtype=torch.float32, device=device),
            gradient_scale=(scale * excess).float().to(device),
            found_nonfinite=flags.max().float().to(device),
        )
        decoupled_step = step if decoupled_lr is None else replace(step, lr=decoupled_lr)
        for group, update in self._updates:
            update(
                decoupled_step if group.is_decoupled else step,
                weight_decay=weight_decay if group.is_decayed else 0.0,
            )
        if self._shared_weights is not None:
            self._shared_weights.gather()
        return torch.cat([torch.stack([norm, zeros]), flags])

    def _measure(self, scale: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the unscaled norm, the number of zeros, and whether any gradient is not finite.

        All three are fp64 [], and the last is 0 or 1. A single inf or nan makes the sum of squares
        inf or nan, so a finite norm proves that every gradient is finite.
        """
        squares, nonzero = self._gradient_sums()
        square, zeros = sum_over_model(
            torch.stack((squares, self._counted_elements - nonzero)),
            self._layout,
            over_replicas=self.gradients.is_sharded,
        )
        norm = square.sqrt() / scale
        return norm, zeros, 1.0 - norm.isfinite().double()

    def end_step(self, outcome: Sequence[float]) -> StepResult:
        """Record the outcome of a step, and update the loss scale and the weight average.

        Args:
            outcome: The four values that `begin_step` returned.
        """
        norm, zeros, nonfinite, spike = outcome
        is_nonfinite = nonfinite > 0
        is_spike = spike > 0 and not is_nonfinite
        overflow = is_nonfinite and self._scale.can_shrink
        self._scale = self._scale.update(found_overflow=is_nonfinite)
        applied = not (is_nonfinite or is_spike)
        self.steps += applied
        if self.average is not None and applied:
            self.average.update(self.steps)
        return StepResult(
            applied=applied,
            grad_norm=norm,
            found_nonfinite=is_nonfinite,
            found_spike=is_spike,
            overflow=overflow,
            zeros=int(zeros) if self._count_zeros else None,
        )

    def delay_changes(self, reader: QueuedCopy) -> None:
        """Make the next change of weights and states wait for a copy that reads them."""
        self._reader = reader

    def _wait_for_reader(self) -> None:
        if self._reader is not None:
            self._reader.delay_device()
            if self._offload:  # the host writes to them
                self._reader.wait()
        self._reader = None

    def wait_for_weights(self) -> None:
        """Wait until parameters may be read outside their model's forward pass. Collective."""
        if self._shared_weights is not None:
            self._shared_weights.wait()

    def reload_masters(self, *, include_16_bit: bool = True) -> None:
        """Copy loaded weights to the master weights, which are in fp32 or packed.

        Call `wait_for_weights` before loading weights.

        Args:
            include_16_bit: Whether to also overwrite the master weights of 16-bit weights. Pass
                False if these master weights have been loaded too. With ZeRO stage 3, weights that
                are stored separately from them are then overwritten with the master weights.
        """
        if self._shared_weights is not None:
            self._shared_weights.forget()
        self._wait_for_reader()
        with torch.no_grad():
            for own in self._groups:
                for owned in own.weights:
                    part, dtype, weight = owned.part, owned.dtype, owned.weight
                    if dtype == torch.float32 or include_16_bit:
                        if isinstance(weight, PackedTensor):
                            weight.store(part.to(dtype))
                        else:
                            weight.copy_(part.to(dtype))
                    elif part.dtype == torch.float32 and weight is not part:
                        # With ZeRO 3, the loaded weights went into temporary 16-bit copies.
                        part.copy_(values_of(weight))

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Replace the weights with their average inside the context. Collective.

        There must be an average, of at least one update or snapshot.
        """
        assert self.average is not None and self.average.count, "there is no average yet"
        self.wait_for_weights()
        self._wait_for_reader()
        with torch.no_grad():
            saved = [owned.part.clone() for owned in self._owned_weights]
            for index, owned in enumerate(self._owned_weights):
                owned.part.copy_(self.average.values(index))
        self._spread()
        yield
        self.wait_for_weights()
        with torch.no_grad():
            for part, owned in zip(saved, self._owned_weights, strict=True):
                owned.part.copy_(part)
        self._spread()

    def _spread(self) -> None:
        """Gather the weights that each process has changed. Collective."""
        if self._shared_weights is not None:
            self._shared_weights.gather()
            self._shared_weights.wait()

    def name_averages(
        self, sets: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, tuple[Tensor, nn.Parameter]]:
        """Return the tensors of the average by checkpoint name, each with its parameter.

        Args:
            sets: The tensors by name prefix, one for each weight, as returned by the average's
                `tensor_sets` or `prepare`.
        """
        return {
            f"{prefix}{owned.name}": (tensor, owned.parameter)
            for prefix, tensors in sets.items()
            for owned, tensor in zip(self._owned_weights, tensors, strict=True)
        }

    def named_tensors(self) -> dict[str, tuple[Tensor, nn.Parameter]]:
        """Return every state tensor by checkpoint name, each with its parameter.

        The names are "<parameter>.<state>" for each state of the parameter's update rule (for
        example "<parameter>.exp_avg") and "<parameter>.master" for a 16-bit parameter. The tensors
        have the parameter's shape or, if gradients are sharded, are 1-D and contain the elements
        `gradients.owned(parameter)`. Parameters of which this process owns nothing are left out. To
        load a checkpoint, copy into the tensors in place and then call `encode_loaded`, because
        tensors of packed states may be decoded copies.
        """
        return {
            name: (state.saved() if isinstance(state, PackedTensor) else state, parameter)
            for name, (state, parameter) in self._named_states().items()
        }

    def stored_names(self) -> set[str]:
        """Return the names in `named_tensors` of states that are not packed.

        Their tensors are the states themselves, not decoded copies.
        """
        states = self._named_states().items()
        return {name for name, (state, _) in states if not isinstance(state, PackedTensor)}

    def encode_loaded(self, named: Mapping[str, tuple[Tensor, nn.Parameter]]) -> None:
        """Encode the packed states after a checkpoint has been loaded.

        Args:
            named: The result of `named_tensors`, with the loaded values.
        """
        states = self._named_states()
        for name, (tensor, _) in named.items():
            state, _ = states[name]
            if isinstance(state, PackedTensor):
                state.load(tensor)

    def _named_states(self) -> dict[str, tuple[State, nn.Parameter]]:
        tensors: dict[str, tuple[State, nn.Parameter]] = {}
        for own in self._groups:
            members = [owned for owned in own.weights if owned.part.numel()]
            for owned in members:
                for kind, state in owned.state.items():
                    tensors[f"{owned.name}.{kind}"] = (state, owned.parameter)
            for owned in members:
                if owned.dtype != torch.float32:
                    tensors[f"{owned.name}.master"] = (owned.weight, owned.parameter)
        return tensors

    def sizes(self) -> dict[str, float]:
        """Return norms of the fp32 weights and of the states over the whole model. Collective.

        The norms are the L1 norm, L2 norm and largest magnitude of the weights and, if the update
        rules have them, of the momentum, the variance and the square root of the variance, under
        Megatron-DeepSpeed's names (such as `weight_l1`).
        """
        kinds = dict.fromkeys(kind for own in self._groups for kind in own.group.rule.state_names)
        counted: dict[str, list[State]] = {_CURVES.get(kind, kind): [] for kind in kinds}
        counted["weight"] = []
        is_sharded = self.gradients.is_sharded
        for own in self._groups:
            for owned in own.weights:
                if is_counted_here(owned.parameter, self._layout, is_sharded=is_sharded):
                    counted["weight"].append(owned.weight)
                    for kind, state in owned.state.items():
                        counted[_CURVES.get(kind, kind)].append(state)
        # Generators, so that only one square root or decoded tensor is in memory at a time.
        tensors: dict[str, Iterable[Tensor]] = {
            name: map(values_of, states) for name, states in counted.items()
        }
        if "variance" in counted:
            tensors["variance_sqrt"] = (values_of(state).sqrt() for state in counted["variance"])
        return state_sizes(tensors, self._layout, self._device, over_replicas=is_sharded)

    def scalars(self) -> dict[str, Any]:
        """Return the scalar state, the number of steps and the loss scale, as JSON values."""
        return {"step": self.steps, "loss_scale": self._scale.state()}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Restore the state that `scalars` returned."""
        self.steps = int(scalars["step"])
        self._scale = self._scale.with_state(scalars["loss_scale"])
