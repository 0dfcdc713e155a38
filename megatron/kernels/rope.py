"""Rotary position embedding (Su et al., 2021) in the half-rotation form.

The first r of a head's d channels rotate: channel i and channel i + r/2 form a plane that turns
by position / base^(2i/r). The rest passes unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cosines and sines, fp32 [s, 1, 1, r]


def rotation_table(
    positions: int,
    rotary_size: int,
    *,
    base: float = 10000.0,
    interpolation: int | None = None,
    scaling: float | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Cosines and sines of every position: fp32 [2, positions, r].

    Args:
        positions: how many, counted from 0.
        rotary_size: r, channels of a head that rotate; even.
        base: of the frequencies.
        interpolation: divide positions by this, to stretch a trained context (Chen et al., 2023).
        scaling: slow low frequencies down by this factor, as Llama 3.1 does; None: by none.
        device: where the table is made.
    """
    assert rotary_size % 2 == 0, rotary_size
    even = torch.arange(0, rotary_size, 2, dtype=torch.float64, device=device)
    place = torch.arange(positions, dtype=torch.float64, device=device) / (interpolation or 1)
    frequency = base ** -(even / rotary_size)
    if scaling is not None:
        frequency = scale_frequencies(frequency, scaling)
    angle = torch.outer(place, frequency).repeat(1, 2)
    return torch.stack((angle.cos(), angle.sin())).float()


def scale_frequencies(
    frequency: Tensor,
    factor: float,
    *,
    context: int = 8192,
    fewest_turns: float = 1.0,
    most_turns: float = 4.0,
) -> Tensor:
    """Frequencies [r/2] for a longer context, as Llama 3.1 has them (Grattafiori et al., 2024).

    What turns often within the first context tells near positions apart and stays as it is. What
    turns less than once is slowed down by `factor`, so that far positions look like known ones.
    In between the two are mixed.

    Args:
        frequency: radians a token.
        factor: above 0.
        context: tokens of the context that was trained first.
        fewest_turns: in that context, up to which a frequency is slowed down.
        most_turns: from which it stays.
    """
    turns = context * frequency / (2 * math.pi)
    kept = ((turns - fewest_turns) / (most_turns - fewest_turns)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys [s, b, n, d] by their position; computed in fp32, same type back."""
    cosine, sine = rotation
    size = cosine.shape[-1]
    turning, still = x[..., :size], x[..., size:]
    first, second = turning.chunk(2, dim=-1)
    across = torch.cat((-second, first), dim=-1)
    turned = (turning * cosine + across * sine).to(x.dtype)
    return turned if still.shape[-1] == 0 else torch.cat((turned, still), dim=-1)
