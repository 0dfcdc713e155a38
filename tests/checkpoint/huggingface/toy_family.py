"""A family unknown to the package: adding one takes this module and a line in a table."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.huggingface.rules import Family, Key, Names, layer_names
from megatron.checkpoint.huggingface.settings import MAX_HEADS, MAX_LAYERS, Settings
from megatron.config.model import ModelConfig

_KEYS = (
    Key("width", "hidden_size"),
    Key("inner", "ffn_hidden_size"),
    Key("blocks", "num_layers", max_value=MAX_LAYERS),
    Key("heads", "num_attention_heads", max_value=MAX_HEADS),
    Key("groups", "num_query_groups", max_value=MAX_HEADS),
    Key("head_width", "kv_channels", max_value=MAX_HEADS),
    Key("context", "max_position_embeddings"),
)
_BLOCK = {
    "attention_norm": ("before",),
    "attention.qkv": ("see.ask", "see.find", "see.tell"),
    "attention.output": ("see.out",),
    "mlp_norm": ("between",),
    "mlp.up": ("think.up",),
    "mlp.down": ("think.down",),
}


class Toy(Family):
    """A decoder with learned positions, grouped queries, ReLU, and biases only in its queries."""

    def __init__(self) -> None:
        super().__init__("toy", "ToyForCausalLM", tied_head="say.weight", keys=_KEYS)

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        return ModelConfig(
            **flags,
            group_query_attention=True,
            relu=True,
            add_bias_linear=False,
            add_qkv_bias=True,
            untie_embeddings_and_output_weights=True,
        )

    def names(self, model: ModelConfig) -> Names:
        yield "embedding.word", ["hear"]
        yield "embedding.position", ["where"]
        for layer in range(model.num_layers):
            yield from layer_names(f"layers.{layer}", f"block.{layer}", _BLOCK)
        yield "final_norm", ["after"]
        yield "output", ["say"]
