"""Read Megatron-LM's torch files through the `Reader` interface.

A folder contains a file for each tensor-parallel and pipeline-parallel rank (`torch_file`). All
files are opened, which reads only the small pickled trees. Reading a tensor joins the shards of the
tensor-parallel ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.core.arguments import core_config
from megatron.checkpoint.entries import WORD_EMBEDDING, Box, Json
from megatron.checkpoint.find import RELEASE
from megatron.checkpoint.legacy import names as legacy
from megatron.checkpoint.legacy import torch_file
from megatron.checkpoint.legacy.arguments import (
    legacy_config,
    megatron_meta,
    plain_arguments,
    saved_iteration,
    step_count,
)
from megatron.checkpoint.legacy.optimizer import OptimizerState, read_distributed, read_optimizers
from megatron.checkpoint.legacy.torch_file import RankFile
from megatron.checkpoint.legacy.unpickler import TensorRef, show
from megatron.checkpoint.reader import Reader, TensorMeta
from megatron.checkpoint.retention import lock_if_listed
from megatron.errors import CheckpointError, warn
from megatron.parallel.layout import Axis


@dataclass(frozen=True)
class RankPart:
    """A tensor-parallel shard of a tensor, or of a single expert's slice of it."""

    file: RankFile
    ref: TensorRef
    box: Box
    is_expert: bool


_Part = tuple[RankFile, TensorRef, int | None]  # file, tensor, index of the expert in the file


class LegacyReader(Reader):
    """A checkpoint of Megatron-LM under native names.

    It may be a GPT, BERT, T5, Retro or bi-encoder of v1.0 to 23.08, a GPT of the Llama-2 fork, or a
    GPT or BERT of Megatron Core in its `torch` format. The states of Megatron Core's distributed
    optimizer are not read.

    The content of `meta` is described in `megatron_meta`.
    """

    format = "legacy"

    def __init__(
        self, path: Path, world: Axis, *, verify: bool, allow_foreign: bool = False
    ) -> None:
        """Open all files.

        Args:
            path: The checkpoint's folder.
            world: The ranks that open it, each of which verifies its share.
            verify: Check the CRCs of this rank's share of the files.
            allow_foreign: Accept files owned by other users.

        Raises:
            CheckpointError: A file is missing, damaged or refused, or its format or the network is
                not supported.
        """
        self.path, self.allow_foreign = path, allow_foreign
        lock_if_listed(self, "legacy")
        self._files = torch_file.open_files(path, allow_foreign=allow_foreign)
        first = self._files[0].tree
        self._args = plain_arguments(first.get("args"))
        self._tensor_size = 1 + max(file.tensor_rank for file in self._files)
        self._expert_size = 1 + max(file.expert_rank for file in self._files)
        self._check_grid()
        self._arrangement = self._find_arrangement(first)
        self._is_core = legacy.is_core(self._files[0].chunks[0])
        self._refusal = ""  # why optimizer states of Megatron Core cannot be read
        models = (model for file in self._files for model in file.chunks)
        try:
            self._architecture = legacy.architecture_of(models)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        self._distributed_files: list[RankFile] = []
        self._parts = defaultdict[str, list[_Part]](list)
        layers = self._first_layers()
        states = [self._add_file(file, layers) for file in self._files]
        if self._is_core and None in states:
            for name in [name for name in self._parts if name.startswith("optimizer.")]:
                del self._parts[name]
        if verify:
            for file in [*self._files, *self._distributed_files][world.rank :: world.size]:
                file.zip.verify()
        self._pieces = {name: self._locate(name, parts) for name, parts in self._parts.items()}
        pieces = self._pieces.items()
        self.tensors = {n: TensorMeta(p[-1].box.end, p[0].ref.storage.dtype) for n, p in pieces}
        is_release = path.name == RELEASE  # a release starts a new run
        iteration = 0 if is_release else first.get("iteration", first.get("total_iters"))
        self.iteration = saved_iteration(iteration, path)
        optimizer = None if is_release else self._optimizer_meta(states, warns=world.is_first)
        self.meta = megatron_meta(
            self._args,
            iteration=self.iteration,
            is_release=is_release,
            rows=self.global_shape(self._word_embedding())[0],
            config=self._config(),
            optimizer=optimizer,
            schedule=first.get("opt_param_scheduler", first.get("lr_scheduler")),
        )

    def _check_grid(self) -> None:
        """Check that all folders belong to one split, with experts split like other layers."""
        ranks = self._tensor_size * self._expert_size
        sizes = (self._tensor_size, len(self._files) // ranks, self._expert_size)
        names = [f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert")]
        for file in self._files:
            args = plain_arguments(file.tree.get("args"))
            sizes_in_args = tuple(map(args.get, names, sizes))
            if sizes_in_args != sizes:
                raise CheckpointError(
                    f"{self.path}: mp_rank folders of {sizes[0]} tensor ranks x {sizes[1]} stages, "
                    f"{sizes[2]} ranks of experts, but {file.zip.path.parent.name}'s `args` has "
                    f"{' x '.join(map(str, sizes_in_args))}: do they come from different saves? "
                    "Remove the folders that do not belong together"
                )
            width = args.get("expert_tensor_parallel_size") or sizes[0]
            if args.get("num_experts") and width != sizes[0]:
                raise CheckpointError(
                    f"{self.path}: experts split among {width} tensor ranks and other layers among "
                    f"{sizes[0]} cannot be read from such files: save with --ckpt-format torch_dist"
                )

    def _find_arrangement(self, tree: Mapping[str, Any]) -> legacy.Arrangement:
        version = tree.get("checkpoint_version", 0)
        heads = self._args.get("num_attention_heads", 0)
        if type(version) not in (int, float) or not 0 <= version < 4 or type(heads) is not int:
            problem = f"checkpoint_version {show(version)}"
            raise CheckpointError(f"{self.path}: {problem} is not supported")
        if version < 2 and not heads:
            raise CheckpointError(f"{self.path}: `args` does not contain the number of heads")
        gated = any(self._args.get(name) for name in ("swiglu", "geglu", "quick_geglu"))
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
        before = accumulate((counts[position] for position in order), initial=Counter[str]())
        return dict(zip(order, before, strict=False))

    def _add_file(
        self, file: RankFile, first: Mapping[tuple[int, int], Counter[str]]
    ) -> OptimizerState | None:
        """Add a file's tensors, and return its optimizer states, or `None` if it has none to read.

        Args:
            file: The file.
            first: The number of layers before each (chunk, stage), per stack.

        Raises:
            CheckpointError: The file's content is not supported. The message names the file.
        """
        try:
            list_parameters = partial(
                legacy.list_parameters,
                architecture=self._architecture,
                tied=not self._args.get("untie_embeddings_and_output_weights", False),
                is_first=file.stage == 0,
            )
            chunks = [list_parameters(m, first[i, file.stage]) for i, m in enumerate(file.chunks)]
            parameters = [parameter for chunk in chunks for parameter in chunk]
            for parameter in parameters:
                if parameter.name is not None:
                    self._parts[f"model.{parameter.name}"].append(
                        (file, parameter.tensor, parameter.expert)
                    )
            optimizer = file.tree.get("optimizer")
            state, source = self._read_states(optimizer, parameters), file
            if self._is_core and state is None:
                return None
            if state is None:
                distributed = torch_file.open_distributed(file, allow_foreign=self.allow_foreign)
                if distributed is None:
                    return None
                state, source = read_distributed(optimizer, distributed.tree, chunks), distributed
                self._distributed_files.append(distributed)
            for (name, expert), ref in state.tensors.items():
                self._parts[f"optimizer.{name}"].append((source, ref, expert))
            return state
        except CheckpointError as error:
            raise CheckpointError(f"{file.zip.path}: {error}") from None

    def _read_states(
        self, optimizer: Any, parameters: Sequence[legacy.Parameter]
    ) -> OptimizerState | None:
        """Return a file's optimizer states, or `None` if there are none in a supported format."""
        try:
            return read_optimizers(optimizer, parameters)
        except CheckpointError as error:
            if not self._is_core:
                raise
            self._refusal = str(error)
            return None

    def _locate(self, name: str, parts: list[_Part]) -> list[RankPart]:
        """Return a tensor's shards, sorted by their offset in the whole tensor."""
        experts = 1 + max(-1 if expert is None else expert for *_, expert in parts)  # per file
        if not experts:  # all expert-parallel ranks have the same values
            parts = [part for part in parts if not part[0].expert_rank]
        if len(parts) != self._tensor_size * (experts * self._expert_size or 1):
            raise CheckpointError(
                f"{self.path}: {name} is in {len(parts)} files, but should be in all"
            )
        dim = self._arrangement.split_dim(_parameter_of(name))
        pieces = []
        for file, ref, expert in parts:
            if dim is None and file.tensor_rank:
                continue  # the same as the first rank's
            file.zip.find(ref)
            shape = self._arrange(name, torch.empty(ref.shape, device="meta")).shape
            offset = [0] * len(shape)
            if dim is not None:
                offset[dim] = file.tensor_rank * shape[dim]
            box = Box(tuple(offset), tuple(shape))
            if expert is not None:
                index = file.expert_rank * experts + expert
                box = Box((index, *box.offset), (1, *box.shape))
            pieces.append(RankPart(file, ref, box, expert is not None))
        if len({(piece.box.shape, piece.ref.storage.dtype) for piece in pieces}) != 1:
            raise CheckpointError(f"{self.path}: the parts of {name} differ in shape or type")
        pieces.sort(key=lambda piece: piece.box.offset)
        if len({piece.box.offset for piece in pieces}) != len(pieces):
            raise CheckpointError(f"{self.path}: {name} is in one file twice")
        return pieces

    def _arrange(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return self._arrangement.arrange(_parameter_of(name), tensor)
        except RuntimeError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from None

    def _word_embedding(self) -> str:
        """Return the name of the word embedding.

        A bi-encoder has a table in each of its towers, all with the same number of rows.
        """
        tables = (name for name in self.tensors if name.endswith("embedding.word.weight"))
        return next((name for name in tables if name.startswith("model.")), WORD_EMBEDDING)

    def _config(self) -> dict[str, dict[str, Json]]:
        if not self._is_core:
            return legacy_config(self._args, self._architecture)
        try:
            for name, kind in (
                ("multi_latent_attention", "latent attention is"),
                ("experimental_attention_variant", "gated delta nets are"),
                ("rotary_interleaved", "rotations of neighboring channels are"),
                ("hybrid_layer_pattern", "hybrid models are"),
                ("hybrid_override_pattern", "hybrid models are"),
            ):
                if self._args.get(name):
                    raise CheckpointError(
                        f"{kind} read only from Megatron Core's other format: save with "
                        "--ckpt-format torch_dist"
                    )
            return core_config(self._args, self._architecture)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def _optimizer_meta(self, states: Sequence[OptimizerState | None], *, warns: bool) -> Json:
        known = [state for state in states if state is not None]
        if len(known) != len(states):
            if warns and (why := self._why_no_states()):
                warn(f"{self.path}: {why}: only the weights are read")
            return None
        steps = {
            file.zip.number(step)
            for file, state in zip(self._files, known, strict=True)
            for step in state.steps
        }
        step = step_count(steps, self.path, self.iteration)
        scale = known[0].loss_scale.items()
        scaler = {key: self._files[0].zip.number(value) for key, value in scale}
        return {"step": step, "loss_scale": scaler}

    def _why_no_states(self) -> str:
        """Return why optimizer states cannot be read, or "" if the folder contains no states."""
        if any(torch_file.old_optimizer_files(self.path)):
            return "optimizer states in a file per data rank, as Megatron-LM 23.04 wrote them"
        if self._is_core and "optimizer" in self._files[0].tree:
            why = self._refusal or "they belong to its distributed optimizer"
            return f"optimizer states of Megatron Core: {why}"
        if any("optimizer" in file.tree for file in self._files):
            return f"{torch_file.DISTRIBUTED_FILE} is missing"
        return ""

    def _read(self, name: str, box: Box) -> torch.Tensor:
        result = torch.empty(box.shape, dtype=self.tensors[name].dtype)
        for piece in self._pieces[name]:
            overlap = piece.box.intersect(box)
            if overlap is not None:
                whole = self._arrange(name, piece.file.zip.load(piece.ref))
                whole = whole[None] if piece.is_expert else whole
                result[overlap.slices_in(box)] = whole[overlap.slices_in(piece.box)]
        return result


def _parameter_of(name: str) -> str:
    """Return the name of the parameter to which a tensor belongs.

    Weights are named `model.<parameter>`, and optimizer states `optimizer.<parameter>.<kind>`.
    """
    kind, _, rest = name.partition(".")
    return rest if kind == "model" else rest.rpartition(".")[0]
