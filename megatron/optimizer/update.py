"""The interface of update rules: the scalars and tensors that a rule receives, and its result."""

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

    Attributes:
        lr: Learning rate.
        count: Index of this update, from 1, for bias correction: an fp32 scalar on the device.
        gradient_scale: Number by which gradients are divided: an fp32 scalar on the device.
        found_nonfinite: 1 if the update must not happen, otherwise 0: an fp32 scalar on the device.
    """

    lr: float
    count: Tensor
    gradient_scale: Tensor
    found_nonfinite: Tensor


@dataclass(frozen=True)
class MatrixShard:
    """The information about a parameter that an update rule for whole matrices needs.

    Attributes:
        spec: The position of this process's part in the whole tensor.
        tensor: The axis of processes that split the tensor along `spec.split_dim`.
        rows: The axis of processes that share the rows of this part (ZeRO stage 3); `None` if this
            process has all rows.
    """

    spec: ParameterSpec
    tensor: Axis
    rows: Axis | None

    @property
    def is_split(self) -> bool:
        """Whether tensor ranks hold different parts of the matrices."""
        return self.spec.split_dim is not None and self.tensor.size > 1


@dataclass(frozen=True)
class UpdateTensors:
    """The tensors that a rule reads and changes in place.

    Each is the part of a parameter that this process updates: 1-D if processes share the update, or
    in the parameter's own shape for a rule that needs whole tensors.

    Attributes:
        weights: Weights in fp32, or packed.
        copies: 16-bit copies of the weights, written with each update; `None` for a weight that has
            none.
        gradients: Gradients in fp32 or 16 bits. An update may change them.
        state: State tensors by name, in the weights' shapes, zero at the start. They are in fp32,
            or may be packed for a rule with flags such as --exp-avg-dtype.
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
        """Update the weights, their copies and the state in place."""


class UpdateRule(Protocol):
    """A rule for computing new weights from gradients.

    Parameters with equal rules share a group.
    """

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors, which a checkpoint stores as "<parameter>.<name>"."""

    @property
    def needs_whole(self) -> bool:
        """Whether a process must hold each tensor whole instead of a shard of it.

        Whole means everything that one tensor rank holds, which is possible with ZeRO stages 0 to
        2.
        """

    @property
    def joins_rows(self) -> bool:
        """Whether the rule itself gathers tensors whose rows are divided among processes.

        Such a rule also runs under ZeRO stage 3, with 1-D tensors, some of which may be empty.
        """

    def bind(self, tensors: UpdateTensors, library: KernelLibrary | None) -> Update:
        """Return a function that updates these tensors.

        Args:
            tensors: Tensors of a parameter group.
            library: Compiled kernels, or `None` if there are none.
        """
