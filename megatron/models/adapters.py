"""Adapters (LoRA) for linear layers, selected by the names of layers and projections.

`--lora-target-modules` accepts our names (`layers.0.attention.qkv`, or `layers.0.attention.qkv.key`
for one projection of that layer), Hugging Face's names (`k_proj`) and Megatron Core's
(`linear_qkv`). A pattern may also match the end of a name, starting after a dot.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from megatron.config.adapters import ALL_LINEAR
from megatron.config.model import ModelConfig
from megatron.errors import ConfigError
from megatron.models.bert import BertModel
from megatron.models.gpt import GPTModel
from megatron.models.head import Output
from megatron.models.network import Network
from megatron.models.plans import model_plan
from megatron.models.recurrence import RecurrentMixer
from megatron.models.router import Router
from megatron.models.t5 import T5Model
from megatron.parallel.adapter import WHOLE, Adapter, AdapterPlan, projections_of
from megatron.parallel.build import BuildContext
from megatron.parallel.expert_linear import ExpertAdapter, ExpertLinear
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout

AnyLinear = Linear | ExpertLinear | Output | Router
OUTPUT_LAYER = "output_layer"  # "output" would also name the output projections of attention
# The architectures that support adapters.
NETWORKS: dict[str, type[GPTModel | BertModel | T5Model]] = {
    "gpt": GPTModel,
    "bert": BertModel,
    "t5": T5Model,
}
_STACKS = ("layers.", "encoder.layers.", "decoder.layers.")
# Hugging Face's and Megatron Core's names, keyed by the last parts of our own names.
_EXTERNAL_NAMES = {
    "attention.qkv": ("linear_qkv", "qkv_proj", "query_key_value", "c_attn"),
    "attention.qkv.query": ("q_proj",),
    "attention.qkv.key": ("k_proj",),
    "attention.qkv.value": ("v_proj",),
    "attention.output": ("linear_proj", "o_proj"),
    "mlp.up": ("linear_fc1", "gate_up_proj", "dense_h_to_4h", "c_fc", "fc_in"),
    "mlp.up.gate": ("gate_proj",),
    "mlp.up.up": ("up_proj",),
    f"mlp.up.{WHOLE}": ("up_proj",),
    "mlp.down": ("linear_fc2", "down_proj", "dense_4h_to_h", "fc_out"),
    "experts.up": ("linear_fc1", "gate_up_proj"),
    "experts.down": ("linear_fc2", "down_proj"),
    "attention.query_down": ("linear_q_down_proj", "q_a_proj"),
    "attention.query_up": ("linear_q_up_proj", "linear_q_proj", "q_b_proj", "q_proj"),
    "attention.latent_down": ("linear_kv_down_proj", "kv_a_proj_with_mqa"),
    "attention.latent_up": ("linear_kv_up_proj", "kv_b_proj"),
}
# The same for recurrent mixers: Mamba-2 and gated delta nets.
_EXTERNAL_RECURRENT_NAMES = {
    "attention.input": ("in_proj",),
    "attention.input.qkvz": ("in_proj_qkvz",),
    "attention.input.ba": ("in_proj_ba",),
    "attention.output": ("out_proj",),
}
_MODULES = {
    "attention": ("attention", "self_attn", "self_attention"),
    "recurrent": ("attention", "linear_attn", "mixer"),
}


class AdapterTarget(NamedTuple):
    """A linear layer, or one of its projections, that may have an adapter of its own.

    Attributes:
        layer: The global name of the layer.
        projection: The name of the projection.
        is_recurrent: Whether the layer belongs to a recurrent mixer.
        is_optional: Whether only a pattern that names the layer itself selects the target, as in
            PEFT. This is the case for the output layer and for routers.
    """

    layer: str
    projection: str
    is_recurrent: bool = False
    is_optional: bool = False


def linear_layers(model: nn.Module) -> Iterator[tuple[str, AnyLinear]]:
    """Yield the name and module of each linear layer that can have an adapter."""
    for name, module in model.named_modules():
        is_in_layer = isinstance(module, Linear | ExpertLinear | Router) and name.startswith(
            _STACKS
        )
        if is_in_layer or isinstance(module, Output):
            yield name, module


def targets_of(model: nn.Module) -> Iterator[AdapterTarget]:
    """Yield each linear layer or projection of a model that may have an adapter."""
    for name, layer in linear_layers(model):
        mixer = model.get_submodule(name.rpartition(".")[0])
        for projection in projections_of(layer):
            is_optional = isinstance(layer, Output | Router)
            yield AdapterTarget(name, projection, isinstance(mixer, RecurrentMixer), is_optional)


def names_of(target: AdapterTarget) -> list[str]:
    """Return every name of a target, including the names of its layer."""
    layer, projection, is_recurrent, is_optional = target
    if is_optional:
        parent, _, module = layer.rpartition(".")
        if module == "output":
            return [OUTPUT_LAYER, "lm_head"]
        return [layer, f"{layer}.weight", f"{parent}.gate.weight"]
    parent, module, last = layer.rsplit(".", 2)
    site, table = f"{module}.{last}", _EXTERNAL_RECURRENT_NAMES if is_recurrent else _EXTERNAL_NAMES
    external = (*table.get(site, ()), *table.get(f"{site}.{projection}", ()))
    module_names = _MODULES.get("recurrent" if is_recurrent else module, (module,))
    aliases = [f"{parent}.{module}.{name}" for module in module_names for name in external]
    return [layer, f"{layer}.{projection}", *aliases]


def target_names(targets: Iterable[AdapterTarget]) -> list[str]:
    """Return the full names of targets, and their short names with a "_", such as `q_proj`."""
    names = [name for target in targets for name in names_of(target)]
    return [*names, *{name.rpartition(".")[2] for name in names if "_" in name}]


def is_adapted(target: AdapterTarget, patterns: Sequence[str] | None) -> bool:
    """Return whether a target has an adapter.

    Args:
        target: A layer or projection that may have an adapter.
        patterns: The values of --lora-target-modules. Without any, all targets that are not
            optional have adapters.
    """
    return any(is_target(target, pattern) for pattern in patterns or (ALL_LINEAR,))


def is_target(target: AdapterTarget, pattern: str) -> bool:
    """Return whether a pattern matches a target, its layer or a containing module.

    An optional target must be named itself: neither `ALL_LINEAR`, a pattern with "*" in its last
    part nor the name of a containing module selects it.
    """
    names, globs = names_of(target), [pattern, f"*.{pattern}"]
    if target.is_optional:
        if pattern == ALL_LINEAR or "*" in pattern.rpartition(".")[2]:
            return False
    else:
        globs.append(f"{pattern}.*")
    return pattern == ALL_LINEAR or any(
        fnmatchcase(prefix + name, glob)
        for prefix in ("", "model.", "decoder.")
        for name in names
        for glob in globs
    )


def plan_of(config: ModelConfig) -> AdapterPlan:
    """Return the adapter settings that the flags describe."""
    assert config.lora_rank is not None
    return AdapterPlan(config.lora_rank, config.lora_scale, config.lora_dropout, config.use_dora)


def add_adapters(model: nn.Module, config: ModelConfig, context: BuildContext) -> None:
    """Add adapters to the linear layers that the flags select.

    Args:
        model: The model, or a part of it.
        config: The network's flags.
        context: The context in which the model was built.

    Raises:
        ConfigError: A selected layer does not support an adapter, or its adapter does not support
            DoRA or dropout.
    """
    plan, patterns = plan_of(config), config.lora_target_modules
    adapted = defaultdict[str, list[str]](list)
    for target in targets_of(model):
        if is_adapted(target, patterns):
            adapted[target.layer].append(target.projection)
    for name, projections in adapted.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, Linear | ExpertLinear | Output | Router)
        if isinstance(linear, ExpertLinear | Router) and (plan.is_dora or plan.dropout):
            flag = "--use-dora" if plan.is_dora else f"--lora-dropout {plan.dropout}"
            layer_kind = "experts" if isinstance(linear, ExpertLinear) else "routers"
            raise ConfigError(
                f"{flag}: adapters of {layer_kind} do not support this: drop the flag, or name "
                "other layers, for example --lora-target-modules linear_qkv linear_proj"
            )
        if isinstance(linear, Output):
            _check_output(config, context)
        if isinstance(linear, ExpertLinear):
            linear.adapter = ExpertAdapter(linear, plan, context)
        else:
            linear.adapter = Adapter(linear, projections, plan, context, name)


def _check_output(config: ModelConfig, context: BuildContext) -> None:
    """Refuse an adapter on the output layer if the layer does not support one.

    Raises:
        ConfigError: The output layer is tied to the embedding, or computes its logits in chunks.
    """
    if not config.untie_embeddings_and_output_weights:
        raise ConfigError(
            f"--lora-target-modules {OUTPUT_LAYER}: the output layer shares its matrix with the "
            "word embedding, which the adapter would change too when it is merged: name other "
            "layers, or use a model with --untie-embeddings-and-output-weights"
        )
    precision = context.precision
    if precision.cross_entropy_loss_fusion and precision.cross_entropy_fusion_impl == "linear":
        raise ConfigError(
            f"--lora-target-modules {OUTPUT_LAYER}: --cross-entropy-fusion-impl linear never "
            "materializes the logits that the adapter changes: use --cross-entropy-fusion-impl te, "
            "or name other layers"
        )


def initialize_adapters(models: Iterable[nn.Module]) -> None:
    """Initialize DoRA magnitudes from the frozen weights.

    Collective over tensor ranks and, in ZeRO stage 3, over the ranks that share the weights.
    """
    for model in models:
        for _, linear in linear_layers(model):
            adapter = linear.adapter
            if isinstance(adapter, Adapter) and adapter.plan.is_dora:
                adapter.start(linear.weight)


@contextmanager
def without_adapters(models: Iterable[nn.Module]) -> Iterator[None]:
    """Turn off all adapters inside the block, so that only the frozen weights are used.

    Args:
        models: The models, or parts of them.
    """
    layers = [linear for model in models for _, linear in linear_layers(model)]
    adapters = [linear.adapter for linear in layers]
    for linear in layers:
        linear.adapter = None
    try:
        yield
    finally:
        for linear, adapter in zip(layers, adapters, strict=True):
            linear.adapter = adapter


def network_without_memory(config: ModelConfig, vocabulary: int) -> Network:
    """Return the whole model with its adapters, built without allocating memory.

    Args:
        config: The network's flags. Its architecture must be in `NETWORKS`.
        vocabulary: Number of rows in the word embedding.
    """
    context = BuildContext(Layout.single(), parameter_device=torch.device("meta"))
    model = NETWORKS[config.architecture](model_plan(config, vocabulary), context)
    if config.lora_rank is not None:
        add_adapters(model, config, context)
    return model


def adapted_layers(config: ModelConfig, vocabulary: int) -> dict[str, AnyLinear]:
    """Return the adapted linear layers of a whole model by name, built without allocating memory.

    Args:
        config: The flags of a network with adapters.
        vocabulary: Number of rows in the word embedding.
    """
    model = network_without_memory(config, vocabulary)
    return {name: layer for name, layer in linear_layers(model) if layer.adapter is not None}


@functools.cache
def count_adapters(config: ModelConfig, vocabulary: int) -> int:
    """Count the parameters of all adapters of the whole model.

    Args:
        config: The network's flags.
        vocabulary: Number of rows in the word embedding.
    """
    layers = adapted_layers(config, vocabulary).values()
    adapters = (layer.adapter for layer in layers)
    return sum(
        p.numel() for adapter in adapters if adapter is not None for p in adapter.parameters()
    )
