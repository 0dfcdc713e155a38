"""The sizes of a network as plain numbers, and those that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.config.run import known


@dataclass(frozen=True)
class Sizes:
    """Sizes of the whole network, whatever part a process holds."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    positions: int
    up_parts: int

    @property
    def query(self) -> int:
        """All query heads side by side."""
        return self.heads * self.head_size

    @property
    def qkv(self) -> int:
        """All queries, keys and values side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def up(self) -> int:
        """Output of the MLP's first matrix: with a gated one gate and up."""
        return self.up_parts * self.ffn


@dataclass(frozen=True)
class Ending:
    """What a model ends in, and for how many of its sequences at once.

    Attributes:
        outputs: of a sequence, where a task's head stands; None: a token has one for each entry of
            the vocabulary.
        texts: sequences of a sample: a question with each of its answers is one.
    """

    outputs: int | None = None
    texts: int = 1

    @property
    def guesses_tokens(self) -> bool:
        """Each token has an output for each entry of the vocabulary."""
        return self.outputs is None


IN_WORDS = Ending()


def sizes_of(model: ModelConfig) -> Sizes:
    """Read the sizes from resolved flags."""
    return Sizes(
        layers=known(model.num_layers),
        hidden=known(model.hidden_size),
        ffn=known(model.ffn_hidden_size),
        heads=known(model.num_attention_heads),
        kv_heads=model.kv_heads,
        head_size=known(model.kv_channels),
        positions=known(model.max_position_embeddings),
        up_parts=2 if model.is_gated else 1,
    )
