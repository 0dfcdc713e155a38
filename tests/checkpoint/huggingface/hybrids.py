"""Mamba-2 and Nemotron-H for `models.py`, implemented independently: one token at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.checkpoint.huggingface import deepseek
from tests.checkpoint.huggingface.decoders import (
    Config,
    Kind,
    Shapes,
    Tensors,
    attend,
    attention_shapes,
    heads_of,
    linear,
    rms,
    turn,
)

_COMMON: dict[str, Any] = {
    "chunk_size": 8,
    "conv_kernel": 4,
    "hidden_size": 32,
    "layer_norm_epsilon": 1e-5,
    "n_groups": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 70,
}
MAMBA2 = {
    **_COMMON,
    "architectures": ["Mamba2ForCausalLM"],
    "expand": 3,
    "head_dim": 24,
    "hidden_act": "silu",
    "model_type": "mamba2",
    "num_heads": 4,
    "num_hidden_layers": 2,
    "state_size": 5,
}
NEMOTRON = {
    **_COMMON,
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "head_dim": 10,
    "intermediate_size": 22,
    "layers_block_type": ["linear_attention", "full_attention"],
    "mamba_head_dim": 7,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 6,
    "max_position_embeddings": 24,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "ssm_state_size": 9,
    "time_step_min": 1e-7,  # transformers clamps steps that are too short, but only in prompts
    "use_cache": False,  # transformers' cache needs at least one attention layer
}
MIXTURE = {
    "layers_block_type": ["linear_attention", "moe"],
    "moe_intermediate_size": 14,
    "moe_shared_expert_intermediate_size": 10,
    "n_group": 3,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.75,
    "topk_group": 2,
}
FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.6,
    "embedding_multiplier": 5.5,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 22,
    "key_multiplier": 0.4,
    "lm_head_multiplier": 0.3,
    "mamba_chunk_size": 8,
    "mamba_d_conv": 4,
    "mamba_d_head": 7,
    "mamba_d_ssm": 42,
    "mamba_d_state": 9,
    "mamba_n_groups": 2,
    "mamba_n_heads": 6,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "max_position_embeddings": 24,
    "mlp_multipliers": [0.7, 1.3],
    "model_type": "falcon_h1",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [0.9, 1.1, 0.6, 1.4, 0.5],
    "ssm_out_multiplier": 0.75,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 70,
}
FALCON_WITH_NORM: dict[str, Any] = {
    **FALCON,
    "mamba_rms_norm": True,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
_SYMBOLS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _kinds(config: Config) -> list[str]:
    if "hybrid_override_pattern" in config:
        return [_SYMBOLS[symbol] for symbol in config["hybrid_override_pattern"]]
    return config.get("layers_block_type") or ["linear_attention"] * config["num_hidden_layers"]


def _sizes(config: Config) -> tuple[int, int, int, int]:
    """Return the numbers of heads, channels per head and groups, and the state size."""
    if config["model_type"] == "falcon_h1":
        heads = config["mamba_n_heads"]
        sizes = config["mamba_d_head"], config["mamba_n_groups"], config["mamba_d_state"]
        return heads, *sizes
    heads = config.get("num_heads") or config["mamba_num_heads"]
    size = config["mamba_head_dim"] if "mamba_head_dim" in config else config["head_dim"]
    state = config.get("state_size") or config["ssm_state_size"]
    return heads, size, config["n_groups"], state


def _mamba_shapes(config: Config, at: str) -> Shapes:
    heads, size, groups, state = _sizes(config)
    inner, hidden = heads * size, config["hidden_size"]
    channels = inner + 2 * groups * state
    return {
        f"{at}.in_proj.weight": (inner + channels + heads, hidden),
        f"{at}.conv1d.weight": (channels, 1, 4),
        f"{at}.conv1d.bias": (channels,),
        f"{at}.A_log": (heads,),
        f"{at}.D": (heads,),
        f"{at}.dt_bias": (heads,),
        **({f"{at}.norm.weight": (inner,)} if config.get("mamba_rms_norm", True) else {}),
        f"{at}.out_proj.weight": (hidden, inner),
    }


def _mamba(config: Config, w: Tensors, x: Tensor, at: str) -> Tensor:
    """Apply Mamba-2 to [b, s, h], one token at a time."""
    heads, size, groups, state = _sizes(config)
    inner, vectors = heads * size, groups * state
    projected = linear(w, x, f"{at}.in_proj")
    if "ssm_multipliers" in config:
        widths = torch.tensor([inner, inner, vectors, vectors, heads])
        factors = torch.tensor(config["ssm_multipliers"], dtype=x.dtype)
        projected = projected * factors.repeat_interleave(widths) * config["ssm_in_multiplier"]
    z, convolved, steps = projected.split((inner, inner + 2 * vectors, heads), -1)
    kernel = w[f"{at}.conv1d.weight"]
    convolved = F.conv1d(
        F.pad(convolved.transpose(1, 2), (kernel.shape[-1] - 1, 0)),
        kernel,
        w[f"{at}.conv1d.bias"],
        groups=len(kernel),
    )
    u, b, c = F.silu(convolved.transpose(1, 2)).split((inner, vectors, vectors), -1)
    u = u.unflatten(-1, (heads, size))
    b, c = (v.unflatten(-1, (groups, state)).repeat_interleave(heads // groups, 2) for v in (b, c))
    steps = F.softplus(steps + w[f"{at}.dt_bias"])
    held, outputs = x.new_zeros(len(x), heads, size, state), []
    for token in range(x.shape[1]):
        step = steps[:, token]
        decay = (-w[f"{at}.A_log"].exp() * step).exp()
        added = torch.einsum("bh,bhp,bhn->bhpn", step, u[:, token], b[:, token])
        held = decay[..., None, None] * held + added
        outputs.append(torch.einsum("bhpn,bhn->bhp", held, c[:, token]))
    out = torch.stack(outputs, 1) + w[f"{at}.D"][:, None] * u
    gated = (out.flatten(2) * F.silu(z)).unflatten(-1, (groups, -1))
    if not config.get("mamba_rms_norm", True):
        return linear(w, gated.flatten(2), f"{at}.out_proj")
    eps = config.get("layer_norm_epsilon") or config["rms_norm_eps"]
    normal = rms(gated, torch.ones(()), eps).flatten(2)
    return linear(w, normal * w[f"{at}.norm.weight"], f"{at}.out_proj")


def shapes(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    table = (config["vocab_size"], hidden)
    found: Shapes = {"backbone.embeddings.weight": table}
    for layer, kind in enumerate(_kinds(config)):
        at = f"backbone.layers.{layer}"
        found[f"{at}.norm.weight"] = (hidden,)
        at = f"{at}.mixer"
        if kind == "linear_attention":
            found |= _mamba_shapes(config, at)
        elif kind == "full_attention":
            found |= attention_shapes(config, at)
        elif kind == "mlp":
            found |= _two(at, config["intermediate_size"], hidden)
        else:
            experts = config["n_routed_experts"]
            found[f"{at}.gate.weight"] = (experts, hidden)
            found[f"{at}.gate.e_score_correction_bias"] = (experts,)
            for expert in range(experts):
                found |= _two(f"{at}.experts.{expert}", config["moe_intermediate_size"], hidden)
            width = config["moe_shared_expert_intermediate_size"]
            found |= _two(f"{at}.shared_experts", width, hidden)
    return found | {"backbone.norm_f.weight": (hidden,), "lm_head.weight": table}


def _two(at: str, inner: int, hidden: int) -> Shapes:
    return {f"{at}.up_proj.weight": (inner, hidden), f"{at}.down_proj.weight": (hidden, inner)}


def logits(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    eps = config["layer_norm_epsilon"]

    def mlp(x: Tensor, at: str) -> Tensor:
        return linear(w, linear(w, x, f"{at}.up_proj").relu().square(), f"{at}.down_proj")

    x = w["backbone.embeddings.weight"][tokens]
    for layer, kind in enumerate(_kinds(config)):
        at = f"backbone.layers.{layer}"
        normal, at = rms(x, w[f"{at}.norm.weight"], eps), f"{at}.mixer"
        if kind == "linear_attention":
            x = x + _mamba(config, w, normal, at)
        elif kind == "full_attention":
            context = attend(*heads_of(config, w, normal, at))
            x = x + linear(w, context, f"{at}.o_proj")
        elif kind == "mlp":
            x = x + mlp(normal, at)
        else:
            x = x + deepseek.mixture(config, w, at, normal, mlp)
    return rms(x, w["backbone.norm_f.weight"], eps) @ w["lm_head.weight"].t()


def _falcon_shapes(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    table = (config["vocab_size"], hidden)
    found: Shapes = {"model.embed_tokens.weight": table}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= attention_shapes(config, f"{at}.self_attn")
        found |= _mamba_shapes(config, f"{at}.mamba")
        for kind in ("gate", "up"):
            found[f"{at}.feed_forward.{kind}_proj.weight"] = (inner, hidden)
        found[f"{at}.feed_forward.down_proj.weight"] = (hidden, inner)
        for name in ("input_layernorm", "pre_ff_layernorm"):
            found[f"{at}.{name}.weight"] = (hidden,)
    return found | {"model.final_layernorm.weight": (hidden,), "lm_head.weight": table}


def _falcon(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    eps, (of_gate, of_down) = config["rms_norm_eps"], config["mlp_multipliers"]
    x = w["model.embed_tokens.weight"][tokens] * config["embedding_multiplier"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        normal = rms(x, w[f"{at}.input_layernorm.weight"], eps)
        given = normal * config["attention_in_multiplier"]
        query, key, value = heads_of(config, w, given, f"{at}.self_attn")
        key = key * config["key_multiplier"]
        query, key = (turn(part, config["rope_theta"]) for part in (query, key))
        attended = linear(w, attend(query, key, value), f"{at}.self_attn.o_proj")
        of_mamba = _mamba(config, w, normal, f"{at}.mamba") * config["ssm_out_multiplier"]
        x = x + attended * config["attention_out_multiplier"] + of_mamba
        normal, at = rms(x, w[f"{at}.pre_ff_layernorm.weight"], eps), f"{at}.feed_forward"
        gate = F.silu(linear(w, normal, f"{at}.gate_proj") * of_gate)
        inner = gate * linear(w, normal, f"{at}.up_proj")
        x = x + linear(w, inner, f"{at}.down_proj") * of_down
    scores = rms(x, w["model.final_layernorm.weight"], eps) @ w["lm_head.weight"].t()
    return scores * config["lm_head_multiplier"]


FAMILIES = {
    **dict.fromkeys(("mamba2", "nemotron_h"), Kind(shapes, logits)),
    "falcon_h1": Kind(_falcon_shapes, _falcon),
}
