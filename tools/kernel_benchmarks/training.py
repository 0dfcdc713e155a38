"""Operations of the loss, gradients, the optimizer and FP8 at training sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.adam import AdamNumbers, AdamTensors, adam_reference, choose_adam
from megatron.kernels.cross_entropy import choose_cross_entropy
from megatron.kernels.fp8 import E4M3, Fp8, Fp8Casts, choose_fp8_casts
from megatron.kernels.library import KernelLibrary
from megatron.kernels.tensor_sums import choose_tensor_sums
from megatron.kernels.weight_gradient import choose_embedding_gradient, weight_gradient
from megatron.parallel.collectives import Communication
from megatron.parallel.cross_entropy import linear_cross_entropy, vocabulary_cross_entropy
from megatron.parallel.layout import Axis
from megatron.parallel.products import LinearCall
from tools.kernel_benchmarks.operation import Implementation, Inputs, Operation

BF16, FP32 = torch.bfloat16, torch.float32


def operations(library: KernelLibrary, device: torch.device) -> list[Operation]:
    """Return all operations of this group."""
    fp8 = [
        cast
        for rows, columns in ((16384, 2048), (16384, 5632), (8192, 14336))
        for cast in fp8_casts(choose_fp8_casts(library), device, rows, columns)
    ]
    transpose = fp8_transpose(choose_fp8_casts(library), device, 16384, 4096)
    return [
        cross_entropy(library, device, 16384, 131072),
        cross_entropy(library, device, 8192, 128256),
        cross_entropy(library, device, 16384, 50257),
        chunked_cross_entropy(library, device, 16384, 2048, 131072),
        adam(library, device, 2**28),
        tensor_sums(library, device, 2**28),
        embedding_gradient(library, device, 16384, 2048, 131072),
        product_into_fp32(device, 16384, 2048, 5632),
        product_into_fp32(device, 16384, 2048, 131072),
        *fp8,
        transpose,
    ]


def cross_entropy(library: KernelLibrary, device: torch.device, rows: int, size: int) -> Operation:
    """Define the loss of 16-bit logits.

    The gradient is written to new memory, which takes as long as overwriting the logits.
    """

    def make_inputs() -> Inputs:
        logits = 2 * torch.randn(rows, size, device=device, dtype=BF16)
        return [logits, torch.randint(size, (rows,), device=device)]

    def eager(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="none")

    kernel = choose_cross_entropy(library, in_16_bits=False)

    def ours(logits: Tensor, labels: Tensor) -> Tensor:
        return vocabulary_cross_entropy(logits, labels, Axis(), implementation=kernel)

    return Operation(
        name="cross entropy",
        shape=f"[{rows}, {size}] bf16",
        forward_bytes=rows * size * 2,
        backward_bytes=rows * size * 4,
        make_inputs=make_inputs,
        ours=ours,
        eager=eager,
        libraries={"F.cross_entropy in 16 bits": partial(F.cross_entropy, reduction="none")},
    )


def chunked_cross_entropy(
    library: KernelLibrary | None, device: torch.device, tokens: int, hidden: int, size: int
) -> Operation:
    """Define the output head with a chunked loss, whose forward pass also computes gradients."""

    def make_inputs() -> Inputs:
        return [
            torch.randn(tokens, hidden, device=device, dtype=BF16),
            torch.randn(size, hidden, device=device, dtype=BF16) / hidden**0.5,
            torch.randint(size, (tokens,), device=device),
        ]

    def eager(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")

    def ours(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            LinearCall(x, weight), labels, Communication(), implementation=kernel
        ).total

    def unchunked(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        losses = vocabulary_cross_entropy(
            logits, labels, Axis(), implementation=kernel, reuse_logits=True
        )
        return losses.sum()

    kernel = choose_cross_entropy(library, in_16_bits=False)
    parts, product = 2 * (tokens * hidden + size * hidden), 2 * tokens * hidden * size
    return Operation(
        name="output product + cross entropy, by chunks",
        shape=f"[{tokens}, {hidden}] x [{size}, {hidden}]^T bf16",
        forward_bytes=parts,
        backward_bytes=2 * parts,
        make_inputs=make_inputs,
        ours=ours,
        eager=eager,
        libraries={"product, then our kernel": unchunked},
        forward_products=product,
        backward_products=2 * product,
        combines_passes=True,
    )


def adam(library: KernelLibrary, device: torch.device, size: int) -> Operation:
    """Define AdamW with fp32 states and bf16 weights in 64 tensors.

    The update moves 30 bytes per parameter.
    """

    def make_inputs() -> Inputs:
        return [
            torch.randn(size, device=device),
            torch.randn(size, device=device, dtype=BF16),
            torch.randn(size, device=device),
            torch.randn(size, device=device),
            torch.rand(size, device=device),
        ]

    one = torch.ones((), device=device)
    numbers = AdamNumbers(1e-4, 0.9, 0.95, 1e-8, 0.1, one * 7, one * 2, one * 0)

    def eager(weight: Tensor, copy: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        step = numbers.step
        gradient = grad / numbers.gradient_scale
        mean.lerp_(gradient, 1 - numbers.beta1)
        square.mul_(numbers.beta2).addcmul_(gradient, gradient, value=1 - numbers.beta2)
        root = (square / (1 - numbers.beta2**step)).sqrt() + numbers.eps
        change = mean / (1 - numbers.beta1**step) / root + numbers.weight_decay * weight
        weight.sub_(numbers.lr * change)
        copy.copy_(weight)
        return copy

    def bind(which: Callable[[AdamTensors], Callable[[AdamNumbers], None]]) -> Implementation:
        def prepare(*inputs: Tensor) -> Callable[[], object]:
            update = which(AdamTensors(*(list(x.chunk(64)) for x in inputs)))
            return partial(update, numbers)

        return _Prepared(prepare)

    return Operation(
        name="AdamW, bf16 weights",
        shape=f"{size // 2**20} Mi parameters",
        forward_bytes=size * 30,
        backward_bytes=0,
        make_inputs=make_inputs,
        ours=bind(lambda tensors: choose_adam(tensors, library)),
        eager=eager,
        libraries={
            "torch._fused_adamw_ + copies": bind(lambda tensors: partial(adam_reference, tensors))
        },
    )


class _Prepared:
    """An implementation that is bound to its inputs once, as in the optimizer."""

    def __init__(self, prepare: Callable[..., Callable[[], object]]) -> None:
        self._prepare = prepare
        self._bound: dict[int, Callable[[], object]] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        key = inputs[0].data_ptr()
        if key not in self._bound:
            self._bound[key] = self._prepare(*inputs)
        out = self._bound[key]()
        return out if isinstance(out, Tensor) else inputs[0]


def tensor_sums(library: KernelLibrary, device: torch.device, size: int) -> Operation:
    """Define the squared norm and the count of nonzero elements of fp32 gradients."""

    def eager(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.square().sum(), x.count_nonzero()

    def norm(x: Tensor) -> Tensor:
        return torch._foreach_norm([x])[0]

    return Operation(
        name="sum of squares, zeros",
        shape=f"{size // 2**20} Mi fp32",
        forward_bytes=size * 4,
        backward_bytes=0,
        make_inputs=lambda: [torch.randn(size, device=device)],
        ours=_Prepared(lambda x: choose_tensor_sums([x], device, library)),
        eager=eager,
        libraries={"torch._foreach_norm, norm alone": norm},
    )


def embedding_gradient(
    library: KernelLibrary, device: torch.device, count: int, hidden: int, rows: int
) -> Operation:
    """Define the addition of embedding gradients to an fp32 buffer, including sorting of tokens."""

    def make_inputs() -> Inputs:
        return [
            # Some tokens are frequent, as in text.
            (rows * torch.rand(count, device=device) ** 4).long(),
            torch.randn(count, hidden, device=device, dtype=BF16),
            torch.zeros(rows, hidden, device=device),
        ]

    def eager(tokens: Tensor, grad: Tensor, into: Tensor) -> Tensor:
        dense = torch.zeros(rows, hidden, dtype=grad.dtype, device=device)
        return into.add_(dense.index_add_(0, tokens, grad))

    def dense(tokens: Tensor, grad: Tensor, into: Tensor) -> Tensor:
        return into.add_(torch.ops.aten.embedding_dense_backward(grad, tokens, rows, -1, False))

    def ours(tokens: Tensor, grad: Tensor, into: Tensor) -> Tensor:
        add_rows(tokens, grad, into)
        return into

    add_rows = choose_embedding_gradient(library, hidden)
    touched = make_inputs()[0]
    assert touched is not None
    return Operation(
        name="embedding gradient into fp32",
        shape=f"{count} of {rows} x {hidden} bf16",
        forward_bytes=count * hidden * 2 + len(touched.unique()) * hidden * 8,
        backward_bytes=0,
        make_inputs=make_inputs,
        ours=ours,
        eager=eager,
        libraries={"embedding_dense_backward + add": dense},
    )


def product_into_fp32(device: torch.device, tokens: int, inner: int, outer: int) -> Operation:
    """Define the weight gradient's matrix product, `into += grad^T x`, with an fp32 `into`."""

    def make_inputs() -> Inputs:
        return [
            torch.randn(tokens, outer, device=device, dtype=BF16),
            torch.randn(tokens, inner, device=device, dtype=BF16),
            torch.zeros(outer, inner, device=device),
        ]

    def ours(grad: Tensor, x: Tensor, into: Tensor) -> Tensor:
        weight_gradient(grad, x, into, accumulate=True)
        return into

    return Operation(
        name="weight gradient into fp32 (a product)",
        shape=f"[{outer}, {tokens}] x [{tokens}, {inner}] bf16",
        forward_bytes=tokens * (inner + outer) * 2 + inner * outer * 8,
        backward_bytes=0,
        make_inputs=make_inputs,
        ours=ours,
        eager=lambda grad, x, into: into.add_(grad.t() @ x),
        forward_products=2 * tokens * inner * outer,
    )


def fp8_transpose(casts: Fp8Casts, device: torch.device, rows: int, columns: int) -> Operation:
    """Define the transpose of an FP8 matrix."""
    inverse = torch.ones([], device=device)

    def transpose(casts: Fp8Casts, x: Tensor) -> Tensor:
        return casts.transpose(Fp8(x, inverse)).values

    return Operation(
        name="fp8: transpose",
        shape=f"[{rows}, {columns}] e4m3",
        forward_bytes=2 * rows * columns,
        backward_bytes=0,
        make_inputs=lambda: [torch.randn(rows, columns, device=device).to(E4M3)],
        ours=partial(transpose, casts),
        eager=partial(transpose, Fp8Casts()),
    )


def fp8_casts(casts: Fp8Casts, device: torch.device, rows: int, columns: int) -> list[Operation]:
    """Define the casts to FP8.

    With current scaling, the amax is computed first, and a second pass casts with it. With delayed
    scaling, a single pass casts with the previous amax and computes the next one.
    """
    previous_amax, new_amax = torch.ones(2, device=device).unbind()

    def amax_cast(casts: Fp8Casts, x: Tensor) -> Tensor:
        return casts.cast(x, casts.amax(x), E4M3).values

    def amax_cast_transpose(casts: Fp8Casts, x: Tensor) -> tuple[Tensor, Tensor]:
        cast, transposed = casts.cast_transpose(x, casts.amax(x), E4M3)
        return cast.values, transposed.values

    def cast_with_amax(casts: Fp8Casts, x: Tensor) -> Tensor:
        return casts.cast(x, previous_amax, E4M3, running_amax=new_amax).values

    def cast_transpose_with_amax(casts: Fp8Casts, x: Tensor) -> tuple[Tensor, Tensor]:
        cast, transposed = casts.cast_transpose(x, previous_amax, E4M3, running_amax=new_amax)
        return cast.values, transposed.values

    def cast_by_row(casts: Fp8Casts, x: Tensor) -> Tensor:
        return casts.cast_rows(x, E4M3).values

    def cast_transpose_by_row(casts: Fp8Casts, x: Tensor) -> tuple[Tensor, Tensor]:
        cast, transposed = casts.cast_transpose_rows(x, E4M3)
        return cast.values, transposed.values

    size = rows * columns
    # With a single scale, x has to be read twice. With one scale per row, the row fits into the
    # cache.
    kinds: list[tuple[str, Callable[..., Tensor | tuple[Tensor, ...]], int]] = [
        ("fp8: amax", lambda casts, x: casts.amax(x), 2),
        ("fp8: amax, cast", amax_cast, 5),
        ("fp8: amax, cast + transpose", amax_cast_transpose, 6),
        ("fp8: cast, with amax", cast_with_amax, 3),
        ("fp8: cast + transpose, with amax", cast_transpose_with_amax, 4),
        ("fp8: cast by rows", cast_by_row, 3),
        ("fp8: cast by rows + transpose by rows", cast_transpose_by_row, 6),
    ]
    return [
        Operation(
            name=name,
            shape=f"[{rows}, {columns}] bf16",
            forward_bytes=size * per_element,
            backward_bytes=0,
            make_inputs=lambda: [torch.randn(rows, columns, device=device, dtype=BF16)],
            ours=partial(cast, casts),
            eager=partial(cast, Fp8Casts()),
        )
        for name, cast, per_element in kinds
    ]
