"""Parameter groups: parameters that share an update rule, weight decay and learning rate."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from torch import nn

from megatron.optimizer.rules import RuleChoice
from megatron.optimizer.update import UpdateRule

_QK_NORM = re.compile(r"\.(query|key)_norm\.\w+$")


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated in the same way, in the model's order.

    Attributes:
        rule: The update rule.
        is_decayed: Whether weight decay applies.
        is_decoupled: Whether --decoupled-lr sets the learning rate.
        names: The names of the parameters.
        parameters: The parameters.
    """

    rule: UpdateRule
    is_decayed: bool
    is_decoupled: bool
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


def is_decayed(name: str, parameter: nn.Parameter, *, includes_qk_norms: bool = False) -> bool:
    """Return whether weight decay applies to a parameter.

    It applies to matrices and embeddings, but not to biases (of any shape) or 1-D tensors.

    Args:
        name: The parameter's name.
        parameter: The parameter.
        includes_qk_norms: Whether weight decay also applies to the norms of queries and keys.
    """
    if includes_qk_norms and _QK_NORM.search(name):
        return True
    return parameter.ndim > 1 and name.rpartition(".")[2] != "bias"


def is_vocabulary(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is the weight of the word embedding or of the output layer.

    Megatron Core calls these "embedding or output" parameters. Position and token-type embeddings,
    biases and other heads are not included.
    """
    spec = getattr(parameter, "spec", None)
    return spec is not None and spec.is_vocabulary


def split_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    choose_rule: RuleChoice,
    *,
    decouples: bool = False,
    decays_qk_norms: bool = False,
) -> list[ParameterGroup]:
    """Split the parameters that require gradients into groups.

    Each rule has up to two groups, the one with weight decay first.

    Args:
        named_parameters: The parameters of the model in this process.
        choose_rule: A function that returns the update rule of a parameter.
        decouples: Whether the word embedding and the output layer have their own learning rate.
            They then form separate groups, which follow the rule's other groups.
        decays_qk_norms: Whether weight decay also applies to the norms of queries and keys.
    """
    members: dict[tuple[UpdateRule, bool, bool], dict[str, nn.Parameter]] = {}
    for name, p in named_parameters:
        if p.requires_grad:
            rule = choose_rule(name, p)
            for decoupled, decays in product((False, True), (True, False)):  # in a fixed order
                members.setdefault((rule, decoupled, decays), {})
            decays = is_decayed(name, p, includes_qk_norms=decays_qk_norms)
            members[rule, decouples and is_vocabulary(p), decays][name] = p
    return [
        ParameterGroup(rule, decays, decoupled, tuple(group), tuple(group.values()))
        for (rule, decoupled, decays), group in members.items()
        if group
    ]
