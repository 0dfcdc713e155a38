"""Several trained adapters for one frozen weight; each token uses one of them or none.

The A's of all adapters are stacked, and the B's are side by side, so that two products serve a
batch with any mixture of adapters. Between the products, each token's results for other adapters
are set to zero. The adapters' ranks may differ. The cost grows with the sum of the ranks, not with
the number of tokens that use an adapter. Tensors keep their addresses, so that CUDA graphs can
record the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.kernels.row_product import GRANULE
from megatron.parallel.adapter import Adapter
from megatron.parallel.layers import Linear, sum_over_ranks
from megatron.parallel.layout import Layout
from megatron.parallel.products import LinearCall, Products

_NOBODYS = -1  # the owner of padding rows


@dataclass
class AdapterRows:
    """The adapters of a model and the adapter of each token in a step, which all layers read.

    Attributes:
        names: The names of the adapters.
        of_tokens: The adapter of each token, int64 [s], counted from 1; 0 is the base model. `None`
            means that no token has an adapter, and layers compute nothing for them.
    """

    names: tuple[str, ...]
    of_tokens: Tensor | None = None


@dataclass(frozen=True)
class StackedFactors:
    """The factors of one adapter in one layer.

    Attributes:
        index: The adapter, counted from 1.
        a: All A's of the layer, [ranks, in].
        b: All B's [out, ranks], multiplied by the adapter's scale.
        ratio: DoRA's factor for each row of the weight, fp32 [out]; `None` without DoRA.
    """

    index: int
    a: Tensor
    b: Tensor
    ratio: Tensor | None

    @classmethod
    def of(cls, index: int, adapter: Adapter, weight: Tensor) -> StackedFactors:
        """Return the factors of an adapter. Collective with DoRA.

        Args:
            index: The adapter, counted from 1.
            adapter: The adapter of a layer.
            weight: The layer's frozen weight.
        """
        return cls(index, *adapter.factors(weight))


class AdapterStack(nn.Module):
    """The adapters of a linear layer in inference. Each token uses one of them or none.

    Args:
        linear: The layer.
        parts: The adapters that change this layer, at least one.
        rows: The adapters of the tokens.
        products: The products to multiply with.
        layout: The grid of processes as this process sees it.
    """

    a: Tensor
    b: Tensor
    owners: Tensor
    ratios: Tensor | None

    def __init__(
        self,
        linear: Linear,
        parts: Sequence[StackedFactors],
        rows: AdapterRows,
        products: Products,
        layout: Layout,
    ) -> None:
        """Copy all A's into one tensor and all B's into another."""
        super().__init__()
        self._rows, self._products = rows, products
        self._sums_over = layout if linear.split == "row" and layout.tensor.size > 1 else None
        first = parts[0]
        count = sum(len(part.a) for part in parts)
        ranks = -(-count // GRANULE) * GRANULE  # sizes that `RowByRow` supports
        a = first.a.new_zeros(ranks, first.a.shape[1])
        b = first.b.new_zeros(len(first.b), ranks)
        owners = torch.full((ranks,), _NOBODYS, device=a.device)
        start = 0
        for part in parts:
            end = start + len(part.a)
            a[start:end], b[:, start:end], owners[start:end] = part.a, part.b, part.index
            start = end
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)
        self.register_buffer("owners", owners, persistent=False)
        ratios = None
        if any(part.ratio is not None for part in parts):
            ratios = b.new_ones(1 + len(rows.names), len(b))
            for part in parts:
                if part.ratio is not None:
                    ratios[part.index] = part.ratio
        self.register_buffer("ratios", ratios, persistent=False)

    def product(self, x: Tensor, weight: Tensor) -> None:
        """Return `None`: the adapters' products are separate from the frozen weight's."""

    def project_down(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply the layer's input by the A's.

        Args:
            x: The layer's input [s, b, in].

        Returns:
            The input, and the low-rank product [s, b, ranks] with zeros for the adapters that a
            token does not use, or `None` if no token uses an adapter.
        """
        of_tokens = self._rows.of_tokens
        if of_tokens is None:
            return x, None
        low, _ = self._products.forward(LinearCall(x, self.a, training=False))
        if self._sums_over is not None:
            low = sum_over_ranks(low, self._sums_over)
        return x, torch.where(of_tokens[:, None, None] == self.owners, low, 0)

    def add_product(self, low: Tensor, out: Tensor, weight: Tensor) -> Tensor:
        """Add the adapters' outputs to the frozen weight's output.

        Args:
            low: The low-rank product of `project_down`.
            out: The product with the frozen weight, without a bias. It may be changed in place.
            weight: The frozen weight.
        """
        up, _ = self._products.forward(LinearCall(low, self.b, training=False))
        out = out.add_(up)
        if self.ratios is None:
            return out
        return out * self.ratios[self._rows.of_tokens][:, None]
