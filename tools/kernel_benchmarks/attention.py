"""Attention of a layer, at training sizes: no kernel of ours, but a choice among PyTorch's.

"Ours" is what a model runs (`gpu_attention`), libraries are what it might run instead."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.kernels.attention import gpu_attention
from megatron.kernels.library import KernelLibrary
from megatron.kernels.segments import Mask, Segments
from tools.kernel_benchmarks.operation import Form, Operation

BF16 = torch.bfloat16
BACKWARD_PRODUCTS = 2.5  # five products, one of them forward's again, where forward has two


def operations(library: KernelLibrary, device: torch.device) -> list[Operation]:
    """All of them; the library is none of theirs."""
    packed = [packed_documents(device, b, d) for b in (1, 4) for d in (512, 2048, 4096)]
    return [causal(device, 4096, 4), causal(device, 8192, 1), padded(device), *packed]


def causal(device: torch.device, s: int, b: int) -> Operation:
    """Of a GPT: each kernel that takes it."""
    return _attention(
        "causal attention",
        device,
        (s, b, 16, 128),
        pairs=b * s * s / 2,
        ours=_with(mask=None, causal=True),
        libraries={"flash": _by_flash(causal=True)},
    )


def padded(device: torch.device) -> Operation:
    """Of a BERT-large, all samples full, with dropout: a mask, none, and each sample by itself."""
    s, b = 512, 64
    padding = torch.ones(b, 1, 1, s, dtype=torch.bool, device=device)
    ends = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=device)
    return _attention(
        "attention of BERT, padding mask, dropout",
        device,
        (s, b, 16, 64),
        pairs=b * s * s,
        ours=_with(mask=padding, causal=False, dropout=0.1),
        libraries={
            "no mask": _with(mask=None, causal=False, dropout=0.1),
            "flash, segments": partial(_stretches, ends=ends, longest=s, dropout=0.1),
        },
    )


def packed_documents(device: torch.device, b: int, document: int) -> Operation:
    """Documents of one length in samples of 4096 (--reset-attention-mask)."""
    s = 4096
    ends = torch.arange(0, b * s + 1, document, dtype=torch.int32, device=device)
    segments = Segments(ends, (b, s))
    return _attention(
        f"packed attention, documents of {document}",
        device,
        (s, b, 16, 128),
        pairs=b * s * document / 2,
        ours=_with(mask=segments, causal=True),
        libraries={
            "mask": _with(mask=segments.mask, causal=True),
            "no documents": _with(mask=None, causal=True),
        },
    )


def _attention(
    name: str,
    device: torch.device,
    sizes: tuple[int, int, int, int],
    *,
    pairs: float,
    ours: Form,
    libraries: dict[str, Form],
) -> Operation:
    """sizes: s, b, n, d; pairs: of a query and a key that it may attend to, of one head."""
    s, b, n, d = sizes
    size = 2 * s * b * n * d  # bytes of each of queries, keys, values and the result
    products = int(4 * pairs * n * d)
    return Operation(
        name=name,
        shape=f"[{s}, {b}, {n}, {d}] bf16",
        forward_bytes=4 * size,
        backward_bytes=8 * size,
        draw=lambda: [torch.randn(s, b, n, d, device=device, dtype=BF16) for _ in range(3)],
        ours=ours,
        eager=None,  # would hold every score
        libraries=libraries,
        forward_products=products,
        backward_products=int(products * BACKWARD_PRODUCTS),
    )


def _with(*, mask: Mask | None, causal: bool, dropout: float = 0.0) -> Form:
    return partial(gpu_attention, mask=mask, causal=causal, dropout=dropout)


def _by_flash(*, causal: bool) -> Form:
    def form(*inputs: Tensor) -> Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in inputs)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return out.permute(2, 0, 1, 3).flatten(2)

    return form


def _stretches(*inputs: Tensor, ends: Tensor, longest: int, dropout: float) -> Tensor:
    """Each stretch by itself and not causal, by the flash kernel, copied to its layout and back."""
    query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in inputs)
    both_ways, debug = False, False
    places = (ends, ends, longest, longest)
    out = torch.ops.aten._flash_attention_forward(
        query, key, value, *places, dropout, both_ways, debug
    )[0]
    return out.unflatten(0, (-1, longest)).transpose(0, 1).flatten(2)
