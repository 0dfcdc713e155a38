"""Find which elements of an optimizer's flat partitions belong to which parameter.

ZeRO concatenates the parameters of a group and divides the result among data-parallel ranks.
`param_slice_mappings` records the position of each parameter's slice in a rank's partition. The
slices of a parameter follow the order of ranks. Experts are divided only among the ranks that hold
the same experts.

ZeRO 3 divides each parameter: every rank has ceil(n / ranks) elements of it, in the order of
`param_shapes`, in one or more flat tensors.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.deepspeed.files import StateFile
from megatron.checkpoint.deepspeed.names import local_expert, shift_expert
from megatron.checkpoint.legacy.optimizer import STATE_KINDS
from megatron.checkpoint.legacy.torch_file import TorchZip
from megatron.checkpoint.legacy.unpickler import Record, TensorRef, show
from megatron.errors import CheckpointError

MASTER = "master"

Shapes = Mapping[str, tuple[int, ...]]


class Value(NamedTuple):
    """A parameter or optimizer state of one model-parallel rank, as references to file slices.

    Attributes:
        shape: The shape of the parameter or state.
        dtype: The dtype of the tensor that `load` returns.
        parts: The slices that contain the elements, in order. Elements beyond the size of `shape`
            are padding. If there are no slices, all elements are zero.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[TorchZip, TensorRef], ...]

    def load(self) -> Tensor:
        """Read the slices, and return them as one tensor of the value's shape and dtype."""
        if not self.parts:
            return torch.zeros(self.shape, dtype=self.dtype)
        flat = [archive.load(ref).reshape(-1) for archive, ref in self.parts]
        whole = flat[0] if len(flat) == 1 else torch.cat(flat)
        return whole[: math.prod(self.shape)].view(self.shape).to(self.dtype)


@dataclass
class States:
    """The optimizer states of one model-parallel rank.

    Attributes:
        values: The states, by kind and DeepSpeed's name for the parameter.
        steps: All step counts, each as its file and its value (a number or scalar tensor).
    """

    values: dict[tuple[str, str], Value] = field(default_factory=dict)
    steps: list[tuple[TorchZip, Any]] = field(default_factory=list)


def read_partitions(
    files: Sequence[StateFile], shapes: Shapes, whole_name: Callable[[str], str]
) -> States:
    """Return the states in the files of ZeRO 1 and 2, or of the bf16 optimizer.

    Args:
        files: A model-parallel rank's files, in the order of data-parallel ranks.
        shapes: The shapes of parameters by their names in a whole model, which may include
            parameters that this rank does not have.
        whole_name: Function that returns a parameter's name in a whole model, given its name in the
            files.

    Raises:
        CheckpointError: Slices are missing or contradict each other, or a kind of optimizer state
            is not supported.
    """
    result = States()
    parts = defaultdict[tuple[str, str], list[tuple[TorchZip, TensorRef]]](list)
    experts = 1 + max((local_expert(name) or 0 for name in shapes), default=0)
    for rank, file in enumerate(files):
        mappings = _optimizer(file).get("param_slice_mappings") or ()
        mapping_names = (
            name for mapping in mappings if isinstance(mapping, dict) for name in mapping
        )
        experts_of_rank = 1 + max(
            (local_expert(whole_name(str(name))) or 0 for name in mapping_names), default=0
        )
        first = rank % max(1, experts // experts_of_rank) * experts_of_rank
        for kind, name, ref in _slices(file, result.steps):
            parts[kind, shift_expert(whole_name(name), first)].append((file.zip, ref))
    for (kind, name), windows in parts.items():
        if name not in shapes:
            raise CheckpointError(f"{kind} of {name[:200]}: there is no such parameter")
        elements = sum(ref.shape[0] for _, ref in windows)
        if elements != math.prod(shapes[name]):
            raise CheckpointError(
                f"{kind} of {name} has {elements:,} elements, and the parameter "
                f"{math.prod(shapes[name]):,}"
            )
        result.values[kind, name] = Value(shapes[name], torch.float32, tuple(windows))
    return result


def _slices(
    file: StateFile, steps: list[tuple[TorchZip, Any]]
) -> Iterator[tuple[str, str, TensorRef]]:
    """Yield (kind, name, elements) of each state in a file, and add its step counts to `steps`."""
    tree = _optimizer(file)
    mappings, masters = (
        tree.get("param_slice_mappings"),
        tree.get("single_partition_of_fp32_groups"),
    )
    base = tree.get("base_optimizer_state")
    for value in (mappings, masters):
        if not isinstance(value, list) or len(value) != len(mappings or ()):
            raise CheckpointError(f"{file.zip.path}: its groups contradict each other")
    states = _states_of(file, base, len(masters or ()), steps)
    for mapping, master, state in zip(mappings or (), masters or (), states, strict=True):
        flats = {MASTER: master} | _state_tensors(file, state, steps)
        if not isinstance(mapping, dict):
            raise CheckpointError(f"{file.zip.path}: a mapping is {show(mapping)}")
        for name, address in mapping.items():
            address_fields = address.state if isinstance(address, Record) else None
            if not isinstance(address_fields, dict) or type(name) is not str:
                raise CheckpointError(f"{file.zip.path}: {show(name)} has no address")
            start, count = address_fields.get("start"), address_fields.get("numel")
            for kind, flat in flats.items():
                yield kind, name, _window(file, flat, start, count)


def _states_of(
    file: StateFile, base: Any, groups: int, steps: list[tuple[TorchZip, Any]]
) -> list[Any]:
    """Return the state of each group's flat partition, and add step counts to `steps`."""
    if isinstance(base, list):  # an elastic checkpoint has a list
        return base
    state = base.get("state") if isinstance(base, dict) else None
    param_groups = base.get("param_groups") if isinstance(base, dict) else None
    if not isinstance(state, dict) or not isinstance(param_groups, list):
        raise CheckpointError(f"{file.zip.path}: the base optimizer's state is missing")
    members = [group.get("params") if isinstance(group, dict) else None for group in param_groups]
    if not all(isinstance(indices, list) for indices in members):
        raise CheckpointError(f"{file.zip.path}: a group of the base optimizer has no parameters")
    indices = list(itertools.chain.from_iterable(indices or () for indices in members))
    if len(indices) != groups or not all(type(index) is int for index in indices):
        raise CheckpointError(f"{file.zip.path}: the base optimizer has different groups")
    steps += _steps_of_groups(file, state, param_groups)
    return [state.get(index) for index in indices]


def _steps_of_groups(
    file: StateFile, state: Mapping[Any, Any], groups: Sequence[Any]
) -> list[tuple[TorchZip, Any]]:
    """Return the step counts of an optimizer's groups, or [] if its states have step counts.

    Apex's FusedAdam counts steps by group. DeepSpeed's optimizers count steps by state, and leave
    the counts of groups at 0.
    """
    if any(isinstance(item, dict) and "step" in item for item in state.values()):
        return []
    return [
        (file.zip, item["step"]) for item in groups if isinstance(item, dict) and "step" in item
    ]


def _state_tensors(
    file: StateFile, state: Any, steps: list[tuple[TorchZip, Any]]
) -> dict[str, Any]:
    """Return the state tensors of a flat partition by kind, and add its step count to `steps`."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.zip.path}: the state of a partition is missing")
    tensors = {}
    for key, value in state.items():
        if key == "step":
            steps.append((file.zip, value))
        elif key in STATE_KINDS:
            tensors[STATE_KINDS[key]] = value
        else:
            raise CheckpointError(f"{file.zip.path}: optimizer state {show(key)} is not supported")
    return tensors


def read_divided(files: Sequence[StateFile], shapes: Shapes) -> States:
    """Return the states in the files of ZeRO 3, including fp32 masters of all weights.

    Args:
        files: A model-parallel rank's files, in the order of data-parallel ranks.
        shapes: The shapes of the rank's parameters by name, in the order of `param_shapes`.

    Raises:
        CheckpointError: Slices are missing or contradict each other, or a kind of optimizer state
            is not supported.
    """
    result = States()
    parts = defaultdict[tuple[str, str], list[tuple[TorchZip, TensorRef]]](list)
    for file in files:
        tree = _optimizer(file)
        masters = tree.get("fp32_flat_groups")
        if not isinstance(masters, list):
            raise CheckpointError(f"{file.zip.path}: fp32_flat_groups is missing")
        states = _states_of(file, tree.get("optimizer_state_dict"), len(masters), result.steps)
        flats = [
            {MASTER: master} | _state_tensors(file, state, result.steps)
            for master, state in zip(masters, states, strict=True)
        ]
        group, start = 0, 0
        for name, shape in shapes.items():
            remaining = -(-math.prod(shape) // len(files))
            while remaining:
                if group == len(masters):
                    raise CheckpointError(f"{file.zip.path}: too short for its parameters")
                size = _flat(file, masters[group]).shape[0]
                count = min(remaining, size - start)
                for kind, flat in flats[group].items():
                    if count:
                        window = _window(file, flat, start, count)
                        parts[kind, name].append((file.zip, window))
                remaining, start = remaining - count, start + count
                if start == size:
                    group, start = group + 1, 0
        if group != len(masters):
            raise CheckpointError(f"{file.zip.path}: longer than its parameters")
    for (kind, name), windows in parts.items():
        result.values[kind, name] = Value(shapes[name], torch.float32, tuple(windows))
    return result


def read_plain(file: StateFile, tree: Any, shapes: Shapes) -> States | None:
    """Return the states of an optimizer without ZeRO, in fp32.

    They are zero for a parameter that has no state; before the first update, all states are Adam's
    and zero. Megatron-DeepSpeed numbers parameters by group:
    first those with weight decay, then the others. With `--create-moe-param-group`, experts have
    two more groups, also with weight decay first.

    Args:
        file: The file.
        tree: The optimizer's state in the file.
        shapes: The shapes of the process's parameters by name, in the model's order.

    Returns:
        The states, or `None` if they have a different format.

    Raises:
        CheckpointError: The states do not match the parameters, or a kind of state is not
            supported.
    """
    state = tree.get("state") if isinstance(tree, dict) else None
    groups = tree.get("param_groups") if isinstance(tree, dict) else None
    if not isinstance(state, dict) or not isinstance(groups, list):
        return None
    has_expert_groups = any(
        isinstance(group, dict) and group.get("moe") is True for group in groups
    )

    def group_of(name: str) -> tuple[bool, bool]:
        is_decayed = not name.endswith("bias") and len(shapes[name]) > 1
        return has_expert_groups and local_expert(name) is not None, not is_decayed

    order = sorted(shapes, key=group_of)  # stable: the model's order in each group
    expected = [len(list(names)) for _, names in itertools.groupby(order, group_of)]
    members = [group.get("params") if isinstance(group, dict) else None for group in groups]
    sizes = [len(indices) if isinstance(indices, list) else None for indices in members]
    if sizes != expected:
        raise CheckpointError(f"{file.zip.path}: the optimizer's groups do not match the model's")
    indices = itertools.chain.from_iterable(indices or () for indices in members)
    result = States(steps=_steps_of_groups(file, state, groups))
    tensors = list[dict[str, Any]]()
    for index in indices:
        parameter_state = state.get(index) if type(index) is int else None
        # A parameter that no token has reached has no state yet.
        tensors.append(
            {} if parameter_state is None else _state_tensors(file, parameter_state, result.steps)
        )
    kinds = set[str]().union(*tensors) or {"exp_avg", "exp_avg_sq"}
    for name, parameter_tensors in zip(order, tensors, strict=True):
        for kind in sorted(kinds):
            ref = parameter_tensors.get(kind)
            if ref is not None and (not isinstance(ref, TensorRef) or ref.shape != shapes[name]):
                raise CheckpointError(f"{file.zip.path}: {kind} of {name} has a different shape")
            parts = () if ref is None else ((file.zip, ref),)
            result.values[kind, name] = Value(shapes[name], torch.float32, parts)
    return result


def _optimizer(file: StateFile) -> Mapping[str, Any]:
    tree = file.tree.get("optimizer_state_dict")
    if not isinstance(tree, dict):
        raise CheckpointError(f"{file.zip.path}: optimizer_state_dict is missing")
    return tree


def _flat(file: StateFile, flat: Any) -> TensorRef:
    if not isinstance(flat, TensorRef) or len(flat.shape) != 1 or flat.stride != (1,):
        raise CheckpointError(f"{file.zip.path}: a partition is not a flat tensor")
    return flat


def _window(file: StateFile, flat: Any, start: Any, count: Any) -> TensorRef:
    """Return a reference to `count` elements of a flat tensor, beginning at `start`."""
    whole = _flat(file, flat)
    is_inside = type(start) is int and type(count) is int and start >= 0 and count > 0
    if not is_inside or start + count > whole.shape[0]:
        range_text = f"{show(start)} + {show(count)}"
        raise CheckpointError(f"{file.zip.path}: elements {range_text} of {whole.shape[0]:,}")
    return TensorRef(whole.storage, whole.offset + start, (count,), (1,))
