"""Megatron's parameters under native names, and their splits and row orders in Megatron's files.

The reader supports GPT, BERT, T5 and Retro trees of v1.0 to 23.08 and of the Llama-2 fork, and the
flat trees of Megatron Core (GPT, BERT), which its `torch` format has used since 2023. The number of
a layer in a file counts from the first layer of its stage or virtual stage.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.checkpoint.core import names as core
from megatron.checkpoint.legacy.unpickler import TensorRef
from megatron.config.retriever import TOWERS
from megatron.errors import CheckpointError

KINDS = ("weight", "bias")

# Our modules with Megatron's names: first the name in 23.08, then the names in older versions, in
# the Llama-2 fork and in Megatron Core. They are listed in the order in which Megatron registers
# them. In files from Transformer Engine, a linear layer contains the weights of the normalization
# before it.
Modules = dict[str, tuple[str, ...]]
EMBEDDINGS: Modules = {
    "embedding.word": ("embedding.word_embeddings",),
    "embedding.position": ("embedding.position_embeddings",),
    "embedding.token_type": ("embedding.tokentype_embeddings",),
}
_QKV = ("self_attention.query_key_value", "attention.query_key_value")
_NORM = ("post_attention_layernorm", "post_attention_norm")
_ATTENTION: Modules = {
    "attention_norm": ("input_layernorm", "input_norm"),
    "attention.qkv": _QKV,
    "attention.output": ("self_attention.dense", "attention.dense"),
}
_MLP: Modules = {
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}
LAYER: Modules = {
    **_ATTENTION,
    "mlp_norm": _NORM,
    **_MLP,
}
# A T5's decoder layers attend to the encoder output before the MLP; some Retro layers attend
# to neighbors or chunks.
DECODER_LAYER: Modules = {
    **_ATTENTION,
    "cross_norm": _NORM,
    "cross_attention.query": ("inter_attention.query",),
    "cross_attention.key_value": ("inter_attention.key_value",),
    "cross_attention.output": ("inter_attention.dense",),
    "mlp_norm": ("post_inter_attention_layernorm", "post_inter_attention_norm"),
    **_MLP,
}
_FINAL_NORM = ("final_layernorm", "final_norm")
AFTER_LAYERS: Modules = {"pooler.dense": ("pooler.dense",), "output": ("output_layer",)}
# These are siblings of `language_model`, not inside it. The last stage's copy of tied word
# embeddings comes before them. The last three are BERT's heads for classification and multiple
# choice, and the projection of a bi-encoder's tower.
HEADS: Modules = {
    "output": ("lm_head",),
    "head.dense": ("lm_head.dense",),
    "head.norm": ("lm_head.layernorm", "lm_head.norm"),
    "binary_head": ("binary_head",),
    "classification_head": ("classification_head",),
    "multichoice_head": ("multichoice_head",),
    "projection": ("projection_enc",),
}
TIED_COPY = ("word_embeddings_for_head", "weight")
_BESIDE = dict.fromkeys(names[0].partition(".")[0] for names in HEADS.values())

_LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_LAYER_NUMBER = re.compile(r"(?:(?:en|de)coder\.)?layers\.(\d+)\.")
_LAYER_PREFIX = re.compile(r"(?:(?:encoder|decoder)\.)?layers\.\d+\.(?:retriever\.\d+\.)?")
_CROSSING = re.compile(r"(.*layers\.\d+)\.inter_attention\.")
_RETRIEVER = re.compile(r"retriever\.(?:layers\.)?(\d{1,4})\.(.+)")
_NATIVE_NAME = re.compile(
    r"(?:(encoder|decoder)\.)?(?:layers\.(\d+)\.(.+)|final_norm)\.(weight|bias)"
)
_SPLIT_OUTPUTS = {
    *("embedding.word", "output", "attention.qkv", "mlp.up"),
    *("cross_attention.query", "cross_attention.key_value"),
}
_SPLIT_INPUTS = {"attention.output", "cross_attention.output", "mlp.down"}
# An expert in a file of Megatron Core, as separate layers or as part of a grouped layer.
_EXPERT = re.compile(
    r"(.+\.mlp\.experts)\.(?:local_experts\.(\d{1,5})\.)?(linear_fc[12]\.(?:weight|bias))(\d{0,5})"
)
_EXPERT_PATH = re.compile(r"mlp\.(?:experts|shared)\.")
_UP = re.compile(r"\.mlp\.(?:experts\.|shared\.)?up\.")
_MAX_DEPTH = 2
_MAX_NAMES = 100_000


_ONLY_KIND = {"output_layer": "weight", "lm_head": "bias"}
_ONLY_KIND |= {megatron[0]: "weight" for megatron in EMBEDDINGS.values()}


def parameters_of(modules: Modules) -> dict[str, list[str]]:
    """Return Megatron's names for the parameters of modules, by native name."""
    return {
        f"{native}.{kind}": [f"{name}.{kind}" for name in megatron]
        for native, megatron in modules.items()
        for kind in KINDS
        if _ONLY_KIND.get(megatron[0], kind) == kind
    }


_OUTSIDE = parameters_of(EMBEDDINGS) | parameters_of(AFTER_LAYERS) | parameters_of(HEADS)
_READ_OUTSIDE = {megatron: native for native, names in _OUTSIDE.items() for megatron in names}
_READ_LAYERS = {
    stack: {megatron: native for native, names in modules.items() for megatron in names}
    for stack, modules in (("encoder", LAYER), ("decoder", DECODER_LAYER))
}


# Our modules around the layers with Megatron Core's names, in the order in which it registers them.
CORE_EMBEDDINGS: Modules = {
    "embedding.word": ("embedding.word_embeddings",),
    "embedding.position": ("embedding.position_embeddings",),
    "embedding.token_type": ("embedding.tokentype_embeddings",),
}
CORE_HEADS: Modules = {"final_norm": ("decoder.final_layernorm",), "output": ("output_layer",)}
CORE_BERT_HEADS: Modules = {
    "final_norm": ("encoder.final_layernorm",),
    "head.dense": ("lm_head.dense",),
    "head.norm": ("lm_head.layer_norm",),
    "output": ("output_layer",),
    "binary_head": ("binary_head",),
    "pooler.dense": ("pooler.dense",),
}
_BERT_IN_CORE = {
    f"{core}.{kind}": f"{native}.{kind}"
    for native, (core,) in (CORE_EMBEDDINGS | CORE_BERT_HEADS).items()
    for kind in KINDS
}


@dataclass(frozen=True)
class Parameter:
    """A parameter in a file.

    Attributes:
        name: The native name; None for a later stage's copy of an embedding.
        tensor: Reference to the values.
        is_decayed: Whether Megatron applies weight decay to the parameter.
        expert: The index of the expert in the file, if the parameter belongs to an expert.
    """

    name: str | None
    tensor: TensorRef
    is_decayed: bool
    expert: int | None = None


def is_core(model: Any) -> bool:
    """Return whether a file's `model` is in Megatron Core's layout: one flat dict of all names."""
    tops = ("decoder.", "embedding.", "encoder.")
    return isinstance(model, dict) and any(str(key).startswith(tops) for key in model)


def towers_of(model: Any) -> list[str]:
    """Return the names of the towers in a file's `model`, in Megatron's order; [] if it has none.

    A bi-encoder's tree contains the tree of a BERT model for each tower.
    """
    return [tower for tower in TOWERS if isinstance(model, dict) and tower in model]


def architecture_of(models: Iterable[Any]) -> str:
    """Return the `ModelConfig.architecture` of the network that these trees describe.

    Raises:
        CheckpointError: The network is a T5 of Megatron Core or of another unsupported kind.
    """
    trees = [model for model in models if isinstance(model, dict)]
    stacks = {str(key).partition(".")[0] for model in trees if is_core(model) for key in model}
    if {"encoder", "decoder"} <= stacks:
        raise CheckpointError(
            "a T5 of Megatron Core, which is not supported: only GPTs and BERTs are"
        )
    if "encoder" in stacks:
        return "bert"
    if any(map(towers_of, trees)):
        return "ict"
    keys = {key for model in trees for key in model}
    for language in (model.get("language_model") for model in trees):
        keys |= set(language) if isinstance(language, dict) else set()
    if "decoder" in keys:
        return "t5"
    if any(_cross_attention_paths(_flatten_nested(tree)) for tree in trees if not is_core(tree)):
        return "retro"
    return "bert" if keys & {"lm_head", "pooler"} else "gpt"


def list_parameters(
    model: Any, first: Mapping[str, int], architecture: str, *, tied: bool, is_first: bool
) -> list[Parameter]:
    """Return the parameters of a file's `model`, in the order in which Megatron registers them.

    Args:
        model: The tree under the key `model`.
        first: The index of the stage's first layer in each stack, `encoder` and `decoder`.
        architecture: The kind of network, from `architecture_of`.
        tied: Whether the output shares the word embeddings.
        is_first: Whether the file belongs to the first stage. On other stages, embeddings are
            copies.

    Raises:
        CheckpointError: The kind of network is not supported, the name of a tensor is unknown, or
            an entry is not a tensor.
    """
    parameters: list[Parameter] = []
    if towers := towers_of(model):
        for tower in towers:
            tower_parameters = list_parameters(
                model[tower], first, architecture, tied=tied, is_first=is_first
            )
            parameters += [
                replace(parameter, name=f"{tower}.{parameter.name}")
                for parameter in tower_parameters
            ]
        return parameters
    is_flat = is_core(model)
    leaves = list(_flatten(model, "") if is_flat else _flatten_nested(model))
    crossing = _cross_attention_paths(leaves)
    for path, value in leaves:
        # Some entries are derived from the flags: fp8 scales, rotary frequencies.
        if path.endswith(("_extra_state", "inv_freq")):
            continue
        if not isinstance(value, TensorRef):
            raise CheckpointError(f"{path} is not a tensor")
        name: str | None
        expert = None
        if is_flat:
            name, expert = _name_in_core(path, first["encoder"], is_bert=architecture == "bert")
            if tied and name == "output.weight":
                name = None
        else:
            try:
                name = native_name(
                    path,
                    first,
                    has_decoder=architecture == "t5",
                    is_first=is_first,
                    crossing=crossing,
                )
            except KeyError:
                problem = f"parameter {path} does not exist in our {architecture}"
                if ".mlp.router." in path or ".mlp.local_experts." in path:
                    problem += ": of mixtures of experts, only Megatron Core's are read"
                raise CheckpointError(problem) from None
        is_decayed = not path.endswith("bias") and len(value.shape) > 1
        parameters.append(Parameter(name, value, is_decayed, expert))
    return parameters


def _name_in_core(path: str, first: int, *, is_bert: bool) -> tuple[str, int | None]:
    """Return the native name of a parameter of Megatron Core, and the index of its expert, if any.

    Args:
        path: Megatron Core's name. Its layers and experts are numbered within the file.
        first: The index of the stage's first layer.
        is_bert: Whether the network is a BERT, whose layers Megatron Core calls its encoder.

    Raises:
        CheckpointError: Our networks have no such parameter.
    """
    if is_bert and path in _BERT_IN_CORE:
        return _BERT_IN_CORE[path], None
    if is_bert and path.startswith("encoder."):
        path = f"decoder.{path.removeprefix('encoder.')}"
    match, expert = _EXPERT.fullmatch(path), None
    if match is not None:
        expert = int(match[2] or match[4] or 0)
        path = f"{match[1]}.experts.{match[3]}"
    native = core.native_name(path)
    if native is None or native.prefix != "model." or native.is_stacked:
        raise CheckpointError(f"parameter {path[:200]} does not belong to a layer")
    name = native.name(None if native.layer is None else first + native.layer)
    return name.removeprefix("model."), expert


def _flatten_nested(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, leaf) for a tree older than Megatron Core, in a fixed order.

    Raises:
        CheckpointError: The tree is not that of a supported model.
    """
    if not isinstance(model, dict) or not isinstance(model.get("language_model"), dict):
        problem = "not a GPT, BERT, T5 or Retro file of Megatron-LM up to 23.08"
        raise CheckpointError(f"no `language_model`: {problem}")
    language = model["language_model"]
    language_keys = ("embedding", "encoder", "decoder", "pooler", "output_layer")
    model_keys = (TIED_COPY[0], *_BESIDE)
    unknown = sorted(
        {*model, *language} - {"language_model", "transformer", *language_keys, *model_keys}
    )
    if unknown:
        names = ", ".join(unknown)
        raise CheckpointError(
            f"it contains {names}: only GPT, BERT, T5 and Retro files are supported"
        )
    language = {"encoder": language.get("transformer", {}), **language}
    for tree, tops in ((language, language_keys), (model, model_keys)):
        for top in tops:
            yield from _flatten(tree.get(top, {}), top)


def _flatten(tree: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, leaf) for nested dicts, refusing trees deeper than any model's."""
    if not isinstance(tree, dict):
        yield path, tree
        return
    if depth == _MAX_DEPTH or len(tree) > _MAX_NAMES:
        raise CheckpointError(f"{path} has more entries than any model")
    for key, value in tree.items():
        if type(key) is not str:
            raise CheckpointError(f"{path} contains a name that is not a string")
        yield from _flatten(value, f"{path}.{key}" if path else key, depth + 1)


def _cross_attention_paths(leaves: Iterable[tuple[str, Any]]) -> set[str]:
    """Return the paths of the layers with cross-attention."""
    matches = (_CROSSING.match(path) for path, _ in leaves)
    return {match[1] for match in matches if match}


def native_name(
    path: str,
    first: Mapping[str, int],
    *,
    has_decoder: bool,
    is_first: bool,
    crossing: Collection[str] = (),
) -> str | None:
    """Return the native name of a parameter, or None for a later stage's copy of an embedding.

    Args:
        path: Megatron's name.
        first: The index of the stage's first layer in each stack.
        has_decoder: Whether the network is a T5, with a stack of encoder layers and one of decoder
            layers.
        is_first: Whether the file belongs to the first stage.
        crossing: The paths of the layers with cross-attention.

    Raises:
        KeyError: Our networks have no such parameter.
    """
    top, _, rest = path.partition(".")
    if top == TIED_COPY[0]:
        return None
    if path in _READ_OUTSIDE:
        return _READ_OUTSIDE[path] if is_first or top != "embedding" else None
    stack = f"{top}." if has_decoder else ""
    module, _, kind = rest.rpartition(".")
    if module in _FINAL_NORM and kind in KINDS:
        return f"{stack}final_norm.{kind}"
    match = _LAYER_NAME.fullmatch(rest)
    if match is None:
        raise KeyError(path)
    layer, part, kind = match.groups()
    megatron_prefix, native_prefix = (
        f"{top}.layers.{layer}",
        f"{stack}layers.{first[top] + int(layer)}",
    )
    inner = _RETRIEVER.fullmatch(part)
    if inner is not None:
        number, part = inner.groups()
        megatron_prefix, native_prefix = (
            f"{megatron_prefix}.retriever.layers.{number}",
            f"{native_prefix}.retriever.{number}",
        )
    modules = _READ_LAYERS[
        "decoder" if top == "decoder" or megatron_prefix in crossing else "encoder"
    ]
    return f"{native_prefix}.{modules[part]}.{kind}"


def megatron_path(name: str, first_layer: int, *, crosses: bool = False) -> tuple[str, ...]:
    """Return the keys that lead to a parameter in a file's `model` in Megatron 23.08.

    Args:
        name: The native name of the parameter, which must exist in Megatron.
        first_layer: The index of the stage's first layer.
        crosses: Whether the parameter belongs to a layer with cross-attention.
    """
    match = _NATIVE_NAME.fullmatch(name)
    if match:
        stack, layer, part, kind = match.groups()
        stack, module = stack or "encoder", _FINAL_NORM[0]
        table = DECODER_LAYER if stack == "decoder" or crosses else LAYER
        if layer is not None:
            inner, prefix = _RETRIEVER.fullmatch(part), ""
            if inner is not None:
                prefix, part = f"retriever.layers.{inner[1]}.", inner[2]
            module = f"layers.{int(layer) - first_layer}.{prefix}{table[part][0]}"
        return ("language_model", stack, f"{module}.{kind}")
    path = _OUTSIDE[name][0]
    top, _, rest = path.partition(".")
    if top == "embedding":
        return ("language_model", *path.split("."))
    return (top, rest) if top in _BESIDE else ("language_model", top, rest)


def count_layers(model: Any) -> Counter[str]:
    """Return the number of layers in a file's `model`, or in its first tower, by stack."""
    for tower in towers_of(model)[:1]:
        return count_layers(model[tower])
    if is_core(model):
        stacks = {"encoder": model}
    else:
        language = model.get("language_model", {}) if isinstance(model, dict) else {}
        encoder = language.get("encoder", language.get("transformer", {}))
        stacks = {"encoder": encoder, "decoder": language.get("decoder", {})}
    counts = Counter[str]()
    for stack, paths in stacks.items():
        matches = (_LAYER_NUMBER.match(str(path)) for path in paths)
        counts[stack] = len({match.group(1) for match in matches if match})
    return counts


@dataclass(frozen=True)
class Arrangement:
    """The rules for converting Megatron's row orders and splits to ours.

    Attributes:
        version: The file's `checkpoint_version`.
        heads: Number of attention heads in one tensor-parallel shard.
        gated: Whether the up projection consists of gate and up.
    """

    version: float
    heads: int
    gated: bool

    def arrange(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a tensor-parallel shard of a parameter or optimizer state to our order.

        Raises:
            RuntimeError: The rows cannot be divided among the heads, or among gate and up.
        """
        if ".attention.qkv." in name and self.version < 2:
            return self._rows_by_head(tensor, 3)
        if ".cross_attention.key_value." in name and self.version < 2:
            return self._rows_by_head(tensor, 2)
        if _UP.search(name) and self.gated:
            return tensor.unflatten(0, (2, -1))  # [2, f/t, h]: gate, up
        return tensor

    def flatten(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undo `arrange` for version 2.0 and later. Experts are not supported."""
        assert self.version >= 2, self.version
        return tensor.flatten(0, 1) if ".mlp.up." in name and self.gated else tensor

    def _rows_by_head(self, tensor: torch.Tensor, kinds: int) -> torch.Tensor:
        """Group the rows of (query,) key and value by head, as in version 2.0 and later."""
        if self.version == 0:
            split = tensor.unflatten(0, (kinds, self.heads, -1)).transpose(0, 1)
        else:
            split = tensor.unflatten(0, (self.heads, -1, kinds)).transpose(1, 2)
        return split.flatten(0, 2)

    def split_dim(self, name: str) -> int | None:
        """Return the dimension that tensor-parallel ranks split, or None if each has a full copy.

        Args:
            name: The native name of the parameter.

        Returns:
            A dimension of our tensor, as `arrange` returns it.
        """
        module, _, kind = _LAYER_PREFIX.sub("", name).rpartition(".")
        module = _EXPERT_PATH.sub("mlp.", module)
        if module in _SPLIT_OUTPUTS:
            return 1 if module == "mlp.up" and self.gated else 0
        return 1 if module in _SPLIT_INPUTS and kind == "weight" else None
