"""Newton-Schulz iterations, which orthogonalize matrices with products alone.

For a matrix X = U S V^T, an iteration computes a X + (b G + c G G) X with G = X X^T: it maps every
singular value s to a s + b s^3 + c s^5 and leaves U and V alone. A few of them bring all singular
values of a normalized matrix close to 1 (Jordan et al., "Muon", 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice

import torch
from torch import Tensor

from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    # One polynomial for all iterations, steep at 0: singular values end between 0.7 and 1.2.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # A polynomial for each of five iterations, which end closer to 1.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Coefficients (a, b, c) of the iterations for each value of --muon-coefficient-type."""

_EPS = 1e-7  # smallest norm to divide by


@contextmanager
def _products_of_fp32(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def orthogonalize(
    x: Tensor,
    coefficients: Sequence[tuple[float, float, float]],
    steps: int,
    *,
    precision: str,
    split_dim: int | None = None,
    axis: Axis | None = None,
) -> Tensor:
    """Return matrices with the singular vectors of `x` and singular values near 1.

    Collective over `axis`, if it is given: each process then has a part of every matrix.

    Args:
        x: Equally shaped matrices, [k, rows, columns]; bf16 if `precision` is medium, or fp32.
        coefficients: Those of the first iterations; they repeat.
        steps: The number of iterations.
        precision: "medium" computes in bf16. "high" and "highest" compute in fp32, with PyTorch's
            setting of that name for products.
        split_dim: The dimension of a matrix, 0 or 1, that the processes divide.
        axis: The processes that divide it.
    """
    # X^T X or X X^T: the smaller product, or the one that adds over the divided dimension.
    is_turned = x.shape[1] > x.shape[2] if axis is None else split_dim == 0
    x = x.mT if is_turned else x
    norm = _norms(x, axis).clamp_(min=_EPS)
    x = x / norm.to(x.dtype)
    with _products_of_fp32("highest" if precision == "medium" else precision):
        for a, b, c in islice(cycle(coefficients), steps):
            gram = x @ x.mT
            if axis is not None:
                all_reduce(gram, axis)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_turned else x


def _norms(x: Tensor, axis: Axis | None) -> Tensor:
    """Return the Frobenius norm of each whole matrix: [k, 1, 1]."""
    if axis is None:
        return torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    squares = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32).square_()
    return all_reduce(squares, axis).sqrt_()
