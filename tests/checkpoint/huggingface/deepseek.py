"""DeepSeek's models for `models.py`: their attention and their mixtures, in plain PyTorch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "moe_intermediate_size": 10,
    "n_group": 3,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "routed_scaling_factor": 1.75,
    "topk_group": 2,
    "v_head_dim": 5,
}
V2 = {
    **SIZES,
    "norm_topk_prob": False,
    "qk_nope_head_dim": 8,  # transformers' class cannot rotate heads with an odd number of channels
    "topk_method": "group_limited_greedy",
}
V3 = {**SIZES, "norm_topk_prob": True, "rope_interleave": True}
GREEDY = {
    "first_k_dense_replace": 0,
    "n_group": 1,
    "q_lora_rank": None,
    "topk_group": 1,
    "topk_method": "greedy",
}
YARN = {
    "rope_type": "yarn",
    "factor": 3.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}


def shapes(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a layer's attention, and of its mixture without the experts."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, query = config["kv_lora_rank"], config["q_lora_rank"]
    still, turning = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    at, value = f"model.layers.{layer}.self_attn", config["v_head_dim"]
    found: dict[str, tuple[int, ...]] = {}
    if query is not None:
        found = {f"{at}.q_a_proj.weight": (query, hidden), f"{at}.q_a_layernorm.weight": (query,)}
    name = "q_proj" if query is None else "q_b_proj"
    return found | {
        f"{at}.{name}.weight": (heads * (still + turning), query or hidden),
        f"{at}.kv_a_proj_with_mqa.weight": (rank + turning, hidden),
        f"{at}.kv_a_layernorm.weight": (rank,),
        f"{at}.kv_b_proj.weight": (heads * (still + value), rank),
        f"{at}.o_proj.weight": (hidden, heads * value),
    }


def heads_of(
    config: Mapping[str, Any],
    w: Mapping[str, Tensor],
    layer: int,
    x: Tensor,
    angles: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [b, s, n, d]; scores are not yet divided by sqrt(d)."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:
        """Rotate [b, s, n, d], treating channels 2i and 2i + 1 as a complex number."""
        planes = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        spin = torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(planes * spin).flatten(-2)

    at, heads = f"model.layers.{layer}.self_attn", config["num_attention_heads"]
    still, rank = config["qk_nope_head_dim"], config["kv_lora_rank"]
    if config["q_lora_rank"] is None:
        query = x @ w[f"{at}.q_proj.weight"].t()
    else:
        low = norm(x @ w[f"{at}.q_a_proj.weight"].t(), f"{at}.q_a_layernorm")
        query = low @ w[f"{at}.q_b_proj.weight"].t()
    query = query.unflatten(-1, (heads, -1))
    both = x @ w[f"{at}.kv_a_proj_with_mqa.weight"].t()
    latent = norm(both[..., :rank], f"{at}.kv_a_layernorm")
    shared = turn(both[..., None, rank:]).expand(-1, -1, heads, -1)
    up = (latent @ w[f"{at}.kv_b_proj.weight"].t()).unflatten(-1, (heads, -1))
    query = torch.cat((query[..., :still], turn(query[..., still:]) * _strength(config)), -1)
    key = torch.cat((up[..., :still], shared * _strength(config)), -1)
    rope = config.get("rope_scaling") or {}
    scale = 0.1 * rope.get("mscale_all_dim", 0) * math.log(rope.get("factor", 1)) + 1
    return query * scale**2, key, up[..., still:]


def _strength(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_scaling") or {}
    if not rope:
        return 1.0
    one, other = (
        0.1 * rope[k] * math.log(rope["factor"]) + 1 for k in ("mscale", "mscale_all_dim")
    )
    return float(one / other)


def mixture(
    config: Mapping[str, Any],
    w: Mapping[str, Tensor],
    at: str,
    x: Tensor,
    mlp: Callable[[Tensor, str], Tensor],
) -> Tensor:
    """Compute the mixture of a layer, token by token."""
    out, biased = torch.zeros_like(x), f"{at}.gate.e_score_correction_bias" in w
    groups, size = config["n_group"], config["n_routed_experts"] // config["n_group"]
    for place in itertools.product(*map(range, x.shape[:2])):
        logits = w[f"{at}.gate.weight"] @ x[place]
        scores = logits.sigmoid() if biased else logits.softmax(0)
        ranked = scores + w[f"{at}.gate.e_score_correction_bias"] if biased else scores
        by_group = ranked.view(groups, size).sort(1, descending=True).values
        best = by_group[:, : 2 if biased else 1].sum(1).topk(config["topk_group"]).indices
        allowed = [g * size + i for g in best.tolist() for i in range(size)]
        allowed.sort(key=lambda expert: -float(ranked[expert]))
        chosen = allowed[: config["num_experts_per_tok"]]
        total = scores[chosen].sum() if biased else 1.0
        for expert in chosen:
            weight = scores[expert] / total * config["routed_scaling_factor"]
            out[place] += weight * mlp(x[place], f"{at}.experts.{expert}")
    return out + mlp(x, f"{at}.shared_experts")
