"""Frozen weights, which have no gradients, optimizer states or fp32 copies."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from megatron.config.adapters import is_adapter_parameter
from megatron.config.model import ModelConfig
from megatron.config.retro import is_retriever_parameter
from megatron.config.stages import ModelPart
from megatron.errors import ConfigError
from megatron.kernels.quantize import FrozenFormat
from megatron.models.adapters import (
    NETWORKS,
    is_target,
    network_without_memory,
    target_names,
    targets_of,
)
from megatron.models.arithmetic import count_part_parameters
from megatron.models.costs import WeightSplit
from megatron.models.multi_token import copies_words
from megatron.models.plan import ModelPlan
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Layout
from megatron.parallel.tied import WORD_EMBEDDING


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern of --freeze matches a parameter or a module that contains it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def is_frozen(name: str, config: ModelConfig) -> bool:
    """Return whether the parameter with this global name is frozen.

    A reward model's head is trained along with adapters, because it is new.
    """
    is_new = is_adapter_parameter(name) or (config.reward_head and name.startswith("score."))
    if config.lora_rank is not None and not is_new:
        return True
    if config.retro_freeze_gpt and not is_retriever_parameter(name):
        return True
    return any(matches(name, pattern) for pattern in config.freeze or ())


def freeze(named_parameters: Iterable[tuple[str, nn.Parameter]], config: ModelConfig) -> None:
    """Disable the gradients of the parameters that the flags freeze.

    Args:
        named_parameters: The parameters, with their global names.
        config: The network's flags.
    """
    for name, parameter in named_parameters:
        if is_frozen(name, config):
            parameter.requires_grad_(False)


def frozen_format(config: ModelConfig) -> FrozenFormat | None:
    """Return the packed format of frozen linear weights, or `None` if they are not packed."""
    if config.lora_rank is None or config.frozen_weights_dtype is None:
        return None
    return "nf4" if config.frozen_weights_dtype == "nf4" else "fp8"


def trained_share(config: ModelConfig, plan: ModelPlan, parts: Sequence[ModelPart]) -> float:
    """Return the fraction of the parameters in `parts` that is trained.

    Adapters count as trained but are not part of the total. The fraction is 1 if nothing is frozen,
    and always 1 for Retro and bi-encoders.

    Args:
        config: The network's flags.
        plan: The plan of the network.
        parts: Parts of the model.
    """
    if config.architecture not in NETWORKS or (config.lora_rank is None and not config.freeze):
        return 1.0
    counts = _trained_parameters(config, plan.embedding.vocabulary)
    trained = 0
    for part in parts:
        trained += sum(counts[f"layers.{i}"] for i in part.layers)
        trained += counts["embedding"] * part.embedding + counts["head"] * part.head
        if part.head and copies_words(plan) and not part.embedding:
            trained += counts[WORD_EMBEDDING]
    return trained / sum(count_part_parameters(plan, part, WeightSplit()) for part in parts)


@functools.cache
def _trained_parameters(config: ModelConfig, vocabulary: int) -> Counter[str]:
    """Count the trained parameters of each layer, of the embedding and of everything else.

    The word embedding is also counted separately. The layers of T5's decoder are numbered after
    those of its encoder.
    """
    counts: Counter[str] = Counter()
    for name, parameter in network_without_memory(config, vocabulary).named_parameters():
        stack, *parts = name.removeprefix("encoder.").removeprefix("decoder.").split(".")
        module = stack if stack == "embedding" else "head"
        if stack == "layers":
            offset = config.num_layers if name.startswith("decoder.") else 0
            module = f"layers.{offset + int(parts[0])}"
        count = 0 if is_frozen(name, config) else parameter.numel()
        counts[module] += count
        if name == WORD_EMBEDDING:
            counts[name] += count
    return counts


def check_frozen(
    parts: Sequence[nn.Module],
    config: ModelConfig,
    layout: Layout,
    device: torch.device,
) -> None:
    """Check that every pattern matches something and every process has weights to train.

    Collective.

    Args:
        parts: The parts of the model on this process.
        config: The network's flags.
        layout: The grid of processes.
        device: The device of this process.

    Raises:
        ConfigError: A pattern of --freeze or --lora-target-modules matches nothing in the whole
            model, or all weights of a process are frozen.
    """
    patterns = config.freeze or ()
    if not patterns and not config.retro_freeze_gpt and config.lora_rank is None:
        return
    parameters = {name: p for part in parts for name, p in part.named_parameters()}
    names = list(parameters)
    adapter_targets = [target for part in parts for target in targets_of(part)]
    targets = config.lora_target_modules or ()
    is_matched = [any(matches(name, pattern) for name in names) for pattern in patterns]
    is_matched += [
        any(is_target(target, pattern) for target in adapter_targets) for pattern in targets
    ]
    counts = all_reduce(
        torch.tensor([*is_matched, False], device=device).int(), layout.world
    ).tolist()
    for pattern, count in zip(patterns, counts, strict=False):
        if not count:
            suggestions = " or ".join(similar_names(pattern, names))
            raise ConfigError(f"--freeze {pattern} matches no parameter: try {suggestions}")
    for pattern, count in zip(targets, counts[len(patterns) :], strict=False):
        if not count:
            suggestions = " or ".join(similar_names(pattern, target_names(adapter_targets)))
            raise ConfigError(
                f"--lora-target-modules {pattern} matches no layer: try {suggestions}"
            )
    is_idle = not any(parameter.requires_grad for parameter in parameters.values())
    has_adapters = any(map(is_adapter_parameter, parameters))
    idle = torch.tensor([is_idle, is_idle and not has_adapters], device=device).int()
    num_idle, num_without_adapters = all_reduce(idle, layout.world).tolist()
    if num_idle:
        subject = "weights of a pipeline stage are" if layout.pipeline.size > 1 else "weights are"
        flag, remedy = "--retro-freeze-gpt", "freeze fewer weights"
        if config.lora_rank is not None and num_without_adapters:
            flag = f"--lora-rank {config.lora_rank}"
            if targets:
                flag = " ".join(("--lora-target-modules", *targets))
            remedy = "give every stage a layer with an adapter"
        elif patterns:
            flag = " ".join(("--freeze", *patterns))
        raise ConfigError(f"{flag}: all {subject} frozen, so nothing is left to train: {remedy}")


def similar_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return a few names of parameters or modules that resemble a pattern."""
    import difflib  # needed only for error messages

    candidates = {
        ".".join(parts[:end])
        for parts in (re.sub(r"layers\.\d+\.", "layers.*.", name).split(".") for name in names)
        for end in range(1, len(parts) + 1)
        if parts[end - 1] not in ("layers", "*")
    }
    query = re.sub(r"layers\.\d+\.", "layers.*.", pattern)
    return difflib.get_close_matches(query, sorted(candidates), n=3, cutoff=0)
