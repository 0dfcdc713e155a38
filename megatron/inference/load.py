"""A trained model from its checkpoint alone: shape, tokenizer and precision are in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpoint.hf.files import COMPANION_FOLDER
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.restore import restore
from megatron.config import RunConfig
from megatron.config.data import TokenizerConfig
from megatron.config.yaml_file import from_dict
from megatron.device import Device
from megatron.errors import CheckpointError
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training.checkpointing import model_state


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and what it was trained with."""

    model: GPTModel
    tokenizer: Tokenizer
    config: RunConfig
    iteration: int


def load_gpt(folder: str, device: Device) -> Loaded:
    """The newest complete checkpoint under `folder`, as one process.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    reader = open_checkpoint(Path(folder))
    if reader is None:
        raise CheckpointError(f"--load {folder}: there is no checkpoint in this folder")
    config = from_dict(reader.meta["config"], folder)
    model = GPTModel.from_config(config, Layout.single(), device, reader.meta["padded_vocab_size"])
    restore(reader, model_state([model]), prefixes=("model.",), cast=True)
    tokenizer = build_tokenizer(_found_again(config.tokenizer, Path(folder) / COMPANION_FOLDER))
    return Loaded(model, tokenizer, config, reader.iteration)


def _found_again(config: TokenizerConfig, beside: Path) -> TokenizerConfig:
    """An imported model's tokenizer files are in `beside`, wherever the folder was moved to."""

    def find(path: str | None) -> str | None:
        if path is None or Path(path).exists():
            return path
        moved = beside / Path(path).name
        return str(moved) if moved.is_file() else path

    return replace(
        config,
        tokenizer_model=find(config.tokenizer_model),
        vocab_file=find(config.vocab_file),
        merge_file=find(config.merge_file),
    )
