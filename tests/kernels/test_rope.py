"""Rotary embedding against complex multiplication in float64."""

import pytest
import torch

from megatron.kernels.rope import rotate, rotation_table

S, D = 12, 8


def rotation(size, **options):
    cosine, sine = rotation_table(S, size, **options)[:, :, None, None]
    return cosine, sine


def turn(x, size, base=10000.0, interpolation=1):
    """Channels i and i + size/2 as real and imaginary part."""
    x = x.double()
    z = torch.complex(x[..., : size // 2], x[..., size // 2 : size])
    place = torch.arange(S, dtype=torch.float64)[:, None, None, None] / interpolation
    angle = place / base ** (2 * torch.arange(size // 2, dtype=torch.float64) / size)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag, x[..., size:]), dim=-1)


@pytest.mark.parametrize("size", [D, D // 2])
@pytest.mark.parametrize("options", [{}, {"base": 100.0}, {"interpolation": 4}])
def test_rotates_by_position(size, options):
    x = torch.randn(S, 2, 3, D)
    out = rotate(x, rotation(size, **options))
    torch.testing.assert_close(out.double(), turn(x, size, **options), rtol=1e-5, atol=1e-6)
    assert torch.equal(out[..., size:], x[..., size:])
    torch.testing.assert_close(out[0], x[0])


def test_scores_depend_on_distance_only():
    query, key = torch.randn(D), torch.randn(D)
    queries = rotate(query.expand(S, 1, 1, D), rotation(D))[:, 0, 0]
    keys = rotate(key.expand(S, 1, 1, D), rotation(D))[:, 0, 0]
    scores = queries @ keys.t()
    for distance in range(-S + 1, S):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_16_bit_heads_are_rotated_in_fp32():
    """Far positions need more than 16 bits of angle."""
    table = rotation_table(4096, D)[:, 4095:, None, None]
    x = torch.randn(1, 1, 1, D).bfloat16()
    out = rotate(x, (table[0], table[1]))
    assert out.dtype == torch.bfloat16
    exact = rotate(x.float(), (table[0], table[1]))
    torch.testing.assert_close(out.float(), exact, rtol=2**-8, atol=0)
