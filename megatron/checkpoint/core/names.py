"""Translate Megatron Core's parameter names on disk to ours.

If all layers are alike, they share a tensor whose first dimension is the layer
(`decoder.layers.mlp.linear_fc2.weight`, [L, h, f]). Otherwise each has its own
(`decoder.layers.3.mlp.linear_fc2.weight`, [h, f]). All experts of a layer share a tensor. The rows
of linear_fc1 are the gate projection's, followed by the up projection's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.checkpoint.entries import Box
from megatron.errors import CheckpointError

_MODULES = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "self_attention.linear_proj": "attention.output",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
    "mlp.experts.experts.linear_fc1": "mlp.experts.up",
    "mlp.experts.experts.linear_fc2": "mlp.experts.down",
    "mlp.shared_experts.linear_fc1": "mlp.shared.up",
    "mlp.shared_experts.linear_fc2": "mlp.shared.down",
}
_LAYERS = {
    f"{theirs}{'_' if theirs.endswith('layer_norm') else '.'}{kind}": f"{ours}.{kind}"
    for theirs, ours in _MODULES.items()
    for kind in ("weight", "bias")
} | {
    "self_attention.core_attention.softmax_offset": "attention.sinks",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.expert_bias": "mlp.router.expert_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_gate",
}
_OUTSIDE = {
    "embedding.word_embeddings.weight": "embedding.word.weight",
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "decoder.final_layernorm.weight": "final_norm.weight",
    "decoder.final_layernorm.bias": "final_norm.bias",
    "output_layer.weight": "output.weight",
}
# The modules around the transformer layer of one depth of multi-token prediction.
_AHEAD = {
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "projection",
    "final_layernorm": "final_norm",
}
_DEPTHS = {
    f"{theirs}.{kind}": f"{ours}.{kind}"
    for theirs, ours in _AHEAD.items()
    for kind in ("weight", "bias")
} | {f"transformer_layer.{theirs}": f"layer.{ours}" for theirs, ours in _LAYERS.items()}
# Parameters that fuse gate and up, with the dimension of our tensor that separates the two.
_GATED = {"mlp.up": 0, "mlp.shared.up": 0, "mlp.experts.up": 1}
_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,5})\.)?(.+)")
_DEPTH = re.compile(r"mtp\.layers\.(\d{1,5})\.(.+)")
_STATE = re.compile(r"(?:chained_\d{1,3}\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")
# The distributed optimizer calls masters "param", other optimizers "fp32_param".
_KINDS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum",
    "param": "master",
    "fp32_param": "master",
}
MASTER = "master"
# The inverse mapping. If there are several names, the last one is used.
_THEIR_LAYERS = {ours: theirs for theirs, ours in _LAYERS.items()}
_THEIR_DEPTHS = {ours: theirs for theirs, ours in _DEPTHS.items()}
_THEIR_OUTSIDE = {ours: theirs for theirs, ours in _OUTSIDE.items()}
_THEIR_KINDS = {ours: theirs for theirs, ours in _KINDS.items()}
_OURS = re.compile(r"layers\.(\d+)\.(.+)")
_OUR_DEPTH = re.compile(r"mtp\.(\d+)\.(.+)")
_NORM = {f"mlp_norm.{kind}": f"pre_mlp_layernorm.{kind}" for kind in ("weight", "bias")}


class OurName(NamedTuple):
    """Our name for a tensor on disk.

    Attributes:
        prefix: "model." or "optimizer.".
        parameter: Our name for the parameter, without the prefix and the layer.
        suffix: "" for a parameter, or the kind of an optimizer state such as ".exp_avg".
        layer: The index of its layer; `None` outside layers.
        is_stacked: Whether the first dimension is the layer.
        gate_dim: The dimension of our tensor that separates gate and up if the network has gates.
    """

    prefix: str
    parameter: str
    suffix: str
    layer: int | None = None
    is_stacked: bool = False
    gate_dim: int | None = None

    def name(self, layer: int | None) -> str:
        """Return our full name."""
        where = "" if layer is None else f"layers.{layer}."
        return f"{self.prefix}{where}{self.parameter}{self.suffix}"


def is_optimizer_state(name: str) -> bool:
    """Return whether a tensor of the file is an optimizer state."""
    return name.startswith(("optimizer.", "chained_"))


def parameter_of(name: str) -> str | None:
    """Return the name of the parameter whose optimizer state a tensor contains, if any."""
    match = _STATE.fullmatch(name)
    return match[2] if match else None


def place_of(name: str) -> OurName | None:
    """Return where a tensor of the file belongs, or `None` for an unknown kind of optimizer state.

    Raises:
        CheckpointError: Our networks have no such parameter.
    """
    prefix, suffix, parameter = "model.", "", name
    if is_optimizer_state(name):
        match = _STATE.fullmatch(name)
        if match is None or match[1] not in _KINDS:
            return None
        prefix, suffix, parameter = "optimizer.", f".{_KINDS[match[1]]}", match[2]
    if parameter in _OUTSIDE:
        return OurName(prefix, _OUTSIDE[parameter], suffix)
    depth = _DEPTH.fullmatch(parameter)
    if depth is not None and depth[2] in _DEPTHS:
        ours = _DEPTHS[depth[2]]
        gate_dim = _gate_dim(ours.removeprefix("layer."))
        return OurName(prefix, f"mtp.{int(depth[1])}.{ours}", suffix, gate_dim=gate_dim)
    match = _LAYER.fullmatch(parameter)
    if match is None or match[2] not in _LAYERS:
        raise CheckpointError(f"parameter {name[:200]} does not exist in our networks")
    ours = _LAYERS[match[2]]
    gate_dim = _gate_dim(ours)
    return OurName(prefix, ours, suffix, int(match[1] or 0), match[1] is None, gate_dim)


def _gate_dim(parameter: str) -> int | None:
    """Return the dimension that separates gate and up in a layer's parameter, if it has both."""
    return _GATED.get(parameter.rpartition(".")[0])


@dataclass(frozen=True)
class Location:
    """Where one of our tensors is stored in Megatron Core's files.

    Attributes:
        name: Megatron Core's name for the tensor that contains ours.
        layer: The index in that tensor's first dimension, or `None` if it does not stack layers.
        gate_dim: The dimension of our tensor that separates gate and up; `None` without gates.
        shape: The shape of our tensor.
    """

    name: str
    layer: int | None
    gate_dim: int | None
    shape: tuple[int, ...]

    def boxes(self, wanted: Box) -> Iterator[tuple[Box, tuple[Any, ...]]]:
        """Yield boxes of Megatron Core's tensor, each with the index of `wanted` that it fills."""
        first = () if self.layer is None else (self.layer,)
        one, new = (1,) * len(first), (None,) * len(first)
        if self.gate_dim is None:
            yield Box((*first, *wanted.offset), (*one, *wanted.shape)), (*new, ...)
            return
        dim = self.gate_dim
        offset, shape = list(wanted.offset), list(wanted.shape)
        part, rows = offset.pop(dim), offset[dim]
        parts = shape.pop(dim)
        for index in range(parts):
            offset[dim] = (part + index) * self.shape[dim + 1] + rows
            place = (*new, *(slice(None),) * dim, index)
            yield Box((*first, *offset), (*one, *shape)), place

    def whole(self, layers: int) -> tuple[int, ...]:
        """Return the shape of Megatron Core's tensor in a network of this many layers."""
        shape = self.shape
        if self.gate_dim is not None:
            before, (parts, rows, *after) = shape[: self.gate_dim], shape[self.gate_dim :]
            shape = (*before, parts * rows, *after)
        return shape if self.layer is None else (layers, *shape)


@dataclass(frozen=True)
class Form:
    """The layout of a network's tensors in Megatron Core's files.

    Attributes:
        is_stacked: Whether layers share tensors, because they are all alike.
        gated: Whether up projections consist of gate and up.
        own_norms: The layers whose normalization before the MLP has its own name.
        shards_states: Whether the states have the names of the distributed optimizer.
        depths_own_norms: Whether that normalization has its own name in all layers of multi-token
            prediction.
    """

    is_stacked: bool
    gated: bool
    own_norms: frozenset[int]
    shards_states: bool
    depths_own_norms: bool = False

    def place(self, name: str, shape: tuple[int, ...]) -> Location:
        """Return where one of our tensors goes: the inverse of `place_of`.

        Raises:
            CheckpointError: Megatron Core has no such tensor.
        """
        kind, _, parameter = name.partition(".")
        prefix = ""
        if kind == "optimizer":
            parameter, _, state = parameter.rpartition(".")
            theirs = _THEIR_KINDS.get(state)
            if theirs is None:
                raise CheckpointError(f"{name}: Megatron Core has no such optimizer state")
            if state == MASTER and self.shards_states:
                theirs = "param"
            prefix = f"optimizer.state.{theirs}."
        if parameter in _THEIR_OUTSIDE:
            return Location(prefix + _THEIR_OUTSIDE[parameter], None, None, shape)
        depth = _OUR_DEPTH.fullmatch(parameter)
        if depth is not None and depth[2] in _THEIR_DEPTHS:
            inside = depth[2].removeprefix("layer.")
            last = _THEIR_DEPTHS[depth[2]]
            if self.depths_own_norms and inside in _NORM:
                last = f"transformer_layer.{_NORM[inside]}"
            gate_dim = _gate_dim(inside) if self.gated else None
            return Location(f"{prefix}mtp.layers.{depth[1]}.{last}", None, gate_dim, shape)
        match = _OURS.fullmatch(parameter)
        if match is None or match[2] not in _THEIR_LAYERS:
            raise CheckpointError(f"{name}: Megatron Core's GPT has no such parameter")
        layer, inside = int(match[1]), match[2]
        last = _THEIR_LAYERS[inside]
        if layer in self.own_norms:
            last = _NORM.get(inside, last)
        stack = "decoder.layers." if self.is_stacked else f"decoder.layers.{layer}."
        gate_dim = _gate_dim(inside) if self.gated else None
        return Location(prefix + stack + last, layer if self.is_stacked else None, gate_dim, shape)
