"""Find the files of a DeepSpeed checkpoint, and read their pickled trees."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.legacy.torch_file import TorchZip
from megatron.checkpoint.legacy.unpickler import (
    NAMES,
    Factory,
    Opaque,
    record_class,
)
from megatron.errors import CheckpointError

_NUMBER = r"(\d{1,6})"
_RANK = rf"mp_rank_{_NUMBER}"
_KINDS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "model": rf"{_RANK}_model_states\.pt",
        "partitioned": rf"zero_pp_rank_{_NUMBER}_{_RANK}_model_states\.pt",
        "layer": rf"layer_{_NUMBER}(?:-model_{_NUMBER})?-model_states\.pt",
        "expert": rf"layer_{_NUMBER}_expert_{_NUMBER}_{_RANK}_model_states\.pt",
        "states": rf"(?:bf16_)?zero_pp_rank_{_NUMBER}_{_RANK}_optim_states\.pt",
        "expert states": rf"expp_rank_{_NUMBER}_{_RANK}_optim_states\.pt",
    }.items()
}
_MAX_FILES = 1 << 20


def _enum(name: str) -> Factory:
    return Factory(name, lambda *args: Opaque(name, args))


# The only global names that these files may use, with our stand-ins for them.
_NAMES: dict[tuple[str, str], Any] = {
    **NAMES,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _enum("ZeroStageEnum"),
    **{
        (f"deepspeed.{module}", name): record_class(name)
        for module, name in (
            ("utils.tensor_fragment", "fragment_address"),
            ("runtime.fp16.loss_scaler", "LossScaler"),
            ("runtime.fp16.loss_scaler", "DynamicLossScaler"),
        )
    },
    **{
        (module, name): _enum(name)
        for module in ("megatron.core.enums", "megatron.model.enums", "megatron.enums")
        for name in ("ModelType", "LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType")
    },
}


@dataclass(frozen=True)
class StateFile:
    """A torch.save file: the bytes of its tensors, and its pickled tree."""

    zip: TorchZip
    tree: Mapping[Any, Any]


@dataclass
class Files:
    """The files in a folder.

    Attributes:
        models: The file with the command line, by model-parallel rank.
        partitioned: Whether the weights are only in the partitions of ZeRO 3.
        layers: The layers of a PipelineModule, by (layer, tensor rank).
        experts: The weights of experts, by (layer in the stage, expert, model-parallel rank).
        states: The partitions of the optimizer, by (model-parallel rank, data-parallel rank).
        expert_states: The optimizer states of a mixture without ZeRO, by (model-parallel rank,
            expert-parallel rank).
    """

    models: dict[int, StateFile] = field(default_factory=dict)
    partitioned: bool = False
    layers: dict[tuple[int, int], StateFile] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], StateFile] = field(default_factory=dict)
    states: dict[tuple[int, int], StateFile] = field(default_factory=dict)
    expert_states: dict[tuple[int, int], StateFile] = field(default_factory=dict)

    def all(self) -> Sequence[StateFile]:
        """Return all files in a fixed order."""
        tables: tuple[dict[Any, StateFile], ...] = (
            self.models,
            self.layers,
            self.experts,
            self.states,
            self.expert_states,
        )
        return [table[key] for table in tables for key in sorted(table)]


def open_files(path: Path, *, allow_foreign: bool = False) -> Files:
    """Open the files of a checkpoint's folder.

    Args:
        path: The folder.
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: A file is damaged, refused or of an unknown kind, two files are of the same
            rank, or a model-parallel rank has no file.
    """
    files, partitions = Files(), set[tuple[int, int]]()
    matches = sorted(path.glob("*_states.pt"))
    if len(matches) > _MAX_FILES:
        raise CheckpointError(f"{path}: {len(matches):,} files")
    for file in matches:
        kind, indices = _kind_of(file)
        if kind == "partitioned":
            files.partitioned = True
            partitions.add((indices[1], indices[0]))
            if indices[0]:
                continue  # the file has no weights, and otherwise repeats rank 0's
        opened = open_file(file, allow_foreign=allow_foreign)
        tables: dict[str, dict[Any, StateFile]] = {
            "layer": files.layers,
            "expert": files.experts,
            "states": files.states,
            "expert states": files.expert_states,
        }
        if kind in ("model", "partitioned"):
            key: Any = indices[-1]
            table: dict[Any, StateFile] = files.models
        else:
            is_of_rank = kind in ("states", "expert states")
            key = (indices[1], indices[0]) if is_of_rank else tuple(indices)
            table = tables[kind]
        if key in table:
            raise CheckpointError(f"{file}: a second file of the same rank")
        table[key] = opened
    if sorted(files.models) != list(range(len(files.models))) or not files.models:
        raise CheckpointError(f"{path}: the model states of a model-parallel rank are missing")
    return files


def _kind_of(path: Path) -> tuple[str, list[int]]:
    for kind, pattern in _KINDS.items():
        match = pattern.fullmatch(path.name)
        if match:
            return kind, [int(group or 0) for group in match.groups()]
    raise CheckpointError(f"{path}: not a file that DeepSpeed 0.7 or later writes")


def open_file(path: Path, *, allow_foreign: bool = False) -> StateFile:
    """Open a file and read its tree.

    Args:
        path: The file.
        allow_foreign: Accept a file owned by another user.

    Raises:
        CheckpointError: The file is damaged or refused.
    """
    archive = TorchZip(path, allow_foreign=allow_foreign)
    return StateFile(archive, archive.tree(_NAMES))
