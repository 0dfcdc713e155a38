"""The table of model families, and the choice of a family for a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatron.checkpoint.huggingface.bert import Bert
from megatron.checkpoint.huggingface.bloom_falcon import Bloom, Falcon
from megatron.checkpoint.huggingface.deepseek import DeepSeek
from megatron.checkpoint.huggingface.falcon_h1 import FalconH1
from megatron.checkpoint.huggingface.gemma import Gemma
from megatron.checkpoint.huggingface.gpt2 import GPT2
from megatron.checkpoint.huggingface.gpt_oss import GptOss
from megatron.checkpoint.huggingface.interleaved import GPTJ, Cohere
from megatron.checkpoint.huggingface.llama import LlamaLike
from megatron.checkpoint.huggingface.llama4 import Llama4
from megatron.checkpoint.huggingface.mamba import Mamba2, NemotronH
from megatron.checkpoint.huggingface.mixtures import Mixtral, Olmoe, QwenMixture
from megatron.checkpoint.huggingface.neox import NeoX, StableLm
from megatron.checkpoint.huggingface.olmo import Olmo
from megatron.checkpoint.huggingface.phi import Phi
from megatron.checkpoint.huggingface.qwen_next import QwenNext
from megatron.checkpoint.huggingface.rules import Family
from megatron.checkpoint.huggingface.settings import Settings
from megatron.checkpoint.huggingface.t5 import T5
from megatron.config.attention import delta_net_layers, layer_windows, rotary_layers
from megatron.config.experts import mixture_layers
from megatron.config.hybrid import layer_symbols
from megatron.config.model import NETWORK_FIELDS, ModelConfig, is_irrelevant
from megatron.errors import CheckpointError
from megatron.models.plan import RotaryPlan, rotaries
from megatron.models.plans import model_plan

# A network that several families can express is written as the first of them.
FAMILIES: list[Family] = [
    LlamaLike("llama", "LlamaForCausalLM", optional_kv_heads=True),
    LlamaLike("mistral", "MistralForCausalLM", window="model"),
    LlamaLike("qwen2", "Qwen2ForCausalLM", qkv_bias=True, window="layers"),
    LlamaLike("qwen3", "Qwen3ForCausalLM", qk_norm="head", window="layers", head_size=128),
    Mixtral("mixtral", "MixtralForCausalLM", window="model", rotary_base=1e6),
    QwenMixture("qwen2_moe", "Qwen2MoeForCausalLM", qkv_bias=True, window="layers", shared=True),
    QwenMixture("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm="head", window="layers"),
    QwenNext("qwen3_next", "Qwen3NextForCausalLM"),
    Olmoe(
        "olmoe", "OlmoeForCausalLM", qk_norm="projection", optional_kv_heads=True, classifies=False
    ),
    Gemma("gemma", "GemmaForCausalLM"),
    Gemma("gemma2", "Gemma2ForCausalLM", version=2),
    Gemma("gemma3_text", "Gemma3ForCausalLM", version=3, qk_norm="head", classifies=False),
    Olmo("olmo2", "Olmo2ForCausalLM"),
    Olmo("olmo3", "Olmo3ForCausalLM", has_windows=True, rotary_base=500000.0),
    Phi("phi3", "Phi3ForCausalLM"),
    NeoX("gpt_neox", "GPTNeoXForCausalLM"),
    StableLm("stablelm", "StableLmForCausalLM"),
    GPTJ("gptj", "GPTJForCausalLM"),
    Cohere("cohere", "CohereForCausalLM", rotary_base=500000.0),
    Cohere("cohere2", "Cohere2ForCausalLM", has_windows=True),
    Bloom("bloom", "BloomForCausalLM"),
    Falcon("falcon", "FalconForCausalLM"),
    GptOss("gpt_oss", "GptOssForCausalLM"),
    Llama4("llama4_text", "Llama4ForCausalLM"),
    DeepSeek("deepseek_v2", "DeepseekV2ForCausalLM"),
    DeepSeek("deepseek_v3", "DeepseekV3ForCausalLM", biased=True),
    Mamba2("mamba2", "Mamba2ForCausalLM"),
    NemotronH("nemotron_h", "NemotronHForCausalLM"),
    FalconH1("falcon_h1", "FalconH1ForCausalLM"),
    *(GPT2(), Bert(), T5()),
]


def families() -> Mapping[str, Family]:
    """Return the families by `model_type`."""
    return {family.name: family for family in FAMILIES}


def family_named(name: object, path: object) -> Family:
    """Return the family with a given `model_type`.

    Args:
        name: The `model_type`.
        path: The file, for messages.

    Raises:
        CheckpointError: The `model_type` is not supported.
    """
    known = families()
    if not isinstance(name, str) or name not in known:
        choices = ", ".join(known)
        raise CheckpointError(
            f"{path}: model_type {name!r} is not supported: choose from {choices}"
        )
    return known[name]


def family_for(model: ModelConfig, vocab: int, model_type: str | None) -> Family:
    """Return the requested family, or the first one that can express a network.

    Args:
        model: The network.
        vocab: Number of rows of the word embedding.
        model_type: The requested `model_type`, which must be known. None accepts any.

    Raises:
        CheckpointError: The requested family cannot express the network, or none can. The message
            says why, for each family of the same architecture, beginning with the nearest.
    """
    known = families()
    candidates = [known[model_type]] if model_type else list(known.values())
    problems: list[list[str]] = []
    for family in candidates:
        differences = mismatches(family, model, vocab)
        if not differences:
            return family
        is_kind = not any(line.startswith("architecture ") for line in differences)
        if is_kind or model_type:
            problems.append(differences)
    subject = f"a {model_type} model cannot" if model_type else "no family can"
    lines = ["; ".join(differences) for differences in sorted(problems, key=len)]
    raise CheckpointError(f"{subject} express this network:\n  " + "\n  ".join(lines))


def family_and_network(
    model: ModelConfig, vocab: int, model_type: str | None
) -> tuple[Family, ModelConfig]:
    """Return the family of an export, and the network without layers that the family never has.

    Only the layers of multi-token prediction can be left out: the network predicts the next token
    as before.

    Args:
        model: The network.
        vocab: Number of rows of the word embedding.
        model_type: The requested `model_type`, or `None` for the first family that fits.

    Raises:
        CheckpointError: As in `family_for`.
    """
    try:
        return family_for(model, vocab, model_type), model
    except CheckpointError:
        plain = replace(model, mtp_num_layers=None)
        with suppress(CheckpointError):
            return family_for(plain, vocab, model_type), plain
        raise


def mismatches(family: Family, model: ModelConfig, vocab: int) -> list[str]:
    """Return a line for each setting of a network that a family's config.json cannot express.

    Return only the reason if the nearest config.json that the family could write is invalid.
    """
    written = Settings(family.write(model, vocab), "config.json")
    try:
        round_trip = family.read(written).model
    except CheckpointError as error:  # the nearest network that the family could write is invalid
        return [str(error)]
    differing = differing_fields(family, model, round_trip)
    values = {name: (getattr(model, name), getattr(round_trip, name)) for name in differing}
    # If the flags are equal but their meanings differ, show the meanings, which depend on other
    # flags.
    values = {name: pair for name, pair in values.items() if pair[0] != pair[1]} or {
        name: (_meaning(family, model, name), _meaning(family, round_trip, name))
        for name in differing
    }
    return [
        f"{name} is {requested}, but a {family.name} model has {expressed}"
        for name, (requested, expressed) in values.items()
    ]


def differing_fields(family: Family, first: ModelConfig, second: ModelConfig) -> list[str]:
    """Return the names of the fields in which two networks differ in meaning, not only in value.

    Fields that have no effect in the first network are ignored.
    """
    return [
        name
        for name in NETWORK_FIELDS
        if not is_irrelevant(first, name)
        and _meaning(family, first, name) != _meaning(family, second, name)
    ]


# Fields that choose layers. The same pattern of layers can be written in several ways.
_PATTERNS: Mapping[str, Callable[[ModelConfig, int], tuple[Any, ...]]] = {
    "linear_attention_freq": delta_net_layers,
    "no_rope_freq": rotary_layers,
    "window_attn_skip_freq": layer_windows,
    "window_size": layer_windows,
}


def _meaning(family: Family, model: ModelConfig, name: str) -> Any:
    if name.startswith("moe_"):
        return _meaning_for_experts(model, name)
    value = getattr(model, name)
    match name:
        case "num_query_groups" | "group_query_attention":
            value = model.kv_heads
        case "window_size" | "window_attn_skip_freq" | "linear_attention_freq" | "no_rope_freq":
            value = _PATTERNS[name](model, model.num_layers)
        case "softmax_scale":
            value = value or model.kv_channels**-0.5
        case "window_rotary_base" if value is None:
            value = _window_rotation(model)
        case "rotary_seq_len_interpolation_factor" | "logit_scale":
            value = value or 1
        case "glu_linear_offset" | "activation_func_clamp_value" if not model.is_gated:
            value = None
        case "openai_gelu":
            # Include the flag itself if it also chooses the activation function of the head.
            value = model.activation, family.head_activates and model.openai_gelu
        case "num_experts":  # a layer with one expert is dense, which the pattern also expresses
            value = model.expert_counts
        case "add_qkv_bias":
            value = model.add_bias_linear or model.add_qkv_bias
        case "hybrid_layer_pattern":
            value = layer_symbols(value) or None
        case "ffn_hidden_size" if all(mixture_layers(model, model.num_layers)):
            value = None  # there is no dense MLP
    return value


def _window_rotation(model: ModelConfig) -> float | RotaryPlan | None:
    """Return how layers with windows rotate if --window-rotary-base is not given.

    They rotate like the other layers. The result is the base alone if frequencies are neither
    interpolated nor scaled, otherwise the whole rotary plan; `None` without rotary embeddings.
    """
    plan = next(iter(rotaries(model_plan(model, 1).layers)), None)
    if plan and plan == RotaryPlan(plan.positions, plan.channels, plan.base):
        return plan.base
    return plan


def _meaning_for_experts(model: ModelConfig, name: str) -> Any:
    if not model.num_experts:
        return None
    value = getattr(model, name)
    match name:
        case "moe_layer_freq":  # the same pattern can be written in several ways
            value = mixture_layers(model, model.num_layers)
        case "moe_ffn_hidden_size":
            value = value or model.ffn_hidden_size
        case "moe_router_num_groups" | "moe_router_group_topk" | "moe_router_topk_scaling_factor":
            value = value or 1
        case "moe_router_group_score_topk":
            groups = model.moe_router_group_topk or 1
            value = (value or model.moe_router_topk // groups) if groups > 1 else None
    return value
