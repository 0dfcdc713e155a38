"""The tensors in an adapter's PEFT files: adapter_config.json and adapter_model.safetensors.

PEFT names the tensors of an adapter after the module of `transformers` that it adapts. If the
module computes several of our projections at once, its adapter combines the adapters of those
projections (`peft_slices`), and adapter_config.json lists its rank and alpha as exceptions
(`rank_pattern`, `alpha_pattern`). The adapters of a mixture's experts are stacked in two matrices
(`target_parameters`): A [experts * rank, in], B [out, rank * experts]. The head of a reward model
is trained in full alongside the adapters, and is stored in the same file (`modules_to_save`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.checkpoint.huggingface.families import families, family_for, mismatches
from megatron.checkpoint.huggingface.peft_slices import AdapterSlice, adapter_slices
from megatron.checkpoint.huggingface.rules import Family
from megatron.checkpoint.reader import TensorMeta
from megatron.config.adapters import plain_network
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from megatron.parallel.adapter import AdaptedLayer, Adapter
from megatron.parallel.expert_linear import ExpertAdapter, ExpertLinear

HEAD = "score"  # the head of a reward model, both here and in PEFT
_PREFIX = "base_model.model."
# PEFT also writes the frozen weight of an adapted output layer.
FROZEN_OUTPUT = f"{_PREFIX}lm_head.base_layer.weight"
_LAYER = re.compile(r".*?layers\.\d+\.")
_EXPERTS = "mlp.experts"  # the module of transformers 5 in which all experts share a weight
_ROUTER = ".router.adapter."  # in native names; rarely a linear layer in transformers 5
_AXIS = {"a": 0, "b": 1}  # the dimension of the rank
_SUFFIXES = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


@dataclass(frozen=True)
class PeftTensor:
    """One of our tensors, and the tensor in PEFT's files that contains it.

    Attributes:
        native: Our name for the tensor.
        name: PEFT's name for the tensor that contains it.
        meta: The shape and dtype of our tensor.
        adapter_slice: The part of PEFT's adapter that corresponds to our adapter; `None` for the
            head of a reward model.
    """

    native: str
    name: str
    meta: TensorMeta
    adapter_slice: AdapterSlice | None = None

    @property
    def kind(self) -> str:
        """The tensor's role: "a", "b" or "magnitude" in an adapter, "weight" in a head."""
        return self.native.rpartition(".")[2]

    @property
    def rank_axis(self) -> int | None:
        """The dimension of PEFT's tensor that is the rank, or `None` if there is none."""
        return _AXIS.get(self.kind)

    @property
    def is_stacked(self) -> bool:
        """Whether our tensor contains the adapters of all experts of a layer."""
        return _is_stacked(self.meta.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in which PEFT would store our tensor in an adapter of its own."""
        return tuple(stored_adapter(torch.empty(self.meta.shape, device="meta"), self.kind).shape)

    @property
    def adapts_parameter(self) -> bool:
        """Whether PEFT lists the target among `target_parameters`, not `target_modules`."""
        return _ROUTER in self.native or self.is_stacked

    @property
    def target(self) -> str:
        """The name of the module or parameter that the tensor adapts."""
        module = self.name.removeprefix(_PREFIX).rpartition(".lora_")[0]
        if _ROUTER in self.native:
            return f"{module}.weight"
        if not module.removesuffix(".base_layer").endswith(_EXPERTS):
            return module
        weight = "gate_up_proj" if ".up.adapter." in self.native else "down_proj"
        return f"{module.removesuffix('.base_layer')}.{weight}"


PeftNames = Mapping[str, PeftTensor]  # by native name


def peft_names(
    model: ModelConfig, layers: Mapping[str, AdaptedLayer | ExpertLinear], family: Family, rows: int
) -> PeftNames:
    """Return the tensor in PEFT's files for each tensor of our adapters, by native name.

    The head of a reward model is included.

    Args:
        model: The network with adapters.
        layers: Its layers that have adapters, by name.
        family: The family whose module names PEFT uses.
        rows: Number of rows of the word embedding.

    Raises:
        CheckpointError: A module of the family contains only a part of a projection, or PEFT does
            not support its experts.
    """
    peft_tensors: dict[str, PeftTensor] = {}
    rules = {rule.name: rule for rule in family.rules(plain_network(model), rows)}
    for layer, modules in family.names(plain_network(model)):
        if layer == HEAD and model.reward_head:
            meta = TensorMeta((1, model.hidden_size), torch.float32)
            native = f"model.{HEAD}.weight"
            peft_tensors[native] = PeftTensor(native, f"{_PREFIX}{HEAD}.weight", meta)
        linear = layers.get(layer)
        if linear is None or not isinstance(linear.adapter, Adapter | ExpertAdapter):
            continue
        rule, hf_modules = rules[f"model.{layer}.weight"], tuple(modules)
        outputs = rule.shape[:-1]
        if isinstance(linear, ExpertLinear):
            if family.stacks_experts and f".{_EXPERTS}." not in hf_modules[0]:
                raise CheckpointError(
                    f"{hf_modules[0]} of a {family.name} model: PEFT takes its inputs for outputs: "
                    "convert the merged weights with --saver hf"
                )
            hf_modules = (_experts_module(layer, hf_modules[0], layers),)
            outputs = (1, *outputs[1:])
        is_separate = isinstance(linear, ExpertLinear) and not family.stacks_experts
        conversion = None if is_separate else rule.conversion
        slices = adapter_slices(linear.adapter, outputs, hf_modules, conversion)
        for projection, adapter_slice in slices.items():
            for kind, parameter in linear.adapter[projection].named_parameters():
                meta = TensorMeta(tuple(parameter.shape), parameter.dtype)
                name = f"{_PREFIX}{_module(adapter_slice.module, family)}.{_SUFFIXES[kind]}"
                native = f"model.{layer}.adapter.{projection}.{kind}"
                tensor = PeftTensor(native, name, meta, adapter_slice)
                peft_tensors.setdefault(native, tensor)
    return peft_tensors


def _module(name: str, family: Family) -> str:
    """Return the name of a module in `transformers`, given its name in a family's files."""
    if family.module_prefix is None or not name.startswith(family.prefix):
        return name
    return f"{family.module_prefix}{name.removeprefix(family.prefix)}"


def family_in(
    tensor_names: frozenset[str],
    model: ModelConfig,
    layers: Mapping[str, AdaptedLayer | ExpertLinear],
    rows: int,
    *,
    base: str | None = None,
) -> Family:
    """Return the first family that can express a network and matches the names in PEFT's files.

    If there is none, or no names are given, return the first family that can express the network.

    Args:
        tensor_names: The names of the tensors in PEFT's files.
        model: The network with adapters.
        layers: Its layers that have adapters, by name.
        rows: Number of rows of the word embedding.
        base: The family of the adapted model, which is tried first, if known.

    Raises:
        CheckpointError: No family can express the network.
    """
    plain = plain_network(model)
    fallback = family_for(plain, rows, None)
    known = families() if tensor_names else {}
    for name in sorted(known, key=lambda name: name != base):
        if mismatches(known[name], plain, rows):
            continue
        try:
            names = {peft.name for peft in peft_names(model, layers, known[name], rows).values()}
        except CheckpointError:
            continue
        if names.issuperset(tensor_names - {FROZEN_OUTPUT}):
            return known[name]
    return fallback


def _experts_module(
    layer: str, hf_module: str, layers: Mapping[str, AdaptedLayer | ExpertLinear]
) -> str:
    """Return the name of PEFT's module that adapts a weight of all experts.

    PEFT wraps the experts' module once per weight; the wrapper for the last weight is outermost.

    Args:
        layer: The native name of the layer.
        hf_module: The Hugging Face module of its first tensor.
        layers: The layers that have adapters, by name.
    """
    match = _LAYER.match(hf_module)
    assert match is not None
    is_inner = layer.endswith(".up") and f"{layer.removesuffix('.up')}.down" in layers
    return f"{match.group()}{_EXPERTS}{'.base_layer' if is_inner else ''}"


def _is_stacked(shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape belongs to an adapter of experts."""
    return len(shape) > 2


def stored_adapter(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return an adapter's tensor in the shape that PEFT stores, but with our order of rows.

    Args:
        tensor: The tensor; for experts, A [experts, rank, in] or B [experts, ..., rank].
        kind: "a", "b" or "magnitude".
    """
    if not _is_stacked(tensor.shape):
        return tensor
    if kind == "a":
        return tensor.flatten(0, 1)
    return tensor.flatten(1, -2).permute(1, 2, 0).flatten(1).contiguous()
