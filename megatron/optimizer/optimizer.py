"""The optimizer: fp32 weights updated in place, 16-bit weights through fp32 masters.

A step runs on the device from start to end: norm, clipping, the non-finite check and the update
follow one another without asking the host, which reads the outcome once, when it likes.

With --optimizer-cpu-offload fp32 weights, masters or copies, and moments are in host memory. The
update runs there: gradients go to the host, new weights come back, and the step waits for both.

Where the gradients are sharded over the processes that hold the same weights (ZeRO), masters and
moments exist for this process's shard alone: it updates that, and gathers the others' weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.kernels.library import KernelLibrary, find_library
from megatron.kernels.tensor_sums import choose_tensor_sums
from megatron.optimizer.groups import ParameterGroup, split_groups
from megatron.optimizer.loss_scale import DynamicScale, loss_scale_of
from megatron.optimizer.norms import is_counted_here, sum_over_model
from megatron.optimizer.offload import OffloadedUpdate, on_host
from megatron.optimizer.rules import Step, Update, UpdateRule, UpdateTensors, rule_of
from megatron.parallel.collectives import all_reduce
from megatron.parallel.fp8_products import Fp8Products
from megatron.parallel.layout import Layout
from megatron.parallel.replicas import Gradients

CLIP_EPS = 1e-6  # added to the norm before dividing by it, as in Megatron


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        applied: weights and state changed; if not, not one bit of them did.
        grad_norm: global L2 norm before clipping, loss scale taken out.
        found_nonfinite: some rank's gradients held inf or nan.
        overflow: they did, and a dynamic loss scale that can still shrink has taken care of it:
            part of fp16 training, no mistake.
        zeros: gradient entries that are exactly zero, over the whole model; None if not counted.
    """

    applied: bool
    grad_norm: float
    found_nonfinite: bool
    overflow: bool
    zeros: int | None


@dataclass(frozen=True)
class _Group:
    """What this process updates of a parameter group.

    Attributes:
        is_decayed: weight decay applies.
        is_decoupled: the learning rate is that of --decoupled-lr.
        names: of the parameters.
        parameters: those of which anything is updated here.
        parts: what that is: the parameters themselves, or 1-D views of parts of them.
        formats: what forward computes in.
        weights: the same in fp32: the parts, or copies of them.
        state: by kind, a tensor for each weight.
    """

    is_decayed: bool
    is_decoupled: bool
    names: list[str]
    parameters: list[nn.Parameter]
    parts: list[Tensor]
    formats: list[torch.dtype]
    weights: list[Tensor]
    state: dict[str, list[Tensor]]

    @classmethod
    def allocate(
        cls,
        group: ParameterGroup,
        state_names: Iterable[str],
        gradients: Gradients,
        *,
        offload: bool,
    ) -> _Group:
        members = [
            (name, p)
            for name, p in zip(group.names, group.parameters, strict=True)
            if gradients.owned(p).size or not gradients.is_sharded
        ]
        parts = [gradients.part(p) for _, p in members]
        weights = [
            p if p.dtype == torch.float32 and not offload else _new_fp32(p, offload) for p in parts
        ]
        return cls(
            is_decayed=group.is_decayed,
            is_decoupled=group.is_decoupled,
            names=[name for name, _ in members],
            parameters=[p for _, p in members],
            parts=parts,
            formats=[gradients.compute_dtype(p) for _, p in members],
            weights=weights,
            state={
                name: [_new_fp32(part, offload).zero_() for part in parts] for name in state_names
            },
        )

    def masters(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        """(name, parameter, fp32 master) of all that forward computes with in 16 bits."""
        members = zip(self.names, self.parameters, self.weights, self.formats, strict=True)
        return [(n, p, weight) for n, p, weight, dtype in members if dtype != torch.float32]

    def bind(
        self,
        rule: UpdateRule,
        gradients: Gradients,
        library: KernelLibrary | None,
        *,
        offload: bool,
    ) -> Update:
        """What carries out the group's updates."""
        copies = [None if part.dtype == torch.float32 else part for part in self.parts]
        found = [gradients.gradient(p) for p in self.parameters]
        tensors = UpdateTensors(self.weights, copies, found, self.state)
        if offload:
            return OffloadedUpdate(rule, tensors, self.parts)
        return rule.bind(tensors, library)


def _new_fp32(like: Tensor, offload: bool) -> Tensor:
    """In host memory, or where `like` is."""
    if offload:
        return on_host(like, torch.float32)
    return torch.empty_like(like, dtype=torch.float32)


class Optimizer:
    """Turns the gradients in a buffer into new weights.

    Args:
        named_parameters: the same that the gradient buffer was built from.
        gradients: already reduced when `step` is called.
        config: the rule and the clipping.
        precision: the loss scale.
        layout: which processes hold the rest of the model.
        count_zeros: count the gradient entries that are exactly zero at every step.
        decouples_vocabulary: word embeddings and output layer have a learning rate of their own.
        overlap_gather_in: models whose next forward may begin while sharded weights are still
            gathered (see `WeightBuffer`); None: `step` waits for them.
        gather_in_8_bits: sharded weights that are gathered in 8 bits (likewise).
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        gradients: Gradients,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        layout: Layout,
        *,
        count_zeros: bool = False,
        decouples_vocabulary: bool = False,
        overlap_gather_in: Sequence[nn.Module] | None = None,
        gather_in_8_bits: Mapping[nn.Parameter, Fp8Products] | None = None,
    ) -> None:
        self.gradients = gradients
        self._clip = config.clip_grad
        self._layout = layout
        self._count_zeros = count_zeros
        self._rule = rule_of(config)
        self._scale = loss_scale_of(precision)
        groups = split_groups(named_parameters, decouples=decouples_vocabulary)
        self._shared_weights = gradients.share_weights(overlap_gather_in, gather_in_8_bits or {})
        self._offload = config.optimizer_cpu_offload
        self._groups = [
            _Group.allocate(g, self._rule.state_names, gradients, offload=self._offload)
            for g in groups
        ]
        counted = [p for g in groups for p in g.parameters if is_counted_here(p, layout)]
        self._counted_elements = sum(gradients.owned(p).size for p in counted)
        counted_ids = {id(p) for p in counted}
        self._device = groups[0].parameters[0].device
        library = find_library(self._device).library
        self._updates = [
            (g, g.bind(self._rule, gradients, library, offload=self._offload))
            for g in self._groups
            if g.weights  # of shards a process may hold none
        ]
        counted_views = gradients.views(lambda p: id(p) in counted_ids)
        self._gradient_sums = choose_tensor_sums(
            counted_views, self._device, library, counts=count_zeros
        )
        self._steps = 0
        self.reload_masters()

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward."""
        return self._scale.value

    @property
    def steps(self) -> int:
        """Updates applied so far."""
        return self._steps

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss if self.loss_scale == 1.0 else loss * self.loss_scale

    @property
    def scale_may_change(self) -> bool:
        """Whether the next iteration has a loss scale that only `end_step` of this one tells."""
        return isinstance(self._scale, DynamicScale)

    def step(
        self, lr: float, weight_decay: float, *, decoupled_lr: float | None = None
    ) -> StepResult:
        """`begin_step` and `end_step` in one, waiting for the device. Collective."""
        return self.end_step(self.begin_step(lr, weight_decay, decoupled_lr=decoupled_lr).tolist())

    @torch.no_grad()
    def begin_step(
        self,
        lr: float,
        weight_decay: float,
        *,
        decoupled_lr: float | None = None,
        divisor: Tensor | None = None,
    ) -> Tensor:
        """Unscale, clip and apply the gradients, or leave all as it is where they are not finite.

        Collective over the world: all ranks agree. The gradients are used up. Does not wait for
        the device, but for what offloading copies.

        Args:
            decoupled_lr: of what stands apart with `decouples_vocabulary`; None: `lr`.
            divisor: scalar fp64 on the device, the same on all ranks: by what the gradients are
                too large besides the loss scale; None: by nothing.

        Returns:
            What `end_step` needs, on the device: [3], fp64.
        """
        if self._shared_weights is not None:
            self._shared_weights.settle()  # of modules that no forward has used since
        scale = self.loss_scale if divisor is None else self.loss_scale * divisor
        norm, zeros, nonfinite = self._measure(scale)
        device = torch.device("cpu") if self._offload else self._device
        step = Step(
            lr=lr,
            count=torch.full((), self._steps + 1, dtype=torch.float32, device=device),
            gradient_scale=(scale * self._clip_divisor(norm)).float().to(device),
            found_nonfinite=nonfinite.float().to(device),
        )
        apart = step if decoupled_lr is None else replace(step, lr=decoupled_lr)
        for group, update in self._updates:
            update(
                apart if group.is_decoupled else step,
                weight_decay=weight_decay if group.is_decayed else 0.0,
            )
        if self._shared_weights is not None:
            self._shared_weights.gather()
        return torch.stack([norm, zeros, nonfinite])

    def _measure(self, scale: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Norm without the scale, number of zeros, and 1 if anything is not finite: fp64 scalars.

        One inf or nan makes the sum of squares inf or nan, so a finite norm proves that every
        gradient is finite.
        """
        squares, nonzero = self._gradient_sums()
        totals = sum_over_model(
            torch.stack((squares, self._counted_elements - nonzero)),
            self._layout,
            over_replicas=self.gradients.is_sharded,
        )
        norm = totals[0].sqrt() / scale
        nonfinite = 1.0 - norm.isfinite().double()
        all_reduce(nonfinite, self._layout.world, dist.ReduceOp.MAX)
        return norm, totals[-1], nonfinite

    def _clip_divisor(self, norm: Tensor) -> Tensor:
        """What brings a norm down to the largest allowed; 1 where it is smaller already."""
        if self._clip <= 0:
            return torch.ones_like(norm)
        return ((norm + CLIP_EPS) / self._clip).clamp(min=1.0)

    def end_step(self, outcome: Sequence[float]) -> StepResult:
        """Take note of how the step ended: of the three numbers that `begin_step` gave."""
        norm, zeros, nonfinite = outcome
        found = nonfinite > 0
        overflow = found and self._scale.can_shrink
        self._scale = self._scale.update(found_overflow=found)
        self._steps += not found
        return StepResult(
            applied=not found,
            grad_norm=norm,
            found_nonfinite=found,
            overflow=overflow,
            zeros=int(zeros) if self._count_zeros else None,
        )

    def wait_for_weights(self) -> None:
        """Call before reading parameters outside of their model's forward. Collective."""
        if self._shared_weights is not None:
            self._shared_weights.wait()

    def reload_masters(self, *, of_16_bits: bool = True) -> None:
        """Start the fp32 copies of weights from the weights: after loading these.

        Args:
            of_16_bits: those of 16-bit weights too; not where they were loaded themselves.
        """
        if self._shared_weights is not None:
            self._shared_weights.forget()
        with torch.no_grad():
            for group in self._groups:
                for part, weight, dtype in zip(
                    group.parts, group.weights, group.formats, strict=True
                ):
                    if dtype == torch.float32 or of_16_bits:
                        weight.copy_(part.to(dtype))

    def named_tensors(self) -> dict[str, tuple[Tensor, nn.Parameter]]:
        """Every state tensor with the parameter it belongs to.

        "<parameter>.exp_avg" and "<parameter>.exp_avg_sq", or "<parameter>.momentum"; and
        "<parameter>.master" for a 16-bit parameter. Loading copies into them in place. They have
        the parameter's shape and split; where gradients are sharded they are 1-D and hold the
        elements `gradients.owned(parameter)` of it.
        """
        tensors: dict[str, tuple[Tensor, nn.Parameter]] = {}
        for group in self._groups:
            for i, (name, parameter) in enumerate(zip(group.names, group.parameters, strict=True)):
                for kind, state in group.state.items():
                    tensors[f"{name}.{kind}"] = (state[i], parameter)
            for name, parameter, master in group.masters():
                tensors[f"{name}.master"] = (master, parameter)
        return tensors

    def scalars(self) -> dict[str, Any]:
        """The rest of the state, fit for JSON."""
        return {"step": self._steps, "loss_scale": self._scale.state()}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Take over what `scalars` gave."""
        self._steps = int(scalars["step"])
        self._scale = self._scale.with_state(scalars["loss_scale"])
