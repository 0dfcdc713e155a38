"""Mixtures of experts that otherwise resemble Llama: Mixtral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.checkpoint.huggingface.llama import LlamaLike
from megatron.checkpoint.huggingface.settings import Settings
from megatron.config.experts import MOST_EXPERTS
from megatron.config.model import ModelConfig

_MOST_IN_ALL = 1 << 18  # experts of all layers; the largest models have some ten thousand


@dataclass(frozen=True)
class ExpertTable:
    """The names of a mixture in a family's files.

    Attributes:
        count: The key of config.json with the number of experts.
        once: Each of our modules outside the experts, with theirs.
        each: Each of our modules of the experts, with an expert's modules; {} is the expert's
            index.
    """

    count: str
    once: Mapping[str, Sequence[str]]
    each: Mapping[str, Sequence[str]]


MIXTRAL = ExpertTable(
    count="num_local_experts",
    once={"mlp.router": ("block_sparse_moe.gate",)},
    each={
        "mlp.experts.up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "mlp.experts.down": ("block_sparse_moe.experts.{}.w2",),
    },
)
_OTHER_COUNT = {"num_local_experts": "num_experts", "num_experts": "num_local_experts"}


@dataclass(frozen=True)
class MixtureLike(LlamaLike):
    """A family whose layers are mixtures of SwiGLU experts, chosen by softmax.

    Attributes:
        table: The names of the mixture.
    """

    table: ExpertTable = field(default=MIXTRAL)

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        dense = super().network(settings, flags)
        count, other = self.table.count, _OTHER_COUNT[self.table.count]
        named = count if count in settings.values else other  # versions of transformers differ
        experts = settings.size(named, None, min(MOST_EXPERTS, _MOST_IN_ALL // dense.num_layers))
        for key in (count, other):
            settings.must_be(key, experts)
        return replace(
            dense,
            num_experts=experts,
            moe_router_topk=settings.size("num_experts_per_tok", None, experts),
        )

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return a config.json. A dense network becomes a mixture of a single expert."""
        experts = model.num_experts or 1
        return {
            **super().write(model, vocab),
            "intermediate_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
            self.table.count: experts,
            "num_experts_per_tok": min(model.moe_router_topk, experts),
        }

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return each of our modules in a layer with the Hugging Face modules that it combines."""
        experts = {
            ours: [
                name.format(expert) for expert in range(model.num_experts or 0) for name in names
            ]
            for ours, names in self.table.each.items()
        }
        return {**super().modules(model), **self.table.once, **experts}
