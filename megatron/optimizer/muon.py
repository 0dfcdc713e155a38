"""Muon: momentum whose update of a matrix is orthogonalized (Jordan et al., 2024).

In ZeRO stages 1 and 2 the bucket plan assigns each matrix to one process of the replica axis, which
stores its momentum and orthogonalizes its update. In stage 3 every process holds some rows of each
matrix; the rows of an update are sent to one process, which orthogonalizes the update and sends the
rows back (`RowExchange`). --muon-tp-mode determines how matrices that are split over tensor ranks
are orthogonalized.

Newton-Schulz iterations orthogonalize matrices with matrix products only. For a matrix X = U S V^T,
an iteration computes a X + (b G + c G G) X with G = X X^T, which maps every singular value s to
a s + b s^3 + c s^5 and does not change U and V. A few iterations bring all singular values of a
normalized matrix close to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor

from megatron.kernels.adam import copy_weights
from megatron.kernels.library import KernelLibrary
from megatron.optimizer.update import MatrixShard, Step, Update, UpdateTensors
from megatron.parallel.buckets import row_shards
from megatron.parallel.collectives import all_gather, all_reduce, all_to_all_rows
from megatron.parallel.layout import Axis
from megatron.parallel.parameter import ParameterSpec

CHUNK = 2**27  # elements orthogonalized at a time, which bounds the temporary memory
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    # One polynomial for all iterations, steep at 0: singular values end between 0.7 and 1.2.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # One polynomial for each of five iterations: singular values end closer to 1.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""The coefficients (a, b, c) of the iterations for each value of --muon-coefficient-type."""

_EPS = 1e-7  # the minimum norm to divide by


@dataclass(frozen=True)
class Muon:
    """Momentum with an orthogonalized update and decoupled weight decay.

    m = beta m + (1 - beta) g;  u = (1 - beta) g + beta m, or m without Nesterov;
    w = w - lr (scale orthogonalize(u) + weight_decay w).

    Attributes:
        momentum: The decay rate beta.
        nesterov: Whether to use Nesterov momentum.
        split_qkv: Whether to orthogonalize the query, key and value projections of a weight
            separately.
        scale_mode: How the scale depends on the size of the matrix: "spectral", "unit_rms_norm" or
            "shape_scaling" (see `scale_of`).
        extra_scale: A factor applied to every scale.
        steps: The number of Newton-Schulz iterations.
        coefficients: The coefficients of the iterations, a key of `COEFFICIENTS`.
        precision: The precision of the matrix products (see `orthogonalize`).
        tensor_mode: How to orthogonalize matrices that are split over tensor ranks: "blockwise"
            treats each shard as a matrix, "duplicated" gathers the matrix on every rank, and
            "distributed" computes with shards and sums products over the ranks.
    """

    momentum: float = 0.9
    nesterov: bool = False
    split_qkv: bool = True
    scale_mode: str = "spectral"
    extra_scale: float = 1.0
    steps: int = 5
    coefficients: str = "quintic"
    precision: str = "medium"
    tensor_mode: str = "blockwise"

    state_names = ("momentum_buffer",)
    needs_whole = True
    joins_rows = True

    def bind(self, tensors: UpdateTensors, library: KernelLibrary | None) -> Update:
        """Return a function that updates these tensors."""
        chunks = []
        for indices in _chunks(tensors.shards):
            shards = [tensors.shards[i] for i in indices]

            def pick(
                tensors_of_all: Sequence[Tensor], indices: list[int] = indices
            ) -> list[Tensor]:
                selected = ((tensors_of_all[i], tensors.shards[i]) for i in indices)
                return [t.view(p.spec.shape) if p.rows is None else t for t, p in selected]

            chunk = UpdateTensors(
                pick(tensors.weights),
                [tensors.copies[i] for i in indices],
                pick(tensors.gradients),
                {name: pick(state) for name, state in tensors.state.items()},
                shards,
            )
            exchange = RowExchange.plan(shards)
            owned = shards if exchange is None else exchange.owned
            chunks.append(_Chunk(chunk, exchange, _Orthogonalization(self, owned)))
        return partial(self._update, chunks)

    def _update(self, chunks: Sequence[_Chunk], step: Step, *, weight_decay: float) -> None:
        for chunk in chunks:
            tensors = chunk.tensors
            gradients = [gradient.float() for gradient in tensors.gradients]
            buffers = list(tensors.state["momentum_buffer"])
            weights = list(tensors.weights)
            # A learning rate of 0 leaves the weights unchanged. The kernel divides the gradients by
            # the scale, and changes nothing if any gradient is not finite.
            _sgd(step, weights, gradients, buffers, momentum=self.momentum, lr=0.0)
            if self.nesterov:
                torch._foreach_lerp_(gradients, buffers, self.momentum)
            else:
                torch._foreach_copy_(gradients, buffers)
            if chunk.exchange is None:
                chunk.orthogonalize(gradients)
            else:
                chunk.exchange(gradients, chunk.orthogonalize)
            _sgd(step, weights, gradients, [], lr=step.lr, weight_decay=weight_decay)
            copy_weights(tensors.weights, tensors.copies)

    def scale_of(self, rows: int, columns: int) -> float:
        """Return the factor applied to the orthogonalized update of a matrix [rows, columns]."""
        square = {
            "spectral": max(rows, columns),
            "unit_rms_norm": rows / columns,
            "shape_scaling": max(1.0, rows / columns),
        }[self.scale_mode]
        return float(self.extra_scale * square**0.5)


def _sgd(
    step: Step,
    weights: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> None:
    """Run PyTorch's fused SGD.

    With `buffers`, the gradients are divided by `step.gradient_scale` and update the momentum.
    Otherwise they are final updates, which are applied unchanged.
    """
    torch._fused_sgd_(
        weights,
        gradients,
        buffers,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=momentum,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        grad_scale=step.gradient_scale if buffers else None,
        found_inf=step.found_nonfinite,
    )


@dataclass(frozen=True)
class _Chunk:
    """Parameters that are updated together.

    Attributes:
        tensors: The tensors of this process.
        exchange: The exchange that gathers the rows of each matrix; `None` if this process has all
            rows.
        orthogonalize: A function that orthogonalizes whole matrices in place.
    """

    tensors: UpdateTensors
    exchange: RowExchange | None
    orthogonalize: _Orthogonalization


def _chunks(shards: Sequence[MatrixShard]) -> list[list[int]]:
    """Divide parameters, by index, into chunks of limited size that are exchanged together."""
    by_rows: dict[Axis | None, list[int]] = {}
    for i, shard in enumerate(shards):
        by_rows.setdefault(shard.rows, []).append(i)
    chunks: list[list[int]] = []
    for rows, members in by_rows.items():
        limit = CHUNK if rows is None else CHUNK * rows.size
        filled = limit
        for i in members:
            size = torch.Size(shards[i].spec.shape).numel()
            if filled + size > limit:
                chunks.append([])
                filled = 0
            chunks[-1].append(i)
            filled += size
    return chunks


def cost_of(spec: ParameterSpec) -> int:
    """Return the cost of orthogonalizing a parameter: the number of multiplications for X X^T."""
    *_, rows, columns = spec.shape
    return torch.Size(spec.shape).numel() * min(rows, columns)


class RowExchange:
    """An exchange that gathers all rows of each parameter on one process, and sends them back.

    Parameters are assigned to processes in order of decreasing cost, each to the process with the
    least work so far.

    Args:
        shards: The parameters, the same on all processes of the axis.
        axis: The processes that each hold some rows of every parameter.

    Attributes:
        loads: The total cost of each process's parameters.
        owned: The parameters assigned to this process, in the order of the messages.
    """

    def __init__(self, shards: Sequence[MatrixShard], axis: Axis) -> None:
        """Choose an owner for each parameter, and count what is sent."""
        self._axis = axis
        loads, owners = [0] * axis.size, [0] * len(shards)
        for i in sorted(range(len(shards)), key=lambda i: -cost_of(shards[i].spec)):
            owners[i] = loads.index(min(loads))
            loads[owners[i]] += cost_of(shards[i].spec)
        self.loads = loads
        # The order of the messages: by owner, then by the parameter's index.
        self._order = sorted(range(len(shards)), key=lambda i: (owners[i], i))
        self.owned = [shards[i] for i in self._order if owners[i] == axis.rank]
        row_spans = []  # for each parameter, the elements that each rank holds in ZeRO stage 3
        for shard in shards:
            elements = torch.Size(shard.spec.shape).numel()
            row_spans.append(row_shards(elements // shard.spec.shape[-1], elements, axis.size))
        self._sent = [0] * axis.size
        for i in self._order:
            self._sent[owners[i]] += row_spans[i][axis.rank].size
        own_sizes = [row_spans[i] for i in self._order if owners[i] == axis.rank]
        self._sizes = [[sizes[rank].size for sizes in own_sizes] for rank in range(axis.size)]

    @classmethod
    def plan(cls, shards: Sequence[MatrixShard]) -> RowExchange | None:
        """Return the exchange for these parameters, or `None` if each process has all rows."""
        axis = shards[0].rows
        return None if axis is None else cls(shards, axis)

    def __call__(self, parts: Sequence[Tensor], change: Callable[[list[Tensor]], None]) -> None:
        """Gather whole parameters, apply `change` to them, and send the rows back.

        Collective over the axis.

        Args:
            parts: The rows of this process, 1-D, one tensor for each parameter; overwritten.
            change: A function that changes the whole tensors of `owned` in place.
        """
        counts = [sum(sizes) for sizes in self._sizes]
        sent = torch.cat([parts[i] for i in self._order])
        received = all_to_all_rows(sent, self._axis, self._sent, counts)
        # Views of the received data, by sender and then by parameter.
        parts_received = received.split([size for sizes in self._sizes for size in sizes])
        by_parameter = [parts_received[i :: len(self.owned)] for i in range(len(self.owned))]
        wholes = [torch.cat(rows) for rows in by_parameter]
        change([whole.view(p.spec.shape) for whole, p in zip(wholes, self.owned, strict=True)])
        for whole, rows in zip(wholes, by_parameter, strict=True):
            for row, changed in zip(rows, whole.split([r.numel() for r in rows]), strict=True):
                row.copy_(changed)
        returned = all_to_all_rows(received, self._axis, counts, self._sent)
        sizes = [parts[i].numel() for i in self._order]
        for i, changed in zip(self._order, returned.split(sizes), strict=True):
            parts[i].copy_(changed)


@dataclass(frozen=True)
class _Kind:
    """The properties shared by the matrices of a batch.

    Attributes:
        rows: The number of rows of each matrix on this process.
        columns: The number of columns of each matrix on this process.
        scale: The factor applied to the orthogonalized updates.
        split_dim: The dimension that is split over `axis`; `None` if this process has whole
            matrices.
        axis: The processes that orthogonalize a matrix together; `None` if each orthogonalizes its
            own matrices.
    """

    rows: int
    columns: int
    scale: float
    split_dim: int | None
    axis: Axis | None


def _matrix_view(index: int, groups: tuple[int, int, int], rows: slice, tensor: Tensor) -> Tensor:
    """Return a view of one matrix of a tensor, [groups, selected rows of each group, columns].

    Args:
        index: The index of the matrix in the flattened leading dimensions.
        groups: The number of groups, the number of rows per group, and the number of columns.
        rows: The rows of each group that belong to the matrix.
        tensor: The tensor, contiguous.
    """
    return tensor.view(-1, *groups)[index, :, rows]


class _Orthogonalization:
    """A function that orthogonalizes and scales whole tensors in place.

    Matrices of the same shape are processed in batches.

    Args:
        rule: The update rule, with the settings of the orthogonalization.
        shards: The parameters, in the order of the tensors that will be passed.
    """

    def __init__(self, rule: Muon, shards: Sequence[MatrixShard]) -> None:
        """Group the matrices of all parameters by shape."""
        self._rule, self._shards = rule, shards
        self._gathers = [rule.tensor_mode == "duplicated" and shard.is_split for shard in shards]
        self._batches: dict[_Kind, list[tuple[int, Callable[[Tensor], Tensor]]]] = {}
        for i, (shard, gathers) in enumerate(zip(shards, self._gathers, strict=True)):
            for kind, view in self._split(shard, gathers):
                self._batches.setdefault(kind, []).append((i, view))

    def _split(
        self, shard: MatrixShard, gathers: bool
    ) -> list[tuple[_Kind, Callable[[Tensor], Tensor]]]:
        """Return, for each matrix of a parameter, its kind and a function that returns its view."""
        spec, ranks = shard.spec, shard.tensor.size
        assert spec.matrices is not None
        shape, dim = list(spec.shape), spec.split_dim
        split = None if dim is None else dim - len(shape) + 2  # 0 or 1
        if gathers:
            assert dim is not None
            shape[dim] *= ranks
        is_divided = self._rule.tensor_mode == "distributed" and shard.is_split
        *leading, height, columns = shape
        shares = spec.matrices.shares if self._rule.split_qkv else ()
        shares = shares or (height,)
        groups, remainder = divmod(height, sum(shares))
        assert not remainder, f"{height} rows do not divide into groups of {sum(shares)}"
        matrices: list[tuple[_Kind, Callable[[Tensor], Tensor]]] = []
        for index in range(torch.Size(leading).numel()):
            start = 0
            for share in shares:
                rows = groups * share
                size = [rows, columns]
                if is_divided:
                    assert split is not None
                    size[split] *= ranks
                kind = _Kind(
                    rows,
                    columns,
                    self._rule.scale_of(*size),
                    split if is_divided else None,
                    shard.tensor if is_divided else None,
                )
                rows_of_group = slice(start, start + share)
                view = partial(_matrix_view, index, (groups, sum(shares), columns), rows_of_group)
                matrices.append((kind, view))
                start += share
        return matrices

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Replace the matrices of tensors with their scaled orthogonalizations.

        Collective over the tensor axis.
        """
        whole = [
            self._gather(tensor, shard) if gathers else tensor
            for tensor, shard, gathers in zip(tensors, self._shards, self._gathers, strict=True)
        ]
        for kind, members in self._batches.items():
            limit = max(1, CHUNK // (kind.rows * kind.columns))
            for first in range(0, len(members), limit):
                views = [view_of(whole[i]) for i, view_of in members[first : first + limit]]
                self._batch(kind, views)
        for tensor, shard, updated in zip(tensors, self._shards, whole, strict=True):
            if updated is not tensor:
                dim = shard.spec.split_dim
                assert dim is not None
                size = tensor.shape[dim]
                tensor.copy_(updated.narrow(dim, shard.tensor.rank * size, size))

    def _batch(self, kind: _Kind, views: list[Tensor]) -> None:
        """Orthogonalize and scale matrices of one kind in place."""
        rule = self._rule
        dtype = torch.bfloat16 if rule.precision == "medium" else torch.float32
        x = torch.empty((len(views), kind.rows, kind.columns), dtype=dtype, device=views[0].device)
        slots = [slot.view_as(view) for slot, view in zip(x.unbind(), views, strict=True)]
        torch._foreach_copy_(slots, views)
        x = orthogonalize(
            x,
            COEFFICIENTS[rule.coefficients],
            rule.steps,
            precision=rule.precision,
            split_dim=kind.split_dim,
            axis=kind.axis,
        )
        results = [result.view_as(view) for result, view in zip(x.unbind(), views, strict=True)]
        torch._foreach_copy_(views, results)
        torch._foreach_mul_(views, kind.scale)

    @staticmethod
    def _gather(tensor: Tensor, shard: MatrixShard) -> Tensor:
        """Gather the whole tensor from the tensor ranks. Collective over the tensor axis."""
        dim = shard.spec.split_dim
        assert dim is not None
        joined = all_gather(tensor.movedim(dim, 0).contiguous(), shard.tensor)
        return joined.movedim(0, dim).contiguous()


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

    With `axis`, each process has a shard of every matrix, and the call is collective over the axis.

    Args:
        x: Matrices of the same shape, [k, rows, columns]: bf16 if `precision` is "medium",
            otherwise fp32.
        coefficients: The coefficients (a, b, c) of the first iterations; later iterations repeat
            them.
        steps: The number of iterations.
        precision: "medium" computes in bf16. "high" and "highest" compute in fp32, with PyTorch's
            setting of the same name for matrix products.
        split_dim: The dimension of a matrix, 0 or 1, that is split over the axis.
        axis: The processes over which matrices are split; `None` if matrices are whole.
    """
    # Use X^T X or X X^T: the smaller product, or the product that sums over the split dimension.
    is_transposed = x.shape[1] > x.shape[2] if axis is None else split_dim == 0
    x = x.mT if is_transposed else x
    if axis is None:
        norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    else:  # the norm of whole matrices
        part = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
        norm = all_reduce(part.square_(), axis).sqrt_()
    x = x / norm.clamp_(min=_EPS).to(x.dtype)
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "medium" else precision)
    try:
        for a, b, c in islice(cycle(coefficients), steps):
            gram = x @ x.mT
            if axis is not None:
                all_reduce(gram, axis)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    finally:
        torch.set_float32_matmul_precision(previous)
    return x.mT if is_transposed else x
