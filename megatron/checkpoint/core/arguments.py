"""Convert between Megatron Core's command line and our settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron.checkpoint.core.rows import size_of
from megatron.checkpoint.entries import Json
from megatron.checkpoint.legacy.arguments import (
    legacy_config,
    megatron_arguments,
    refuse_unknown,
)
from megatron.config.attention import (
    DELTA_FIELDS,
    LATENT_FIELDS,
    YARN_FIELDS,
    SelfAttentionOptions,
    delta_net_layers,
    layer_windows,
    rotary_layers,
)
from megatron.config.experts import mixture_layers
from megatron.config.hybrid import MAMBA, MAMBA_FIELDS, layer_symbols, pattern_parts
from megatron.config.model import ModelConfig
from megatron.config.run import ModelRun
from megatron.errors import CheckpointError

# Fields that change what the weights mean, each with the values that our networks support.
_NEUTRAL: dict[str, tuple[Json, ...]] = {
    "experimental_attention_variant": (None, "gated_delta_net", "gdn"),
    "heterogeneous_layers_config_path": (None,),
    "moe_latent_size": (None,),
    # The rows of gate and up are interleaved in blocks of this size.
    "moe_mlp_glu_interleave_size": (None,),
    "moe_router_topk_limited_devices": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "mtp_hybrid_override_pattern": (None,),
    "mtp_use_repeated_layer": (False,),
}
# With latent attention, Core ignores these settings or cannot train.
_NEUTRAL_WITH_LATENT: dict[str, tuple[Json, ...]] = {
    "attention_output_gate": (False,),
    "group_query_attention": (False,),
    "no_rope_freq": (None,),
    "position_embedding_type": ("rope", "learned_absolute", "none"),
    "qk_l2_norm": (False,),
    "rotary_interleaved": (False,),
    "rotary_percent": (1.0,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "use_rope_scaling": (False,),
}
# Core's gated delta nets use the MLP's activation, and their output norm is of the same kind as the
# network's other norms.
_NEUTRAL_WITH_DELTA: dict[str, tuple[Json, ...]] = {
    "layernorm_zero_centered_gamma": (None, False),
    "apply_layernorm_1p": (None, False),
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
}
# Core's hybrid models ignore these settings, or do not have them.
_NEUTRAL_WITH_HYBRID: dict[str, tuple[Json, ...]] = {
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False,),
    "qk_l2_norm": (None, False),
    "qk_layernorm": (False,),
}
# Without latent attention, rotary embeddings are scaled only if their type is yarn.
_NEUTRAL_WITHOUT_YARN: dict[str, tuple[Json, ...]] = {"rotary_scaling_factor": (1.0,)}
# These settings cannot be combined with YaRN, which ignores `rotary_percent`.
_NEUTRAL_WITH_YARN: dict[str, tuple[Json, ...]] = {
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "use_rope_scaling": (False,),
}
# For each of Core's YaRN fields: our flag for it, and its default in Core.
_YARN = {
    "rotary_scaling_factor": ("rotary_scaling_factor", 1.0),
    "original_max_position_embeddings": ("yarn_original_max_position_embeddings", 4096),
    "beta_fast": ("yarn_beta_fast", 32.0),
    "beta_slow": ("yarn_beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}


# For each flag that selects a mixer other than ordinary attention: the flags that only it uses.
_MIXER_FIELDS = {
    "multi_latent_attention": LATENT_FIELDS,
    "experimental_attention_variant": DELTA_FIELDS,
    "hybrid_layer_pattern": MAMBA_FIELDS,
}


def core_config(args: Mapping[str, Json], architecture: str = "gpt") -> dict[str, dict[str, Json]]:
    """Return the settings of the network and the optimizer, by section of `RunOptions`.

    The result also has `split_rounding` and `transformer_impl`, if they are known.

    Args:
        args: Core's command line.
        architecture: The kind of network (`ModelConfig.architecture`).

    Raises:
        CheckpointError: The network has a feature that our networks lack, or one of its settings is
            invalid.
    """
    refuse_unknown(args, _NEUTRAL)
    if args.get("no_rope_freq") is not None:  # Core also applies the L2 norm without RoPE
        refuse_unknown(args, {"qk_l2_norm": (None, False)})
    mixers = _latent(args) | _delta_net(args) | _hybrid(args)
    config = legacy_config(args, architecture)
    unused = set(YARN_FIELDS)
    for flag, fields in _MIXER_FIELDS.items():
        unused |= set() if flag in mixers else {flag, *fields}
    if "hybrid_layer_pattern" in mixers:  # the pattern says which layers are mixtures
        unused.add("moe_layer_freq")
    model = {name: value for name, value in config["model"].items() if name not in unused}
    model |= mixers
    config["model"] = model
    if not model.get("mtp_num_layers"):
        model.pop("mtp_num_layers", None)
    elif args.get("mtp_loss_scaling_factor") is not None:
        model["mtp_loss_scaling_factor"] = args["mtp_loss_scaling_factor"]
    if args.get("transformer_impl") is not None:  # converting back writes the same names
        config["checkpoint"] = {"transformer_impl": args["transformer_impl"]}
    if args.get("window_size") is not None:
        model |= _windows(args["window_size"], args.get("window_attn_skip_freq"), args)
    if args.get("no_rope_freq") is not None:
        model["no_rope_freq"] = str(args["no_rope_freq"])
    if args.get("layernorm_zero_centered_gamma"):
        model["apply_layernorm_1p"] = True
    if not args.get("num_experts"):
        config["model"] = {n: value for n, value in model.items() if not n.startswith("moe_")}
        return config
    pattern = model.get("moe_layer_freq")
    if pattern is not None:
        model["moe_layer_freq"] = _frequency(pattern)
    return config


def _frequency(pattern: Json) -> str:
    """Return our flag's text for a frequency of layers, which Core stores as a number or list."""
    return f"[{','.join(map(str, pattern))}]" if isinstance(pattern, list) else str(pattern)


def _delta_net(args: Mapping[str, Json]) -> dict[str, Json]:
    """Return our flags for gated delta nets, or {} for networks without them.

    Args:
        args: Core's command line.

    Raises:
        CheckpointError: Our delta nets lack one of the settings.
    """
    if args.get("experimental_attention_variant") is None:
        return {}
    refuse_unknown(args, _NEUTRAL_WITH_DELTA)
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": _frequency(args.get("linear_attention_freq")),
    }


def _hybrid(args: Mapping[str, Json]) -> dict[str, Json]:
    """Return our flag for the layers of a hybrid model, or {} for other models.

    Args:
        args: Core's command line.

    Raises:
        CheckpointError: Our networks have no such layers or settings.
    """
    pattern = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if not pattern:  # older versions could choose the layers by ratios instead
        refuse_unknown(args, {"is_hybrid_model": (False,)})
        return {}
    refuse_unknown(args, _NEUTRAL_WITH_HYBRID)
    try:
        symbols = "".join(pattern_parts(str(pattern)))
    except ValueError as error:
        raise CheckpointError(f"hybrid_layer_pattern is {pattern!r:.80}: {error}") from None
    if args.get("num_layers") != len(symbols):
        raise CheckpointError(
            f"hybrid_layer_pattern names {len(symbols)} layers, but num_layers is "
            f"{args.get('num_layers')!r:.80}"
        )
    if MAMBA in symbols:  # the epsilon of Mamba-2 is not a flag in Core
        refuse_unknown(args, {"layernorm_epsilon": (1e-5,), "norm_epsilon": (1e-5,)})
    return {"hybrid_layer_pattern": symbols}


def _latent(args: Mapping[str, Json]) -> dict[str, Json]:
    """Return our flags for latent attention, or those for YaRN (`_yarn`) in other attention.

    With latent attention, rotary embeddings are YaRN's unless --rope-type rope was given. With
    Core's default scaling factor and mscale values, YaRN changes nothing.

    Args:
        args: Core's command line.

    Raises:
        CheckpointError: A size is invalid, or our networks cannot compute the rotary embeddings.
    """
    if not args.get("multi_latent_attention"):
        return _yarn(args)
    refuse_unknown(args, _NEUTRAL_WITH_LATENT)
    names = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    unrotated, rotated, value = (size_of(args, name) for name in names)
    if rotated % 2:
        raise CheckpointError(f"qk_pos_emb_head_dim is {rotated}: channels rotate in pairs")
    flags: dict[str, Json] = {
        "multi_latent_attention": True,
        "kv_channels": max(unrotated + rotated, value),
    }
    values = {name: args.get(name, default) for name, (_, default) in _YARN.items()}
    factor, rope_type = values["rotary_scaling_factor"], args.get("rope_type")
    if factor != 1 and rope_type == "rope":  # Core scales the scores even without YaRN
        refuse_unknown(values, {"mscale_all_dim": (0,)})
    if factor != 1 and "rope_type" not in args:
        raise CheckpointError(
            f"rotary_scaling_factor is {factor!r:.80}, and Megatron Core before 0.14 applied it "
            "differently: such networks are not supported"
        )
    strengths = factor, values["mscale"], values["mscale_all_dim"]
    if rope_type == "rope" or (rope_type is None and strengths == (1, 1, 0)):
        return flags
    flags["rope_type"] = "yarn"
    return flags | {flag: values[name] for name, (flag, _) in _YARN.items()}


def _yarn(args: Mapping[str, Json]) -> dict[str, Json]:
    """Return our flags for YaRN in ordinary attention, or {} for other position embeddings.

    In ordinary attention, Core's flags for YaRN have the same names as ours.

    Args:
        args: Core's command line.

    Raises:
        CheckpointError: Our networks cannot compute the rotary embeddings.
    """
    if args.get("position_embedding_type") != "yarn":
        refuse_unknown(args, _NEUTRAL_WITHOUT_YARN)
        return {}
    refuse_unknown(args, _NEUTRAL_WITH_YARN)
    flags: dict[str, Json] = {
        flag: default if args.get(flag) is None else args[flag] for flag, default in _YARN.values()
    }
    if args.get("yarn_correction_range_round_to_int") is False:
        flags["yarn_correction_range_round_to_int"] = False
    return flags | {"position_embedding_type": "rope", "rope_type": "yarn", "rotary_percent": 1.0}


def _windows(size: Json, limited: Json, args: Mapping[str, Json]) -> dict[str, Json]:
    """Return our flags for attention windows.

    Args:
        size: Core's `window_size`.
        limited: Core's `window_attn_skip_freq`, or `None`.
        args: Core's command line.

    Raises:
        CheckpointError: The size or the pattern of layers is invalid.
    """
    layers = args.get("num_layers")
    flags: dict[str, Any] = {"window_size": str(size).strip("[]()")}
    if limited is not None:
        flags["window_attn_skip_freq"] = str(limited)
    try:
        if isinstance(layers, int):
            layer_windows(replace(SelfAttentionOptions(), **flags), layers)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint's arguments: {error}") from None
    return flags


def core_arguments(
    config: ModelRun,
    meta: Json,
    *,
    rows: int,
    dtype: torch.dtype,
    data_parallel: int,
    kind: str = "torch_dist",
) -> argparse.Namespace:
    """Return a run's settings as Megatron Core's command-line arguments.

    Args:
        config: The configuration of the run that wrote the checkpoint, or for which it was made.
        meta: The checkpoint's metadata.
        rows: The number of rows of the vocabulary tables in the files.
        dtype: The dtype of the weights.
        data_parallel: The number of processes that hold the same weights.
        kind: The value of --ckpt-format.
    """
    args = megatron_arguments(config, meta, rows=rows, dtype=dtype, data_parallel=data_parallel)
    for name in ("attention_backend", "exit_signal"):  # enums, which we would write as strings
        vars(args).pop(name, None)
    model = config.model
    vars(args).update(
        num_experts=max(model.num_experts or (), default=None),
        transformer_impl=config.checkpoint.transformer_impl,
        layernorm_zero_centered_gamma=model.apply_layernorm_1p,
        norm_epsilon=model.norm_epsilon,
        # DeepSpeed takes the softmax over all experts. If it chooses two or more, it normalizes
        # their weights to add up to 1, as Core does without this setting.
        moe_router_pre_softmax=model.moe_router_topk == 1
        if model.moe_router_gating == "deepspeed"
        else model.moe_router_pre_softmax,
        no_rope_freq=None
        if model.no_rope_freq is None
        else [int(not rotates) for rotates in rotary_layers(model, model.num_layers)],
        window_size=None if model.window is None else (model.window, 0),
        window_attn_skip_freq=None
        if model.window_attn_skip_freq is None
        else [int(window is not None) for window in layer_windows(model, model.num_layers)],
        moe_token_dropping=False,  # always off in Core; a capacity factor drops tokens nevertheless
        moe_layer_freq=layer_frequency(model) if model.hybrid_layer_pattern is None else 1,
        is_hybrid_model=model.hybrid_layer_pattern is not None,
        hybrid_layer_pattern=layer_symbols(model.hybrid_layer_pattern) or None,
        hybrid_override_pattern=layer_symbols(model.hybrid_layer_pattern) or None,
        linear_attention_freq=None
        if model.experimental_attention_variant is None
        else [int(is_delta) for is_delta in delta_net_layers(model, model.num_layers)],
        ckpt_format=kind,
        use_dist_ckpt=kind == "torch_dist",
        dist_ckpt_optim_fully_reshardable=config.parallel.use_distributed_optimizer,
    )
    if model.position_embedding_type == "none":  # Core refuses --no-position-embedding with it
        vars(args).update(position_embedding_type="none", add_position_embedding=True)
    if model.multi_latent_attention:  # Core's unfused attention needs values of this size
        args.kv_channels = model.v_head_dim
        vars(args).update({name: getattr(model, flag) for name, (flag, _) in _YARN.items()})
    elif model.rope_type == "yarn":
        args.position_embedding_type, args.use_rotary_position_embeddings = "yarn", False
    if args.rope_type == "rope":
        args.rotary_scaling_factor = 1.0
    return args


def layer_frequency(model: ModelConfig) -> int | list[int]:
    """Return Megatron Core's `moe_layer_freq`.

    The result is N if our flag is the number N and all mixtures have the same number of experts,
    otherwise a list with a 1 for each mixture and a 0 for each dense layer. Core stacks the layers'
    tensors only if the result is 1.
    """
    pattern = model.moe_layer_freq.strip()
    if pattern.isdigit() and len(set(model.num_experts or ())) < 2:
        return int(pattern)
    return [int(is_one) for is_one in mixture_layers(model, model.num_layers)]
