"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

PEFT names an adapter's tensors after the module of `transformers` that it adapts. It gives an
adapter to each of queries, keys, values, gate and up, as we do, so each of its tensors corresponds
to one of ours. The adapters of a mixture's experts are stacked in two matrices
(`target_parameters`): A [experts rank, in], B [out, rank experts]. The head of a reward model is
trained in full alongside the adapters, and is in the same file (`modules_to_save`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from megatron.parallel.expert_linear import ExpertAdapter, ExpertLinear
from megatron.parallel.layers import Linear

PeftNames = Mapping[str, tuple[str, HeldTensor]]  # by our name

_LAYER = re.compile(r".*?layers\.\d+\.")
_EXPERTS = "mlp.experts"  # the module of transformers 5 in which all experts share a weight
_PREFIX = "base_model.model."
_HEAD = "score"  # the head of a reward model, both here and in PEFT
_UNUSED_HEADS = ("classifier",)  # PEFT adds it to modules_to_save, for other models
_SUFFIXES = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
# Other settings of PEFT's configuration, with the only value that we support.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "exclude_modules": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
}


def peft_names(
    model: ModelConfig, layers: Mapping[str, Linear | ExpertLinear], family: Family
) -> PeftNames:
    """Return PEFT's name and the shape of each tensor of our adapters, by our name.

    A reward model's head is one of them.

    Args:
        model: The network with adapters.
        layers: Its layers that have adapters, by name.
        family: The family whose modules PEFT's names refer to.

    Raises:
        CheckpointError: A module of the family computes several of our projections.
    """
    found: dict[str, tuple[str, HeldTensor]] = {}
    for ours, modules in family.names(plain_network(model)):
        if ours == _HEAD and model.reward_head:
            held = HeldTensor((1, model.hidden_size), torch.float32)
            found[f"model.{_HEAD}.weight"] = (f"{_PREFIX}{_HEAD}.weight", held)
        linear = layers.get(ours)
        if linear is None or not isinstance(linear.adapter, Adapter | ExpertAdapter):
            continue
        projections, theirs = projections_of(linear), tuple(modules)
        if isinstance(linear, ExpertLinear) and family.stacks_experts:
            raise CheckpointError(
                f"{theirs[0]} of a {family.name} model: PEFT orders the rows of its experts' "
                "adapters differently: convert the merged weights with --saver hf"
            )
        if isinstance(linear, ExpertLinear):
            theirs = (_experts_module(ours, theirs[0], layers),)
        if len(theirs) != len(projections):
            raise CheckpointError(
                f"{theirs[0]} of a {family.name} model computes {', '.join(projections)} at once, "
                "but here each of them has its own adapter: convert the merged weights with "
                "--saver hf"
            )
        if family.rotates_pairs and any(name in linear.adapter for name in ("query", "key")):
            raise CheckpointError(
                f"{theirs[0]} of a {family.name} model: its heads' channels have another order, "
                "and so have PEFT's adapters of queries and keys: convert the merged weights with "
                "--saver hf"
            )
        for projection, module in zip(projections, theirs, strict=True):
            if projection in linear.adapter:
                for kind, parameter in linear.adapter[projection].named_parameters():
                    held = HeldTensor(tuple(parameter.shape), parameter.dtype)
                    name = f"model.{ours}.adapter.{projection}.{kind}"
                    found[name] = (f"{_PREFIX}{module}.{_SUFFIXES[kind]}", held)
    return found


def _experts_module(ours: str, theirs: str, layers: Mapping[str, Linear | ExpertLinear]) -> str:
    """Return the name under which PEFT adapts a weight of all experts.

    PEFT wraps the module of the experts once for each weight, the last one outermost.

    Args:
        ours: Our name of the layer.
        theirs: The module of its first tensor in files.
        layers: The layers that have adapters.
    """
    match = _LAYER.match(theirs)
    assert match is not None
    is_inner = ours.endswith(".up") and f"{ours.removesuffix('.up')}.down" in layers
    return f"{match.group()}{_EXPERTS}{'.base_layer' if is_inner else ''}"


def _is_stacked(shape: Sequence[int]) -> bool:
    """Return whether an adapter's tensor has an entry for each expert."""
    return len(shape) > 2


def to_peft(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return an adapter's tensor in PEFT's form.

    Args:
        tensor: The tensor; for experts, A [experts, rank, in] or B [experts, ..., rank].
        kind: "a" or "b".
    """
    if not _is_stacked(tensor.shape):
        return tensor
    if kind == "a":
        return tensor.flatten(0, 1)
    return tensor.flatten(1, -2).permute(1, 2, 0).flatten(1).contiguous()


def _peft_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that PEFT's tensor has."""
    return tuple(to_peft(torch.empty(shape, device="meta"), _kind_of(name)).shape)


def _kind_of(name: str) -> str:
    return name.rpartition(".")[2]


class PeftReader(Reader):
    """PEFT's files of an adapter, with their tensors under our names.

    Args:
        path: The folder.
        model: The network with adapters.
        names: Names and shapes of the network's adapters (`peft_names`).
        remedy: What the user should do about an adapter for another network. Default: give the
            training flags that fit the files.
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: The files are missing or damaged, or their adapter does not fit the
            network.
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
        said = _settings_in(path, allow_foreign=allow_foreign, has_head=model.reward_head)
        if not said.get("modules_to_save"):  # an adapter of a language model
            names = {ours: one for ours, one in names.items() if ".adapter." in ours}
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
            name: HeldTensor(names[name][1].shape, DTYPES[place.dtype])
            for name, place in self._places.items()
        }
        for name, (_, wanted) in names.items():
            found, expected = self._places[name].shape, _peft_shape(name, wanted.shape)
            if found != expected:
                shapes = f"{list(found)}, but it is {list(expected)} here"
                raise CheckpointError(
                    f"{path / ADAPTER}: {names[name][0]} has shape {shapes}: the adapter is for "
                    "a different network: load that network with --load"
                )
        self.meta = {"config": {}}

    def _check_settings(self, said: dict[str, Any], model: ModelConfig, strange: set[str]) -> None:
        """Check that the adapter's settings match the run."""
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
                    f"but {value} here: {self._remedy}"
                )
        if strange:
            raise CheckpointError(
                f"{self.path / ADAPTER}: {min(strange)} does not belong to this network's "
                "adapters: "
                f"{self._remedy}"
            )

    def _read(self, name: str, wanted: Box) -> torch.Tensor:
        shape = self.held[name].shape
        whole = self._file.tensor(self._places[name])
        if _is_stacked(shape) and _kind_of(name) != "a":
            experts, *_, rank = shape
            whole = whole.view(-1, rank, experts).permute(2, 0, 1)
        whole = whole.reshape(shape)
        return whole[wanted.within(Box.whole(tuple(whole.shape)))]


def _settings_in(path: Path, *, allow_foreign: bool, has_head: bool = False) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Args:
        path: The folder of PEFT's files.
        allow_foreign: Accept files owned by other users.
        has_head: Whether the adapter may come with the head of a reward model.

    Raises:
        CheckpointError: The file cannot be read, or has a setting that we do not support.
    """
    said = read_json(inside(path, ADAPTER_CONFIG), allow_foreign=allow_foreign)
    for key, allowed in _FIXED.items():
        if said.get(key, allowed[0]) not in allowed:
            raise CheckpointError(
                f"{path / ADAPTER_CONFIG}: {key} {said[key]!s:.80} is not supported: merge the "
                "adapter with merge_and_unload of peft"
            )
    saved = said.get("modules_to_save") or []
    saved = saved if isinstance(saved, list) else [saved]
    others = [name for name in saved if not (has_head and name in (_HEAD, *_UNUSED_HEADS))]
    if others:
        remedy = "merge the adapter with merge_and_unload of peft"
        if _HEAD in others:
            remedy = "a reward model's adapter is for --preference-loss bradley-terry"
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG}: modules_to_save {saved!s:.80} is not supported: {remedy}"
        )
    return said


def network_with(
    path: Path, model: ModelConfig, *, allow_foreign: bool = False
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return a network with adapters of the sizes that PEFT's files have, on every layer.

    Args:
        path: The folder of PEFT's files.
        model: The network without adapters.
        allow_foreign: Accept files owned by other users.

    Returns:
        The network, and the weights of experts that have adapters (`target_parameters`).

    Raises:
        CheckpointError: The settings cannot be read, or are not supported.
    """
    said = _settings_in(path, allow_foreign=allow_foreign)
    stacked = said.get("target_parameters") or ()
    if stacked and said.get("use_dora") is True:
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG}: use_dora with target_parameters is not supported: merge the "
            "adapter with merge_and_unload of peft"
        )
    rank, alpha = said.get("r", 8), said.get("lora_alpha", 8)
    for key, value, kinds in (("r", rank, (int,)), ("lora_alpha", alpha, (int, float))):
        if type(value) not in kinds or not 0 < value < math.inf:
            raise CheckpointError(
                f"{path / ADAPTER_CONFIG}: {key} is {value!s:.40}: give a positive "
                f"{'whole ' * (float not in kinds)}number, or export the adapter again"
            )
    adapted = replace(
        model,
        lora_rank=rank,
        lora_alpha=float(alpha),
        use_rslora=said.get("use_rslora") is True,
        use_dora=said.get("use_dora") is True,
    )
    return adapted, tuple(map(str, stacked))


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
    shown = set()
    for key in ("target_modules", "target_parameters"):
        targets = said.get(key)
        targets = targets if isinstance(targets, list) else [targets]
        shown |= {one.rpartition(".")[2] for one in targets if isinstance(one, str)}
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
    """The adapters of a checkpoint, and a reward model's head, to be written as PEFT's files.

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
            theirs: LazyTensor(
                _peft_shape(ours, held.shape),
                self.reader.held[ours].dtype,
                partial(self._read, ours),
            )
            for ours, (theirs, held) in self.names.items()
        }

    def _read(self, ours: str) -> torch.Tensor:
        return to_peft(self.reader.read(ours), _kind_of(ours))

    def config(self, base: str | None) -> dict[str, Any]:
        """Return the content of adapter_config.json.

        Args:
            base: The folder of the model that the adapter changes, if known.
        """
        model = self.model
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if model.reward_head else "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": model.lora_rank,
            "lora_alpha": model.lora_rank if model.lora_alpha is None else model.lora_alpha,
            "lora_dropout": model.lora_dropout,
            "use_rslora": model.use_rslora,
            "use_dora": model.use_dora,
            "target_modules": self._targets(stacked=False),
            "target_parameters": self._targets(stacked=True),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "modules_to_save": [_HEAD] if model.reward_head else None,
        }

    def _targets(self, *, stacked: bool) -> list[str] | None:
        """Return the suffixes of adapted modules' names, or whole names if layers differ.

        Args:
            stacked: Whether to name weights of experts instead of modules.
        """
        by_end = defaultdict(set)
        for ours, (theirs, held) in self.names.items():
            if ".adapter." in ours and _is_stacked(held.shape) == stacked:
                name = theirs.removeprefix(_PREFIX).rpartition(".lora_")[0]
                end = name.rpartition(".")[2]
                if stacked:
                    weight = "gate_up_proj" if ".up.adapter." in ours else "down_proj"
                    end = f"experts.{weight}"
                    name = f"{name.removesuffix('.base_layer')}.{weight}"
                by_end[end].add(name)
        is_alike = all(len(held) == self.model.num_layers for held in by_end.values())
        names = sorted(by_end if is_alike else set().union(*by_end.values()))
        return names or None
