"""Read an adapter's PEFT files through the `Reader` interface."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.entries import DTYPES, Box
from megatron.checkpoint.huggingface.files import ADAPTER, ADAPTER_CONFIG, inside
from megatron.checkpoint.huggingface.peft import FROZEN_OUTPUT, HEAD, PeftNames, PeftTensor
from megatron.checkpoint.huggingface.settings import read_json
from megatron.checkpoint.mapped import MappedFile
from megatron.checkpoint.reader import Reader, TensorMeta, is_vocabulary_table
from megatron.config.adapters import ALL_LINEAR, lora_flags
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError

_ROUTERS = ("gate.weight", "router.weight")  # suffixes of router names in `transformers`
_EXCLUDED = "exclude_modules"  # it only narrows target_modules; the file names what is adapted
_UNUSED_HEADS = ("classifier",)  # PEFT adds these to modules_to_save for other models
# Other settings of PEFT's configuration, with the values that we support, the default first.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
}


def tensor_names(path: Path, *, allow_foreign: bool = False) -> frozenset[str]:
    """Return the names of the tensors in a folder of PEFT's files; empty if the file is missing.

    Raises:
        CheckpointError: The file is damaged or refused.
    """
    if not os.path.isfile(path / ADAPTER):
        return frozenset()  # `PeftReader` reports missing files
    return frozenset(MappedFile(inside(path, ADAPTER), allow_foreign=allow_foreign).header())


def network_with(
    path: Path, model: ModelConfig, *, allow_foreign: bool = False
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return a network with adapters on every linear layer, of the rank and kind in PEFT's files.

    The output layer and the routers get adapters only if PEFT's files adapt them.

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
            "adapter with peft's merge_and_unload"
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


class PeftReader(Reader):
    """An adapter's PEFT files, with their tensors under native names.

    Reading a tensor raises a `CheckpointError` if its values cannot be split into adapters of the
    run's projections.
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
        """Open the files, and check every setting, name and shape without reading any tensor.

        Args:
            path: The folder.
            model: The network with adapters.
            names: The network's adapters in PEFT's files (`peft_names`).
            remedy: The remedy in messages about an adapter for another network. Default: to pass
                the training flags that match the files.
            allow_foreign: Accept files owned by other users.

        Raises:
            CheckpointError: The files are missing, damaged or refused, a setting is not supported,
                or the adapter does not fit the network.
        """
        self.path, self.allow_foreign = path, allow_foreign
        if not os.path.isfile(path / ADAPTER_CONFIG):
            problem = "contains no adapter" if os.path.isdir(path) else "does not exist"
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
        self._file = MappedFile(inside(path, ADAPTER), allow_foreign=allow_foreign)
        self._names, self._header = names, self._file.header()
        if remedy is None:
            remedy = _remedy(settings, sorted(self._header), model.num_layers)
        self._remedy = remedy
        expected = {peft.name for peft in names.values()}
        self._check_settings(settings, model, self._header.keys() - expected - {FROZEN_OUTPUT})
        missing = sorted(expected - self._header.keys())
        if missing:
            raise CheckpointError(f"{path / ADAPTER}: {missing[0]} is missing: {self._remedy}")
        self.tensors = {}
        for name, peft in names.items():
            self._check_shape(settings, model, peft)
            placement, shape = self._header[peft.name], peft.meta.shape
            if is_vocabulary_table(name):  # our table may have padding rows
                shape = (*placement.shape[:1], *shape[1:])
            self.tensors[name] = TensorMeta(shape, DTYPES[placement.dtype])
            if peft.rank_axis is not None:
                self._check_scale(settings, model, peft, peft.rank_axis)
        self.meta = {"config": {}}

    def _check_shape(self, settings: dict[str, Any], model: ModelConfig, peft: PeftTensor) -> None:
        shape, expected, axis = (
            self._header[peft.name].shape,
            list(peft.stored_shape),
            peft.rank_axis,
        )
        if peft.adapter_slice is not None and peft.kind != "a":
            expected[0] = len(peft.adapter_slice.weight_rows)
        if is_vocabulary_table(peft.native) and shape[:1] < tuple(expected[:1]):  # ours is padded
            expected[:1] = shape[:1]
        if peft.adapter_slice is not None and axis is not None and len(shape) == 2:
            # The rank in the file is that of all of the module's projections together.
            projections, remainder = divmod(shape[axis], expected[axis])
            if not remainder and projections <= peft.adapter_slice.projections:
                expected[axis] = shape[axis]
        if list(shape) != expected:
            rank = _in_pattern(settings, "rank_pattern", peft.target, None)
            if axis is not None and rank == shape[axis]:  # only the rank may differ
                raise self._scale_error(settings, model, peft)
            raise CheckpointError(
                f"{self.path / ADAPTER}: {peft.name} has shape {list(shape)}, but it is {expected} "
                "here: the adapter is for a different network: load that network with --load"
            )

    def _check_scale(
        self, settings: dict[str, Any], model: ModelConfig, peft: PeftTensor, axis: int
    ) -> None:
        """Check a tensor's rank against the settings, and the settings' scale against the run's."""
        rank, scale = _rank_and_scale(settings, model, peft.target)
        size = self._header[peft.name].shape[axis]
        if peft.is_stacked:
            size //= peft.meta.shape[0]
        if size != rank or not math.isclose(scale, model.lora_scale, rel_tol=1e-6):
            raise self._scale_error(settings, model, peft)

    def _scale_error(
        self, settings: dict[str, Any], model: ModelConfig, peft: PeftTensor
    ) -> CheckpointError:
        """Return the error about a module with a rank or scale that is not supported."""
        rank, scale = _rank_and_scale(settings, model, peft.target)
        keys = ("rank_pattern", "alpha_pattern")
        patterns = [f"{key} {settings.get(key)!s:.80}" for key in keys]
        return CheckpointError(
            f"{self.path / ADAPTER_CONFIG}: {' and '.join(patterns)} give {peft.target} rank "
            f"{rank} and scale {scale:g}, which is not supported: here adapters have rank "
            f"{model.lora_rank} and scale {model.lora_scale:g}, and those of a module's "
            "projections together have a multiple of this rank: merge the adapter with "
            "peft's merge_and_unload"
        )

    def _check_settings(
        self, settings: dict[str, Any], model: ModelConfig, unknown: set[str]
    ) -> None:
        """Check that the adapter's settings match the run, and that no tensor is `unknown`."""
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
                "merge the adapter with peft's merge_and_unload"
            )
        if unknown:
            raise CheckpointError(
                f"{self.path / ADAPTER}: {min(unknown)} does not belong to this network's "
                f"adapters: {self._remedy}"
            )

    def _read(self, name: str, box: Box) -> torch.Tensor:
        peft = self._names[name]
        whole, axis = self._file.tensor(self._header[peft.name]), peft.rank_axis
        if peft.adapter_slice is not None and peft.kind != "a" and peft.adapter_slice.is_rearranged:
            whole = whole[peft.adapter_slice.rows]
        if axis is not None:
            width = peft.stored_shape[axis]
            if whole.shape[axis] > width:
                whole = whole.narrow(axis, self._block(name) * width, width)
        if peft.kind == "b":
            self._check_unadapted_rows(peft)
        if peft.is_stacked and peft.kind != "a":
            experts, *_, rank = peft.meta.shape
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
                f"rank {width}: merge the adapter with peft's merge_and_unload"
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
                "adapter with peft's merge_and_unload"
            )
    targets = settings.get("target_modules") or []
    named = targets if isinstance(targets, list) else [targets]
    if not all(isinstance(name, str) for name in named):
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG}: target_modules {targets!s:.80} is not a list of names: "
            "correct it, or export the adapter again"
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
                "adapter with peft's merge_and_unload"
            )
    saved = settings.get("modules_to_save") or []
    saved = saved if isinstance(saved, list) else [saved]
    unsupported = [name for name in saved if not (has_head and name in (HEAD, *_UNUSED_HEADS))]
    if unsupported:
        remedy = "merge the adapter with peft's merge_and_unload"
        if HEAD in unsupported:
            remedy = "a reward model's adapter is for --preference-loss bradley-terry"
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG}: modules_to_save {saved!s:.80} is not supported: {remedy}"
        )
    return settings


def _in_pattern(settings: dict[str, Any], key: str, target: str, default: Any) -> Any:
    """Return a module's rank or alpha: the exception in the pattern, or the default."""
    for name, value in (settings.get(key) or {}).items():
        if target == name or target.endswith(f".{name}"):
            return value
    return default


def _rank_and_scale(
    settings: dict[str, Any], model: ModelConfig, target: str
) -> tuple[float, float]:
    """Return the rank and the scale that PEFT's settings give a module's adapter."""
    rank = _in_pattern(settings, "rank_pattern", target, settings.get("r", 8))
    alpha = _in_pattern(settings, "alpha_pattern", target, settings.get("lora_alpha", 8))
    return rank, alpha / (math.sqrt(rank) if model.use_rslora else rank)


def _remedy(settings: dict[str, Any], tensors: Sequence[str], num_layers: int) -> str:
    """Return the remedy in messages: the flags that match the settings in PEFT's files.

    Args:
        settings: The content of adapter_config.json.
        tensors: The names of the file's tensors.
        num_layers: The number of the network's layers.
    """
    names, width = set(), 300
    adapted = settings.get("target_modules")
    if isinstance(adapted, str) or any(map(settings.get, ("layers_to_transform", _EXCLUDED))):
        parameters = [str(name) for name in settings.get("target_parameters") or ()]
        names, width = _names_of_modules(tensors, parameters, num_layers), 10_000
        adapted = None
    for targets in (adapted, settings.get("target_parameters")):
        listed = targets if isinstance(targets, list) else [targets]
        paths = (
            path.removesuffix(".weight").split(".") for path in listed if isinstance(path, str)
        )
        suffixes = {
            ".".join(path[-2:] if "experts" in path[-2:-1] else path[-1:]) for path in paths
        }
        names |= {
            "router" if suffix == "gate" and targets is not adapted else suffix
            for suffix in suffixes
        }
    flags = lora_flags(
        rank=settings.get("r", 8),
        alpha=settings.get("lora_alpha", 8),
        targets=sorted(names) if names else None,
        is_rslora=bool(settings.get("use_rslora")),
        is_dora=bool(settings.get("use_dora")),
    )
    return f"give {flags:.{width}}, and the network that it was trained for"


def _names_of_modules(tensors: Sequence[str], parameters: Sequence[str], layers: int) -> set[str]:
    """Return patterns that match exactly the modules that a file's tensors adapt.

    Modules that are adapted in all layers share a pattern.

    Args:
        tensors: The names of the file's tensors.
        parameters: The values of `target_parameters`, whose modules are left out.
        layers: The number of the network's layers.
    """
    owners = tuple(name.rpartition(".")[0] for name in parameters)
    numbers: dict[str, set[str]] = {}
    for name in tensors:
        module = name.rpartition(".lora_")[0].removesuffix(".base_layer")
        if module and not (owners and module.endswith(owners)):
            number, path = re.findall(r"^(?:.*\blayers\.(\d+)\.)?(.*)$", module)[0]
            numbers.setdefault(path if number else path.rpartition(".")[2], set()).add(number)
    patterns = set()
    for path, found in numbers.items():
        if found == {""} or len(found) == layers:
            patterns.add(path.rpartition(".")[2])
        else:
            patterns |= {f"layers.{number}.{path}" for number in found}
    return patterns
