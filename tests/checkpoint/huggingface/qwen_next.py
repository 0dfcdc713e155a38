"""Qwen3-Next for `models.py`, implemented independently: the delta rule token by token."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.checkpoint.huggingface.decoders import (
    Config,
    Kind,
    Shapes,
    Tensors,
    attend,
    attention_shapes,
    heads_of,
    linear,
    llama_mlp,
    rms,
    turn,
)

MIXED: dict[str, Any] = {
    "head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 7,
    "mlp_only_layers": [],
    "moe_intermediate_size": 10,
    "norm_topk_prob": True,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "partial_rotary_factor": 0.5,
    "shared_expert_intermediate_size": 14,
}
DENSE = {
    **MIXED,
    "layer_types": ["full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "mlp_only_layers": [1],
    "norm_topk_prob": False,
    "partial_rotary_factor": 1.0,
}


def _expert_shapes(at: str, inner: int, hidden: int) -> Shapes:
    up: Shapes = {f"{at}.{kind}_proj.weight": (inner, hidden) for kind in ("gate", "up")}
    return up | {f"{at}.down_proj.weight": (hidden, inner)}


def shapes(config: Config) -> Shapes:
    hidden, table = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    values = heads * config["linear_value_head_dim"]
    keys = key_heads * config["linear_key_head_dim"]
    found: Shapes = {"model.embed_tokens.weight": table}
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}"
        if kind == "full_attention":
            found |= attention_shapes(config, f"{at}.self_attn")
            query = f"{at}.self_attn.q_proj.weight"
            found[query] = (2 * found[query][0], hidden)
            norms = (f"{at}.self_attn.{kind}_norm.weight" for kind in "qk")
            found |= dict.fromkeys(norms, (config["head_dim"],))
        else:
            found |= {
                f"{at}.linear_attn.A_log": (heads,),
                f"{at}.linear_attn.conv1d.weight": (
                    2 * keys + values,
                    1,
                    config["linear_conv_kernel_dim"],
                ),
                f"{at}.linear_attn.dt_bias": (heads,),
                f"{at}.linear_attn.in_proj_ba.weight": (2 * heads, hidden),
                f"{at}.linear_attn.in_proj_qkvz.weight": (2 * (keys + values), hidden),
                f"{at}.linear_attn.norm.weight": (config["linear_value_head_dim"],),
                f"{at}.linear_attn.out_proj.weight": (hidden, values),
            }
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = (hidden,)
        if layer in config["mlp_only_layers"]:
            found |= _expert_shapes(f"{at}.mlp", config["intermediate_size"], hidden)
            continue
        found[f"{at}.mlp.gate.weight"] = (config["num_experts"], hidden)
        found[f"{at}.mlp.shared_expert_gate.weight"] = (1, hidden)
        shared = config["shared_expert_intermediate_size"]
        found |= _expert_shapes(f"{at}.mlp.shared_expert", shared, hidden)
        for expert in range(config["num_experts"]):
            inner = config["moe_intermediate_size"]
            found |= _expert_shapes(f"{at}.mlp.experts.{expert}", inner, hidden)
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": table}


def _delta_net(config: Config, w: Tensors, x: Tensor, at: str) -> Tensor:
    """Apply the gated delta rule to [b, s, h], token by token."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
    serves, taps = heads // key_heads, config["linear_conv_kernel_dim"]
    rows = linear(w, x, f"{at}.in_proj_qkvz").unflatten(-1, (key_heads, -1))
    *parts, gate = rows.split((keys, keys, serves * values, serves * values), dim=-1)
    mixed = torch.cat([part.flatten(2) for part in parts], dim=-1)
    padded, filters = F.pad(mixed, (0, 0, taps - 1, 0)), w[f"{at}.conv1d.weight"].squeeze(1)
    mixed = F.silu(
        torch.stack(
            [padded[:, tap : tap + x.shape[1]] * filters[:, tap] for tap in range(taps)]
        ).sum(0)
    )
    widths = (key_heads * keys, key_heads * keys, heads * values)
    query, key, value = (
        part.unflatten(-1, (-1, size))
        for part, size in zip(mixed.split(widths, -1), (keys, keys, values), strict=True)
    )
    query, key = (
        (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(serves, 2)
        for part in (query, key)
    )
    rate, step = linear(w, x, f"{at}.in_proj_ba").unflatten(-1, (key_heads, 2, serves)).unbind(3)
    rate, step = rate.flatten(2).sigmoid(), step.flatten(2)
    kept = (-w[f"{at}.A_log"].exp() * F.softplus(step + w[f"{at}.dt_bias"])).exp()
    state, reads = torch.zeros(len(x), heads, keys, values, dtype=x.dtype), []
    for place in range(x.shape[1]):
        q, k, v = query[:, place] * keys**-0.5, key[:, place], value[:, place]
        state = kept[:, place, :, None, None] * state
        wrong = v - torch.einsum("bne,bned->bnd", k, state)
        update = rate[:, place].unsqueeze(-1) * wrong
        state = state + torch.einsum("bne,bnd->bned", k, update)
        reads.append(torch.einsum("bne,bned->bnd", q, state))
    read = rms(torch.stack(reads, 1), w[f"{at}.norm.weight"], config["rms_norm_eps"])
    read = read * F.silu(gate.flatten(2).view_as(read))
    return linear(w, read.flatten(2), f"{at}.out_proj")


def logits(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    """Return logits: delta nets, gated attention, a shared expert; norm weights minus one."""

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, 1 + w[f"{name}.weight"], config["rms_norm_eps"])

    x = w["model.embed_tokens.weight"][tokens]
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}"
        normal = norm(x, f"{at}.input_layernorm")
        if kind == "full_attention":
            pairs, key, value = heads_of(config, w, normal, f"{at}.self_attn")
            query, gate = pairs[:, :, ::2], pairs[:, :, 1::2].flatten(2)
            query, key = (
                turn(
                    norm(part, f"{at}.self_attn.{name}_norm"),
                    config["rope_theta"],
                    share=config["partial_rotary_factor"],
                )
                for part, name in ((query, "q"), (key, "k"))
            )
            context = attend(query, key, value) * gate.sigmoid()
            x = x + linear(w, context, f"{at}.self_attn.o_proj")
        else:
            x = x + _delta_net(config, w, normal, f"{at}.linear_attn")
        normal = norm(x, f"{at}.post_attention_layernorm")
        if layer in config["mlp_only_layers"]:
            x = x + llama_mlp(w, normal, f"{at}.mlp")
            continue
        at = f"{at}.mlp"
        scores = linear(w, normal, f"{at}.gate").softmax(-1)
        shares, chosen = scores.topk(config["num_experts_per_tok"])
        if config["norm_topk_prob"]:
            shares = shares / shares.sum(-1, keepdim=True)
        update = linear(w, normal, f"{at}.shared_expert_gate").sigmoid()
        update = update * llama_mlp(w, normal, f"{at}.shared_expert")
        for place in itertools.product(*map(range, x.shape[:2])):
            for share, number in zip(shares[place], chosen[place].tolist(), strict=True):
                update[place] += share * llama_mlp(w, normal[place], f"{at}.experts.{number}")
        x = x + update
    return norm(x, "model.norm") @ w["lm_head.weight"].t()


FAMILIES = {"qwen3_next": Kind(shapes, logits, norms=0.0)}
