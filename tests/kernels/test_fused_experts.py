"""Kernels that move rows between tokens and experts, against PyTorch's operations."""

import pytest
import torch

from megatron.kernels.grouped import Grouping, combine, permute, take_gradient
from tests.kernels.compare import BF16, FP16, FP32, TOLERANCE, check, fresh

pytestmark = pytest.mark.usefixtures("poisoned")


def routed(tokens, chosen, experts, device, *, dropped=0.0, known=False):
    """Return the rows of a random choice of different experts, some of which are dropped."""
    generator = fresh()
    choices = torch.rand(tokens, experts, generator=generator).topk(chosen, dim=1).indices
    choices[torch.rand(tokens, chosen, generator=generator) < dropped] = -1
    grouping = Grouping.of(choices.to(device), experts)
    return grouping.first(int((choices >= 0).sum())) if known else grouping, generator


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "columns"), [(9, 2, 4, 8), (5, 8, 16, 264), (3, 1, 2, 2056)]
)
@pytest.mark.parametrize(("dropped", "known"), [(0.0, False), (0.4, False), (0.4, True)])
def test_equal_float64(kernels, dtype, tokens, chosen, experts, columns, dropped, known):
    library, device = kernels
    grouping, generator = routed(tokens, chosen, experts, device, dropped=dropped, known=known)

    def draw(*size, dtype=dtype):
        return torch.randn(*size, generator=generator).to(device, dtype)

    n = len(grouping.order)
    rows, grads = draw(n, columns), [draw(tokens, columns)]
    x, weights = draw(tokens, columns), torch.rand(tokens, chosen, generator=generator).to(device)
    row_grads = [draw(n, columns)]
    kept = int((grouping.row_of_choice >= 0).sum())
    row_grads[0][kept:] = 0
    on_cpu = Grouping(*(part.cpu() for part in grouping))
    check(
        lambda x: permute(x, grouping, library),
        lambda x: permute(x, on_cpu),
        [x],
        row_grads,
        TOLERANCE[dtype],
    )

    def ours(rows):
        return combine(rows, weights, grouping, library)

    def plain(rows):
        return combine(rows, weights.cpu(), on_cpu)

    check(ours, plain, [rows], grads, TOLERANCE[dtype])


@pytest.mark.parametrize("dropped", [0.0, 0.5])
def test_the_gradient_of_the_weights(kernels, dropped):
    library, device = kernels
    grouping, generator = routed(33, 4, 8, device, dropped=dropped)
    rows = torch.randn(len(grouping.order), 72, generator=generator).to(device)
    grad = torch.randn(33, 72, generator=generator).to(device)
    results = []
    for form in (library, None):
        weights = torch.ones(33, 4, device=device, requires_grad=True)
        combine(rows, weights, grouping, form).backward(grad)
        results.append(weights.grad)
    assert torch.equal(results[0] == 0, results[1] == 0)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_values_of_rows_without_an_expert_are_never_read_as_numbers(kernels):
    library, device = kernels
    grouping, generator = routed(16, 2, 4, device, dropped=0.5)
    rows = torch.randn(32, 64, generator=generator).to(device)
    kept = int((grouping.row_of_choice >= 0).sum())
    rows[kept:] = torch.nan
    weights = torch.ones(16, 2, device=device, requires_grad=True)
    rows.requires_grad_()
    out = combine(rows, weights, grouping, library)
    out.sum().backward()
    assert out.isfinite().all()
    assert weights.grad is not None
    assert weights.grad.isfinite().all()
    assert rows.grad is not None
    assert (rows.grad[kept:] == 0).all()


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_gradient_is_written_or_added(kernels, dtype, accumulate):
    library, device = kernels
    value = torch.randn(3, 7, 40, generator=fresh()).to(device, dtype)
    into = torch.randn(3, 7, 40, generator=fresh()).to(device)
    expected = into + value if accumulate else value.float()
    take_gradient(library, value, into, accumulate)
    assert torch.equal(into, expected)
