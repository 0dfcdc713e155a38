"""AdamW against float64: PyTorch's fused kernel and our own."""

import pytest
import torch

from megatron.kernels.adam import AdamNumbers, AdamTensors, choose_adam
from megatron.kernels.tensor_sums import CHUNK
from tests.kernels.compare import seed_afresh

SIZES = [1, 3, 2048, CHUNK + 5]


def problem(gradient_dtype, copy_dtype, device):
    seed_afresh()
    weights = [torch.randn(size, device=device) for size in SIZES]
    copies = [
        None if copy_dtype is None else torch.zeros_like(w, dtype=copy_dtype) for w in weights
    ]
    gradients = [(64 * torch.randn_like(w)).to(gradient_dtype) for w in weights]
    means = [torch.randn_like(w) for w in weights]
    squares = [torch.rand_like(w) for w in weights]
    return AdamTensors(weights, copies, gradients, means, squares)


def numbers(device, *, step=3, found=0.0, eps=1e-8):
    def scalar(value):
        return torch.tensor(float(value), device=device)

    return AdamNumbers(1e-2, 0.9, 0.999, eps, 0.1, scalar(step), scalar(64), scalar(found))


def exact(tensors, numbers):
    """Return new weights, means and mean squares in float64."""
    results = []
    step = numbers.step.item()
    columns = (tensors.weights, tensors.gradients, tensors.exp_avg, tensors.exp_avg_sq)
    for row in zip(*columns, strict=True):
        weight, gradient, mean, square = (x.double() for x in row)
        gradient = gradient / numbers.gradient_scale.item()
        mean = numbers.beta1 * mean + (1 - numbers.beta1) * gradient
        square = numbers.beta2 * square + (1 - numbers.beta2) * gradient**2
        corrected = mean / (1 - numbers.beta1**step)
        root = (square / (1 - numbers.beta2**step)).sqrt() + numbers.eps
        change = corrected / root + numbers.weight_decay * weight
        results.append((weight - numbers.lr * change, mean, square))
    return results


def check(tensors, numbers, library):
    """Check errors relative to the larger of the old and new values, which may nearly cancel."""
    expected = exact(tensors, numbers)
    columns = (tensors.weights, tensors.exp_avg, tensors.exp_avg_sq)
    before = [[x.double() for x in row] for row in zip(*columns, strict=True)]
    choose_adam(tensors, library)(numbers)
    for old, found, wanted in zip(before, zip(*columns, strict=True), expected, strict=True):
        for was, ours, theirs in zip(old, found, wanted, strict=True):
            allowed = 1e-7 + 2e-6 * torch.maximum(was.abs(), theirs.abs())
            error = (ours.double() - theirs).abs()
            assert (error <= allowed).all(), (error / allowed).max()
    for copy, weight in zip(tensors.copies, tensors.weights, strict=True):
        assert copy is None or torch.equal(copy, weight.to(copy.dtype))


FORMATS = [
    (torch.float32, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.float16),
]


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("step", [1, 1000])
def test_plain_equals_float64(formats, step):
    check(problem(*formats, "cpu"), numbers("cpu", step=step), None)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("step", [1, 1000])
def test_kernel_equals_float64(kernels, formats, step):
    library, device = kernels
    check(problem(*formats, device), numbers(device, step=step), library)


def test_epsilon_is_added_to_the_corrected_root(kernels):
    """Epsilon is as large as the root, and the bias correction is far from 1."""
    library, device = kernels
    for which in (library, None):
        tensors = problem(torch.float32, None, device)
        for gradient, mean, square in zip(*tensors[2:], strict=True):
            for x, factor in ((gradient, 1e-3), (mean, 1e-3), (square, 1e-6)):
                x.mul_(factor)
        check(tensors, numbers(device, eps=1e-3), which)


@pytest.mark.parametrize("offset", [1, 4])
def test_kernel_at_odd_starts(kernels, offset):
    """Shards of a sharded update may begin anywhere."""
    library, device = kernels
    whole = problem(torch.float32, torch.bfloat16, device)
    parts = AdamTensors(*([x[offset:] for x in row[2:]] for row in whole))
    before = [row[-1][:offset].clone() for row in whole]
    check(parts, numbers(device), library)
    for kept, row in zip(before, whole, strict=True):
        assert torch.equal(kept, row[-1][:offset])


def test_nothing_changes_where_gradients_are_not_finite(kernels):
    library, device = kernels
    for which in (library, None):
        tensors = problem(torch.float32, torch.bfloat16, device)
        tensors.gradients[1][0] = float("inf")
        columns = (tensors.weights, tensors.exp_avg, tensors.exp_avg_sq)
        before = [x.clone() for column in columns for x in column]
        choose_adam(tensors, which)(numbers(device, found=1))
        after = [x for column in columns for x in column]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_kernel_gives_the_same_bits_twice(kernels):
    library, device = kernels
    first = problem(torch.float32, torch.bfloat16, device)
    second = AdamTensors(*([x.clone() for x in row] for row in first))
    for tensors in (first, second):
        choose_adam(tensors, library)(numbers(device))
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_nothing_to_update(kernels):
    library, device = kernels
    for which in (library, None):
        choose_adam(AdamTensors([], [], [], [], []), which)(numbers(device))
