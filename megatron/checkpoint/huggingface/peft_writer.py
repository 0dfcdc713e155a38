"""Write a checkpoint's adapters as PEFT's files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from megatron.checkpoint.entries import LazyTensor
from megatron.checkpoint.huggingface.files import ADAPTER
from megatron.checkpoint.huggingface.peft import HEAD, PeftNames, PeftTensor, stored_adapter
from megatron.checkpoint.huggingface.peft_slices import AdapterSlice, join
from megatron.checkpoint.reader import Reader
from megatron.config.model import ModelConfig


@dataclass(frozen=True)
class AdapterExport:
    """The adapters of a checkpoint, and a reward model's head, to be written as PEFT's files.

    Attributes:
        reader: The checkpoint.
        model: The network with adapters.
        names: The network's adapters in PEFT's files (`peft_names`).
        single: The name of the file that contains all tensors.
    """

    reader: Reader
    model: ModelConfig
    names: PeftNames
    single: ClassVar[str] = ADAPTER

    def tensors(self) -> dict[str, LazyTensor]:
        """Return the tensors by PEFT's name. Each is read only when it is written."""
        members = defaultdict[str, list[PeftTensor]](list)
        for peft in self.names.values():
            members[peft.name].append(peft)
        return {
            name: LazyTensor(
                _shape_in_file(tensors[0]),
                self.reader.tensors[tensors[0].native].dtype,
                partial(self._read, tensors),
            )
            for name, tensors in members.items()
        }

    def _read(self, members: Sequence[PeftTensor]) -> torch.Tensor:
        """Return a tensor in PEFT's files, given all of our tensors that it contains."""
        kind, parts = members[0].kind, dict[AdapterSlice, torch.Tensor]()
        for peft in members:
            tensor = stored_adapter(self.reader.read(peft.native), kind)
            adapter_slice = peft.adapter_slice
            if adapter_slice is None or not adapter_slice.is_rearranged:
                return tensor
            parts[adapter_slice] = tensor
        lengths, count = None, sum(len(adapter_slice.rows) for adapter_slice in parts)
        if kind == "magnitude" and count < len(next(iter(parts)).weight_rows):
            weight = self.reader.read(f"{members[0].native.partition('.adapter.')[0]}.weight")
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
            # An adapter that combines those of several projections has the same scale as they do.
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
            "modules_to_save": [HEAD] if model.reward_head else None,
        }

    def _counts(self) -> dict[str, int]:
        """Return the number of adapters that each module's adapter combines, if more than one.

        Modules are named by the last part of their name if the number is the same in all layers,
        otherwise by their full name.
        """
        by_suffix: dict[str, dict[str, int]] = defaultdict(dict)
        for peft in self.names.values():
            if peft.adapter_slice is not None:
                suffix = peft.target.rpartition(".")[2]
                by_suffix[suffix][peft.target] = peft.adapter_slice.adapted
        counts_by_name: dict[str, int] = {}
        for suffix, counts in by_suffix.items():
            is_alike = len(set(counts.values())) == 1
            counts_by_name |= {suffix: max(counts.values())} if is_alike else counts
        return {name: count for name, count in counts_by_name.items() if count > 1}

    def _targets(self, *, names_parameters: bool) -> list[str] | None:
        """Return the names of the adapted modules or parameters, or `None` if there are none.

        The names are suffixes if each of them occurs once in every layer, otherwise full names.
        """
        by_suffix = defaultdict(set)
        for peft in self.names.values():
            if peft.adapter_slice is not None and peft.adapts_parameter == names_parameters:
                suffix = peft.target.split(".")[-2 if names_parameters else -1 :]
                by_suffix[".".join(suffix)].add(peft.target)
        is_alike = all(len(modules) == self.model.num_layers for modules in by_suffix.values())
        names = sorted(by_suffix if is_alike else set().union(*by_suffix.values()))
        return names or None


def _shape_in_file(peft: PeftTensor) -> tuple[int, ...]:
    """Return the shape of the tensor in PEFT's files that contains one of our tensors."""
    shape = list(peft.stored_shape)
    if peft.adapter_slice is not None and peft.kind != "a":
        shape[0] = len(peft.adapter_slice.weight_rows)
    if peft.adapter_slice is not None and peft.rank_axis is not None:
        shape[peft.rank_axis] *= peft.adapter_slice.adapted
    return tuple(shape)
