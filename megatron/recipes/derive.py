"""Recipes and network flags from a Hugging Face folder's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.huggingface.families import family_named
from megatron.checkpoint.huggingface.files import CONFIG, tokenizer_in
from megatron.checkpoint.huggingface.rules import ModelDescription
from megatron.checkpoint.huggingface.settings import Settings, read_json
from megatron.config.data import TokenizerConfig
from megatron.config.fields import fields_of
from megatron.config.model import ModelConfig
from megatron.config.run import field_at, sections
from megatron.models.arithmetic import count_parameters
from megatron.models.plan import LANGUAGE_MODEL_HEAD
from megatron.models.plans import model_plan
from megatron.tokenizer.build import vocabulary_multiple


def describe_network(path: Path) -> ModelDescription:
    """Return the network and the vocabulary size that a config.json describes.

    Args:
        path: A config.json or its folder.

    Raises:
        CheckpointError: The file cannot be read, or describes a network that is not supported.
    """
    file = _file(path)
    values = read_json(file)
    return family_named(values.get("model_type"), file).read(Settings(values, file))


def describe_run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of a recipe for the model that a config.json describes.

    Args:
        path: A config.json or its folder. Only this file and the tokenizer's files are read.

    Returns:
        The facts about the network, as in the section `recipe` of a YAML file; and, by
        "section.field", the architecture and the values that differ from their defaults.

    Raises:
        CheckpointError: A file cannot be read, or the network is not supported.
    """
    described = describe_network(path)
    model, folder = described.model, _file(path).parent
    plan = model_plan(model, described.vocab, LANGUAGE_MODEL_HEAD)
    facts = {
        "title": f"the network of {_file(path)}",
        "parameters": count_parameters(plan),
        "vocabulary": described.vocab,
    }
    values = {"model.architecture": model.architecture} | _differences("model", model)
    return facts, values | _differences("tokenizer", tokenizer_in(folder, model.architecture))


def network_flags(model: ModelConfig) -> list[str]:
    """Return the flags that describe a network, without those at their defaults."""
    return _flags(_differences("model", model))


def derive_flags(path: Path) -> tuple[str, list[str]]:
    """Return the kind of network, and the flags for the network and its tokenizer.

    Args:
        path: A config.json or its folder. Only this file and the tokenizer's files are read.

    Raises:
        CheckpointError: A file cannot be read, or the network is not supported.
    """
    described = describe_network(path)
    model = replace(
        described.model, make_vocab_size_divisible_by=vocabulary_multiple(described.vocab)
    )
    tokenizer = tokenizer_in(_file(path).parent, model.architecture)
    return model.architecture, network_flags(model) + _flags(_differences("tokenizer", tokenizer))


def _file(path: Path) -> Path:
    return path if path.suffix == ".json" else path / CONFIG


def _differences(section: str, values: ModelConfig | TokenizerConfig) -> dict[str, Any]:
    """Return the values that have flags and differ from the defaults, by "section.field"."""
    differences = {}
    for field in fields_of(sections()[section]):
        value = getattr(values, field.name)
        if field.names and value is not None and value != field.default:
            differences[f"{section}.{field.name}"] = value
    return differences


def _flags(values: Mapping[str, Any]) -> list[str]:
    return [word for path, value in values.items() for word in field_at(path).to_args(value)]
