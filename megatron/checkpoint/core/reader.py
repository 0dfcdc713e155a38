"""Read a `torch_dist` folder of Megatron Core through the `Reader` interface."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.core import names
from megatron.checkpoint.core.arguments import core_config
from megatron.checkpoint.core.index import Chunk, Index, StoredTensor
from megatron.checkpoint.core.rows import row_order
from megatron.checkpoint.entries import WORD_EMBEDDING, Box, Json
from megatron.checkpoint.find import RELEASE
from megatron.checkpoint.legacy.arguments import (
    megatron_meta,
    plain_arguments,
    saved_iteration,
    step_count,
)
from megatron.checkpoint.legacy.torch_file import TorchZip
from megatron.checkpoint.legacy.unpickler import read_pickle, show
from megatron.checkpoint.reader import Reader, TensorMeta
from megatron.checkpoint.retention import lock_if_listed
from megatron.checkpoint.trust import open_trusted
from megatron.config.fields import MAX_LAYERS
from megatron.errors import CheckpointError, warn
from megatron.parallel.layout import Axis

COMMON = "common.pt"
_COMMON_BLOB = "common_state/shard_0_1"  # the same content, since Core 0.19
FORMAT = "metadata.json"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_MAX_FORMAT = 1 << 16  # bytes of metadata.json


@dataclass(frozen=True)
class Source(names.Location):
    """The location of one of our tensors, with the chunks to read.

    Attributes:
        chunks: The chunks of each of Core's tensors that contain parts of it, by tensor.
    """

    chunks: Mapping[str, Sequence[Chunk]] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """The name of one of Core's tensors, all of which have the same dtype."""
        return next(iter(self.chunks))


class CoreReader(Reader):
    """A GPT or hybrid model of Megatron Core in its `torch_dist` format, under native names.

    The content of `meta` is described in `megatron_meta`.
    """

    format = "core"

    def __init__(
        self, path: Path, world: Axis, *, verify: bool, allow_foreign: bool = False
    ) -> None:
        """Open all files.

        Args:
            path: The checkpoint's folder.
            world: The ranks that open it, each of which verifies its share.
            verify: Check that this rank's share of the chunks matches the index and has the right
                CRCs.
            allow_foreign: Accept files owned by other users.

        Raises:
            CheckpointError: A file is missing, damaged or refused, or its format or the network is
                not supported.
        """
        self.path, self.allow_foreign = path, allow_foreign
        lock_if_listed(self, "core")
        self._check_format()
        self._index = Index(path, allow_foreign=allow_foreign)
        self._common, tree = self._open_common()
        try:
            args = plain_arguments(tree.get("args"))
            config = core_config(args)
        except CheckpointError as error:
            raise CheckpointError(f"{self._common.path}: {error}") from None
        self._gated = any(args.get(name) for name in ("swiglu", "geglu", "quick_geglu"))
        self._tied = not args.get("untie_embeddings_and_output_weights")
        self._layers = args.get("num_layers")
        # We have no such setting; only the order of rows depends on it.
        interleaved = {"rotary_interleaved": args.get("rotary_interleaved")}
        self._model = config["model"] | interleaved
        try:
            self._sources, has_states = self._find_sources()
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        has_states = has_states or _is_stateless(tree)
        if args.get("num_experts"):
            # Depending on Core's version, a model with biases may have none in its routers.
            has_biases = any(name.endswith(".mlp.router.bias") for name in self._sources)
            config["model"]["moe_router_bias"] = has_biases
        tensors = self._index.tensors
        stored = {
            name: TensorMeta(source.shape, tensors[source.first].dtype)
            for name, source in self._sources.items()
        }
        self.tensors = stored | self._split_fp32_weights(stored, args)
        if verify:
            used = sorted({name for source in self._sources.values() for name in source.chunks})
            chunks = ((name, chunk) for name in used for chunk in tensors[name].chunks)
            for name, chunk in itertools.islice(chunks, world.rank, None, world.size):
                self._index.load(name, chunk, verify=True)
        is_release = path.name == RELEASE  # a release starts a new run
        iteration = 0 if is_release else tree.get("iteration")
        self.iteration = saved_iteration(iteration, self._common.path)
        if not has_states and world.is_first and any(map(names.is_optimizer_state, tensors)):
            warn(
                f"{path}: the optimizer states depend on the layout, or are flattened "
                "(--dist-ckpt-optim-fully-reshardable was not given): only the weights are read"
            )
        self.meta = megatron_meta(
            args,
            iteration=self.iteration,
            is_release=is_release,
            rows=self.global_shape(WORD_EMBEDDING)[0],
            config=config,
            optimizer=self._optimizer_meta(tree) if has_states and not is_release else None,
            schedule=tree.get("opt_param_scheduler"),
        )

    def _open_common(self) -> tuple[TorchZip, Mapping[Any, Any]]:
        """Return the file with the command line, the schedule and the counters, and its content."""
        path = self.path / COMMON
        if path.exists() or _COMMON_BLOB not in self._index.blobs:
            common = TorchZip(path, allow_foreign=self.allow_foreign)
            common.verify()
            return common, common.tree()
        common = self._index.archive(_COMMON_BLOB)
        common.verify()
        content = read_pickle(bytes(common.record("data.pkl")), f"{common.path}: {_COMMON_BLOB}")
        if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
            raise CheckpointError(f"{common.path}: {_COMMON_BLOB} is not a list of one dict")
        return common, content[0]

    def _split_fp32_weights(
        self, stored: Mapping[str, TensorMeta], args: Json
    ) -> dict[str, TensorMeta]:
        """Present each weight that Core keeps in fp32 as a rounded weight and its fp32 master.

        The rounded weight has the dtype of the network's other weights. A weight without optimizer
        states stays in fp32. The masters are added to the sources.

        Args:
            stored: The tensors, as they are stored.
            args: Core's command line.

        Returns:
            The rounded weights and their masters.
        """
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = next((dtype for name, dtype in dtypes.items() if args.get(name)), None)
        added: dict[str, TensorMeta] = {}
        if dtype is None:
            return added
        for name, meta in stored.items():
            state = f"optimizer.{name.removeprefix('model.')}"
            is_kept = name.startswith("model.") and name.endswith(names.FP32_WEIGHTS)
            is_wider = meta.dtype == torch.float32
            if is_kept and is_wider and f"{state}.exp_avg" in stored:
                master = f"{state}.{names.MASTER}"
                added |= {name: meta._replace(dtype=dtype), master: meta}
                self._sources[master] = self._sources[name]
        return added

    def _check_format(self) -> None:
        """Check the format and its version in `metadata.json`."""
        path = self.path / FORMAT
        try:
            with open_trusted(path, allow_foreign=self.allow_foreign) as file:
                content = json.loads(file.read(_MAX_FORMAT))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: only folders of torch.distributed.checkpoint that Megatron "
                "Core wrote can be read"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged: {error}") from None
        known = {key: value for key, value in BACKEND.items() if key.startswith("sharded")}
        for key, value in known.items():
            if not isinstance(content, dict) or content.get(key) != value:
                actual = show(content.get(key)) if isinstance(content, dict) else "nothing"
                raise CheckpointError(f"{path}: {key} is {actual}, and only {value!r} is supported")

    def _find_sources(self) -> tuple[dict[str, Source], bool]:
        """Return the sources of our tensors by name, and whether they include optimizer states."""
        sources: dict[str, Source] = {}
        tensors = self._index.tensors
        native_names = {name: names.native_name(name) for name in tensors}
        has_states = (
            any(map(names.is_optimizer_state, tensors)) and None not in native_names.values()
        )
        weights = {name: self._parameter(name) for name in tensors}
        # Optimizer states that were flattened differ in shape from their parameters.
        shapes = ((weight, tensors[name].shape) for name, weight in weights.items())
        has_states = has_states and all(w is None or w.shape == shape for w, shape in shapes)
        groups: dict[names.NativeName, dict[str, str]] = {}
        for name, native in native_names.items():
            tied = self._tied and native is not None and native.parameter == "output.weight"
            if native is None or tied or (native.suffix and not has_states):
                continue
            weight = weights[name]
            is_fp32 = weight is not None and weight.dtype == torch.float32
            if native.suffix == ".master" and is_fp32:  # we keep no separate master copy
                continue
            group = groups.setdefault(native._replace(part=""), {})
            if native.part in group:
                raise CheckpointError(
                    f"{native.parameter}{native.suffix} is in {group[native.part]} and in {name}"
                )
            group[native.part] = name
        for native, group in groups.items():
            for full_name, source in self._sources_in(group, native):
                if full_name in sources:
                    raise CheckpointError(
                        f"{full_name} is in {sources[full_name].first} and in {source.first}"
                    )
                sources[full_name] = source
        return sources, has_states

    def _parameter(self, name: str) -> StoredTensor | None:
        """Return the parameter that an optimizer state belongs to, or `None` if there is none."""
        return self._index.tensors.get(names.parameter_of(name) or "")

    def _sources_in(
        self, parts: Mapping[str, str], native: names.NativeName
    ) -> Iterator[tuple[str, Source]]:
        """Yield the name and source of each of our tensors that is stored in these tensors on disk.

        Args:
            parts: The tensors' names on disk by `NativeName.part`. A whole tensor has part "".
            native: Their native name.
        """
        stored = {name: self._index.tensors[name] for name in parts.values()}
        shapes = {part: self._layer_shape(name, native) for part, name in parts.items()}
        name = next(iter(stored))
        shape = next(iter(shapes.values()))
        rows = sum(one[0] for one in shapes.values() if one)
        order = row_order(self._model, native.parameter, rows) if shape else None
        if order is None:
            expected = {"": shape}
        else:
            tail = shape[1 + order.has_axis :]
            shape = (rows, *tail)
            expected = {ending: order.stored_shape(shape, count) for ending, count in order.parts}
        dtypes = {one.dtype for one in stored.values()}
        if shapes != expected or len(dtypes) > 1:
            found = ", ".join(f"{name} {list(one.shape)}" for name, one in stored.items())
            wanted = ", ".join(f"{part[1:]} {list(one)}" for part, one in expected.items())
            raise CheckpointError(f"{found}: expected {wanted}, all of one type")
        gate_dim = native.gate_dim if self._gated else None
        if gate_dim is not None:
            if len(shape) <= gate_dim or shape[gate_dim] % 2:
                raise CheckpointError(f"{name} is {list(stored[name].shape)}, without gate and up")
            shape = (*shape[:gate_dim], 2, shape[gate_dim] // 2, *shape[gate_dim + 1 :])
        prefix = name.removesuffix(next(iter(parts)))
        if not native.is_stacked:
            chunks = {name: one.chunks for name, one in stored.items()}
            source = Source(prefix, None, gate_dim, shape, order, chunks)
            yield native.name(native.layer), source
            return
        by_layer = defaultdict[int, dict[str, list[Chunk]]](lambda: {name: [] for name in stored})
        for name, one in stored.items():
            for chunk in one.chunks:
                first, count = chunk.box.offset[0], chunk.box.shape[0]
                for layer in range(first, first + count):
                    by_layer[layer][name].append(chunk)
        for layer in range(stored[name].shape[0]):
            source = Source(prefix, layer, gate_dim, shape, order, by_layer[layer])
            yield native.name(layer), source

    def _layer_shape(self, name: str, native: names.NativeName) -> tuple[int, ...]:
        """Return the shape of a tensor on disk, without the dimension of layers if it has one."""
        shape = self._index.tensors[name].shape
        if not native.is_stacked:
            return shape
        if not shape or shape[0] != self._layers:
            raise CheckpointError(
                f"{name} is {list(shape)}, but {COMMON} says {show(self._layers)} layers"
            )
        if shape[0] > MAX_LAYERS:
            raise CheckpointError(f"{name} is {list(shape)}: more than {MAX_LAYERS:,} layers")
        return shape[1:]

    def _optimizer_meta(self, tree: Mapping[str, Any]) -> Json:
        """Return the optimizer's step count and loss scale."""
        steps: set[int | float] = set()
        scaler: dict[str, int | float] = {}
        for node in _optimizers(tree):
            state = node.get("state")
            if isinstance(state, dict) and "common_step" in state:
                steps.add(self._common.number(state["common_step"]))
            for group in _groups(node):
                if "step" in group:
                    steps.add(self._common.number(group["step"]))
            if isinstance(node.get("grad_scaler"), dict):
                values = node["grad_scaler"].items()
                scaler |= {str(key): self._common.number(value) for key, value in values}
        step = step_count(steps, self._common.path, self.iteration)
        return {"step": step, "loss_scale": scaler}

    def _read(self, name: str, box: Box) -> torch.Tensor:
        source = self._sources[name]
        result = torch.empty(box.shape, dtype=self._index.tensors[source.first].dtype)
        for stored, stored_box, index in source.stored_boxes(box):
            part = result[index]
            for chunk in source.chunks[stored]:
                common = chunk.box.intersect(stored_box)
                if common is not None:
                    values = self._index.load(stored, chunk)
                    part[common.slices_in(stored_box)] = values[common.slices_in(chunk.box)]
            if any(isinstance(one, torch.Tensor) for one in index):  # `part` is a copy
                result[index] = part
        return result.to(self.tensors[name].dtype)


def _optimizers(tree: Mapping[str, Any]) -> Iterator[Mapping[Any, Any]]:
    """Yield the parts of the optimizer's tree. With experts, they include optimizers 0 and 1."""
    pending = [tree.get("optimizer")]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            pending += [node[key] for key in node if type(key) is int or key == "optimizer"]
            yield node


def _groups(node: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """Return the parameter groups in a part of the optimizer's tree."""
    groups = node.get("param_groups")
    return (
        [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    )


def _is_stateless(tree: Mapping[str, Any]) -> bool:
    """Return whether the optimizer is SGD without momentum, which has no tensors."""
    groups = [group for node in _optimizers(tree) for group in _groups(node)]
    return bool(groups) and all(group.get("momentum") == 0 for group in groups)
