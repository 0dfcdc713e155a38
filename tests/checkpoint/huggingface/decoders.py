"""Further model families for `models.py`, implemented independently in plain PyTorch.

A family is two functions of a config.json, listed in `FAMILIES`: one returns the shapes of its
tensors, the other computes its logits from the tensors of a folder.
"""

from __future__ import annotations

import itertools
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
    norms: float = 1.0  # the mean of their weights


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def linear(w: Tensors, x: Tensor, name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def turn(
    x: Tensor,
    base: float,
    *,
    stretch: float = 1.0,
    share: float = 1.0,
    yarn: Mapping[str, Any] | None = None,
    divisors: Tensor | None = None,
) -> Tensor:
    """Rotate the first channels of [b, s, n, d], pairing channels i and i + half."""
    turning = int(x.shape[-1] * share)
    places = torch.arange(x.shape[1], dtype=x.dtype) / stretch
    frequencies = base ** -(torch.arange(0, turning, 2, dtype=x.dtype) / turning)
    if divisors is not None:
        frequencies = frequencies / divisors
    if yarn is not None:
        frequencies = frequencies * _slowed(turning, base, yarn)
        x = x * (0.1 * math.log(yarn["factor"]) + 1)
    angles = places[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :turning].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, x[..., turning:]), dim=-1)


def _slowed(turning: int, base: float, yarn: Mapping[str, Any]) -> Tensor:
    """Return YaRN's factor for the frequency of each plane, without rounding."""
    first, last = (
        turning
        * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi))
        / (2 * math.log(base))
        for turns in (yarn["beta_fast"], yarn["beta_slow"])
    )
    if yarn["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, turning - 1)
    planes = torch.arange(turning // 2, dtype=torch.float64)
    share = ((planes - first) / (last - first)).clamp(0, 1)
    return 1 - share + share / yarn["factor"]


def angles_of(config: Config, size: int, length: int) -> Tensor:
    """Return the rotation angle of each pair of channels at each position, [s, d/2]."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    base = config.get("rope_theta") or rope["rope_theta"]
    angles = []
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "dynamic":
        longer = max(length / config["max_position_embeddings"], 1)
        base *= (rope["factor"] * longer - rope["factor"] + 1) ** (size / (size - 2))
    for plane in range(size // 2):
        frequency = base ** (-2 * plane / size)
        if kind == "linear":
            frequency /= rope["factor"]
        if kind == "llama3":
            wavelength = 2 * math.pi / frequency
            if wavelength > 8192:
                frequency /= rope["factor"]
            elif wavelength > 2048:
                share = (8192 / wavelength - 1) / 3
                frequency = (1 - share) * frequency / rope["factor"] + share * frequency
        if kind == "yarn":
            first, last = (
                size
                * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi))
                / (2 * math.log(base))
                for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
            )
            if rope.get("truncate", True):
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, size - 1)
            share = min(1, max(0, (plane - first) / (last - first)))
            frequency = share * frequency / rope["factor"] + (1 - share) * frequency
        angles.append(torch.arange(length, dtype=torch.float64) * frequency)
    return torch.stack(angles, -1)


def concentration(config: Config) -> float:
    """Return YaRN's scaling factor for queries and keys."""
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") != "yarn":
        return 1.0
    return rope.get("attention_factor", 0.1 * math.log(rope["factor"]) + 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Apply causal attention: [b, s, n, d] and keys, values [b, s, g, d] -> [b, s, n d].

    A window includes the token itself.
    """
    length, sharing = query.shape[1], query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(sharing, 2), value.repeat_interleave(sharing, 2)
    scores = torch.einsum("bsnd,btnd->bnst", query, key) * (scale or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance
    unseen = (distance < 0) | (distance >= (window or length))
    powers = scores.masked_fill(unseen, -math.inf).exp()
    total = powers.sum(-1, keepdim=True)
    weights = powers / (total if sinks is None else total + sinks.exp()[:, None, None])
    return torch.einsum("bnst,btnd->bsnd", weights, value).flatten(2)


def attention_shapes(config: Config, at: str) -> Shapes:
    size, hidden = config["head_dim"], config["hidden_size"]
    query, key = (config[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    rows = {"q": query, "k": key, "v": key}
    shapes: Shapes = {f"{at}.{kind}_proj.weight": (out, hidden) for kind, out in rows.items()}
    return shapes | {f"{at}.o_proj.weight": (hidden, query)}


def heads_of(config: Config, w: Tensors, x: Tensor, at: str) -> list[Tensor]:
    """Return queries, keys and values, [b, s, n or g, d]."""
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
        shapes |= attention_shapes(config, f"{at}.self_attn")
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
    """Return logits of Gemma, Gemma 2 or 3; norm weights are stored as offsets from one."""
    version = {"gemma": 1, "gemma2": 2, "gemma3_text": 3}[config["model_type"]]

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, 1 + w[f"{name}.weight"], config["rms_norm_eps"])

    x = w["model.embed_tokens.weight"][tokens] * config["hidden_size"] ** 0.5
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    for layer, kind in enumerate(kinds):
        at, local = f"model.layers.{layer}", kind == "sliding_attention"
        query, key, value = heads_of(config, w, norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
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


def gpt_oss_shapes(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts = config["num_local_experts"]
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, shape in attention_shapes(config, f"{at}.self_attn").items():
            shapes |= {name: shape, name.replace("weight", "bias"): shape[:1]}
        shapes[f"{at}.self_attn.sinks"] = (config["num_attention_heads"],)
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.mlp.router.weight": (experts, hidden),
            f"{at}.mlp.router.bias": (experts,),
            f"{at}.mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
            f"{at}.mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
            f"{at}.mlp.experts.down_proj": (experts, inner, hidden),
            f"{at}.mlp.experts.down_proj_bias": (experts, hidden),
        }
    table = (config["vocab_size"], hidden)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": table}


def gpt_oss(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    """Return logits of gpt-oss: sinks, alternating windows, interleaved gate and up rows."""
    eps, limit = config["rms_norm_eps"], config["swiglu_limit"]

    def expert(x: Tensor, at: str, number: int) -> Tensor:
        both = x @ w[f"{at}.gate_up_proj"][number] + w[f"{at}.gate_up_proj_bias"][number]
        gate, up = both[::2].clamp(max=limit), both[1::2].clamp(-limit, limit)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return inner @ w[f"{at}.down_proj"][number] + w[f"{at}.down_proj_bias"][number]

    x = w["model.embed_tokens.weight"][tokens]
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}"
        normal = rms(x, w[f"{at}.input_layernorm.weight"], eps)
        query, key, value = heads_of(config, w, normal, f"{at}.self_attn")
        base, yarn = config["rope_theta"], config["rope_scaling"]
        context = attend(
            *(turn(heads, base, yarn=yarn) for heads in (query, key)),
            value,
            window=config["sliding_window"] if kind == "sliding_attention" else None,
            sinks=w[f"{at}.self_attn.sinks"],
        )
        x = x + linear(w, context, f"{at}.self_attn.o_proj")
        normal = rms(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        scores, chosen = linear(w, normal, f"{at}.mlp.router").topk(config["num_experts_per_tok"])
        shares, update = scores.softmax(-1), torch.zeros_like(x)
        for place in itertools.product(*map(range, x.shape[:2])):
            for share, number in zip(shares[place], chosen[place].tolist(), strict=True):
                update[place] += share * expert(normal[place], f"{at}.mlp.experts", number)
        x = x + update
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].t()


def llama_mlp(w: Tensors, x: Tensor, at: str) -> Tensor:
    gate = F.silu(linear(w, x, f"{at}.gate_proj"))
    return linear(w, gate * linear(w, x, f"{at}.up_proj"), f"{at}.down_proj")


def olmo_shapes(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    table = (config["vocab_size"], hidden)
    shapes: Shapes = {"model.embed_tokens.weight": table}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        attention = attention_shapes(config, f"{at}.self_attn")
        shapes |= attention
        for kind in "qk":
            rows = attention[f"{at}.self_attn.{kind}_proj.weight"][0]
            shapes[f"{at}.self_attn.{kind}_norm.weight"] = (rows,)
        shapes |= {f"{at}.mlp.{kind}_proj.weight": (inner, hidden) for kind in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
            shapes[f"{at}.{name}.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": table}


def olmo(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    """Return logits of OLMo 2 or 3: norms on attention's and MLPs' outputs and across heads."""

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, w[f"{name}.weight"], config["rms_norm_eps"])

    x = w["model.embed_tokens.weight"][tokens]
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    rope = config.get("rope_parameters", {})
    for layer, kind in enumerate(kinds):
        at, local = f"model.layers.{layer}", kind == "sliding_attention"
        query, key, value = heads_of(config, w, x, f"{at}.self_attn")
        query = norm(query.flatten(2), f"{at}.self_attn.q_norm").view_as(query)
        key = norm(key.flatten(2), f"{at}.self_attn.k_norm").view_as(key)
        own = rope.get(kind, {})
        base = own.get("rope_theta", config["rope_theta"])
        yarn = own if own.get("rope_type") == "yarn" else None
        context = attend(
            *(turn(heads, base, yarn=yarn) for heads in (query, key)),
            value,
            window=config["sliding_window"] if local else None,
        )
        update = linear(w, context, f"{at}.self_attn.o_proj")
        x = x + norm(update, f"{at}.post_attention_layernorm")
        x = x + norm(llama_mlp(w, x, f"{at}.mlp"), f"{at}.post_feedforward_layernorm")
    return norm(x, "model.norm") @ w["lm_head.weight"].t()


def phi_shapes(config: Config) -> Shapes:
    hidden, inner, heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    table, size = (config["vocab_size"], hidden), hidden // heads
    rows = (heads + 2 * config["num_key_value_heads"]) * size
    shapes: Shapes = {"model.embed_tokens.weight": table}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.qkv_proj.weight": (rows, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.mlp.gate_up_proj.weight": (2 * inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": table}


def phi(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    """Return logits of Phi-3: fused projections, and partial rotary embeddings."""
    eps, size = config["rms_norm_eps"], config["hidden_size"] // config["num_attention_heads"]
    counts = [config["num_attention_heads"], *[config["num_key_value_heads"]] * 2]
    base, share = config["rope_theta"], config["partial_rotary_factor"]
    scaling, divisors, strength = config.get("rope_scaling"), None, 1.0
    if scaling is not None:
        original = config["original_max_position_embeddings"]
        kind = "long_factor" if tokens.shape[1] > original else "short_factor"
        divisors = torch.tensor(scaling[kind], dtype=torch.float64)
        longer = config["max_position_embeddings"] / original
        strength = (1 + math.log(longer) / math.log(original)) ** 0.5
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        normal = rms(x, w[f"{at}.input_layernorm.weight"], eps)
        heads = linear(w, normal, f"{at}.self_attn.qkv_proj").unflatten(-1, (-1, size))
        query, key, value = heads.split(counts, dim=2)
        query, key = (turn(part, base, share=share, divisors=divisors) for part in (query, key))
        turning = int(size * share)
        for part in (query, key):
            part[..., :turning] *= strength
        context = attend(query, key, value, window=config["sliding_window"])
        x = x + linear(w, context, f"{at}.self_attn.o_proj")
        normal = rms(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        gate, up = linear(w, normal, f"{at}.mlp.gate_up_proj").chunk(2, dim=-1)
        x = x + linear(w, F.silu(gate) * up, f"{at}.mlp.down_proj")
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].t()


def neox_shapes(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    table = (config["vocab_size"], hidden)
    shapes: Shapes = {"gpt_neox.embed_in.weight": table}
    for layer in range(config["num_hidden_layers"]):
        at = f"gpt_neox.layers.{layer}"
        for name, (out, size) in {
            "attention.query_key_value": (3 * hidden, hidden),
            "attention.dense": (hidden, hidden),
            "mlp.dense_h_to_4h": (inner, hidden),
            "mlp.dense_4h_to_h": (hidden, inner),
        }.items():
            shapes |= {f"{at}.{name}.weight": (out, size), f"{at}.{name}.bias": (out,)}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{at}.{name}.{kind}": (hidden,) for kind in ("weight", "bias")}
    norm = "gpt_neox.final_layer_norm"
    shapes |= {f"{norm}.{kind}": (hidden,) for kind in ("weight", "bias")}
    return shapes | {"embed_out.weight": table}


def neox(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    """Return logits of GPT-NeoX: projections grouped by head; optionally a parallel MLP."""

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return rms(centred, w[f"{name}.weight"], config["layer_norm_eps"]) + w[f"{name}.bias"]

    x, heads = w["gpt_neox.embed_in.weight"][tokens], config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        at = f"gpt_neox.layers.{layer}"
        rows = linear(w, norm(x, f"{at}.input_layernorm"), f"{at}.attention.query_key_value")
        query, key, value = rows.unflatten(-1, (heads, 3, -1)).unbind(3)
        base, share = config["rotary_emb_base"], config["rotary_pct"]
        query, key = (turn(part, base, share=share) for part in (query, key))
        attended = x + linear(w, attend(query, key, value), f"{at}.attention.dense")
        read = x if config["use_parallel_residual"] else attended
        inner = linear(w, norm(read, f"{at}.post_attention_layernorm"), f"{at}.mlp.dense_h_to_4h")
        inner = F.gelu(inner, approximate="none" if config["hidden_act"] == "gelu" else "tanh")
        x = attended + linear(w, inner, f"{at}.mlp.dense_4h_to_h")
    return norm(x, "gpt_neox.final_layer_norm") @ w["embed_out.weight"].t()


def _slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes: beyond a power of two, every other slope of twice as many heads."""
    power = 2 ** math.floor(math.log2(heads))
    ratio = 2 ** -(8 / power)
    more = _slopes(2 * power)[::2][: heads - power] if power < heads else []
    return [ratio ** (i + 1) for i in range(power)] + more


def _falcon_norms(config: Config) -> list[str]:
    """Return the norms before attention and before the MLP, or a single one if they share it."""
    if config["model_type"] == "bloom" or not config["parallel_attn"]:
        return ["input_layernorm", "post_attention_layernorm"]
    return ["ln_attn", "ln_mlp"] if config["new_decoder_architecture"] else ["input_layernorm"]


def _named(config: Config) -> Config:
    """Return BLOOM's sizes under Falcon's names."""
    if config["model_type"] == "falcon":
        return config
    heads = config["n_head"]
    layers = {"num_hidden_layers": config["n_layer"], "num_kv_heads": heads}
    return {**config, **layers, "num_attention_heads": heads}


def falcon_shapes(config: Config) -> Shapes:
    config = _named(config)
    hidden, is_bloom = config["hidden_size"], config["model_type"] == "bloom"
    inner = 4 * hidden if is_bloom else config["ffn_hidden_size"]
    groups, bias = config["num_kv_heads"], is_bloom or config["bias"]
    rows = hidden + 2 * groups * hidden // config["num_attention_heads"]
    shapes: Shapes = {"transformer.word_embeddings.weight": (config["vocab_size"], hidden)}
    norms = ["word_embeddings_layernorm", "ln_f"] if is_bloom else ["ln_f"]
    for layer in range(config["num_hidden_layers"]):
        at = f"transformer.h.{layer}"
        for name, (out, size) in {
            "self_attention.query_key_value": (rows, hidden),
            "self_attention.dense": (hidden, hidden),
            "mlp.dense_h_to_4h": (inner, hidden),
            "mlp.dense_4h_to_h": (hidden, inner),
        }.items():
            shapes[f"{at}.{name}.weight"] = (out, size)
            if bias:
                shapes[f"{at}.{name}.bias"] = (out,)
        norms += [f"h.{layer}.{name}" for name in _falcon_norms(config)]
    names = (f"transformer.{name}.{kind}" for name in norms for kind in ("weight", "bias"))
    return shapes | dict.fromkeys(names, (hidden,))


def falcon(config: Config, w: Tensors, tokens: Tensor) -> Tensor:
    """Return logits of BLOOM or Falcon: rows of each group's queries, then its key and value."""
    config = _named(config)
    is_bloom = config["model_type"] == "bloom"

    def norm(x: Tensor, name: str) -> Tensor:
        centred, name = x - x.mean(-1, keepdim=True), f"transformer.{name}"
        return rms(centred, w[f"{name}.weight"], config["layer_norm_epsilon"]) + w[f"{name}.bias"]

    x, heads = w["transformer.word_embeddings.weight"][tokens], config["num_attention_heads"]
    x = norm(x, "word_embeddings_layernorm") if is_bloom else x
    slopes = None
    if is_bloom or config["alibi"]:
        slopes = torch.tensor(_slopes(heads), dtype=x.dtype)
        slopes = slopes if is_bloom else slopes / (config["hidden_size"] // heads) ** 0.5
    parallel = not is_bloom and config["parallel_attn"]
    for layer in range(config["num_hidden_layers"]):
        at, names = f"transformer.h.{layer}", _falcon_norms(config)
        first = norm(x, f"h.{layer}.{names[0]}")
        rows = linear(w, first, f"{at}.self_attention.query_key_value")
        groups = rows.unflatten(-1, (config["num_kv_heads"], -1, config["hidden_size"] // heads))
        query, key, value = (
            groups[..., :-2, :].flatten(2, 3),
            groups[..., -2, :],
            groups[..., -1, :],
        )
        if slopes is None:
            query, key = (turn(part, config["rope_theta"]) for part in (query, key))
        context = attend(query, key, value, slopes=slopes)
        attended = x + linear(w, context, f"{at}.self_attention.dense")
        read = norm(x if parallel else attended, f"h.{layer}.{names[-1]}")
        inner = linear(w, read, f"{at}.mlp.dense_h_to_4h")
        inner = F.gelu(inner, approximate="tanh" if is_bloom else "none")
        x = attended + linear(w, inner, f"{at}.mlp.dense_4h_to_h")
    return norm(x, "ln_f") @ w["transformer.word_embeddings.weight"].t()


FAMILIES: dict[str, Kind] = {
    **dict.fromkeys(("bloom", "falcon"), Kind(falcon_shapes, falcon)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), Kind(gemma_shapes, gemma, norms=0.0)),
    **dict.fromkeys(("olmo2", "olmo3"), Kind(olmo_shapes, olmo)),
    "phi3": Kind(phi_shapes, phi),
    "gpt_neox": Kind(neox_shapes, neox),
    "gpt_oss": Kind(gpt_oss_shapes, gpt_oss),
}
