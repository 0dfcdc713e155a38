"""Adapters (LoRA) for linear layers, selected by the names of layers and projections.

`--lora-target-modules` accepts our names (`layers.0.attention.qkv`, or `layers.0.attention.qkv.key`
for one projection of that layer), Hugging Face's names (`k_proj`) and Megatron Core's
(`linear_qkv`). A pattern may also match the end of a name, starting after a dot.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.errors import ConfigError
from megatron.models.bert import BertModel
from megatron.models.gpt import GPTModel
from megatron.models.network import Network
from megatron.models.plans import model_plan
from megatron.models.t5 import T5Model
from megatron.parallel.adapter import WHOLE, Adapter, AdapterPlan, projections_of
from megatron.parallel.build import BuildContext
from megatron.parallel.expert_linear import ExpertAdapter, ExpertLinear
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout

ALL = "all-linear"  # PEFT's name for every layer
# The architectures that support adapters.
NETWORKS: dict[str, type[GPTModel | BertModel | T5Model]] = {
    "gpt": GPTModel,
    "bert": BertModel,
    "t5": T5Model,
}
_STACKS = ("layers.", "encoder.layers.", "decoder.layers.")
# Hugging Face's and Megatron Core's names, keyed by the last parts of our own names.
_OTHER_NAMES = {
    "attention.qkv": ("linear_qkv",),
    "attention.qkv.query": ("q_proj",),
    "attention.qkv.key": ("k_proj",),
    "attention.qkv.value": ("v_proj",),
    "attention.output": ("linear_proj", "o_proj"),
    "mlp.up": ("linear_fc1",),
    "mlp.up.gate": ("gate_proj",),
    "mlp.up.up": ("up_proj",),
    f"mlp.up.{WHOLE}": ("up_proj",),
    "mlp.down": ("linear_fc2", "down_proj"),
    "experts.up": ("linear_fc1", "gate_up_proj"),
    "experts.down": ("linear_fc2", "down_proj"),
}


def linear_layers(model: nn.Module) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    """Yield the name and module of each linear layer that can have an adapter."""
    for name, module in model.named_modules():
        if isinstance(module, Linear | ExpertLinear) and name.startswith(_STACKS):
            yield name, module


def names_of(layer: str, projection: str) -> list[str]:
    """Return every name of a projection, including the names of its layer."""
    within, site = layer.rsplit(".", 2)[0], ".".join(layer.rsplit(".", 2)[1:])
    others = (*_OTHER_NAMES.get(site, ()), *_OTHER_NAMES.get(f"{site}.{projection}", ()))
    modules = {"attention": ("attention", "self_attn", "self_attention")}
    between = modules.get(site.partition(".")[0], (site.partition(".")[0],))
    also = [f"{within}.{module}.{name}" for module in between for name in others]
    return [layer, f"{layer}.{projection}", *also]


def target_names(projections: Iterable[tuple[str, str]]) -> list[str]:
    """Return every name that --lora-target-modules accepts, including short names like `q_proj`."""
    names = [name for one in projections for name in names_of(*one)]
    return [*names, *{name.rpartition(".")[2] for name in names if "_" in name}]


def is_adapted(layer: str, projection: str, patterns: Sequence[str] | None) -> bool:
    """Return whether a projection of a linear layer has an adapter.

    Args:
        layer: The global name of the linear layer.
        projection: The projection.
        patterns: The value of --lora-target-modules.
    """
    return patterns is None or any(is_target(layer, projection, each) for each in patterns)


def is_target(layer: str, projection: str, pattern: str) -> bool:
    """Return whether a pattern matches a projection, its layer or a containing module."""
    names = names_of(layer, projection)
    forms = (pattern, f"*.{pattern}", f"{pattern}.*")
    return pattern == ALL or any(
        fnmatchcase(prefix + name, form)
        for prefix in ("", "model.", "decoder.")
        for name in names
        for form in forms
    )


def plan_of(config: ModelConfig) -> AdapterPlan:
    """Return the adapter settings given by the flags."""
    assert config.lora_rank is not None
    return AdapterPlan(config.lora_rank, config.lora_scale, config.lora_dropout, config.use_dora)


def add_adapters(model: nn.Module, config: ModelConfig, context: BuildContext) -> None:
    """Add adapters to the linear layers that the flags name.

    Args:
        model: The model, or a part of it.
        config: The network's flags.
        context: The context in which the model was built.

    Raises:
        ConfigError: The flags ask for DoRA or dropout in the adapters of experts.
    """
    plan, patterns = plan_of(config), config.lora_target_modules
    for name, linear in list(linear_layers(model)):
        adapted = [one for one in projections_of(linear) if is_adapted(name, one, patterns)]
        if not adapted:
            continue
        if isinstance(linear, Linear):
            linear.adapter = Adapter(linear, adapted, plan, context, name)
            continue
        if plan.is_dora or plan.dropout:
            flag = "--use-dora" if plan.is_dora else f"--lora-dropout {plan.dropout}"
            raise ConfigError(
                f"{flag}: adapters of experts do not support this: drop the flag, or name "
                "other layers, for example --lora-target-modules linear_qkv linear_proj"
            )
        linear.adapter = ExpertAdapter(linear, plan, context)


def start_adapters(models: Iterable[nn.Module]) -> None:
    """Initialize DoRA magnitudes from the frozen weights. Collective over tensor ranks."""
    for model in models:
        for _, linear in linear_layers(model):
            if (
                isinstance(linear, Linear)
                and isinstance(linear.adapter, Adapter)
                and linear.adapter.plan.is_dora
            ):
                linear.adapter.start(linear.weight)


@contextmanager
def without_adapters(models: Iterable[nn.Module]) -> Iterator[None]:
    """Turn off all adapters inside the context, so that only the frozen weights are used.

    Args:
        models: The models, or parts of them.
    """
    layers = [linear for model in models for _, linear in linear_layers(model)]
    held = [linear.adapter for linear in layers]
    for linear in layers:
        linear.adapter = None
    try:
        yield
    finally:
        for linear, adapter in zip(layers, held, strict=True):
            linear.adapter = adapter


def network_without_memory(config: ModelConfig, vocabulary: int) -> Network:
    """Return the whole model with its adapters, built without allocating memory.

    Args:
        config: The network, of an architecture in `NETWORKS`.
        vocabulary: Rows of the word embedding.
    """
    context = BuildContext(Layout.single(), parameter_device=torch.device("meta"))
    model = NETWORKS[config.architecture](model_plan(config, vocabulary), context)
    if config.lora_rank is not None:
        add_adapters(model, config, context)
    return model


def adapted_layers(config: ModelConfig, vocabulary: int) -> dict[str, Linear | ExpertLinear]:
    """Return the adapted linear layers of a whole model by name, built without allocating memory.

    Args:
        config: The network, which has adapters.
        vocabulary: Rows of the word embedding.
    """
    model = network_without_memory(config, vocabulary)
    return {name: layer for name, layer in linear_layers(model) if layer.adapter is not None}


@functools.cache
def count_adapters(config: ModelConfig, vocabulary: int) -> int:
    """Count the parameters of all adapters of the whole model.

    Args:
        config: The network.
        vocabulary: Rows of the word embedding.
    """
    layers = adapted_layers(config, vocabulary).values()
    adapters = (layer.adapter for layer in layers)
    return sum(p.numel() for one in adapters if one is not None for p in one.parameters())
