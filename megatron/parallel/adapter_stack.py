"""Several trained adapters for one frozen weight; each token uses one of them or none.

The frozen weight may contain the weights of all experts of a mixture.

The A matrices of all adapters are concatenated by rows, and the B matrices by columns, so two
products serve a batch with any combination of adapters. Between the products, each token's results
for other adapters are set to zero. The adapters' ranks may differ. The cost grows with the sum of
the ranks, not with the number of tokens that use an adapter. Tensors keep their addresses, so CUDA
graphs can record the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.kernels.grouped import GroupedProduct, Grouping
from megatron.kernels.row_product import GRANULE
from megatron.parallel.adapter import AdaptedLayer, Adapter
from megatron.parallel.expert_linear import ExpertAdapter
from megatron.parallel.layers import sum_over_ranks
from megatron.parallel.layout import Layout
from megatron.parallel.products import LinearCall, Products

_NO_OWNER = -1  # the owner of padding rows


@dataclass
class AdapterRows:
    """The adapters of a model and the adapter of each token in a step, which all layers read.

    Attributes:
        names: The names of the adapters.
        of_tokens: The adapter of each token, int64 [s], counted from 1; 0 is the base model. `None`
            means that no token has an adapter, so layers skip the adapters' matrix products.
        of_outputs: The same for the tokens whose logits are computed, int64 [k].
    """

    names: tuple[str, ...]
    of_tokens: Tensor | None = None
    of_outputs: Tensor | None = None


@dataclass(frozen=True)
class LayerAdapter:
    """The matrices of one adapter in one layer.

    Attributes:
        index: The index of the adapter, counted from 1.
        a: The layer's A matrices, [ranks, in]; for experts [experts, rank, in].
        b: The B matrices, multiplied by the adapter's scale, [out, ranks]; for experts
            [experts, out, rank].
        ratio: DoRA's factor for each row of the weight, fp32 [out]; `None` without DoRA.
    """

    index: int
    a: Tensor
    b: Tensor
    ratio: Tensor | None

    @classmethod
    def of(cls, index: int, adapter: Adapter | ExpertAdapter, weight: Tensor) -> LayerAdapter:
        """Return the matrices of an adapter. Collective with DoRA.

        Args:
            index: The index of the adapter, counted from 1.
            adapter: The adapter of a layer.
            weight: The layer's frozen weight.
        """
        return cls(index, *adapter.inference_matrices(weight))


def _stack(adapters: Sequence[LayerAdapter]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the stacked A [..., ranks, in] and B [..., out, ranks], and each rank's owner [ranks].

    The owner is the index of the adapter to which the rank belongs, or `_NO_OWNER`.
    """
    first = adapters[0]
    count = sum(adapter.a.shape[-2] for adapter in adapters)
    ranks = -(-count // GRANULE) * GRANULE  # sizes that `RowByRow` and grouped products support
    a = first.a.new_zeros(*first.a.shape[:-2], ranks, first.a.shape[-1])
    b = first.b.new_zeros(*first.b.shape[:-1], ranks)
    owners = torch.full((ranks,), _NO_OWNER, device=a.device)
    start = 0
    for adapter in adapters:
        end = start + adapter.a.shape[-2]
        a[..., start:end, :], b[..., start:end], owners[start:end] = (
            adapter.a,
            adapter.b,
            adapter.index,
        )
        start = end
    return a, b, owners


class TokenAdapters(NamedTuple):
    """The matrices of all adapters of a layer, and the ranks that each token uses.

    Attributes:
        a: All A matrices [ranks, in].
        b: All B matrices, multiplied by their adapters' scales, [out, ranks].
        mask: 1 for the ranks of the token's adapter, otherwise 0, [s, ranks].
        ratios: DoRA's factor for each row of the weight, [s, out]; `None` without DoRA.
    """

    a: Tensor
    b: Tensor
    mask: Tensor
    ratios: Tensor | None


class AdapterStack(nn.Module):
    """The adapters of a linear layer in inference. Each token uses one of them or none.

    Args:
        linear: The layer that the adapters change.
        adapters: The adapters that change this layer, at least one.
        rows: The adapters of the tokens.
        products: The implementation of the matrix products.
        layout: The grid of processes as this process sees it.
        of_outputs: Whether the layer processes only the tokens whose logits are needed.
    """

    a: Tensor
    b: Tensor
    owners: Tensor
    ratios: Tensor | None

    def __init__(
        self,
        linear: AdaptedLayer,
        adapters: Sequence[LayerAdapter],
        rows: AdapterRows,
        products: Products,
        layout: Layout,
        *,
        of_outputs: bool = False,
    ) -> None:
        """Copy all A matrices into one tensor and all B matrices into another."""
        super().__init__()
        self._rows, self._products, self._of_outputs = rows, products, of_outputs
        self._sums_over = layout if linear.split == "row" and layout.tensor.size > 1 else None
        a, b, owners = _stack(adapters)
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)
        self.register_buffer("owners", owners, persistent=False)
        ratios = None
        if any(adapter.ratio is not None for adapter in adapters):
            ratios = b.new_ones(1 + len(rows.names), len(b))
            for adapter in adapters:
                if adapter.ratio is not None:
                    ratios[adapter.index] = adapter.ratio
        self.register_buffer("ratios", ratios, persistent=False)

    @property
    def _adapter_indices(self) -> Tensor | None:
        """The index of each token's adapter, int64 [tokens]; `None` if no token has an adapter."""
        return self._rows.of_outputs if self._of_outputs else self._rows.of_tokens

    @contextmanager
    def reading(self, tokens: Callable[[], Tensor]) -> Iterator[None]:
        """Return a context manager for processing rows other than the tokens of the step.

        Args:
            tokens: A function that returns, for each row, the index of the token that determines
                the row's adapter, int64 [rows].
        """
        of_tokens = self._rows.of_tokens
        if of_tokens is not None:
            self._rows.of_tokens = of_tokens[tokens()]
        try:
            yield
        finally:
            self._rows.of_tokens = of_tokens

    def for_tokens(self, count: int) -> TokenAdapters | None:
        """Return the matrices and the ranks that each token uses, or `None` if no adapter is used.

        Args:
            count: The number of tokens to process, from the first token of the step.
        """
        if self._adapter_indices is None:
            return None
        indices = self._adapter_indices[:count]
        mask = (indices[:, None] == self.owners).to(self.a.dtype)
        return TokenAdapters(
            self.a, self.b, mask, None if self.ratios is None else self.ratios[indices]
        )

    def product(self, x: Tensor, weight: Tensor) -> None:
        """Return `None`, because the adapters' products are computed separately."""

    def project_down(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply the layer's input by the A matrices.

        Args:
            x: The layer's input [s, b, in].

        Returns:
            The input, and the low-rank product [s, b, ranks], in which a token's values for other
            adapters are zero, or `None` if no token uses an adapter.
        """
        indices = self._adapter_indices
        if indices is None:
            return x, None
        low, _ = self._products.forward(LinearCall(x, self.a, training=False))
        if self._sums_over is not None:
            low = sum_over_ranks(low, self._sums_over)
        return x, torch.where(indices[:, None, None] == self.owners, low, 0)

    def add_product(self, low: Tensor, out: Tensor, weight: Tensor) -> Tensor:
        """Add the adapters' outputs to the frozen weight's output; with DoRA, also scale the sum.

        Args:
            low: The low-rank product that `project_down` returned.
            out: The product with the frozen weight, without a bias, [s, b, out]. It is changed in
                place.
            weight: The frozen weight.
        """
        up, _ = self._products.forward(LinearCall(low, self.b, training=False))
        out = out.add_(up)
        if self.ratios is None:
            return out
        return out * self.ratios[self._adapter_indices][:, None]


class ExpertAdapterStack(nn.Module):
    """The adapters of the experts' weights in inference. Each row uses its token's adapter, if any.

    Args:
        adapters: The adapters that change this layer, at least one.
        rows: The adapters of the tokens.
        product: The product with each expert's matrix.
    """

    a: Tensor
    b: Tensor
    owners: Tensor

    def __init__(
        self, adapters: Sequence[LayerAdapter], rows: AdapterRows, product: GroupedProduct
    ) -> None:
        """Copy all A matrices into one tensor and all B matrices into another."""
        super().__init__()
        self._rows, self._product = rows, product
        for name, tensor in zip(("a", "b", "owners"), _stack(adapters), strict=True):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, rows: Tensor, grouping: Grouping) -> Tensor | None:
        """Return the outputs of the adapters for each expert's rows: [n, in] -> [n, out].

        The result is `None` if no token uses an adapter.

        Args:
            rows: The rows of all experts.
            grouping: How the rows of the step's tokens are grouped by expert.
        """
        of_tokens = self._rows.of_tokens
        if of_tokens is None:
            return None
        low, _ = self._product.forward(rows, self.a, grouping.ends)
        used = of_tokens[grouping.tokens].unsqueeze(1)
        low = torch.where(used == self.owners, low, 0)
        out, _ = self._product.forward(low, self.b, grouping.ends)
        return out
