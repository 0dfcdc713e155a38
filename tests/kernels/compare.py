"""Compare a kernel with the plain form in float64: outputs and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Relative error of a whole tensor that rounding to the type explains, with some margin.
TOLERANCE = {FP32: 3e-6, FP16: 1e-3, BF16: 8e-3}

Inputs = Sequence[Tensor | None]
Function = Callable[..., Tensor | tuple[Tensor, ...]]


def fresh() -> torch.Generator:
    """Return a generator with another seed in each test and at each call.

    A kernel must be right on any input: MEGATRON_TEST_SEED gives others (see tests/conftest.py).
    """
    seed = random.getrandbits(40)
    print("seed", seed)  # pytest shows it if a test fails
    return torch.Generator().manual_seed(seed)


def seed_afresh() -> None:
    """Seed PyTorch's own generators in the same way."""
    torch.manual_seed(fresh().initial_seed())


def run(function: Function, inputs: Inputs, grads: Inputs) -> list[Tensor]:
    """Return the outputs, and the gradients of the floating-point inputs.

    `grads` are the outputs' gradients, with None for an unused output.
    """
    leaves = [
        None if x is None else x.detach().clone().requires_grad_(x.is_floating_point())
        for x in inputs
    ]
    out = function(*leaves)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    used = [(x, g.to(x.dtype)) for x, g in zip(outputs, grads, strict=True) if g is not None]
    torch.autograd.backward([x for x, _ in used], [g for _, g in used])
    of_inputs = [x.grad for x in leaves if x is not None and x.is_floating_point()]
    return [x.detach() for x in outputs] + [x for x in of_inputs if x is not None]


def double(inputs: Inputs) -> list[Tensor | None]:
    """Return the inputs on a CPU in float64."""
    return [
        None if x is None else x.cpu().double() if x.is_floating_point() else x.cpu()
        for x in inputs
    ]


def check(
    fused: Function, plain: Function, inputs: Inputs, grads: Inputs, tolerance: float
) -> list[Tensor]:
    """Check that the kernel matches the plain form in float64, and gives the same bits twice."""
    ours = run(fused, inputs, grads)
    again = run(fused, inputs, grads)
    exact = run(plain, double(inputs), double(grads))
    assert len(ours) == len(exact)
    for i, (x, y, wanted) in enumerate(zip(ours, again, exact, strict=True)):
        assert x.shape == wanted.shape, i
        assert torch.equal(x, y), f"result {i} differs between two runs"
        size = wanted.norm().item()
        error = (x.cpu().double() - wanted).norm().item()
        assert error <= tolerance * max(size, 1e-6), f"result {i}: {error / max(size, 1e-6):.2e}"
    return ours
