"""The attention of one layer at training sizes.

"Ours" is the kernel that a model runs (`gpu_attention`, or PyTorch's softmax if scores are kept).
The libraries are other kernels that it could run. If FlashAttention 4 is installed, it has its own
row, for contiguous tensors [b, s, n, d].
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.kernels.attention import (
    AttentionOptions,
    FlashPackage,
    attention_reference,
    find_flash_package,
    gpu_attention,
    masked_softmax,
)
from megatron.kernels.library import KernelLibrary
from megatron.kernels.segments import Mask, Segments
from tools.kernel_benchmarks.operation import Implementation, Inputs, Operation

BF16 = torch.bfloat16
BACKWARD_PRODUCTS = 2.5  # relative to the forward pass: five products (one recomputed), not two


def operations(library: KernelLibrary, device: torch.device) -> list[Operation]:
    """Return all operations of this group. The library is not used."""
    packed = [packed_documents(device, b, d) for b in (1, 4) for d in (512, 2048, 4096)]
    return [
        causal(device, 4096, 4),
        causal(device, 8192, 1),
        padded(device),
        biased(device, (512, 64, 12, 64)),
        *packed,
        flash_package(device, (4096, 4, 16, 128), 16, causal=True),
        flash_package(device, (8192, 1, 32, 128), 8, causal=True),
        flash_package(device, (512, 64, 16, 64), 16, causal=False),
        *(softmax(device, (4, 16, 2048, 2048), causal=causal) for causal in (False, True)),
    ]


def causal(device: torch.device, s: int, b: int) -> Operation:
    """Define causal attention, as in a GPT."""
    return _attention(
        "causal attention",
        device,
        (s, b, 16, 128),
        pairs=b * s * s / 2,
        ours=_with(mask=None, causal=True),
        libraries={"flash": _by_flash(causal=True)},
    )


def flash_package(
    device: torch.device, sizes: tuple[int, int, int, int], groups: int, *, causal: bool
) -> Operation:
    """Define attention in FlashAttention 4's memory layout, for its kernel and PyTorch's."""
    s, b, _, _ = sizes

    def by_package(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        package = _package(device)
        assert package is not None, "`missing` has checked this"
        return package(query, key, value, AttentionOptions(causal=causal))

    operation = _attention(
        f"{'causal ' if causal else ''}attention for FlashAttention 4",
        device,
        sizes,
        pairs=b * s * s / (2 if causal else 1),
        ours=_with(mask=None, causal=causal),
        libraries={
            "FlashAttention 4": by_package,
            "flash": _by_flash(causal=causal),
        },
        groups=groups,
        in_order=True,
    )
    problem = "no flash-attn-4 for this GPU is installed"
    return replace(operation, missing=lambda: "" if _package(device) else problem)


def padded(device: torch.device) -> Operation:
    """Define the attention of BERT-large with dropout: masked, unmasked and in segments."""
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
            "flash, segments": partial(_segments, ends=ends, longest=s, dropout=0.1),
        },
    )


def biased(device: torch.device, sizes: tuple[int, int, int, int]) -> Operation:
    """Define the attention of T5's encoder, whose scores have a learned position bias."""
    s, b, n, _ = sizes

    def ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return gpu_attention(query, key, value, AttentionOptions(bias))

    def eager(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attention_reference(query, key, value, AttentionOptions(bias))

    plain = _attention(
        "attention with a learned bias, T5", device, sizes, pairs=b * s * s, ours=ours
    )
    return replace(
        plain,
        make_inputs=lambda: [
            *plain.make_inputs(),
            torch.randn(1, n, s, s, device=device, dtype=BF16),
        ],
        eager=eager,
    )


def softmax(device: torch.device, sizes: tuple[int, int, int, int], *, causal: bool) -> Operation:
    """Define the softmax of scores [b, n, s, s] that --no-masked-softmax-fusion uses."""
    b, _, s, _ = sizes
    mask = None if causal else torch.rand(b, 1, s, s, device=device) < 0.9  # True: may attend
    kernel = partial(masked_softmax, mask=mask, causal=causal, factor=0.5, dtype=BF16)
    size = 2 * math.prod(sizes)
    read = 0 if mask is None else mask.numel()
    return Operation(
        name=f"scaled {'causal' if causal else 'masked'} softmax",
        shape=f"{list(sizes)} bf16",
        forward_bytes=2 * size + read,
        backward_bytes=3 * size + read,
        make_inputs=lambda: [torch.randn(sizes, device=device, dtype=BF16)],
        ours=kernel,
        eager=kernel,
    )


def packed_documents(device: torch.device, b: int, document: int) -> Operation:
    """Define attention within documents of equal length in samples of 4096 tokens."""
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
    ours: Implementation,
    libraries: dict[str, Implementation] | None = None,
    groups: int | None = None,
    in_order: bool = False,
) -> Operation:
    """Define an attention operation.

    Args:
        name: Name of the operation.
        device: Device to run on.
        sizes: The sequence length s, batch size b, number of heads n and head size d.
        pairs: Number of pairs of a query and a visible key, per head.
        ours: The kernel that a model runs.
        libraries: Kernels that the model could run instead, by name.
        groups: Number of key-value heads. The default is n.
        in_order: Whether the memory layout is [b, s, n, d] instead of [s, b, n, d].
    """
    s, b, n, d = sizes
    g = groups or n
    size = 2 * s * b * (2 * n + 2 * g) * d  # bytes of queries, keys, values and the result
    products = int(4 * pairs * n * d)

    def make_inputs() -> Inputs:
        leading = (b, s) if in_order else (s, b)
        tensors = [
            torch.randn(*leading, count, d, device=device, dtype=BF16) for count in (n, g, g)
        ]
        return [x.transpose(0, 1) for x in tensors] if in_order else tensors

    shape = f"[{b}, {s}, {n}, {d}] in order" if in_order else f"[{s}, {b}, {n}, {d}]"
    return Operation(
        name=name,
        shape=f"{shape}{'' if g == n else f', {g} groups'} bf16",
        forward_bytes=size,
        backward_bytes=2 * size,
        make_inputs=make_inputs,
        ours=ours,
        eager=None,  # eager attention would store every score
        libraries=libraries or {},
        forward_products=products,
        backward_products=int(products * BACKWARD_PRODUCTS),
    )


def _with(*, mask: Mask | None, causal: bool, dropout: float = 0.0) -> Implementation:
    return partial(gpu_attention, options=AttentionOptions(mask, causal, dropout))


def _by_flash(*, causal: bool) -> Implementation:
    def attend(*inputs: Tensor) -> Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in inputs)
        shared = key.shape[1] != query.shape[1]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=shared
            )
        return out.permute(2, 0, 1, 3).flatten(2)

    return attend


@cache
def _package(device: torch.device) -> FlashPackage | None:
    return find_flash_package(device)


def _segments(*inputs: Tensor, ends: Tensor, longest: int, dropout: float) -> Tensor:
    """Attend in both directions within each segment, with the flash kernel on contiguous copies."""
    query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in inputs)
    is_causal, return_debug_mask = False, False
    out = torch.ops.aten._flash_attention_forward(
        *(query, key, value, ends, ends, longest, longest, dropout, is_causal, return_debug_mask)
    )[0]
    return out.unflatten(0, (-1, longest)).transpose(0, 1).flatten(2)
