"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

PEFT names an adapter's tensors after the module of `transformers` that it adapts. It gives an
adapter to each of queries, keys, values, gate and up, as we do, so each of its tensors corresponds
to one of ours, whose rows may be in another order. The adapters of a mixture's experts are stacked
in two matrices (`target_parameters`): A [experts rank, in], B [out, rank experts]. The head of a
reward model is trained in full alongside the adapters, and is in the same file (`modules_to_save`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from megatron.checkpoint.entries import DTYPES, Box, LazyTensor
from megatron.checkpoint.huggingface.files import ADAPTER, ADAPTER_CONFIG, inside
from megatron.checkpoint.huggingface.rules import (
    SAME,
    STACKED,
    TRANSPOSED,
    Family,
    ParameterRule,
)
from megatron.checkpoint.huggingface.settings import read_json
from megatron.checkpoint.mapped import MappedFile
from megatron.checkpoint.reader import HeldTensor, Reader, is_vocabulary_table
from megatron.config.adapters import ALL_LINEAR, lora_flags, plain_network
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from megatron.parallel.adapter import AdaptedLayer, Adapter, projections_of
from megatron.parallel.expert_linear import ExpertAdapter, ExpertLinear


class PeftTensor(NamedTuple):
    """A tensor of an adapter in PEFT's files.

    Attributes:
        name: PEFT's name.
        held: Our shape and type of it.
        order: The row of the module's weight that each of our rows is, int64 [out], if
            `transformers` orders the rows differently; otherwise `None`.
    """

    name: str
    held: HeldTensor
    order: torch.Tensor | None = None

    def to_peft(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        """Return our tensor in PEFT's form.

        Args:
            tensor: The tensor; for experts, A [experts, rank, in] or B [experts, ..., rank].
            kind: "a", "b" or "magnitude".
        """
        if self.order is not None and kind != "a":
            tensor = tensor[self.order.argsort()]
        if not _is_stacked(tensor.shape):
            return tensor
        if kind == "a":
            return tensor.flatten(0, 1)
        return tensor.flatten(1, -2).permute(1, 2, 0).flatten(1).contiguous()

    def from_peft(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        """Return PEFT's tensor in our form.

        Args:
            tensor: The tensor.
            kind: "a", "b" or "magnitude".
        """
        shape = self.held.shape
        if self.order is not None and kind != "a":
            tensor = tensor[self.order]
        if not _is_stacked(shape):
            return tensor
        if kind != "a":
            experts, *_, rank = shape
            tensor = tensor.view(-1, rank, experts).permute(2, 0, 1)
        return tensor.reshape(shape)


PeftNames = Mapping[str, PeftTensor]  # by our name

_LAYER = re.compile(r".*?layers\.\d+\.")
_EXPERTS = "mlp.experts"  # the module of transformers 5 in which all experts share a weight
_PREFIX = "base_model.model."
_ROUTER = ".router.adapter."  # in our names; in transformers 5, most routers are not linear layers
_ROUTERS = ("gate.weight", "router.weight")  # the ends of their names in `transformers`
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
    model: ModelConfig, layers: Mapping[str, AdaptedLayer | ExpertLinear], family: Family, rows: int
) -> PeftNames:
    """Return PEFT's name, shape and order of each tensor of our adapters, by our name.

    A reward model's head is one of them.

    Args:
        model: The network with adapters.
        layers: Its layers that have adapters, by name.
        family: The family whose modules PEFT's names refer to.
        rows: Rows of the word embedding.

    Raises:
        CheckpointError: A module of the family computes several of our projections.
    """
    found: dict[str, PeftTensor] = {}
    rules = {rule.name: rule for rule in family.rules(plain_network(model), rows)}
    for ours, modules in family.names(plain_network(model)):
        if ours == _HEAD and model.reward_head:
            held = HeldTensor((1, model.hidden_size), torch.float32)
            found[f"model.{_HEAD}.weight"] = PeftTensor(f"{_PREFIX}{_HEAD}.weight", held)
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
                f"{theirs[0]} of a {family.name} model computes {', '.join(projections)} together, "
                "but here each of them has its own adapter: convert the merged weights with "
                "--saver hf"
            )
        orders = _row_orders(linear.adapter, rules[f"model.{ours}.weight"])
        for projection, module in zip(projections, theirs, strict=True):
            if projection in linear.adapter:
                for kind, parameter in linear.adapter[projection].named_parameters():
                    held = HeldTensor(tuple(parameter.shape), parameter.dtype)
                    theirs_of = f"{_PREFIX}{_module(module, family)}.{_SUFFIXES[kind]}"
                    name = f"model.{ours}.adapter.{projection}.{kind}"
                    found.setdefault(name, PeftTensor(theirs_of, held, orders.get(projection)))
    return found


def _module(name: str, family: Family) -> str:
    """Return the name in `transformers` of a module of a family's files."""
    if family.module_prefix is None or not name.startswith(family.prefix):
        return name
    return f"{family.module_prefix}{name.removeprefix(family.prefix)}"


def _row_orders(adapter: Adapter | ExpertAdapter, rule: ParameterRule) -> dict[str, torch.Tensor]:
    """Return the order of each projection's rows (`PeftTensor`) if `transformers` has another one.

    Args:
        adapter: The adapter of a layer, each of whose projections is a module of `transformers`.
        rule: The rule that makes the layer's weight from the weights of these modules.
    """
    if isinstance(adapter, ExpertAdapter) or rule.form in (SAME, STACKED, TRANSPOSED):
        return {}
    sizes = [shape[0] for shape in rule.shapes()]
    numbers = torch.arange(sum(sizes)).unsqueeze(1).split(sizes)
    by_projection = adapter.by_projection(rule.form.join(numbers).flatten())
    orders = {
        name: rows.flatten() - first
        for (name, rows), (first, *_) in zip(by_projection.items(), numbers, strict=True)
    }
    return {name: rows for name, rows in orders.items() if (rows.diff() != 1).any()}


def _experts_module(
    ours: str, theirs: str, layers: Mapping[str, AdaptedLayer | ExpertLinear]
) -> str:
    """Return the name under which PEFT adapts a weight of all experts.

    PEFT wraps the module of the experts once for each weight, the last one outermost.

    Args:
        ours: Our name of the layer.
        theirs: The Hugging Face module of its first tensor.
        layers: The layers that have adapters.
    """
    match = _LAYER.match(theirs)
    assert match is not None
    is_inner = ours.endswith(".up") and f"{ours.removesuffix('.up')}.down" in layers
    return f"{match.group()}{_EXPERTS}{'.base_layer' if is_inner else ''}"


def _is_stacked(shape: Sequence[int]) -> bool:
    """Return whether an adapter's tensor has an entry for each expert."""
    return len(shape) > 2


def _peft_shape(ours: str, tensor: PeftTensor) -> tuple[int, ...]:
    """Return the shape that PEFT's tensor has."""
    whole = torch.empty(tensor.held.shape, device="meta")
    return tuple(tensor._replace(order=None).to_peft(whole, _kind_of(ours)).shape)


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
        ours = {tensor.name: ours for ours, tensor in names.items()}
        # PEFT also writes the frozen weight of an adapted output layer.
        known = {*ours, f"{_PREFIX}lm_head.base_layer.weight"}
        self._check_settings(said, model, {name for name in theirs if name not in known})
        missing = sorted(ours.keys() - theirs.keys())
        if missing:
            raise CheckpointError(f"{path / ADAPTER}: {missing[0]} is missing: {self._remedy}")
        self._places = {ours[name]: place for name, place in theirs.items() if name in ours}
        self.held, self._names = {}, names
        for name, wanted in names.items():
            place, shape = self._places[name], wanted.held.shape
            found, expected = place.shape, _peft_shape(name, wanted)
            if is_vocabulary_table(name) and found[:1] < expected[:1]:  # ours has padding
                expected = shape = (*found[:1], *expected[1:])
            self.held[name] = HeldTensor(shape, DTYPES[place.dtype])
            if found != expected:
                shapes = f"{list(found)}, but it is {list(expected)} here"
                raise CheckpointError(
                    f"{path / ADAPTER}: {wanted.name} has shape {shapes}: the adapter is for "
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
        theirs = self._file.tensor(self._places[name])
        whole = self._names[name].from_peft(theirs, _kind_of(name))
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
    targets = [ALL_LINEAR]
    if "lm_head" in {name.rpartition(".")[2] for name in said.get("target_modules") or ()}:
        targets.append("lm_head")
    if any(str(name).endswith(_ROUTERS) for name in stacked):
        targets.append("router")
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
        lora_target_modules=tuple(targets),
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
    held = {ours.rpartition(".")[0] for ours, one in names.items() if one.name in theirs}
    return {ours: found for ours, found in names.items() if ours.rpartition(".")[0] in held}


def _remedy(said: dict[str, Any]) -> str:
    """Return the flags that give an adapter the settings of PEFT's configuration."""
    shown = set()
    for key in ("target_modules", "target_parameters"):
        targets = said.get(key)
        targets = targets if isinstance(targets, list) else [targets]
        names = (one.removesuffix(".weight") for one in targets if isinstance(one, str))
        ends = {one.rpartition(".")[2] for one in names}
        shown |= {"router" if end == "gate" and "parameters" in key else end for end in ends}
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
            tensor.name: LazyTensor(
                _peft_shape(ours, tensor), self.reader.held[ours].dtype, partial(self._read, ours)
            )
            for ours, tensor in self.names.items()
        }

    def _read(self, ours: str) -> torch.Tensor:
        return self.names[ours].to_peft(self.reader.read(ours), _kind_of(ours))

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
            "target_modules": self._targets(of_parameters=False),
            "target_parameters": self._targets(of_parameters=True),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "modules_to_save": [_HEAD] if model.reward_head else None,
        }

    def _targets(self, *, of_parameters: bool) -> list[str] | None:
        """Return the suffixes of adapted modules' names, or whole names if layers differ.

        Args:
            of_parameters: Whether to name weights of experts and routers instead of modules.
        """
        by_end = defaultdict(set)
        for ours, tensor in self.names.items():
            is_router = _ROUTER in ours
            is_parameter = is_router or _is_stacked(tensor.held.shape)
            if ".adapter." in ours and is_parameter == of_parameters:
                name = tensor.name.removeprefix(_PREFIX).rpartition(".lora_")[0]
                end = name.rpartition(".")[2]
                if is_router:
                    name, end = f"{name}.weight", f"{end}.weight"
                elif of_parameters:
                    weight = "gate_up_proj" if ".up.adapter." in ours else "down_proj"
                    end = f"experts.{weight}"
                    name = f"{name.removesuffix('.base_layer')}.{weight}"
                by_end[end].add(name)
        is_alike = all(len(held) == self.model.num_layers for held in by_end.values())
        names = sorted(by_end if is_alike else set().union(*by_end.values()))
        return names or None
