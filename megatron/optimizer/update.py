"""The interface of update rules: the scalars and tensors that a rule reads and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron.kernels.library import KernelLibrary
from megatron.parallel.layout import Axis
from megatron.parallel.parameter import ParameterSpec


@dataclass(frozen=True)
class Step:
    """The scalars of an update, shared by all parameters with the same learning rate.

    The tensors are on the device that runs the update: the host with --optimizer-cpu-offload.

    Attributes:
        lr: The learning rate.
        count: The index of this update, from 1, for bias correction, fp32 [].
        gradient_scale: The number by which gradients are divided, fp32 [].
        found_nonfinite: 1 if the update must be skipped for any reason, otherwise 0, fp32 [].
    """

    lr: float
    count: Tensor
    gradient_scale: Tensor
    found_nonfinite: Tensor


@dataclass(frozen=True)
class MatrixShard:
    """The distribution of a parameter over processes, for an update rule that needs whole matrices.

    Attributes:
        spec: The shape of this tensor rank's shard, its matrices, and the dimension of the whole
            tensor that is split.
        tensor: The processes that split the tensor along `spec.split_dim`.
        rows: The processes among which the rows of this shard are divided (ZeRO stage 3); `None` if
            this process has all rows.
    """

    spec: ParameterSpec
    tensor: Axis
    rows: Axis | None

    @property
    def is_split(self) -> bool:
        """Whether tensor ranks hold different shards of the matrices."""
        return self.spec.split_dim is not None and self.tensor.size > 1


@dataclass(frozen=True)
class UpdateTensors:
    """The tensors of a parameter group that a rule reads and changes in place.

    Each tensor covers the elements of a parameter that this process updates: a 1-D shard if
    processes share the update, otherwise the whole parameter. A rule that needs whole tensors gets
    them in the parameter's own shape, except in ZeRO stage 3 (`UpdateRule.joins_rows`).

    Attributes:
        weights: The weights, in fp32 or packed.
        copies: The 16-bit copies of the weights, written with each update; `None` for a weight
            without a copy.
        gradients: The gradients, in fp32 or 16 bits. An update may change them.
        state: The state tensors by name, in the shapes of the weights, zero at the start. They are
            in fp32, or packed if flags such as --exp-avg-dtype request it.
        shards: The `MatrixShard` of each parameter, for a rule with `joins_rows`; otherwise empty.
    """

    weights: Sequence[Any]
    copies: Sequence[Tensor | None]
    gradients: Sequence[Tensor]
    state: Mapping[str, Sequence[Any]]
    shards: Sequence[MatrixShard] = ()


class Update(Protocol):
    """The update of a group, bound to its tensors."""

    def __call__(self, step: Step, /, *, weight_decay: float) -> None:
        """Update the weights, their copies and the state in place.

        Args:
            step: The scalars of the update.
            weight_decay: The weight decay of the group.
        """


class UpdateRule(Protocol):
    """A rule for computing new weights from gradients.

    Parameters with equal rules share a group.
    """

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the state tensors, which a checkpoint stores as "<parameter>.<name>"."""

    @property
    def needs_whole(self) -> bool:
        """Whether the update of a tensor needs the tensor rank's whole shard on one process.

        ZeRO stages 0 to 2 then assign whole tensors to processes.
        """

    @property
    def joins_rows(self) -> bool:
        """Whether the rule gathers tensors itself if their rows are divided among processes.

        Such a rule also supports ZeRO stage 3, with 1-D tensors, some of which may be empty.
        """

    def bind(self, tensors: UpdateTensors, library: KernelLibrary | None) -> Update:
        """Return a function that updates the tensors of a parameter group.

        Args:
            tensors: The tensors of the group.
            library: Compiled kernels; `None` means PyTorch's operations.
        """
