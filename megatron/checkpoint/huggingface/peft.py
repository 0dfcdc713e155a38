"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

PEFT names an adapter's tensors after the module of `transformers` that it adapts. It gives queries,
keys and values, gate and up an adapter each, as we do: each of its tensors is one of ours.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron.checkpoint.entries import DTYPES, Box, LazyTensor
from megatron.checkpoint.huggingface.files import ADAPTER, ADAPTER_CONFIG, inside
from megatron.checkpoint.huggingface.rules import Family
from megatron.checkpoint.huggingface.settings import read_json
from megatron.checkpoint.mapped import MappedFile
from megatron.checkpoint.reader import HeldTensor, Reader
from megatron.config.adapters import lora_flags, plain_network
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from megatron.parallel.adapter import Adapter, projections_of
from megatron.parallel.layers import Linear

PeftNames = Mapping[str, tuple[str, HeldTensor]]  # by our name

_PREFIX = "base_model.model."
_SUFFIXES = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
# What PEFT's configuration may ask for besides, and the only value that we have.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "exclude_modules": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
}


def peft_names(model: ModelConfig, layers: Mapping[str, Linear], family: Family) -> PeftNames:
    """Return PEFT's name, and the shape, of each of our adapters' tensors, by our name.

    Args:
        model: The network with adapters.
        layers: Its layers that have adapters, by name.
        family: The family whose modules PEFT's names are of.

    Raises:
        CheckpointError: A module of the family computes several of our projections.
    """
    found: dict[str, tuple[str, HeldTensor]] = {}
    for ours, theirs in family.names(plain_network(model)):
        linear = layers.get(ours)
        if linear is None or not isinstance(linear.adapter, Adapter):
            continue
        projections = projections_of(linear)
        if len(theirs) != len(projections):
            raise CheckpointError(
                f"{theirs[0]} of a {family.name} model computes {', '.join(projections)} at once, "
                "which have an adapter each here: convert the merged weights with --saver hf"
            )
        for projection, module in zip(projections, theirs, strict=True):
            if projection in linear.adapter:
                for kind, parameter in linear.adapter[projection].named_parameters():
                    held = HeldTensor(tuple(parameter.shape), parameter.dtype)
                    name = f"model.{ours}.adapter.{projection}.{kind}"
                    found[name] = (f"{_PREFIX}{module}.{_SUFFIXES[kind]}", held)
    return found


class PeftReader(Reader):
    """PEFT's files of an adapter, with their tensors under our names.

    Args:
        path: The folder.
        model: The network with adapters.
        names: Names and shapes of the network's adapters (`peft_names`).
        remedy: What to do about an adapter of another network. By default, the flags of training
            that fit the files.
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: The files are missing or damaged, or are of another adapter than the
            network's, or of another network.
    """

    format = "peft"
    iteration = 0

    def __init__(
        self,
        path: Path,
        model: ModelConfig,
        names: PeftNames,
        *,
        remedy: str | None = None,
        allow_foreign: bool = False,
    ) -> None:
        """Check every setting, name and shape, without reading any tensor."""
        self.path, self.allow_foreign = path, allow_foreign
        if not (path / ADAPTER_CONFIG).is_file():
            what = "holds no adapter" if path.is_dir() else "does not exist"
            raise CheckpointError(
                f"--load-adapter {path} {what}: give a folder with {ADAPTER_CONFIG} and {ADAPTER}"
            )
        if not (path / ADAPTER).exists() and (path / "adapter_model.bin").exists():
            raise CheckpointError(
                f"--load-adapter {path}: adapter_model.bin is a pickle, which could run code and "
                f"is not read: load it with peft and write {ADAPTER} with save_pretrained"
            )
        said = _settings_in(path, allow_foreign=allow_foreign)
        self._remedy = _remedy(said) if remedy is None else remedy
        self._file = MappedFile(inside(path, ADAPTER), allow_foreign=allow_foreign)
        theirs = self._file.header()
        ours = {name: ours for ours, (name, _) in names.items()}
        self._check_settings(said, model, {name for name in theirs if name not in ours})
        missing = sorted(ours.keys() - theirs.keys())
        if missing:
            raise CheckpointError(f"{path / ADAPTER}: {missing[0]} is missing: {self._remedy}")
        self._places = {ours[name]: place for name, place in theirs.items()}
        self.held = {
            name: HeldTensor(place.shape, DTYPES[place.dtype])
            for name, place in self._places.items()
        }
        for name, (_, wanted) in names.items():
            if self.held[name].shape != wanted.shape:
                shapes = f"{list(self.held[name].shape)}, but it is {list(wanted.shape)} here"
                raise CheckpointError(
                    f"{path / ADAPTER}: {names[name][0]} has shape {shapes}: the adapter is for "
                    "another network: load that with --load"
                )
        self.meta = {"config": {}}

    def _check_settings(self, said: dict[str, Any], model: ModelConfig, strange: set[str]) -> None:
        """Check that the adapter's settings are those of the run."""
        rank = said.get("r", 8)
        here = {
            "r": model.lora_rank,
            "lora_alpha": rank if model.lora_alpha is None else model.lora_alpha,
            "use_rslora": model.use_rslora,
            "use_dora": model.use_dora,
        }
        there = {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False}
        for key, value in here.items():
            if said.get(key, there[key]) != value:
                raise CheckpointError(
                    f"{self.path / ADAPTER_CONFIG}: {key} is {said.get(key, there[key])!s:.40}, "
                    f"and {value} here: {self._remedy}"
                )
        if strange:
            raise CheckpointError(
                f"{self.path / ADAPTER}: {min(strange)} has no place in this network's adapters: "
                f"{self._remedy}"
            )

    def _read(self, name: str, wanted: Box) -> torch.Tensor:
        whole = self._file.tensor(self._places[name])
        return whole[wanted.within(Box.whole(tuple(whole.shape)))]


def _settings_in(path: Path, *, allow_foreign: bool) -> dict[str, Any]:
    """Return adapter_config.json.

    Raises:
        CheckpointError: It cannot be read, or asks for what we do not have.
    """
    said = read_json(inside(path, ADAPTER_CONFIG), allow_foreign=allow_foreign)
    for key, allowed in _FIXED.items():
        if said.get(key, allowed[0]) not in allowed:
            raise CheckpointError(
                f"{path / ADAPTER_CONFIG}: {key} {said[key]!s:.80} is not supported: merge the "
                "adapter with merge_and_unload of peft"
            )
    return said


def network_with(path: Path, model: ModelConfig, *, allow_foreign: bool = False) -> ModelConfig:
    """Return a network with adapters of the sizes that PEFT's files have, on every layer.

    Args:
        path: The folder of PEFT's files.
        model: The network without adapters.
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: The settings cannot be read, or are not supported.
    """
    said = _settings_in(path, allow_foreign=allow_foreign)
    rank, alpha = said.get("r", 8), said.get("lora_alpha", 8)
    for key, value, kinds in (("r", rank, (int,)), ("lora_alpha", alpha, (int, float))):
        if type(value) not in kinds or not 0 < value < math.inf:
            raise CheckpointError(
                f"{path / ADAPTER_CONFIG}: {key} is {value!s:.40}: give a positive "
                f"{'whole ' * (float not in kinds)}number, or export the adapter again"
            )
    return replace(
        model,
        lora_rank=rank,
        lora_alpha=float(alpha),
        use_rslora=said.get("use_rslora") is True,
        use_dora=said.get("use_dora") is True,
    )


def names_in(path: Path, names: PeftNames, *, allow_foreign: bool = False) -> PeftNames:
    """Return the names of the projections for which PEFT's files hold any tensor.

    Args:
        path: The folder of PEFT's files.
        names: Names and shapes of adapters of all projections (`peft_names`).
        allow_foreign: Accept files owned by other users.
    """
    theirs = MappedFile(inside(path, ADAPTER), allow_foreign=allow_foreign).header()
    held = {ours.rpartition(".")[0] for ours, (name, _) in names.items() if name in theirs}
    return {ours: found for ours, found in names.items() if ours.rpartition(".")[0] in held}


def _remedy(said: dict[str, Any]) -> str:
    """Return the flags that give an adapter the settings of PEFT's configuration."""
    targets = said.get("target_modules")
    if isinstance(targets, str):
        targets = [targets]
    shown = None
    if isinstance(targets, list):
        shown = {one.rpartition(".")[2] for one in targets if isinstance(one, str)}
    flags = lora_flags(
        rank=said.get("r", 8),
        alpha=said.get("lora_alpha", 8),
        targets=sorted(shown) if shown else None,
        is_rslora=bool(said.get("use_rslora")),
        is_dora=bool(said.get("use_dora")),
    )
    return f"give {flags:.300}, and the network that it was trained for"


@dataclass(frozen=True)
class AdapterExport:
    """The adapters of a checkpoint, to be written as PEFT's files.

    Attributes:
        reader: The checkpoint.
        model: The network with adapters.
        names: Names and shapes of the adapters (`peft_names`).
    """

    reader: Reader
    model: ModelConfig
    names: PeftNames
    single: ClassVar[str] = ADAPTER

    def tensors(self) -> dict[str, LazyTensor]:
        """Return the tensors by name. Each is read only when it is written."""
        return {
            theirs: LazyTensor(*self.reader.held[ours], partial(self.reader.read, ours))
            for ours, (theirs, _) in self.names.items()
        }

    def config(self, base: str | None) -> dict[str, Any]:
        """Return adapter_config.json.

        Args:
            base: The folder of the model that the adapter changes, if known.
        """
        model = self.model
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": model.lora_rank,
            "lora_alpha": model.lora_rank if model.lora_alpha is None else model.lora_alpha,
            "lora_dropout": model.lora_dropout,
            "use_rslora": model.use_rslora,
            "use_dora": model.use_dora,
            "target_modules": self._targets(),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "modules_to_save": None,
        }

    def _targets(self) -> list[str]:
        """Return the last words of the adapted modules, or whole names if layers differ."""
        names = {
            theirs.removeprefix(_PREFIX).rpartition(".lora_")[0]
            for theirs, _ in self.names.values()
        }
        by_end = defaultdict(set)
        for name in names:
            by_end[name.rpartition(".")[2]].add(name)
        is_alike = all(len(held) == self.model.num_layers for held in by_end.values())
        return sorted(by_end if is_alike else names)
