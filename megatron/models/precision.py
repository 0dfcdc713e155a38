"""In which number format linear layers multiply: decided when a model is built."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.config.precision import PrecisionConfig
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.kernels.fp8 import E4M3, E5M2, choose_fp8_casts
from megatron.kernels.library import find_library
from megatron.parallel.products import Fp8Format, Fp8Products, Plain, Products

OLDEST_FP8 = (8, 9)


def choose_products(precision: PrecisionConfig, device: torch.device) -> Callable[[], Products]:
    """What makes the products of each linear layer of attention and MLP.

    Raises:
        ConfigError: --fp8-format on a GPU that cannot multiply in 8 bits.
    """
    if precision.fp8_format is None:
        return Plain
    ours = Device(device)
    if ours.is_gpu and ours.capability < OLDEST_FP8:
        raise ConfigError(
            f"--fp8-format {precision.fp8_format}: {ours.name} does not multiply in 8 bits (GPUs "
            "since Ada and Hopper do): drop the flag"
        )
    form = Fp8Format(
        values=E4M3,
        gradients=E5M2 if precision.fp8_format == "hybrid" else E4M3,
        by_row=precision.fp8_recipe == "rowwise",
        weight_gradient=precision.fp8_wgrad,
    )
    casts = choose_fp8_casts(find_library(device).library)
    return lambda: Fp8Products(form, casts)
