"""What the modules of a model compute with: decided when it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.config.precision import PrecisionConfig
from megatron.kernels.amax import Amaxes
from megatron.kernels.fp8 import E4M3, E5M2, choose_fp8_casts
from megatron.kernels.fp8_product import choose_fp8_product
from megatron.kernels.library import KernelLibrary, find_library
from megatron.parallel.fp8_products import Fp8Format, Fp8Products
from megatron.parallel.products import Plain, Products


@dataclass(frozen=True)
class Kernels:
    """What to run.

    Attributes:
        library: of fused kernels; None: PyTorch's operations.
        new_products: makes what one linear layer of attention or MLP multiplies with.
        amaxes: where kernels leave the largest magnitudes of what they write for such a layer to
            cast; None: layers do not ask.
    """

    library: KernelLibrary | None = None
    new_products: Callable[[], Products] = Plain
    amaxes: Amaxes | None = None


PLAIN_KERNELS = Kernels()


def choose_kernels(precision: PrecisionConfig, device: torch.device) -> Kernels:
    """What the flags ask for and the device can do.

    Args:
        device: where the model runs, which need not be where its parameters are.
    """
    library = find_library(device).library
    if precision.fp8_format is None:
        return Kernels(library)
    form = Fp8Format(
        values=E4M3,
        gradients=E5M2 if precision.fp8_format == "hybrid" else E4M3,
        by_row=precision.fp8_recipe == "rowwise",
        weight_gradient=precision.fp8_wgrad,
    )
    amaxes = Amaxes()
    casts = choose_fp8_casts(library, amaxes)
    product = choose_fp8_product(device)
    # Only casts by a tensor's own largest magnitude, of which there is one, ask for it.
    measured = amaxes if precision.fp8_recipe == "tensorwise" else None
    return Kernels(library, lambda: Fp8Products(form, casts, product), measured)
