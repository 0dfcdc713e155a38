"""Write folders as Megatron-DeepSpeed does, from a checkpoint of ours, without DeepSpeed."""

from __future__ import annotations

import enum
import itertools
import re
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.reader import Reader
from tests.checkpoint.states import read_whole

_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.router": "mlp.deepspeed_moe.gate.wg",
    "mlp.experts.up": "mlp.deepspeed_moe.experts.deepspeed_experts.{}.dense_h_to_4h",
    "mlp.experts.down": "mlp.deepspeed_moe.experts.deepspeed_experts.{}.dense_4h_to_h",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "mlp.shared.up": "mlp.mlp.dense_h_to_4h",
    "mlp.shared.down": "mlp.mlp.dense_4h_to_h",
    "mlp.coefficient": "mlp.coefficient",
}
_SPLIT = {"embedding.word": 0, "output": 0, "attention.qkv": 0, "mlp.up": 0}
_SPLIT |= {"attention.output": 1, "mlp.down": 1, "mlp.shared.up": 0, "mlp.shared.down": 1}
_FIRST = 2  # the index of the first transformer layer in a PipelineModule


@dataclass(frozen=True)
class Form:
    """How a run was split and saved.

    Attributes:
        zero: The ZeRO stage; -1 for the bf16 optimizer's file names.
        data: Data-parallel ranks.
        tensor: Tensor-parallel ranks.
        stages: Pipeline stages of a PipelineModule; 0 if there is none.
        experts: Ranks that divide the experts.
        blocks: Whether query, key and value are three blocks of rows, as they have been since 2024.
        groups: The number of flat tensors of each rank with ZeRO 3.
    """

    zero: int = 0
    data: int = 1
    tensor: int = 1
    stages: int = 0
    experts: int = 1
    blocks: bool = True
    groups: int = 1


class Parameter:
    """A parameter of one model-parallel rank, with its name, value and optimizer states."""

    def __init__(self, name: str, values: Mapping[str, Tensor], expert: int | None) -> None:
        self.name, self.values, self.expert = name, values, expert
        self.weight = values[""]

    @property
    def is_decayed(self) -> bool:
        return not self.name.endswith("bias") and self.weight.dim() > 1


class _StageEnum(enum.IntEnum):
    disabled, optimizer_states, gradients, weights = range(4)


class FragmentAddress:
    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


class _Scaler:
    pass


CLASSES: dict[str, dict[str, Any]] = {
    "deepspeed": {},
    "deepspeed.utils.tensor_fragment": {"fragment_address": FragmentAddress},
    "deepspeed.runtime.zero.config": {"ZeroStageEnum": _StageEnum},
    "deepspeed.runtime.fp16.loss_scaler": {"LossScaler": _Scaler, "DynamicLossScaler": _Scaler},
}


@contextmanager
def in_their_modules() -> Iterator[None]:
    """Make pickles refer to our stand-ins under the names of DeepSpeed's classes."""
    kept = {name: sys.modules.get(name) for name in CLASSES}
    for name, classes in CLASSES.items():
        sys.modules[name] = ModuleType(name)
        for own, kind in classes.items():
            setattr(sys.modules[name], own, kind)
            kind.__module__, kind.__qualname__, kind.__name__ = name, own, own
    try:
        yield
    finally:
        for name, module in kept.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def save(tree: Any, path: Path) -> None:
    """Call torch.save on a tree that may contain objects of DeepSpeed's classes."""
    with in_their_modules():
        torch.save(tree, path)


def scaler(**state: Any) -> Any:
    """Return a stand-in for DeepSpeed's loss scaler."""
    made = _Scaler()
    vars(made).update(state)
    return made


def stage(number: int) -> Any:
    return _StageEnum(number)


def arguments(reader: Reader, form: Form) -> Namespace:
    """Return Megatron-DeepSpeed's command line for the network of a checkpoint of ours."""
    config = reader.meta["config"]
    values = {name: value for section in config.values() for name, value in section.items()}
    norm = str(values.pop("normalization"))
    heads, groups = values["num_attention_heads"], values.pop("num_query_groups", None)
    grouped = values.pop("group_query_attention", False)
    positions = values.pop("position_embedding_type")
    pattern = str(values.pop("moe_layer_freq", "1"))
    values |= {
        "layernorm_epsilon": values.pop("norm_epsilon", 1e-5),
        "normalization": norm.lower(),
        "num_key_value_heads": groups if grouped else heads,
        "rope_theta": values.pop("rotary_base", 10000),
        "use_rotary_position_embeddings": positions == "rope",
        "add_position_embedding": positions != "rope",
        "num_experts": list(values.get("num_experts") or [1]),
        "topk": values.pop("moe_router_topk", 1),
        "expert_interval": int(pattern.removeprefix("last-of-")),
        "moe_loss_coeff": 0.0,
        "moe_train_capacity_factor": values.pop("moe_expert_capacity_factor", None),
        "consumed_train_samples": reader.meta["consumed_train_samples"],
        "consumed_train_tokens": reader.meta["consumed_train_tokens"],
        "padded_vocab_size": reader.meta["padded_vocab_size"],
        "params_dtype": reader.dtype("model.embedding.word.weight"),
        "tensor_model_parallel_size": form.tensor,
        "pipeline_model_parallel_size": max(1, form.stages),
        "no_pipeline_parallel": not form.stages,
        "deepspeed_config_dict": {"zero_optimization": {"stage": form.zero}},
    }
    for ours in ("moe_router_gating", "moe_aux_loss_coeff", "moe_router_load_balancing_type"):
        values.pop(ours, None)
    if form.blocks:
        values["ds_sequence_parallel_fpdt"] = False
    return Namespace(**values)


def _theirs(name: str, *, pipeline: bool, layers: int, tied: bool) -> str:
    """Return DeepSpeed's name for one of our parameters, with {} for the expert."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name)
    if match:
        layer, inner = int(match[1]), f"{_LAYER[match[2]]}.{match[3]}"
        return f"{layer + _FIRST}.{inner}" if pipeline else f"{_LAYERS}{layer}.{inner}"
    module, _, kind = name.rpartition(".")
    if module.startswith("embedding."):
        inner = f"{module.removeprefix('embedding.')}_embeddings.{kind}"
        if pipeline:
            return f"tied_modules.embed.{inner}" if tied else f"1.{inner}"
        return f"language_model.embedding.{inner}"
    if module == "final_norm":
        if pipeline:
            return f"{_FIRST + layers}.{kind}"
        return f"language_model.encoder.final_layernorm.{kind}"
    assert module == "output", name
    return f"{_FIRST + layers + 1}.lm_head.{kind}" if pipeline else f"{_OUTPUT}.{kind}"


_LAYERS, _OUTPUT = "language_model.encoder.layers.", "language_model.output_layer"


def _part(name: str, value: Tensor, form: Form, rank: int, heads: int) -> Tensor:
    """Return a tensor rank's part of one of our tensors, with rows in DeepSpeed's order."""
    module, _, kind = re.sub(r"layers\.\d+\.", "", name).rpartition(".")
    gated = module.endswith(".up") and value.dim() == (3 if kind == "weight" else 2)
    dim = _SPLIT.get(module)
    if dim is not None and not (dim == 1 and kind == "bias"):
        value = value.chunk(form.tensor, dim + gated)[rank]
    if module == "attention.qkv" and form.blocks:
        value = value.unflatten(0, (heads // form.tensor, 3, -1)).transpose(0, 1).flatten(0, 2)
    return (value.flatten(0, 1) if gated else value).clone()


def parameters_of(reader: Reader, form: Form, stage_index: int, rank: int) -> list[Parameter]:
    """Return the parameters of a model-parallel rank in the model's order, with all experts."""
    model = reader.meta["config"]["model"]
    layers, heads = model["num_layers"], model["num_attention_heads"]
    tied = not model["untie_embeddings_and_output_weights"]
    ours = [name.removeprefix("model.") for name in reader.names() if name.startswith("model.")]

    def order(name: str) -> Any:
        match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name)
        tops = ("embedding.word", "embedding.position", "", "final_norm", "output")
        if not match:
            module, _, kind = name.rpartition(".")
            return tops.index(module), 0, 0, kind != "weight"
        return 2, int(match[1]), list(_LAYER).index(match[2]), match[3] != "weight"

    def is_here(name: str) -> bool:
        if not form.stages:
            return True
        match = re.match(r"layers\.(\d+)\.", name)
        if match:
            return int(match[1]) // (layers // form.stages) == stage_index
        if name.startswith("embedding."):
            return stage_index == 0 or (tied and stage_index == form.stages - 1)
        return stage_index == form.stages - 1

    found = []
    for name in sorted(filter(is_here, ours), key=order):
        kinds = ("", ".exp_avg", ".exp_avg_sq", ".master")
        whole = {kind: f"optimizer.{name}{kind}" if kind else f"model.{name}" for kind in kinds}
        held = {kind: read_whole(reader, n) for kind, n in whole.items() if n in reader.tensors}
        theirs = _theirs(name, pipeline=bool(form.stages), layers=layers, tied=tied)
        if ".experts." not in name:
            parts = {k: _part(name, value, form, rank, heads) for k, value in held.items()}
            found.append(Parameter(theirs, parts, None))
            continue
        dense = name.replace(".experts.", ".")
        for expert in range(next(iter(held.values())).shape[0]):
            whole_form = Form(blocks=form.blocks)
            parts = {k: _part(dense, v[expert], whole_form, 0, heads) for k, v in held.items()}
            found.append(Parameter(theirs.format(expert), parts, expert))
    found.sort(key=_with_experts_together)
    return found


def _with_experts_together(one: Parameter) -> Any:
    """Move the experts of each layer behind its gate, in order."""
    match = re.match(r"(?:language_model\.encoder\.layers\.)?(\d+)\.", one.name)
    early = one.name.startswith(("tied_modules", "language_model.embedding", "1."))
    layer = int(match[1]) if match else -1 if early else 1 << 20
    module = one.name.partition("mlp.")[1] + one.name.partition("mlp.")[2]
    after = bool(module) and not module.startswith("mlp.deepspeed_moe.gate")
    if one.expert is None:
        return layer, 2 * after * (not module.startswith("mlp.dense")), 0
    return layer, 1, one.expert


def groups_of(parameters: list[Parameter]) -> list[list[Parameter]]:
    """Return the optimizer's groups: with and without decay, with separate groups for experts."""
    keys = itertools.product((False, True), (True, False))
    groups = [
        [one for one in parameters if (one.expert is not None, one.is_decayed) == key]
        for key in keys
    ]
    return [group for group in groups if group]


def _local(one: Parameter, count: int) -> str:
    """Return the name of an expert's parameter within its process."""
    if one.expert is None:
        return one.name
    old, new = (f"deepspeed_experts.{n}." for n in (one.expert, one.expert % count))
    return one.name.replace(old, new)


def _flat(group: list[Parameter], kind: str, multiple: int) -> Tensor:
    kinds = {"master": ".master", "exp_avg": ".exp_avg", "exp_avg_sq": ".exp_avg_sq"}
    values = [one.values.get(kinds[kind], one.weight).flatten().float() for one in group]
    whole = torch.cat(values)
    return torch.nn.functional.pad(whole, (0, -len(whole) % multiple))


def partition(reader: Reader, parameters: list[Parameter], form: Form, rank: int) -> dict:
    """Return the content of a data-parallel rank's file with ZeRO 1 or 2."""
    experts = 1 + max((one.expert or 0 for one in parameters), default=0)
    each, own = experts // form.experts, rank % form.experts
    held = [one for one in parameters if one.expert is None or one.expert // each == own]
    mappings, masters, states, counts = [], [], {}, []
    step = torch.tensor(float(reader.meta["optimizer"]["step"]))
    for index, group in enumerate(groups_of(held)):
        is_expert = group[0].expert is not None
        count = form.data // form.experts if is_expert else form.data
        place = rank // form.experts if is_expert else rank
        flats = {k: _flat(group, k, 2 * count) for k in ("master", "exp_avg", "exp_avg_sq")}
        size = len(flats["master"]) // count
        first, end = place * size, (place + 1) * size
        mapping, start = OrderedDict(), 0
        for one in group:
            here = max(start, first), min(start + one.weight.numel(), end)
            if here[0] < here[1]:
                address = FragmentAddress(here[1] - here[0], here[0] - first)
                mapping[_local(one, each)] = address
            start += one.weight.numel()
        mappings.append(mapping)
        masters.append(flats["master"][first : min(end, start)].clone())
        states[index] = {k: flats[k][first:end].clone() for k in ("exp_avg", "exp_avg_sq")}
        states[index]["step"] = step
        counts.append(count)
    return {
        "optimizer_state_dict": {
            "loss_scaler": scaler(cur_scale=1.0, dynamic=False),
            "base_optimizer_state": {
                "state": states,
                "param_groups": [{"lr": 1.0, "params": [i]} for i in range(len(counts))],
            },
            "single_partition_of_fp32_groups": masters,
            "zero_stage": stage(max(1, form.zero)),
            "partition_count": counts,
            "param_slice_mappings": mappings,
            "ds_version": "0.19.8",
        },
        "ds_config": {},
    }


def divided(reader: Reader, parameters: list[Parameter], form: Form, rank: int) -> dict:
    """Return the content of a data-parallel rank's file with ZeRO 3."""
    step = torch.tensor(float(reader.meta["optimizer"]["step"]))
    flats: dict[str, list[Tensor]] = {"master": [], "exp_avg": [], "exp_avg_sq": []}
    per_group = -(-len(parameters) // form.groups)
    for start in range(0, len(parameters), per_group):
        for kind, flat in flats.items():
            pieces = [
                _flat([one], kind, form.data).chunk(form.data)[rank]
                for one in parameters[start : start + per_group]
            ]
            flat.append(torch.cat(pieces))
    states = {
        index: {"step": step, "exp_avg": first, "exp_avg_sq": second}
        for index, (first, second) in enumerate(
            zip(flats["exp_avg"], flats["exp_avg_sq"], strict=True)
        )
    }
    groups = [{"params": list(states)}]
    return {
        "optimizer_state_dict": {
            "zero_stage": stage(3),
            "partition_count": form.data,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "fp32_flat_groups": flats["master"],
        }
    }


def plain(reader: Reader, parameters: list[Parameter]) -> dict:
    """Return the optimizer state without ZeRO."""
    step = torch.tensor(float(reader.meta["optimizer"]["step"]))
    order = sorted(parameters, key=lambda one: not one.is_decayed)
    decayed = sum(one.is_decayed for one in parameters)
    states = {
        index: {"step": step, **{k: one.values[f".{k}"] for k in ("exp_avg", "exp_avg_sq")}}
        for index, one in enumerate(order)
    }
    numbers = range(decayed), range(decayed, len(order))
    return {"state": states, "param_groups": [{"params": list(one)} for one in numbers]}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights in Megatron's nested dicts."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        language, part, rest = name.split(".", 2)
        place = tree.setdefault(language, {}).setdefault(part, OrderedDict())
        if part == "embedding":
            module, rest = rest.split(".")
            place = place.setdefault(module, OrderedDict())
        place[rest] = value
    return tree


def to_deepspeed(reader: Reader, root: Path, form: Form, **extra: Any) -> Path:
    """Write one of our checkpoints under `root` as Megatron-DeepSpeed would; return its folder."""
    folder = root / f"global_step{reader.iteration}"
    folder.mkdir(parents=True)
    for stage_index, rank in itertools.product(range(max(1, form.stages)), range(form.tensor)):
        parameters = parameters_of(reader, form, stage_index, rank)
        _write_rank(reader, folder, parameters, form, stage_index * form.tensor + rank, extra)
    (root / "latest").write_text(folder.name)
    return folder


def _write_rank(
    reader: Reader,
    folder: Path,
    parameters: list[Parameter],
    form: Form,
    rank: int,
    extra: Mapping[str, Any],
) -> None:
    mp = f"mp_rank_{rank:02d}"
    dense = OrderedDict((one.name, one.weight) for one in parameters if one.expert is None)
    module: Any = None if form.stages else nested(dense)
    experts = [one for one in parameters if one.expert is not None]
    if experts and form.stages:
        module = dense
    elif form.stages:
        _write_layers(folder, dense, rank % form.tensor)
    tree = {
        "module": module,
        "buffer_names": [],
        "optimizer": None if form.zero else plain(reader, parameters),
        "param_shapes": None,
        "lr_scheduler": reader.meta["schedule"] | {"num_tokens": 7},
        "global_steps": reader.iteration,
        "ds_version": "0.19.8",
        "args": arguments(reader, form),
        "checkpoint_version": 3.0,
        "iteration": reader.iteration,
        "tokens": 7,
        "rng_state": [{"torch_rng_state": torch.zeros(8, dtype=torch.uint8)}],
    } | dict(extra)
    if form.zero:
        shapes = OrderedDict((one.name, one.weight.shape) for one in parameters)
        tree["param_shapes"] = [shapes]
    _write_experts(reader, folder, parameters, form, rank)
    if form.zero == 3:
        empty = {name: torch.empty(0, dtype=value.dtype) for name, value in dense.items()}
        tree["module"] = nested(empty)
    for index in range(form.data):
        if form.zero == 3:
            save(tree, folder / f"zero_pp_rank_{index}_{mp}_model_states.pt")
            states = divided(reader, parameters, form, index)
        elif form.zero:
            states = partition(reader, parameters, form, index)
        if form.zero:
            prefix = "bf16_" if form.zero < 0 else ""
            save(states, folder / f"{prefix}zero_pp_rank_{index}_{mp}_optim_states.pt")
    if form.zero != 3:
        save(tree, folder / f"{mp}_model_states.pt")


def _write_layers(folder: Path, dense: Mapping[str, Tensor], tensor_rank: int) -> None:
    layers: dict[int, dict[str, Tensor]] = {}
    for name, value in dense.items():
        inner = name.removeprefix("tied_modules.embed.")
        number, rest = (1, inner) if inner != name else inner.split(".", 1)
        layers.setdefault(int(number), OrderedDict())[rest] = value
    for number, held in layers.items():
        save(held, folder / f"layer_{number:02d}-model_{tensor_rank:02d}-model_states.pt")


def _write_experts(
    reader: Reader, folder: Path, parameters: list[Parameter], form: Form, rank: int
) -> None:
    by_layer: dict[str, dict[int, dict[str, Tensor]]] = {}
    for one in parameters:
        if one.expert is not None:
            layer = by_layer.setdefault(one.name.partition(".mlp.")[0], {})
            layer.setdefault(one.expert, {})[one.name] = one.weight
    for number, experts in enumerate(by_layer.values()):
        for expert, held in experts.items():
            name = f"layer_{number}_expert_{expert}_mp_rank_{rank:02d}_model_states.pt"
            save(held, folder / name)
    if by_layer and not form.zero:
        count = len(next(iter(by_layer.values())))
        for own in range(form.experts):
            each = count // form.experts
            held = [one for one in parameters if one.expert is None or one.expert // each == own]
            path = folder / f"expp_rank_{own}_mp_rank_{rank:02d}_optim_states.pt"
            save({"optimizer": plain(reader, held)}, path)
