"""Write any checkpoint, or a run's state, as files of Megatron-LM 23.08, one tensor at a time.

A conversion reads from a checkpoint. A training run's state is distributed over its ranks in any
layout, so it is first written as a native checkpoint inside the temporary folder, from which every
rank then writes its share of the files. This doubles the bytes written, but works for every layout
and needs memory for only one tensor at a time. In both cases, the files are published following the
protocol of `store`.

Our dropout depends only on the seed and the position in the sample order, so no generator has a
state to save. The files contain the states of Megatron's generators right after seeding. The states
of GPU generators are also advanced by the iteration, so that no iteration repeats the random
numbers of another.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint import store
from megatron.checkpoint.entries import WORD_EMBEDDING, Json, LazyTensor, flatten
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.find import COMPLETE, RELEASE, iteration_folder
from megatron.checkpoint.legacy.arguments import megatron_arguments
from megatron.checkpoint.legacy.file_plan import VERSION, FileParameter, FilePlan, plan_files
from megatron.checkpoint.legacy.names import Arrangement
from megatron.checkpoint.legacy.optimizer import FLAT_KINDS, STATE_KINDS, flat_tensor
from megatron.checkpoint.legacy.torch_file import DISTRIBUTED_FILE, MODEL_FILE, write_torch_file
from megatron.checkpoint.lock import save_lock
from megatron.checkpoint.reader import NativeReader, PaddedReader, Reader
from megatron.checkpoint.retention import RetentionPolicy, list_files
from megatron.checkpoint.store import STATES, WEIGHTS, Snapshot
from megatron.config.model import ModelConfig
from megatron.config.rules_legacy import unsupported_by_legacy
from megatron.config.run import ModelRun
from megatron.config.stages import plan_model
from megatron.durable import Check, remove_tree, storage_errors, sync_folder
from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout

STAGE_STRIDE = 100  # distance between the seeds of stages, as in Megatron
_TENSOR_OFFSET = 2718
_NUMBERS_PER_ITERATION = 1 << 32  # by which a GPU's generator is advanced; a multiple of 4

_MASTER = "master"
_STAGING = "native"
_LAST = (COMPLETE, list_files)  # the file that is written after all others, and its content
# Settings of Apex's and PyTorch's optimizers that are the same in every parameter group.
_GROUP = {"maximize": False, "foreach": False, "differentiable": False, "fused": None}
_ADAM = {"amsgrad": False, "capturable": False, "decoupled_weight_decay": True}


def notices(model: ModelConfig) -> Iterator[str]:
    """Yield a notice for each network setting that Megatron-LM 23.08 ignores or cannot express."""
    is_rotary = model.position_embedding_type == "rope"
    if is_rotary and model.rotary_base != 10000.0:
        flag = f"--rotary-base {model.rotary_base:g}"
        yield f"{flag}: Megatron-LM 23.08 always uses 10000; later versions accept the flag"
    if is_rotary and model.use_rope_scaling:
        yield "--use-rope-scaling: Megatron-LM 23.08 does not support it; later versions do"
    for flag, value in (
        ("--window-size", model.window_size),
        ("--no-rope-freq", model.no_rope_freq),
        ("--softmax-type", model.softmax_type if model.softmax_type != "vanilla" else None),
        ("--moe-apply-probs-on-input", "" if model.moe_apply_probs_on_input else None),
        ("--qk-l2-norm", "" if model.qk_l2_norm else None),
    ):
        if value is not None:
            flag_text = f"{flag} {value}".strip()
            yield f"{flag_text}: Megatron-LM 23.08 does not support it; later versions do"
    if model.normalization == "RMSNorm":
        needs = "only with --transformer-impl transformer_engine; its Llama-2 fork always does"
        yield f"--normalization RMSNorm: Megatron-LM 23.08 supports it {needs}"


def megatron_rows(vocabulary: int, config: ModelRun) -> int:
    """Return the number of rows that Megatron's rule gives to the word embedding.

    The vocabulary is padded to a multiple of --make-vocab-size-divisible-by times the
    tensor-parallel size.

    Args:
        vocabulary: Number of entries in the tokenizer's vocabulary.
        config: The run's configuration.
    """
    multiple = config.model.make_vocab_size_divisible_by
    multiple *= config.parallel.tensor_model_parallel_size
    return -(-vocabulary // multiple) * multiple


@dataclass(frozen=True)
class LegacySaver:
    """A writer of a run's state in Megatron-LM's format.

    Attributes:
        config: The run's configuration.
        vocabulary: Number of entries in the tokenizer's vocabulary, which Megatron pads by its own
            rule (`megatron_rows`).
        kind: The class that writes the files: `LegacyWriter`, or the one for Megatron Core.
    """

    config: ModelRun
    vocabulary: int
    kind: type[LegacyWriter]

    def write(
        self, root: Path | str, snapshot: Snapshot, *, keep: RetentionPolicy | None = None
    ) -> Path:
        """Save a run's state, as `store.write_checkpoint` does, and return the checkpoint's folder.

        Collective over all ranks of the snapshot's layout.

        Args:
            root: Folder of checkpoints, created if it is missing.
            snapshot: This rank's share of the checkpoint.
            keep: Which older checkpoints to keep. None keeps all of them.

        Raises:
            StorageError: Raised on every rank if any rank cannot write. Temporary files are removed
                and the tracker is unchanged. Nothing is published, unless only the tracker's update
                failed.
            CheckpointError: Megatron does not support the network, its split, the schedule or an
                optimizer state (`LegacyWriter`).
        """
        layout, folder = snapshot.layout, iteration_folder(snapshot.iteration)
        exchange = JsonExchange(layout.world)

        def fill(temporary: Path) -> None:
            staging = temporary / _STAGING
            store.write_checkpoint(staging, snapshot)
            exchange.on_all_ranks(lambda: write_share(temporary, NativeReader(staging / folder)))
            exchange.on_main(lambda: remove_tree(staging))

        def write_share(temporary: Path, reader: Reader) -> None:
            rows = megatron_rows(self.vocabulary, self.config)
            padded = PaddedReader(reader, rows=rows, entries=self.vocabulary)
            writer = self.kind(padded, self.config, data_parallel=layout.replica.size)
            writer.write(temporary, layout.world.rank, layout.world.size)

        # Writing the inner native checkpoint checks separately that there is space for it.
        size = snapshot.plan.total_bytes
        return store.write_folder(root, folder, exchange, size, fill, _LAST, keep, None)


def convert_to_legacy(
    reader: Reader, root: Path, config: ModelRun, *, keep_optimizer: bool, check: Check
) -> Path:
    """Save an opened checkpoint as Megatron's files and return the new checkpoint's folder.

    A checkpoint without training steps, such as a Hugging Face model, becomes a `release`, from
    which Megatron starts at iteration 0.

    Args:
        reader: The checkpoint. Its vocabulary tables must have the number of rows to write.
        root: Folder of checkpoints, created if it is missing.
        config: The configuration of the checkpoint's run, as for `LegacyWriter`.
        keep_optimizer: Also write the optimizer states.
        check: A check to run on the checkpoint before it is published.

    Raises:
        StorageError: The checkpoint cannot be written.
        CheckpointError: Megatron does not support the network, its split, the schedule or an
            optimizer state (`LegacyWriter`), another job is saving into the folder, or the source
            is damaged.
    """
    writer = LegacyWriter(reader, config, keep_optimizer=keep_optimizer)
    folder = iteration_folder(reader.iteration) if reader.iteration else RELEASE
    exchange = JsonExchange(Layout.single().world)
    state = store.state_of(reader, keep_optimizer=keep_optimizer)
    size = sum(entry.tensor.nbytes for _, entry in flatten(state))
    with save_lock(root):
        return store.write_folder(root, folder, exchange, size, writer.write, _LAST, None, check)


class LegacyWriter:
    """A writer of Megatron-LM 23.08's files from an opened checkpoint.

    A subclass writes the files of Megatron Core, which differ in names, arguments and details of
    the optimizer.

    Attributes:
        program: The program that loads the files, for messages.
    """

    program = "Megatron-LM 23.08"

    def __init__(
        self, reader: Reader, config: ModelRun, data_parallel: int = 1, keep_optimizer: bool = True
    ) -> None:
        """Plan the files.

        Args:
            reader: The checkpoint. Its vocabulary tables must have the number of rows to write.
            config: The configuration of the checkpoint's run. `parallel` determines how the files
                are split, and whether optimizer states are stored as with
                --use-distributed-optimizer.
            data_parallel: The number of processes that hold the same weights.
            keep_optimizer: Write optimizer states, if the checkpoint has them.

        Raises:
            CheckpointError: Megatron's model lacks one of the parameters, cannot be split this way,
                or lacks a feature of the network; or Megatron lacks the saved schedule or a kind
                of optimizer state.
        """
        refused = ", ".join(self._unsupported(config.model))
        if refused:
            remedy = "write the native format (--saver native), or Hugging Face's (--saver hf)"
            raise CheckpointError(f"{refused}: {self.program} does not support it: {remedy}")
        self.reader, self.config, self.data_parallel = reader, config, data_parallel
        self._keeps_optimizer = keep_optimizer and bool(reader.meta.get("optimizer"))
        unsupported = unsupported_schedule(reader.meta.get("schedule") or {})
        if self._keeps_optimizer and unsupported:
            raise CheckpointError(
                f"{reader.path}: its optimizer has {unsupported}, which {self.program} does not "
                "have: convert only the weights, without --keep-optimizer, or write the native "
                "format (--saver native)"
            )
        self._saved_names = frozenset(reader.names())
        for name in reader.names() if self._keeps_optimizer else ():
            kind = name.rpartition(".")[2]
            if name.startswith(STATES) and kind not in (_MASTER, *STATE_KINDS.values()):
                raise CheckpointError(
                    f"{name}: {self.program} has no such optimizer state: convert only the "
                    "weights, without --keep-optimizer, or write the native format (--saver native)"
                )
        weights = (name for name in reader.names() if name.startswith(WEIGHTS))
        shapes = {n.removeprefix(WEIGHTS): reader.global_shape(n) for n in weights}
        self._arrangement = Arrangement(VERSION, heads=0, gated=config.model.is_gated)
        self.files = self._plan(shapes)

    def _unsupported(self, model: ModelConfig) -> Iterator[str]:
        """Yield the flags of a network that `program` does not support."""
        return unsupported_by_legacy(model)

    def _plan(self, shapes: Mapping[str, tuple[int, ...]]) -> list[FilePlan]:
        """Return the plan of each file, from the shapes of all parameters by native name."""
        parts = plan_model(self.config.model, self.config.parallel)
        return plan_files(shapes, parts, self.config.parallel, self._arrangement)

    def write(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        """Write and flush a rank's share of the files into a new checkpoint's folder.

        Args:
            folder: The folder.
            rank: Index of the share.
            ranks: Number of shares into which the files are divided.

        Raises:
            StorageError: A file cannot be written.
            CheckpointError: The source is damaged.
        """
        for plan in self.files[rank::ranks]:
            path = folder / plan.folder
            with storage_errors(path):
                path.mkdir(mode=0o775)
                write_torch_file(path / MODEL_FILE, self._tree(plan))
                if self._keeps_optimizer and self.config.parallel.use_distributed_optimizer:
                    write_torch_file(path / DISTRIBUTED_FILE, self._flat_states(plan))
                sync_folder(path)

    def _tree(self, plan: FilePlan) -> dict[str, Any]:
        """Return the content of a rank's `model_optim_rng.pt`."""
        meta = self.reader.meta
        tree: dict[str, Any] = {
            "args": self._arguments(),
            "checkpoint_version": VERSION,
            "iteration": self.reader.iteration,
        }
        for index, chunk in enumerate(plan.chunks):
            tree["model" if len(plan.chunks) == 1 else f"model{index}"] = self._model(chunk)
        if self._keeps_optimizer:
            tree["optimizer"] = self._optimizer(plan)
            tree["opt_param_scheduler"] = meta["schedule"]
        if not self.config.checkpoint.no_save_rng:
            saved_seed = (meta.get("rng") or {}).get("seed")
            seed = self.config.training.seed if saved_seed is None else saved_seed
            tree["rng_state"] = [self._random_states(seed, plan)]
        return tree

    def _arguments(self) -> argparse.Namespace:
        """Return the run's settings as command-line arguments of `program`."""
        return megatron_arguments(
            self.config,
            self.reader.meta,
            rows=self.reader.global_shape(WORD_EMBEDDING)[0],
            dtype=self.reader.dtype(WORD_EMBEDDING),
            data_parallel=self.data_parallel,
        )

    def _random_states(self, seed: int, plan: FilePlan) -> dict[str, Any]:
        """Return the states of the random generators of a file's rank."""
        return random_states(seed, self.reader.iteration, plan.stage, plan.tensor_rank)

    def _settings(self, *, decays: bool) -> dict[str, Any]:
        """Return the settings of a parameter group of the optimizer."""
        return group_settings(self.config, self.reader.meta, decays=decays)

    def _model(self, parameters: tuple[FileParameter, ...]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for parameter in parameters:
            subtree: Any = tree
            for key in parameter.path[:-1]:
                subtree = subtree.setdefault(key, OrderedDict())
            subtree[parameter.path[-1]] = self._value(parameter)
        return tree

    def _optimizer(self, plan: FilePlan) -> dict[str, Any]:
        parameters, scale = plan.parameters(), self.reader.meta["optimizer"].get("loss_scale")
        # Number the parameters with weight decay first, then the others. Omit an empty group.
        decayed = sum(parameter.is_decayed for parameter in parameters)
        groups = [group for group in (range(decayed), range(decayed, len(parameters))) if group]
        settings = [
            self._settings(decays=parameters[group.start].is_decayed) | {"params": list(group)}
            for group in groups
        ]
        scaler = {}
        if scale:
            scaler["grad_scaler"] = {**scale, "scale": torch.tensor([float(scale["scale"])])}
        if self.config.parallel.use_distributed_optimizer:
            for group in settings:
                del group["params"]
            return {"optimizer": {"param_groups": settings}, **scaler}
        states = {index: self._state(parameter) for index, parameter in enumerate(parameters)}
        tree = {"state": states, "param_groups": settings}
        if not any(_name(parameter, _MASTER) in self._saved_names for parameter in parameters):
            return tree
        masters = [[self._master(parameters[i]) for i in group] for group in groups]
        return {"optimizer": tree, **scaler, "fp32_from_fp16_params": masters}

    def _state(self, parameter: FileParameter) -> dict[str, Any]:
        """Return a parameter's entry in the optimizer's `state`."""
        state: dict[str, Any] = self._moments(parameter)
        if "exp_avg" not in state:
            return state
        step = torch.tensor(float(self.reader.meta["optimizer"]["step"]))
        return {"step": step, **state}

    def _moments(self, parameter: FileParameter) -> dict[str, LazyTensor]:
        """Return a parameter's optimizer states, by Megatron's name for their kind."""
        return {
            megatron_kind: self._value(parameter, kind)
            for megatron_kind, kind in STATE_KINDS.items()
            if _name(parameter, kind) in self._saved_names
        }

    def _flat_states(self, plan: FilePlan) -> dict[int, Any]:
        """Return the content of a rank's `distrib_optim.pt`."""
        accumulates = self.config.precision.accumulate_allreduce_grads_in_fp32
        tree: dict[int, Any] = {}
        for index, chunk in enumerate(plan.chunks):
            dtype = torch.float32 if accumulates else self._value(chunk[0]).dtype
            states = {}
            for key, kind in FLAT_KINDS.items():
                # An fp32 weight is its own master.
                is_weight = kind == _MASTER and _name(chunk[0], kind) not in self._saved_names
                values = [
                    self._value(parameter, None if is_weight else kind) for parameter in chunk
                ]
                states[key] = flat_tensor(values, self.data_parallel)
            tree[index] = {dtype: states}
        return tree

    def _master(self, parameter: FileParameter) -> LazyTensor:
        """Return the fp32 master of a parameter, or the parameter in fp32 if it has no master."""
        if _name(parameter, _MASTER) in self._saved_names:
            return self._value(parameter, _MASTER)
        weight = self._value(parameter)
        return LazyTensor(tuple(weight.shape), torch.float32, lambda: weight.read().float())

    def _value(self, parameter: FileParameter, kind: str | None = None) -> LazyTensor:
        """Return a file's shard of a parameter, or of its optimizer state, in Megatron's shape."""
        name = _name(parameter, kind)
        whole = torch.empty(parameter.box.shape, device="meta")
        shape = self._arrangement.flatten(parameter.name, whole).shape

        def read() -> Tensor:
            part = self.reader.read(name, parameter.box)
            return self._arrangement.flatten(parameter.name, part)

        return LazyTensor(tuple(shape), self.reader.dtype(name), read)


def group_settings(config: ModelRun, meta: Json, *, decays: bool) -> dict[str, Any]:
    """Return the settings of a parameter group, with the keys that Apex and PyTorch use.

    Args:
        config: The run's configuration.
        meta: The checkpoint's metadata.
        decays: Whether weight decay applies to the group.
    """
    optimizer, schedule = config.optimizer, config.schedule
    settings: dict[str, Any] = {
        "wd_mult": float(decays),
        "lr_mult": 1.0,
        # Megatron sets the learning rate from its schedule before using it.
        "lr": meta["schedule"].get("max_lr", schedule.lr),
        "weight_decay": optimizer.weight_decay if decays else 0.0,
        **_GROUP,
    }
    if optimizer.optimizer == "sgd":
        return settings | {
            "momentum": optimizer.sgd_momentum,
            "dampening": 0,
            "nesterov": False,
        }
    betas = (optimizer.adam_beta1, optimizer.adam_beta2)
    settings |= {"betas": betas, "eps": optimizer.adam_eps, "bias_correction": True}
    return settings | {**_ADAM, "step": meta["optimizer"]["step"]}


def _name(parameter: FileParameter, kind: str | None = None) -> str:
    """Return the native name of a parameter, or of one of its optimizer states."""
    return f"{WEIGHTS}{parameter.name}" if kind is None else f"{STATES}{parameter.name}.{kind}"


def unsupported_schedule(schedule: Mapping[str, Json]) -> str:
    """Return a feature of a saved schedule that Megatron-LM's schedules lack, or ""."""
    if "decoupled_lr" in schedule:
        return "a --decoupled-lr"
    if schedule.get("lr_in_tokens") or schedule.get("lr_decay_tokens") is not None:
        return "a schedule in tokens (--lr-decay-tokens)"  # Megatron would read it as samples
    return ""


def random_states(seed: int, iteration: int, stage: int, tensor_rank: int) -> dict[str, Any]:
    """Return one rank's entry in `rng_state`, with the states of all of its generators.

    Args:
        seed: The run's seed.
        iteration: Training steps taken.
        stage: The pipeline stage.
        tensor_rank: The tensor-parallel rank.
    """
    base = seed + STAGE_STRIDE * stage
    kind, keys, *rest = np.random.RandomState(base).get_state(legacy=True)
    model_parallel = base + _TENSOR_OFFSET + tensor_rank
    return {
        "random_rng_state": random.Random(base).getstate(),
        # Use a list of numbers, not an array: every version of numpy reads it.
        "np_rng_state": (kind, tuple(map(int, keys)), *rest),
        "torch_rng_state": torch.Generator().manual_seed(base).get_state(),
        "cuda_rng_state": device_state(base, iteration),
        "rng_tracker_states": {"model-parallel-rng": device_state(model_parallel, iteration)},
    }


def device_state(seed: int, iteration: int) -> torch.Tensor:
    """Return the state of a GPU generator, uint8 [16]: the seed and the offset, 8 bytes each."""
    state = iteration * _NUMBERS_PER_ITERATION
    data = seed.to_bytes(8, "little") + (state % (1 << 63)).to_bytes(8, "little")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
