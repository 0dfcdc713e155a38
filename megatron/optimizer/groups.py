"""Which parameters decay, and which have a learning rate of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated alike, in the model's order.

    Attributes:
        is_decayed: weight decay applies.
        is_decoupled: the learning rate is that of --decoupled-lr.
    """

    is_decayed: bool
    is_decoupled: bool
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Matrices and embeddings decay; biases (of any shape) and 1-D tensors do not."""
    is_bias = name.rpartition(".")[2] == "bias"
    return not is_bias and parameter.ndim > 1


def is_vocabulary(parameter: nn.Parameter) -> bool:
    """The weights of the word embeddings and of the output layer: what Megatron Core calls
    embedding or output parameters. Positions, token types, biases and other heads are not."""
    spec = getattr(parameter, "spec", None)
    return spec is not None and spec.is_vocabulary


def split_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, decouples: bool = False
) -> list[ParameterGroup]:
    """The decayed group, then the other; an empty one is left out.

    Args:
        decouples: of both what has a learning rate of its own stands apart, at the end.
    """
    members: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {
        (decays, apart): [] for apart in (False, True) for decays in (True, False)
    }
    for name, p in named_parameters:
        if p.requires_grad:
            members[is_decayed(name, p), decouples and is_vocabulary(p)].append((name, p))
    groups = []
    for (decays, apart), group in members.items():
        if group:
            names, parameters = zip(*group, strict=True)
            groups.append(ParameterGroup(decays, apart, names, parameters))
    return groups
