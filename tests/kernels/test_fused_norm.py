"""The add_norm kernel against float64: every combination of types, inputs and used outputs."""

from functools import partial

import pytest
import torch

from megatron.kernels import norm
from megatron.kernels.norm import add_norm, choose_add_norm, fused_add_norm
from tests.kernels.compare import BF16, FP16, FP32, TOLERANCE, check, fresh, run

EPSILON = 1e-3
TYPES = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16), (FP32, FP16)]
pytestmark = pytest.mark.usefixtures("poisoned")


def inputs_of(shape, x_dtype, w_dtype, device, *, delta=True, bias=True):
    generator = fresh()

    def draw(*size, dtype, shift=0.0):
        return (torch.randn(*size, generator=generator) + shift).to(device, dtype)

    h = shape[-1]
    inputs = [
        draw(*shape, dtype=x_dtype, shift=0.5),
        draw(*shape, dtype=w_dtype) if delta else None,
        draw(h, dtype=w_dtype, shift=1.0),
        draw(h, dtype=w_dtype) if bias else None,
    ]
    return inputs, [draw(*shape, dtype=x_dtype), draw(*shape, dtype=w_dtype)]


def both(library):
    fused = partial(fused_add_norm, library)
    return lambda *x: fused(*x, EPSILON), lambda *x: add_norm(*x, EPSILON)


@pytest.mark.parametrize(("x_dtype", "w_dtype"), TYPES)
@pytest.mark.parametrize("bias", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("delta", [True, False], ids=["add", "alone"])
@pytest.mark.parametrize("shape", [(3, 2, 64), (5, 1, 1032), (9, 2120)])
def test_equals_float64(kernels, x_dtype, w_dtype, bias, delta, shape):
    library, device = kernels
    inputs, grads = inputs_of(shape, x_dtype, w_dtype, device, delta=delta, bias=bias)
    ours = check(*both(library), inputs, grads, TOLERANCE[w_dtype])
    assert [x.dtype for x in ours[:2]] == [x_dtype, w_dtype]


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("used", [0, 1])
def test_one_result_may_stay_unused(kernels, used, delta):
    library, device = kernels
    inputs, grads = inputs_of((4, 2, 64), FP32, BF16, device, delta=delta)
    grads[1 - used] = None
    check(*both(library), inputs, grads, TOLERANCE[BF16])


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [2048, 4096, 5120, 8192, 12288, 16384])
@pytest.mark.parametrize("bias", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(BF16, BF16), (FP32, BF16)])
def test_training_sizes(kernels, hidden, bias, x_dtype, w_dtype):
    library, device = kernels
    if device.type == "cpu":
        pytest.skip("too large for the emulator")
    inputs, grads = inputs_of((1999, hidden), x_dtype, w_dtype, device, bias=bias)
    check(*both(library), inputs, grads, TOLERANCE[w_dtype])


def test_more_blocks_than_one_share_the_rows(kernels, monkeypatch):
    """Several blocks have partial sums, each of several rows, as on a GPU."""
    library, device = kernels
    multiprocessors = property(lambda _: 3)
    monkeypatch.setattr(norm.Device, "multiprocessors", multiprocessors)
    for hidden in (64, 2048):
        inputs, grads = inputs_of((101, hidden), BF16, BF16, device)
        check(*both(library), inputs, grads, TOLERANCE[BF16])


@pytest.mark.parametrize("shape", [(3, 20), (3, 16392), (0, 64)])
def test_sizes_beyond_the_kernel_take_the_plain_form(kernels, shape):
    library, device = kernels
    inputs, grads = inputs_of(shape, BF16, BF16, device)
    fused, plain = both(library)
    for ours, expected in zip(run(fused, inputs, grads), run(plain, inputs, grads), strict=True):
        assert torch.equal(ours, expected)


def test_choice(kernels):
    assert choose_add_norm(None) is add_norm
    assert choose_add_norm(kernels[0]).func is fused_add_norm
