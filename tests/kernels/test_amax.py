"""Amaxes that kernels compute while they write, and how they reach the casts."""

import math

import pytest
import torch

from megatron.kernels import norm
from megatron.kernels.activation import fused_activation, gelu, swiglu
from megatron.kernels.amax import POOL, VECTORS, FusedAmax, FusedAmaxes, Zeros
from megatron.kernels.fp8 import AMAX, Fp8Casts
from megatron.kernels.library import KernelLibrary, LibraryChoice
from megatron.kernels.norm import fused_add_norm
from megatron.kernels.rope import fused_split_rotate, rotation_table
from megatron.models.recompute import RecomputePlan
from tests.kernels.compare import BF16, FP16, FP32, fresh
from tests.models.small import LLAMA, gpt, loss_and_gradients

REFERENCE = Fp8Casts()
pytestmark = pytest.mark.usefixtures("poisoned")


def draw(*size, dtype=BF16, device="cpu"):
    return torch.randn(*size, generator=fresh()).to(device, dtype).requires_grad_()


def new_fused_amaxes():
    zeros = Zeros()
    return FusedAmaxes(FusedAmax(zeros), FusedAmax(zeros))


def check(fused_amax, x):
    """Check that the amax of x was handed over here, once."""
    expected = REFERENCE.amax(x.detach())
    found = fused_amax.pop(x)
    assert found is not None
    assert found.equal(expected), (found, expected)
    assert fused_amax.pop(x) is None


@pytest.mark.parametrize("bias", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("x_dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(5, 64), (7, 1032), (9, 2120)])
def test_norm(kernels, bias, x_dtype, shape, monkeypatch):
    library, device = kernels
    monkeypatch.setattr(norm.Device, "multiprocessors", property(lambda _: 2))
    fused_amaxes = new_fused_amaxes()
    residual, delta = draw(*shape, dtype=x_dtype, device=device), draw(*shape, device=device)
    weight = draw(shape[1], device=device)
    shift = draw(shape[1], device=device) if bias else None
    total, normal = fused_add_norm(library, residual, delta, weight, shift, 1e-5, fused_amaxes)
    check(fused_amaxes.forward, normal)
    torch.autograd.backward([total, normal], [torch.randn_like(total), torch.randn_like(normal)])
    check(fused_amaxes.backward, delta.grad)


@pytest.mark.parametrize("plain", [swiglu, gelu])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 48), (9, 2096)])
def test_activation(kernels, plain, bias, shape):
    library, device = kernels
    fused_amaxes = new_fused_amaxes()
    x = draw(*shape, dtype=FP16, device=device)
    shift = draw(shape[-1], dtype=FP16, device=device) if bias else None
    out = fused_activation(library, plain, x, shift, fused_amaxes=fused_amaxes)
    check(fused_amaxes.forward, out)
    out.backward(torch.randn_like(out))
    check(fused_amaxes.backward, x.grad)


@pytest.mark.parametrize("head_size", [16, 80])  # the second does not fill a whole number of warps
def test_split_rotate(kernels, head_size):
    library, device = kernels
    fused_amax = FusedAmax(Zeros())
    qkv = draw(3, 2, 2 * 5 * head_size, device=device)
    rotation = rotation_table(3, 16, device=device)[:, :, None, None].unbind()
    heads = fused_split_rotate(library, qkv, 2, head_size, rotation, fused_amax)
    assert fused_amax.pop(qkv) is None
    torch.autograd.backward(heads, [torch.randn_like(x) for x in heads])
    check(fused_amax, qkv.grad)


def test_nan_survives(kernels):
    library, device = kernels
    fused_amaxes = new_fused_amaxes()
    x = draw(4, 2096, device=device).detach()
    x[2, 70] = math.nan
    out = fused_activation(library, gelu, x, fused_amaxes=fused_amaxes)
    assert fused_amaxes.forward.pop(out).isnan()


def test_a_fused_amax_passes_one_amax_once():
    fused_amax, x = FusedAmax(Zeros()), torch.ones(4, 16)
    assert fused_amax.pop(x) is None
    amax = fused_amax.allocate(x)
    assert fused_amax.pop(x.view(64)) is amax
    assert fused_amax.pop(x) is None  # once
    fused_amax.allocate(x)
    assert fused_amax.pop(x[:2]) is None  # other ranks' rows have been added or removed
    assert fused_amax.pop(x) is None  # and no later tensor gets the amax that this one left
    fused_amax.allocate(x)
    newer = fused_amax.allocate(x)
    assert fused_amax.pop(x) is newer
    fused_amax.allocate(x)
    fused_amax.forget()
    assert fused_amax.pop(x) is None


def test_no_zero_goes_past_the_start_or_the_end_of_a_recording():
    zeros, device = Zeros(), torch.device("cpu")
    before, vector = zeros.new(device), zeros.new_vector(16, device)
    zeros.forget()
    after = zeros.new(device)
    assert after.untyped_storage().data_ptr() != before.untyped_storage().data_ptr()
    assert after == 0
    after = zeros.new_vector(16, device)
    assert after.untyped_storage().data_ptr() != vector.untyped_storage().data_ptr()


def test_results_are_zero_and_never_handed_out_twice():
    zeros = Zeros()
    results = [zeros.new(torch.device("cpu")) for _ in range(POOL + 3)]
    for i, result in enumerate(results):
        assert result == 0
        result.add_(i)
    assert [int(x) for x in results] == list(range(POOL + 3))
    other = zeros.new(torch.device("meta"))
    assert other.device.type == "meta"


def test_vectors_are_zero_and_never_handed_out_twice():
    zeros, sizes = Zeros(), [VECTORS // 2, VECTORS // 2 - 16, 32, VECTORS + 16, 16]
    vectors = [zeros.new_vector(size, torch.device("cpu")) for size in sizes]
    for i, vector in enumerate(vectors):
        assert not vector.any()
        vector.add_(i + 1)
    assert [x.numel() for x in vectors] == sizes
    assert all((x == i + 1).all() for i, x in enumerate(vectors))
    assert zeros.new_vector(16, torch.device("meta")).device.type == "meta"


class Counting(KernelLibrary):
    """A library that counts the passes that only measure."""

    def __init__(self, library):
        super().__init__(library.path, library._driver)
        self.measured = 0

    def launch(self, kernel, *arguments):
        self.measured += kernel is AMAX
        super().launch(kernel, *arguments)


WIDE = {**LLAMA, "hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 64, "num_layers": 2}
OLD = {**WIDE, "swiglu": False, "normalization": "LayerNorm", "add_bias_linear": True}


@pytest.fixture
def counting(emulated, monkeypatch):
    monkeypatch.setattr("tests.models.small.SEQUENCE", 16)
    library = Counting(emulated)
    fused = LibraryChoice(library, "emulated")
    monkeypatch.setattr("megatron.parallel.build.find_library", lambda _: fused)
    return library


TENSORWISE = {"bf16": True, "fp8_format": "hybrid"}


@pytest.mark.parametrize("flags", [WIDE, OLD], ids=["llama", "gpt"])
@pytest.mark.parametrize("wgrad", [True, False])
def test_a_model_gives_the_same_bits(counting, flags, wgrad, monkeypatch):
    """Handed-over amaxes change no bit; only weights and attention's output are measured."""

    def run():
        counting.measured = 0
        model = gpt(flags, {**TENSORWISE, "fp8_wgrad": wgrad}, dtype=BF16)
        return loss_and_gradients(model), counting.measured

    result, passes = run()
    assert passes == 2 * (4 + 1)  # layers: four weights, attention's output
    monkeypatch.setattr(FusedAmax, "pop", lambda *_: None)
    again, passes = run()
    assert passes == 2 * 4 * 3
    torch.testing.assert_close(again, result, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("recompute", "handed"),
    [
        (None, 2 * 3 + 2 * 4),
        (RecomputePlan("selective"), 2 * 3 + 2 * 4),
        # Forward twice. A group's end joins the stream, and its last gradient is not handed over.
        (RecomputePlan("full"), 2 * 2 * 3 + 2 * 3),
        (RecomputePlan("full", "block", 1), 3 * 3 + 2 * 4 - 1),
    ],
)
@pytest.mark.parametrize("flags", [WIDE, OLD], ids=["llama", "gpt"])
def test_every_amax_is_that_of_its_tensor(counting, flags, recompute, handed, monkeypatch):
    """Two micro-batches have interleaved passes, as in a pipeline."""
    found = []
    take = FusedAmax.pop

    def checked(self, x):
        amax = take(self, x)
        if amax is not None:
            assert amax.equal(REFERENCE.amax(x.detach()))
            found.append(amax)
        return amax

    monkeypatch.setattr(FusedAmax, "pop", checked)
    model = gpt(flags, TENSORWISE, dtype=BF16, recompute=recompute)
    texts = torch.randint(64, (3, 2, 17), generator=fresh())
    first, second = (model(text[:, :-1], labels=text[:, 1:]).mean() for text in texts[:2])
    first.backward()
    third = model(texts[2, :, :-1], labels=texts[2, :, 1:]).mean()
    (5 * second).backward()
    third.backward()
    assert len(found) == 3 * handed


def test_dropout_lets_no_gradient_be_handed_over(counting, monkeypatch):
    """Dropout changes the gradients, so the layer before it measures them."""
    plain = gpt({**WIDE, "hidden_dropout": 0.3}, TENSORWISE, dtype=BF16)
    result = loss_and_gradients(plain)
    monkeypatch.setattr(FusedAmax, "pop", lambda *_: None)
    measured = gpt({**WIDE, "hidden_dropout": 0.3}, TENSORWISE, dtype=BF16)
    torch.testing.assert_close(loss_and_gradients(measured), result, rtol=0, atol=0)
