"""What each family of models offers to reader and writer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from megatron.checkpoint.hf.rules import Rule
from megatron.checkpoint.hf.settings import Settings
from megatron.config.model import NETWORK_FIELDS, ModelConfig, is_irrelevant


@dataclass(frozen=True)
class Described:
    """What a config.json describes.

    Attributes:
        model: the network by our flags.
        vocab: rows of the word embedding.
        notices: lines for the user about what is different here.
        window: tokens that a token attends to, itself included; None: all before it.
    """

    model: ModelConfig
    vocab: int
    notices: tuple[str, ...] = ()
    window: int | None = None


class Family(Protocol):
    """Models that share a config.json and tensor names."""

    @property
    def name(self) -> str:
        """`model_type` in config.json."""

    @property
    def prefix(self) -> str:
        """Begins the names of all tensors but the head's; some files leave it out. Or empty."""

    @property
    def tied_head(self) -> str:
        """What files may call the word embeddings a second time, as the output's weight."""

    @property
    def head_follows_files(self) -> bool:
        """The output has a weight of its own where files hold one that differs from the word
        embeddings, although config.json may call the two tied."""

    @property
    def word_copies(self) -> tuple[str, ...]:
        """Further names that files may have for the word embeddings."""

    def architecture(self, pieces: frozenset[str]) -> str:
        """The class of `transformers`.

        Args:
            pieces: those that are there, of the ones that the family's files may lack.
        """

    def read(self, settings: Settings) -> Described:
        """The network of a config.json.

        Raises:
            CheckpointError: names the key whose value our network cannot express.
        """

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """A config.json for a network; of one that the family cannot express, the nearest.

        See `misfits`.
        """

    def rules(self, model: ModelConfig, vocab: int) -> list[Rule]:
        """How each parameter is made of tensors, in the order in which files hold them."""

    def is_derived(self, name: str) -> bool:
        """Whether a tensor in a file follows from config.json (masks, frequencies)."""


def misfits(family: Family, model: ModelConfig, vocab: int) -> list[str]:
    """What the family's config.json cannot say about a network, a line each."""
    written = Settings(family.write(model, vocab), "config.json")
    said = family.read(written).model
    differing = differing_fields(model, said)
    values = {name: (getattr(model, name), getattr(said, name)) for name in differing}
    # What the flag alone does not tell, as it follows from others, these others do.
    values = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
    if not values:
        values = {name: (_meaning(model, name), _meaning(said, name)) for name in differing}
    return [
        f"{name} is {ours}, a {family.name} model has {theirs}"
        for name, (ours, theirs) in values.items()
    ]


def differing_fields(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Names of the network fields whose values mean different networks."""
    return [
        name
        for name in NETWORK_FIELDS
        if not is_irrelevant(one, name) and _meaning(one, name) != _meaning(other, name)
    ]


def _meaning(model: ModelConfig, name: str) -> Any:
    match name:
        case "num_query_groups" | "group_query_attention":
            return model.kv_heads
        case "rotary_seq_len_interpolation_factor":
            return model.rotary_seq_len_interpolation_factor or 1
        case "openai_gelu":
            # Compared as one; BERT's head for masked tokens has an activation of its own.
            return model.activation, model.architecture == "bert" and model.openai_gelu
        case "add_qkv_bias":
            return model.add_bias_linear or model.add_qkv_bias
    return getattr(model, name)
