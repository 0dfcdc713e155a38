"""Operations of recurrent mixers: flash-linear-attention's kernels, and references in fp32."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.delta_rule import chunked_delta_rule
from megatron.kernels.library import KernelLibrary
from megatron.kernels.recurrence import RecurrenceKernels, find_recurrence
from megatron.models.mamba import scan
from megatron.models.recurrence import CausalConvolution
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from tools.kernel_benchmarks.operation import Operation

BF16 = torch.bfloat16


def operations(library: KernelLibrary, device: torch.device) -> list[Operation]:
    """Return all operations of this group. The library is not used."""
    choice = find_recurrence(device)
    kernels = choice.kernels
    reason = choice.reason if kernels is None else ""
    return [
        mamba_scan(device, kernels, reason),
        gated_delta_rule(device, kernels, reason),
        convolution(device, kernels, reason),
    ]


def mamba_scan(device: torch.device, kernels: RecurrenceKernels | None, reason: str) -> Operation:
    """Define Mamba-2's scan for a hidden size of 2048."""
    s, b, g, r, p, n = 4096, 1, 8, 8, 64, 128

    def make_inputs() -> list[Tensor]:
        x, steps, rates, *vectors = (
            torch.randn(shape, device=device)
            for shape in ((s, b, g, r, p), (s, b, g, r), (g, r), (s, b, g, n), (s, b, g, n))
        )
        steps, rates = F.softplus(steps - 3), -rates.exp()
        return [x.to(BF16), steps, rates, *(part.to(BF16) for part in vectors)]

    def ours(x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor) -> Tensor:
        assert kernels is not None, "`missing` has checked this"
        return kernels.scan(x, steps, rates, b, c, None, None)[0]

    def eager(x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor) -> Tensor:
        wide = x.float(), steps, rates, b.float(), c.float()
        return scan(*wide, None, None, chunk=128)[0]

    moved = 2 * s * b * g * (2 * r * p + 2 * n + 2 * r)
    chunk, heads = 64, s * b * g * r
    products = heads * (chunk * (n + p) + 4 * n * p)
    return Operation(
        name="scan of Mamba-2",
        shape=f"[{s}, {b}, {g}, {r}, {p}], state {n}, bf16",
        forward_bytes=moved,
        backward_bytes=2 * moved,
        make_inputs=make_inputs,
        ours=ours,
        eager=eager,
        forward_products=products,
        backward_products=2 * products,
        missing=lambda: reason,
    )


def gated_delta_rule(
    device: torch.device, kernels: RecurrenceKernels | None, reason: str
) -> Operation:
    """Define the gated delta rule for a hidden size of 2048."""
    s, b, m, n, e, d = 4096, 1, 16, 32, 128, 128

    def make_inputs() -> list[Tensor]:
        query, key, value, decay, rate = (
            torch.randn(s, b, *shape, device=device)
            for shape in ((m, e), (m, e), (n, d), (n,), (n,))
        )
        heads = [part.to(BF16) for part in (query, key, value)]
        return [*heads, -F.softplus(decay - 2), rate.sigmoid()]

    def ours(*parts: Tensor) -> Tensor:
        assert kernels is not None, "`missing` has checked this"
        return kernels.delta_rule(*parts)[0]

    def eager(*parts: Tensor) -> Tensor:
        return chunked_delta_rule(*(part.float() for part in parts), chunk=64)[0]

    moved = 2 * s * b * (2 * m * e + 2 * n * d + 4 * n)
    chunk, heads = 64, s * b * n
    products = heads * (chunk * (3 * e + 2 * d) + 6 * e * d)
    return Operation(
        name="gated delta rule",
        shape=f"[{s}, {b}, {m} and {n}, {e}], bf16",
        forward_bytes=moved,
        backward_bytes=2 * moved,
        make_inputs=make_inputs,
        ours=ours,
        eager=eager,
        forward_products=products,
        backward_products=2 * products,
        missing=lambda: reason,
    )


def convolution(device: torch.device, kernels: RecurrenceKernels | None, reason: str) -> Operation:
    """Define the causal convolution before Mamba-2's scan."""
    s, b, channels, taps = 4096, 1, 6144, 4
    layer = CausalConvolution(channels, taps, BuildContext(Layout.single(), device, dtype=BF16))
    torch.nn.init.normal_(layer.weight, std=0.5)
    assert layer.bias is not None
    torch.nn.init.zeros_(layer.bias)

    def convolve(x: Tensor, chosen: RecurrenceKernels | None) -> Tensor:
        out: Tensor = layer(x, None, None, slice(None), chosen)[0]
        return out.to(BF16)

    moved = 2 * 2 * s * b * channels
    return Operation(
        name="causal convolution and SiLU",
        shape=f"[{s}, {b}, {channels}], {taps} tokens, bf16",
        forward_bytes=moved,
        backward_bytes=moved * 3 // 2,
        make_inputs=lambda: [torch.randn(s, b, channels, device=device, dtype=BF16)],
        ours=partial(convolve, chosen=kernels),
        eager=partial(convolve, chosen=None),
        missing=lambda: reason,
    )
