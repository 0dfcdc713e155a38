"""Any checkpoint as files of Megatron-LM 23.08, a tensor at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.deferred import DeferredTensor
from megatron.checkpoint.legacy import flat_states
from megatron.checkpoint.legacy.arguments import megatron_arguments
from megatron.checkpoint.legacy.names import Arrangement
from megatron.checkpoint.legacy.places import VERSION, FilePlan, Slot, plan_files
from megatron.checkpoint.legacy.random_state import random_states
from megatron.checkpoint.legacy.rank_files import DISTRIBUTED_FILE, MODEL_FILE
from megatron.checkpoint.legacy.torch_file import write_torch_file
from megatron.checkpoint.reader import Reader
from megatron.config.model import ModelConfig
from megatron.config.rules_legacy import not_computed
from megatron.config.run import RunConfig
from megatron.config.stages import plan_model
from megatron.durable import storage_errors, sync_folder
from megatron.errors import CheckpointError

_WEIGHTS, _STATES = "model.", "optimizer."
_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}
_MASTER = "master"


def notices(model: ModelConfig) -> Iterator[str]:
    """What Megatron-LM 23.08 computes otherwise with the same weights, for the user."""
    if model.position_embedding_type == "rope":
        if model.rotary_base != 10000.0:
            yield (
                f"--rotary-base {model.rotary_base:g}: Megatron-LM 23.08 computes with 10000; "
                "later versions take the flag"
            )
        if model.use_rope_scaling:
            yield "--use-rope-scaling: Megatron-LM 23.08 does not know it; later versions do"
    if model.normalization == "RMSNorm":
        yield (
            "--normalization RMSNorm: Megatron-LM 23.08 has it with --transformer-impl "
            "transformer_engine only, its Llama-2 fork without"
        )


class LegacyWriter:
    """Writes a checkpoint as Megatron's files.

    Args:
        reader: what to write; its vocabulary tables have the rows to write.
        config: of the run that it stands for; `parallel` says how the files are split, and whether
            optimizer states are kept as --use-distributed-optimizer keeps them.
        data_parallel: processes that hold the same weights.
        keep_optimizer: write optimizer states, where the checkpoint has them.

    Raises:
        CheckpointError: Megatron's model has no place for a parameter, cannot be split so, or
            computes another network.
    """

    def __init__(
        self,
        reader: Reader,
        config: RunConfig,
        *,
        data_parallel: int = 1,
        keep_optimizer: bool = True,
    ) -> None:
        refused = ", ".join(not_computed(config.model))
        if refused:
            raise CheckpointError(
                f"{refused}: Megatron-LM 23.08 computes no such network: write the native format "
                "(--saver native), or Hugging Face's (--saver hf)"
            )
        self.reader, self.config, self.data_parallel = reader, config, data_parallel
        self._keeps_optimizer = keep_optimizer and bool(reader.meta.get("optimizer"))
        if self._keeps_optimizer and "decoupled_lr" in (reader.meta.get("schedule") or {}):
            raise CheckpointError(
                f"{reader.path}: its optimizer has a --decoupled-lr, which Megatron-LM 23.08 has "
                "not: convert the weights alone, without --keep-optimizer, or write the native "
                "format (--saver native)"
            )
        self._held = frozenset(reader.names())
        names = [n.removeprefix(_WEIGHTS) for n in reader.names() if n.startswith(_WEIGHTS)]
        parallel = config.parallel
        self._arrangement = Arrangement(VERSION, heads=0, swiglu=config.model.swiglu)
        self.files = plan_files(
            {name: reader.global_shape(f"{_WEIGHTS}{name}") for name in names},
            plan_model(config.model, parallel),
            tensor=parallel.tensor_model_parallel_size,
            stages=parallel.pipeline_model_parallel_size,
            swiglu=config.model.swiglu,
        )

    @property
    def total_bytes(self) -> int:
        """Of all tensors, about; copies that Megatron keeps of tied embeddings not counted."""
        written = (_WEIGHTS, _STATES) if self._keeps_optimizer else (_WEIGHTS,)
        names = (name for name in self._held if name.startswith(written))
        shapes = ((self.reader.global_shape(n), self.reader.dtype(n)) for n in names)
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)

    def write(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        """Write and flush this rank's share of the files into a new checkpoint's folder.

        Raises:
            StorageError: it cannot be written.
            CheckpointError: the source turns out damaged.
        """
        for plan in self.files[rank::ranks]:
            place = folder / plan.folder
            with storage_errors(place):
                place.mkdir()
                write_torch_file(place / MODEL_FILE, self._tree(plan))
                if self._keeps_optimizer and self.config.parallel.use_distributed_optimizer:
                    write_torch_file(place / DISTRIBUTED_FILE, self._flat_states(plan))
                sync_folder(place)

    def _tree(self, plan: FilePlan) -> dict[str, Any]:
        """What a rank's `model_optim_rng.pt` holds."""
        meta, words = self.reader.meta, f"{_WEIGHTS}embedding.word.weight"
        tree: dict[str, Any] = {
            "args": megatron_arguments(
                self.config,
                meta,
                dtype=self.reader.dtype(words),
                rows=self.reader.global_shape(words)[0],
                data_parallel=self.data_parallel,
            ),
            "checkpoint_version": VERSION,
            "iteration": self.reader.iteration,
        }
        for index, chunk in enumerate(plan.chunks):
            tree["model" if len(plan.chunks) == 1 else f"model{index}"] = self._model(chunk)
        if self._keeps_optimizer:
            tree["optimizer"] = self._optimizer(plan)
            tree["opt_param_scheduler"] = meta["schedule"]
        if not self.config.checkpoint.no_save_rng:
            kept = (meta.get("rng") or {}).get("seed")
            seed = self.config.training.seed if kept is None else kept
            place = {"stage": plan.stage, "tensor_rank": plan.tensor_rank}
            tree["rng_state"] = [random_states(seed, self.reader.iteration, **place)]
        return tree

    def _model(self, slots: tuple[Slot, ...]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for slot in slots:
            place: Any = tree
            for key in slot.path[:-1]:
                place = place.setdefault(key, OrderedDict())
            place[slot.path[-1]] = self._value(slot)
        return tree

    def _optimizer(self, plan: FilePlan) -> dict[str, Any]:
        slots, scale = plan.slots(), self.reader.meta["optimizer"].get("loss_scale")
        groups = _groups(slots)
        tree: dict[str, Any] = {
            "param_groups": [self._group(group, slots[group.start].is_decayed) for group in groups]
        }
        scaler = {"grad_scaler": _scaler(scale)} if scale else {}
        if self.config.parallel.use_distributed_optimizer:
            for group in tree["param_groups"]:
                del group["params"]
            return {"optimizer": tree, **scaler}
        states = {index: self._state(slot) for index, slot in enumerate(slots)}
        tree = {"state": states, **tree}
        if self._name(slots[0], _MASTER) not in self._held:
            return tree
        masters = [[self._value(slots[i], _MASTER) for i in group] for group in groups]
        return {"optimizer": tree, **scaler, "fp32_from_fp16_params": masters}

    def _group(self, members: range, decays: bool) -> dict[str, Any]:
        """The settings of a parameter group, with the keys of Apex's optimizer and of PyTorch's."""
        optimizer, schedule = self.config.optimizer, self.config.schedule
        settings: dict[str, Any] = {
            "wd_mult": float(decays),
            "lr_mult": 1.0,
            # Megatron sets it anew from its schedule before it is used.
            "lr": self.reader.meta["schedule"].get("max_lr", schedule.lr),
            "weight_decay": optimizer.weight_decay if decays else 0.0,
            "maximize": False,
            "foreach": False,
            "differentiable": False,
            "fused": None,
        }
        if optimizer.optimizer == "sgd":
            settings |= {"momentum": optimizer.sgd_momentum, "dampening": 0, "nesterov": False}
        else:
            settings |= {
                "betas": (optimizer.adam_beta1, optimizer.adam_beta2),
                "eps": optimizer.adam_eps,
                "bias_correction": True,
                "amsgrad": False,
                "capturable": False,
                "decoupled_weight_decay": True,
                "step": self.reader.meta["optimizer"]["step"],
            }
        return settings | {"params": list(members)}

    def _state(self, slot: Slot) -> dict[str, Any]:
        found = {
            theirs: self._value(slot, ours)
            for ours, theirs in _KINDS.items()
            if self._name(slot, ours) in self._held
        }
        if "exp_avg" not in found:
            return found
        step = torch.tensor(float(self.reader.meta["optimizer"]["step"]))
        return {"step": step, **found}

    def _flat_states(self, plan: FilePlan) -> dict[int, Any]:
        """What a rank's `distrib_optim.pt` holds."""
        accumulates = self.config.precision.accumulate_allreduce_grads_in_fp32
        tree: dict[int, Any] = {}
        for index, chunk in enumerate(plan.chunks):
            dtype = torch.float32 if accumulates else self._value(chunk[0]).dtype
            states = {}
            for key, kind in flat_states.KINDS.items():
                # An fp32 weight is its own master.
                is_weight = kind == _MASTER and self._name(chunk[0], kind) not in self._held
                values = [self._value(slot, None if is_weight else kind) for slot in chunk]
                states[key] = flat_states.deferred(values, self.data_parallel)
            tree[index] = {dtype: states}
        return tree

    def _name(self, slot: Slot, kind: str | None = None) -> str:
        """Of a parameter, or of its optimizer state of a kind."""
        return f"{_WEIGHTS}{slot.name}" if kind is None else f"{_STATES}{slot.name}.{kind}"

    def _value(self, slot: Slot, kind: str | None = None) -> DeferredTensor:
        """A parameter's part in a file, or its state's, in Megatron's shape."""
        name = self._name(slot, kind)
        shape = self._arrangement.flatten(slot.name, torch.empty(slot.box.shape, device="meta"))
        read = partial(self._read, slot, name)
        return DeferredTensor(tuple(shape.shape), self.reader.dtype(name), read)

    def _read(self, slot: Slot, name: str) -> torch.Tensor:
        part = self.reader.read(name, slot.box, global_shape=self.reader.global_shape(name))
        return self._arrangement.flatten(slot.name, part)


def _groups(slots: list[Slot]) -> list[range]:
    """Numbers of the decayed parameters, then of the others; an empty group is left out."""
    decayed = sum(slot.is_decayed for slot in slots)
    groups = (range(decayed), range(decayed, len(slots)))
    return [group for group in groups if group]


def _scaler(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "scale": torch.tensor([float(state["scale"])])}
