"""8-bit products against products in fp64, and layers that use them."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron.kernels.fp8 import E4M3, E5M2, Fp8Casts
from megatron.kernels.library import find_library
from megatron.models.recompute import RecomputePlan
from megatron.parallel import collectives
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import NO_COMMUNICATION
from megatron.parallel.fp8 import DelayedScaling, Fp8Format, Fp8Products
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import Init, initialize
from megatron.parallel.products import InFp32, LinearCall, Products
from tests.distributed import run_distributed
from tests.models.small import LLAMA, gpt, loss_and_gradients

FORMS = [
    Fp8Format(gradients=gradients, by_row=by_row, weight_gradient=weight_gradient)
    for gradients in (E4M3, E5M2)
    for by_row in (False, True)
    for weight_gradient in (True, False)
]
WIDE = {**LLAMA, "hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 64, "num_layers": 2}


def _error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def _products(form, x, weight, grad):
    products = Fp8Products(form, Fp8Casts())
    out, kept = products.forward(LinearCall(x, weight))
    prepared = products.prepare(grad)
    kept_input = x if products.keeps_input else None
    total = torch.full(weight.shape, 3.0)
    products.weight_gradient(prepared, kept, kept_input, total, accumulate=True)
    result = torch.full(weight.shape, torch.nan)
    products.weight_gradient(prepared, kept, kept_input, result, accumulate=False)
    torch.testing.assert_close(total, result + 3)
    return out, products.input_gradient(prepared, kept), result


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_are_right_to_the_formats_precision(form):
    torch.manual_seed(5)
    x = torch.randn(32, 2, 48, dtype=torch.bfloat16)
    weight = torch.randn(80, 48, dtype=torch.bfloat16) * 0.02
    grad = torch.randn(32, 2, 80, dtype=torch.bfloat16) * 1e-4
    out, x_grad, weight_grad = _products(form, x, weight, grad)
    rows, top = x.flatten(0, 1).double(), grad.flatten(0, 1).double()
    coarse = 0.04 if form.gradients == E4M3 else 0.08  # 3 or 2 mantissa bits
    assert out.dtype == x_grad.dtype == torch.bfloat16
    assert 0.005 < _error(out.flatten(0, 1), rows @ weight.double().t()) < 0.04
    assert 0.005 < _error(x_grad, top @ weight.double()) < coarse
    exact = 1e-5 if not form.weight_gradient else coarse
    assert _error(weight_grad, top.t() @ rows) < exact


def test_a_row_of_large_values_spoils_others_only_where_they_share_a_scale():
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    x[0] *= 1e6
    weight = torch.randn(16, 32, dtype=torch.bfloat16)
    for by_row in (False, True):
        out, _ = Fp8Products(Fp8Format(by_row=by_row), Fp8Casts()).forward(LinearCall(x, weight))
        error = _error(out[1:], x[1:].double() @ weight.double().t())
        assert error < 0.05 if by_row else error > 0.9


def _context(new_products, layout=None, *, dtype=torch.bfloat16, overlap=True):
    context = BuildContext(layout or Layout.single(), dtype=dtype, overlap=overlap)
    return context.multiplying_by(new_products)


def test_a_weight_is_cast_again_only_when_it_has_changed():
    products = Fp8Products(Fp8Format(), Fp8Casts())
    context = _context(lambda: products)
    layer = Linear(
        *(32, 16),
        context,
        split=None,
        init=Init("normal", 1.0),
        bias=False,
    )
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(16, 1, 32, dtype=torch.bfloat16)
    before = layer(x)
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(layer(x), before)
    context.registry.forget_weights()
    assert not layer(x).any()


class _Noting:
    """Casts that record the shape of their input."""

    def __init__(self):
        self.shapes = []

    def __getattr__(self, name):
        real = getattr(Fp8Casts(), name)

        def noted(*args, **named):
            if name.startswith("cast"):
                self.shapes.append(tuple(args[0].shape))
            return real(*args, **named)

        return noted


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_matrix_is_cast_once_for_all_its_products(form):
    """In two micro-batches, the weight is cast once in total, inputs and gradients once in each."""
    casts = _Noting()
    layer = Linear(
        *(48, 80),
        _context(lambda: Fp8Products(form, casts)),
        split=None,
        init=Init("normal", 1.0),
        bias=False,
    )
    torch.nn.init.normal_(layer.weight)
    for _ in range(2):
        x = torch.randn(32, 1, 48, dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
    assert Counter(casts.shapes) == {(80, 48): 1, (32, 48): 2, (32, 80): 2}


def _fp8_gpt(layout, sequence=False, recompute=None, precision=None):
    layout = replace(layout, sequence_parallel=sequence)
    numbers = {"bf16": True, "fp8_format": "hybrid", **(precision or {})}
    model = gpt(WIDE, numbers, layout=layout, recompute=recompute, dtype=torch.bfloat16)
    assert isinstance(model.layers["0"].mlp.up.products, Fp8Products)
    return loss_and_gradients(model)


def test_a_model_in_8_bits_is_close_to_one_in_16():
    with pytest.MonkeyPatch.context() as patch:  # 3 x 12 tokens are not a multiple of 16
        patch.setattr("tests.models.small.SEQUENCE", 16)
        loss, grads = _fp8_gpt(Layout.single())
        plain = gpt(WIDE, {"bf16": True}, dtype=torch.bfloat16)
        assert isinstance(plain.layers["0"].mlp.up.products, Products)
        expected, expected_grads = loss_and_gradients(plain)
    assert not torch.equal(loss, expected)
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    for name, grad in grads.items():
        assert _error(grad, expected_grads[name].double()) < 0.2, name


@pytest.mark.parametrize("plan", [RecomputePlan("full"), RecomputePlan("selective")], ids=str)
def test_recomputation_gives_the_same_bits(plan, monkeypatch):
    monkeypatch.setattr("tests.models.small.SEQUENCE", 16)
    expected = _fp8_gpt(Layout.single())
    again = _fp8_gpt(Layout.single(), recompute=plan)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def _split_loss(layout, sequence):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.models.small.SEQUENCE", 16)
        return _fp8_gpt(layout, sequence)[0]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_split_layers_agree(sequence):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.models.small.SEQUENCE", 16)
        expected = _fp8_gpt(Layout.single())[0]
    for loss in run_distributed(2, _split_loss, sequence, tensor=2):
        torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)


class _GatheredFirst(Fp8Products):
    """Gathers inputs in 16 bits before casting them."""

    def forward(self, call, communication=NO_COMMUNICATION):
        return super().forward(call._replace(x=communication.start_gather(call.x).wait()))


def _column(layout, kind, form, delayed, overlap):
    """Make two updates of a layer with sequence-parallel input.

    Return all results, and the bytes that the forward pass gathered.
    """
    gathered = []
    start = collectives.start_all_gather

    def noting(x, axis):
        gathered.append(x.numel() * x.element_size())
        return start(x, axis)

    context = _context(
        lambda: kind(form, Fp8Casts()),
        replace(layout, sequence_parallel=True),
        overlap=overlap,
    )
    module = Linear(*(64, 96), context, split="column", init=Init("normal", 0.02), bias=False)
    initialize(module.named_parameters(), seed=1)
    history = None
    if delayed:
        named, cpu = module.named_parameters(prefix="module"), torch.device("cpu")
        history = context.registry.keep_history(named, DelayedScaling(), layout, cpu)
    results, bytes_gathered = [], []
    for update in range(2):
        generator = torch.Generator().manual_seed(10 * update + layout.tensor.rank)
        x = torch.randn(8, 3, 64, generator=generator).bfloat16().requires_grad_()  # 24 rows
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "start_all_gather", noting)
            out = module(x * (1 + layout.tensor.rank))  # one rank has the largest
        bytes_gathered.append(sum(gathered))
        gathered.clear()
        out.float().square().mean().backward()
        results += [out.detach(), x.grad, module.weight.grad.clone()]
        module.weight.grad = None
        if history is not None:
            history.update(update + 1)
            results += [tensor.clone() for tensor in history.named_tensors().values()]
        context.registry.forget_weights()
    return results, bytes_gathered


def _all_columns(layout, cases):
    return [
        _column(layout, kind, *case) for kind in (_GatheredFirst, Fp8Products) for case in cases
    ]


def test_an_input_gathered_in_8_bits_is_the_one_gathered_in_16():
    cases = [
        (form, delayed, overlap)
        for form in FORMS
        for delayed in ((False,) if form.by_row else (False, True))
        for overlap in (True, False)
    ]
    elements = 8 * 3 * 64
    for answers in run_distributed(2, _all_columns, cases, tensor=2):
        plain, ours = answers[: len(cases)], answers[len(cases) :]
        for case, (expected, much), (found, less) in zip(cases, plain, ours, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            assert all(result.isfinite().all() for result in found)
            assert much == [2 * elements] * 2
            form = case[0]
            if not form.by_row:
                assert less == [elements] * 2
            elif form.weight_gradient:  # its transpose would have to be sent too
                assert less == much
            else:
                assert less == [elements + 8 * 3 * 4] * 2  # including the scales


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_gpu_multiplies_as_the_cpu_does(form):
    from megatron.device import Device
    from megatron.kernels.fp8 import choose_fp8_casts

    device = Device.pick().torch_device
    torch.manual_seed(6)
    tensors = [
        torch.randn(64, 96, dtype=torch.bfloat16),
        torch.randn(48, 96, dtype=torch.bfloat16),
        torch.randn(64, 48, dtype=torch.bfloat16),
    ]
    library = find_library(device).library
    assert library is not None
    products = Fp8Products(form, choose_fp8_casts(library))
    reference = _products(form, *tensors)
    x, weight, grad = (tensor.to(device) for tensor in tensors)
    out, kept = products.forward(LinearCall(x, weight))
    prepared = products.prepare(grad)
    into = torch.empty(48, 96, device=device)
    products.weight_gradient(
        prepared, kept, x if products.keeps_input else None, into, accumulate=False
    )
    ours = (out, products.input_gradient(prepared, kept), into)
    for mine, theirs in zip(ours, reference, strict=True):
        assert _error(mine.cpu(), theirs.double()) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_in_fp32_is_exact_to_fp32_whatever_its_weights_are(dtype):
    torch.manual_seed(3)
    context = _context(InFp32, dtype=torch.float32)
    head = Linear(*(48, 3), context, split=None, init=Init("normal", 0.02)).to(dtype)
    initialize(list(head.named_parameters()), 1)
    x = torch.randn(5, 2, 48).to(dtype).requires_grad_()
    grad = torch.randn(5, 2, 3)
    out = head(x)
    out.backward(grad)
    expected = x.detach().double() @ head.weight.detach().double().t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert out.dtype == torch.float32
    found = (x.grad, head.weight.grad, head.bias.grad)
    rows = grad.flatten(0, 1).double()
    exact = (
        grad.double() @ head.weight.detach().double(),
        rows.t() @ x.detach().flatten(0, 1).double(),
        rows.sum(0),
    )
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other.to(dtype).double(), rtol=1e-2, atol=1e-6)
    into = torch.ones_like(head.weight, dtype=torch.float32)
    head.products.weight_gradient((grad.flatten(0, 1),), (), x.detach(), into, accumulate=True)
    torch.testing.assert_close(into.double(), exact[1] + 1, rtol=1e-5, atol=1e-5)
