"""Masked and causal softmax: the plain form by definition, the kernel against it in float64."""

from functools import partial

import pytest
import torch

from megatron.kernels.attention import attention_reference
from megatron.kernels.softmax import choose_masked_softmax, fused_masked_softmax, masked_softmax
from tests.kernels.compare import BF16, FP16, FP32, TOLERANCE, check, fresh, run

pytestmark = pytest.mark.usefixtures("poisoned")
B, N = 2, 3
TYPES = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16)]


def scores_of(queries, keys, x_dtype, w_dtype, device):
    generator = fresh()
    scores = 4 * torch.randn(B, N, queries, keys, generator=generator)
    grad = torch.randn(B, N, queries, keys, generator=generator)
    mask = torch.rand(B, 1, queries, keys, generator=generator) > 0.4
    mask[0, 0, 1] = False  # a query that may attend to nothing
    return scores.to(device, x_dtype), grad.to(device, w_dtype), mask.to(device)


def both(library, w_dtype, *, causal):
    options = {"causal": causal, "factor": 0.7}
    return (
        lambda x, mask: fused_masked_softmax(library, x, mask, dtype=w_dtype, **options),
        lambda x, mask: masked_softmax(x, mask, dtype=x.dtype, **options),
    )


def test_the_plain_form_by_definition():
    scores, _, mask = scores_of(4, 6, FP32, FP32, "cpu")
    out = masked_softmax(scores, mask, causal=True, factor=0.5, dtype=FP32)
    for b, n, i in [(0, 0, 0), (1, 2, 3), (0, 1, 2)]:
        terms = torch.where(mask[b, 0, i], (0.5 * scores[b, n, i].double()).exp(), 0)
        torch.testing.assert_close(out[b, n, i].double(), terms / terms.sum())
    assert torch.equal(out[0, :, 1], torch.full((N, 6), 1 / 6))
    causal = masked_softmax(scores, None, causal=True, factor=1.0, dtype=FP32)
    assert (causal[:, :, 0, 3:] == 0).all()
    assert (causal[:, :, 0, :3] > 0).all()


@pytest.mark.parametrize(("x_dtype", "w_dtype"), TYPES)
@pytest.mark.parametrize("which", ["all", "mask", "one mask", "causal"])
@pytest.mark.parametrize(("queries", "keys"), [(5, 8), (16, 16), (3, 1032), (9, 2120)])
def test_equals_float64(kernels, x_dtype, w_dtype, which, queries, keys):
    library, device = kernels
    scores, grad, mask = scores_of(queries, keys, x_dtype, w_dtype, device)
    given = {"mask": mask, "one mask": mask[1:]}.get(which)
    check(
        *both(library, w_dtype, causal=which == "causal"),
        [scores, given],
        [grad],
        TOLERANCE[w_dtype],
    )


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [2048, 4096, 8192, 16384])
@pytest.mark.parametrize("which", ["mask", "causal"])
def test_training_sizes(kernels, keys, which):
    library, device = kernels
    if device.type == "cpu":
        pytest.skip("too large for the emulator")
    scores, grad, mask = scores_of(97, keys, BF16, BF16, device)
    given = mask if which == "mask" else None
    check(*both(library, BF16, causal=given is None), [scores, given], [grad], TOLERANCE[BF16])


def test_odd_sizes_take_the_plain_form(kernels):
    library, device = kernels
    scores, grad, mask = scores_of(5, 9, FP32, FP32, device)
    fused, plain = both(library, FP32, causal=False)
    for ours, expected in zip(
        run(fused, [scores, mask], [grad]), run(plain, [scores, mask], [grad]), strict=True
    ):
        assert torch.equal(ours, expected)


def test_attention_takes_it(kernels):
    library, device = kernels
    generator = fresh()
    heads = [torch.randn(16, B, 4, 8, generator=generator).to(device) for _ in range(3)]
    grad = torch.randn(16, B, 32, generator=generator).to(device)
    options = {"mask": None, "causal": True, "dropout": 0.0, "softmax_in_fp32": False}
    fused = partial(attention_reference, softmax=choose_masked_softmax(library), **options)
    check(fused, partial(attention_reference, **options), heads, [grad], 1e-5)
