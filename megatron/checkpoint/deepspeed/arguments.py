"""Convert Megatron-DeepSpeed's command line to our settings."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.checkpoint.entries import Json
from megatron.checkpoint.legacy.arguments import legacy_config, refuse_unknown
from megatron.config.experts import MAX_EXPERTS
from megatron.config.fields import MAX_LAYERS
from megatron.errors import CheckpointError

_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
# Fields that change the meaning of the weights, with the values that our networks support.
_NEUTRAL: dict[str, tuple[Json, ...]] = {
    "num_experts_switch": (None,),
    "position_embedding_type": ("PositionEmbeddingType(2)",),  # BigScience: a learned table
    "retro_add_retriever": (False,),
    "embed_layernorm": (False,),
}
# Megatron Core's names for Megatron-DeepSpeed's arguments.
_RENAMED = {
    "rope_theta": "rotary_base",
    "topk": "moe_router_topk",
    "moe_loss_coeff": "moe_aux_loss_coeff",
}


def megatron_arguments(args: Mapping[str, Json]) -> dict[str, Json]:
    """Translate the arguments of a Megatron-DeepSpeed run to Megatron-LM's names.

    Raises:
        CheckpointError: The network has a feature that our networks lack, or the number of experts
            or the interval of mixtures is invalid.
    """
    refuse_unknown(args, _NEUTRAL)
    result = {_RENAMED.get(name, name): value for name, value in args.items()}
    result.pop("position_embedding_type", None)
    norm = result.get("normalization")
    if isinstance(norm, str):
        result["normalization"] = _NORMS.get(norm, norm)
    groups, heads = args.get("num_key_value_heads"), args.get("num_attention_heads")
    if groups is not None and groups != heads:
        result |= {"group_query_attention": True, "num_query_groups": groups}
    return result | _mixture(args)


def has_separate_qkv(args: Mapping[str, Json]) -> bool:
    """Return whether query, key and value rows form three blocks, each with all heads.

    Megatron-DeepSpeed has used this order since December 2024 (its commit 676a482c). Before that,
    it ordered rows by head or group, under the same `checkpoint_version`. The same commit added the
    flags of FPDT, by which such files are recognized.
    """
    return "ds_sequence_parallel_fpdt" in args and not args.get("group_query_attention")


def has_unusual_angles(args: Mapping[str, Json]) -> bool:
    """Return whether rotary embeddings use angles that no other program uses.

    Since commit 676a482c, Megatron-DeepSpeed without FPDT and without a PipelineModule uses the
    cosines of the angles as angles, for queries and for keys.
    """
    return bool(
        "ds_sequence_parallel_fpdt" in args
        and not args["ds_sequence_parallel_fpdt"]
        and args.get("use_rotary_position_embeddings")
        and args.get("no_pipeline_parallel")
    )


def _mixture(args: Mapping[str, Json]) -> dict[str, Json]:
    """Return the settings of a mixture of experts under Megatron Core's names.

    Raises:
        CheckpointError: The number of experts or the interval of mixtures is invalid.
    """
    listed = args.get("num_experts")
    counts = listed if isinstance(listed, list) else [listed]
    if not set(counts) - {None, 1}:
        return {"num_experts": None}
    if not all(type(count) is int and 0 < count <= MAX_EXPERTS for count in counts):
        raise CheckpointError(f"num_experts is {listed!r:.80}")
    interval = args.get("expert_interval", 1)
    if type(interval) is not int or not 0 < interval <= MAX_LAYERS:
        raise CheckpointError(f"expert_interval is {interval!r:.80}")
    return {
        "num_experts": counts,
        "moe_layer_freq": f"last-of-{interval}",
        "moe_router_gating": "deepspeed",
        "moe_expert_capacity_factor": args.get("moe_train_capacity_factor"),
    }


def deepspeed_config(args: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """Return the settings of the network and the optimizer, by section of `RunOptions`.

    Args:
        args: The command line under Megatron-LM's names (`megatron_arguments`).
    """
    config = legacy_config(args, "gpt")
    if not args.get("num_experts"):
        model = config["model"].items()
        config["model"] = {n: value for n, value in model if not n.startswith("moe_")}
    return config
