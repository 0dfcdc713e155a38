"""The three products of a linear layer in 8 bits: see `products`.

Both factors of each are rounded to 8 bits (Micikevicius et al., "FP8 Formats for Deep Learning",
2022), after scaling them to fill the format's range: by what they hold at that moment (current
scaling), or where `amax_history` has slots for the layer, by what such tensors held before (delayed
scaling).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.fp8 import E4M3, E5M2, Fp8, Fp8Casts
from megatron.kernels.fp8_product import Fp8Product, reference_product
from megatron.kernels.weight_gradient import weight_gradient
from megatron.parallel.amax_history import LayerSlots, Slot
from megatron.parallel.communication import ALONE, Communication
from megatron.parallel.layout import Axis
from megatron.parallel.products import Kept


@dataclass(frozen=True)
class Fp8Format:
    """What is rounded to what.

    Attributes:
        values: format of inputs and weights.
        gradients: of outputs' gradients, which need range more than precision.
        by_row: each row of a factor has its own scale, else the factor has one.
        weight_gradient: this product is in 8 bits too, else in the tensors' own format.
    """

    values: torch.dtype = E4M3
    gradients: torch.dtype = E5M2
    by_row: bool = False
    weight_gradient: bool = True


@dataclass(frozen=True)
class ArrivingWeight:
    """A weight that the processes which share its update send each other in 8 bits.

    Attributes:
        fp8: it, [out, in]; the same memory for ever.
        is_there: whether it has arrived. Not before the first update: all processes then have the
            weight itself, and cast it.
    """

    fp8: Fp8
    is_there: Callable[[], bool]


class Fp8Products:
    """In 8 bits, from 16-bit tensors whose sizes are multiples of 16.

    Forward lets the hardware keep fewer bits of its sums, backward does not. Casts are shared: a
    weight is cast once an update, an input and a gradient once for both of their products. A part
    of an input is cast before it is gathered, which halves what travels.

    Args:
        form: the formats.
        casts: kernels, or plain PyTorch.
        multiply: likewise.

    Attributes:
        slots: for delayed scaling; as created: current scaling.
        arriving: the weight, where it comes in 8 bits; None: it is cast here.
    """

    def __init__(
        self, form: Fp8Format, casts: Fp8Casts, multiply: Fp8Product = reference_product
    ) -> None:
        self.slots = LayerSlots()
        self.arriving: ArrivingWeight | None = None
        self._form = form
        self._casts = casts
        self._multiply = multiply
        self._weight: tuple[Fp8, Fp8] | None = None

    @property
    def largest(self) -> tuple[float, float, float]:
        """Of the formats of input, weight and gradient the largest number."""
        values, gradients = (
            torch.finfo(kind).max for kind in (self._form.values, self._form.gradients)
        )
        return values, values, gradients

    @property
    def keeps_input(self) -> bool:
        return not self._form.weight_gradient

    @property
    def weight_format(self) -> torch.dtype | None:
        """What a weight is cast to with one scale; None where each of its rows has its own."""
        return None if self._form.by_row else self._form.values

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        communication: Communication = ALONE,
        *,
        training: bool = True,
    ) -> tuple[Tensor, Kept]:
        arriving = self._start_input(x, communication, records=training)
        by_out, by_in = self.weight_factors(weight)  # cast while the input travels
        left, turned = arriving()
        kept: Kept = (by_in.values, by_in.inverse)
        if turned is not None:
            kept += (turned.values, turned.inverse)
        out = self._multiply(left, by_out, x.dtype, bias=bias, fast=True)
        return out.view(-1, *x.shape[1:-1], out.shape[-1]), kept

    def _cast_weight(self, weight: Tensor) -> tuple[Fp8, Fp8]:
        # Evaluation may be the first to cast it: of the weight it finds what training would.
        fp8, slot = self._form.values, self.slots.weight
        if self.arriving is None:
            return self._both(weight, fp8, slot)
        whole = self.arriving.fp8
        if not self.arriving.is_there():  # its memory is: a cast beside it would take more
            amax, found = self._amax(weight, slot, ALONE), slot.found if slot else None
            whole = self._casts.cast(weight, amax, fp8, found=found, into=whole.values)
        return whole, self._casts.transpose(whole)

    def amax_of_weight(self) -> Tensor | None:
        """What casts of the weight scale by, fp32 []; None: by what it holds."""
        slot = self.slots.weight
        return slot.held if slot is not None and slot.has_begun() else None

    def measure_part(self, part: Tensor) -> Tensor:
        """The largest magnitude in some elements [n] of the weight: fp32 []."""
        return self._casts.amax(part)

    def cast_part(self, part: Tensor, amax: Tensor, into: Tensor) -> None:
        """Write some elements [n] of the weight, n a multiple of 16, in 8 bits `into` [n].

        Args:
            part: they.
            amax: what the whole weight scales by.
            into: where they go.
        """
        rows, slot = part.view(-1, 16), self.slots.weight
        found = None if slot is None else slot.found
        self._casts.cast(rows, amax, self._form.values, found=found, into=into.view(-1, 16))

    def _start_input(
        self, x: Tensor, communication: Communication, *, records: bool
    ) -> Callable[[], tuple[Fp8, Fp8 | None]]:
        """Begin to cast and to gather; the result waits for the whole input, and for its transpose
        where the weight's gradient takes it."""
        fp8, slot, in_16_bits = self._form.values, self.slots.input, self.keeps_input
        # A transpose with scales of its own is another matrix, which would have to travel too.
        if not communication.gathers or (self._form.by_row and not in_16_bits):
            rows = communication.start_gather(x).wait().flatten(0, -2)
            if in_16_bits:
                whole = self._one(rows, fp8, slot, records=records)
                return lambda: (whole, None)
            both = self._both(rows, fp8, slot, records=records)
            return lambda: both
        rows = x.flatten(0, -2).contiguous()
        part = self._one(rows, fp8, slot, communication, records=records)
        values = communication.start_gather(part.values.view(torch.uint8))  # gloo knows no fp8
        scales = communication.start_gather(part.inverse) if self._form.by_row else None

        def arrived() -> tuple[Fp8, Fp8 | None]:
            inverse = part.inverse if scales is None else scales.wait()
            whole = Fp8(values.wait().view(fp8), inverse)
            return whole, None if in_16_bits else self._casts.transpose(whole)

        return arrived

    def prepare(self, grad: Tensor) -> Kept:
        rows = grad.flatten(0, -2).contiguous()
        slot = self.slots.gradient
        if self.keeps_input:
            left = self._one(rows, self._form.gradients, slot)
            return rows, left.values, left.inverse
        left, turned = self._both(rows, self._form.gradients, slot)
        # The first tensor tells the format of the result.
        return rows.new_empty(0), left.values, left.inverse, turned.values, turned.inverse

    def input_gradient(self, grad: Kept, kept: Kept) -> Tensor:
        return self._multiply(Fp8(*grad[1:3]), Fp8(*kept[:2]), grad[0].dtype)

    def weight_gradient(
        self, grad: Kept, kept: Kept, x: Tensor | None, into: Tensor, *, accumulate: bool
    ) -> None:
        if x is not None:
            weight_gradient(grad[0], x, into, accumulate=accumulate)
            return
        left, right = Fp8(*grad[3:]), Fp8(*kept[2:])
        self._multiply(left, right, into.dtype, into=into, accumulate=accumulate)

    def forget(self) -> None:
        self._weight = None
        self._casts.forget()

    # The factors one by one, for products that are cut: see `overlapped_fp8`.

    @property
    def can_be_cut(self) -> bool:
        """One scale serves all rows of a factor, and its transpose, wherever they are."""
        return not self._form.by_row and self._form.weight_gradient

    def weight_factors(self, weight: Tensor) -> tuple[Fp8, Fp8]:
        """[out, in] and its transpose, cast once an update."""
        if self._weight is None:
            self._weight = self._cast_weight(weight)
        return self._weight

    def input_part(self, rows: Tensor, axis: Axis, *, training: bool) -> Fp8:
        """This rank's rows [m, in], scaled as those of all ranks."""
        everyone = Communication(axis, along_sequence=True)
        return self._one(rows, self._form.values, self.slots.input, everyone, records=training)

    def input_factors(self, rows: Tensor, *, training: bool) -> tuple[Fp8, Fp8]:
        """All rows [m, in] and their transpose."""
        return self._both(rows, self._form.values, self.slots.input, records=training)

    def gradient_part(self, rows: Tensor, axis: Axis) -> Fp8:
        """As `input_part`, of the output's gradient [m, out]."""
        everyone = Communication(axis, along_sequence=True)
        return self._one(rows, self._form.gradients, self.slots.gradient, everyone)

    def gradient_factors(self, rows: Tensor) -> tuple[Fp8, Fp8]:
        """As `input_factors`."""
        return self._both(rows, self._form.gradients, self.slots.gradient)

    def transpose(self, matrix: Fp8) -> Fp8:
        """Of a factor that has one scale."""
        return self._casts.transpose(matrix)

    def multiply(
        self,
        left: Fp8,
        right: Fp8,
        into: Tensor,
        *,
        bias: Tensor | None = None,
        fast: bool = False,
        accumulate: bool = False,
    ) -> None:
        """See `Fp8Product`."""
        self._multiply(
            left, right, into.dtype, bias=bias, fast=fast, into=into, accumulate=accumulate
        )

    def _one(
        self,
        x: Tensor,
        fp8: torch.dtype,
        slot: Slot | None,
        communication: Communication = ALONE,
        *,
        records: bool = True,
    ) -> Fp8:
        """A matrix [m, k], or a part of its rows with the scale of the whole."""
        if self._form.by_row:
            return self._casts.cast_rows(x, fp8)
        amax = self._amax(x, slot, communication)
        return self._casts.cast(x, amax, fp8, found=slot.found if slot and records else None)

    def _both(
        self, x: Tensor, fp8: torch.dtype, slot: Slot | None, *, records: bool = True
    ) -> tuple[Fp8, Fp8]:
        """[m, k] and its transpose [k, m]."""
        if self._form.by_row:
            return self._casts.cast_transpose_rows(x, fp8)
        amax, found = self._amax(x, slot, ALONE), slot.found if slot and records else None
        return self._casts.cast_transpose(x, amax, fp8, found=found)

    def _amax(self, x: Tensor, slot: Slot | None, communication: Communication) -> Tensor:
        """What to scale by."""
        if slot is not None and slot.has_begun():
            return slot.held
        return communication.start_max(self._casts.amax(x)).wait()
