"""Write a run's state, or any checkpoint, in Megatron Core's `torch_dist` format.

Every rank writes the parts of tensors that the plan of a native checkpoint assigns to it into files
`__<rank>_<n>.distcp`. Rank 0 adds the index and everything that is not a tensor of the network. All
files are published following the protocol of `store`.

Megatron Core also expects objects that are not tensors: the extra states of some modules, which are
`None` without Transformer Engine's delayed scaling, and the states of its generators after seeding
(see `legacy.writer`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.checkpoint import store
from megatron.checkpoint.core.arguments import core_arguments, layer_frequency
from megatron.checkpoint.core.index import INDEX
from megatron.checkpoint.core.names import FP32_WEIGHTS, MASTER, NamingScheme, layer_modules
from megatron.checkpoint.core.reader import BACKEND, COMMON, FORMAT
from megatron.checkpoint.core.states import (
    core_group_settings,
    core_random_states,
    extra_states,
)
from megatron.checkpoint.entries import DTYPES, WORD_EMBEDDING, Json
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.find import COMPLETE, RELEASE, iteration_folder
from megatron.checkpoint.legacy.file_plan import VERSION
from megatron.checkpoint.legacy.torch_file import append_torch_file, write_pickle, write_torch_file
from megatron.checkpoint.legacy.writer import unsupported_schedule
from megatron.checkpoint.lock import save_lock
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.retention import RetentionPolicy, list_files
from megatron.checkpoint.store import STATES, WEIGHTS, Snapshot
from megatron.config.attention import delta_net_layers
from megatron.config.experts import mixture_layers
from megatron.config.hybrid import MAMBA, layer_symbols
from megatron.config.rules_legacy import needs_engine, unsupported_by_core
from megatron.config.run import ModelRun
from megatron.durable import Check, new_file, storage_errors, sync_folder
from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout

_LAST = (COMPLETE, list_files)  # the file that is written after all others, and its content
_OVERHEAD = 2048  # bytes of a chunk's container and of its entry in the index, at most
_SHARDING = "fully_reshardable"  # the format of the distributed optimizer's states


@dataclass(frozen=True)
class CoreSaver:
    """A writer of a run's state in Megatron Core's format.

    Attributes:
        config: The run's configuration.
    """

    config: ModelRun

    def write(
        self,
        root: Path | str,
        snapshot: Snapshot,
        *,
        keep: RetentionPolicy | None = None,
        check: Check = None,
        folder: str | None = None,
    ) -> Path:
        """Save a run's state, as `store.write_checkpoint` does, and return the checkpoint's folder.

        Collective over all ranks of the snapshot's layout.

        Args:
            root: Folder of checkpoints, created if it is missing.
            snapshot: This rank's share of the checkpoint.
            keep: Which older checkpoints to keep. None keeps all of them.
            check: A check that rank 0 runs on the checkpoint before publishing it.
            folder: The checkpoint's name. Default: the name for its iteration.

        Raises:
            StorageError: Raised on every rank if any rank cannot write. Temporary files are removed
                and the tracker is unchanged. Nothing is published, unless only the tracker's update
                failed.
            CheckpointError: Megatron Core does not support the network, the schedule or the
                optimizer states (`CoreFiles`).
        """
        files = CoreFiles(self.config, snapshot)
        exchange = JsonExchange(snapshot.layout.world)

        def fill(temporary: Path) -> None:
            reports = exchange.on_all_ranks(lambda: files.write_tensors(temporary))
            exchange.on_main(lambda: files.write_metadata(temporary, reports))

        chunks = sum(map(len, snapshot.plan.parts.values()))
        size = snapshot.plan.total_bytes + _OVERHEAD * (chunks + len(files.objects))
        folder = folder or iteration_folder(snapshot.iteration)
        return store.write_folder(root, folder, exchange, size, fill, _LAST, keep, check)


def convert_to_core(
    reader: Reader, root: Path, config: ModelRun, *, keep_optimizer: bool, check: Check
) -> Path:
    """Save an opened checkpoint in Megatron Core's format and return the new checkpoint's folder.

    A checkpoint without training steps, such as a Hugging Face model, becomes a `release`.

    Args:
        reader: The checkpoint.
        root: Folder of checkpoints, created if it is missing.
        config: The configuration of the checkpoint's run.
        keep_optimizer: Also write the optimizer states.
        check: A check to run on the checkpoint before it is published.

    Raises:
        StorageError: The checkpoint cannot be written.
        CheckpointError: Megatron Core does not support the network, the schedule or the optimizer
            states (`CoreFiles`), another job is saving into the folder, or the source is damaged.
    """
    state = store.state_of(reader, keep_optimizer=keep_optimizer)
    meta = reader.meta if keep_optimizer else {**reader.meta, "optimizer": None}
    snapshot = Snapshot.take(reader.iteration, state, meta, Layout.single())
    folder = None if reader.iteration else RELEASE
    with save_lock(root):
        return CoreSaver(config).write(root, snapshot, check=check, folder=folder)


class CoreFiles:
    """The content of the files of a checkpoint in Megatron Core's format.

    Attributes:
        config: The configuration of the checkpoint's run.
        snapshot: This rank's share of the checkpoint.
        locations: The locations at which each weight and optimizer state is stored, by native name.
            There are none for a weight whose fp32 master is stored in its place.
    """

    def __init__(self, config: ModelRun, snapshot: Snapshot) -> None:
        """Plan where each tensor is stored.

        Args:
            config: The configuration of the checkpoint's run.
            snapshot: This rank's share of the checkpoint.

        Raises:
            CheckpointError: Megatron Core does not support the network (or not with this
                --transformer-impl), the saved schedule or an optimizer state; its model lacks one
                of the parameters; some layers lack optimizer states; or a 16-bit hybrid model has
                an optimizer other than the distributed one.
        """
        self.config, self.snapshot = config, snapshot
        model, plan = config.model, snapshot.plan
        refused = ", ".join(unsupported_by_core(model))
        if refused:
            remedy = "write the native format"
            raise CheckpointError(f"{refused}: Megatron Core does not support it: {remedy}")
        self._is_engine = config.checkpoint.transformer_impl != "local"
        if needs_engine(model) and not self._is_engine:
            raise CheckpointError(
                "--transformer-impl local: Megatron Core has gated delta nets and hybrid models "
                "only with Transformer Engine: drop the flag"
            )
        unsupported = unsupported_schedule(snapshot.meta.get("schedule") or {})
        if snapshot.meta.get("optimizer") and unsupported:
            raise CheckpointError(
                f"an optimizer with {unsupported} cannot be written for Megatron Core: convert "
                "only the weights, without --keep-optimizer, or write the native format"
            )
        self._shards_states = config.parallel.use_distributed_optimizer
        scheme = self._naming_scheme()
        names = [name for name in plan.parts if name.startswith((WEIGHTS, STATES))]
        # The distributed optimizer stores an fp32 weight twice: as a weight and as its own master.
        self.locations = {name: [scheme.locate(name, plan.shapes[name])] for name in names}
        if model.hybrid_layer_pattern is not None:
            self._store_fp32_weights()
        for name in names if self._shards_states and snapshot.meta.get("optimizer") else ():
            state = f"{STATES}{name.removeprefix(WEIGHTS)}"
            if f"{state}.exp_avg" in plan.parts and f"{state}.{MASTER}" not in plan.parts:
                self.locations[name].append(scheme.locate(f"{state}.{MASTER}", plan.shapes[name]))
        self._check_stacks()

    def _check_stacks(self) -> None:
        """Check that every tensor that stacks layers has all of them.

        Raises:
            CheckpointError: The weights of some layers were frozen, so they have no states.
        """
        layers = defaultdict[str, set[int]](set)
        for location in chain.from_iterable(self.locations.values()):
            if location.layer is not None:
                layers[location.name].add(location.layer)
        for name, present in layers.items():
            missing = set(range(self.config.model.num_layers)) - present
            if missing:
                raise CheckpointError(
                    f"layer {min(missing)} was frozen and has no {name}, but Megatron Core stores "
                    "the states of all layers in one tensor: convert only the weights, without "
                    "--keep-optimizer, or write the native format"
                )

    def _naming_scheme(self) -> NamingScheme:
        """Return the layout of the network's tensors."""
        model = self.config.model
        latent_queries = model.q_lora_rank is not None if model.multi_latent_attention else None
        mixers: Sequence[str | None] = [
            "delta" if is_delta else None for is_delta in delta_net_layers(model, model.num_layers)
        ]
        pattern = model.hybrid_layer_pattern
        if pattern is not None:
            mixers = ["mamba" if symbol == MAMBA else None for symbol in layer_symbols(pattern)]
        layers = [
            layer_modules(
                is_engine=self._is_engine,
                is_mixture=is_mixture,
                mixer=mixer,
                latent_queries=latent_queries,
            )
            for is_mixture, mixer in zip(
                mixture_layers(model, model.num_layers), mixers, strict=True
            )
        ]
        return NamingScheme(
            model=vars(model),
            is_stacked=(not model.num_experts or layer_frequency(model) == 1)
            and model.experimental_attention_variant is None
            and pattern is None,
            gated=model.is_gated,
            shards_states=self._shards_states,
            final_norm="decoder.final_layernorm" if pattern is None else "decoder.final_norm",
            layers=layers,
            depths=layers[-1],
        )

    def _store_fp32_weights(self) -> None:
        """Store fp32 masters in place of the weights that Megatron Core keeps in fp32.

        Raises:
            CheckpointError: The optimizer is not the distributed one, and Core's other optimizer
                cannot save or load a mixture of fp32 and 16-bit parameters.
        """
        for name, locations in list(self.locations.items()):
            master = f"{STATES}{name.removeprefix(WEIGHTS)}.{MASTER}"
            is_kept = name.startswith(WEIGHTS) and name.endswith(FP32_WEIGHTS)
            if not is_kept or master not in self.locations:
                continue
            if not self._shards_states:
                raise CheckpointError(
                    "an optimizer of a 16-bit hybrid model cannot be written for Megatron Core "
                    "without --use-distributed-optimizer: convert only the weights, without "
                    "--keep-optimizer, or write the native format"
                )
            self.locations |= {name: [], master: [*locations, *self.locations[master]]}

    def write_tensors(self, folder: Path) -> Json:
        """Write and flush this rank's files.

        Returns:
            For each chunk: Core's name for the tensor, the chunk's offset and shape in the tensor,
            its file, the offset of its first byte in the file, and its size in bytes.

        Raises:
            StorageError: A file cannot be written.
        """
        rank, files = self.snapshot.layout.world.rank, defaultdict[str, list[Any]](list)
        for name, key, part in self.snapshot.plan.written_by(rank):
            if name in self.locations:
                files[f"__{rank}_{part.file_index}.distcp"].append((name, key, part))

        def write(file_name: str) -> list[Json]:
            written: list[Json] = []
            with storage_errors(folder / file_name), new_file(folder / file_name) as file:
                for name, key, part in files[file_name]:
                    values = self.snapshot.tensors[key].detach().to("cpu")
                    for location in self.locations[name]:
                        for stored, box, index in location.stored_boxes(part.box):
                            start = file.tell()
                            append_torch_file(file, values[index])
                            length = file.tell() - start
                            written.append([stored, *box, file_name, start, length])
            return written

        with ThreadPoolExecutor(max(1, len(files))) as pool:
            return [chunk for chunks in pool.map(write, files) for chunk in chunks]

    def write_metadata(self, folder: Path, reports: Sequence[Json]) -> None:
        """Write and flush the objects, the index and the data that all ranks share.

        Args:
            folder: The checkpoint's folder.
            reports: The result of `write_tensors` on each rank, in rank order.

        Raises:
            StorageError: A file cannot be written.
        """
        metadata: dict[str, Any] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        plan = self.snapshot.plan
        for name, locations in self.locations.items():
            properties = TensorProperties(dtype=DTYPES[plan.dtypes[name]])
            for location in locations:
                for stored, shape in location.stored_shapes(self.config.model.num_layers):
                    record = TensorStorageMetadata(properties, torch.Size(shape), [])
                    metadata.setdefault(stored, record)
        for name, offset, size, *file_range in (chunk for report in reports for chunk in report):
            chunk_offset = torch.Size(offset)
            metadata[name].chunks.append(ChunkStorageMetadata(chunk_offset, torch.Size(size)))
            storage[MetadataIndex(name, chunk_offset)] = _StorageInfo(*file_range)
        used = [part.file_index for parts in plan.parts.values() for part in parts if not part.rank]
        file_name = f"__0_{max(used, default=-1) + 1}.distcp"
        with storage_errors(folder):
            with new_file(folder / file_name) as file:
                for name, value in self.objects.items():
                    start = file.tell()
                    append_torch_file(file, [value])
                    metadata[name] = BytesStorageMetadata()
                    info = _StorageInfo(file_name, start, file.tell() - start)
                    storage[MetadataIndex(name)] = info
            with new_file(folder / INDEX) as file:
                file.write(write_pickle(Metadata(metadata, None, storage))[0])
            write_torch_file(folder / COMMON, self.common())
            with new_file(folder / FORMAT) as file:
                file.write(json.dumps(BACKEND).encode())
            sync_folder(folder)

    @cached_property
    def objects(self) -> dict[str, Any]:
        """The objects other than tensors that Megatron Core expects, by Megatron Core's names."""
        objects: dict[str, Any] = {}
        if self.config.model.hybrid_layer_pattern is not None:  # Core's GPTs drop it
            objects[_shard_name("output_layer._extra_state", [(0, 1)])] = None
        for native, locations in self.locations.items():
            if not native.startswith(WEIGHTS) or not locations:
                continue
            location = locations[0]
            modules = extra_states(location.name, is_engine=self._is_engine)
            # The index of each module among those of its kind: by layer, and by expert.
            grid = (
                [] if location.layer is None else [(location.layer, self.config.model.num_layers)]
            )
            experts = location.shape[0] if ".experts.experts." in location.name else 0
            for module in modules:
                for expert in range(max(1, experts)):
                    indices = [*grid, *[(expert, experts)] * bool(experts)] or [(0, 1)]
                    objects[_shard_name(f"{module}._extra_state", indices)] = None
        return objects | ({} if self.config.checkpoint.no_save_rng else self._random_states())

    def _random_states(self) -> dict[str, Any]:
        """Return the random generator states of each rank in Megatron Core's grid, by name."""
        parallel, snapshot = self.config.parallel, self.snapshot
        saved_seed = (snapshot.meta.get("rng") or {}).get("seed")
        seed = self.config.training.seed if saved_seed is None else saved_seed
        sizes = [parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size]
        experts, widths = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
        if experts > 1:
            sizes.append(self._replicas)
        objects = {}
        for stage, tensor_rank, *replica in product(*map(range, sizes)):
            rank = tensor_rank + sizes[1] * sum(replica)
            expert, width = rank // (widths or sizes[1]) % experts, rank % (widths or sizes[1])
            states = core_random_states(
                seed, snapshot.iteration, stage, tensor_rank, expert=expert, width=width
            )
            indices = zip((stage, tensor_rank, *replica), sizes, strict=True)
            objects[_shard_name("rng_state", list(indices))] = [states]
        return objects

    @property
    def _replicas(self) -> int:
        """The number of processes that hold the same weights."""
        experts = self.config.parallel.expert_model_parallel_size
        return max(self.snapshot.layout.replica.size, experts)

    def common(self) -> dict[str, Any]:
        """Return the content of `common.pt`."""
        meta, plan = self.snapshot.meta, self.snapshot.plan

        content: dict[str, Any] = {"singleton_local_shards": False}
        content["chained_optim_avoid_prefix"] = True
        if self._shards_states:
            content["distrib_optim_sharding_type"] = _SHARDING
        tree: dict[str, Any] = {
            "args": core_arguments(
                self.config,
                meta,
                rows=plan.shapes[WORD_EMBEDDING][0],
                dtype=DTYPES[plan.dtypes[WORD_EMBEDDING]],
                data_parallel=self._replicas,
            ),
            "checkpoint_version": VERSION,
            "iteration": self.snapshot.iteration,
            "content_metadata": content,
        }
        if meta.get("optimizer"):
            tree["optimizer"] = self._optimizer()
            tree["opt_param_scheduler"] = meta["schedule"]
        return tree

    def _optimizer(self) -> dict[Any, Any]:
        """Return the settings and counters of the optimizer.

        With expert parallelism, experts have a separate optimizer, and the result is a dict of both
        by index.
        """
        meta, plan = self.snapshot.meta, self.snapshot.plan
        has_expert_groups = self.config.parallel.expert_model_parallel_size > 1
        # For experts (True) and other parameters (False): whether each parameter has weight decay.
        groups = defaultdict[bool, list[bool]](list)
        for name in self.locations:
            if name.startswith(WEIGHTS) and not name.endswith("expert_bias"):
                decays = not name.endswith("bias") and len(plan.shapes[name]) > 1
                groups[has_expert_groups and ".mlp.experts." in name].append(decays)
        optimizers = {}
        for index, (is_expert, all_decays) in enumerate(sorted(groups.items())):
            settings = [
                core_group_settings(self.config, meta, decays=decays, is_expert=is_expert)
                for decays in sorted(set(all_decays), reverse=True)
            ]
            optimizers[index] = self._counted(settings)
        return optimizers if len(optimizers) > 1 else optimizers[0]

    def _counted(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an optimizer's state dict in the layout of its class in Megatron Core.

        Args:
            groups: The settings of the optimizer's parameter groups.
        """
        counters, scaler = self.snapshot.meta["optimizer"], {}
        scale = counters.get("loss_scale")
        if scale:
            scaler["grad_scaler"] = {**scale, "scale": torch.tensor([float(scale["scale"])])}
        if self._shards_states:
            inner = {"param_groups": groups}
            return {"optimizer": inner, **scaler, "param_state_sharding_type": _SHARDING}
        state = {}
        if not self._is_engine or self.config.optimizer.optimizer == "sgd":
            # PyTorch's Adam reads a step count for each parameter. Transformer Engine's reads one
            # for the group, and raises KeyError if a parameter has one.
            state["common_step"] = torch.tensor(float(counters["step"]))
        tree = {"state": state, "param_groups": groups}
        in_16_bits = any(name.endswith(f".{MASTER}") for name in self.locations)
        return {"optimizer": tree, **scaler} if in_16_bits else tree


def _shard_name(name: str, indices: Sequence[tuple[int, int]]) -> str:
    """Return Megatron Core's name for one object in a grid of objects.

    Args:
        name: The name of the grid.
        indices: The object's index and the grid's size in each dimension.
    """
    position, size = (".".join(map(str, axis)) for axis in zip(*indices, strict=True))
    return f"{name}/shard_{position}_{size}"
