"""Convert Megatron Core's command line to our settings."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.checkpoint.entries import Json
from megatron.checkpoint.legacy.arguments import legacy_config
from megatron.errors import CheckpointError

# Fields that change what the weights mean, each with the values that our networks support.
_NEUTRAL: dict[str, tuple[Json, ...]] = {
    "activation_func_clamp_value": (None,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "glu_linear_offset": (0.0,),
    "heterogeneous_layers_config_path": (None,),
    "is_hybrid_model": (False,),
    "linear_attention_freq": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False,),
    "no_rope_freq": (None,),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "rotary_interleaved": (False,),
    "rotary_scaling_factor": (1.0,),
    "softmax_type": ("vanilla",),
    "window_size": (None,),
}


def core_config(args: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """Return the settings of the network and the optimizer, by section of `RunOptions`.

    Raises:
        CheckpointError: The network has a part that our networks lack.
    """
    for name, neutral in _NEUTRAL.items():
        if name in args and args[name] not in neutral:
            value = f"{args[name]!r:.80}"
            raise CheckpointError(f"{name} is {value}: such networks are not supported")
    config = legacy_config(args, "gpt")
    model = config["model"]
    if args.get("layernorm_zero_centered_gamma"):
        model["apply_layernorm_1p"] = True
    if not args.get("num_experts"):
        mixtures = [name for name in model if name.startswith("moe_")]
        config["model"] = {name: model[name] for name in model if name not in mixtures}
        return config
    pattern = model.get("moe_layer_freq")
    if isinstance(pattern, list):
        model["moe_layer_freq"] = f"[{','.join(map(str, pattern))}]"
    elif pattern is not None:
        model["moe_layer_freq"] = str(pattern)
    return config
