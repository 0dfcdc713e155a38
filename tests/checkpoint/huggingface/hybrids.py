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
_SYMBOLS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _kinds(config: Config) -> list[str]:
    if "hybrid_override_pattern" in config:
        return [_SYMBOLS[symbol] for symbol in config["hybrid_override_pattern"]]
    return config.get("layers_block_type") or ["linear_attention"] * config["num_hidden_layers"]


def _sizes(config: Config) -> tuple[int, int, int, int]:
    """Return the numbers of heads, channels per head and groups, and the state size."""
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
        f"{at}.conv1d.weight": (channels, 1, config["conv_kernel"]),
        f"{at}.conv1d.bias": (channels,),
        f"{at}.A_log": (heads,),
        f"{at}.D": (heads,),
        f"{at}.dt_bias": (heads,),
        f"{at}.norm.weight": (inner,),
        f"{at}.out_proj.weight": (hidden, inner),
    }


def _mamba(config: Config, w: Tensors, x: Tensor, at: str) -> Tensor:
    """Apply Mamba-2 to [b, s, h], one token at a time."""
    heads, size, groups, state = _sizes(config)
    inner, vectors = heads * size, groups * state
    z, convolved, steps = linear(w, x, f"{at}.in_proj").split(
        (inner, inner + 2 * vectors, heads), -1
    )
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
    normal = rms(gated, torch.ones(()), config["layer_norm_epsilon"]).flatten(2)
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


FAMILIES = dict.fromkeys(("mamba2", "nemotron_h"), Kind(shapes, logits))
