"""The families that our models express."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.checkpoint.hf.bert import Bert
from megatron.checkpoint.hf.family import Family, misfits
from megatron.checkpoint.hf.gpt2 import GPT2
from megatron.checkpoint.hf.llama import LlamaLike
from megatron.checkpoint.hf.t5 import T5
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError


def families() -> Mapping[str, Family]:
    """By `model_type`. A network that several can express is written as the first of them."""
    known: tuple[Family, ...] = (
        LlamaLike("llama", "LlamaForCausalLM", old_files=True),
        LlamaLike("mistral", "MistralForCausalLM", window=True),
        LlamaLike("qwen2", "Qwen2ForCausalLM", qkv_bias=True, window=True),
        LlamaLike("qwen3", "Qwen3ForCausalLM", head_norm=True, window=True, head_size=128),
        GPT2(),
        Bert(),
        T5(),
    )
    return {family.name: family for family in known}


def family_named(name: object, path: object) -> Family:
    """The family of a config.json's `model_type`.

    Raises:
        CheckpointError: it is not among those known.
    """
    known = families()
    if not isinstance(name, str) or name not in known:
        raise CheckpointError(
            f"{path}: model_type {name!r} is not known: possible are {', '.join(known)}"
        )
    return known[name]


def family_for(model: ModelConfig, vocab: int, wanted: str | None) -> Family:
    """The family to write a network as: the wanted one, or the first that can express it.

    Raises:
        CheckpointError: says for each what does not fit.
    """
    known = families()
    candidates = [known[wanted]] if wanted else list(known.values())
    problems = []
    for family in candidates:
        found = misfits(family, model, vocab)
        if not found:
            return family
        is_kind = not any(line.startswith("architecture ") for line in found)
        if is_kind or wanted:
            problems.append("; ".join(found))
    which = f"a {wanted} model cannot" if wanted else "no family can"
    raise CheckpointError(f"{which} express this network:\n  " + "\n  ".join(problems))
