"""Write a checkpoint as a Hugging Face folder: safetensors shards, their index, config.json."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from megatron import durable
from megatron.checkpoint.entries import WORD_EMBEDDING, LazyTensor
from megatron.checkpoint.huggingface.families import differing_fields
from megatron.checkpoint.huggingface.files import CONFIG, INDEX, SINGLE, json_bytes
from megatron.checkpoint.huggingface.rules import Family, ParameterRule, present_rules
from megatron.checkpoint.huggingface.settings import Settings, harmless
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.shard import plan_shard, write_shard
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, StorageError

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_BYTE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}

Tensors = dict[str, LazyTensor]


@dataclass(frozen=True)
class Export:
    """A checkpoint to write as a Hugging Face folder.

    Attributes:
        reader: The checkpoint. Its vocabulary tables must have `vocab` rows.
        family: The family whose format is written.
        model: The checkpoint's network. If it lacks the layers of multi-token prediction that the
            checkpoint has, they are left out.
        vocab: Number of rows of the word embedding.
        bare_names: Whether to leave the family's prefix out of tensor names.
        single: The file's name if one file is enough for all tensors.
    """

    reader: Reader
    family: Family
    model: ModelConfig
    vocab: int
    bare_names: bool = False
    single: ClassVar[str] = SINGLE

    def tensors(self) -> Tensors:
        """Return the tensors by name, in file order. Each is read only when it is written.

        Raises:
            CheckpointError: The checkpoint's parameters differ from those of the network.
        """
        tensors: Tensors = {}
        path, rules = self.reader.path, self._rules()
        missing = [rule.name for rule in rules if rule.name not in self.reader.tensors]
        if missing:
            raise CheckpointError(
                f"{path}: {min(missing)} is missing, but its configuration says that the network "
                "has it: a network with layers of your own has no Hugging Face format"
            )
        for rule in rules:
            shape, dtype = self.reader.tensors[rule.name]
            if shape != rule.shape:
                sizes = f"{list(shape)}, but its configuration says {list(rule.shape)}"
                raise CheckpointError(f"{path}: {rule.name} has shape {sizes}")
            for index, (name, shape) in enumerate(zip(rule.hf_names, rule.shapes(), strict=True)):
                label = name.removeprefix(self.family.prefix) if self.bare_names else name
                tensors[label] = LazyTensor(shape, dtype, partial(self._read, rule, index))
        extra = {name for name in self.reader.names() if name.startswith("model.")}
        extra -= {rule.name for rule in rules}
        if not self.model.mtp_num_layers:
            extra = {name for name in extra if not name.startswith("model.mtp.")}
        if extra:
            problem = f"{min(extra)} does not exist in a {self.family.name} model"
            raise CheckpointError(f"{path}: {problem}")
        return tensors

    def _rules(self) -> list[ParameterRule]:
        """Return the rules of the parameters that the checkpoint has."""
        rules, saved = self.family.rules(self.model, self.vocab), self.reader.tensors
        return present_rules(rules, [rule for rule in rules if rule.name in saved])

    def _read(self, rule: ParameterRule, index: int) -> torch.Tensor:
        return rule.split(partial(self.reader.read, rule.name), index)

    def config(self, template: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the content of config.json.

        Args:
            template: An existing config.json. If it describes this network, all of its keys except
                the dtype are kept. Otherwise only keys that do not describe the network, such as
                token ids, are kept.

        Raises:
            CheckpointError: The template is for this family, but is invalid or not supported.
        """
        dtype = _DTYPES.get(self.reader.dtype(WORD_EMBEDDING), "float32")
        if template and template.get("model_type") == self.family.name:
            description = self.family.read(Settings(template, CONFIG))
            model = description.model
            if self.family.head_follows_files and self.model.untie_embeddings_and_output_weights:
                model = replace(model, untie_embeddings_and_output_weights=True)
            if self.model.mtp_num_layers is None:  # config.json may name layers that files lack
                model = replace(model, mtp_num_layers=None)
            is_same = not differing_fields(self.family, self.model, model)
            if is_same and description.vocab == self.vocab:
                key = "torch_dtype" if "torch_dtype" in template else "dtype"
                return {**template, key: dtype}
        template_keys = harmless(template or {})
        template_keys.pop("dtype", None)
        pieces = frozenset(rule.piece for rule in self._rules())
        template_keys["architectures"] = [self.family.architecture(pieces)]
        return {**template_keys, **self.family.write(self.model, self.vocab), "torch_dtype": dtype}


class Exported(Protocol):
    """The input of `write_folder`.

    Attributes:
        single: The file's name if one file is enough for all tensors.
    """

    single: ClassVar[str]

    def tensors(self) -> Tensors:
        """Return the tensors by name, in file order."""


def write_folder(
    folder: Path,
    export: Exported,
    companions: Mapping[str, bytes],
    *,
    max_shard_bytes: int,
    check: durable.Check = None,
) -> None:
    """Write a new folder under a temporary name, and rename it once it is complete.

    Args:
        folder: The folder, which must not exist or must be empty.
        export: The tensors to write.
        companions: The content of additional files by name, including config.json or
            adapter_config.json.
        max_shard_bytes: Maximum size of a shard in bytes, unless a single tensor is larger.
        check: A check to run on the folder before it is renamed (`durable.check_unpublished`).

    Raises:
        StorageError: The folder cannot be written, or there is too little space. The temporary
            folder is deleted.
        CheckpointError: The path exists and is not an empty folder, or the tensors do not match the
            network.
    """
    folder = folder.absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"--save-dir {folder} exists: give a new folder")
    shards = plan_shards(export.tensors(), max_shard_bytes)
    if SINGLE in shards:
        shards = {export.single: shards[SINGLE]}
    total = sum(map(_size, shards.values()))
    temporary = durable.unique_sibling(folder, durable.TEMPORARY)
    try:
        with durable.storage_errors(folder):
            temporary.mkdir(parents=True)
            free = shutil.disk_usage(temporary).free
            if free < total:
                size_text = f"{total:,} bytes are needed, but only {free:,} are free"
                raise StorageError(f"{folder.parent}: {size_text}")
            for name, tensors in shards.items():
                header, placements = plan_shard(tensors, metadata={"format": "pt"})
                write_shard(temporary / name, tensors, header, placements)
            config_files = dict(companions)
            if len(shards) > 1:
                weight_map = {name: file for file, tensors in shards.items() for name in tensors}
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                config_files[INDEX] = json_bytes(index)
            for name, data in config_files.items():
                with durable.new_file(temporary / name) as file:
                    file.write(data)
            durable.sync_folder(temporary)
        durable.check_unpublished(check, temporary, folder)
        with durable.storage_errors(folder):
            os.rename(temporary, folder)
            durable.sync_folder(folder.parent)
    except BaseException:
        durable.remove_tree(temporary)
        raise


def plan_shards(tensors: Tensors, max_bytes: int) -> dict[str, Tensors]:
    """Distribute tensors over files, and return the tensors of each file by file name.

    Args:
        tensors: All tensors, in file order.
        max_bytes: Maximum size of a file's tensors in bytes, unless a single tensor is larger.
    """
    groups: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if groups[-1] and _size(groups[-1]) + _size({name: tensor}) > max_bytes:
            groups.append({})
        groups[-1][name] = tensor
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    name = "model-{:05d}-of-{:05d}.safetensors"
    return {name.format(index, len(groups)): group for index, group in enumerate(groups, 1)}


def _size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a size such as `5GB`, with the units of `transformers`.

    Raises:
        CheckpointError: The text is not a size.
    """
    number = text.rstrip("KMGB")
    unit = _BYTE_UNITS.get(text[len(number) :])
    if not number.isdigit() or int(number) == 0 or unit is None:
        raise CheckpointError(f"--max-shard-size {text}: expected a size such as 5GB or 500MB")
    return int(number) * unit
