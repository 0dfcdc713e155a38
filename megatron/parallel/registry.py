"""The registry in which layers record what they will need once the model is complete.

A layer is built before gradient buffers and scale histories exist. It reserves a gradient slot for
each use of a weight, and registers the products that use the weight. Later, nothing is assigned to
the layer: it reads the slot that it reserved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megatron.kernels.grouped import GroupedProduct
from megatron.parallel.fp8 import AmaxHistory, DelayedScaling, Fp8Products
from megatron.parallel.gradients import GradientBuffer
from megatron.parallel.layout import Layout
from megatron.parallel.linear import WeightSlot
from megatron.parallel.products import Products
from megatron.parallel.routing import Routers


class ReservedSlot:
    """A reserved destination for the gradient of one use of a weight.

    Attributes:
        slot: The destination; `None` leaves the gradient to autograd.
    """

    __slots__ = ("slot",)

    def __init__(self) -> None:
        """Create a reservation without a destination."""
        self.slot: WeightSlot | None = None


class LayerRegistry:
    """The gradient slots and products that the layers of this process have registered.

    Attributes:
        deferrable_weights: The weights whose gradients are deferred if their layers have a queue.
        routers: The losses, counts and biases of the expert routers.
    """

    def __init__(self) -> None:
        """Create an empty registry."""
        self._reserved: list[tuple[nn.Parameter, int, ReservedSlot]] = []
        self._products: list[Products | GroupedProduct] = []
        self.deferrable_weights: list[nn.Parameter] = []
        self._fp8: dict[nn.Parameter, Fp8Products] = {}
        self.routers = Routers()

    def reserve_slot(self, weight: nn.Parameter, *, uses: int = 1) -> ReservedSlot:
        """Return a slot whose destination `bind_slots` will set.

        Args:
            weight: The weight whose gradient goes to the slot.
            uses: The number of times that a backward pass adds to the gradient through this slot.
                The gradient is complete when all uses of all its slots have been added.
        """
        reserved = ReservedSlot()
        self._reserved.append((weight, uses, reserved))
        return reserved

    def add_products(self, weight: nn.Parameter, products: Products | GroupedProduct) -> None:
        """Record the products that read a weight whose gradient can be deferred."""
        self._products.append(products)
        self.deferrable_weights.append(weight)
        if isinstance(products, Fp8Products):
            self._fp8[weight] = products

    def bind_slots(self, gradients: GradientBuffer) -> None:
        """Set the destinations of all reserved slots.

        Products then add directly to gradients that are stored in fp32, without autograd. Other
        gradients are left to autograd.

        Args:
            gradients: The buffer that owns the gradients.
        """
        for weight, uses, reserved in self._reserved:
            for _ in range(uses):
                reserved.slot = gradients.slot(weight)

    def forget_weights(self) -> None:
        """Discard cached copies of weights in other number formats.

        Call this when weights have changed, and when a device starts or stops recording a pass: a
        recording must not read or cache results in memory outside the recording.
        """
        for products in self._products:
            products.forget()

    def fp8_weights(self) -> dict[nn.Parameter, Fp8Products]:
        """Return the products of each weight that is cast to FP8 with a single scale.

        Nothing else reads these weights.
        """
        return {w: products for w, products in self._fp8.items() if products.weight_format}

    def keep_history(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        scaling: DelayedScaling,
        layout: Layout,
        device: torch.device,
    ) -> AmaxHistory:
        """Switch the FP8 layers to delayed scaling.

        Args:
            named_parameters: The parameters of the model in this process, with their global names.
            scaling: The rule that derives scales from the history.
            layout: The grid of processes.
            device: The device on which the layers run.

        Returns:
            The history shared by the layers; empty if there are no FP8 layers.
        """
        layers = {
            name.removesuffix(".weight"): self._fp8[parameter]
            for name, parameter in named_parameters
            if parameter in self._fp8
        }
        if not layers:
            return AmaxHistory.empty()
        largest = next(iter(layers.values())).largest  # all layers have the same format
        history = AmaxHistory(list(layers), largest, scaling, layout, device)
        for name, products in layers.items():
            products.scale_by(history.slots(name))
        return history
