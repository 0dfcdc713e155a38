"""Megatron-LM's torch files behind the interface of our own checkpoints.

A folder holds a file for each tensor and pipeline rank, `mp_rank_TT/` or `mp_rank_TT_PPP/`. All
are opened (which reads the small pickled trees only), and a read joins the tensor ranks' parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.entries import Box, Json, check_request
from megatron.checkpoint.find import RELEASE, warn
from megatron.checkpoint.legacy.arguments import consumed_samples, legacy_run, plain_arguments
from megatron.checkpoint.legacy.inert import TensorRef, show
from megatron.checkpoint.legacy.names import (
    Arrangement,
    Parameter,
    count_layers,
    list_parameters,
)
from megatron.checkpoint.legacy.optimizer import OptimizerState, read_optimizer
from megatron.checkpoint.legacy.torch_zip import TorchZip
from megatron.checkpoint.legacy.unpickler import read_pickle
from megatron.errors import CheckpointError

MODEL_FILE = "model_optim_rng.pt"
DISTRIBUTED_FILE = "distrib_optim.pt"

_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")


@dataclass(frozen=True)
class RankFile:
    """One rank's file: its place in the grid, its tree, and its tensors' bytes."""

    tensor_rank: int
    stage: int
    zip: TorchZip
    tree: Mapping[str, Any]

    def find(self, ref: TensorRef) -> int:
        """The file position of a tensor's storage.

        Raises:
            CheckpointError: the storage is missing, or not as large as the tree says.
        """
        start, size = self.zip.range(f"data/{ref.storage.key}")
        if size != ref.storage.numel * ref.storage.dtype.itemsize:
            raise CheckpointError(f"{self.zip.path}: storage {ref.storage.key} has a wrong size")
        return start

    def load(self, ref: TensorRef) -> torch.Tensor:
        """A tensor over the mapped file; nothing is copied."""
        start = self.find(ref)
        if not math.prod(ref.shape):
            return torch.empty(ref.shape, dtype=ref.storage.dtype)
        flat = torch.frombuffer(
            self.zip.buffer, dtype=ref.storage.dtype, count=ref.storage.numel, offset=start
        )
        return flat.as_strided(ref.shape, ref.stride, ref.offset)


@dataclass(frozen=True)
class Piece:
    """A tensor-parallel part of a tensor."""

    file: RankFile
    ref: TensorRef
    box: Box


class LegacyReader:
    """Reads GPT checkpoints of Megatron-LM v1.0 to 23.08, under our names.

    `meta` holds iteration, consumed_train_samples, consumed_valid_samples, scheduled_samples,
    padded_vocab_size, optimizer (None where its state cannot be had), schedule (Megatron's
    fields), config (what `legacy_run` finds), and legacy_args: all plain fields of the command
    line.
    """

    format = "legacy"

    def __init__(self, path: Path, *, verify: bool = True, rank: int = 0, ranks: int = 1) -> None:
        """Open all files; with `verify`, check the CRCs of this rank's share of them.

        Raises:
            CheckpointError: a file is missing, damaged, refused, or of a kind not read.
        """
        self.path = path
        self._files = _open_files(path)
        if verify:
            for file in self._files[rank::ranks]:
                file.zip.verify()
        first = self._files[0].tree
        self._args = plain_arguments(first.get("args"))
        self._tensor_size = 1 + max(file.tensor_rank for file in self._files)
        self._arrangement = self._find_arrangement(first)
        self._parts: dict[str, list[tuple[RankFile, TensorRef]]] = {}
        states = [self._add_file(file, first_layer) for file, first_layer in self._with_layers()]
        self._pieces = {name: self._place(name, parts) for name, parts in self._parts.items()}
        self.iteration = self._find_iteration(first)
        self.meta = self._find_meta(first, states, warns=rank == 0)

    def _find_arrangement(self, tree: Mapping[str, Any]) -> Arrangement:
        version = tree.get("checkpoint_version", 0)
        heads = self._args.get("num_attention_heads", 0)
        if type(version) not in (int, float) or not 0 <= version < 4 or type(heads) is not int:
            raise CheckpointError(f"{self.path}: checkpoint_version {show(version)} is not known")
        if version < 2 and not heads:
            raise CheckpointError(f"{self.path}: `args` does not tell the number of heads")
        return Arrangement(
            float(version), heads // self._tensor_size, bool(self._args.get("swiglu", False))
        )

    def _with_layers(self) -> Iterator[tuple[RankFile, int]]:
        """Every file with the number of its stage's first layer."""
        counts: dict[int, int] = {}
        for file in self._files:
            counts.setdefault(file.stage, count_layers(file.tree.get("model")))
        for file in self._files:
            yield file, sum(count for stage, count in counts.items() if stage < file.stage)

    def _add_file(self, file: RankFile, first_layer: int) -> OptimizerState | None:
        try:
            parameters = list_parameters(file.tree.get("model"), first_layer)
            state = read_optimizer(file.tree.get("optimizer"), parameters)
        except CheckpointError as error:
            raise CheckpointError(f"{file.zip.path}: {error}") from None
        tensors = {f"model.{one.name}": one.tensor for one in _named(parameters)}
        if state is not None:
            tensors |= {f"optimizer.{name}": ref for name, ref in state.tensors.items()}
        for name, ref in tensors.items():
            self._parts.setdefault(name, []).append((file, ref))
        return state

    def _place(self, name: str, parts: list[tuple[RankFile, TensorRef]]) -> list[Piece]:
        """Boxes of a tensor's parts in the whole."""
        if len(parts) != self._tensor_size:
            raise CheckpointError(f"{self.path}: {name} is in {len(parts)} files, not in all")
        dim = self._arrangement.split_dim(_parameter_of(name))
        pieces, start = [], 0
        for file, ref in parts if dim is not None else parts[:1]:
            file.find(ref)
            shape = self._arrange(name, torch.empty(ref.shape, device="meta")).shape
            offset = [0] * len(shape)
            if dim is not None:
                offset[dim], start = start, start + shape[dim]
            pieces.append(Piece(file, ref, Box(tuple(offset), tuple(shape))))
        if len({(piece.box.shape, piece.ref.storage.dtype) for piece in pieces}) != 1:
            raise CheckpointError(f"{self.path}: the parts of {name} differ in shape or type")
        return pieces

    def _arrange(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return self._arrangement.arrange(_parameter_of(name), tensor)
        except RuntimeError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from None

    def _find_iteration(self, tree: Mapping[str, Any]) -> int:
        """Steps taken; 0 for a release, which starts a new run."""
        iteration = tree.get("iteration", tree.get("total_iters"))
        if self.path.name == RELEASE:
            return 0
        if type(iteration) is not int or iteration < 0:
            raise CheckpointError(f"{self.path}: iteration {show(iteration)}")
        return iteration

    def _find_meta(
        self, tree: Mapping[str, Any], states: Sequence[OptimizerState | None], *, warns: bool
    ) -> Json:
        released = self.path.name == RELEASE
        schedule = tree.get("opt_param_scheduler", tree.get("lr_scheduler")) or {}
        consumed = 0 if released else consumed_samples(self._args, self.iteration)
        schedule = {key: value for key, value in schedule.items() if _is_scalar(value)}
        return {
            "iteration": self.iteration,
            "consumed_train_samples": consumed,
            "consumed_valid_samples": 0 if released else self._args.get("consumed_valid_samples"),
            "scheduled_samples": schedule.get("num_steps", consumed),
            "padded_vocab_size": self.global_shape("model.embedding.word.weight")[0],
            "optimizer": None if released else self._optimizer_meta(states, warns=warns),
            "schedule": schedule,
            "config": legacy_run(self._args),
            "legacy_args": self._args,
        }

    def _optimizer_meta(self, states: Sequence[OptimizerState | None], *, warns: bool) -> Json:
        known = [state for state in states if state is not None]
        if len(known) != len(states):
            distributed = any(
                (file.zip.path.parent / DISTRIBUTED_FILE).exists() for file in self._files
            )
            if distributed and warns:
                warn(
                    f"{self.path}: the optimizer's state in {DISTRIBUTED_FILE} "
                    "(--use-distributed-optimizer) is not read yet, only the weights"
                )
            return None
        steps = {
            self._number(file, step)
            for file, state in zip(self._files, known, strict=True)
            for step in state.steps
        }
        if len(steps) > 1:
            raise CheckpointError(f"{self.path}: step counts differ: {sorted(steps)}")
        scaler = {
            key: self._number(self._files[0], value) for key, value in known[0].loss_scale.items()
        }
        return {"step": int(steps.pop()) if steps else self.iteration, "loss_scale": scaler}

    def _number(self, file: RankFile, value: Any) -> int | float:
        """A counter, saved as a number or as a tensor of one element."""
        if isinstance(value, TensorRef) and math.prod(value.shape) == 1:
            return file.load(value).item()
        if type(value) not in (int, float):
            raise CheckpointError(f"{file.zip.path}: {show(value)} is no counter")
        return value

    def names(self) -> list[str]:
        return sorted(self._pieces)

    def global_shape(self, name: str) -> tuple[int, ...]:
        last = self._known(name)[-1].box
        return tuple(o + s for o, s in zip(last.offset, last.shape, strict=True))

    def dtype(self, name: str) -> torch.dtype:
        return self._known(name)[0].ref.storage.dtype

    def read(
        self,
        name: str,
        *,
        global_shape: Sequence[int],
        offset: Sequence[int],
        shape: Sequence[int],
    ) -> torch.Tensor:
        wanted = Box(tuple(offset), tuple(shape))
        check_request(self.path, name, self.global_shape(name), tuple(global_shape), wanted)
        result = torch.empty(wanted.shape, dtype=self.dtype(name))
        for piece in self._known(name):
            common = piece.box.intersect(wanted)
            if common is not None:
                whole = self._arrange(name, piece.file.load(piece.ref))
                result[common.within(wanted)] = whole[common.within(piece.box)]
        return result

    def _known(self, name: str) -> list[Piece]:
        if name not in self._pieces:
            raise CheckpointError(f"{self.path}: holds no tensor {name!r}")
        return self._pieces[name]


def _open_files(path: Path) -> list[RankFile]:
    """The files of a folder, by stage and tensor rank; the grid must be complete."""
    files = []
    for folder in sorted(path.glob("mp_rank_*")):
        match = _RANK_FOLDER.fullmatch(folder.name)
        if match is None:
            raise CheckpointError(
                f"{folder}: folders per data rank (expert parallel, or --use-distributed-optimizer "
                "of 23.04) are not read"
            )
        archive = TorchZip(_model_file(folder))
        archive.check("data.pkl")
        tree = read_pickle(bytes(archive.record("data.pkl")), str(archive.path))
        if not isinstance(tree, dict):
            raise CheckpointError(f"{archive.path}: holds no dict")
        if "model0" in tree:
            raise CheckpointError(f"{archive.path}: virtual pipeline stages are not read yet")
        files.append(RankFile(int(match.group(1)), int(match.group(2) or 0), archive, tree))
    files.sort(key=lambda file: (file.stage, file.tensor_rank))
    places = [(file.stage, file.tensor_rank) for file in files]
    stages, ranks = (1 + max((place[i] for place in places), default=-1) for i in (0, 1))
    if places != [(stage, rank) for stage in range(stages) for rank in range(ranks)]:
        raise CheckpointError(f"{path}: mp_rank_* folders are missing, or are there twice")
    for key in ("iteration", "checkpoint_version"):
        if len({show(file.tree.get(key)) for file in files}) != 1:
            raise CheckpointError(f"{path}: the files differ in {key}: of different saves?")
    return files


def _model_file(folder: Path) -> Path:
    file = folder / MODEL_FILE
    if (folder / "model_rng.pt").exists() and not file.exists():
        raise CheckpointError(f"{folder}: files of Megatron-LM 23.04 (model_rng.pt) are not read")
    if file.is_symlink() or not file.is_file():
        raise CheckpointError(f"{file}: missing, or not a plain file")
    return file


def _named(parameters: Sequence[Parameter]) -> list[Parameter]:
    return [one for one in parameters if one.name is not None]


def _parameter_of(name: str) -> str:
    """The parameter that an entry is, or is the optimizer state of."""
    room, _, rest = name.partition(".")
    return rest if room == "model" else rest.rpartition(".")[0]


def _is_scalar(value: Any) -> bool:
    return value is None or type(value) in (str, int, float, bool)
