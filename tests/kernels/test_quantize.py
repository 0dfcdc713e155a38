"""Weights in 8 or 4 bits: the nearest values, which rounding again does not change; the kernel."""

import pytest
import torch

from megatron.kernels.quantize import BLOCK, dequantize, nf4_levels, quantize
from megatron.kernels.sources import constant

CPU = torch.device("cpu")
# Appendix E of QLoRA (arXiv 2305.14314).
PUBLISHED = """
    -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
    0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
    0.7229568362236023 1.0
"""
FORMATS = ("nf4", "fp8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_levels_are_those_of_the_paper():
    published = torch.tensor([float(word) for word in PUBLISHED.split()])
    torch.testing.assert_close(nf4_levels(torch.float32, CPU), published, atol=1e-6, rtol=0)


def _smallest_errors(matrix, form):
    """Return the distances to the nearest representable values, one block after another."""
    if form == "nf4":
        grid = nf4_levels(torch.float64, CPU)
    else:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        grid = every[every.isfinite()] / 448
    errors = torch.zeros(matrix.shape, dtype=torch.float64)
    for row, found in zip(matrix.double(), errors, strict=True):
        for start in range(0, len(row), BLOCK):
            block = row[start : start + BLOCK]
            largest = block.abs().max()
            distances = (block[:, None] - grid * largest).abs()
            found[start : start + BLOCK] = distances.amin(dim=1)
    return errors


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_the_nearest_ones(form, dtype):
    torch.manual_seed(0)
    matrix = torch.randn(12, 3 * BLOCK).to(dtype)
    matrix[3, :BLOCK] = 0
    matrix[4] *= 1e-3
    found = dequantize(*quantize(matrix, form), form)
    assert found.dtype == dtype
    rounding = torch.finfo(dtype).eps  # rounding of the level, and of its product with the scale
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    errors = (found.double() - matrix.double()).abs()
    assert (errors <= _smallest_errors(matrix, form) + rounding * matrix.abs() + smallest).all()
    assert not found[3, :BLOCK].any()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantizing_twice_changes_nothing(form, dtype):
    """A checkpoint may therefore store the values, and a run resumes with the same bits."""
    matrix = (torch.randn(256, 4 * BLOCK) * torch.logspace(-3, 1, 256)[:, None]).to(dtype)
    codes, scales = quantize(matrix, form)
    values = dequantize(codes, scales, form)
    again = quantize(values, form)
    assert again[1].equal(scales)
    assert dequantize(*again, form).equal(values)  # tiny fp16 numbers may have several codes


def test_the_kernel_has_the_same_blocks():
    assert constant("unpack.cu", "kScaleBlock") == BLOCK


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 192), (33, 1088)])
def test_the_kernel_gives_the_same_bits(kernels, form, dtype, shape):
    library, device = kernels
    torch.manual_seed(0)
    matrix = (torch.randn(shape) * torch.logspace(-4, 2, shape[-2])[:, None]).to(dtype)
    matrix[..., :64] *= torch.randn(64).to(dtype) ** 4
    matrix[-1, ..., -64:] = 0
    codes, scales = quantize(matrix, form)
    expected = dequantize(codes, scales, form)
    found = dequantize(codes.to(device), scales.to(device), form, library)
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), expected)
    again = quantize(matrix.to(device), form)
    assert again[0].cpu().equal(codes)
    assert again[1].cpu().equal(scales)


@pytest.mark.parametrize("form", FORMATS)
def test_every_code_is_read(kernels, form):
    library, device = kernels
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F] if form == "fp8" else codes  # e4m3's nan
    codes = torch.cat((codes, codes[: -len(codes) % 64]))
    scales = torch.rand(len(codes) * (1 if form == "fp8" else 2) // BLOCK) + 0.5
    found = dequantize(codes.to(device), scales.to(device), form, library)
    assert torch.equal(found.cpu(), dequantize(codes, scales, form))
    assert len(found.unique()) > 15


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_what_is_not_finite_spoils_its_block_only(kernels, form, wrong):
    library, device = kernels
    matrix = torch.randn(2, 128)
    matrix[1, 70] = wrong
    codes, scales = quantize(matrix, form)
    found = dequantize(codes.to(device), scales.to(device), form, library).cpu()
    assert not found[1, 70].isfinite()
    assert found[0].isfinite().all()
    assert found[1, :64].isfinite().all()
