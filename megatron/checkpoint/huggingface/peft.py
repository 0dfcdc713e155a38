"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

PEFT names the tensors of an adapter after the module of `transformers` that it adapts. If the
module computes several of our projections at once, its adapter combines the adapters of those
projections (`peft_slices`), and adapter_config.json lists its rank and alpha as exceptions
(`rank_pattern`, `alpha_pattern`). The adapters of a mixture's experts are stacked in two matrices
(`target_parameters`): A [experts * rank, in], B [out, rank * experts]. The head of a reward model
is trained in full alongside the adapters, and is stored in the same file (`modules_to_save`).
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
from megatron.checkpoint.huggingface.families import families, family_for, mismatches
from megatron.checkpoint.huggingface.files import ADAPTER, ADAPTER_CONFIG, inside
from megatron.checkpoint.huggingface.peft_slices import AdapterSlice, adapter_slices, join
from megatron.checkpoint.huggingface.rules import Family
from megatron.checkpoint.huggingface.settings import read_json
from megatron.checkpoint.mapped import MappedFile
from megatron.checkpoint.reader import Reader, TensorMeta, is_vocabulary_table
from megatron.config.adapters import ALL_LINEAR, lora_flags, plain_network
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from megatron.parallel.adapter import AdaptedLayer, Adapter
from megatron.parallel.expert_linear import ExpertAdapter, ExpertLinear


class PeftTensor(NamedTuple):
    """The tensor in PEFT's files that contains one of our tensors.

    Attributes:
        name: PEFT's name for the tensor.
        meta: The shape and dtype of our tensor.
        adapter_slice: The part of PEFT's adapter that corresponds to our adapter; `None` for the
            head of a reward model.
    """

    name: str
    meta: TensorMeta
    adapter_slice: AdapterSlice | None = None


PeftNames = Mapping[str, PeftTensor]  # by native name

_LAYER = re.compile(r".*?layers\.\d+\.")
_EXPERTS = "mlp.experts"  # the module of transformers 5 in which all experts share a weight
_PREFIX = "base_model.model."
_ROUTER = ".router.adapter."  # in native names; mostly not a linear layer in transformers 5
_ROUTERS = ("gate.weight", "router.weight")  # how names of routers end in `transformers`
_HEAD = "score"  # the head of a reward model, both here and in PEFT
_UNUSED_HEADS = ("classifier",)  # PEFT adds these to modules_to_save for other models
# PEFT also writes the frozen weight of an adapted output layer.
_FROZEN_OUTPUT = f"{_PREFIX}lm_head.base_layer.weight"
_AXIS = {"a": 0, "b": 1}  # the dimension of the rank
_SUFFIXES = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
# Other settings of PEFT's configuration, with the only value that we support.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
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
    """Return the tensor in PEFT's files for each tensor of our adapters, by native name.

    The head of a reward model is included.

    Args:
        model: The network with adapters.
        layers: Its layers that have adapters, by name.
        family: The family whose module names PEFT uses.
        rows: Number of rows of the word embedding.

    Raises:
        CheckpointError: A module of the family contains only a part of a projection, or PEFT does
            not support its experts.
    """
    peft_tensors: dict[str, PeftTensor] = {}
    rules = {rule.name: rule for rule in family.rules(plain_network(model), rows)}
    for layer, modules in family.names(plain_network(model)):
        if layer == _HEAD and model.reward_head:
            meta = TensorMeta((1, model.hidden_size), torch.float32)
            peft_tensors[f"model.{_HEAD}.weight"] = PeftTensor(f"{_PREFIX}{_HEAD}.weight", meta)
        linear = layers.get(layer)
        if linear is None or not isinstance(linear.adapter, Adapter | ExpertAdapter):
            continue
        rule, hf_modules = rules[f"model.{layer}.weight"], tuple(modules)
        outputs = rule.shape[:-1]
        if isinstance(linear, ExpertLinear):
            if family.stacks_experts and f".{_EXPERTS}." not in hf_modules[0]:
                raise CheckpointError(
                    f"{hf_modules[0]} of a {family.name} model: PEFT takes its inputs for outputs: "
                    "convert the merged weights with --saver hf"
                )
            hf_modules = (_experts_module(layer, hf_modules[0], layers),)
            outputs = (1, *outputs[1:])
        is_separate = isinstance(linear, ExpertLinear) and not family.stacks_experts
        conversion = None if is_separate else rule.conversion
        slices = adapter_slices(linear.adapter, outputs, hf_modules, conversion)
        for projection, adapter_slice in slices.items():
            for kind, parameter in linear.adapter[projection].named_parameters():
                meta = TensorMeta(tuple(parameter.shape), parameter.dtype)
                name = f"{_PREFIX}{_module(adapter_slice.module, family)}.{_SUFFIXES[kind]}"
                tensor = PeftTensor(name, meta, adapter_slice)
                peft_tensors.setdefault(f"model.{layer}.adapter.{projection}.{kind}", tensor)
    return peft_tensors


def _module(name: str, family: Family) -> str:
    """Return the name of a module in `transformers`, given its name in a family's files."""
    if family.module_prefix is None or not name.startswith(family.prefix):
        return name
    return f"{family.module_prefix}{name.removeprefix(family.prefix)}"


def tensor_names(path: Path, *, allow_foreign: bool = False) -> frozenset[str]:
    """Return the names of the tensors in a folder of PEFT's files; empty if the file is missing.

    Raises:
        CheckpointError: The file is damaged or refused.
    """
    if not (path / ADAPTER).is_file():
        return frozenset()  # `PeftReader` reports missing files
    return frozenset(MappedFile(inside(path, ADAPTER), allow_foreign=allow_foreign).header())


def family_in(
    tensor_names: frozenset[str],
    model: ModelConfig,
    layers: Mapping[str, AdaptedLayer | ExpertLinear],
    rows: int,
    *,
    base: str | None = None,
) -> Family:
    """Return the family that can express a network and matches the module names in PEFT's files.

    If there is none, return the first family that can express the network.

    Args:
        tensor_names: The names of the tensors in PEFT's files.
        model: The network with adapters.
        layers: Its layers that have adapters, by name.
        rows: Number of rows of the word embedding.
        base: The family of the adapted model, which is tried first, if known.

    Raises:
        CheckpointError: No family can express the network.
    """
    plain = plain_network(model)
    fallback = family_for(plain, rows, None)
    known = families() if tensor_names else {}
    for name in sorted(known, key=lambda name: name != base):
        if mismatches(known[name], plain, rows):
            continue
        try:
            names = {peft.name for peft in peft_names(model, layers, known[name], rows).values()}
        except CheckpointError:
            continue
        if names.issuperset(tensor_names - {_FROZEN_OUTPUT}):
            return known[name]
    return fallback


def _experts_module(
    layer: str, hf_module: str, layers: Mapping[str, AdaptedLayer | ExpertLinear]
) -> str:
    """Return the name of PEFT's module that adapts a weight of all experts.

    PEFT wraps the experts' module once per weight; the wrapper for the last weight is outermost.

    Args:
        layer: The native name of the layer.
        hf_module: The Hugging Face module of its first tensor.
        layers: The layers that have adapters, by name.
    """
    match = _LAYER.match(hf_module)
    assert match is not None
    is_inner = layer.endswith(".up") and f"{layer.removesuffix('.up')}.down" in layers
    return f"{match.group()}{_EXPERTS}{'.base_layer' if is_inner else ''}"


def _is_stacked(shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape belongs to an adapter of experts."""
    return len(shape) > 2


def stored_adapter(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return an adapter's tensor in the shape that PEFT stores, but with our order of rows.

    Args:
        tensor: The tensor; for experts, A [experts, rank, in] or B [experts, ..., rank].
        kind: "a", "b" or "magnitude".
    """
    if not _is_stacked(tensor.shape):
        return tensor
    if kind == "a":
        return tensor.flatten(0, 1)
    return tensor.flatten(1, -2).permute(1, 2, 0).flatten(1).contiguous()


def _peft_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which PEFT stores a tensor, given its native name and shape."""
    return tuple(stored_adapter(torch.empty(shape, device="meta"), _kind_of(name)).shape)


def _kind_of(name: str) -> str:
    return name.rpartition(".")[2]


def _target_of(name: str, peft_name: str) -> str:
    """Return the module or parameter that a tensor adapts, given its native and PEFT's name."""
    module = peft_name.removeprefix(_PREFIX).rpartition(".lora_")[0]
    if _ROUTER in name:
        return f"{module}.weight"
    if not module.removesuffix(".base_layer").endswith(_EXPERTS):
        return module
    weight = "gate_up_proj" if ".up.adapter." in name else "down_proj"
    return f"{module.removesuffix('.base_layer')}.{weight}"


class PeftReader(Reader):
    """PEFT's files of an adapter, with their tensors under native names.

    Args:
        path: The folder.
        model: The network with adapters.
        names: The network's adapters in PEFT's files (`peft_names`).
        remedy: The remedy in messages about an adapter for another network. Default: to pass the
            training flags that match the files.
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: The files are missing or damaged, or the adapter does not fit the network.
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
        """Open the files, and check every setting, name and shape without reading any tensor."""
        self.path, self.allow_foreign = path, allow_foreign
        if not (path / ADAPTER_CONFIG).is_file():
            problem = "contains no adapter" if path.is_dir() else "does not exist"
            raise CheckpointError(
                f"--load-adapter {path} {problem}: give a folder with {ADAPTER_CONFIG} and "
                f"{ADAPTER}"
            )
        if not (path / ADAPTER).exists() and (path / "adapter_model.bin").exists():
            raise CheckpointError(
                f"--load-adapter {path}: adapter_model.bin is a pickle, which could run code and "
                f"is not read: load it with peft and write {ADAPTER} with save_pretrained"
            )
        settings = _settings_in(path, allow_foreign=allow_foreign, has_head=model.reward_head)
        if not settings.get("modules_to_save"):  # an adapter of a language model
            names = {name: peft for name, peft in names.items() if ".adapter." in name}
        self._remedy = _remedy(settings) if remedy is None else remedy
        self._file = MappedFile(inside(path, ADAPTER), allow_foreign=allow_foreign)
        self._names, self._header = names, self._file.header()
        expected = {peft.name for peft in names.values()}
        self._check_settings(settings, model, self._header.keys() - expected - {_FROZEN_OUTPUT})
        missing = sorted(expected - self._header.keys())
        if missing:
            raise CheckpointError(f"{path / ADAPTER}: {missing[0]} is missing: {self._remedy}")
        self.tensors = {}
        for name, peft in names.items():
            self._check_shape(name, peft)
            placement, shape = self._header[peft.name], peft.meta.shape
            if is_vocabulary_table(name):  # our table may have padding rows
                shape = (*placement.shape[:1], *shape[1:])
            self.tensors[name] = TensorMeta(shape, DTYPES[placement.dtype])
            if peft.adapter_slice is not None and _kind_of(name) in _AXIS:
                self._check_scale(settings, model, name, peft)
        self.meta = {"config": {}}

    def _check_shape(self, name: str, peft: PeftTensor) -> None:
        shape = self._header[peft.name].shape
        expected, kind = list(_peft_shape(name, peft.meta.shape)), _kind_of(name)
        if peft.adapter_slice is not None and kind != "a":
            expected[0] = len(peft.adapter_slice.weight_rows)
        if is_vocabulary_table(name) and shape[:1] < tuple(expected[:1]):  # ours is padded
            expected[:1] = shape[:1]
        if peft.adapter_slice is not None and kind in _AXIS and len(shape) == 2:
            axis = _AXIS[kind]
            # The rank in the file is that of all of the module's projections together.
            projections, remainder = divmod(shape[axis], expected[axis])
            if not remainder and projections <= peft.adapter_slice.projections:
                expected[axis] = shape[axis]
        if list(shape) != expected:
            raise CheckpointError(
                f"{self.path / ADAPTER}: {peft.name} has shape {list(shape)}, but it is {expected} "
                "here: the adapter is for a different network: load that network with --load"
            )

    def _check_scale(
        self, settings: dict[str, Any], model: ModelConfig, name: str, peft: PeftTensor
    ) -> None:
        """Check a tensor's rank against the settings, and the settings' scale against the run's."""
        target = _target_of(name, peft.name)
        rank = _in_pattern(settings, "rank_pattern", target, settings.get("r", 8))
        alpha = _in_pattern(settings, "alpha_pattern", target, settings.get("lora_alpha", 8))
        size = self._header[peft.name].shape[_AXIS[_kind_of(name)]]
        if _is_stacked(peft.meta.shape):
            size //= peft.meta.shape[0]
        scale = alpha / (math.sqrt(rank) if model.use_rslora else rank)
        if size != rank or not math.isclose(scale, model.lora_scale, rel_tol=1e-6):
            keys = ("rank_pattern", "alpha_pattern")
            patterns = [f"{key} {settings.get(key)!s:.80}" for key in keys]
            raise CheckpointError(
                f"{self.path / ADAPTER_CONFIG}: {' and '.join(patterns)} give {target} rank {rank} "
                f"and scale {scale:g}, which is not supported: here adapters have rank "
                f"{model.lora_rank} and scale {model.lora_scale:g}, and those of a module's "
                "projections together have a multiple of this rank: merge the adapter with "
                "merge_and_unload of peft"
            )

    def _check_settings(
        self, settings: dict[str, Any], model: ModelConfig, unknown: set[str]
    ) -> None:
        """Check that the adapter's settings match the run."""
        rank = settings.get("r", 8)
        expected = {
            "r": model.lora_rank,
            "lora_alpha": rank if model.lora_alpha is None else model.lora_alpha,
            "use_rslora": model.use_rslora,
            "use_dora": model.use_dora,
        }
        defaults = {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False}
        for key, value in expected.items():
            if settings.get(key, defaults[key]) != value:
                raise CheckpointError(
                    f"{self.path / ADAPTER_CONFIG}: {key} is "
                    f"{settings.get(key, defaults[key])!s:.40}, but {value} here: {self._remedy}"
                )
        slices = [
            peft.adapter_slice for peft in self._names.values() if peft.adapter_slice is not None
        ]
        if settings.get("fan_in_fan_out") and not any(part.is_transposed for part in slices):
            raise CheckpointError(
                f"{self.path / ADAPTER_CONFIG}: fan_in_fan_out "
                f"{settings['fan_in_fan_out']!s:.80} is not supported for this network: "
                "merge the adapter with merge_and_unload of peft"
            )
        if unknown:
            raise CheckpointError(
                f"{self.path / ADAPTER}: {min(unknown)} does not belong to this network's "
                f"adapters: {self._remedy}"
            )

    def _read(self, name: str, box: Box) -> torch.Tensor:
        peft, kind = self._names[name], _kind_of(name)
        shape, whole = peft.meta.shape, self._file.tensor(self._header[peft.name])
        if peft.adapter_slice is not None:
            if kind != "a" and peft.adapter_slice.is_rearranged:
                whole = whole[peft.adapter_slice.rows]
            if kind in _AXIS:
                axis = _AXIS[kind]
                width = _peft_shape(name, shape)[axis]
                if whole.shape[axis] > width:
                    whole = whole.narrow(axis, self._block(name) * width, width)
                if kind == "b":
                    self._check_unadapted_rows(peft)
        if _is_stacked(shape) and kind != "a":
            experts, *_, rank = shape
            whole = whole.view(-1, rank, experts).permute(2, 0, 1)
        whole = whole.reshape(self.tensors[name].shape)
        return whole[box.slices_in(Box.whole(tuple(whole.shape)))]

    def _block(self, name: str) -> int:
        """Return which block of the module's rank dimension a projection uses.

        Raises:
            CheckpointError: The projection uses several blocks.
        """
        peft = self._names[f"{name.rpartition('.')[0]}.b"]
        assert peft.adapter_slice is not None
        width = peft.meta.shape[-1]
        rows = self._file.tensor(self._header[peft.name])[peft.adapter_slice.rows]
        blocks = rows.unflatten(1, (-1, width)).abs().amax((0, 2))
        used = blocks.nonzero().flatten().tolist()
        if len(used) > 1:
            raise CheckpointError(
                f"{self.path / ADAPTER}: {peft.name}: a projection of this module has more than "
                f"rank {width}: merge the adapter with merge_and_unload of peft"
            )
        return used[0] if used else min(peft.adapter_slice.index, len(blocks) - 1)

    def _check_unadapted_rows(self, peft: PeftTensor) -> None:
        """Refuse a B matrix that adapts projections without an adapter in this run."""
        part = peft.adapter_slice
        assert part is not None
        if part.index > 0 or part.adapted == part.projections:
            return
        whole = self._file.tensor(self._header[peft.name])
        unadapted = torch.ones(len(whole), dtype=torch.bool)
        for other in self._names.values():
            if other.name == peft.name and other.adapter_slice is not None:
                unadapted[other.adapter_slice.rows] = False
        if whole[unadapted].any():
            raise CheckpointError(
                f"{self.path / ADAPTER}: {peft.name} adapts projections that have no adapter here: "
                f"name the whole layer with --lora-target-modules, or {self._remedy}"
            )


def _in_pattern(settings: dict[str, Any], key: str, target: str, default: Any) -> Any:
    """Return a module's rank or alpha: the exception in the pattern, or the default."""
    for name, value in (settings.get(key) or {}).items():
        if target == name or target.endswith(f".{name}"):
            return value
    return default


def _settings_in(path: Path, *, allow_foreign: bool, has_head: bool = False) -> dict[str, Any]:
    """Return the content of adapter_config.json, after checking that we support its settings.

    `has_head` allows the head of a reward model in the files.

    Raises:
        CheckpointError: The file cannot be read, or has a setting that we do not support.
    """
    settings = read_json(inside(path, ADAPTER_CONFIG), allow_foreign=allow_foreign)
    for key, allowed in _FIXED.items():
        if settings.get(key, allowed[0]) not in allowed:
            raise CheckpointError(
                f"{path / ADAPTER_CONFIG}: {key} {settings[key]!s:.80} is not supported: merge the "
                "adapter with merge_and_unload of peft"
            )
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(key) or {}
        # PEFT reads names as regular expressions, which may take forever to match.
        if not isinstance(patterns, dict) or not all(
            re.fullmatch(r"[\w.]+", name) and isinstance(value, int | float) and value > 0
            for name, value in patterns.items()
        ):
            raise CheckpointError(
                f"{path / ADAPTER_CONFIG}: {key} {settings[key]!s:.80} is not supported: merge the "
                "adapter with merge_and_unload of peft"
            )
    saved = settings.get("modules_to_save") or []
    saved = saved if isinstance(saved, list) else [saved]
    unsupported = [name for name in saved if not (has_head and name in (_HEAD, *_UNUSED_HEADS))]
    if unsupported:
        remedy = "merge the adapter with merge_and_unload of peft"
        if _HEAD in unsupported:
            remedy = "a reward model's adapter is for --preference-loss bradley-terry"
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG}: modules_to_save {saved!s:.80} is not supported: {remedy}"
        )
    return settings


def network_with(
    path: Path, model: ModelConfig, *, allow_foreign: bool = False
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return a network with adapters on every layer, of the rank and kind in PEFT's files.

    Args:
        path: The folder of PEFT's files.
        model: The network without adapters.
        allow_foreign: Accept files owned by other users.

    Returns:
        The network, and the names of adapted weights of experts and routers (`target_parameters`).

    Raises:
        CheckpointError: The settings cannot be read, or are not supported.
    """
    settings = _settings_in(path, allow_foreign=allow_foreign)
    expert_weights = settings.get("target_parameters") or ()
    if expert_weights and settings.get("use_dora") is True:
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG}: use_dora with target_parameters is not supported: merge the "
            "adapter with merge_and_unload of peft"
        )
    targets = [ALL_LINEAR]
    if "lm_head" in {name.rpartition(".")[2] for name in settings.get("target_modules") or ()}:
        targets.append("lm_head")
    if any(str(name).endswith(_ROUTERS) for name in expert_weights):
        targets.append("router")
    rank, alpha = settings.get("r", 8), settings.get("lora_alpha", 8)
    for key, value, kinds in (("r", rank, (int,)), ("lora_alpha", alpha, (int, float))):
        if type(value) not in kinds or not 0 < value < math.inf:
            raise CheckpointError(
                f"{path / ADAPTER_CONFIG}: {key} is {value!s:.40}, not a positive "
                f"{'integer' if float not in kinds else 'number'}: correct it, or export the "
                "adapter again"
            )
    adapted = replace(
        model,
        lora_rank=rank,
        lora_alpha=float(alpha),
        lora_target_modules=tuple(targets),
        use_rslora=settings.get("use_rslora") is True,
        use_dora=settings.get("use_dora") is True,
    )
    return adapted, tuple(map(str, expert_weights))


def names_in(path: Path, names: PeftNames, *, allow_foreign: bool = False) -> PeftNames:
    """Return the tensors of the adapters that are at least partly in PEFT's files.

    Args:
        path: The folder of PEFT's files.
        names: The tensors of the adapters of all projections (`peft_names`).
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: The file is missing, damaged or refused.
    """
    header = MappedFile(inside(path, ADAPTER), allow_foreign=allow_foreign).header()
    adapted = {name.rpartition(".")[0] for name, peft in names.items() if peft.name in header}
    return {name: peft for name, peft in names.items() if name.rpartition(".")[0] in adapted}


def _remedy(settings: dict[str, Any]) -> str:
    """Return the remedy in messages: the flags that match the settings in PEFT's files."""
    names = set()
    for key in ("target_modules", "target_parameters"):
        targets = settings.get(key)
        targets = targets if isinstance(targets, list) else [targets]
        paths = (
            path.removesuffix(".weight").split(".") for path in targets if isinstance(path, str)
        )
        suffixes = {
            ".".join(path[-2:] if "experts" in path[-2:-1] else path[-1:]) for path in paths
        }
        names |= {
            "router" if suffix == "gate" and "parameters" in key else suffix for suffix in suffixes
        }
    flags = lora_flags(
        rank=settings.get("r", 8),
        alpha=settings.get("lora_alpha", 8),
        targets=sorted(names) if names else None,
        is_rslora=bool(settings.get("use_rslora")),
        is_dora=bool(settings.get("use_dora")),
    )
    return f"give {flags:.300}, and the network that it was trained for"


@dataclass(frozen=True)
class AdapterExport:
    """The adapters of a checkpoint, and a reward model's head, to be written as PEFT's files.

    Attributes:
        reader: The checkpoint.
        model: The network with adapters.
        names: The network's adapters in PEFT's files (`peft_names`).
        single: The name of the file.
    """

    reader: Reader
    model: ModelConfig
    names: PeftNames
    single: ClassVar[str] = ADAPTER

    def tensors(self) -> dict[str, LazyTensor]:
        """Return the tensors by PEFT's name. Each is read only when it is written."""
        members = defaultdict(list)
        for own_names, peft in self.names.items():
            members[peft.name].append(own_names)
        return {
            peft_name: LazyTensor(
                self._shape(own_names[0]),
                self.reader.tensors[own_names[0]].dtype,
                partial(self._read, own_names),
            )
            for peft_name, own_names in members.items()
        }

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor in PEFT's files that contains one of our tensors."""
        adapter_slice, kind = self.names[name].adapter_slice, _kind_of(name)
        shape = list(_peft_shape(name, self.names[name].meta.shape))
        if adapter_slice is not None and kind != "a":
            shape[0] = len(adapter_slice.weight_rows)
        if adapter_slice is not None and kind in _AXIS:
            shape[_AXIS[kind]] *= adapter_slice.adapted
        return tuple(shape)

    def _read(self, members: Sequence[str]) -> torch.Tensor:
        kind, parts = _kind_of(members[0]), {}
        for name in members:
            tensor = stored_adapter(self.reader.read(name), kind)
            adapter_slice = self.names[name].adapter_slice
            if adapter_slice is None or not adapter_slice.is_rearranged:
                return tensor
            parts[adapter_slice] = tensor
        lengths, count = None, sum(len(adapter_slice.rows) for adapter_slice in parts)
        if kind == "magnitude" and count < len(next(iter(parts)).weight_rows):
            weight = self.reader.read(f"{members[0].partition('.adapter.')[0]}.weight")
            lengths = torch.linalg.vector_norm(weight.flatten(0, -2).float(), dim=1)
        return join(kind, parts, lengths)

    def config(self, base: str | None) -> dict[str, Any]:
        """Return the content of adapter_config.json.

        Args:
            base: The folder of the adapted model, if known.
        """
        model, rank = self.model, self.model.lora_rank
        assert rank is not None
        alpha = rank if model.lora_alpha is None else model.lora_alpha
        counts = self._counts()
        slices = [peft.adapter_slice for peft in self.names.values()]
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if model.reward_head else "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": rank,
            "lora_alpha": alpha,
            # The adapter of a module with several projections has the same scale as theirs.
            "rank_pattern": {name: rank * count for name, count in counts.items()},
            "alpha_pattern": {
                name: alpha * (math.sqrt(count) if model.use_rslora else count)
                for name, count in counts.items()
            },
            "lora_dropout": model.lora_dropout,
            "use_rslora": model.use_rslora,
            "use_dora": model.use_dora,
            "target_modules": self._targets(names_parameters=False),
            "target_parameters": self._targets(names_parameters=True),
            "bias": "none",
            "fan_in_fan_out": all(part.is_transposed for part in slices if part is not None),
            "inference_mode": True,
            "modules_to_save": [_HEAD] if model.reward_head else None,
        }

    def _counts(self) -> dict[str, int]:
        """Return the number of adapters that each module's adapter combines, if more than one.

        Modules are named by the last part of their name if the number is the same in all layers,
        otherwise by their full name.
        """
        by_suffix: dict[str, dict[str, int]] = defaultdict(dict)
        for own_name, peft in self.names.items():
            if peft.adapter_slice is not None:
                name = _target_of(own_name, peft.name)
                by_suffix[name.rpartition(".")[2]][name] = peft.adapter_slice.adapted
        counts_by_name: dict[str, int] = {}
        for suffix, counts in by_suffix.items():
            is_alike = len(set(counts.values())) == 1
            counts_by_name |= {suffix: max(counts.values())} if is_alike else counts
        return {name: count for name, count in counts_by_name.items() if count > 1}

    def _targets(self, *, names_parameters: bool) -> list[str] | None:
        """Return the names of the adapted modules or parameters, or `None` if there are none.

        The names are suffixes if all layers are adapted alike, otherwise full names.
        """
        by_suffix = defaultdict(set)
        for own_name, peft in self.names.items():
            is_parameter = _ROUTER in own_name or _is_stacked(peft.meta.shape)
            if peft.adapter_slice is not None and is_parameter == names_parameters:
                name = _target_of(own_name, peft.name)
                suffix = name.split(".")[-2 if is_parameter else -1 :]
                by_suffix[".".join(suffix)].add(name)
        is_alike = all(len(modules) == self.model.num_layers for modules in by_suffix.values())
        names = sorted(by_suffix if is_alike else set().union(*by_suffix.values()))
        return names or None
