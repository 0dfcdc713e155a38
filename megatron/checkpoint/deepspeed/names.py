"""DeepSpeed's parameter names and native names.

Names in files are first converted to those of a whole model, such as
"language_model.encoder.layers.3.mlp...". A file contains either

    nested dicts         whose keys are joined by dots, or
    a PipelineModule     with the names "5.mlp..." for the layer in layer_05-*.pt, and
                         "tied_modules.embed..." for embeddings that the output shares
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from megatron.checkpoint.legacy.names import native_name
from megatron.errors import CheckpointError

_MODEL, _ENCODER = "language_model.", "language_model.encoder."
_TIED = "tied_modules.embed."
_IN_PIPELINE = re.compile(r"(\d{1,6})\.(.+)")
_FIRST_OF_LAYER = "input_layernorm.weight"
_EXPERT = re.compile(
    r"(language_model\.encoder\.layers\.\d{1,6}\.mlp\.)"
    r"deepspeed_moe\.experts\.deepspeed_experts\.(\d{1,6})\.(.+)"
)
_MIXTURE = re.compile(r"language_model\.encoder\.(layers\.\d{1,6}\.mlp)\.(.+)")
_GATE = "deepspeed_moe.gate.wg.weight"
# Modules of a mixture in addition to its experts: the MLP of residual experts, and its weight.
_MIXTURE_MODULES = {
    _GATE: "router.weight",
    "coefficient.weight": "coefficient.weight",
    "coefficient.bias": "coefficient.bias",
    **{
        f"mlp.dense_{deepspeed}.{kind}": f"shared.{native}.{kind}"
        for deepspeed, native in (("h_to_4h", "up"), ("4h_to_h", "down"))
        for kind in ("weight", "bias")
    },
}
_EXPERTS = "deepspeed_moe.experts.deepspeed_experts."
_MAX_DEPTH = 4
_MAX_NAMES = 200_000


class Destination(NamedTuple):
    """Our parameter that corresponds to one of DeepSpeed's.

    Attributes:
        name: The native name of the parameter.
        dense: The native name of the corresponding parameter in a dense layer, which determines row
            order and split.
        expert: The expert's index in the first dimension of our tensor; `None` outside experts.
    """

    name: str
    dense: str
    expert: int | None = None


def flatten(tree: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, leaf) for nested dicts.

    Raises:
        CheckpointError: The tree is deeper or larger than any model's, or a name is not a string.
    """
    if not isinstance(tree, dict):
        yield prefix, tree
        return
    if depth > _MAX_DEPTH or len(tree) > _MAX_NAMES:
        raise CheckpointError(f"{prefix or 'module'} has more entries than any model")
    for key, value in tree.items():
        if type(key) is not str:
            raise CheckpointError(f"{prefix or 'module'} contains a name that is not a string")
        yield from flatten(value, f"{prefix}.{key}" if prefix else key, depth + 1)


def first_layer(names: Iterable[str]) -> int:
    """Return the index of the first transformer layer in a PipelineModule, or 0 without one.

    Args:
        names: The names of parameters in the files.
    """
    matches = (_IN_PIPELINE.fullmatch(name) for name in names)
    layers = (int(match[1]) for match in matches if match and match[2] == _FIRST_OF_LAYER)
    return min(layers, default=0)


def whole_name(name: str, first: int) -> str:
    """Return a parameter's name in a model without a PipelineModule.

    Args:
        name: The name in the file.
        first: The index of the first transformer layer in the PipelineModule.
    """
    if name.startswith(_TIED):
        return f"{_MODEL}embedding.{name.removeprefix(_TIED)}"
    match = _IN_PIPELINE.fullmatch(name)
    if match is None:
        return name
    layer, inner = int(match[1]), match[2]
    if inner in ("weight", "bias"):
        return f"{_ENCODER}final_layernorm.{inner}"
    if inner == "lm_head.weight":
        return f"{_MODEL}output_layer.weight"
    if inner.startswith(("word_embeddings.", "position_embeddings.", "tokentype_embeddings.")):
        return f"{_MODEL}embedding.{inner}"
    return f"{_ENCODER}layers.{layer - first}.{inner}"


def local_expert(name: str) -> int | None:
    """Return the index of the expert in a parameter's name, or `None` outside experts."""
    match = _EXPERT.fullmatch(name)
    return int(match[2]) if match else None


def shift_expert(name: str, by: int) -> str:
    """Return a parameter's name with `by` added to the index of its expert, if it has one.

    Args:
        name: A name in which the expert is numbered within its process.
        by: The global index of the process's first expert.
    """
    match = _EXPERT.fullmatch(name)
    return f"{match[1]}{_EXPERTS}{int(match[2]) + by}.{match[3]}" if match else name


def is_gate(name: str) -> bool:
    """Return whether a parameter is the gate of a mixture, which chooses experts."""
    return name.endswith(f".{_GATE}")


def is_copy(name: str) -> bool:
    """Return whether a parameter is a redundant copy of an expert's parameter.

    Megatron-DeepSpeed leaves such copies among the other weights, as "encoderlayers.3.mlp...", in
    addition to the experts' own files.
    """
    return name.startswith("encoderlayers.") and f".{_EXPERTS}" in name


def is_derived(name: str) -> bool:
    """Return whether an entry of the tree is not a parameter, but derived from the flags."""
    return name.endswith(("_extra_state", "inv_freq"))


def destination_of(name: str) -> Destination:
    """Return our parameter that corresponds to one of DeepSpeed's.

    Args:
        name: DeepSpeed's name in a whole model (`whole_name`).

    Raises:
        CheckpointError: Our networks have no such parameter.
    """
    mixture = _MIXTURE.fullmatch(name)
    if mixture is not None and mixture[2] in _MIXTURE_MODULES:
        native = f"{mixture[1]}.{_MIXTURE_MODULES[mixture[2]]}"
        return Destination(native, native.replace(".shared.", "."))
    expert, dense = None, name
    match = _EXPERT.fullmatch(name)
    if match:
        expert, dense = int(match[2]), f"{match[1]}{match[3]}"
    try:
        if not dense.startswith(_MODEL):
            raise KeyError(dense)
        path = dense.removeprefix(_MODEL)
        full_name = native_name(path, {"encoder": 0}, has_decoder=False, is_first=True)
    except KeyError:
        raise CheckpointError(f"parameter {name[:200]} does not exist in our networks") from None
    if full_name is None:
        raise CheckpointError(f"parameter {name[:200]} is a copy of another")
    if expert is None:
        return Destination(full_name, full_name)
    if ".mlp." not in full_name:
        raise CheckpointError(f"parameter {name[:200]} does not exist in our networks")
    return Destination(full_name.replace(".mlp.", ".mlp.experts."), full_name, expert)
