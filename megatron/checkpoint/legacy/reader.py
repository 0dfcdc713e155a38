"""Read Megatron-LM's torch files through the interface of our own checkpoints.

A folder holds a file for each tensor and pipeline rank (`torch_file`). All files are opened, which
reads only the small pickled trees. Reading a tensor joins the tensor ranks' parts.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.entries import Box, Json
from megatron.checkpoint.find import RELEASE
from megatron.checkpoint.legacy import names as legacy
from megatron.checkpoint.legacy.arguments import (
    consumed_samples,
    legacy_config,
    optimizer_config,
    plain_arguments,
)
from megatron.checkpoint.legacy.optimizer import OptimizerState, read_distributed, read_optimizer
from megatron.checkpoint.legacy.torch_file import (
    DISTRIBUTED_FILE,
    RankFile,
    open_distributed,
    open_files,
    states_beside,
)
from megatron.checkpoint.legacy.unpickler import TensorRef, show
from megatron.checkpoint.reader import HeldTensor, Reader
from megatron.checkpoint.retention import hold_for_reading, is_as_listed
from megatron.errors import CheckpointError, warn


@dataclass(frozen=True)
class RankPart:
    """A tensor-parallel part of a tensor."""

    file: RankFile
    ref: TensorRef
    box: Box


class LegacyReader(Reader):
    """A checkpoint of Megatron-LM under our names.

    It may hold a GPT, BERT or T5 of v1.0 to 23.08 or of the Llama-2 fork, or the weights of
    Megatron Core's GPT in its `torch` format.

    `meta` holds iteration, consumed_train_samples, consumed_valid_samples, scheduled_samples,
    padded_vocab_size, optimizer (None if its state is not available), schedule (Megatron's fields),
    config (the sections of the model and the optimizer), and legacy_args (all plain fields of the
    command line).
    """

    format = "legacy"

    def __init__(self, path: Path, *, verify: bool = True, rank: int = 0, ranks: int = 1) -> None:
        """Open all files.

        Args:
            path: The checkpoint's folder.
            verify: Check the CRCs of a rank's share of the files.
            rank: Index of the share.
            ranks: Number of shares.

        Raises:
            CheckpointError: A file is missing, damaged or refused, or its kind is not supported.
        """
        self.path = path
        try:
            # As long as the reader exists, `--keep-latest` of another job keeps the checkpoint.
            if is_as_listed(path):
                weakref.finalize(self, os.close, hold_for_reading(path, "legacy"))
        except OSError as error:
            message = f"{error.filename or path}: cannot be read: {error.strerror}"
            raise CheckpointError(message) from error
        self._files = open_files(path)
        first = self._files[0].tree
        self._args = plain_arguments(first.get("args"))
        self._tensor_size = 1 + max(file.tensor_rank for file in self._files)
        self._check_grid()
        self._arrangement = self._find_arrangement(first)
        # Later versions of Megatron number the optimizer's parameters in other orders.
        self._weights_only = legacy.is_core(self._files[0].chunks[0])
        self._architecture = legacy.architecture_of(
            model for file in self._files for model in file.chunks
        )
        self._beside: list[RankFile] = []
        self._parts: dict[str, list[tuple[RankFile, TensorRef]]] = {}
        layers = self._first_layers()
        states = [self._add_file(file, layers) for file in self._files]
        if verify:
            for file in [*self._files, *self._beside][rank::ranks]:
                file.zip.verify()
        self._pieces = {name: self._place(name, parts) for name, parts in self._parts.items()}
        pieces = self._pieces.items()
        self.held = {n: HeldTensor(p[-1].box.end, p[0].ref.storage.dtype) for n, p in pieces}
        iteration = first.get("iteration", first.get("total_iters"))
        if path.name == RELEASE:
            iteration = 0  # a release starts a new run
        if type(iteration) is not int or iteration < 0:
            raise CheckpointError(f"{path}: iteration {show(iteration)}")
        self.iteration: int = iteration
        self.meta = self._find_meta(first, states, warns=rank == 0)

    def _check_grid(self) -> None:
        """Check that no folder is left over from another split of the same iteration."""
        found = (self._tensor_size, len(self._files) // self._tensor_size)
        for file in self._files:
            args = plain_arguments(file.tree.get("args"))
            told = tuple(
                args.get(f"{axis}_model_parallel_size", size)
                for axis, size in zip(("tensor", "pipeline"), found, strict=True)
            )
            if told != found:
                raise CheckpointError(
                    f"{self.path}: mp_rank folders of {found[0]} tensor ranks x {found[1]} stages, "
                    f"and {file.zip.path.parent.name}'s `args` say {told[0]} x {told[1]}: are "
                    "they of different saves? Remove the folders that do not belong together"
                )

    def _find_arrangement(self, tree: Mapping[str, Any]) -> legacy.Arrangement:
        version = tree.get("checkpoint_version", 0)
        heads = self._args.get("num_attention_heads", 0)
        if type(version) not in (int, float) or not 0 <= version < 4 or type(heads) is not int:
            raise CheckpointError(
                f"{self.path}: checkpoint_version {show(version)} is not supported"
            )
        if version < 2 and not heads:
            raise CheckpointError(f"{self.path}: `args` does not say the number of heads")
        gated = bool(self._args.get("swiglu", False))
        return legacy.Arrangement(float(version), heads // self._tensor_size, gated)

    def _first_layers(self) -> dict[tuple[int, int], Counter[str]]:
        """Return the number of layers before each (chunk, stage), per stack.

        Chunk v of stage p is part v * stages + p of the model.
        """
        counts: dict[tuple[int, int], Counter[str]] = {}
        for file in self._files:
            for chunk, model in enumerate(file.chunks):
                counts.setdefault((chunk, file.stage), legacy.count_layers(model))
        order = sorted(counts)
        before = accumulate((counts[place] for place in order), initial=Counter[str]())
        return dict(zip(order, before, strict=False))

    def _add_file(
        self, file: RankFile, first: Mapping[tuple[int, int], Counter[str]]
    ) -> OptimizerState | None:
        """Add the tensors of a file, and return its optimizer state if it can be read."""
        try:
            tied = not self._args.get("untie_embeddings_and_output_weights", False)
            chunks = [
                legacy.list_parameters(
                    model,
                    first[chunk, file.stage],
                    self._architecture,
                    tied=tied,
                    is_first=file.stage == 0,
                )
                for chunk, model in enumerate(file.chunks)
            ]
            parameters = [parameter for chunk in chunks for parameter in chunk]
            named = {f"model.{one.name}": one.tensor for one in parameters if one.name is not None}
            self._add(file, named)
            if self._weights_only:
                return None
            optimizer = file.tree.get("optimizer")
            state, holder = read_optimizer(optimizer, parameters), file
            if state is None:
                beside = open_distributed(file)
                if beside is None:
                    return None
                state, holder = read_distributed(optimizer, beside.tree, chunks), beside
                self._beside.append(beside)
            self._add(holder, {f"optimizer.{name}": ref for name, ref in state.tensors.items()})
            return state
        except CheckpointError as error:
            raise CheckpointError(f"{file.zip.path}: {error}") from None

    def _add(self, file: RankFile, tensors: Mapping[str, TensorRef]) -> None:
        for name, ref in tensors.items():
            self._parts.setdefault(name, []).append((file, ref))

    def _place(self, name: str, parts: list[tuple[RankFile, TensorRef]]) -> list[RankPart]:
        """Return a tensor's parts with the box of each in the whole tensor."""
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
            pieces.append(RankPart(file, ref, Box(tuple(offset), tuple(shape))))
        if len({(piece.box.shape, piece.ref.storage.dtype) for piece in pieces}) != 1:
            raise CheckpointError(f"{self.path}: the parts of {name} differ in shape or type")
        return pieces

    def _arrange(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return self._arrangement.arrange(_parameter_of(name), tensor)
        except RuntimeError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from None

    def _find_meta(
        self, tree: Mapping[str, Any], states: Sequence[OptimizerState | None], *, warns: bool
    ) -> Json:
        released, args = self.path.name == RELEASE, self._args
        schedule = tree.get("opt_param_scheduler", tree.get("lr_scheduler")) or {}
        consumed = 0 if released else consumed_samples(args, self.iteration)
        scalar = (type(None), str, int, float, bool)
        schedule = {key: value for key, value in schedule.items() if type(value) in scalar}
        return {
            "iteration": self.iteration,
            "consumed_train_samples": consumed,
            "skipped_train_samples": 0 if released else args.get("skipped_train_samples", 0),
            "consumed_valid_samples": 0 if released else args.get("consumed_valid_samples"),
            "scheduled_samples": schedule.get("num_steps", consumed),
            "padded_vocab_size": self.global_shape("model.embedding.word.weight")[0],
            "optimizer": None if released else self._optimizer_meta(states, warns=warns),
            "schedule": schedule,
            "config": {
                "model": legacy_config(args, self._architecture),
                "optimizer": optimizer_config(args),
            },
            "legacy_args": args,
        }

    def _optimizer_meta(self, states: Sequence[OptimizerState | None], *, warns: bool) -> Json:
        known = [state for state in states if state is not None]
        if len(known) != len(states):
            if warns:
                self._warn_of_states()
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

    def _warn_of_states(self) -> None:
        """Warn that the folder's optimizer states are not read, and why."""
        if any(states_beside(self.path)):
            warn(
                f"{self.path}: a file with optimizer states for each data rank, as Megatron-LM "
                "23.04 wrote them: only the weights are read"
            )
        elif self._weights_only and "optimizer" in self._files[0].tree:
            warn(f"{self.path}: written by Megatron Core: only the weights are read")
        elif any("optimizer" in file.tree for file in self._files):
            warn(f"{self.path}: {DISTRIBUTED_FILE} is missing: only the weights are read")

    def _number(self, file: RankFile, value: Any) -> int | float:
        """Return a counter that was saved as a number or as a one-element tensor."""
        if isinstance(value, TensorRef) and math.prod(value.shape) == 1:
            return file.load(value).item()
        if type(value) not in (int, float):
            raise CheckpointError(f"{file.zip.path}: {show(value)} is not a counter")
        return value

    def _read(self, name: str, wanted: Box) -> torch.Tensor:
        result = torch.empty(wanted.shape, dtype=self.held[name].dtype)
        for piece in self._pieces[name]:
            common = piece.box.intersect(wanted)
            if common is not None:
                whole = self._arrange(name, piece.file.load(piece.ref))
                result[common.within(wanted)] = whole[common.within(piece.box)]
        return result


def _parameter_of(name: str) -> str:
    """Return the name of the parameter to which an entry or optimizer state belongs."""
    kind, _, rest = name.partition(".")
    return rest if kind == "model" else rest.rpartition(".")[0]
