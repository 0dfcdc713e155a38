"""Normalization over the last dimension. Statistics in fp32, result in the weight's type."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / sqrt(var + epsilon) * weight + bias, over the last dimension of [..., h]."""
    x = x.float()
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    normal = centred * (variance + epsilon).rsqrt()
    return (normal * weight.float() + bias.float()).to(weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """The same by PyTorch's fused kernel."""
    if x.dtype == weight.dtype:
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)
    # An fp32 residual stream enters a layer of 16-bit weights.
    out = F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), epsilon)
    return out.to(weight.dtype)


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension of [..., h]."""
    x = x.float()
    normal = x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    return (normal * weight.float()).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The same by PyTorch's fused kernel."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return F.rms_norm(x.float(), weight.shape, weight.float(), epsilon).to(weight.dtype)
