"""Non-linearities of the MLP: each formula, and PyTorch's fused form where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig

Activation = Callable[[Tensor], Tensor]


def choose_activation(model: ModelConfig) -> Activation:
    """The activation that the flags ask for, in Megatron's order of precedence.

    Megatron's fused bias-GeLU, its default, is the tanh form; without fusion, and so without
    biases, it takes the exact form.
    """
    if model.swiglu:
        return swiglu
    if model.openai_gelu:
        return gelu_tanh
    if model.onnx_safe:
        return gelu
    if model.squared_relu:
        return squared_relu
    return gelu_tanh if model.bias_gelu_fusion and model.add_bias_linear else gelu


def gelu_reference(x: Tensor) -> Tensor:
    """x times the normal distribution function at x (exact form)."""
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu(x: Tensor) -> Tensor:
    """The exact form, fused."""
    return F.gelu(x)


def gelu_tanh_reference(x: Tensor) -> Tensor:
    """GeLU by OpenAI's tanh approximation."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation, fused."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (Primer)."""
    return F.relu(x).square()


def swiglu_reference(x: Tensor) -> Tensor:
    """[..., 2 f], gate then up -> gate * sigmoid(gate) * up, [..., f]."""
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def swiglu(x: Tensor) -> Tensor:
    """The same with PyTorch's fused SiLU."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
