"""Casts to fp8: the plain form against float64, the kernels against the plain form's bits."""

import math

import pytest
import torch

from megatron.kernels.fp8 import E4M3, E5M2, Fp8, Fp8Casts, choose_fp8_casts, inverses_of
from tests.kernels.compare import seed_afresh

REFERENCE = Fp8Casts()
SHAPES = [(16, 16), (144, 272)]  # less than a tile; over two tiles, cut at the edges
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def matrix(shape, dtype, device="cpu"):
    seed_afresh()
    x = torch.randn(shape) * torch.logspace(-3, 1, shape[1])
    x[3] = 0
    return x.to(dtype).to(device)


def same(ours, theirs):
    assert ours.values.dtype == theirs.values.dtype
    assert ours.values.is_contiguous()
    assert torch.equal(ours.values.cpu().view(torch.uint8), theirs.values.view(torch.uint8))
    assert torch.equal(ours.inverse.cpu(), theirs.inverse)


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_plain_is_as_close_as_the_format_allows(fp8):
    x = matrix((32, 48), torch.bfloat16)
    step = torch.finfo(fp8).eps  # distance between neighbors, relative
    for found in (REFERENCE.cast(x, REFERENCE.amax(x), fp8), REFERENCE.cast_rows(x, fp8)):
        error = (found.dequantized().double() - x.double()).abs()
        smallest = torch.finfo(fp8).smallest_normal * found.inverse.double()
        assert (error <= step / 2 * x.double().abs().maximum(smallest) * 1.001).all()
        largest = found.values.float().abs().amax().item()
        assert largest == pytest.approx(torch.finfo(fp8).max)


def test_values_above_an_earlier_amax_saturate():
    x = matrix((16, 16), torch.bfloat16)
    amax = REFERENCE.amax(x) / 4  # from a previous iteration, for example
    found = REFERENCE.cast(x, amax, E4M3)
    assert found.values.float().isfinite().all()
    assert found.dequantized().abs().max().item() == pytest.approx(amax.item())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_kernels_equal_the_plain_form(kernels, shape, dtype, fp8):
    library, device = kernels
    ours, x = choose_fp8_casts(library), matrix(shape, dtype, device)
    plain, amax = x.cpu(), ours.amax(x)  # on a GPU, PyTorch multiplies by the inverse
    held = amax.cpu()
    assert torch.equal(held, REFERENCE.amax(plain))
    same(ours.cast(x, amax, fp8), REFERENCE.cast(plain, held, fp8))
    same(ours.cast(x, amax / 4, fp8), REFERENCE.cast(plain, held / 4, fp8))
    place = torch.empty_like(x, dtype=fp8)
    assert ours.cast(x, amax, fp8, into=place).values is place
    same(Fp8(place, inverses_of(amax, fp8)), REFERENCE.cast(plain, held, fp8))
    same(ours.cast_rows(x, fp8), REFERENCE.cast_rows(plain, fp8))
    for a, b in zip(
        ours.cast_transpose(x, amax, fp8), REFERENCE.cast_transpose(plain, held, fp8), strict=True
    ):
        same(a, b)
    for a, b in zip(
        ours.cast_transpose_rows(x, fp8), REFERENCE.cast_transpose_rows(plain, fp8), strict=True
    ):
        same(a, b)


@pytest.mark.parametrize("shape", [(3, 16, 48), (2, 144, 80)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_matrix_of_a_stack_is_transposed(kernels, shape, dtype):
    library, device = kernels
    x = matrix((shape[0] * shape[1], shape[2]), dtype, device).view(shape)
    casts = choose_fp8_casts(library)
    same(casts.cast_rows(x, E4M3), REFERENCE.cast_rows(x.cpu(), E4M3))
    stacked = casts.cast_transpose_rows(x, E4M3)
    for i, one in enumerate(x):
        for whole, alone in zip(stacked, casts.cast_transpose_rows(one, E4M3), strict=True):
            same(Fp8(whole.values[i], whole.inverse[i]), Fp8(*(t.cpu() for t in alone)))
    for ours, plain in zip(stacked, REFERENCE.cast_transpose_rows(x.cpu(), E4M3), strict=True):
        same(ours, plain)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_a_cast_by_an_earlier_amax_measures_as_it_goes(kernels, shape, dtype, fp8):
    library, device = kernels
    ours, x = choose_fp8_casts(library), matrix(shape, dtype, device)
    plain, earlier = x.cpu(), torch.tensor(0.75)
    expected = plain.double().abs().max()
    for casts, matrices in ((REFERENCE, plain), (ours, x)):
        place = matrices.device
        found, above = torch.zeros(3, device=place), torch.full([], 1e9, device=place)
        held = earlier.to(place)
        one = casts.cast(matrices, held, fp8, running_amax=found[1])
        two = casts.cast_transpose(matrices, held, fp8, running_amax=found[2])
        casts.cast_transpose(matrices, held, fp8, running_amax=above)
        assert found.cpu().double().tolist() == [0, expected, expected]
        assert above == 1e9
        plainly = REFERENCE.cast_transpose(plain, earlier, fp8)
        for mine, theirs in zip((one, *two), (plainly[0], *plainly), strict=True):
            same(mine, theirs)


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_does_not_saturate_while_measuring(kernels, wrong):
    library, device = kernels
    for casts, place in ((REFERENCE, torch.device("cpu")), (choose_fp8_casts(library), device)):
        x = torch.randn(32, 48).to(place, torch.bfloat16)
        x[7, 5] = wrong
        held, found = torch.ones([], device=place), torch.zeros(2, device=place)
        whole, turned = casts.cast_transpose(x, held, E5M2, running_amax=found[0])
        flat = casts.cast(x, held, E4M3, running_amax=found[1])
        for out, at in ((whole, (7, 5)), (turned, (5, 7)), (flat, (7, 5))):
            values = out.dequantized()
            assert values[at].isnan()
            assert values.isfinite().sum() == values.numel() - 1
        assert not found.isfinite().any()
        # Later finite values do not reset it.
        again = casts.cast(torch.ones_like(x), held, E4M3, running_amax=found[1])
        assert again.dequantized().isfinite().all()
        assert not found.isfinite().any()


@pytest.mark.parametrize("shape", [(16, 16), (144, 272), (48, 16)])
def test_the_transpose_of_a_matrix_in_8_bits(kernels, shape):
    library, device = kernels
    x = matrix(shape, torch.bfloat16, device)
    held = torch.ones([], device=device)
    ours = choose_fp8_casts(library)
    whole, turned = ours.cast_transpose(x, held, E5M2)
    same(ours.transpose(whole), REFERENCE.transpose(Fp8(whole.values.cpu(), held.cpu() / 57344)))
    assert torch.equal(
        ours.transpose(whole).values.view(torch.uint8), turned.values.view(torch.uint8)
    )


def test_a_part_of_a_matrix_may_have_any_number_of_rows(kernels):
    library, device = kernels
    ours, x = choose_fp8_casts(library), matrix((5, 32), torch.bfloat16, device)
    held = torch.ones([], device=device)
    same(ours.cast(x, held, E4M3), REFERENCE.cast(x.cpu(), held.cpu(), E4M3))
    same(ours.cast_rows(x, E4M3), REFERENCE.cast_rows(x.cpu(), E4M3))


def test_amax_of_odd_sizes_zeros_and_nan(kernels):
    library, device = kernels
    ours = choose_fp8_casts(library)
    x = torch.zeros(37, 3, device=device)
    assert ours.amax(x) == 0
    x[36, 2] = -2.5
    assert ours.amax(x) == 2.5
    x[1, 1] = math.nan
    assert ours.amax(x).isnan()
    zeros = torch.zeros(16, 16, device=device)
    plain = zeros.cpu()
    same(
        ours.cast(zeros, ours.amax(zeros), E4M3), REFERENCE.cast(plain, REFERENCE.amax(plain), E4M3)
    )


def test_other_sizes_are_refused(kernels):
    with pytest.raises(AssertionError, match="multiples of 16"):
        choose_fp8_casts(kernels[0]).cast_rows(torch.ones(16, 24), E4M3)


@pytest.mark.gpu
def test_a_product_of_casts(kernels):
    """Row-major times column-major, as the library requires."""
    library, device = kernels
    if device.type == "cpu":
        pytest.skip("a GPU's product")
    ours = choose_fp8_casts(library)
    x, weight = matrix((64, 128), torch.bfloat16, device), torch.randn(32, 128, device=device)
    left = ours.cast(x, ours.amax(x), E4M3)
    right = ours.cast(weight, ours.amax(weight), E4M3)
    product = torch._scaled_mm(
        left.values, right.values.t(), left.inverse, right.inverse, out_dtype=torch.bfloat16
    )
    expected = left.dequantized().double() @ right.dequantized().double().t()
    error = (product.double() - expected).norm() / expected.norm()
    assert error < 1e-2
