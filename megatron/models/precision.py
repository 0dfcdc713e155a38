"""In which number format linear layers multiply: decided when a model is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.config.precision import PrecisionConfig
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.kernels.amax import Amaxes
from megatron.kernels.fp8 import E4M3, E5M2, choose_fp8_casts
from megatron.kernels.library import find_library
from megatron.parallel.products import Fp8Format, Fp8Products, Plain, Products

OLDEST_FP8 = (8, 9)


@dataclass(frozen=True)
class LinearFormat:
    """How the linear layers of attention and MLP multiply.

    Attributes:
        new_products: makes what one layer multiplies with.
        amaxes: where kernels leave the largest magnitudes of what they write for a layer to cast;
            None: layers do not ask.
    """

    new_products: Callable[[], Products] = Plain
    amaxes: Amaxes | None = None


IN_MODEL_FORMAT = LinearFormat()


def choose_linear_format(precision: PrecisionConfig, device: torch.device) -> LinearFormat:
    """What the flags ask for.

    Raises:
        ConfigError: --fp8-format on a GPU that cannot multiply in 8 bits.
    """
    if precision.fp8_format is None:
        return IN_MODEL_FORMAT
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
    amaxes = Amaxes()
    casts = choose_fp8_casts(find_library(device).library, amaxes)
    return LinearFormat(lambda: Fp8Products(form, casts), None if form.by_row else amaxes)
