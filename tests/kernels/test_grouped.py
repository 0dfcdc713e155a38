"""Rows grouped by expert: their order, moving them there and back, and each group's products."""

import pytest
import torch

from megatron.device import Device
from megatron.kernels.fp8 import E4M3, Fp8Casts, choose_fp8_casts
from megatron.kernels.grouped import Grouping, choose_grouped_product, combine, permute
from megatron.kernels.library import find_library

CPU, GPU = torch.device("cpu"), Device.pick()
EXPERTS, HIDDEN = 5, 6
# Choices of six tokens: expert 3 is never chosen, and -1 is not an expert.
CHOICES = torch.tensor([[4, 0], [0, 1], [-1, 4], [2, 0], [-1, -1], [1, -1]])


def rows_of(choices, experts):
    """Return (token, index among its choices) of every row, by expert."""
    return [
        (token, place)
        for expert in range(experts)
        for token, row in enumerate(choices.tolist())
        for place, chosen in enumerate(row)
        if chosen == expert
    ]


@pytest.mark.parametrize("known", [False, True], ids=["all rows", "known rows"])
@pytest.mark.parametrize("choices", [CHOICES, CHOICES.clamp(min=0), CHOICES[:0], CHOICES[4:5]])
def test_rows_are_sorted_by_expert_then_token(choices, known):
    expected = rows_of(choices, EXPERTS)
    grouping = Grouping.of(choices, EXPERTS)
    if known:
        grouping = grouping.first(len(expected))
    assert len(grouping.order) == (len(expected) if known else choices.numel())
    found = [(c // 2, c % 2) for c in grouping.order.tolist()]
    assert found[: len(expected)] == expected
    counts = torch.bincount(choices[choices >= 0], minlength=EXPERTS)
    assert grouping.ends.tolist() == counts.cumsum(0).tolist()
    assert grouping.ends.dtype == torch.int32  # as required by torch's grouped products
    for row, (token, place) in enumerate(expected):
        assert grouping.row_of_choice[token, place] == row
        assert grouping.expert_of_row()[row] == choices[token, place]


@pytest.mark.parametrize("known", [False, True], ids=["all rows", "known rows"])
@pytest.mark.parametrize("choices", [CHOICES, CHOICES.clamp(min=0), CHOICES[:0], CHOICES[4:5]])
def test_tokens_go_to_their_rows_and_come_back_weighted(choices, known):
    torch.manual_seed(1)
    expected = rows_of(choices, EXPERTS)
    grouping = Grouping.of(choices, EXPERTS)
    if known:
        grouping = grouping.first(len(expected))
    x = torch.randn(len(choices), HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(choices.shape, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(len(grouping.order), HIDDEN, dtype=torch.float64)
    rows = permute(x, grouping)
    for row, (token, _) in enumerate(expected):
        assert torch.equal(rows[row], x[token])
    out = _collect64(rows * factors, weights, grouping)
    wanted = 0 * x * weights.sum()
    for row, (token, place) in enumerate(expected):
        wanted = wanted.index_add(
            0, torch.tensor([token]), weights[token, place] * x[token : token + 1] * factors[row]
        )
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    pull = torch.randn_like(wanted)
    ours = torch.autograd.grad((out * pull).sum(), (x, weights))
    theirs = torch.autograd.grad((wanted * pull).sum(), (x, weights))
    for found, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)


def _collect64(rows, weights, grouping):
    """Run `combine`, which adds in fp32, on float64 input."""
    return combine(rows.float(), weights.float(), grouping).double()


def test_16_bit_rows_are_added_up_in_fp32():
    """256 + 1 + 1 is 258; adding step by step in 16 bits stays at 256."""
    grouping = Grouping.of(torch.tensor([[0, 1, 2]]), 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = combine(rows, torch.ones(1, 3), grouping)
    assert out.dtype == torch.bfloat16
    assert out.item() == 258


PRODUCT = choose_grouped_product(CPU, torch.float32)
# The ends of five experts' rows; seven rows, the last of which may belong to no expert.
ENDS = [[2, 2, 3, 6, 7], [0, 0, 7, 7, 7], [7, 7, 7, 7, 7], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("ends", ENDS)
def test_products_of_each_group(ends):
    torch.manual_seed(1)
    rows = torch.randn(7, HIDDEN, dtype=torch.float64)
    weight = torch.randn(EXPERTS, 4, HIDDEN, dtype=torch.float64)
    grad = torch.randn(7, 4, dtype=torch.float64)
    limits = torch.tensor(ends, dtype=torch.int32)
    out, factors = PRODUCT.forward(rows, weight, limits)
    back = PRODUCT.input_gradient(grad, factors, limits)
    assert out.shape == (7, 4)
    assert back.shape == (7, HIDDEN)
    start, sums = 0, torch.zeros_like(weight)
    for expert, stop in enumerate(ends):
        for row in range(start, stop):
            torch.testing.assert_close(out[row], weight[expert] @ rows[row])
            torch.testing.assert_close(back[row], weight[expert].t() @ grad[row])
            sums[expert] += torch.outer(grad[row], rows[row])
        start = stop
    into = torch.full_like(weight, 3.0)
    PRODUCT.weight_gradient(grad, rows, limits, into, accumulate=True)
    torch.testing.assert_close(into, sums + 3)
    PRODUCT.weight_gradient(grad, rows, limits, into, accumulate=False)
    torch.testing.assert_close(into, sums)


def test_the_gradient_of_16_bit_weights_may_be_kept_in_fp32():
    torch.manual_seed(1)
    rows, grad = torch.randn(7, HIDDEN).bfloat16(), torch.randn(7, 4).bfloat16()
    limits = torch.tensor(ENDS[0], dtype=torch.int32)
    into, once = torch.zeros(EXPERTS, 4, HIDDEN), torch.zeros(EXPERTS, 4, HIDDEN)
    PRODUCT.weight_gradient(grad, rows, limits, once, accumulate=False)
    for _ in range(2):
        PRODUCT.weight_gradient(grad, rows, limits, into, accumulate=True)
    torch.testing.assert_close(into, 2 * once)
    assert once.any()


@pytest.mark.parametrize("stop", [40, 35])
def test_products_in_8_bits_are_those_of_rounded_factors(stop):
    torch.manual_seed(1)
    limits = torch.tensor([0, 3, 20, stop], dtype=torch.int32)
    rows, grad = torch.randn(40, 32).bfloat16(), torch.randn(40, 48).bfloat16()
    weight = torch.randn(4, 48, 32).bfloat16()
    casts, sixteen = Fp8Casts(), choose_grouped_product(CPU, torch.bfloat16)
    ours = choose_grouped_product(CPU, torch.bfloat16, casts=casts)

    def rounded(x):
        return casts.cast_rows(x, E4M3).dequantized()

    out, factors = ours.forward(rows, weight, limits)
    assert out.dtype == torch.bfloat16
    expected, _ = sixteen.forward(rounded(rows), rounded(weight), limits)
    torch.testing.assert_close(out[:stop], expected[:stop].bfloat16())
    back = ours.input_gradient(grad, factors, limits)
    by_input = rounded(weight.mT.contiguous()).mT  # a scale for each input of each expert
    expected = sixteen.input_gradient(rounded(grad), (by_input,), limits)
    torch.testing.assert_close(back[:stop], expected[:stop].bfloat16())
    into, exact = torch.zeros(2, 4, 48, 32)
    ours.weight_gradient(grad, rows, limits, into, accumulate=False)
    sixteen.weight_gradient(grad, rows, limits, exact, accumulate=False)
    assert torch.equal(into, exact)  # in 16 bits


def test_weights_are_cast_again_once_they_have_changed():
    weight, rows = torch.ones(1, 16, 16).bfloat16(), torch.ones(1, 16).bfloat16()
    ends = torch.tensor([1], dtype=torch.int32)
    product = choose_grouped_product(CPU, torch.bfloat16, casts=Fp8Casts())
    first, _ = product.forward(rows, weight, ends)
    weight.fill_(2)
    assert torch.equal(product.forward(rows, weight, ends)[0], first)
    product.forget()
    assert torch.equal(product.forward(rows, weight, ends)[0], 2 * first)


@pytest.mark.gpu
@pytest.mark.skipif(GPU.capability[0] != 9, reason="needs a Hopper GPU")
@pytest.mark.parametrize("ends", [[0, 3, 130, 333], [0, 0, 0, 0], [333] * 4])
def test_a_gpu_gives_the_products_of_a_cpu(ends):
    torch.manual_seed(1)
    rows, grad = torch.randn(333, 256).bfloat16(), torch.randn(333, 512).bfloat16()
    weight, limits = torch.randn(4, 512, 256).bfloat16(), torch.tensor(ends, dtype=torch.int32)

    def products(device, library):
        casts = choose_fp8_casts(library)
        product = choose_grouped_product(device, torch.bfloat16, library, casts)
        x, g, w, stops = (tensor.to(device) for tensor in (rows, grad, weight, limits))
        out, factors = product.forward(x, w, stops)
        into = torch.zeros(w.shape, device=device)
        product.weight_gradient(g, x, stops, into, accumulate=False)
        back = product.input_gradient(g, factors, stops)
        return out[: ends[-1]], back[: ends[-1]], into

    device = GPU.torch_device
    ours = products(device, find_library(device).library)
    for found, expected in zip(ours, products(CPU, None), strict=True):
        scale = expected.abs().max().item() if expected.numel() else 1.0
        torch.testing.assert_close(found.cpu(), expected, rtol=0.01, atol=2e-3 * scale)


def test_there_may_be_no_rows():
    product = choose_grouped_product(CPU, torch.bfloat16, casts=Fp8Casts())
    weight, ends = torch.ones(2, 32, 16).bfloat16(), torch.zeros(2, dtype=torch.int32)
    out, factors = product.forward(weight.new_empty(0, 16), weight, ends)
    assert out.shape == (0, 32)
    assert product.input_gradient(out, factors, ends).shape == (0, 16)
