"""Rotary embeddings against complex multiplication in float64."""

import math

import pytest
import torch

from megatron.kernels.rope import DynamicNtk, Scaling, rotate, rotation_table

S, D = 12, 8


def rotation(size, **options):
    cosine, sine = rotation_table(S, size, **options)[:, :, None, None]
    return cosine, sine


def turn(x, size, base=10000.0, interpolation=1):
    """Rotate, with channels i and i + size/2 as real and imaginary parts."""
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
    """At far positions, the angle needs more than 16 bits."""
    table = rotation_table(4096, D)[:, 4095:, None, None]
    x = torch.randn(1, 1, 1, D).bfloat16()
    out = rotate(x, (table[0], table[1]))
    assert out.dtype == torch.bfloat16
    exact = rotate(x.float(), (table[0], table[1]))
    torch.testing.assert_close(out.float(), exact, rtol=2**-8, atol=0)


def test_scaling_slows_only_what_turns_seldom_in_the_first_context():
    """Llama 3.1's rule by wavelength: kept below 2048, divided above 8192, interpolated between."""
    wavelength = torch.tensor([8.0, 2047.0, 2048.0, 4096.0, 8192.0, 8193.0, 1e6])
    scaled = 2 * math.pi / Scaling(8.0).slow_down(2 * math.pi / wavelength)
    kept = (8192 / 4096 - 1) / 3
    mixed = 4096 / (kept + (1 - kept) / 8)
    expected = torch.tensor([8.0, 2047.0, 2048.0, mixed, 8192 * 8.0, 8193 * 8.0, 8e6])
    torch.testing.assert_close(scaled, expected)


def test_a_scaled_table_is_that_of_scaled_frequencies():
    plain, scaled = (
        rotation_table(2, 64, base=5e5, scaling=scaling) for scaling in (None, Scaling(8.0))
    )
    first, last = plain.new_tensor(1.0).sin(), math.sin(5e5 ** -(62 / 64) / 8)
    assert scaled[1, 1, 0] == plain[1, 1, 0] == first
    assert scaled[1, 1, 31].item() == pytest.approx(last, rel=1e-6)


def test_dynamic_ntk_is_a_larger_base_for_longer_sequences():
    """There is one base for all positions, or one for each by the length of its own sequence."""
    ntk, positions = DynamicNtk(3.0, 16), torch.arange(S)

    def base(length):
        return 500.0 * (3.0 * length / 16 - 2.0) ** (D / (D - 2))

    for length, expected in ((7, 500.0), (16, 500.0), (17, base(17)), (40, base(40))):
        found = torch.stack(ntk.rotation(positions, length, D, 500.0))
        table = rotation_table(S, D, base=expected)[:, :, None, None]
        torch.testing.assert_close(found, table, rtol=0, atol=1e-6)
    lengths = torch.tensor([5, 40] * (S // 2))
    mixed = torch.stack(ntk.rotation(positions, lengths, D, 500.0))
    short, long = (torch.stack(ntk.rotation(positions, one, D, 500.0)) for one in (5, 40))
    assert torch.equal(mixed[:, ::2], short[:, ::2])
    assert torch.equal(mixed[:, 1::2], long[:, 1::2])


def test_proportional_planes_have_the_frequencies_of_a_whole_head():
    whole, part = rotation_table(S, D), rotation_table(S, D, planes=1)
    assert torch.equal(part[..., ::4], whole[..., ::4])
    still = torch.tensor((1.0, 0.0))[:, None, None].expand(2, S, D - 2)
    assert torch.equal(part[..., [1, 2, 3, 5, 6, 7]], still)
