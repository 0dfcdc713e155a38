"""The flags of the network that a Hugging Face folder's config.json describes."""

from __future__ import annotations

import shlex
from pathlib import Path

from megatron.checkpoint.huggingface.families import family_named
from megatron.checkpoint.huggingface.files import CONFIG, tokenizer_in
from megatron.checkpoint.huggingface.settings import Settings, read_json
from megatron.config.data import TokenizerConfig
from megatron.config.fields import fields_of
from megatron.config.model import ModelConfig, ModelOptions


def derive_flags(path: Path) -> tuple[str, list[str]]:
    """Return the kind of network, and the flags for the network and for its tokenizer.

    Args:
        path: A config.json, or its folder. Beside the file, only the tokenizer's files are read.

    Raises:
        CheckpointError: The file cannot be read, or describes a network that is not supported.
    """
    file = path if path.suffix == ".json" else path / CONFIG
    values = read_json(file)
    model = family_named(values.get("model_type"), file).read(Settings(values, file)).model
    flags = _differences(model, ModelOptions)
    flags += _differences(tokenizer_in(file.parent, model.architecture), TokenizerConfig)
    return model.architecture, flags


def _differences(values: ModelConfig | TokenizerConfig, options: type) -> list[str]:
    """Return the flags for the values that are not the defaults."""
    words: list[str] = []
    for field in fields_of(options):
        value = getattr(values, field.name)
        if field.names and value is not None and value != field.default:
            words += shlex.split(field.spell(value))
    return words
