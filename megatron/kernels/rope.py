"""Rotary position embedding (Su et al., 2021) in the half-rotation form.

The first r of a head's d channels rotate: channel i and channel i + r/2 form a plane that turns
by position / base^(2i/r). The rest passes unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cosines and sines, fp32 [s, 1, 1, r]


def rotation_table(
    positions: int,
    rotary_size: int,
    *,
    base: float = 10000.0,
    interpolation: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Cosines and sines of every position: fp32 [2, positions, r].

    Args:
        positions: how many, counted from 0.
        rotary_size: r, channels of a head that rotate; even.
        base: of the frequencies.
        interpolation: divide positions by this, to stretch a trained context (Chen et al., 2023).
        device: where the table is made.
    """
    assert rotary_size % 2 == 0, rotary_size
    even = torch.arange(0, rotary_size, 2, dtype=torch.float64, device=device)
    place = torch.arange(positions, dtype=torch.float64, device=device) / (interpolation or 1)
    angle = torch.outer(place, base ** -(even / rotary_size)).repeat(1, 2)
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys [s, b, n, d] by their position; computed in fp32, same type back."""
    cosine, sine = rotation
    size = cosine.shape[-1]
    turning, still = x[..., :size], x[..., size:]
    first, second = turning.chunk(2, dim=-1)
    across = torch.cat((-second, first), dim=-1)
    turned = (turning * cosine + across * sine).to(x.dtype)
    return turned if still.shape[-1] == 0 else torch.cat((turned, still), dim=-1)
