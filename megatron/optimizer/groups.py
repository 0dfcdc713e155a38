"""Which parameters decay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated alike, in the model's order."""

    is_decayed: bool
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Matrices and embeddings decay; biases (of any shape) and 1-D tensors do not."""
    is_bias = name.rpartition(".")[2] == "bias"
    return not is_bias and parameter.ndim > 1


def split_groups(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[ParameterGroup]:
    """The decayed group, then the other; an empty one is left out."""
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    groups = []
    for wanted in (True, False):
        members = [(name, p) for name, p in trained if is_decayed(name, p) == wanted]
        if members:
            names, parameters = zip(*members, strict=True)
            groups.append(ParameterGroup(wanted, names, parameters))
    return groups
