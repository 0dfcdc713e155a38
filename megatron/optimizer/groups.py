"""Parameter groups: parameters that share an update rule, weight decay and learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from torch import nn

from megatron.optimizer.rules import RuleChoice
from megatron.optimizer.update import UpdateRule


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated in the same way, in the model's order.

    Attributes:
        rule: Update rule of the group.
        is_decayed: Whether weight decay applies.
        is_decoupled: Whether the learning rate is set by --decoupled-lr.
        names: Names of the parameters.
        parameters: The parameters themselves.
    """

    rule: UpdateRule
    is_decayed: bool
    is_decoupled: bool
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies to a parameter.

    Matrices and embeddings decay; biases (of any shape) and 1-D tensors do not.
    """
    return parameter.ndim > 1 and name.rpartition(".")[2] != "bias"


def is_vocabulary(parameter: nn.Parameter) -> bool:
    """Return whether this is the weight of the word embedding or of the output layer.

    Megatron Core calls these embedding or output parameters. Position and token-type embeddings,
    biases and other heads are not included.
    """
    spec = getattr(parameter, "spec", None)
    return spec is not None and spec.is_vocabulary


def split_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    choose_rule: RuleChoice,
    *,
    decouples: bool = False,
) -> list[ParameterGroup]:
    """Split parameters into groups, with each rule's decayed group before its other group.

    Empty groups and parameters without gradients are left out.

    Args:
        named_parameters: Parameters of the model on this process.
        choose_rule: Function that returns a parameter's update rule.
        decouples: Whether the word embedding and the output layer have their own learning rate.
            They then form separate groups, which come after each rule's other groups.
    """
    members: dict[tuple[UpdateRule, bool, bool], dict[str, nn.Parameter]] = {}
    for name, p in named_parameters:
        if p.requires_grad:
            rule = choose_rule(name, p)
            for decoupled, decays in product((False, True), (True, False)):  # in a fixed order
                members.setdefault((rule, decoupled, decays), {})
            members[rule, decouples and is_vocabulary(p), is_decayed(name, p)][name] = p
    return [
        ParameterGroup(rule, decays, decoupled, tuple(group), tuple(group.values()))
        for (rule, decoupled, decays), group in members.items()
        if group
    ]
