"""The flags of the network that a Hugging Face folder's config.json describes."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.huggingface.families import family_named
from megatron.checkpoint.huggingface.files import CONFIG, tokenizer_in
from megatron.checkpoint.huggingface.rules import Described
from megatron.checkpoint.huggingface.settings import Settings, read_json
from megatron.config.data import TokenizerConfig
from megatron.config.fields import fields_of
from megatron.config.model import ModelConfig, ModelOptions


def describe_network(path: Path) -> Described:
    """Return the network and the vocabulary that a config.json describes.

    Args:
        path: A config.json, or its folder.

    Raises:
        CheckpointError: The file cannot be read, or describes a network that is not supported.
    """
    file = _file(path)
    values = read_json(file)
    return family_named(values.get("model_type"), file).read(Settings(values, file))


def network_flags(model: ModelConfig) -> list[str]:
    """Return the flags for a network."""
    return _differences(model, ModelOptions)


def derive_flags(path: Path) -> tuple[str, list[str]]:
    """Return the kind of network, and the flags for the network and for its tokenizer.

    Args:
        path: A config.json, or its folder. Beside the file, only the tokenizer's files are read.

    Raises:
        CheckpointError: The file cannot be read, or describes a network that is not supported.
    """
    model = describe_network(path).model
    tokenizer = tokenizer_in(_file(path).parent, model.architecture)
    return model.architecture, network_flags(model) + _differences(tokenizer, TokenizerConfig)


def _file(path: Path) -> Path:
    return path if path.suffix == ".json" else path / CONFIG


def _differences(values: ModelConfig | TokenizerConfig, options: type) -> list[str]:
    """Return the flags for the values that are not the defaults."""
    words: list[str] = []
    for field in fields_of(options):
        value = getattr(values, field.name)
        if field.names and value is not None and value != field.default:
            words += field.words(value)
    return words
