"""FP8 versions of a linear layer's three products, and the history that determines their scales.

Both operands of each product are scaled to fill the format's range and rounded to 8 bits
(Micikevicius et al., "FP8 Formats for Deep Learning", 2022). An operand's scale comes from its
current values (current scaling) or from its values in earlier updates (delayed scaling).

A cast that scales by the largest magnitude (amax) of its own tensor reads the tensor twice. A cast
that scales by the amax of earlier updates reads the tensor once and computes this update's amax in
the same pass (Transformer Engine's DelayedScaling). A layer's input, weight and gradient each have
a slot (`AmaxSlot`). Within an update the slot's `scale_amax` is constant and its `running_amax`
only grows, so the result does not depend on the number or order of micro-batches, or on
recomputation. Once per update, all slots of a process advance together, after one max-reduction
over all processes that hold a shard or a replica of the same layers: tensor, context and
data-parallel ranks. All of them then have the same scales. The scales depend on global batches and
not on how these are divided, with one exception: a process divides its losses, and therefore its
gradients, by the number of its micro-batches. None of this waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.kernels.amax import NO_FUSED_AMAXES, FusedAmax, FusedAmaxes, Zeros
from megatron.kernels.fp8 import E4M3, E5M2, Fp8, Fp8Casts
from megatron.kernels.fp8_product import Fp8Product, reference_product
from megatron.kernels.weight_gradient import weight_gradient
from megatron.parallel.collectives import NO_COMMUNICATION, Communication, all_reduce
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.products import LinearCall, Operand, Products, RowOperands

Role = Literal["input", "weight", "gradient"]
"""The three tensors of a layer that are cast: its input, its weight and its output's gradient."""
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class DelayedScaling:
    """The rule that derives scales from the history.

    Attributes:
        length: The number of updates in the history.
        takes_max: Whether to scale by the maximum over the history instead of the latest amax.
        margin: The number of powers of 2 by which scales are smaller than the amax would allow.
        interval: The number of updates between changes of the scales.
    """

    length: int = 1
    takes_max: bool = False
    margin: int = 0
    interval: int = 1

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> DelayedScaling:
        """Return the scaling that the flags specify."""
        return cls(
            length=precision.fp8_amax_history_len,
            takes_max=precision.fp8_amax_compute_algo == "max",
            margin=precision.fp8_margin,
            interval=precision.fp8_interval,
        )


@dataclass(frozen=True)
class AmaxSlot:
    """The amaxes that casts of one tensor read and write.

    Attributes:
        scale_amax: The amax to scale by, fp32 [].
        running_amax: The largest magnitude in this update so far, fp32 [].
        is_valid: A function that returns whether `scale_amax` is valid. Before the first update of
            the history it is not, and casts scale by their tensors' own amaxes, as with
            `--fp8-recipe tensorwise`.
    """

    scale_amax: Tensor
    running_amax: Tensor
    is_valid: Callable[[], bool]


LayerSlots = Mapping[Role, AmaxSlot]
"""The slots of one layer. Without slots, casts scale by their tensors' own amaxes."""


class AmaxHistory:
    """The amaxes of past updates for all layers of this process, from which scales are derived.

    Args:
        layers: The names of the layers. No other process may use the same names for different
            layers.
        largest: The largest value of each role's FP8 format, in the order of `ROLES`.
        scaling: The rule that derives scales from the history.
        layout: The grid of processes. Its tensor ranks hold shards of these layers, and its
            replicas hold copies.
        device: The device of the layers' tensors.
    """

    def __init__(
        self,
        layers: Sequence[str],
        largest: Sequence[float],
        scaling: DelayedScaling,
        layout: Layout,
        device: torch.device,
    ) -> None:
        """Allocate the buffers."""
        self.layers = tuple(layers)
        self._scaling = scaling
        self._layout = layout
        self._has_amaxes = False
        shape = (len(layers), len(ROLES))
        self._largest = torch.tensor(largest, dtype=torch.float32, device=device)
        self._scale_amaxes = torch.zeros(shape, device=device)
        self._running_amaxes = torch.zeros(shape, device=device)
        self._history = torch.zeros(*shape, scaling.length, device=device)  # newest first

    @classmethod
    def empty(cls) -> AmaxHistory:
        """Return an empty history, for layers that scale by their tensors' own amaxes."""
        return cls([], (1.0, 1.0, 1.0), DelayedScaling(), Layout.single(), torch.device("cpu"))

    def slots(self, layer: str) -> LayerSlots:
        """Return the slots of a layer."""
        index = self.layers.index(layer)
        return {
            role: AmaxSlot(scale_amax, running_amax, lambda: self._has_amaxes)
            for role, scale_amax, running_amax in zip(
                ROLES, self._scale_amaxes[index], self._running_amaxes[index], strict=True
            )
        }

    @torch.no_grad()
    def update(self, iteration: int) -> None:
        """Add this update's amaxes to the history, and update the scales. Collective.

        Amaxes that are not finite are not recorded. If the amax of any gradient is not finite, no
        gradient's amax is recorded, because the loss scale was too high for all gradients and will
        be lowered. A tensor that was zero keeps its scale.

        Args:
            iteration: The number of updates of the run so far, including this one.
        """
        scaling, newest = self._scaling, self._global_amaxes()
        older = self._history[..., :-1]
        self._history.copy_(torch.cat((newest.unsqueeze(-1), older), dim=-1))
        if iteration % scaling.interval == 0 or not self._has_amaxes:
            amaxes = self._history.amax(dim=-1) if scaling.takes_max else newest
            # A tensor without an amax gets a scale of 1.
            unchanged = torch.where(self._scale_amaxes > 0, self._scale_amaxes, self._largest)
            self._scale_amaxes.copy_(
                torch.where(amaxes > 0, amaxes * 2.0**scaling.margin, unchanged)
            )
        self._running_amaxes.zero_()
        self._has_amaxes = True

    def _global_amaxes(self) -> Tensor:
        """Return the maxima of all processes' amaxes, [layers, 3], with 0 for those to ignore."""
        finite = self._running_amaxes.isfinite()
        overflow = ~finite[:, ROLES.index("gradient")].all()
        # Remove nan first: no backend specifies the maximum of values that include nan.
        clean = self._running_amaxes.where(finite, 0.0)
        packed = torch.cat((clean.flatten(), overflow.float().unsqueeze(0)))
        for axis in (self._layout.tensor, self._layout.replica):
            all_reduce(packed, axis, dist.ReduceOp.MAX)
        amaxes = packed[:-1].view_as(clean)
        amaxes[:, ROLES.index("gradient")] *= 1 - packed[-1]
        return amaxes

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Discard the amaxes recorded inside the block, in which layers use averaged weights."""
        running_amaxes = self._running_amaxes.clone()
        yield
        self._running_amaxes.copy_(running_amaxes)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint, the same on every process that has the layer.

        Each layer has two: `NAME.held` [3], the amaxes to scale by, all zero before the first
        update; and `NAME.history` [3, length], the newest entry first.
        """
        tensors = {}
        for index, name in enumerate(self.layers):
            tensors[f"{name}.held"] = self._scale_amaxes[index]
            tensors[f"{name}.history"] = self._history[index]
        return tensors

    def after_loading(self) -> None:
        """Use the values that a checkpoint has loaded into `named_tensors`.

        Amaxes of this update so far are dropped: a run that goes back to a checkpoint may have
        cast weights for its next update. This waits for the device.
        """
        self._running_amaxes.zero_()
        self._has_amaxes = bool((self._scale_amaxes > 0).any())


@dataclass(frozen=True)
class Fp8Format:
    """The 8-bit formats to which tensors are rounded.

    Attributes:
        values: The format of inputs and weights.
        gradients: The format of output gradients, which need more range and less precision.
        by_row: Whether each row of an operand has its own scale, instead of one scale for the
            whole operand.
        weight_gradient: Whether the weight's gradient is also computed in 8 bits, instead of the
            tensors' own format.
    """

    values: torch.dtype = E4M3
    gradients: torch.dtype = E5M2
    by_row: bool = False
    weight_gradient: bool = True


@dataclass(frozen=True)
class ArrivingWeight:
    """A weight that is gathered in 8 bits from the processes that share its update.

    Attributes:
        fp8: The weight, [out, in], always in the same memory.
        has_arrived: A function that returns whether the 8-bit weight has been gathered. Until the
            first update, each process casts its own copy of the weight instead.
    """

    fp8: Fp8
    has_arrived: Callable[[], bool]


class Fp8Products(Products):
    """FP8 products of 16-bit tensors whose sizes are multiples of 16.

    The forward pass allows the hardware to accumulate with fewer bits; the backward pass does not.
    Casts are reused: a weight is cast once per update, and an input and a gradient once for both
    of their products. A shard of an input is cast before it is gathered, which halves the traffic.

    Args:
        fp8_format: The 8-bit formats.
        casts: The implementation of the casts.
        multiply: The implementation of the products.
        zeros: Zeroed memory in which other kernels store the amaxes of the input and of the
            output's gradient for the casts; `None` if the casts need no amax or compute it
            themselves.

    Attributes:
        slots: The slots for delayed scaling; if empty, casts scale by their tensors' own amaxes.
        arriving: The weight, if it is gathered in 8 bits; `None` if this process casts it.
        casts: The implementation of the casts.
    """

    matches_autograd = False

    def __init__(
        self,
        fp8_format: Fp8Format,
        casts: Fp8Casts,
        multiply: Fp8Product = reference_product,
        zeros: Zeros | None = None,
    ) -> None:
        """Create products with current scaling, whose weight this process casts."""
        self.slots: LayerSlots = {}
        self.arriving: ArrivingWeight | None = None
        self.fused_amaxes = NO_FUSED_AMAXES
        if zeros is not None:
            self.fused_amaxes = FusedAmaxes(FusedAmax(zeros), FusedAmax(zeros))
        forward, backward = self.fused_amaxes
        self._fused_amax_of = {"input": forward, "gradient": backward}
        self._fp8_format = fp8_format
        self._formats = dict(
            zip(ROLES, (fp8_format.values, fp8_format.values, fp8_format.gradients), strict=True)
        )
        self.casts = casts
        self._product = multiply
        self._weight: tuple[Fp8, Fp8] | None = None
        self.keeps_input = not fp8_format.weight_gradient
        # With one scale for all rows of an operand and its transpose, it does not matter which
        # ranks hold the rows.
        self.can_be_split = fp8_format.weight_gradient and not fp8_format.by_row

    def scale_by(self, slots: LayerSlots) -> None:
        """Switch to delayed scaling with the given slots."""
        self.slots = slots

    def receive_weight(self, weight: ArrivingWeight) -> None:
        """Switch to a weight that is gathered in 8 bits."""
        self.arriving = weight

    @property
    def largest(self) -> list[float]:
        """The largest finite value of the formats of input, weight and gradient."""
        return [torch.finfo(fp8).max for fp8 in self._formats.values()]

    @property
    def weight_format(self) -> torch.dtype | None:
        """The 8-bit dtype of the weight; `None` if each row has its own scale."""
        return None if self._fp8_format.by_row else self._fp8_format.values

    def forward(
        self, call: LinearCall, communication: Communication = NO_COMMUNICATION
    ) -> tuple[Tensor, Operand]:
        """Return the output [s, ..., out], and the 8-bit transposes of the weight and the input.

        The input's transpose is omitted if the input itself is saved.
        """
        x = call.x
        wait_for_input = self._start_input(x, communication, records=call.training)
        by_out, by_in = self.weight_operands(call.weight)  # cast while the input is in transit
        left, transposed = wait_for_input()
        saved: Operand = by_in if transposed is None else (*by_in, *transposed)
        out = self._product(left, by_out, x.dtype, bias=call.bias, fast=True)
        return out.view(-1, *x.shape[1:-1], out.shape[-1]), saved

    def weight_operands(self, weight: Tensor) -> tuple[Fp8, Fp8]:
        """Return the weight and its transpose in 8 bits, cast once per update."""
        if self._weight is None:
            self._weight = self._cast_weight(weight)
        return self._weight

    def _cast_weight(self, weight: Tensor) -> tuple[Fp8, Fp8]:
        # Evaluation may come first. It casts the same weight that training would use.
        if self.arriving is None:
            return self._cast_transpose(weight, "weight", records=True)
        whole = self.arriving.fp8
        if not self.arriving.has_arrived():
            # Cast into the arriving weight's memory, to save memory.
            amax, running_amax = self._amaxes(weight, "weight", NO_COMMUNICATION, records=True)
            fp8 = whole.values.dtype
            whole = self.casts.cast(weight, amax, fp8, running_amax=running_amax, into=whole.values)
        return whole, self.casts.transpose(whole)

    def amax_of_weight(self) -> Tensor | None:
        """Return the amax by which the weight is scaled, fp32 []; `None` for its current amax."""
        slot = self.slots.get("weight")
        return slot.scale_amax if slot is not None and slot.is_valid() else None

    def cast_part(self, part: Tensor, amax: Tensor, into: Tensor) -> None:
        """Cast some elements of the weight to 8 bits. With delayed scaling, record their amax.

        Args:
            part: The elements [n]; n is a multiple of 16.
            amax: The amax that scales the whole weight.
            into: The memory for the result, [n].
        """
        rows, slot = part.view(-1, 16), self.slots.get("weight")
        running_amax = None if slot is None else slot.running_amax
        self.casts.cast(
            rows, amax, self._formats["weight"], running_amax=running_amax, into=into.view(-1, 16)
        )

    def _start_input(
        self, x: Tensor, communication: Communication, *, records: bool
    ) -> Callable[[], tuple[Fp8, Fp8 | None]]:
        """Start casting and gathering the input.

        Returns:
            A function that waits for the whole input and returns it in 8 bits, with its transpose
            if the weight's gradient needs the transpose.
        """
        # With a scale per row, the transpose has other values and would also have to be sent.
        if not communication.gathers or (self._fp8_format.by_row and not self.keeps_input):
            rows = communication.start_gather(x).wait().flatten(0, -2)
            if self.keeps_input:
                whole = self._cast(rows, "input", NO_COMMUNICATION, records=records)
                return lambda: (whole, None)
            both = self._cast_transpose(rows, "input", records=records)
            return lambda: both
        rows = x.flatten(0, -2).contiguous()
        part = self._cast(rows, "input", communication, records=records)
        # gloo does not support FP8.
        values = communication.start_gather(part.values.view(torch.uint8))
        scales = communication.start_gather(part.inverse) if self._fp8_format.by_row else None

        def wait() -> tuple[Fp8, Fp8 | None]:
            inverse = part.inverse if scales is None else scales.wait()
            whole = Fp8(values.wait().view(part.values.dtype), inverse)
            return whole, None if self.keeps_input else self.casts.transpose(whole)

        return wait

    def prepare(self, grad: Tensor, axis: Axis | None = None) -> Operand:
        """Return the gradient in 8 bits, and its transpose if needed and this rank has all rows."""
        return self._operand(grad.flatten(0, -2).contiguous(), "gradient", axis)

    def prepare_input(self, x: Tensor, axis: Axis | None, *, training: bool) -> Operand:
        """Return the input in 8 bits, and its transpose if needed and this rank has all rows."""
        return self._operand(x, "input", axis, records=training)

    def _operand(
        self, rows: Tensor, role: Role, axis: Axis | None, *, records: bool = True
    ) -> Operand:
        # The first tensor carries the dtype of the result. The weight gradient may also read it.
        like = rows if self.keeps_input else rows.new_empty(0)
        if axis is None and not self.keeps_input:
            left, transposed = self._cast_transpose(rows, role, records=records)
            return like, *left, *transposed
        communication = (
            NO_COMMUNICATION if axis is None else Communication(axis, along_sequence=True)
        )
        return like, *self._cast(rows, role, communication, records=records)

    def input_gradient(self, grad: Operand, saved: Operand) -> Tensor:
        """Return the input's gradient grad W, [m, in]."""
        return self._product(Fp8(*grad[1:3]), Fp8(*saved[:2]), grad[0].dtype)

    def weight_gradient(
        self, grad: Operand, saved: Operand, x: Tensor | None, into: Tensor, *, accumulate: bool
    ) -> None:
        """Write grad^T x to `into` [out, in], or add it if `accumulate`.

        The product is computed in 16 bits if the input was saved, otherwise in 8 bits.
        """
        if x is not None:
            weight_gradient(grad[0], x, into, accumulate=accumulate)
            return
        left, right = Fp8(*grad[3:]), Fp8(*saved[2:])
        self._product(left, right, into.dtype, into=into, accumulate=accumulate)

    def forget(self) -> None:
        """Discard the cast weight, the memory of the casts, and amaxes that were never used."""
        self._weight = None
        self.casts.forget()
        for fused_amax in self.fused_amaxes:
            if fused_amax is not None:
                fused_amax.forget()

    def rows_of(self, operand: Operand) -> Tensor:
        """Return the rows as bytes, because gloo does not support FP8."""
        return operand[1].view(torch.uint8)

    def with_all_rows(self, operand: Operand, rows: Tensor, *, copy: bool) -> Operand:
        """Return the operand with the transpose of all ranks' rows."""
        like, values, inverse = operand
        whole = Fp8(rows.view(values.dtype), inverse)
        return like, values, inverse, *self.casts.transpose(whole)

    def keep(self, weight: Operand, operand: Operand) -> Operand:
        """Return the transposes of the weight and the input."""
        return *weight, *operand[3:]

    def multiply_rows(self, operands: RowOperands, rows: Tensor, into: Tensor) -> None:
        """Write the product of some rows, which share the scale of the whole operand."""
        _, values, inverse, *_ = operands.rows
        part, weight = Fp8(rows.view(values.dtype), inverse), Fp8(*operands.weight[:2])
        fast = not operands.backward
        self._product(part, weight, into.dtype, bias=operands.bias, fast=fast, into=into)

    def _cast(self, x: Tensor, role: Role, communication: Communication, *, records: bool) -> Fp8:
        """Cast a matrix [m, k], or some of its rows with the scale of the whole matrix."""
        if self._fp8_format.by_row:
            return self.casts.cast_rows(x, self._formats[role])
        amax, running_amax = self._amaxes(x, role, communication, records=records)
        return self.casts.cast(x, amax, self._formats[role], running_amax=running_amax)

    def _cast_transpose(self, x: Tensor, role: Role, *, records: bool) -> tuple[Fp8, Fp8]:
        """Cast a matrix [m, k] and its transpose [k, m]."""
        if self._fp8_format.by_row:
            return self.casts.cast_transpose_rows(x, self._formats[role])
        amax, running_amax = self._amaxes(x, role, NO_COMMUNICATION, records=records)
        return self.casts.cast_transpose(x, amax, self._formats[role], running_amax=running_amax)

    def _amaxes(
        self, x: Tensor, role: Role, communication: Communication, *, records: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the amax to scale by, and the tensor that records the amax of `x`, if any."""
        slot = self.slots.get(role)
        running_amax = slot.running_amax if slot is not None and records else None
        if slot is not None and slot.is_valid():
            return slot.scale_amax, running_amax
        fused_amax = self._fused_amax_of.get(role)
        amax = None if fused_amax is None else fused_amax.pop(x)
        if amax is None:
            amax = self.casts.amax(x)
        return communication.start_max(amax).wait(), running_amax
