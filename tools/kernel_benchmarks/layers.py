"""Operations of a transformer layer at training sizes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron.kernels import activation, dropout, norm, rope
from megatron.kernels.library import KernelLibrary
from tools.kernel_benchmarks.operation import Inputs, Operation

BF16, FP32 = torch.bfloat16, torch.float32
EPSILON = 1e-5


def operations(library: KernelLibrary, device: torch.device) -> list[Operation]:
    """Return all operations of this group."""
    return [
        add_norm(library, device, 16384, 2048, bias=False),
        add_norm(library, device, 8192, 4096, bias=False),
        add_norm(library, device, 8192, 8192, bias=False),
        add_norm(library, device, 4096, 16384, bias=False),
        add_norm(library, device, 16384, 2048, bias=False, stream=FP32),
        add_norm(library, device, 16384, 2048, bias=True),
        add_norm(library, device, 8192, 4096, bias=True),
        activate(library, device, "swiglu", 16384, 5632, bias=False),
        activate(library, device, "swiglu", 8192, 14336, bias=False),
        activate(library, device, "gelu_tanh", 16384, 8192, bias=True),
        activate(library, device, "gelu", 16384, 8192, bias=True),
        activate(library, device, "squared_relu", 16384, 8192, bias=False),
        split_rotate(library, device, 4096, 4, groups=16, per_group=1),
        split_rotate(library, device, 8192, 1, groups=8, per_group=4),
        bias_dropout_add(library, device, 16384, 2048, bias=True),
        bias_dropout_add(library, device, 16384, 4096, bias=False),
    ]


def add_norm(
    library: KernelLibrary,
    device: torch.device,
    rows: int,
    hidden: int,
    *,
    bias: bool,
    stream: torch.dtype = BF16,
) -> Operation:
    """Define residual + delta, followed by LayerNorm with a bias or by RMSNorm without one."""

    def make_inputs() -> Inputs:
        return [
            torch.randn(rows, hidden, device=device, dtype=stream),
            torch.randn(rows, hidden, device=device, dtype=BF16),
            torch.randn(hidden, device=device, dtype=BF16),
            torch.randn(hidden, device=device, dtype=BF16) if bias else None,
        ]

    def by_formula(
        residual: Tensor, delta: Tensor, weight: Tensor, b: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        total = residual + delta
        return total, norm.normalize_reference(total, weight, b, EPSILON)

    wide, size = stream.itemsize, rows * hidden
    extra = 0 if stream == BF16 else 2  # with fp32, delta's gradient is a separate tensor
    return Operation(
        name=f"residual add + {'LayerNorm' if bias else 'RMSNorm'}",
        shape=f"[{rows}, {hidden}] {'bf16' if stream == BF16 else 'fp32 stream, bf16'}",
        forward_bytes=size * (2 * wide + 4),
        backward_bytes=size * (3 * wide + 2 + extra),
        make_inputs=make_inputs,
        ours=partial(_with_epsilon, partial(norm.fused_add_norm, library)),
        eager=by_formula,
        libraries={"F.layer_norm" if bias else "F.rms_norm": partial(_with_epsilon, norm.add_norm)},
    )


def _with_epsilon(function: norm.AddNorm, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    residual, delta, weight, bias = inputs
    return function(residual, delta, weight, bias, EPSILON)


def activate(
    library: KernelLibrary, device: torch.device, name: str, rows: int, columns: int, *, bias: bool
) -> Operation:
    """Define an activation function, optionally with a bias."""
    plain = getattr(activation, name)
    parts = 2 if name == "swiglu" else 1

    def make_inputs() -> Inputs:
        width = parts * columns
        x = torch.randn(rows, width, device=device, dtype=BF16)
        return [x, torch.randn(width, device=device, dtype=BF16) if bias else None]

    return Operation(
        name=f"{'bias + ' if bias else ''}{name}",
        shape=f"[{rows}, {columns}] bf16",
        forward_bytes=2 * rows * columns * (parts + 1),
        backward_bytes=2 * rows * columns * (2 * parts + 1),
        make_inputs=make_inputs,
        ours=partial(activation.fused_activation, library, plain),
        eager=plain,
    )


def split_rotate(
    library: KernelLibrary, device: torch.device, s: int, b: int, *, groups: int, per_group: int
) -> Operation:
    """Define the split of a fused projection into heads, with rotation of queries and keys.

    The values that `eager` returns are a view of the projection, not a copy.
    """
    d = 128
    table = rope.rotation_table(s, d, device=device)[:, :, None, None]
    rotation = (table[0], table[1])
    width = groups * (per_group + 2) * d

    def ours(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rope.fused_split_rotate(library, qkv, groups, d, rotation)

    def eager(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rope.split_rotate(qkv, groups, d, rotation)

    return Operation(
        name="split query-key-value + rotary",
        shape=f"[{s}, {b}, {groups} groups x ({per_group} + 2) x {d}] bf16",
        forward_bytes=4 * s * b * width,
        backward_bytes=4 * s * b * width,
        make_inputs=lambda: [torch.randn(s, b, width, device=device, dtype=BF16)],
        ours=ours,
        eager=eager,
    )


def bias_dropout_add(
    library: KernelLibrary, device: torch.device, rows: int, hidden: int, *, bias: bool
) -> Operation:
    """Define residual + dropout(x + bias)."""

    def make_inputs() -> Inputs:
        def tensor(*size: int) -> Tensor:
            return torch.randn(*size, device=device, dtype=BF16)

        return [tensor(rows, hidden), tensor(hidden) if bias else None, tensor(rows, hidden)]

    def ours(x: Tensor, b: Tensor | None, residual: Tensor) -> Tensor:
        return dropout.fused_bias_dropout_add(library, x, b, residual, 0.1)

    def eager(x: Tensor, b: Tensor | None, residual: Tensor) -> Tensor:
        return dropout.bias_dropout_add(x, b, residual, 0.1)

    return Operation(
        name=f"{'bias + ' if bias else ''}dropout + add",
        shape=f"[{rows}, {hidden}] bf16",
        forward_bytes=6 * rows * hidden,
        backward_bytes=4 * rows * hidden,
        make_inputs=make_inputs,
        ours=ours,
        eager=eager,
    )
