"""Llama 4 for `models.py`, implemented independently in plain PyTorch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.checkpoint.huggingface.decoders import (
    Config,
    Kind,
    Shapes,
    Tensors,
    attention_shapes,
    heads_of,
    linear,
    llama_mlp,
    rms,
)
from tests.checkpoint.huggingface.interleaved import turn_pairs

LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "attention_chunk_size": 7,
    "attn_scale": 0.75,
    "attn_temperature_tuning": True,
    "floor_scale": 5,
    "head_dim": 10,
    "hidden_act": "silu",
    "hidden_size": 40,
    "intermediate_size": 22,
    "intermediate_size_mlp": 48,
    "layer_types": ["chunked_attention", "full_attention"],
    "max_position_embeddings": 24,
    "model_type": "llama4_text",
    "moe_layers": [1],
    "no_rope_layers": [1, 0],
    "num_attention_heads": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_qk_norm": True,
    "vocab_size": 70,
}
# As in the largest model: no normalization of queries and keys. All layers rotate.
ROTATING: dict[str, Any] = {
    **LLAMA4,
    "layer_types": ["chunked_attention"] * 2,
    "moe_layers": [0, 1],
    "no_rope_layers": [1, 1],
    "use_qk_norm": False,
}


def _shapes(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts, table = config["num_local_experts"], (config["vocab_size"], hidden)
    shapes: Shapes = {"model.embed_tokens.weight": table}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        feed, width = f"{at}.feed_forward", config["intermediate_size_mlp"]
        shapes |= attention_shapes(config, f"{at}.self_attn")
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}.weight"] = (hidden,)
        if layer in config["moe_layers"]:
            shapes |= {
                f"{feed}.router.weight": (experts, hidden),
                f"{feed}.experts.gate_up_proj": (experts, hidden, 2 * inner),
                f"{feed}.experts.down_proj": (experts, inner, hidden),
            }
            feed, width = f"{feed}.shared_expert", inner
        shapes |= {f"{feed}.{kind}_proj.weight": (width, hidden) for kind in ("gate", "up")}
        shapes[f"{feed}.down_proj.weight"] = (hidden, width)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": table}


def _attention(config: Config, w: Tensors, x: Tensor, layer: int) -> Tensor:
    at, length = f"model.layers.{layer}.self_attn", x.shape[1]
    query, key, value = heads_of(config, w, x, at)
    places = torch.arange(length)
    unseen = places[None] > places[:, None]
    if config["no_rope_layers"][layer]:
        query, key = (turn_pairs(part, config["rope_theta"], 10) for part in (query, key))
        if config["use_qk_norm"]:
            ones = torch.ones(10, dtype=x.dtype)
            query, key = (rms(part, ones, config["rms_norm_eps"]) for part in (query, key))
        chunk = places // config["attention_chunk_size"]
        unseen = unseen | (chunk[None] != chunk[:, None])
    else:
        steps = torch.tensor([math.log(1 + (p + 1) // config["floor_scale"]) for p in places])
        query = query * (1 + config["attn_scale"] * steps)[:, None, None]
    sharing = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(sharing, 2), value.repeat_interleave(sharing, 2)
    scores = torch.einsum("bsnd,btnd->bnst", query, key) / math.sqrt(config["head_dim"])
    weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
    mixed = torch.einsum("bnst,btnd->bsnd", weights, value).flatten(2)
    return linear(w, mixed, f"{at}.o_proj")


def _feed(config: Config, w: Tensors, x: Tensor, layer: int) -> Tensor:
    at = f"model.layers.{layer}.feed_forward"
    if layer not in config["moe_layers"]:
        return llama_mlp(w, x, at)
    best, chosen = linear(w, x, f"{at}.router").max(-1)
    out = llama_mlp(w, x, f"{at}.shared_expert")
    for place in itertools.product(*map(range, x.shape[:2])):
        expert, given = chosen[place], x[place] * torch.sigmoid(best[place])
        gate, up = (given @ w[f"{at}.experts.gate_up_proj"][expert]).chunk(2)
        out[place] += (F.silu(gate) * up) @ w[f"{at}.experts.down_proj"][expert]
    return out


def _llama4(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    eps, x = config["rms_norm_eps"], w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        x = x + _attention(config, w, rms(x, w[f"{at}.input_layernorm.weight"], eps), layer)
        normal = rms(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        x = x + _feed(config, w, normal, layer)
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].t()


FAMILIES: dict[str, Kind] = {"llama4_text": Kind(_shapes, _llama4)}
