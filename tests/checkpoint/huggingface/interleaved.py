"""GPT-J and Cohere for `models.py`, implemented independently; they rotate adjacent channels."""

from __future__ import annotations

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
)

GPTJ: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPTJForCausalLM"],
    "layer_norm_epsilon": 1e-5,
    "model_type": "gptj",
    "n_embd": 40,
    "n_head": 4,
    "n_inner": None,
    "n_layer": 2,
    "n_positions": 24,
    "rotary_dim": 6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 70,
}
COHERE: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"],
    "head_dim": 10,
    "hidden_act": "silu",
    "hidden_size": 40,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.375,
    "max_position_embeddings": 24,
    "model_type": "cohere",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 70,
}
COHERE_PLUS: dict[str, Any] = {**COHERE, "use_qk_norm": True}
COHERE2: dict[str, Any] = {
    **COHERE,
    "architectures": ["Cohere2ForCausalLM"],
    "layer_types": ["sliding_attention", "full_attention"],
    "model_type": "cohere2",
    "sliding_window": 5,
}


def turn_pairs(x: Tensor, base: float, turning: int) -> Tensor:
    """Rotate the first channels of [b, s, n, d], with 2i and 2i + 1 as a complex number."""
    frequencies = base ** -(torch.arange(0, turning, 2, dtype=x.dtype) / turning)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
    pairs = torch.view_as_complex(x[..., :turning].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])
    return torch.cat((turned.flatten(-2), x[..., turning:]), dim=-1)


def _gptj_shapes(config: Config) -> Shapes:
    hidden = config["n_embd"]
    inner, table = config["n_inner"] or 4 * hidden, (config["vocab_size"], hidden)
    shapes: Shapes = {"transformer.wte.weight": table}
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        shapes |= {f"{at}.ln_1.{kind}": (hidden,) for kind in ("weight", "bias")}
        shapes |= {f"{at}.attn.{kind}_proj.weight": (hidden, hidden) for kind in "kvq"}
        shapes |= {
            f"{at}.attn.out_proj.weight": (hidden, hidden),
            f"{at}.mlp.fc_in.weight": (inner, hidden),
            f"{at}.mlp.fc_in.bias": (inner,),
            f"{at}.mlp.fc_out.weight": (hidden, inner),
            f"{at}.mlp.fc_out.bias": (hidden,),
        }
    shapes |= {f"transformer.ln_f.{kind}": (hidden,) for kind in ("weight", "bias")}
    return shapes | {"lm_head.weight": table, "lm_head.bias": table[:1]}


def _gptj(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return rms(centred, w[f"{name}.weight"], config["layer_norm_epsilon"]) + w[f"{name}.bias"]

    x = w["transformer.wte.weight"][tokens]
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        normal = norm(x, f"{at}.ln_1")
        query, key, value = (
            linear(w, normal, f"{at}.attn.{kind}_proj").unflatten(-1, (config["n_head"], -1))
            for kind in "qkv"
        )
        query, key = (turn_pairs(part, 10000.0, config["rotary_dim"]) for part in (query, key))
        mixed = linear(w, attend(query, key, value), f"{at}.attn.out_proj")
        inner = F.gelu(linear(w, normal, f"{at}.mlp.fc_in"), approximate="tanh")
        x = x + mixed + linear(w, inner, f"{at}.mlp.fc_out")
    return linear(w, norm(x, "transformer.ln_f"), "lm_head")


def _cohere_shapes(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= attention_shapes(config, f"{at}.self_attn")
        if config.get("use_qk_norm"):
            for kind, name in (("q", "attention"), ("k", "key_value")):
                heads = config[f"num_{name}_heads"]
                shapes[f"{at}.self_attn.{kind}_norm.weight"] = (heads, config["head_dim"])
        shapes |= {f"{at}.mlp.{kind}_proj.weight": (inner, hidden) for kind in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,)}


def _cohere(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    """Return logits; if only some layers have windows, only those use rotary embeddings."""

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return rms(centred, w[f"{name}.weight"], config["layer_norm_eps"])

    x = w["model.embed_tokens.weight"][tokens]
    kinds = config.get("layer_types") or [None] * config["num_hidden_layers"]
    for layer, kind in enumerate(kinds):
        at = f"model.layers.{layer}"
        normal = norm(x, f"{at}.input_layernorm")
        query, key, value = heads_of(config, w, normal, f"{at}.self_attn")
        if config.get("use_qk_norm"):
            query = norm(query, f"{at}.self_attn.q_norm")
            key = norm(key, f"{at}.self_attn.k_norm")
        if kind != "full_attention":
            query, key = (
                turn_pairs(part, config["rope_theta"], config["head_dim"]) for part in (query, key)
            )
        window = config["sliding_window"] if kind == "sliding_attention" else None
        mixed = linear(w, attend(query, key, value, window=window), f"{at}.self_attn.o_proj")
        x = x + mixed + llama_mlp(w, normal, f"{at}.mlp")
    return norm(x, "model.norm") @ w["model.embed_tokens.weight"].t() * config["logit_scale"]


FAMILIES: dict[str, Kind] = {
    **dict.fromkeys(("cohere", "cohere2"), Kind(_cohere_shapes, _cohere)),
    "gptj": Kind(_gptj_shapes, _gptj),
}
