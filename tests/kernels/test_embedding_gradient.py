"""An embedding's gradient against float64: plain form and kernel."""

import pytest
import torch

from megatron.kernels.weight_gradient import (
    CHUNK,
    choose_embedding_gradient,
    embedding_gradient_reference,
)
from tests.kernels.compare import seed_afresh

ROWS = 11


def check(form, device, dtype, hidden, count=230):
    seed_afresh()
    entries = torch.randint(-2, ROWS + 3, (count,), device=device)  # some belong to other ranks
    entries[::2] = 4  # a frequent one
    grad = torch.randn(count, hidden, device=device).to(dtype)
    into = torch.randn(ROWS, hidden, device=device)
    expected = into.double()
    for entry, row in zip(entries.tolist(), grad.double(), strict=True):
        if 0 <= entry < ROWS:
            expected[entry] += row
    again = into.clone()
    form(entries, grad, into)
    form(entries, grad, again)
    torch.testing.assert_close(into.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(into, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_equals_float64(dtype):
    check(embedding_gradient_reference, "cpu", dtype, 20)


@pytest.mark.parametrize("hidden", [8, 1032])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel_equals_float64(kernels, dtype, hidden):
    library, device = kernels
    check(choose_embedding_gradient(library, hidden), device, dtype, hidden)


@pytest.mark.parametrize("rows", [3000, 1023, 2])  # two digits, one, many rows of each
def test_rows_of_an_entry_are_added_in_their_order(kernels, rows):
    library, device = kernels
    seed_afresh()
    entries = torch.randint(-1, rows + 1, (2500,))
    grad, into = torch.randn(2500, 8), torch.randn(rows, 8)
    found = into.clone().to(device)
    choose_embedding_gradient(library, 8)(entries.to(device), grad.to(device), found)
    keys = torch.where((entries >= 0) & (entries < rows), entries, rows)
    parts, sums = {}, torch.zeros(rows + 1, 8)
    for place, row in enumerate(keys.argsort(stable=True).tolist()):
        part = keys[row].item(), place // CHUNK
        parts[part] = parts.get(part, 0) + grad[row]
    for (entry, _), part in parts.items():
        sums[entry] += part
    assert torch.equal(found.cpu(), into + sums[:rows])


def test_a_size_that_the_kernel_cannot_read_takes_the_plain_form(kernels):
    assert choose_embedding_gradient(kernels[0], 20) is embedding_gradient_reference
