"""Operations of text generation at the sizes of an 8B Llama."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.attention import AttentionOptions
from megatron.kernels.cached_sequences import Singles
from megatron.kernels.library import KernelLibrary
from megatron.kernels.paged_attention import FusedPaged, PagedAttention
from megatron.kernels.row_product import RowProduct, choose_row_product
from tools.kernel_benchmarks.operation import Inputs, Operation

BF16 = torch.bfloat16
BLOCK = 16
GROUPS, PER_GROUP, HEAD = 8, 4, 128
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # one layer, [out, in]
ROWS = (1, 32, 256, 2048)


def operations(library: KernelLibrary, device: torch.device) -> list[Operation]:
    """Return all operations of this group."""
    multiply = choose_row_product(device)
    return [
        paged_attention(library, device, 1, 1024),
        paged_attention(library, device, 1, 8192),
        paged_attention(library, device, 32, 1024),
        paged_attention(library, device, 256, 1024),
        *(row_product(multiply, device, m, n, k) for n, k in WEIGHTS for m in ROWS),
    ]


def paged_attention(
    library: KernelLibrary, device: torch.device, sequences: int, length: int
) -> Operation:
    """Define the attention of one new token per sequence over its KV cache."""
    blocks = length // BLOCK
    tables = torch.randperm(sequences * blocks, device=device, dtype=torch.int32)
    lengths = torch.full((sequences,), length, device=device, dtype=torch.int32)
    singles = Singles(tables.view(sequences, blocks), lengths, length, BLOCK)

    def make_inputs() -> Inputs:
        shape = (sequences * length, GROUPS, HEAD)
        return [
            torch.randn(sequences, GROUPS * PER_GROUP, HEAD, device=device, dtype=BF16),
            *(torch.randn(shape, device=device, dtype=BF16) for _ in range(2)),
        ]

    cache = 2 * sequences * length * GROUPS * HEAD
    return Operation(
        name="attention over a paged cache",
        shape=f"{sequences} x {length} keys, {GROUPS * PER_GROUP} heads of {HEAD} in {GROUPS} "
        "groups, bf16",
        forward_bytes=2 * (cache + 2 * sequences * GROUPS * PER_GROUP * HEAD),
        backward_bytes=0,
        make_inputs=make_inputs,
        ours=partial(FusedPaged(library).singles, singles=singles, options=AttentionOptions()),
        eager=partial(PagedAttention().singles, singles=singles, options=AttentionOptions()),
    )


def row_product(
    multiply: RowProduct | None, device: torch.device, rows: int, outer: int, inner: int
) -> Operation:
    """Define a matrix product in which each row is bitwise independent of all other rows."""

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        assert multiply is not None, "`missing` has checked this"
        return multiply(x, weight, None)

    return Operation(
        name="row product",
        shape=f"[{rows}, {inner}] x [{outer}, {inner}]^T bf16",
        forward_bytes=2 * (rows * inner + outer * inner + rows * outer),
        backward_bytes=0,
        make_inputs=lambda: [
            torch.randn(*shape, device=device, dtype=BF16)
            for shape in ((rows, inner), (outer, inner))
        ],
        ours=ours,
        eager=None,  # the same as the library's
        libraries={"F.linear": F.linear},
        forward_products=2 * rows * inner * outer,
        missing=lambda: "" if multiply else "cuBLASLt is not available",
    )
