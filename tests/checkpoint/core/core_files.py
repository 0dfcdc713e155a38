"""Write checkpoints of ours as Megatron Core does with torch.distributed.checkpoint."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron.checkpoint.reader import Reader
from tests.checkpoint.states import read_whole

FILES = ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp")
_LAYER = {
    "attention_norm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "attention_norm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.output": "self_attention.linear_proj",
    "attention.query_norm": "self_attention.q_layernorm",
    "attention.key_norm": "self_attention.k_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
    "mlp.router": "mlp.router",
    "mlp.experts": "mlp.experts.experts",
    "mlp.experts.up": "mlp.experts.experts.linear_fc1",
    "mlp.experts.down": "mlp.experts.experts.linear_fc2",
    "mlp.shared.up": "mlp.shared_experts.linear_fc1",
    "mlp.shared.down": "mlp.shared_experts.linear_fc2",
    "mlp.shared_gate": "mlp.shared_experts.gate_weight",
}
_OUTSIDE = {
    "embedding.word": "embedding.word_embeddings",
    "embedding.position": "embedding.position_embeddings",
    "final_norm": "decoder.final_layernorm",
    "output": "output_layer",
}
_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master": "fp32_param"}


def _their_name(name: str) -> tuple[str, int | None]:
    """Return a parameter's name in Megatron Core, with {} for the layer, and its layer."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    table, rest, prefix = _OUTSIDE, name, ""
    if match:
        table, rest, prefix = _LAYER, match[2], "decoder.layers.{}."
    if rest in table:
        return prefix + table[rest], int(match[1]) if match else None
    module, _, kind = rest.rpartition(".")
    return f"{prefix}{table[module]}.{kind}", int(match[1]) if match else None


def core_tensors(reader: Reader, *, stacked: bool) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint of ours under Megatron Core's names and in its shapes."""
    found: dict[str, dict[int | None, Tensor]] = {}
    for name in reader.names():
        prefix, _, parameter = name.partition(".")
        if prefix == "optimizer":
            parameter, _, kind = parameter.rpartition(".")
            prefix = f"optimizer.state.{_KINDS[kind]}."
        else:
            assert prefix == "model", name
            prefix = ""
        value = read_whole(reader, name)
        gate = parameter.rpartition(".")[0].endswith(".up")
        dim = 1 if ".experts." in parameter else 0
        own = value.dim() == dim + 3 if parameter.endswith("weight") else value.dim() == dim + 2
        if gate and own:
            value = value.flatten(dim, dim + 1)
        theirs, layer = _their_name(parameter)
        found.setdefault(prefix + theirs, {})[layer] = value.clone()
    layers = 1 + max(layer for by in found.values() for layer in by if layer is not None)
    result = {}
    for name, by_layer in found.items():
        if None in by_layer:
            result[name] = by_layer[None]
        elif stacked and len(by_layer) == layers:
            whole = torch.stack([by_layer[layer] for layer in range(layers)])
            result[name.replace("{}.", "")] = whole
        else:
            result |= {name.format(layer): value for layer, value in by_layer.items()}
    return result


def cut(name: str, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return boxes (offsets, sizes): each layer's or expert's part, halved if its size is even."""
    sizes = list(shape)
    leading = int("decoder.layers." in name and not re.search(r"layers\.\d", name))
    leading += ".experts.experts." in name
    for dim in range(leading):
        sizes[dim] = 1
    if leading < len(shape) and shape[leading] % 2 == 0:
        sizes[leading] //= 2
    starts = itertools.product(*(range(0, n, s) for n, s in zip(shape, sizes, strict=True)))
    return [(start, tuple(sizes)) for start in starts]


def write_core(folder: Path, tensors: Mapping[str, Tensor], common: Mapping[str, Any]) -> Metadata:
    """Write a folder, including objects that no reader needs; return the content of `.metadata`."""
    folder.mkdir(parents=True)
    contents = {name: bytearray() for name in FILES}
    turns = itertools.cycle(FILES)
    described: dict[str, Any] = {}
    placed: dict[MetadataIndex, Any] = {}

    def put(index: MetadataIndex, value: Any) -> None:
        buffer, file = io.BytesIO(), next(turns)
        torch.save(value, buffer)
        start, length = len(contents[file]), buffer.tell()
        contents[file] += buffer.getbuffer()
        placed[index] = filesystem._StorageInfo(file, start, length)

    for name in ("rng_state/shard_0_1", "decoder.layers.self_attention.linear_qkv._extra_state/0"):
        described[name] = BytesStorageMetadata()
        put(MetadataIndex(name), {"state": name})
    for name, value in tensors.items():
        boxes = cut(name, tuple(value.shape))
        chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
        properties = TensorProperties(dtype=value.dtype)
        described[name] = TensorStorageMetadata(properties, value.size(), chunks)
        for start, size in boxes:
            place = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            put(MetadataIndex(name, torch.Size(start)), value[place].clone())
    metadata = Metadata(described, None, placed, StorageMeta(save_id="x"))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    torch.save(dict(common), folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backend |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(common["iteration"]))
    return metadata


def embed_common(folder: Path) -> None:
    """Move the content of `common.pt` to where Core 0.19 stores it, and add its ranks' plans."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    common = folder / "common.pt"
    buffer = io.BytesIO()
    torch.save([torch.load(common, weights_only=False)], buffer)
    common.unlink()
    name = "common_state/shard_0_1"
    start = (folder / FILES[0]).stat().st_size
    with (folder / FILES[0]).open("ab") as file:
        file.write(buffer.getbuffer())
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    place = filesystem._StorageInfo(FILES[0], start, buffer.tell())
    metadata.storage_data[MetadataIndex(name)] = place
    items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)]
    for key, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            data = TensorWriteData(described.chunks[0], described.properties, described.size)
            items.append(WriteItem(MetadataIndex(key), WriteItemType.SHARD, data))
    metadata.all_local_plans = [SavePlan(items)]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))


def core_arguments(reader: Reader) -> Namespace:
    """Return Megatron Core's command line for the network of a checkpoint of ours."""
    config = reader.meta["config"]
    values = {name: value for section in config.values() for name, value in section.items()}
    pattern = values.pop("moe_layer_freq", "1")
    values |= {
        "layernorm_epsilon": values.pop("norm_epsilon", 1e-5),
        "moe_layer_freq": [1, 0, 1, 0] if pattern == "2" else 1,
        "consumed_train_samples": reader.meta["consumed_train_samples"],
        "padded_vocab_size": reader.meta["padded_vocab_size"],
        "params_dtype": torch.float32,
        "mtp_num_layers": None,
    }
    return Namespace(**values)


def to_core(reader: Reader, root: Path, *, stacked: bool = True) -> Metadata:
    """Write one of our checkpoints under `root` in Megatron Core's format."""
    step = torch.tensor(float(reader.meta["optimizer"]["step"]))
    optimizer: Any = {"state": {"common_step": step}, "param_groups": [{"lr": 1.0}]}
    if "mlp.experts" in " ".join(reader.names()):
        optimizer = {0: optimizer, 1: {"state": {"common_step": step}, "param_groups": []}}
    if reader.meta["optimizer"]["loss_scale"]:
        optimizer["grad_scaler"] = reader.meta["optimizer"]["loss_scale"]
    common = {
        "args": core_arguments(reader),
        "checkpoint_version": 3.0,
        "iteration": reader.iteration,
        "optimizer": optimizer,
        "opt_param_scheduler": reader.meta["schedule"],
    }
    tensors = core_tensors(reader, stacked=stacked)
    return write_core(root / f"iter_{reader.iteration:07d}", tensors, common)


# Dimensions of a layer's or an expert's tensor that are split over tensor ranks.
_SPLIT = {"linear_qkv.": 0, "linear_fc1.": 0, "linear_proj.weight": 1, "linear_fc2.weight": 1}
_SPLIT |= {"word_embeddings.weight": 0, "output_layer.weight": 0}


def _part(name: str, value: Tensor, rank: int, ranks: int, *, gated: bool) -> Tensor:
    dim = next((dim for ending, dim in _SPLIT.items() if ending in name), None)
    if dim is None or "layer_norm" in name:
        return value
    if gated and "linear_fc1." in name:
        halves = value.chunk(2, 0)
        return torch.cat([half.chunk(ranks, 0)[rank] for half in halves])
    return value.chunk(ranks, dim)[rank].clone()


@dataclass(frozen=True)
class Grid:
    """Numbers of tensor, pipeline and expert ranks; `grouped`: experts form one grouped layer."""

    tensor: int
    stages: int
    experts: int
    grouped: bool = False


def _held(
    whole: Mapping[str, Tensor], prefix: str, args: Namespace, grid: Grid, at: tuple[int, int, int]
) -> dict[str, Tensor]:
    """Return a rank's parts of the tensors with this prefix, under their names in its file."""
    found: dict[str, Tensor] = {}
    stage, rank, expert_rank = at
    per_stage = args.num_layers // grid.stages
    for name, value in whole.items():
        rest = name.removeprefix(prefix)
        if rest == name and (prefix or name.startswith("optimizer.")):
            continue
        layer = re.match(r"decoder\.layers\.(\d+)\.", rest)
        is_last = rest.startswith(("output_layer", "decoder.final"))
        if stage != (int(layer[1]) // per_stage if layer else (grid.stages - 1) * is_last):
            continue
        if layer:
            rest = rest.replace(layer[0], f"decoder.layers.{int(layer[1]) % per_stage}.")
        if ".experts.experts." not in rest:
            found[rest] = _part(rest, value, rank, grid.tensor, gated=args.swiglu)
            continue
        before, after = rest.split("experts.experts.")
        for index, one in enumerate(value.chunk(grid.experts)[expert_rank]):
            key = (
                f"experts.{after}{index}"
                if grid.grouped
                else f"experts.local_experts.{index}.{after}"
            )
            found[before + key] = _part(rest, one.clone(), rank, grid.tensor, gated=args.swiglu)
    return found


def _optimizer(
    model: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]], step: float
) -> dict[str, Any]:
    """Return the state of one optimizer for the parameters; the group without decay comes first."""
    groups: list[dict[str, Any]] = []
    order: list[str] = []
    for decays in (False, True):
        members = [name for name, value in model.items() if (value.dim() > 1) is decays]
        numbers = list(range(len(order), len(order) + len(members)))
        groups.append({"wd_mult": float(decays), "lr_mult": 1.0, "params": numbers})
        order += members
    states = {
        number: {"step": torch.tensor(step)} | {kind: held[name] for kind, held in moments.items()}
        for number, name in enumerate(order)
    }
    return {"state": states, "param_groups": groups}


def to_core_ranks(reader: Reader, root: Path, grid: Grid) -> None:
    """Write one of our checkpoints in Megatron Core's format `torch`, with one file per rank."""
    whole, args = core_tensors(reader, stacked=False), core_arguments(reader)
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = grid.tensor, grid.stages
    args.expert_model_parallel_size = grid.experts
    for at in itertools.product(*map(range, (grid.stages, grid.tensor, grid.experts))):
        model = _held(whole, "", args, grid, at)
        moments = {
            kind: _held(whole, f"optimizer.state.{kind}.", args, grid, at)
            for kind in ("exp_avg", "exp_avg_sq")
        }
        trained = {name: value for name, value in model.items() if "expert_bias" not in name}
        parts = [trained]
        if grid.experts > 1:  # the experts have a separate optimizer
            of_experts = {name: one for name, one in trained.items() if ".mlp.experts." in name}
            parts = [{k: v for k, v in trained.items() if k not in of_experts}, of_experts]
        states = [_optimizer(one, moments, reader.meta["optimizer"]["step"]) for one in parts]
        tree = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": reader.iteration,
            "model": model | {"decoder.layers.0.mlp.linear_fc1._extra_state": None},
            "optimizer": states if len(states) > 1 else states[0],
            "opt_param_scheduler": reader.meta["schedule"],
        }
        stage, rank, expert_rank = at
        name = f"mp_rank_{rank:02d}" + f"_{stage:03d}" * (grid.stages > 1)
        name += f"_{expert_rank:03d}" * (grid.experts > 1)
        folder = root / f"iter_{reader.iteration:07d}" / name
        folder.mkdir(parents=True)
        torch.save(tree, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(reader.iteration))
