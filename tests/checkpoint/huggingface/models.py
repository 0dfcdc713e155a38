"""Small models of every family, implemented independently in plain PyTorch.

They compute in float64 from the tensors of a Hugging Face folder, under the names used there, and
use nothing from the package.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoint.huggingface import decoders, deepseek, hybrids, interleaved, llama4, qwen_next

Tensors = dict[str, Tensor]
_FAMILIES = {
    **decoders.FAMILIES,
    **hybrids.FAMILIES,
    **interleaved.FAMILIES,
    **llama4.FAMILIES,
    **qwen_next.FAMILIES,
}
LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, POSITIONS = 2, 32, 4, 2, 48, 70, 24

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "max_position_embeddings": POSITIONS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Case:
    """A model: its config.json, and the properties of its family.

    Attributes:
        config: The folder's config.json.
        qkv_bias: Whether queries, keys and values have biases.
        head_norm: Whether each head's query and key are normalized.
        projection_norm: Whether all heads' queries are normalized together, and the keys too.
    """

    config: dict[str, Any]
    qkv_bias: bool = False
    head_norm: bool = False
    projection_norm: bool = False

    @property
    def is_gpt2(self) -> bool:
        return self.config["model_type"] == "gpt2"


def _like_llama(kind: str, name: str, **changes: Any) -> dict[str, Any]:
    return {**_COMMON, "model_type": kind, "architectures": [f"{name}ForCausalLM"], **changes}


_YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8}
_GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "layer_norm_epsilon": 1e-5,
    "model_type": "gpt2",
    "n_ctx": POSITIONS,
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "n_positions": POSITIONS,
    "torch_dtype": "float32",
    "vocab_size": 71,  # odd, as GPT-2's 50257 is
}
_MIXTRAL = {
    "intermediate_size": 22,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "router_jitter_noise": 0.0,
    "sliding_window": None,
}
_QWEN = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 10,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "use_sliding_window": False,
}
_OLMOE = {
    "clip_qkv": None,
    "intermediate_size": 22,
    "norm_topk_prob": False,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.01,
}
_SLIDING = ["sliding_attention", "full_attention"]
_GEMMA: dict[str, Any] = {
    "head_dim": 10,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": _SLIDING,
    "query_pre_attn_scalar": 14,
    "sliding_window": 5,
    "tie_word_embeddings": True,
}
_NEOX: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_bias": True,
    "hidden_act": "gelu",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": POSITIONS,
    "model_type": "gpt_neox",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "rotary_emb_base": 1000.0,
    "rotary_pct": 0.5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_parallel_residual": True,
    "vocab_size": VOCAB,
}
_BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "hidden_size": HIDDEN,
    "layer_norm_epsilon": 1e-5,
    "model_type": "bloom",
    "n_head": HEADS,
    "n_layer": LAYERS,
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
}
_FALCON: dict[str, Any] = {
    **dict.fromkeys(("alibi", "bias", "new_decoder_architecture"), False),
    "architectures": ["FalconForCausalLM"],
    "ffn_hidden_size": FFN,
    "hidden_size": HIDDEN,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": POSITIONS,
    "model_type": "falcon",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_kv_heads": 1,
    "parallel_attn": True,
    "rope_theta": 1000.0,
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
}
CASES: dict[str, Case] = {
    "llama": Case(_like_llama("llama", "Llama")),
    "llama without groups": Case(_like_llama("llama", "Llama", num_key_value_heads=HEADS)),
    "llama 3.2": Case(
        _like_llama(
            "llama", "Llama", tie_word_embeddings=True, rope_scaling=_LLAMA3, rope_theta=1e5
        )
    ),
    "llama stretched": Case(
        _like_llama("llama", "Llama", rope_scaling={"type": "linear", "factor": 2.5})
    ),
    "llama, dynamic": Case(
        _like_llama(
            "llama",
            "Llama",
            max_position_embeddings=9,
            rope_scaling={"rope_type": "dynamic", "factor": 3.0},
        )
    ),
    "llama with yarn": Case(_like_llama("llama", "Llama", rope_scaling=_YARN)),
    "qwen2 with yarn": Case(
        _like_llama(
            "qwen2",
            "Qwen2",
            rope_scaling={
                **_YARN,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "attention_factor": 1.25,
                "truncate": False,
            },
        ),
        qkv_bias=True,
    ),
    "llama of transformers 5": Case(
        {
            **_like_llama("llama", "Llama", rope_theta=None),
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        }
    ),
    "mistral": Case(_like_llama("mistral", "Mistral", sliding_window=None)),
    "mistral wide": Case(_like_llama("mistral", "Mistral", sliding_window=4096, head_dim=12)),
    "mistral with a window": Case(_like_llama("mistral", "Mistral", sliding_window=5)),
    "qwen2": Case(
        _like_llama(
            "qwen2",
            "Qwen2",
            use_sliding_window=False,
            sliding_window=8,
            max_window_layers=1,
            tie_word_embeddings=True,
        ),
        qkv_bias=True,
    ),
    "qwen2 with windows in later layers": Case(
        _like_llama(
            "qwen2", "Qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1
        ),
        qkv_bias=True,
    ),
    "qwen3": Case(_like_llama("qwen3", "Qwen3", head_dim=16), head_norm=True),
    "qwen3 with windows in some layers": Case(
        _like_llama(
            "qwen3",
            "Qwen3",
            head_dim=16,
            use_sliding_window=True,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2)
            + ["sliding_attention"] * (LAYERS % 2),
        ),
        head_norm=True,
    ),
    "mixtral": Case(_like_llama("mixtral", "Mixtral", **_MIXTRAL)),
    "qwen2 mixture": Case(
        _like_llama("qwen2_moe", "Qwen2Moe", **_QWEN, shared_expert_intermediate_size=14),
        qkv_bias=True,
    ),
    "qwen3 mixture": Case(
        _like_llama(
            "qwen3_moe",
            "Qwen3Moe",
            **{**_QWEN, "num_experts": 10, "norm_topk_prob": True, "mlp_only_layers": []},
            head_dim=12,
        ),
        head_norm=True,
    ),
    "qwen3 mixture, not normalized": Case(
        _like_llama(
            "qwen3_moe", "Qwen3Moe", **{**_QWEN, "mlp_only_layers": [], "decoder_sparse_step": 2}
        ),
        head_norm=True,
    ),
    "qwen3 next": Case(_like_llama("qwen3_next", "Qwen3Next", **qwen_next.MIXED)),
    "qwen3 next with a dense layer": Case(
        _like_llama("qwen3_next", "Qwen3Next", **qwen_next.DENSE)
    ),
    "olmoe": Case(_like_llama("olmoe", "Olmoe", **_OLMOE), projection_norm=True),
    "olmoe, normalized": Case(
        _like_llama(
            "olmoe",
            "Olmoe",
            **{**_OLMOE, "num_experts": 10, "norm_topk_prob": True, "num_key_value_heads": 1},
        ),
        projection_norm=True,
    ),
    "gemma": Case(
        _like_llama(
            "gemma",
            "Gemma",
            head_dim=10,
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        )
    ),
    "gemma 2": Case(
        _like_llama(
            "gemma2", "Gemma2", **_GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=4.0
        )
    ),
    "gemma 2 without bounds": Case(
        _like_llama(
            "gemma2",
            "Gemma2",
            **{**_GEMMA, "layer_types": _SLIDING[::-1], "query_pre_attn_scalar": 10},
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        )
    ),
    "gemma 3": Case(
        _like_llama(
            "gemma3_text",
            "Gemma3",
            **_GEMMA,
            rope_local_base_freq=50.0,
            rope_scaling={"rope_type": "linear", "factor": 4.0},
        )
    ),
    "olmo 2": Case(_like_llama("olmo2", "Olmo2", head_dim=10)),
    "olmo 3": Case(
        _like_llama(
            "olmo3",
            "Olmo3",
            head_dim=10,
            layer_types=_SLIDING,
            sliding_window=5,
            rope_theta=None,
            rope_parameters={
                "full_attention": {
                    **_YARN,
                    "beta_fast": 4.0,
                    "beta_slow": 0.5,
                    "rope_theta": 1000.0,
                    "truncate": True,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        )
    ),
    "phi 3": Case(
        _like_llama("phi3", "Phi3", partial_rotary_factor=0.75, sliding_window=6, pad_token_id=0)
    ),
    "phi 3 with longrope": Case(
        _like_llama(
            "phi3",
            "Phi3",
            original_max_position_embeddings=9,
            pad_token_id=0,
            partial_rotary_factor=0.75,
            rope_scaling={
                "type": "longrope",
                "long_factor": [1.5, 4.0, 6.5],
                "short_factor": [1.0, 1.1, 1.4],
            },
            sliding_window=None,
        )
    ),
    "neox": Case(_NEOX),
    "neox, one after the other": Case(
        {**_NEOX, "hidden_act": "gelu_new", "use_parallel_residual": False}
    ),
    "gpt-j": Case(interleaved.GPTJ),
    "cohere": Case(interleaved.COHERE),
    "cohere plus": Case(interleaved.COHERE_PLUS),
    "cohere 2": Case(interleaved.COHERE2),
    "bloom": Case(_BLOOM),
    "falcon": Case(_FALCON),
    "falcon, new": Case(
        {**_FALCON, "multi_query": False, "new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "falcon with alibi": Case(
        {
            **_FALCON,
            **dict.fromkeys(("alibi", "bias"), True),
            **dict.fromkeys(("multi_query", "parallel_attn"), False),
            "num_kv_heads": HEADS,
        }
    ),
    "gpt-oss": Case(
        _like_llama(
            "gpt_oss",
            "GptOss",
            attention_bias=True,
            head_dim=10,
            layer_types=_SLIDING,
            num_experts_per_tok=3,
            num_local_experts=6,
            rope_scaling={**_YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
            sliding_window=5,
            swiglu_limit=0.7,
        )
    ),
    "deepseek v2": Case(_like_llama("deepseek_v2", "DeepseekV2", **deepseek.V2)),
    "deepseek v2, greedy": Case(
        _like_llama(
            "deepseek_v2",
            "DeepseekV2",
            **{**deepseek.V2, **deepseek.GREEDY},
        )
    ),
    "deepseek v3": Case(_like_llama("deepseek_v3", "DeepseekV3", **deepseek.V3)),
    "deepseek v3 with yarn": Case(
        _like_llama("deepseek_v3", "DeepseekV3", **deepseek.V3, rope_scaling=deepseek.YARN)
    ),
    "llama 4": Case(llama4.LLAMA4),
    "llama 4, rotating": Case(llama4.ROTATING),
    "mamba 2": Case(hybrids.MAMBA2),
    "nemotron h": Case(hybrids.NEMOTRON),
    "nemotron h, older file": Case(
        {
            **hybrids.NEMOTRON,
            "hybrid_override_pattern": "-M",
            "layers_block_type": None,
            "num_hidden_layers": 2,
        }
    ),
    "nemotron h mixture": Case({**hybrids.NEMOTRON, **hybrids.MIXTURE}),
    "falcon h1": Case(hybrids.FALCON),
    "falcon h1 with a norm": Case(hybrids.FALCON_WITH_NORM),
    "gpt2": Case(_GPT2),
    "gpt2 exact": Case({**_GPT2, "activation_function": "gelu", "n_inner": 40}),
}


def tensors_of(case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    """Return random tensors for a folder, the same ones for the same seed."""
    kind = _FAMILIES.get(case.config["model_type"])
    if kind is not None:
        shapes = kind.shapes(case.config)
    else:
        shapes = _gpt2_shapes(case.config) if case.is_gpt2 else _llama_shapes(case)
    generator = torch.Generator().manual_seed(seed)
    norms = 1.0 if kind is None else kind.norms
    return {name: _draw(name, shape, generator, norms).to(dtype) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator, norms: float) -> Tensor:
    is_norm = len(shape) == 1 and name.endswith("weight")
    return torch.randn(shape, generator=generator) * 0.2 + (norms if is_norm else 0.0)


def _head_size(config: Mapping[str, Any]) -> int:
    if "qk_rope_head_dim" in config:
        return int(config["qk_rope_head_dim"])
    return config.get("head_dim") or HIDDEN // HEADS


def _llama_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    config, size = case.config, _head_size(case.config)
    rows = {"q": HEADS * size, "k": config["num_key_value_heads"] * size}
    rows["v"] = rows["k"]
    table = (config["vocab_size"], HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        if "kv_lora_rank" in config:
            rows = {}
            shapes |= deepseek.shapes(config, layer)
        for kind, out in rows.items():
            shapes[f"{at}self_attn.{kind}_proj.weight"] = (out, HIDDEN)
            if case.qkv_bias:
                shapes[f"{at}self_attn.{kind}_proj.bias"] = (out,)
        if case.head_norm:
            shapes |= {f"{at}self_attn.{kind}_norm.weight": (size,) for kind in "qk"}
        if case.projection_norm:
            shapes |= {f"{at}self_attn.{kind}_norm.weight": (rows[kind],) for kind in "qk"}
        if rows:
            shapes[f"{at}self_attn.o_proj.weight"] = (HIDDEN, HEADS * size)
        shapes |= _mlp_shapes(config, layer)
        shapes[f"{at}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}post_attention_layernorm.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = table
    return shapes


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _is_mixture(config: Mapping[str, Any], layer: int) -> bool:
    if "n_routed_experts" in config:
        return bool(layer >= config["first_k_dense_replace"])
    if "num_experts" not in config:
        return "num_local_experts" in config
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", ())
    return layer % step == step - 1 and layer not in dense


def _mixture(config: Mapping[str, Any]) -> tuple[str, tuple[str, str, str], int]:
    """Return the names of a mixture's module and of an expert's matrices, and how many experts."""
    if "num_local_experts" in config:
        return "block_sparse_moe", ("w1", "w3", "w2"), config["num_local_experts"]
    return "mlp", _PROJECTIONS, config.get("num_experts") or config["n_routed_experts"]


def _mlp_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a layer's MLP or mixture."""
    inner, at = config["intermediate_size"], f"model.layers.{layer}"
    if not _is_mixture(config, layer):
        return _three(f"{at}.mlp", _PROJECTIONS, inner)
    module, names, experts = _mixture(config)
    at, inner = f"{at}.{module}", config.get("moe_intermediate_size", inner)
    shapes: dict[str, tuple[int, ...]] = {f"{at}.gate.weight": (experts, HIDDEN)}
    for expert in range(experts):
        shapes |= _three(f"{at}.experts.{expert}", names, inner)
    if "n_shared_experts" in config:
        width = config["n_shared_experts"] * inner
        shapes |= _three(f"{at}.shared_experts", _PROJECTIONS, width)
        if config["model_type"] == "deepseek_v3":
            shapes[f"{at}.gate.e_score_correction_bias"] = (experts,)
    shared = config.get("shared_expert_intermediate_size")
    if shared is not None:
        shapes |= _three(f"{at}.shared_expert", _PROJECTIONS, shared)
        shapes[f"{at}.shared_expert_gate.weight"] = (1, HIDDEN)
    return shapes


def _three(at: str, names: tuple[str, str, str], inner: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{at}.{name}.weight" for name in names)
    return {gate: (inner, HIDDEN), up: (inner, HIDDEN), down: (HIDDEN, inner)}


def _gpt2_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    inner = config.get("n_inner") or 4 * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config["vocab_size"], HIDDEN),
        "transformer.wpe.weight": (POSITIONS, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}."
        for name, (size, out) in {
            "attn.c_attn": (HIDDEN, 3 * HIDDEN),
            "attn.c_proj": (HIDDEN, HIDDEN),
            "mlp.c_fc": (HIDDEN, inner),
            "mlp.c_proj": (inner, HIDDEN),
        }.items():
            shapes |= {f"{at}{name}.weight": (size, out), f"{at}{name}.bias": (out,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{at}{name}.{kind}": (HIDDEN,) for kind in ("weight", "bias")}
    return shapes | {f"transformer.ln_f.{kind}": (HIDDEN,) for kind in ("weight", "bias")}


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Tensors, shards: int = 1
) -> Path:
    """Write a folder as `transformers` does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    places = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[index::shards]}
        save_file(part, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index_text = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index_text)
    return folder


def logits(case: Case, tensors: Tensors, tokens: Tensor) -> Tensor:
    """Compute logits in float64: [b, s] -> [b, s, v]."""
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    kind = _FAMILIES.get(case.config["model_type"])
    if kind is not None:
        return kind.logits(case.config, wide, tokens)
    return (_gpt2 if case.is_gpt2 else _llama)(case, wide, tokens)


def _llama(case: Case, w: Tensors, tokens: Tensor) -> Tensor:
    config, eps = case.config, case.config["rms_norm_eps"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]

    def project(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    x = w["model.embed_tokens.weight"][tokens]
    angles = decoders.angles_of(config, _head_size(config), tokens.shape[1])
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        normal = norm(x, f"{at}.input_layernorm")
        if "kv_lora_rank" in config:
            context = _attention(*deepseek.heads_of(config, w, layer, normal, angles))
            x = x + project(context, f"{at}.self_attn.o_proj")
            x = x + _feed(config, w, layer, norm(x, f"{at}.post_attention_layernorm"))
            continue
        q, k, v = (
            project(normal, f"{at}.self_attn.{kind}_proj").unflatten(-1, (-1, _head_size(config)))
            for kind in "qkv"
        )
        if case.head_norm:
            q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
        if case.projection_norm:
            q = norm(q.flatten(2), f"{at}.self_attn.q_norm").view_as(q)
            k = norm(k.flatten(2), f"{at}.self_attn.k_norm").view_as(k)
        q, k = (_turn(x, angles) * decoders.concentration(config) for x in (q, k))
        context = _attention(q, k, v, _window(config, layer))
        x = x + project(context, f"{at}.self_attn.o_proj")
        normal = norm(x, f"{at}.post_attention_layernorm")
        x = x + _feed(config, w, layer, normal)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return F.linear(norm(x, "model.norm"), head)


def _feed(config: Mapping[str, Any], w: Tensors, layer: int, x: Tensor) -> Tensor:
    """Apply a layer's MLP or its mixture, token by token."""

    def mlp(x: Tensor, at: str, names: tuple[str, str, str]) -> Tensor:
        gate, up, down = (w[f"{at}.{name}.weight"] for name in names)
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    if not _is_mixture(config, layer):
        return mlp(x, f"model.layers.{layer}.mlp", _PROJECTIONS)
    module, names, _ = _mixture(config)
    if "n_routed_experts" in config:
        at = f"model.layers.{layer}.{module}"
        return deepseek.mixture(config, w, at, x, lambda x, at: mlp(x, at, names))
    at, out = f"model.layers.{layer}.{module}", torch.zeros_like(x)
    for place in itertools.product(*map(range, x.shape[:2])):
        scores = (w[f"{at}.gate.weight"] @ x[place]).softmax(0)
        best, chosen = scores.topk(config["num_experts_per_tok"])
        if config.get("norm_topk_prob", True):
            best = best / best.sum()
        for weight, expert in zip(best, chosen.tolist(), strict=True):
            out[place] += weight * mlp(x[place], f"{at}.experts.{expert}", names)
    if "shared_expert_intermediate_size" in config:
        gate = torch.sigmoid(x @ w[f"{at}.shared_expert_gate.weight"].t())
        out += gate * mlp(x, f"{at}.shared_expert", _PROJECTIONS)
    return out


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate [b, s, n, d], treating channels i and i + d/2 as a complex number."""
    real, imaginary = x.chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def _window(config: Mapping[str, Any], layer: int) -> int | None:
    """Return how many tokens each token attends to, including itself, or None for all."""
    if not config.get("use_sliding_window", True):
        return None
    if "layer_types" in config:
        limited = config["layer_types"][layer] == "sliding_attention"
    else:
        limited = layer >= config.get("max_window_layers", 0)
    return config.get("sliding_window") if limited else None


def _attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Apply causal attention: [b, s, n, d] and keys, values [b, s, g, d] -> [b, s, n d]."""
    length, sharing = q.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(sharing, 2), v.repeat_interleave(sharing, 2)
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(q.shape[-1])
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    unseen = (distance < 0) | (distance >= (window or length))
    weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
    return torch.einsum("bnst,btnd->bsnd", weights, v).flatten(2)


def _gpt2(case: Case, w: Tensors, tokens: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def project(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    exact = case.config["activation_function"] == "gelu"
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: tokens.shape[1]]
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}"
        parts = project(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in parts)
        x = x + project(_attention(q, k, v), f"{at}.attn.c_proj")
        inner = project(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")
        inner = F.gelu(inner, approximate="none" if exact else "tanh")
        x = x + project(inner, f"{at}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].t()
