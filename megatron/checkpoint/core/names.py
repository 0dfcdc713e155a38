"""Translate between Megatron Core's parameter names on disk and native names.

If all layers are alike, they share a tensor whose first dimension is the layer
(`decoder.layers.mlp.linear_fc2.weight`, [L, h, f]). Otherwise each layer has its own tensor
(`decoder.layers.3.mlp.linear_fc2.weight`, [h, f]). All experts of a layer share a tensor.
linear_fc1 contains the rows of the gate projection, then those of the up projection. `rows` says
where the rows of other projections are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.checkpoint.core.rows import PARTS, RowOrder, row_order
from megatron.checkpoint.entries import Box
from megatron.errors import CheckpointError

_MODULES = {
    "mixer.in_proj.layer_norm": "attention_norm",
    "self_attention.in_proj.layer_norm": "attention_norm",
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_q_up_proj.layer_norm": "attention.query_norm",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "self_attention.linear_q_down_proj": "attention.query_down",
    "self_attention.linear_q_up_proj": "attention.query_up",
    "self_attention.linear_q_proj": "attention.query_up",
    "self_attention.linear_kv_down_proj": "attention.latent_down",
    "self_attention.kv_layernorm": "attention.latent_norm",
    "self_attention.linear_kv_up_proj.layer_norm": "attention.latent_norm",
    "self_attention.linear_kv_up_proj": "attention.latent_up",
    "mixer.in_proj": "attention.input",
    "mixer.conv1d": "attention.convolution",
    "mixer.out_proj": "attention.output",
    "self_attention.in_proj": "attention.input",
    "self_attention.conv1d": "attention.convolution",
    "self_attention.out_norm": "attention.norm",
    "self_attention.out_proj": "attention.output",
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


def _core_parameter(module: str, kind: str) -> str:
    """Return Megatron Core's name for the weight or bias of a module."""
    return f"{module}{'_' if module.endswith('layer_norm') else '.'}{kind}"


_LAYERS = {
    _core_parameter(core, kind): f"{native}.{kind}"
    for core, native in _MODULES.items()
    for kind in ("weight", "bias")
} | {
    "self_attention.core_attention.softmax_offset": "attention.sinks",
    "self_attention.A_log": "attention.decay",
    "self_attention.dt_bias": "attention.time_step",
    "mixer.A_log": "attention.decay",
    "mixer.D": "attention.skip",
    "mixer.dt_bias": "attention.time_step",
    "mixer.norm.weight": "attention.norm",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.router.expert_bias": "mlp.router.expert_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_gate",
}
_OUTSIDE = {
    "embedding.word_embeddings.weight": "embedding.word.weight",
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "decoder.final_norm.weight": "final_norm.weight",
    "decoder.final_norm.bias": "final_norm.bias",
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
    f"{core}.{kind}": f"{native}.{kind}"
    for core, native in _AHEAD.items()
    for kind in ("weight", "bias")
} | {f"transformer_layer.{core}": f"layer.{native}" for core, native in _LAYERS.items()}
# Parameters that fuse gate and up, with the dimension of our tensor that separates the two.
_GATED = {"mlp.up": 0, "mlp.shared.up": 0, "mlp.experts.up": 1}
# A tensor with one part of a projection or convolution: the name of the whole, and the part.
_PART = re.compile(rf"(.+\.(?:in_proj|conv1d)\.(?:weight|bias))(\.(?:{'|'.join(PARTS)}))")
_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,5})\.)?(.+)")
_DEPTH = re.compile(r"mtp\.layers\.(\d{1,5})\.(.+)")
_STATE = re.compile(r"(?:chained_\d{1,3}\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")
# The distributed optimizer calls master weights "param"; other optimizers call them "fp32_param".
_KINDS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum",
    "param": "master",
    "fp32_param": "master",
}
MASTER = "master"
# Mamba-2 parameters that Core keeps in fp32, without a master, even if all others are 16-bit.
FP32_WEIGHTS = ("attention.decay", "attention.skip")
# The inverse mapping. If there are several names, the last one is used, unless `layer_modules` says
# otherwise.
_CORE_LAYERS = {native: core for core, native in _LAYERS.items()}
_CORE_DEPTHS = {native: core for core, native in _DEPTHS.items()}
_CORE_OUTSIDE = {native: core for core, native in _OUTSIDE.items()}
_CORE_KINDS = {native: core for core, native in _KINDS.items()}
_NATIVE_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_NATIVE_DEPTH = re.compile(r"mtp\.(\d+)\.(.+)")


# The names in layers with a recurrent mixer, by our names for modules and parameters.
_DELTA_NET = {
    "attention_norm": "self_attention.in_proj.layer_norm",
    "attention.input": "self_attention.in_proj",
    "attention.convolution": "self_attention.conv1d",
    "attention.decay": "self_attention.A_log",
    "attention.time_step": "self_attention.dt_bias",
    "attention.output": "self_attention.out_proj",
}
_MAMBA = {
    "attention_norm": "mixer.in_proj.layer_norm",
    "attention.input": "mixer.in_proj",
    "attention.convolution": "mixer.conv1d",
    "attention.decay": "mixer.A_log",
    "attention.time_step": "mixer.dt_bias",
    "attention.output": "mixer.out_proj",
}


def layer_modules(
    *, is_engine: bool, is_mixture: bool, mixer: str | None, latent_queries: bool | None
) -> dict[str, str]:
    """Return Megatron Core's names for modules and parameters that depend on the kind of a layer.

    Args:
        is_engine: Whether the layer is built from Transformer Engine's modules, which fuse a
            normalization with the projection after it.
        is_mixture: Whether the layer has a mixture of experts.
        mixer: "delta" for a gated delta net, "mamba" for Mamba-2, or `None` for attention.
        latent_queries: Whether queries are computed from a latent vector; `None` without latent
            attention.

    Returns:
        The names by native name.
    """
    modules = {"mlp_norm": "pre_mlp_layernorm"} if is_mixture and is_engine else {}
    if mixer is not None:
        return {**modules, **(_DELTA_NET if mixer == "delta" else _MAMBA)}
    if latent_queries is None:
        return modules
    modules["attention_norm"] = "input_layernorm"
    modules["attention.query_up"] = "self_attention.linear_q_proj"
    if latent_queries:
        modules["attention.query_up"] = "self_attention.linear_q_up_proj"
    if is_engine:
        return {**modules, "attention.query_norm": "self_attention.linear_q_up_proj.layer_norm"}
    return {
        **modules,
        "mlp_norm": "pre_mlp_layernorm",
        "attention.query_norm": "self_attention.q_layernorm",
        "attention.latent_norm": "self_attention.kv_layernorm",
    }


class NativeName(NamedTuple):
    """The native name of a tensor on disk.

    Attributes:
        prefix: "model." or "optimizer.".
        parameter: The native name of the parameter, without the prefix and the layer.
        suffix: "" for a parameter, or the kind of an optimizer state such as ".exp_avg".
        layer: The index of the layer, 0 if layers are stacked; `None` outside layers.
        is_stacked: Whether the first dimension of the tensor on disk is the layer.
        gate_dim: The dimension of our tensor that separates gate and up if the MLP is gated;
            `None` for other parameters.
        part: The ending of the name of a tensor that holds a part of the parameter, such as
            ".query"; "" for a whole parameter.
    """

    prefix: str
    parameter: str
    suffix: str
    layer: int | None = None
    is_stacked: bool = False
    gate_dim: int | None = None
    part: str = ""

    def name(self, layer: int | None) -> str:
        """Return the full native name of the tensor, or of one layer of it.

        Args:
            layer: The index of the layer; `None` outside layers.
        """
        layer_prefix = "" if layer is None else f"layers.{layer}."
        return f"{self.prefix}{layer_prefix}{self.parameter}{self.suffix}"


def is_optimizer_state(name: str) -> bool:
    """Return whether a name on disk is that of an optimizer state."""
    return name.startswith(("optimizer.", "chained_"))


def parameter_of(name: str) -> str | None:
    """Extract the parameter's name from the name of an optimizer state, or return `None`."""
    match = _STATE.fullmatch(name)
    return match[2] if match else None


def native_name(name: str) -> NativeName | None:
    """Translate the name of a tensor on disk; return `None` for an unknown optimizer state.

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
        return NativeName(prefix, _OUTSIDE[parameter], suffix)
    split = _PART.fullmatch(parameter)
    parameter, part = (split[1], split[2]) if split is not None else (parameter, "")
    depth = _DEPTH.fullmatch(parameter)
    if depth is not None and depth[2] in _DEPTHS:
        native = _DEPTHS[depth[2]]
        gate_dim = _gate_dim(native.removeprefix("layer."))
        full_name = f"mtp.{int(depth[1])}.{native}"
        return NativeName(prefix, full_name, suffix, gate_dim=gate_dim, part=part)
    match = _LAYER.fullmatch(parameter)
    if match is None or match[2] not in _LAYERS:
        raise CheckpointError(f"parameter {name[:200]} does not exist in our networks")
    native = _LAYERS[match[2]]
    gate_dim = _gate_dim(native)
    layer, is_stacked = int(match[1] or 0), match[1] is None
    return NativeName(prefix, native, suffix, layer, is_stacked, gate_dim, part)


def _gate_dim(parameter: str) -> int | None:
    """Return the dimension of our tensor that separates gate and up, or `None` if none does."""
    return _GATED.get(parameter.rpartition(".")[0])


@dataclass(frozen=True)
class Location:
    """The location of one of our tensors in Megatron Core's files.

    Attributes:
        name: Megatron Core's name for the tensor that contains ours. If Core divides our tensor
            (`order`), this is the common start of the names of its tensors.
        layer: The index of our layer in the first dimension of Core's tensor, or `None` if Core's
            tensor does not stack layers.
        gate_dim: The dimension of our tensor that separates gate and up, or `None`.
        shape: The shape of our tensor.
        order: The order of rows, or `None` if it is the same as ours.
    """

    name: str
    layer: int | None
    gate_dim: int | None
    shape: tuple[int, ...]
    order: RowOrder | None = None

    def stored_boxes(self, box: Box) -> Iterator[tuple[str, Box, tuple[Any, ...]]]:
        """Yield the boxes of Megatron Core's tensors that make up a box of ours.

        Args:
            box: A box of our tensor.

        Yields:
            The name of Core's tensor, a box of it, and the index of its values in a tensor that
            covers `box`.
        """
        layer_index = () if self.layer is None else (self.layer,)
        layer_size, new_axis = (1,) * len(layer_index), (None,) * len(layer_index)
        offset, shape = list(box.offset), list(box.shape)
        if self.order is not None:
            axis = (0,) * self.order.has_axis
            for ending, first, count, ours in self.order.runs(offset[0], shape[0]):
                stored_offset = (*layer_index, first, *axis, *offset[1:])
                stored_shape = (*layer_size, *self.order.stored_shape(shape, count))
                selected = (*new_axis, ours, *(None,) * len(axis))
                yield self.name + ending, Box(stored_offset, stored_shape), selected
            return
        if self.gate_dim is None:
            stored = Box((*layer_index, *offset), (*layer_size, *shape))
            yield self.name, stored, (*new_axis, ...)
            return
        dim = self.gate_dim
        gate, rows = offset.pop(dim), offset[dim]
        gates = shape.pop(dim)
        for number in range(gates):
            offset[dim] = (gate + number) * self.shape[dim + 1] + rows
            index = (*new_axis, *(slice(None),) * dim, number)
            yield self.name, Box((*layer_index, *offset), (*layer_size, *shape)), index

    def stored_shapes(self, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each of Megatron Core's tensors that contain ours.

        Args:
            layers: The number of layers in the network.
        """
        shape, stack = self.shape, () if self.layer is None else (layers,)
        if self.order is not None:
            for ending, rows in self.order.parts:
                yield self.name + ending, (*stack, *self.order.stored_shape(shape, rows))
            return
        if self.gate_dim is not None:
            before, (parts, rows, *after) = shape[: self.gate_dim], shape[self.gate_dim :]
            shape = (*before, parts * rows, *after)
        yield self.name, (*stack, *shape)


@dataclass(frozen=True)
class NamingScheme:
    """The layout of a network's tensors in Megatron Core's files.

    Attributes:
        model: The network's flags.
        is_stacked: Whether layers share tensors, because they are all alike.
        gated: Whether up projections consist of gate and up.
        shards_states: Whether optimizer states have the names of the distributed optimizer.
        final_norm: Megatron Core's name for the last normalization.
        layers: `layer_modules` of each layer.
        depths: `layer_modules` of the layers of multi-token prediction.
    """

    model: Mapping[str, Any]
    is_stacked: bool
    gated: bool
    shards_states: bool
    final_norm: str
    layers: Sequence[Mapping[str, str]]
    depths: Mapping[str, str]

    def locate(self, name: str, shape: tuple[int, ...]) -> Location:
        """Return where one of our tensors is stored. This is the inverse of `native_name`.

        Args:
            name: The full native name of the tensor.
            shape: The shape of our tensor.

        Raises:
            CheckpointError: Megatron Core has no such tensor.
        """
        kind, _, parameter = name.partition(".")
        prefix = ""
        if kind == "optimizer":
            parameter, _, state = parameter.rpartition(".")
            core_kind = _CORE_KINDS.get(state)
            if core_kind is None:
                raise CheckpointError(
                    f"{name}: Megatron Core has no such optimizer state: convert only the weights, "
                    "without --keep-optimizer, or write the native format"
                )
            if state == MASTER and self.shards_states:
                core_kind = "param"
            prefix = f"optimizer.state.{core_kind}."
        if parameter.startswith("final_norm."):
            core_name = parameter.replace("final_norm", self.final_norm)
            return Location(prefix + core_name, None, None, shape)
        if parameter in _CORE_OUTSIDE:
            return Location(prefix + _CORE_OUTSIDE[parameter], None, None, shape)
        depth, match = _NATIVE_DEPTH.fullmatch(parameter), _NATIVE_LAYER.fullmatch(parameter)
        layer, inside, known, modules = None, "", {}, self.depths
        if depth is not None:
            stack, inside, known = f"mtp.layers.{depth[1]}.", depth[2], _CORE_DEPTHS
        elif match is not None:
            layer, inside, known = int(match[1]), match[2], _CORE_LAYERS
            modules, stack = self.layers[layer], f"decoder.layers.{layer}."
            if self.is_stacked:
                stack = "decoder.layers."
        if inside not in known:
            raise CheckpointError(f"{name}: Megatron Core's GPT has no such parameter")
        core_name, of_layer = known[inside], inside.removeprefix("layer.")
        module, _, kind = of_layer.rpartition(".")
        if module in modules:
            core_name = _core_parameter(modules[module], kind)
            core_name = f"transformer_layer.{core_name}" if depth is not None else core_name
        elif of_layer in modules:
            core_name = modules[of_layer]
        return Location(
            f"{prefix}{stack}{core_name}",
            layer if self.is_stacked else None,
            _gate_dim(of_layer) if self.gated else None,
            shape,
            row_order(self.model, of_layer, shape[0]) if shape else None,
        )
