"""The softmax of attention scores, masked or causal, of attention that holds every score."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.kernels.library import DTYPE_CODES, VECTOR_BYTES, Kernel, KernelLibrary, aligned
from megatron.kernels.norm import LONGEST_ROW

FORWARD = Kernel("masked_softmax_forward", "pppiiiiiiiid")
BACKWARD = Kernel("masked_softmax_backward", "ppppiiiiiiiid")
MASKED = -10000.0  # score of a pair that may not attend, as in Megatron


class MaskedSoftmax(Protocol):
    """What attention calls."""

    def __call__(
        self,
        scores: Tensor,
        mask: Tensor | None,
        *,
        causal: bool,
        factor: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """softmax(factor * scores), over keys.

        Args:
            scores: [b, n, s, keys].
            mask: bool [b or 1, 1, s, keys], True where a query may attend; replaces `causal`.
            causal: without a mask, query i sees keys up to i + keys - s.
            factor: of the scores.
            dtype: of the result.

        Returns:
            Weights [b, n, s, keys]. Where a query may attend to nothing, all its weights are equal.
        """


def choose_masked_softmax(library: KernelLibrary | None) -> MaskedSoftmax:
    """The fused kernel where there is a library, else PyTorch's operations."""
    return masked_softmax if library is None else partial(fused_masked_softmax, library)


def masked_softmax(
    scores: Tensor, mask: Tensor | None, *, causal: bool, factor: float, dtype: torch.dtype
) -> Tensor:
    """See `MaskedSoftmax`: by PyTorch's operations, in the type of the scores."""
    scores = scores * factor
    if mask is None and causal:
        queries, keys = scores.shape[-2:]
        everything = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        mask = everything.tril(keys - queries)
    if mask is not None:
        scores = scores.masked_fill(~mask, MASKED)
    return scores.softmax(dim=-1).to(dtype)


def fused_masked_softmax(
    library: KernelLibrary,
    scores: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """See `MaskedSoftmax`: one kernel each way, in fp32 inside. Sizes that the kernel does not take
    run on PyTorch's operations."""
    if not _fits(scores, mask, dtype):
        return masked_softmax(scores, mask, causal=causal, factor=factor, dtype=dtype)
    return _MaskedSoftmax.apply(scores, mask, causal and mask is None, factor, dtype, library)


def _fits(scores: Tensor, mask: Tensor | None, dtype: torch.dtype) -> bool:
    b, _, queries, keys = scores.shape
    return (
        dtype in DTYPE_CODES
        and scores.dtype in (dtype, torch.float32)
        and keys % (VECTOR_BYTES // dtype.itemsize) == 0
        and queries <= keys <= LONGEST_ROW[dtype.itemsize]
        and scores.numel() > 0
        and (
            mask is None
            or (
                mask.dtype == torch.bool
                and mask.shape in {(b, 1, queries, keys), (1, 1, queries, keys)}
            )
        )
        and aligned(scores, mask)
    )


def _sizes(scores: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    """Rows, rows that a mask serves, masks, queries, keys."""
    b, heads, queries, keys = scores.shape
    masks = 1 if mask is None else mask.shape[0]
    return b * heads * queries, heads * queries, masks, queries, keys


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        mask: Tensor | None,
        causal: bool,
        factor: float,
        dtype: torch.dtype,
        library: KernelLibrary,
    ) -> Tensor:
        scores = scores.contiguous()
        mask = None if mask is None else mask.contiguous()
        weights = torch.empty_like(scores, dtype=dtype)
        ctx.settings = (
            *_sizes(scores, mask),
            int(causal),
            DTYPE_CODES[scores.dtype],
            DTYPE_CODES[dtype],
            factor,
        )
        library.launch(FORWARD, scores, mask, weights, *ctx.settings)
        ctx.save_for_backward(weights, mask)
        ctx.dtype, ctx.library = scores.dtype, library
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, mask = ctx.saved_tensors
        grad_scores = torch.empty_like(weights, dtype=ctx.dtype)
        ctx.library.launch(BACKWARD, weights, grad.contiguous(), mask, grad_scores, *ctx.settings)
        return grad_scores, None, None, None, None, None
