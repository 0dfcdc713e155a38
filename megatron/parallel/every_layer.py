"""What is set, attached or read in every layer of a model: functions that walk through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from megatron.parallel.amax_history import AmaxHistory, DelayedScaling
from megatron.parallel.exchange import Exchange
from megatron.parallel.fp8_products import Fp8Products
from megatron.parallel.gradients import GradientBuffer
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout
from megatron.parallel.products import Products


def forget_weights(model: nn.Module) -> None:
    """Call when weights have changed: drops copies of them in other number formats. And where a
    device begins to record a pass, or ends: nothing may come from outside of it, or go there."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.products.forget()


def attach_history(
    parts: Iterable[nn.Module], scaling: DelayedScaling, layout: Layout, device: torch.device
) -> AmaxHistory | None:
    """Let the 8-bit layers scale by earlier updates; what they share, None where there is none.

    Args:
        parts: of the model here; the names of their modules are global.
        scaling: how.
        layout: of the layers.
        device: where they run.
    """
    layers = {name: products for name, _, products in _fp8_layers(parts)}
    if not layers:
        return None
    largest = next(iter(layers.values())).largest  # they are all of one form
    history = AmaxHistory(list(layers), largest, scaling, layout, device)
    for name, products in layers.items():
        products.slots = history.slots(name)
    return history


def fp8_weights(parts: Iterable[nn.Module]) -> dict[nn.Parameter, Fp8Products]:
    """Weights that are read by 8-bit products alone, where each has one scale; and by which."""
    return {
        layer.weight: products
        for _, layer, products in _fp8_layers(parts)
        if products.weight_format is not None
    }


def _fp8_layers(parts: Iterable[nn.Module]) -> Iterator[tuple[str, Linear, Fp8Products]]:
    """The 8-bit layers with their names and their products."""
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, Linear) and isinstance(module.products, Fp8Products):
                yield name, module, module.products


def attach_exchange(model: nn.Module, exchange: Exchange) -> None:
    """Let split layers multiply part by part, those whose products can be cut."""
    for module in model.modules():
        if isinstance(module, Linear) and module.split and module.can_be_cut:
            module.exchange = exchange


def set_products(module: nn.Module, products: Products) -> None:
    """Let every layer that multiplies by a weight do it so."""
    for part in module.modules():
        if hasattr(part, "products"):
            part.products = products  # type: ignore[assignment]


@runtime_checkable
class TakesSlots(Protocol):
    """A module that can write gradients of its weights where a buffer keeps them."""

    def take_slots(self, gradients: GradientBuffer) -> None:
        """Ask for a slot for each use of such a weight."""
        ...


def attach_slots(model: nn.Module, gradients: GradientBuffer) -> None:
    """Let the products of all layers add to fp32 gradients themselves, autograd aside."""
    for module in model.modules():
        if isinstance(module, TakesSlots):
            module.take_slots(gradients)
