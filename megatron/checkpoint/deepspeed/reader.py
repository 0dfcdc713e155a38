"""Read a DeepSpeed checkpoint through the `Reader` interface."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.deepspeed import names
from megatron.checkpoint.deepspeed.arguments import (
    deepspeed_config,
    has_separate_qkv,
    has_unusual_angles,
    megatron_arguments,
)
from megatron.checkpoint.deepspeed.files import StateFile, open_files
from megatron.checkpoint.deepspeed.states import (
    MASTER,
    States,
    Value,
    read_divided,
    read_partitions,
    read_plain,
)
from megatron.checkpoint.entries import WORD_EMBEDDING, Box, Json, is_tiled
from megatron.checkpoint.legacy.arguments import (
    megatron_meta,
    plain_arguments,
    saved_iteration,
    step_count,
)
from megatron.checkpoint.legacy.names import Arrangement
from megatron.checkpoint.legacy.unpickler import Record, TensorRef, show
from megatron.checkpoint.reader import Reader, TensorMeta
from megatron.config.arguments import from_values
from megatron.config.experts import ExpertOptions, layer_experts
from megatron.errors import CheckpointError
from megatron.parallel.layout import Axis

_LARGEST_RANKS = 1 << 16
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class TensorPart:
    """A part of one of our tensors.

    Attributes:
        value: The elements as stored in the files.
        dense: The native name of the corresponding parameter in a dense layer, which determines row
            order and split.
        box: The box that the elements cover in the whole tensor.
    """

    value: Value
    dense: str
    box: Box


class DeepSpeedReader(Reader):
    """A checkpoint of Megatron-DeepSpeed's GPT, dense or a mixture, under native names.

    The content of `meta` is described in `megatron_meta`. Here it also has `notices`: one line for
    everything that cannot be read or will behave differently.
    """

    format = "deepspeed"

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
        self._files = open_files(path, allow_foreign=allow_foreign)
        self._main = self._files.models[0]
        tree = self._main.tree
        self._notices: list[str] = []
        try:
            self._args = megatron_arguments(plain_arguments(tree.get("args")))
            self._tensor_size = self._find_split()
            self._arrangement = self._find_arrangement(tree)
            layers = ((layer, file.tree) for (layer, _), file in self._files.layers.items())
            in_layers = (f"{layer}.{name}" for layer, tree in layers for name in tree)
            in_models = (name for file in self._files.models.values() for name in _module(file))
            self._first = names.first_layer([*in_layers, *in_models])
            self._weights = [self._weights_of(rank) for rank in range(len(self._files.models))]
            states = self._read_states()
            self._pieces = dict(self._locate_all(states))
        except CheckpointError as error:
            prefix = "" if str(error).startswith(str(path)) else f"{path}: "
            raise CheckpointError(f"{prefix}{error}") from None
        if verify:
            for file in self._files.all()[world.rank :: world.size]:
                file.zip.verify()
        self.tensors = {
            name: TensorMeta(pieces[-1].box.end, pieces[0].value.dtype)
            for name, pieces in self._pieces.items()
        }
        self._check_sizes()
        iteration = tree.get("iteration", tree.get("global_steps"))
        self.iteration = saved_iteration(iteration, self._main.zip.path)
        self.meta = megatron_meta(
            self._args,
            iteration=self.iteration,
            rows=self.global_shape(WORD_EMBEDDING)[0],
            config=deepspeed_config(self._args),
            optimizer=None if states is None else self._optimizer_meta(states),
            schedule=tree.get("lr_scheduler"),
        )
        if "rng_state" in tree:
            self._notices.append("random states are not loaded: dropout follows from --seed")
        if has_unusual_angles(self._args):
            self._notices.append(
                "since December 2024, Megatron-DeepSpeed rotates positions by angles that differ "
                "from those in all other programs, including this one: expect a higher loss at "
                "first"
            )
        self.meta["notices"] = self._notices

    def _check_sizes(self) -> None:
        """Check the tensors' shapes against the command line (`args`).

        Raises:
            CheckpointError: The shapes contradict the command line.
        """
        heads = self._args.get("num_attention_heads")
        groups = self._args.get("num_query_groups", heads)
        if type(heads) is not int or type(groups) is not int or heads < 1 or groups < 1:
            sizes = f"{show(heads)} heads and {show(groups)} groups"
            raise CheckpointError(f"{self.path}: `args` has {sizes}")
        parts = [name.split(".") for name in self.tensors if name.startswith("model.layers.")]
        layers = 1 + max((int(part[2]) for part in parts), default=0)
        if layers != self._args.get("num_layers"):
            problem = f"num_layers is {show(self._args.get('num_layers'))} in `args`"
            raise CheckpointError(f"{self.path}: {problem}, but the weights have {layers}")
        options = from_values(ExpertOptions, deepspeed_config(self._args)["model"])
        try:
            experts = layer_experts(options, layers)
        except ValueError as error:
            problem = f"num_experts is {show(self._args.get('num_experts'))} in `args`"
            raise CheckpointError(f"{self.path}: {problem}: {error}") from None
        for name, meta in self.tensors.items():
            if not (name.startswith("model.layers.") and ".mlp.experts." in name):
                continue
            layer = int(name.split(".")[2])
            if meta.shape[0] != experts[layer]:
                problem = f"layer {layer} has {experts[layer]} experts according to `args`"
                raise CheckpointError(f"{self.path}: {problem}, but {meta.shape[0]} in the weights")
        for name, meta in self.tensors.items():
            if meta.dtype not in _DTYPES.values():
                raise CheckpointError(f"{self.path}: {name} is {meta}")
            if name.endswith(".attention.qkv.weight") and meta.shape[0] % (heads + 2 * groups):
                heads_text = f"{heads} heads and {groups} key-value groups"
                raise CheckpointError(
                    f"{self.path}: {name} is {meta}, which does not match {heads_text}"
                )

    def _find_split(self) -> int:
        """Return the tensor-parallel size, after checking that the files of all ranks exist."""
        sizes = [
            self._args.get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline")
        ]
        for size in sizes:
            if type(size) is not int or not 0 < size <= _LARGEST_RANKS:
                raise CheckpointError(f"`args` has a model-parallel size of {show(size)}")
        tensor, pipeline = sizes
        ranks = len(self._files.models)
        if tensor * pipeline != ranks:
            raise CheckpointError(
                f"model states of {ranks} ranks, but `args` has {tensor} tensor ranks x {pipeline} "
                "stages: are files missing, or do they come from different saves?"
            )
        return int(tensor)

    def _find_arrangement(self, tree: Mapping[str, Any]) -> Arrangement:
        version, heads = tree.get("checkpoint_version", 3.0), self._args.get("num_attention_heads")
        if type(version) not in (int, float) or not 0 <= version < 4 or type(heads) is not int:
            raise CheckpointError(f"checkpoint_version {show(version)}, {show(heads)} heads")
        gated = bool(self._args.get("swiglu", False))
        if has_separate_qkv(self._args):
            version = 0
        return Arrangement(float(version), heads // self._tensor_size, gated)

    def _weights_of(self, rank: int) -> dict[str, Value]:
        """Return the weights of a model-parallel rank by their names in a whole model.

        All layers of a PipelineModule are assigned to the first stage, because their files do not
        say to which stage they belonged.
        """
        file, weights = self._files.models[rank], dict[str, Value]()
        if self._files.partitioned:
            dtype = _dtype(self._args.get("params_dtype"))
            for name, shape in _shapes(file).items():
                weights[self._whole(name)] = Value(shape, dtype, ())
            return weights
        # Experts are numbered within the process. Each expert has its own file.
        sources = [(file, {n: ref for n, ref in _module(file).items() if not names.is_copy(n)})]
        for (layer, tensor_rank), source in sorted(self._files.layers.items()):
            if tensor_rank == rank:
                leaves = names.flatten(source.tree)
                sources.append((source, {f"{layer}.{name}": ref for name, ref in leaves}))
        for (_, expert, expert_rank), source in sorted(self._files.experts.items()):
            if expert_rank == rank:
                module = dict(names.flatten(source.tree))
                if any(names.local_expert(self._whole(name)) != expert for name in module):
                    raise CheckpointError(
                        f"{source.zip.path}: contains parameters of a different expert"
                    )
                sources.append((source, module))
        for source, module in sources:
            for name, ref in module.items():
                whole = self._whole(name)
                if names.is_derived(name):
                    continue
                if not isinstance(ref, TensorRef):
                    raise CheckpointError(f"{source.zip.path}: {name[:200]} is not a tensor")
                if whole in weights:
                    raise CheckpointError(
                        f"{source.zip.path}: {name[:200]} is also in another file"
                    )
                source.zip.find(ref)
                weights[whole] = Value(ref.shape, ref.storage.dtype, ((source.zip, ref),))
        return weights

    def _whole(self, name: str) -> str:
        return names.whole_name(name, self._first)

    def _read_states(self) -> list[States] | None:
        """Return the optimizer states of each model-parallel rank.

        With ZeRO 3, also set the values of the weights, which are the masters in these files.

        Returns:
            The states, or `None` if they cannot be read. The reason is added to the notices.

        Raises:
            CheckpointError: With ZeRO 3, the states cannot be read.
        """
        files = self._files
        ranks = [
            [files.states[key] for key in sorted(files.states) if key[0] == rank]
            for rank in range(len(files.models))
        ]
        reason = self._why_no_states(ranks)
        if not reason:
            if files.partitioned:
                states = []
                for weights, rank_files in zip(self._weights, ranks, strict=True):
                    shapes = {name: value.shape for name, value in weights.items()}
                    states.append(read_divided(rank_files, shapes))
                    for name, value in weights.items():  # the masters are the weights
                        parts = states[-1].values[MASTER, name].parts
                        weights[name] = value._replace(parts=parts)
                return states
            if files.states:  # ZeRO 1 and 2, or the bf16 optimizer
                states = []
                for rank, rank_files in enumerate(ranks):
                    weights = self._weights[rank % self._tensor_size if files.layers else rank]
                    shapes = {name: value.shape for name, value in weights.items()}
                    states.append(read_partitions(rank_files, shapes, self._whole))
                return states
            plain = [self._plain(rank) for rank in range(len(files.models))]
            known = [rank_states for rank_states in plain if rank_states is not None]
            if len(known) == len(plain):
                return known
            reason = "the format of the optimizer's states is not supported"
        if files.partitioned:
            raise CheckpointError(f"{reason}, and with ZeRO 3 they contain the weights")
        self._notices.append(f"{reason}: only the weights are read")
        return None

    def _why_no_states(self, ranks: list[list[StateFile]]) -> str:
        """Return the reason why optimizer states cannot be read, or "".

        Args:
            ranks: The files with optimizer states of each model-parallel rank.
        """
        files, counts = self._files, self._args.get("num_experts")
        unsupported = ""
        if isinstance(counts, list) and len(set(counts)) > 1:
            unsupported = "layers with different experts"
        elif files.states and self._tensor_size > 1:
            unsupported = "experts with tensor parallelism"
        if files.experts and unsupported:
            return f"optimizer states of {unsupported} are not supported"
        if not files.states:
            if files.layers and len(files.models) > self._tensor_size:
                return "without ZeRO, the states of pipeline stages do not name their parameters"
            return ""
        for rank, rank_files in enumerate(ranks):
            indices = [key[1] for key in sorted(files.states) if key[0] == rank]
            tree = rank_files[0].tree.get("optimizer_state_dict") if rank_files else None
            count = tree.get("partition_count") if isinstance(tree, dict) else None
            if isinstance(count, list):  # one count for each group of parameters
                count = max((value for value in count if type(value) is int), default=0)
            if type(count) is not int or indices != list(range(count)):
                return (
                    f"only {len(rank_files)} of {show(count)} partitions of the optimizer are "
                    "present"
                )
            mappings = tree.get("param_slice_mappings") if isinstance(tree, dict) else None
            if not files.partitioned and not isinstance(mappings, list):
                return "the optimizer's states were written by DeepSpeed before 0.7"
        return ""

    def _plain(self, rank: int) -> States | None:
        """Return a rank's optimizer states without ZeRO, or `None` if they are not supported.

        Args:
            rank: The model-parallel rank.
        """
        weights = self._weights[rank]
        if not self._files.experts:
            file = self._files.models[rank]
            shapes = {name: value.shape for name, value in weights.items()}
            return read_plain(file, file.tree.get("optimizer"), shapes)
        result = States()
        files = {key[1]: file for key, file in self._files.expert_states.items() if key[0] == rank}
        count = 1 + max(names.local_expert(name) or 0 for name in weights)
        if sorted(files) != list(range(len(files))) or not files or count % len(files):
            return None
        experts_per_file = count // len(files)
        for index, file in sorted(files.items()):
            shapes = self._shapes_with_experts(weights, experts_per_file)
            states = read_plain(file, file.tree.get("optimizer"), shapes)
            if states is None:
                return None
            result.steps += states.steps
            for (kind, name), value in states.values.items():
                whole = names.shift_expert(name, index * experts_per_file)
                result.values[kind, whole] = value
        return result

    def _shapes_with_experts(
        self, weights: Mapping[str, Value], experts_per_file: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a process's parameters in the model's order, by name.

        Experts, which are in separate files, come after the gate of their layer.

        Args:
            weights: The weights of the model-parallel rank by name, with all of its experts.
            experts_per_file: The number of experts that a process holds.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        experts = defaultdict[str, list[tuple[int, str]]](list)  # by layer
        for name in weights:
            index = names.local_expert(name)
            if index is not None and index < experts_per_file:
                experts[name.partition("deepspeed_moe.")[0]].append((index, name))
        for name, value in weights.items():
            if names.local_expert(name) is not None:
                continue
            shapes[name] = value.shape
            members = experts[name.partition("deepspeed_moe.")[0]] if names.is_gate(name) else []
            # The sort is stable, so the parameters of an expert stay in the model's order.
            for _, expert_name in sorted(members, key=lambda member: member[0]):
                shapes[expert_name] = weights[expert_name].shape
        return shapes

    def _locate_all(self, states: list[States] | None) -> Iterator[tuple[str, list[TensorPart]]]:
        """Yield the name and the parts of each of our tensors.

        Args:
            states: The optimizer states of each model-parallel rank, or `None`.
        """
        parts = defaultdict[str, dict[tuple[int, int], tuple[Value, str]]](dict)

        def add(name: str, rank: int, destination: names.Destination, value: Value) -> None:
            key = (
                destination.expert if destination.expert is not None else -1,
                rank % self._tensor_size,
            )
            # A later stage has a copy of tied embeddings.
            parts[name].setdefault(key, (value, destination.dense))

        for rank, weights in enumerate(self._weights):
            for whole_name, value in weights.items():
                destination = names.destination_of(whole_name)
                add(f"model.{destination.name}", rank, destination, value)
        types = {value.dtype for weights in self._weights for value in weights.values()}
        types.discard(torch.float32)  # expert gates may stay in fp32
        if len(types) > 1:
            raise CheckpointError(f"weights of several types: {sorted(map(str, types))}")
        has_masters = bool(types)
        for rank, rank_states in enumerate(states or ()):
            for (kind, whole_name), value in rank_states.values.items():
                if kind == MASTER and not has_masters:
                    continue  # an fp32 weight is its own master
                destination = names.destination_of(whole_name)
                add(f"optimizer.{destination.name}.{kind}", rank, destination, value)
        kinds = {kind for rank_states in states or () for kind, _ in rank_states.values}
        kinds -= set() if has_masters else {MASTER}
        weight_names = [name.removeprefix("model.") for name in parts if name.startswith("model.")]
        for name, kind in itertools.product(weight_names, sorted(kinds)):
            if f"optimizer.{name}.{kind}" not in parts:
                raise CheckpointError(f"{kind} of {name} is missing")
        for name, values in parts.items():
            yield name, self._locate(name, values)

    def _locate(
        self, name: str, values: Mapping[tuple[int, int], tuple[Value, str]]
    ) -> list[TensorPart]:
        """Return the parts of a tensor, after checking that they tile it.

        Args:
            name: The native name of the tensor.
            values: The value and the dense name of each part, by (expert, tensor rank). The expert
                is -1 outside experts.
        """
        pieces, starts = list[TensorPart](), defaultdict[int, int](int)
        done = set[int]()
        for (expert, rank), (value, dense) in sorted(values.items(), key=lambda pair: pair[0]):
            dim = self._split_dim(dense, is_expert=expert >= 0)
            if dim is None and expert in done:
                continue  # another tensor rank's copy
            done.add(expert)
            stored = torch.empty(value.shape, device="meta")
            shape = list(self._arrange(dense, stored).shape)
            offset = [0] * len(shape)
            if dim is not None:
                if dim >= len(shape):
                    raise CheckpointError(f"{name} has {len(shape)} dimensions")
                offset[dim] = starts[expert]
                starts[expert] += shape[dim]
            if expert >= 0:
                offset, shape = [expert, *offset], [1, *shape]
            pieces.append(TensorPart(value, dense, Box(tuple(offset), tuple(shape))))
            if dim is not None and rank >= self._tensor_size:
                raise CheckpointError(f"{name} is in too many files")
        if not is_tiled(pieces[-1].box.end, [piece.box for piece in pieces]):
            raise CheckpointError(f"{name}: parts are missing or differ in shape")
        ranks = {rank for _, rank in values}
        is_split = self._split_dim(pieces[0].dense, is_expert=-1 not in done) is not None
        if is_split and ranks != set(range(self._tensor_size)):
            raise CheckpointError(f"{name} is in the files of only {len(ranks)} tensor ranks")
        if len({piece.value.dtype for piece in pieces}) != 1:
            raise CheckpointError(f"the parts of {name} differ in type")
        return pieces

    def _split_dim(self, dense: str, *, is_expert: bool) -> int | None:
        """Return the dimension of our tensor that tensor ranks split in the files, or `None`."""
        if is_expert and not self._args.get("enable_expert_tensor_parallelism"):
            return None
        return self._arrangement.split_dim(dense)

    def _arrange(self, dense: str, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return self._arrangement.arrange(f".{dense}", tensor)
        except RuntimeError as error:
            raise CheckpointError(f"{dense}: {error}") from None

    def _optimizer_meta(self, states: list[States]) -> Json:
        """Return the optimizer's step count and loss scale."""
        steps = {archive.number(step) for part in states for archive, step in part.steps}
        return {
            "step": step_count(steps, self.path, self.iteration),
            "loss_scale": self._loss_scale(),
        }

    def _loss_scale(self) -> dict[str, Json]:
        """Return the state of a dynamic loss scale, or {} if there is none in the known format.

        A run in fp16 without one adds a notice.
        """
        if not self._args.get("fp16"):
            return {}
        tree = next(iter(self._files.states.values()), self._main).tree
        inner = tree.get("optimizer_state_dict")
        scaler = inner.get("loss_scaler") if isinstance(inner, dict) else None
        keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window", "cur_hysteresis")
        values = scaler.state if isinstance(scaler, Record) else None
        scaler_values = {key: values.get(key) for key in keys} if isinstance(values, dict) else {}
        if not scaler_values or not all(
            type(value) in (int, float) for value in scaler_values.values()
        ):
            self._notices.append(
                "the loss scale has a different format, so it starts from its initial value"
            )
            return {}
        counts = {key: int(value or 0) for key, value in scaler_values.items()}
        good = max(0, counts["cur_iter"] - counts["last_overflow_iter"] - 1)
        return {
            "scale": scaler_values["cur_scale"],
            "growth_tracker": good % max(1, counts["scale_window"]),
            "hysteresis_tracker": counts["cur_hysteresis"],
        }

    def _read(self, name: str, box: Box) -> torch.Tensor:
        result = torch.empty(box.shape, dtype=self.tensors[name].dtype)
        for piece in self._pieces[name]:
            overlap = piece.box.intersect(box)
            if overlap is not None:
                whole = self._arrange(piece.dense, piece.value.load()).view(piece.box.shape)
                result[overlap.slices_in(box)] = whole[overlap.slices_in(piece.box)]
        return result


def _module(file: StateFile) -> dict[str, Any]:
    """Return the weights in a file by dotted name."""
    module = file.tree.get("module")
    return {} if module is None else dict(names.flatten(module))


def _shapes(file: StateFile) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a file's `param_shapes` by name, in the file's order."""
    listed, shapes = file.tree.get("param_shapes"), dict[str, tuple[int, ...]]()
    frozen = file.tree.get("frozen_param_shapes")
    if frozen:
        raise CheckpointError(f"{file.zip.path}: frozen parameters are not supported")
    for group in listed if isinstance(listed, list) else ():
        if not isinstance(group, dict):
            raise CheckpointError(f"{file.zip.path}: param_shapes contains {show(group)}")
        for name, shape in group.items():
            is_shape = type(shape) is tuple and all(
                type(size) is int and size > 0 for size in shape
            )
            if type(name) is not str or not is_shape or len(shape) > 2 or name in shapes:
                raise CheckpointError(f"{file.zip.path}: {show(name)} has the shape {show(shape)}")
            shapes[name] = shape
    return shapes


def _dtype(name: Json) -> torch.dtype:
    if name not in _DTYPES:
        raise CheckpointError(f"params_dtype is {show(name)}")
    return _DTYPES[name]
