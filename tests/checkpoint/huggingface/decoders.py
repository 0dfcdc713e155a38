"""Further families for `models.py`, each written down a second time: plain PyTorch over the tensors
of a folder. A family is two functions of a config.json, in `FAMILIES`: its tensors' shapes, and its
logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


class Kind(NamedTuple):
    shapes: Callable[[Config], Shapes]
    logits: Callable[[Config, Tensors, Tensor], Tensor]
    norms: float = 1.0  # about which their weights lie


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def linear(w: Tensors, x: Tensor, name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def turn(x: Tensor, base: float, *, stretch: float = 1.0, share: float = 1.0) -> Tensor:
    """Turn the first channels of [b, s, n, d], i and i + half together."""
    turning = int(x.shape[-1] * share)
    places = torch.arange(x.shape[1], dtype=x.dtype) / stretch
    angles = places[:, None] * base ** -(torch.arange(0, turning, 2, dtype=x.dtype) / turning)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :turning].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, x[..., turning:]), dim=-1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[b, s, n, d] and keys, values [b, s, g, d] -> [b, s, n d]; causal. A window counts itself."""
    length, sharing = query.shape[1], query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(sharing, 2), value.repeat_interleave(sharing, 2)
    scores = torch.einsum("bsnd,btnd->bnst", query, key) * (scale or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    unseen = (distance < 0) | (distance >= (window or length))
    weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
    return torch.einsum("bnst,btnd->bsnd", weights, value).flatten(2)


def _attention_shapes(config: Config, at: str) -> Shapes:
    size, hidden = config["head_dim"], config["hidden_size"]
    query, key = (config[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    rows = {"q": query, "k": key, "v": key}
    shapes: Shapes = {f"{at}.{kind}_proj.weight": (out, hidden) for kind, out in rows.items()}
    return shapes | {f"{at}.o_proj.weight": (hidden, query)}


def _heads(config: Config, w: Tensors, x: Tensor, at: str) -> list[Tensor]:
    """Queries, keys and values, [b, s, n or g, d]."""
    size = config["head_dim"]
    return [linear(w, x, f"{at}.{kind}_proj").unflatten(-1, (-1, size)) for kind in "qkv"]


def _gemma_norms(config: Config) -> list[str]:
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma":
        return norms
    return [*norms, "pre_feedforward_layernorm", "post_feedforward_layernorm"]


def gemma_shapes(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= _attention_shapes(config, f"{at}.self_attn")
        if config["model_type"] == "gemma3_text":
            norms = (f"{at}.self_attn.{kind}_norm.weight" for kind in "qk")
            shapes |= dict.fromkeys(norms, (config["head_dim"],))
        shapes |= dict.fromkeys(
            (f"{at}.mlp.{kind}_proj.weight" for kind in ("gate", "up")), (inner, hidden)
        )
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        norms = (f"{at}.{name}.weight" for name in _gemma_norms(config))
        shapes |= dict.fromkeys(norms, (hidden,))
    return shapes | {"model.norm.weight": (hidden,)}


def gemma(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    """Gemma, Gemma 2 and Gemma 3: all norms' weights are distances from one."""
    version = {"gemma": 1, "gemma2": 2, "gemma3_text": 3}[config["model_type"]]

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, 1 + w[f"{name}.weight"], config["rms_norm_eps"])

    x = w["model.embed_tokens.weight"][tokens] * config["hidden_size"] ** 0.5
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    for layer, kind in enumerate(kinds):
        at, local = f"model.layers.{layer}", kind == "sliding_attention"
        query, key, value = _heads(config, w, norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
        base, stretch = config["rope_theta"], 1.0
        if version == 3:
            query = norm(query, f"{at}.self_attn.q_norm")
            key = norm(key, f"{at}.self_attn.k_norm")
            base = config["rope_local_base_freq"] if local else base
            stretch = 1.0 if local else config["rope_scaling"]["factor"]
        context = attend(
            *(turn(heads, base, stretch=stretch) for heads in (query, key)),
            value,
            scale=config.get("query_pre_attn_scalar", config["head_dim"]) ** -0.5,
            window=config["sliding_window"] if local else None,
            softcap=config.get("attn_logit_softcapping"),
        )
        update = linear(w, context, f"{at}.self_attn.o_proj")
        x = x + (update if version == 1 else norm(update, f"{at}.post_attention_layernorm"))
        before = "post_attention_layernorm" if version == 1 else "pre_feedforward_layernorm"
        normal = norm(x, f"{at}.{before}")
        gate = F.gelu(linear(w, normal, f"{at}.mlp.gate_proj"), approximate="tanh")
        inner = gate * linear(w, normal, f"{at}.mlp.up_proj")
        update = linear(w, inner, f"{at}.mlp.down_proj")
        x = x + (update if version == 1 else norm(update, f"{at}.post_feedforward_layernorm"))
    logits = norm(x, "model.norm") @ w["model.embed_tokens.weight"].t()
    cap = config.get("final_logit_softcapping")
    return logits if cap is None else cap * (logits / cap).tanh()


FAMILIES: dict[str, Kind] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), Kind(gemma_shapes, gemma, norms=0.0)),
}
