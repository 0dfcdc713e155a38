"""The content of Megatron Core's files other than weights and moments, in both of its formats.

These are the settings of the optimizer's parameter groups, the states of its random generators, and
the modules for which it expects an extra state.
"""

from __future__ import annotations

import re
from typing import Any

from megatron.checkpoint.entries import Json
from megatron.checkpoint.legacy.writer import (
    STAGE_STRIDE,
    device_state,
    group_settings,
    random_states,
)
from megatron.config.run import ModelRun

_EXPERT_SEED = 1024  # as in Megatron Core
# Modules with an extra state: first those of every implementation, then those that have one only in
# Transformer Engine.
_LINEAR = re.compile(
    r"(.+\.(?:linear_(?:qkv|q_proj|(?:q|kv)_(?:down|up)_proj|proj|fc1|fc2)|in_proj|out_proj|eh_proj))"
    r"\.weight"
)
_ENGINE_MODULES = re.compile(
    r"(.+\.(?:input_layernorm|[qk]_layernorm|out_norm|pre_mlp_layernorm|final_(?:layer)?norm|enorm|hnorm))"
    r"\.weight"
)
# The attention core has an extra state but no weights. Its name follows from a projection's.
_BEFORE_CORE = re.compile(r"linear_(?:qkv|kv_up_proj)$")


def extra_states(name: str, *, is_engine: bool) -> list[str]:
    """Return the modules whose extra states are listed with a weight.

    Args:
        name: Megatron Core's name for the weight.
        is_engine: Whether the layers are built from Transformer Engine's modules.
    """
    match = _LINEAR.fullmatch(name)
    modules = [match[1]] if match else []
    if is_engine:
        modules += [match[1] for match in [_ENGINE_MODULES.fullmatch(name)] if match]
        modules += [_BEFORE_CORE.sub("core_attention", module) for module in modules]
    return list(dict.fromkeys(modules))


def core_random_states(
    seed: int, iteration: int, stage: int, tensor_rank: int, *, expert: int, width: int
) -> dict[str, Any]:
    """Return one rank's entry in `rng_state`, with the generators that Megatron Core adds.

    Args:
        seed: The run's seed.
        iteration: Training steps taken.
        stage: The pipeline stage.
        tensor_rank: The tensor-parallel rank.
        expert: The expert-parallel rank.
        width: The expert-tensor-parallel rank, among the ranks that split an expert.
    """
    states = random_states(seed, iteration, stage, tensor_rank)
    base = seed + STAGE_STRIDE * stage
    states["rng_tracker_states"] |= {
        "data-parallel-rng": device_state(base, iteration),
        "expert-parallel-rng": device_state(base + _EXPERT_SEED + 100 * expert + width, iteration),
    }
    return states


def core_group_settings(
    config: ModelRun, meta: Json, *, decays: bool, is_expert: bool
) -> dict[str, Any]:
    """Return the settings of a parameter group of Megatron Core's optimizer.

    Args:
        config: The run's configuration.
        meta: The checkpoint's metadata.
        decays: Whether weight decay applies to the group.
        is_expert: Whether the group belongs to the optimizer of experts that are divided among
            processes.
    """
    return group_settings(config, meta, decays=decays) | {
        "is_expert_parallel": is_expert,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": meta["schedule"].get("max_lr"),
        "min_lr": meta["schedule"].get("min_lr"),
    }
