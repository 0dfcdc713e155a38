"""Delayed scaling: how casts update the history, and how the history scales casts."""

import math

import pytest
import torch

from megatron.device import Device
from megatron.kernels.fp8 import E4M3, E5M2, Fp8Casts, choose_fp8_casts
from megatron.kernels.fp8_product import choose_fp8_product, reference_product
from megatron.kernels.library import find_library
from megatron.parallel.build import BuildContext
from megatron.parallel.fp8 import AmaxHistory, DelayedScaling, Fp8Format, Fp8Products
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import ZEROS
from megatron.parallel.products import LinearCall, RowOperands
from tests.distributed import run_distributed

CPU = torch.device("cpu")
LARGEST = (448.0, 448.0, 57344.0)


def _history(scaling, layout=None, layers=("one", "two")):
    return AmaxHistory(layers, LARGEST, scaling, layout or Layout.single(), CPU)


def _expected(found, scaling):
    """Yield the expected held value after each update, in plain numbers."""
    held, past = 0.0, []
    for iteration, value in enumerate(found, 1):
        past = [value if math.isfinite(value) else 0.0, *past][: scaling.length]
        if iteration % scaling.interval == 0 or iteration == 1:
            chosen = max(past) if scaling.takes_max else past[0]
            held = chosen * 2**scaling.margin if chosen > 0 else held or 448.0
        yield held


@pytest.mark.parametrize(
    "scaling",
    [
        DelayedScaling(),
        DelayedScaling(length=3),
        DelayedScaling(length=3, takes_max=True),
        DelayedScaling(length=3, takes_max=True, margin=2),
        DelayedScaling(length=2, takes_max=True, interval=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [5.0, 0.0, math.inf])
def test_what_is_held_follows_from_what_was_found(scaling, first):
    found = [first, 3.0, 1.5, 0.0, math.nan, 0.25, 8.0, math.inf, 1.0, 0.5, 2.0]
    history = _history(scaling)
    slot, other = history.slots("two")["weight"], history.slots("one")["gradient"]
    assert not slot.is_valid()
    for iteration, (value, held) in enumerate(zip(found, _expected(found, scaling), strict=True)):
        slot.running_amax.fill_(value)
        history.update(iteration + 1)
        assert slot.is_valid()
        assert slot.scale_amax.item() == held
        assert slot.running_amax == 0
        assert other.scale_amax == 57344  # a tensor that was always zero has scale 1


def _after_an_update(layout, wrong):
    history = _history(DelayedScaling(length=2), layout)
    rank = layout.world.rank
    history.slots("one")["input"].running_amax.fill_([1.0, 2.0, 7.0, 3.0][rank])
    history.slots("one")["gradient"].running_amax.fill_(5.0)
    history.slots("two")["gradient"].running_amax.fill_([4.0, wrong, 1.0, 2.0][rank])
    history.slots("two")["weight"].running_amax.fill_([6.0, 6.0, math.inf, 6.0][rank])
    history.update(1)
    return {name: tensor.tolist() for name, tensor in history.named_tensors().items()}


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"context": 2}, {"tensor": 4}], ids=str)
def test_processes_that_share_layers_share_scales(sizes):
    first, *others = run_distributed(4, _after_an_update, 3.0, **sizes)
    assert first == {
        "one.held": [7.0, 448.0, 5.0],
        "one.history": [[7.0, 0.0], [0.0, 0.0], [5.0, 0.0]],
        "two.held": [448.0, 6.0, 4.0],
        "two.history": [[0.0, 0.0], [6.0, 0.0], [4.0, 0.0]],
    }
    assert all(other == first for other in others)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_overflow_anywhere_drops_the_gradients_everywhere(wrong):
    for named in run_distributed(4, _after_an_update, wrong, tensor=2):
        assert named["one.held"] == [7.0, 448.0, 57344.0]
        assert named["two.held"] == [448.0, 6.0, 57344.0]
        assert not any(map(any, [named["one.history"][2], named["two.history"][2]]))


def test_stages_of_a_pipeline_have_scales_of_their_own():
    held = [named["one.held"][0] for named in run_distributed(4, _after_an_update, 3.0, pipeline=2)]
    assert held == [2.0, 2.0, 7.0, 7.0]


def _delayed(form):
    products = Fp8Products(form, Fp8Casts())
    history = _history(DelayedScaling(), layers=("layer",))
    products.scale_by(history.slots("layer"))
    return products, history


def _use(products, x, weight, grad):
    out, kept = products.forward(LinearCall(x, weight))
    prepared = products.prepare(grad)
    into = torch.empty(weight.shape, device=weight.device)
    products.weight_gradient(
        prepared, kept, x if products.keeps_input else None, into, accumulate=False
    )
    return out, products.input_gradient(prepared, kept), into


def _tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes, sizes = ((32, 48), (80, 48), (32, 80)), (1.0, 0.02, 1e-4)
    return [
        (torch.randn(shape, generator=generator) * size).bfloat16()
        for shape, size in zip(shapes, sizes, strict=True)
    ]


def _rounded(x, amax, fp8):
    """Return x rounded to fp8 with this amax, in fp64."""
    top = torch.finfo(fp8).max
    scaled = (x.float() * (torch.full([], top) / amax)).clamp(-top, top)
    return scaled.to(fp8).double() * amax.double() / top


FORMS = [
    Fp8Format(gradients=gradients, weight_gradient=weight_gradient)
    for gradients in (E4M3, E5M2)
    for weight_gradient in (True, False)
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_first_update_scales_as_it_goes_the_second_by_the_first(form):
    products, history = _delayed(form)
    tensors = _tensors(1)
    found = _use(products, *tensors)
    current = _use(Fp8Products(form, Fp8Casts()), *tensors)
    torch.testing.assert_close(found, current, rtol=0, atol=0)
    history.update(1)
    products.forget()

    later = [2 * x for x in _tensors(2)]  # some of which saturate
    amaxes = [x.abs().max() for x in tensors]
    kinds = (form.values, form.values, form.gradients)
    x, weight, grad = (_rounded(*parts) for parts in zip(later, amaxes, kinds, strict=True))
    out, x_grad, weight_grad = _use(products, *later)
    if not form.weight_gradient:
        expected_weight_grad = later[2].double().t() @ later[0].double()
    else:
        expected_weight_grad = grad.t() @ x
    torch.testing.assert_close(out.double(), x @ weight.t(), rtol=0.01, atol=1e-3)
    torch.testing.assert_close(x_grad.double(), grad @ weight, rtol=0.01, atol=1e-7)
    torch.testing.assert_close(weight_grad.double(), expected_weight_grad, rtol=1e-3, atol=1e-7)
    history.update(2)
    held = [slot.scale_amax.item() for slot in products.slots.values()]
    assert held == [x.abs().max().item() for x in later]


def test_only_the_forward_pass_may_accumulate_with_fewer_bits():
    fast = []

    def product(*args, **options):
        fast.append(options.get("fast", False))
        return reference_product(*args, **options)

    products = Fp8Products(Fp8Format(), Fp8Casts(), product)
    x, weight, grad = _tensors(1)
    out, x_grad, _ = _use(products, x, weight, grad)
    by_out, by_in = products.weight_operands(weight)
    operands = [products.prepare_input(x, None, training=True), products.prepare(grad)]
    for operand, matrix, backward, expected in (
        (operands[0], by_out, False, out),
        (operands[1], by_in, True, x_grad),
    ):
        into = torch.empty_like(expected)
        rows = RowOperands(operand, matrix, backward=backward)
        products.multiply_rows(rows, products.rows_of(operand), into)
        assert torch.equal(into, expected)
    assert fast == [True, False, False, True, False]


@pytest.mark.parametrize("delayed", [False, True])
def test_parts_of_a_weight_are_cast_like_the_whole(delayed):
    weight, amax = _tensors(2)[1], torch.tensor(0.05)
    products, history = _delayed(FORMS[0])
    if not delayed:
        products.scale_by({})
    whole = Fp8Casts().cast(weight, amax, E4M3).values.view(torch.uint8).flatten()
    into = torch.zeros_like(whole)
    for start, end in ((0, 64), (64, len(whole))):
        part = weight.flatten()[start:end]
        products.cast_part(part, amax, into[start:end].view(E4M3))
    assert torch.equal(into, whole)
    recorded = history.slots("layer")["weight"].running_amax
    assert recorded == (weight.abs().max() if delayed else 0)


def test_micro_batches_add_up_to_a_maximum_however_often_they_are_computed():
    batches = [_tensors(seed) for seed in (3, 4, 5)]
    weight = batches[0][1]
    results = []
    for order in ((0, 1, 2), (2, 1, 0, 1)):
        products, history = _delayed(FORMS[0])
        for number in order:
            _use(products, batches[number][0], weight, batches[number][2])
        history.update(1)
        results.append(history.named_tensors()["layer.held"])
    inputs, grads = (max(batch[i].abs().max() for batch in batches) for i in (0, 2))
    assert results[0].tolist() == results[1].tolist() == [inputs, weight.abs().max(), grads]


def test_evaluation_leaves_no_trace_and_hides_nothing():
    x, weight, grad = _tensors(6)
    results = []
    for evaluates in (False, True):
        products, history = _delayed(FORMS[0])
        for iteration in (1, 2):
            if evaluates:
                products.forward(LinearCall(x * 8, weight, training=False))
                assert products.slots["input"].running_amax == 0
            _use(products, x, weight, grad)
            history.update(iteration)
            products.forget()
        results.append(history.named_tensors()["layer.held"].tolist())
    assert results[0] == results[1]


def test_a_model_without_8_bit_layers_has_no_history():
    context = BuildContext(Layout.single())
    layer = Linear(2, 2, context, split=None, init=ZEROS)
    named = layer.named_parameters()
    history = context.registry.keep_history(named, DelayedScaling(), Layout.single(), CPU)
    assert history.layers == ()
    assert history.named_tensors() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_gpu_does_the_same_and_nothing_waits_for_it(form):
    device = Device.pick().torch_device
    casts = choose_fp8_casts(find_library(device).library)
    ours = Fp8Products(form, casts, choose_fp8_product(device))
    scaling = DelayedScaling(length=3, takes_max=True)
    history = AmaxHistory(("layer",), LARGEST, scaling, Layout.single(), device)
    ours.scale_by(history.slots("layer"))
    reference, expected = _delayed(form)
    there = [[x.to(device) for x in _tensors(seed)] for seed in (7, 8, 9)]
    results = []
    try:
        for iteration, tensors in enumerate(there, 1):
            if iteration == 2:  # the first iteration may compile, select kernels and allocate
                torch.cuda.set_sync_debug_mode("error")
            results.append(_use(ours, *tensors))
            history.update(iteration)
            ours.forget()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for iteration, found in enumerate(results, 1):
        plain = _use(reference, *_tensors(6 + iteration))
        expected.update(iteration)
        reference.forget()
        if iteration < 3:  # afterwards, the longer history matters
            for mine, theirs in zip(found, plain, strict=True):
                error = (mine.cpu().double() - theirs.double()).norm() / theirs.double().norm()
                assert error < 0.01
    newest = history.named_tensors()["layer.history"][:, 0].tolist()
    assert newest == expected.named_tensors()["layer.history"][:, 0].tolist()
