"""AdamW over many tensors in one pass, which also rounds the fp32 weights to 16-bit copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.library import DTYPE_CODES, Kernel, KernelLibrary
from megatron.kernels.plans import KernelLaunch, Number, Pointer
from megatron.kernels.sources import FLOATS, constant, instance
from megatron.kernels.tensor_sums import CHUNK, TensorTable


class _AdamUpdate(NamedTuple):
    """The arguments of an Adam step for all tensors.

    The step changes nothing if `found_nonfinite` is not 0.
    """

    tensors: Pointer
    pieces: Pointer  # (tensor, first element), of up to `chunk` elements each
    step: Pointer
    gradient_scale: Pointer  # the divisor of gradients
    found_nonfinite: Pointer
    piece_count: int
    chunk: int
    gradient: int
    copy: int
    beta1: Number
    beta2: Number
    epsilon: Number
    rate: Number
    decay: Number

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        if self.piece_count == 0:
            return []
        kernel = instance("adam_kernel", FLOATS[self.gradient], FLOATS[self.copy])
        threads = constant("adam.cu", "kThreads")
        return [
            KernelLaunch(
                kernel,
                (self.piece_count,),
                (threads,),
                (*self[:5], self.chunk, *self[9:]),  # tensors, then numbers
            )
        ]


ADAM_UPDATE = Kernel.of("adam_update", _AdamUpdate)


class AdamTensors(NamedTuple):
    """The tensors that updates read and change. They must be contiguous and must not move.

    Attributes:
        weights: The weights, fp32.
        copies: The 16-bit copies of the weights, written with each update; `None` for a weight
            without a copy.
        gradients: The gradients, fp32 or 16 bits. The PyTorch implementation may change them.
        exp_avg: The running means of the gradients, fp32.
        exp_avg_sq: The running means of the squared gradients, fp32.
    """

    weights: Sequence[Tensor]
    copies: Sequence[Tensor | None]
    gradients: Sequence[Tensor]
    exp_avg: Sequence[Tensor]
    exp_avg_sq: Sequence[Tensor]


@dataclass(frozen=True)
class AdamNumbers:
    """The scalars of an update.

    Attributes:
        lr: The learning rate.
        beta1: The decay rate of the running mean of gradients.
        beta2: The decay rate of the running mean of squared gradients.
        eps: The number added to the square root in the denominator.
        weight_decay: The decoupled weight decay.
        step: The index of the update, from 1, fp32 [] on the device.
        gradient_scale: The divisor of the gradients, fp32 [] on the device.
        found_nonfinite: If not 0, the update changes nothing, fp32 [] on the device.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: Tensor
    gradient_scale: Tensor
    found_nonfinite: Tensor


def choose_adam(
    tensors: AdamTensors, library: KernelLibrary | None
) -> Callable[[AdamNumbers], None]:
    """Return a function that updates the tensors.

    Args:
        tensors: The tensors to read and update.
        library: Compiled kernels; `None` means PyTorch's operations.
    """
    if library is None or not tensors.weights:
        return partial(adam_reference, tensors)
    by_formats: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor | None, ...]]] = {}
    for weight, copy, gradient, first, second in zip(*tensors, strict=True):
        formats = (gradient.dtype, weight.dtype if copy is None else copy.dtype)
        row = (gradient.detach(), weight.detach(), first, second, copy)
        by_formats.setdefault(formats, []).append(row)
    device = tensors.weights[0].device
    tables = [
        (TensorTable.of(rows, device), DTYPE_CODES[gradient], DTYPE_CODES[copy])
        for (gradient, copy), rows in by_formats.items()
    ]
    return partial(_adam, tables, library)


def adam_reference(tensors: AdamTensors, numbers: AdamNumbers) -> None:
    """Update the weights with PyTorch's fused kernel, and then their copies.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  with bias-corrected m', v':
    w = w - lr (m' / (sqrt(v') + eps) + weight_decay w).
    """
    if not tensors.weights:
        return
    torch._fused_adamw_(
        list(tensors.weights),
        [gradient.float() for gradient in tensors.gradients],
        list(tensors.exp_avg),
        list(tensors.exp_avg_sq),
        [],
        [numbers.step] * len(tensors.weights),
        lr=numbers.lr,
        beta1=numbers.beta1,
        beta2=numbers.beta2,
        weight_decay=numbers.weight_decay,
        eps=numbers.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=numbers.gradient_scale,
        found_inf=numbers.found_nonfinite,
    )
    copy_weights(tensors.weights, tensors.copies)


def copy_weights(weights: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
    """Round fp32 weights to their 16-bit copies, if any."""
    pairs = [(copy, w) for copy, w in zip(copies, weights, strict=True) if copy is not None]
    if pairs:
        torch._foreach_copy_([copy for copy, _ in pairs], [weight for _, weight in pairs])


def _adam(
    tables: Sequence[tuple[TensorTable, int, int]], library: KernelLibrary, numbers: AdamNumbers
) -> None:
    for table, gradient, copy in tables:
        library.launch(
            ADAM_UPDATE,
            *(table.tensors, table.pieces),
            *(numbers.step, numbers.gradient_scale, numbers.found_nonfinite),
            *(len(table.pieces), CHUNK, gradient, copy),
            *(numbers.beta1, numbers.beta2, numbers.eps, numbers.lr, numbers.weight_decay),
        )
