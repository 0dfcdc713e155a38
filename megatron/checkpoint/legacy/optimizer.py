"""Match the optimizer states in Megatron-LM's files to parameters.

Megatron's optimizer numbers parameters by group: first those with weight decay, then biases and
other 1-D parameters, each group in the model's order. 16-bit runs store fp32 masters in the same
order.

The distributed optimizer of 23.06 and 23.08 stores its states in `distrib_optim.pt`: three flat
fp32 tensors, `param`, `exp_avg` and `exp_avg_sq`, for every virtual stage and gradient dtype. Each
contains all parameters of the stage in reverse order of registration, padded at the end to a
multiple of the data-parallel size. The Llama-2 fork, and Megatron from late 2023, split each of
them into buckets: a list of tensors, each padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.entries import LazyTensor
from megatron.checkpoint.legacy.names import Parameter
from megatron.checkpoint.legacy.unpickler import TensorRef, show
from megatron.errors import CheckpointError

# Native names of the kinds of optimizer states, by Megatron's key. FLAT_KINDS is for flat tensors.
STATE_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}
FLAT_KINDS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's tensors and counters in one file.

    Attributes:
        tensors: The states by name, such as "<our parameter>.exp_avg", and index of the expert in
            the file (None outside experts).
        steps: All step counts in the file, as numbers or scalar tensors. They should agree.
        loss_scale: The file's `grad_scaler`, or empty if it has none.
    """

    tensors: dict[tuple[str, int | None], TensorRef] = field(default_factory=dict)
    steps: list[Any] = field(default_factory=list)
    loss_scale: dict[str, Any] = field(default_factory=dict)

    def add(self, parameter: Parameter, kind: str, tensor: Any) -> None:
        """Add a state of a parameter.

        Args:
            parameter: The parameter.
            kind: The native name of the kind of state, such as "exp_avg".
            tensor: A reference to the values of the state.

        Raises:
            CheckpointError: The state and the parameter differ in shape, so states and parameters
                were not matched in the right order.
        """
        if not isinstance(tensor, TensorRef) or tensor.shape != parameter.tensor.shape:
            raise CheckpointError(f"{kind} of {parameter.name} does not have the parameter's shape")
        if parameter.name is not None:  # the state of a tied copy equals that of the original
            self.tensors[f"{parameter.name}.{kind}", parameter.expert] = tensor


def _counters(optimizer: Mapping[str, Any], groups: Sequence[Any]) -> OptimizerState:
    """Return an optimizer state with only the step counts and the loss scale."""
    scaler = optimizer.get("grad_scaler", {})
    steps = [group["step"] for group in groups if "step" in group]
    return OptimizerState(steps=steps, loss_scale=scaler if isinstance(scaler, dict) else {})


def read_optimizers(optimizer: Any, parameters: Sequence[Parameter]) -> OptimizerState | None:
    """Return the states in a file's `optimizer`, which may be a list of two optimizers.

    If Megatron Core distributes experts over processes, they have a separate optimizer, the second
    in the list.

    Args:
        optimizer: The `optimizer` tree of the file.
        parameters: The parameters in the file, in the model's order.

    Returns:
        The states, or None if they are in another file or were not saved, or if a list does not
        have two optimizers.

    Raises:
        CheckpointError: The number or the shapes of states do not match the parameters, or a kind
            of state or parameter group is not supported.
    """
    parameters = [
        parameter for parameter in parameters if not str(parameter.name).endswith("expert_bias")
    ]
    if not isinstance(optimizer, list):
        return read_optimizer(optimizer, parameters)
    result = OptimizerState()
    for index, part in enumerate(optimizer):
        members = [p for p in parameters if (p.expert is not None) is (index == 1)]
        state = read_optimizer(part, members) if len(optimizer) == 2 else None
        if state is None:
            return None
        result.tensors.update(state.tensors)
        result.steps.extend(state.steps)
        result.loss_scale.update(state.loss_scale)
    return result


def read_optimizer(optimizer: Any, parameters: Sequence[Parameter]) -> OptimizerState | None:
    """Return the states in a single `optimizer`, or None if they are elsewhere or were not saved.

    Raises:
        CheckpointError: The number or the shapes of states do not match the parameters, or a kind
            of state or parameter group is not supported.
    """
    if not isinstance(optimizer, dict):
        return None
    torch_state = optimizer.get("optimizer", optimizer.get("optimizer_state_dict", optimizer))
    if not isinstance(torch_state, dict) or not isinstance(torch_state.get("state"), dict):
        return None  # the distributed optimizer stores its states in distrib_optim.pt
    groups = torch_state.get("param_groups", [])
    by_decay = [
        [parameter for parameter in parameters if parameter.is_decayed is decays]
        for decays in (True, False)
    ]
    expected = [group for group in by_decay if group]
    if isinstance(groups, list):  # Megatron Core's groups may be in any order, and may be empty
        groups = [
            group for group in groups if not (isinstance(group, dict) and group.get("params") == [])
        ]
        first = groups[0].get("wd_mult") if groups and isinstance(groups[0], dict) else None
        if type(first) in (int, float) and not first:
            expected.reverse()
    if not isinstance(groups, list) or len(groups) != len(expected):
        raise CheckpointError(
            "the optimizer's parameter groups are not one with and one without weight decay: "
            "groups with their own learning rate are not supported"
        )
    members: dict[int, Parameter] = {}
    for group, expected_parameters in zip(groups, expected, strict=True):
        indices = group.get("params") if isinstance(group, dict) else None
        if not isinstance(indices, list) or len(indices) != len(expected_parameters):
            raise CheckpointError("the optimizer's groups do not match the model's parameters")
        members.update(zip(indices, expected_parameters, strict=True))
    result = _counters(optimizer, groups)
    for index, parameter in members.items():
        for key, value in torch_state["state"].get(index, {}).items():
            if key == "step":
                result.steps.append(value)
            elif key not in STATE_KINDS:
                raise CheckpointError(f"optimizer state {show(key)} is not supported")
            else:
                result.add(parameter, STATE_KINDS[key], value)
    masters = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
    return result if masters is None else _with_masters(result, masters, expected)


def _with_masters(
    result: OptimizerState, masters: Any, expected: Sequence[Sequence[Parameter]]
) -> OptimizerState:
    sizes = [len(group) for group in expected]
    if not isinstance(masters, list) or [len(group) for group in masters] != sizes:
        raise CheckpointError("fp32_from_fp16_params does not match the model's parameters")
    for tensor, parameter in zip(chain(*masters), chain(*expected), strict=True):
        result.add(parameter, "master", tensor)
    return result


def read_distributed(
    optimizer: Any, flat: Mapping[Any, Any], chunks: Sequence[Sequence[Parameter]]
) -> OptimizerState:
    """Return the states in a rank's `distrib_optim.pt`.

    Args:
        optimizer: The `optimizer` tree of the rank's other file, which contains the counters.
        flat: The tree of `distrib_optim.pt`.
        chunks: The parameters of each virtual stage, in the model's order.

    Raises:
        CheckpointError: Flat tensors are missing, their lengths do not match the parameters, or a
            virtual stage does not have gradients of exactly one dtype.
    """
    optimizer = optimizer if isinstance(optimizer, dict) else {}
    inner = optimizer.get("optimizer")
    result = _counters(optimizer, inner.get("param_groups", []) if isinstance(inner, dict) else [])
    for index, parameters in enumerate(chunks):
        by_type = flat.get(index)
        if not isinstance(by_type, dict) or len(by_type) != 1:
            raise CheckpointError(f"virtual stage {index} does not have exactly one gradient type")
        (states,) = by_type.values()
        shapes = [parameter.tensor.shape for parameter in parameters]
        for key, kind in FLAT_KINDS.items():
            for parameter, window in zip(parameters, _split(states.get(key), shapes), strict=True):
                in_16_bits = parameter.tensor.storage.dtype != torch.float32
                if kind != "master" or in_16_bits:  # an fp32 weight is its own master
                    result.add(parameter, kind, window)
    return result


def _split(flat: Any, shapes: Sequence[tuple[int, ...]]) -> list[TensorRef]:
    """Return references to each parameter's values in a flat tensor, or in its buckets.

    A parameter that does not fit into the current bucket begins the next one.

    Args:
        flat: A 1-D tensor of the file, or a list of such buckets.
        shapes: The shapes of the parameters, in order of registration.

    Raises:
        CheckpointError: A bucket is not a 1-D tensor, or the lengths do not match the parameters.
    """
    buckets = flat if isinstance(flat, list) else [flat]
    if not all(isinstance(bucket, TensorRef) and len(bucket.shape) == 1 for bucket in buckets):
        raise CheckpointError("a flat optimizer state is missing or is not a tensor")
    index, start, refs = 0, 0, list[TensorRef]()
    for shape in reversed(shapes):
        size = math.prod(shape)
        while index < len(buckets) and start + size > buckets[index].shape[0]:
            index, start = index + 1, 0
        if index == len(buckets):
            raise CheckpointError("flat optimizer states are shorter than the parameters")
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        bucket = buckets[index]
        refs.append(TensorRef(bucket.storage, bucket.offset + start, shape, strides))
        start += size
    if index != len(buckets) - 1:
        raise CheckpointError("flat optimizer states have more buckets than the parameters fill")
    return refs[::-1]


def flat_tensor(parts: Sequence[Tensor], data_parallel: int) -> LazyTensor:
    """Return the flat fp32 tensor of a stage, which is assembled only when it is read.

    Args:
        parts: The states of the parameters, in order of registration.
        data_parallel: The number of processes that share the tensor. Its length is padded to a
            multiple of this number.
    """
    total = sum(part.numel() for part in parts)
    padded = -(-total // data_parallel) * data_parallel

    def fill() -> Tensor:
        flat, start = torch.zeros(padded), 0
        for part in reversed(parts):
            flat[start : start + part.numel()] = part.reshape(-1)
            start += part.numel()
        return flat

    return LazyTensor((padded,), torch.float32, fill)
