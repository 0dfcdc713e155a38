"""Random states as Megatron's files hold them.

Our own dropout is drawn from the seed and the place in the sample order, so there is no generator
whose state could be saved. Written is what Megatron's generators have after it seeded them, each
iteration with numbers of its own.


Any checkpoint as files of Megatron-LM 23.08, a tensor at a time.

Save in Megatron-LM's format: whole and durable, or not at all, as `store.save` does.

Two ways lead here. A conversion has a checkpoint to read from. A training run has its state
spread over its ranks in whatever layout: it is written as a native checkpoint inside the temporary
folder first, from which every rank then makes its share of the files. That doubles what is
written, but asks nothing of the layout and holds one tensor at a time in memory.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint import store
from megatron.checkpoint.entries import Json, LazyTensor
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.find import COMPLETE, RELEASE, iteration_folder, read_tracker
from megatron.checkpoint.legacy.arguments import megatron_arguments
from megatron.checkpoint.legacy.file_plan import VERSION, FileParameter, FilePlan, plan_files
from megatron.checkpoint.legacy.names import Arrangement
from megatron.checkpoint.legacy.optimizer import FLAT_STATES, lazy_flat
from megatron.checkpoint.legacy.torch_file import DISTRIBUTED_FILE, MODEL_FILE, write_torch_file
from megatron.checkpoint.lock import SaveLock
from megatron.checkpoint.plan import SavePlan
from megatron.checkpoint.reader import NativeReader, PaddedReader, Reader
from megatron.checkpoint.retention import Keep, mark_of
from megatron.config.model import ModelConfig
from megatron.config.rules_legacy import not_computed
from megatron.config.run import ModelRun
from megatron.config.stages import plan_model
from megatron.durable import Check, remove_tree, storage_errors, sync_folder, write_file
from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout

_STAGE_STRIDE = 100  # of seeds, as in Megatron
_TENSOR_OFFSET = 2718
_NUMBERS_PER_ITERATION = 1 << 32  # of a device's generator; a multiple of 4, as it wants


def random_states(seed: int, iteration: int, *, stage: int, tensor_rank: int) -> dict[str, Any]:
    """One entry of `rng_state`.

    Args:
        seed: of the run.
        iteration: training steps taken.
        stage: pipeline stage of the file.
        tensor_rank: tensor-parallel rank of the file.
    """
    base = seed + _STAGE_STRIDE * stage
    kind, keys, place, has_normal, normal = np.random.RandomState(base).get_state(legacy=True)
    return {
        "random_rng_state": random.Random(base).getstate(),
        # Numbers, not an array: every version of numpy reads them.
        "np_rng_state": (kind, tuple(int(key) for key in keys), place, has_normal, normal),
        "torch_rng_state": torch.Generator().manual_seed(base).get_state(),
        "cuda_rng_state": _device_state(base, iteration),
        "rng_tracker_states": {
            "model-parallel-rng": _device_state(base + _TENSOR_OFFSET + tensor_rank, iteration)
        },
    }


def _device_state(seed: int, iteration: int) -> torch.Tensor:
    """A GPU generator's state: its seed and how many numbers were drawn, 8 bytes each."""
    drawn = iteration * _NUMBERS_PER_ITERATION
    data = seed.to_bytes(8, "little") + (drawn % (1 << 63)).to_bytes(8, "little")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


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
        config: ModelRun,
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

    def _model(self, slots: tuple[FileParameter, ...]) -> dict[str, Any]:
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

    def _state(self, slot: FileParameter) -> dict[str, Any]:
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
            for key, kind in FLAT_STATES.items():
                # An fp32 weight is its own master.
                is_weight = kind == _MASTER and self._name(chunk[0], kind) not in self._held
                values = [self._value(slot, None if is_weight else kind) for slot in chunk]
                states[key] = lazy_flat(values, self.data_parallel)
            tree[index] = {dtype: states}
        return tree

    def _name(self, slot: FileParameter, kind: str | None = None) -> str:
        """Of a parameter, or of its optimizer state of a kind."""
        return f"{_WEIGHTS}{slot.name}" if kind is None else f"{_STATES}{slot.name}.{kind}"

    def _value(self, slot: FileParameter, kind: str | None = None) -> LazyTensor:
        """A parameter's part in a file, or its state's, in Megatron's shape."""
        name = self._name(slot, kind)
        shape = self._arrangement.flatten(slot.name, torch.empty(slot.box.shape, device="meta"))
        read = partial(self._read, slot, name)
        return LazyTensor(tuple(shape.shape), self.reader.dtype(name), read)

    def _read(self, slot: FileParameter, name: str) -> torch.Tensor:
        part = self.reader.read(name, slot.box, global_shape=self.reader.global_shape(name))
        return self._arrangement.flatten(slot.name, part)


def _groups(slots: list[FileParameter]) -> list[range]:
    """Numbers of the decayed parameters, then of the others; an empty group is left out."""
    decayed = sum(slot.is_decayed for slot in slots)
    groups = (range(decayed), range(decayed, len(slots)))
    return [group for group in groups if group]


def _scaler(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "scale": torch.tensor([float(state["scale"])])}


_STAGING = "native"


def write_legacy(
    root: Path | str,
    iteration: int,
    plan: SavePlan,
    mine: Mapping[str, Tensor],
    meta: Json,
    layout: Layout,
    *,
    config: ModelRun,
    vocabulary: int,
    keep: Keep | None = None,
) -> Path:
    """Save a run's state. Collective over all ranks of `layout`; returns the checkpoint's folder.

    Args:
        root: folder of checkpoints; made where missing.
        iteration: training steps taken.
        plan: who holds what; see `store.agree`.
        mine: this rank's share of the plan.
        meta: JSON value; rank 0's is saved.
        layout: who takes part.
        config: of the run.
        vocabulary: entries of the tokenizer, which Megatron pads by a rule of its own.
        keep: delete older ones afterwards, but for these; None: none.

    Raises:
        StorageError: on every rank, when any rank cannot write. Nothing is published, the tracker
            stays, and temporary files are removed.
        CheckpointError: Megatron's model has no place for a parameter.
    """
    exchange, folder = JsonExchange(layout.world), iteration_folder(iteration)

    def write(temporary: Path) -> None:
        staging = temporary / _STAGING
        store.write_checkpoint(staging, iteration, plan, mine, meta, layout)
        exchange.together(lambda: write_share(temporary, NativeReader(staging / folder)))
        exchange.on_main(lambda: remove_tree(staging))

    def write_share(temporary: Path, reader: Reader) -> None:
        rows = megatron_rows(vocabulary, config)
        padded = PaddedReader(reader, rows=rows, entries=vocabulary)
        writer = LegacyWriter(padded, config, data_parallel=layout.replica.size)
        writer.write(temporary, layout.world.rank, layout.world.size)

    need = plan.total_bytes  # twice: the staged checkpoint asks for its own room
    before = read_tracker(Path(root))[0] if exchange.is_main else None
    path = _save(Path(root).absolute(), folder, need, exchange, write)
    if keep is not None and exchange.is_main:
        store.drop_older(path.parent, iteration, keep, before)
    return path


def convert_to_legacy(
    reader: Reader,
    root: Path | str,
    config: ModelRun,
    *,
    keep_optimizer: bool,
    check: Check | None = None,
) -> Path:
    """Save an opened checkpoint; returns the new one's folder.

    A model that was not trained yet, as Hugging Face's, becomes a `release`, from which Megatron
    starts at iteration 0.

    Args:
        reader: the checkpoint; its vocabulary tables have the rows to write.
        root: folder of checkpoints; made where missing.
        config: see `LegacyWriter`.
        keep_optimizer: write its optimizer states too.
        check: see `store.write_checkpoint`.

    Raises:
        StorageError: it cannot be written. Nothing is left behind.
        CheckpointError: Megatron's model has no place for a parameter, another job writes there,
            or the source turns out damaged.
    """
    root = Path(root).absolute()
    writer = LegacyWriter(reader, config, keep_optimizer=keep_optimizer)
    folder = iteration_folder(reader.iteration) if reader.iteration else RELEASE
    exchange = JsonExchange(Layout.single().world)
    with SaveLock(root):
        return _save(root, folder, writer.total_bytes, exchange, writer.write, check)


def megatron_rows(vocabulary: int, config: ModelRun) -> int:
    """Rows of the word embedding by Megatron's rule: a multiple of --make-vocab-size-divisible-by
    times the tensor-parallel size."""
    multiple = config.model.make_vocab_size_divisible_by
    multiple *= config.parallel.tensor_model_parallel_size
    return -(-vocabulary // multiple) * multiple


def _save(
    root: Path,
    folder: str,
    need: int,
    exchange: JsonExchange,
    write: Callable[[Path], None],
    check: Check | None = None,
) -> Path:
    """The protocol: temporary folder, files, mark, check, rename, tracker. Collective."""
    temporary = Path(
        exchange.on_main(lambda: store.prepare(root, folder, need, replaces_legacy=True))
    )
    try:
        write(temporary)
        exchange.on_main(lambda: _publish(root, temporary, folder, check))
    except BaseException:
        if exchange.is_main:
            remove_tree(temporary)
        raise
    return root / folder


def _publish(root: Path, temporary: Path, folder: str, check: Check | None) -> None:
    with storage_errors(temporary):
        write_file(temporary / COMPLETE, mark_of(temporary))
    store.publish(root, temporary, folder, check)
