"""Which optimizer state in a file belongs to which parameter.

Megatron's optimizer numbers parameters by group: first those that decay, then biases and 1-D
ones, each group in the model's order. 16-bit runs keep fp32 masters in the same order. The
distributed optimizer keeps all of it in flat tensors instead: see `flat_states`.


`distrib_optim.pt`: optimizer states as the distributed optimizer of 23.06 and 23.08 keeps them.

For every virtual stage and gradient type three flat fp32 tensors, `param`, `exp_avg` and
`exp_avg_sq`. All parameters of the stage lie in them in reverse order of registration, padded at
the end to a multiple of the data-parallel size. The Llama-2 fork, and Megatron from late 2023,
cut them into buckets: a list of tensors, each padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.entries import LazyTensor
from megatron.checkpoint.legacy.names import Parameter
from megatron.checkpoint.legacy.unpickler import TensorRef, show
from megatron.errors import CheckpointError

_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's tensors and counters in one file.

    Attributes:
        tensors: "<our parameter>.exp_avg" and so on.
        steps: the step count wherever the file has it, numbers or scalar tensors; all should agree.
        loss_scale: `grad_scaler` of the file, empty without one.
    """

    tensors: dict[str, TensorRef] = field(default_factory=dict)
    steps: list[Any] = field(default_factory=list)
    loss_scale: dict[str, Any] = field(default_factory=dict)


def read_optimizer(optimizer: Any, parameters: Sequence[Parameter]) -> OptimizerState | None:
    """The state in a file's `optimizer`; None where it is kept elsewhere or was not saved.

    Raises:
        CheckpointError: number or shapes of states do not match the parameters.
    """
    if not isinstance(optimizer, dict):
        return None
    torch_state = optimizer.get("optimizer", optimizer.get("optimizer_state_dict", optimizer))
    if not isinstance(torch_state, dict) or not isinstance(torch_state.get("state"), dict):
        return None  # the distributed optimizer keeps its state in distrib_optim.pt
    groups = torch_state.get("param_groups", [])
    members = _assign(groups, parameters)
    scaler = optimizer.get("grad_scaler", {})
    result = OptimizerState(loss_scale=scaler if isinstance(scaler, dict) else {})
    for index, parameter in members.items():
        _add_state(result, torch_state["state"].get(index, {}), parameter)
    result.steps.extend(group["step"] for group in groups if "step" in group)
    masters = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
    if masters is not None:
        _add_masters(result, masters, _split(parameters))
    return result


def _split(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """The groups that are not empty, in Megatron's order."""
    decayed = [one for one in parameters if one.is_decayed]
    others = [one for one in parameters if not one.is_decayed]
    return [group for group in (decayed, others) if group]


def _assign(groups: Any, parameters: Sequence[Parameter]) -> dict[int, Parameter]:
    """The parameter of every number in `param_groups`."""
    expected = _split(parameters)
    if not isinstance(groups, list) or len(groups) != len(expected):
        raise CheckpointError(
            "the optimizer's parameter groups are not (decayed, not decayed): groups with a "
            "learning rate of their own are not read"
        )
    members: dict[int, Parameter] = {}
    for group, wanted in zip(groups, expected, strict=True):
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list) or len(numbers) != len(wanted):
            raise CheckpointError("the optimizer's groups do not match the model's parameters")
        members.update(zip(numbers, wanted, strict=True))
    return members


def _add_state(result: OptimizerState, state: Any, parameter: Parameter) -> None:
    for key, value in state.items():
        if key == "step":
            result.steps.append(value)
        elif key not in _KINDS:
            raise CheckpointError(f"optimizer state {show(key)} is not known")
        else:
            _add(result, parameter, _KINDS[key], value)


def _add_masters(
    result: OptimizerState, masters: Any, expected: Sequence[Sequence[Parameter]]
) -> None:
    if not isinstance(masters, list) or [len(group) for group in masters] != [
        len(group) for group in expected
    ]:
        raise CheckpointError("fp32_from_fp16_params does not match the model's parameters")
    for group, wanted in zip(masters, expected, strict=True):
        for tensor, parameter in zip(group, wanted, strict=True):
            _add(result, parameter, "master", tensor)


def _add(result: OptimizerState, parameter: Parameter, kind: str, tensor: Any) -> None:
    """Refuses a state of another shape: the sure sign of a wrong order."""
    if not isinstance(tensor, TensorRef) or tensor.shape != parameter.tensor.shape:
        raise CheckpointError(f"{kind} of {parameter.name} does not have the parameter's shape")
    if parameter.name is not None:  # a tied copy's state equals that of the first stage
        result.tensors[f"{parameter.name}.{kind}"] = tensor


def read_distributed(
    optimizer: Any, flat: Mapping[Any, Any], chunks: Sequence[Sequence[Parameter]]
) -> OptimizerState:
    """The state in a rank's `distrib_optim.pt`.

    Args:
        optimizer: the tree `optimizer` of the rank's other file: counters.
        flat: the file's tree.
        chunks: the parameters of each virtual stage, in the model's order.

    Raises:
        CheckpointError: flat tensors are missing, or too short for the parameters.
    """
    optimizer = optimizer if isinstance(optimizer, dict) else {}
    inner = optimizer.get("optimizer")
    groups = inner.get("param_groups", []) if isinstance(inner, dict) else []
    scaler = optimizer.get("grad_scaler", {})
    result = OptimizerState(loss_scale=scaler if isinstance(scaler, dict) else {})
    result.steps.extend(group["step"] for group in groups if "step" in group)
    for index, parameters in enumerate(chunks):
        by_type = flat.get(index)
        if not isinstance(by_type, dict) or len(by_type) != 1:
            raise CheckpointError(f"virtual stage {index} is not there with one gradient type")
        (states,) = by_type.values()
        shapes = [parameter.tensor.shape for parameter in parameters]
        for key, kind in FLAT_STATES.items():
            windows = find_flat(states.get(key), shapes)
            for parameter, window in zip(parameters, windows, strict=True):
                in_16_bits = parameter.tensor.storage.dtype != torch.float32
                if kind != "master" or in_16_bits:  # an fp32 weight is its own master
                    _add(result, parameter, kind, window)
    return result


# Their keys, with the kinds of our states.
FLAT_STATES = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def offsets(numels: Sequence[int]) -> list[int]:
    """Where each parameter begins, in order of registration: the last one at 0."""
    after = list(accumulate(reversed(numels), initial=0))
    return list(reversed(after[:-1]))


def lazy_flat(parts: Sequence[Tensor], data_parallel: int) -> LazyTensor:
    """The flat tensor of a stage, put together when it is read.

    Args:
        parts: of the parameters, in order of registration.
        data_parallel: processes among which it is cut.
    """
    total = sum(part.numel() for part in parts)
    padded = -(-total // data_parallel) * data_parallel
    return LazyTensor((padded,), torch.float32, partial(_fill, parts, padded))


def _fill(parts: Sequence[Tensor], size: int) -> Tensor:
    flat = torch.zeros(size)
    for start, part in zip(offsets([part.numel() for part in parts]), parts, strict=True):
        flat[start : start + part.numel()] = part.reshape(-1)
    return flat


def find_flat(flat: Any, shapes: Sequence[tuple[int, ...]]) -> list[TensorRef]:
    """Where each parameter's values are in a file's flat tensor, or in its buckets.

    Args:
        flat: a tensor of the file, or a list of them.
        shapes: of the parameters, in order of registration.

    Raises:
        CheckpointError: not such a tensor, or not as long as the parameters are.
    """
    buckets = flat if isinstance(flat, list) else [flat]
    if not all(isinstance(one, TensorRef) and len(one.shape) == 1 for one in buckets):
        raise CheckpointError("a flat optimizer state is missing, or no tensor")
    windows = list(_deal(buckets, list(reversed(shapes))))
    return list(reversed(windows))


def _deal(buckets: Sequence[TensorRef], shapes: Sequence[tuple[int, ...]]) -> Iterator[TensorRef]:
    """Windows into the buckets, in their order; a bucket is full where the next has no room."""
    index, start = 0, 0
    for shape in shapes:
        size = math.prod(shape)
        while index < len(buckets) and start + size > buckets[index].shape[0]:
            index, start = index + 1, 0
        if index == len(buckets):
            raise CheckpointError("flat optimizer states are shorter than the parameters")
        bucket = buckets[index]
        yield TensorRef(bucket.storage, bucket.offset + start, shape, _strides(shape))
        start += size
    if index != len(buckets) - 1:
        raise CheckpointError("flat optimizer states have more buckets than the parameters fill")


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
