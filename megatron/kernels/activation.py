"""Activation functions of the MLP, which also add the bias of the preceding projection.

Each function is implemented with PyTorch's operations. Some also have a CUDA kernel
(`fused_activation`) that adds the bias and applies the function. Its backward pass recomputes both
steps from the input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.device import Device
from megatron.kernels.amax import NO_FUSED_AMAXES, FusedAmax, FusedAmaxes, zero_for
from megatron.kernels.library import (
    DTYPE_CODES,
    VECTOR_BYTES,
    Kernel,
    KernelLibrary,
    operator,
    supports,
)
from megatron.kernels.plans import (
    KernelLaunch,
    Pointer,
    column_shape,
    column_sums,
    summing_blocks,
    vector_size,
)
from megatron.kernels.sources import FLOATS, constant, instance

KINDS = {"gelu_tanh": 0, "gelu": 1, "squared_relu": 2, "swiglu": 3}  # as in activation.cu
PARTIALS = 4  # the number of rows of partial sums per multiprocessor


class _ActivationForward(NamedTuple):
    """The arguments of a kernel that applies an activation function to the sum x + bias."""

    x: Pointer  # [rows, columns], or [rows, 2 * columns] for SwiGLU
    bias: Pointer | None  # in the shape of a row of x
    out: Pointer  # [rows, columns]
    amax: Pointer | None  # initially zero; raised to the largest magnitude of out
    rows: int
    columns: int
    kind: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        name = FLOATS[self.dtype]
        at_once = 2 if self.kind == KINDS["swiglu"] else 4  # rows_at_once in activation.cu
        shape = column_shape(self.rows, self.columns // vector_size(name), at_once)
        kernel = instance("activation_forward_kernel", name, self.kind)
        return [
            KernelLaunch(
                kernel,
                shape.grid,
                (shape.threads,),
                self[:6],
            )
        ]


class _ActivationBackward(NamedTuple):
    """The arguments of kernels that compute the gradients of x and bias."""

    x: Pointer
    bias: Pointer | None
    grad: Pointer
    grad_x: Pointer
    grad_bias: Pointer | None
    partials: Pointer | None  # scratch, fp32 [capacity, width of x]
    amax: Pointer | None  # initially zero; raised to the largest magnitude of grad_x
    capacity: int
    multiprocessors: int
    rows: int
    columns: int
    kind: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        name, sums = FLOATS[self.dtype], self.grad_bias is not None
        vectors = self.columns // vector_size(name)
        residency = 2 if self.kind == KINDS["swiglu"] else 3  # residency in activation.cu
        blocks = (
            summing_blocks(vectors, self.multiprocessors * residency, self.capacity) if sums else 0
        )
        shape = column_shape(
            self.rows, vectors, constant("activation.cu", "kRowsAtOnceBackward"), blocks
        )
        launches = [
            KernelLaunch(
                instance("activation_backward_kernel", name, self.kind, sums),
                shape.grid,
                (shape.threads,),
                (*self[:4], self.partials, self.amax, self.rows, self.columns),
            )
        ]
        if sums:
            width = self.columns * (2 if self.kind == KINDS["swiglu"] else 1)
            launches.append(
                column_sums(
                    name, (self.partials, None), (self.grad_bias, None), shape.grid[0], width
                )
            )
        return launches


ACTIVATION_FORWARD = Kernel.of("activation_forward", _ActivationForward)
ACTIVATION_BACKWARD = Kernel.of("activation_backward", _ActivationBackward)


Activation = Callable[..., Tensor]
"""An implementation of an activation function.

It takes x [..., f] (gated: [..., 2 f]) and an optional bias as long as the last dimension of x,
which it adds first.
"""


def choose_activation(
    name: str,
    library: KernelLibrary | None = None,
    fused_amaxes: FusedAmaxes = NO_FUSED_AMAXES,
    *,
    fuses_gelu: bool = True,
    clamp: float | None = None,
    offset: float = 0.0,
) -> Activation:
    """Choose the implementation of an activation.

    Args:
        name: The name, as in `ModelConfig.activation`.
        library: The fused kernels, which support only `KINDS`, without `clamp` and `offset`; `None`
            means PyTorch's operations.
        fused_amaxes: Where to store the amaxes of the result and of the gradient of x. Only kernels
            compute them.
        fuses_gelu: Whether GELU may use the fused kernels; False with --no-bias-gelu-fusion.
        clamp: The limit on gate and up of a gated activation (`clamped_gate`); `None` for no limit.
        offset: The number added to up.
    """
    if clamp is not None or offset:
        return partial(clamped_gate, _GATES[name], clamp=clamp, offset=offset)
    plain = _FORMULAS[name]
    if library is None or name not in KINDS or (plain in (gelu, gelu_tanh) and not fuses_gelu):
        return plain
    return partial(fused_activation, library, plain, fused_amaxes=fused_amaxes)


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the exact GELU of u = x + bias: u times the standard normal CDF at u."""
    return F.gelu(_add(x, bias))


def gelu_tanh(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the tanh approximation of the GELU of u = x + bias.

    It is u / 2 (1 + tanh(sqrt(2 / pi) (u + 0.044715 u^3))).
    """
    return F.gelu(_add(x, bias), approximate="tanh")


def squared_relu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return max(x + bias, 0)^2 (Primer)."""
    return F.relu(_add(x, bias)).square()


def relu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return max(x + bias, 0)."""
    return F.relu(_add(x, bias))


def swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Split x + bias [..., 2 f] into gate and up; return SiLU(gate) * up (Shazeer, 2020)."""
    gate, up = _add(x, bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Split x + bias [..., 2 f] into gate and up; return gelu_tanh(gate) * up (Shazeer, 2020)."""
    gate, up = _add(x, bias).chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def quick_geglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Split x + bias [..., 2 f] into gate and up; return gate * sigmoid(1.702 gate) * up."""
    gate, up = _add(x, bias).chunk(2, dim=-1)
    return _quick_gelu(gate) * up


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_FORMULAS = {
    f.__name__: f for f in (gelu, gelu_tanh, relu, squared_relu, swiglu, geglu, quick_geglu)
}
# The function that each gated activation applies to the gate.
_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": partial(F.gelu, approximate="tanh"),
    "quick_geglu": _quick_gelu,
}


def clamped_gate(
    activation: Callable[[Tensor], Tensor],
    x: Tensor,
    bias: Tensor | None = None,
    *,
    clamp: float | None,
    offset: float,
) -> Tensor:
    """Split x + bias into gate and up; return activation(gate) * (up + offset) (GPT-OSS).

    Args:
        activation: The function to apply to the gate.
        x: The gate and up, [..., 2 f].
        bias: The bias [2 f], or `None`.
        clamp: The maximum of the gate, and of the magnitude of up; `None` for no limit.
        offset: The number added to up.

    Returns:
        The result [..., f].
    """
    gate, up = _add(x, bias).chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return activation(gate) * (up + offset)


def _add(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def fused_activation(
    library: KernelLibrary,
    plain: Activation,
    x: Tensor,
    bias: Tensor | None = None,
    *,
    fused_amaxes: FusedAmaxes = NO_FUSED_AMAXES,
) -> Tensor:
    """Apply an activation with a kernel, or with PyTorch if the kernel does not support the tensor.

    The kernel sums the gradient of the bias in a fixed order.

    Args:
        library: Compiled kernels.
        plain: The function in PyTorch: gelu, gelu_tanh, squared_relu or swiglu.
        x: The input [..., f] (SwiGLU: [..., 2 f]).
        bias: A vector as long as the last dimension of x, or `None`.
        fused_amaxes: Where to store the amaxes of the result and of the gradient of x.

    Returns:
        The result [..., f].
    """
    columns = x.shape[-1] // (2 if plain is swiglu else 1)
    if not supports(x, bias) or columns * x.element_size() % VECTOR_BYTES:
        return plain(x, bias)
    out: Tensor = _apply(library, x, bias, KINDS[plain.__name__], fused_amaxes)
    return out


@operator()
def activation_forward(
    library: KernelLibrary,
    x: Tensor,
    bias: Tensor | None,
    kind: int,
    fused_amaxes: FusedAmaxes = NO_FUSED_AMAXES,
) -> Tensor:
    """Compute an activation with one kernel.

    Args:
        library: Compiled kernels.
        x: The input [..., f] (SwiGLU: [..., 2 f]).
        bias: A vector as long as the last dimension of x, or `None`.
        kind: The formula, as a value of `KINDS`.
        fused_amaxes: Where to store the amaxes of the result and, in the backward pass, of the
            gradient of x.

    Returns:
        The result [..., f].
    """
    x = x.contiguous()
    columns = x.shape[-1] // (2 if kind == KINDS["swiglu"] else 1)
    out = x.new_empty(*x.shape[:-1], columns)
    sizes = (x.numel() // x.shape[-1], columns, kind, DTYPE_CODES[x.dtype])
    library.launch(ACTIVATION_FORWARD, x, bias, out, zero_for(out, fused_amaxes.forward), *sizes)
    return out


@operator()
def activation_backward(
    library: KernelLibrary,
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    kind: int,
    fused_amax: FusedAmax | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of the input and the bias of an activation.

    Args:
        library: Compiled kernels.
        grad: The gradient of the result, [..., f].
        x: The input of `activation_forward`.
        bias: The bias of `activation_forward`, or `None`.
        kind: The formula, as a value of `KINDS`.
        fused_amax: Where to store the amax of the gradient of x.

    Returns:
        The gradients of x and of the bias (`None` without a bias).
    """
    x = x.contiguous()
    grad_x = torch.empty_like(x)
    grad_bias = None if bias is None else torch.empty_like(bias)
    blocks = Device(x.device).multiprocessors
    partials = None
    if bias is not None:
        partials = x.new_empty(PARTIALS * blocks, x.shape[-1], dtype=torch.float32)
    columns = grad.shape[-1]
    library.launch(
        ACTIVATION_BACKWARD,
        *(x, bias, grad.contiguous(), grad_x, grad_bias, partials, zero_for(grad_x, fused_amax)),
        *(PARTIALS * blocks, blocks, grad.numel() // columns, columns, kind),
        DTYPE_CODES[x.dtype],
    )
    return grad_x, grad_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.library, x, bias, ctx.kind, *fused_amaxes = inputs
    ctx.fused_amax = fused_amaxes[0].backward if fused_amaxes else None
    ctx.save_for_backward(x, bias)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = activation_backward(
        ctx.library, grad, x, bias, ctx.kind, fused_amax=ctx.fused_amax
    )
    return None, grad_x, None if bias is None else grad_bias, None, None


_apply = activation_forward.differentiate(_differentiate, _keep)
