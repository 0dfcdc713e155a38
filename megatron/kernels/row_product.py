"""16-bit matrix products x W^T in which the bits of a row do not depend on the number of rows.

A library chooses a kernel by the matrix sizes, and the kernel determines the order in which the
terms of a result are summed. The last bits of logits, and sometimes the generated words, then
depend on the other rows of the batch. However, all cuBLASLt kernels of a family sum in the same
order, regardless of their tile sizes. Only the number of parts into which k is split matters
(measured on an H200: docs/benchmarks/generation.md). Each weight is therefore assigned a family and
a number of parts, and the fastest of these kernels is used for each number of rows. When a weight's
shape is first used, the results are tested for equal bits. If they differ, PyTorch computes the
product, and a warning is logged.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.device import Device
from megatron.kernels.cublaslt import ALIGNMENT, Algorithm, CublasLt, CublasLtError, Problem

# The library's choice for this many rows determines the family of a weight. The number is small,
# because splitting k pays off for few rows.
_TYPICAL_ROWS = 16
# If k is split, partial sums take memory for each row, so more rows than this are multiplied in
# pieces.
_PIECE = 512
_CHOICES = 64
_WORKSPACE_BYTES = 128 * 1024 * 1024
_FORMATS = (torch.float16, torch.bfloat16)
GRANULE = ALIGNMENT // 2  # the sizes of a weight must be multiples of this
_TESTED_ROWS = (1, 3, 8, 16, 40, 64, 200, 256)

logger = logging.getLogger(__name__)


class KernelFamily(NamedTuple):
    """Kernels that sum in the same order, so that their results are bitwise equal.

    Attributes:
        kind: The id of the family.
        split_k: The number of parts into which k is split.
    """

    kind: int
    split_k: int


class _Shape(NamedTuple):
    """Everything, except the number of rows, that determines the kernels chosen for a weight."""

    gpu: int
    dtype: torch.dtype
    n: int
    k: int
    has_bias: bool

    @property
    def is_aligned(self) -> bool:
        """Whether each row of the matrices starts at an aligned address."""
        return self.n % GRANULE == 0 and self.k % GRANULE == 0


def choose_row_product(device: torch.device) -> RowProduct | None:
    """Return a `RowProduct`, or `None` without cuBLASLt (on CPUs and other vendors' GPUs)."""
    if not Device(device).is_gpu:
        return None
    try:
        return RowProduct(CublasLt())
    except OSError:
        return None


class RowProduct:
    """Matrix products in which a row has the same bits in any batch.

    Args:
        library: The loaded cuBLASLt library.
    """

    def __init__(self, library: CublasLt) -> None:
        """Store the library."""
        self._library = library
        self._families: dict[_Shape, KernelFamily | None] = {}
        self._plans: dict[tuple[_Shape, int], tuple[Problem, Algorithm]] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + bias, [m, n].

        Args:
            x: The input [m, k].
            weight: The weight [n, k], on the current GPU of the process.
            bias: The bias [n], or `None`.

        Raises:
            CublasLtError: No kernel of the weight's family supports this number of rows.
        """
        if not _fits(x, weight, bias):
            return F.linear(x, weight, bias)
        shape = _Shape(x.get_device(), x.dtype, len(weight), weight.shape[1], bias is not None)
        if shape not in self._families:
            self._families[shape] = self._family(shape, weight, bias)
        family = self._families[shape]
        if family is None:
            return F.linear(x, weight, bias)
        return self._multiply(shape, family, x, weight, bias)

    def _multiply(
        self, shape: _Shape, family: KernelFamily, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        out = x.new_empty(len(x), shape.n)
        is_whole = family.split_k == 1 or len(x) <= _PIECE
        pieces = [(x, out)] if is_whole else zip(x.split(_PIECE), out.split(_PIECE), strict=True)
        for piece, piece_out in pieces:
            plan = self._plans.get((shape, len(piece)))
            if plan is None:
                plan = self._plan(shape, family, piece, weight, piece_out)
                self._plans[shape, len(piece)] = plan
            self._library.multiply(*plan, piece, weight, piece_out, bias=bias)
        return out

    def _family(self, shape: _Shape, weight: Tensor, bias: Tensor | None) -> KernelFamily | None:
        """Return the family for a weight, or `None` if none gives batch-independent results."""
        family = self._tested_family(shape, weight, bias) if shape.is_aligned else None
        if family is None:
            logger.warning(
                "text generation: products with weights [%d, %d] may differ in their last bits "
                "between batches, because no cuBLASLt kernels for them add in a fixed order",
                shape.n,
                shape.k,
            )
        return family

    def _tested_family(
        self, shape: _Shape, weight: Tensor, bias: Tensor | None
    ) -> KernelFamily | None:
        generator = torch.Generator(weight.device).manual_seed(1)
        x = torch.randn(_PIECE, shape.k, generator=generator, device=weight.device).to(shape.dtype)
        out = x.new_empty(_TYPICAL_ROWS, shape.n)
        problem = self._library.problem(x[:_TYPICAL_ROWS], weight, out, bias=shape.has_bias)
        algorithms = self._library.algorithms(problem, shape.gpu, 1, workspace=_WORKSPACE_BYTES)
        if not algorithms:
            return None
        split_k = 1 if self._library.split_k(algorithms[0]) == 1 else 2
        family = KernelFamily(self._library.kind(algorithms[0]), split_k)
        try:
            whole = self._multiply(shape, family, x, weight, bias)
            parts = [self._multiply(shape, family, x[:n], weight, bias) for n in _TESTED_ROWS]
        except CublasLtError:
            return None
        same = all(torch.equal(part, whole[: len(part)]) for part in parts)
        return family if same else None

    def _plan(
        self, shape: _Shape, family: KernelFamily, x: Tensor, weight: Tensor, out: Tensor
    ) -> tuple[Problem, Algorithm]:
        """Return the fastest kernel of the family for the number of rows of `x`.

        Raises:
            CublasLtError: No kernel of the family supports the sizes.
        """
        library, gpu = self._library, shape.gpu
        problem = library.problem(x, weight, out, bias=shape.has_bias)
        algorithms = []
        for whole in (True, False) if family.split_k == 1 else (False, True):
            algorithms += library.algorithms(
                problem, gpu, _CHOICES, workspace=_WORKSPACE_BYTES, whole=whole
            )
        of_kind = [a for a in algorithms if library.kind(a) == family.kind]
        for algorithm in of_kind:
            if library.split_k(algorithm) == family.split_k:
                return problem, algorithm
        for algorithm in of_kind:
            variant = library.with_split_k(
                problem, gpu, algorithm, family.split_k, workspace=_WORKSPACE_BYTES
            )
            if variant is not None:
                return problem, variant
        raise CublasLtError(f"no kernel of {family} for {len(x)} rows of {list(weight.shape)}")


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the library supports these matrices: 16 bits, row-major, aligned."""
    if x.dtype not in _FORMATS or weight.dtype != x.dtype or not len(x):
        return False
    if not (x.is_contiguous() and weight.is_contiguous()):
        return False
    addresses = x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())
    return addresses % ALIGNMENT == 0
