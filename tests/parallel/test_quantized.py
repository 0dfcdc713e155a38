"""Frozen weights in 8 or 4 bits: their memory, and the layers that use them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.config.precision import PrecisionConfig
from megatron.kernels.grouped import Grouping
from megatron.kernels.quantize import BLOCK, bytes_of, dequantize, quantize
from megatron.parallel.build import BuildContext
from megatron.parallel.expert_linear import ExpertLinear
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import Init, initialize
from megatron.parallel.quantized import PackedWeight

CPU = torch.device("cpu")
FORMATS = ("nf4", "fp8")


def _weight(shape, form="nf4", dtype=torch.float32):
    weight = PackedWeight.empty(shape, form, dtype=dtype, device=CPU)
    weight.copy_(torch.randn(shape))
    return weight


@pytest.mark.parametrize(
    ("form", "dtype", "bits"),
    [
        ("nf4", torch.float32, 4.5),
        ("nf4", torch.bfloat16, 4.25),
        ("fp8", torch.float32, 8.5),
        ("fp8", torch.bfloat16, 8.25),
    ],
)
def test_bytes_of_weights(form, dtype, bits):
    weight = _weight((96, 256), form, dtype)
    held = weight.codes.untyped_storage().nbytes() + weight.scales.untyped_storage().nbytes()
    assert held * 8 == bits * weight.numel()
    assert held == weight.packed_bytes == bytes_of(weight.numel(), form, dtype.itemsize)
    with pytest.raises(RuntimeError, match="data pointer"):
        weight.untyped_storage().data_ptr()
    assert repr(weight) == f"PackedWeight({form}, {dtype}, [96, 256])"


def test_a_packed_weight_is_read_like_a_tensor():
    weight = _weight((2, 8, 128))
    values = weight.values()
    assert type(values) is torch.Tensor
    assert torch.equal(weight + 1, values + 1)
    assert torch.equal(weight.mT, values.mT)
    assert torch.equal(torch.cat([values, weight]), torch.cat([values, values]))
    for packed, plain in (
        (weight.flatten(0, -2), values.flatten(0, -2)),
        (weight[1], values[1]),
        (weight.detach().view(2, 2, 4, 128), values.view(2, 2, 4, 128)),
        (weight.view(-1), values.view(-1)),
        (weight.view(-1)[128:512], values.view(-1)[128:512]),
        (weight[1:], values[1:]),
        (weight[0].split(3)[2], values[0].split(3)[2]),
        (weight[0].split([3, 5])[1], values[0].split([3, 5])[1]),
    ):
        assert isinstance(packed, PackedWeight)
        assert torch.equal(packed.values(), plain)
        assert packed.codes.untyped_storage().data_ptr() == weight.codes.data_ptr()
    assert torch.equal(weight.view(-1, 32), values.view(-1, 32))
    assert [len(part) for part in weight[0].split(3)] == [3, 3, 2]


def test_what_would_be_lost_is_refused():
    weight = _weight((8, 128))
    for change in (
        lambda: weight[:, 64:],
        lambda: weight[::2],
        lambda: weight.view(-1)[32:64],
        lambda: weight.fill_(1),
        lambda: weight.add_(1),
        lambda: weight.index_put_((torch.tensor([1]),), torch.zeros(128)),
    ):
        with pytest.raises(NotImplementedError, match="packed weight.*: copy the whole weight"):
            change()
    with pytest.raises(ValueError, match="rows of 96 elements cannot be cut into blocks of 64"):
        PackedWeight.empty((4, 96), "nf4", dtype=torch.float32, device=CPU)


def _context(form):
    return BuildContext(Layout.single(), precision=PrecisionConfig(), frozen_format=form)


def _kept_bytes(tensors):
    return sum(
        t.packed_bytes if isinstance(t, PackedWeight) else t.untyped_storage().nbytes()
        for t in {id(t): t for t in tensors}.values()
    )


def _run(call, x):
    """Return the output, the input's gradient, and the weights kept between the passes."""
    kept = []
    x = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = call(x)
    (out * torch.arange(out.shape[-1])).sum().backward()
    return out.detach(), x.grad, [t for t in kept if t.is_floating_point()]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_that_of_its_values(form, bias):
    layer = Linear(
        128, 192, _context(form), split=None, init=Init("normal", 0.1), bias=bias
    ).requires_grad_(False)
    initialize(layer.named_parameters(), 1)
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance(layer.weight, PackedWeight)
    x = torch.randn(5, 2, 128)
    values = layer.weight.values()
    out, grad, kept = _run(layer, x)
    expected, expected_grad, _ = _run(lambda x: F.linear(x, values, layer.bias), x)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(grad, expected_grad, atol=1e-6, rtol=1e-6)
    assert _kept_bytes(kept) == layer.weight.packed_bytes
    assert layer.weight.grad is None


def test_initial_values_are_those_of_a_plain_layer_rounded():
    layers = [
        Linear(128, 64, _context(form), split=None, init=Init("normal", 0.1), bias=False)
        for form in ("nf4", None)
    ]
    for layer in layers:
        initialize([("here", layer.weight)], 3)
    packed, plain = (layer.weight.detach() for layer in layers)
    assert torch.equal(packed.values(), dequantize(*quantize(plain, "nf4"), "nf4"))


@pytest.mark.parametrize("form", FORMATS)
def test_experts_are_those_of_their_values(form):
    layer = ExpertLinear(
        (4, 2, 32, 128), _context(form), split_dim=2, init=Init("normal", 0.1), bias=False
    )
    initialize(layer.named_parameters(), 1)
    grouping = Grouping.of(torch.tensor([[0, 2], [2, 3], [3, 0], [0, 2]]), 4)
    x = torch.randn(8, 128)
    values = layer.weight.values().view(4, 64, 128)
    out, grad, kept = _run(lambda x: layer(x, grouping), x)

    def plain(x):
        each = zip(x, grouping.expert_of_row().tolist(), strict=True)
        return torch.stack([F.linear(row, values[expert]) for row, expert in each])

    expected, expected_grad, _ = _run(plain, x)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-6)
    assert _kept_bytes(kept) == layer.weight.packed_bytes + x.nbytes


@pytest.mark.parametrize("form", FORMATS)
def test_codes_are_copied_unchanged_and_without_a_kernel_on_meta(form):
    """`fully_shard` copies shards of weights on the meta device, where a kernel has no memory."""
    source = _weight((4, 2 * BLOCK), form)
    target = torch.empty_like(source)
    target.copy_(source)
    assert target.codes.equal(source.codes)
    assert target.scales.equal(source.scales)
    kernels = object()  # it would fail if it were launched
    meta = PackedWeight.empty(
        (4, 2 * BLOCK), form, dtype=torch.float32, device=torch.device("meta"), library=kernels
    )
    torch.empty_like(meta).copy_(meta)
    assert meta.values().is_meta
    assert meta.values().shape == meta.shape
