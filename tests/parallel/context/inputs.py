"""Queries, keys and values for tests of attention over context ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.attention import AttentionOptions, attention_reference


def heads(sequence: int, groups: int, *, batch: int = 2, n: int = 4, d: int = 8) -> list[Tensor]:
    """Query [s, b, n, d], key and value [s, b, g, d]."""
    generator = torch.Generator().manual_seed(groups)
    query = torch.randn(sequence, batch, n, d, generator=generator)
    return [query, *torch.randn(2, sequence, batch, groups, d, generator=generator)]


def weights_of(out: Tensor) -> Tensor:
    """A gradient for `out` that tells every element apart."""
    return torch.linspace(-1, 1, out.numel()).view_as(out)


def one_process(inputs: list[Tensor], *, causal: bool) -> list[Tensor]:
    """Result [s, b, n * d] and gradients by the formula, in float64."""
    query, key, value = (x.detach().double().requires_grad_() for x in inputs)
    options = AttentionOptions(causal=causal)
    out = attention_reference(query, key, value, options, softmax_in_fp32=False)
    out.backward(weights_of(out).double())
    gradients = [x.grad for x in (query, key, value)]
    return [x.float() for x in (out.detach(), *gradients) if x is not None]
