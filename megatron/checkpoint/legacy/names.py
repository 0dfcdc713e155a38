"""Megatron's parameters by our names, and how its files split and order them.

Read are GPT, BERT and T5 trees of v1.0 to 23.08 and of the Llama-2 fork, and by `core_names` flat
ones of Megatron Core (GPT); a layer's number in a file counts from the first layer of its stage, or
of its virtual stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.legacy.unpickler import TensorRef
from megatron.errors import CheckpointError

_CORE_TIED_COPY = "output_layer.weight"  # on the last stage, where the word embeddings are tied

_CORE_WHOLE = {
    "embedding.word_embeddings.weight": "embedding.word.weight",
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "output_layer.weight": "output.weight",
    "decoder.final_layernorm.weight": "final_norm.weight",
    "decoder.final_layernorm.bias": "final_norm.bias",
}
_CORE_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_CORE_LINEAR = {
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
    "input_layernorm": "attention_norm",
    "pre_mlp_layernorm": "mlp_norm",
}
_CORE_PARTS = {
    f"{theirs}.{kind}": f"{ours}.{kind}"
    for theirs, ours in _CORE_LINEAR.items()
    for kind in ("weight", "bias")
} | {
    f"{linear}.layer_norm_{kind}": f"{norm}.{kind}"
    for linear, norm in (
        ("self_attention.linear_qkv", "attention_norm"),
        ("mlp.linear_fc1", "mlp_norm"),
    )
    for kind in ("weight", "bias")
}


def _is_core_state(path: str) -> bool:
    """Whether an entry is state that follows from the flags: fp8 scales, rotary frequencies."""
    return path.endswith(("_extra_state", "inv_freq"))


def _our_core_name(path: str, first_layer: int, *, tied: bool) -> str | None:
    """Our name; None for the copy of tied word embeddings that the last stage holds.

    Raises:
        CheckpointError: our GPT has no such parameter.
    """
    if path == _CORE_TIED_COPY and tied:
        return None
    if path in _CORE_WHOLE:
        return _CORE_WHOLE[path]
    match = _CORE_LAYER.fullmatch(path)
    if match and match.group(2) in _CORE_PARTS:
        return f"layers.{first_layer + int(match.group(1))}.{_CORE_PARTS[match.group(2)]}"
    raise CheckpointError(f"parameter {path} has no place in our GPT")


def _core_layers(paths: list[str]) -> int:
    """How many layers the entries are of."""
    matches = (_CORE_LAYER.fullmatch(path) for path in paths)
    return len({match.group(1) for match in matches if match})


_EMBEDDINGS = {
    "word_embeddings.weight": "embedding.word.weight",
    "position_embeddings.weight": "embedding.position.weight",
    "tokentype_embeddings.weight": "embedding.token_type.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_LAYER_PARTS = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.dense": "attention.output",
    "attention.query_key_value": "attention.qkv",
    "attention.dense": "attention.output",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
# In front of its MLP a decoder's layer has its attention to the encoder.
_DECODER_PARTS = _LAYER_PARTS | {
    "post_attention_layernorm": "cross_norm",
    "post_attention_norm": "cross_norm",
    "inter_attention.query": "cross_attention.query",
    "inter_attention.key_value": "cross_attention.key_value",
    "inter_attention.dense": "cross_attention.output",
    "post_inter_attention_layernorm": "mlp_norm",
    "post_inter_attention_norm": "mlp_norm",
}
_HEADS = {
    "output_layer.weight": "output.weight",
    "pooler.dense.weight": "pooler.dense.weight",
    "pooler.dense.bias": "pooler.dense.bias",
    "lm_head.bias": "output.bias",
    "lm_head.dense.weight": "head.dense.weight",
    "lm_head.dense.bias": "head.dense.bias",
    "lm_head.layernorm.weight": "head.norm.weight",
    "lm_head.layernorm.bias": "head.norm.bias",
    "lm_head.norm.weight": "head.norm.weight",
    "lm_head.norm.bias": "head.norm.bias",
    "binary_head.weight": "binary_head.weight",
    "binary_head.bias": "binary_head.bias",
    # of its tasks: BERT that chooses among classes, or among texts
    "classification_head.weight": "classification_head.weight",
    "classification_head.bias": "classification_head.bias",
    "multichoice_head.weight": "multichoice_head.weight",
    "multichoice_head.bias": "multichoice_head.bias",
}
_FINAL = {
    f"final_{norm}.{kind}": f"final_norm.{kind}"
    for norm in ("layernorm", "norm")
    for kind in ("weight", "bias")
}
_COLUMN = re.compile(
    r"embedding\.word\.weight|output\.(weight|bias)|((en|de)coder\.)?layers\.\d+\."
    r"(attention\.qkv|cross_attention\.query|cross_attention\.key_value|mlp\.up)\.(weight|bias)"
)
_ROW = re.compile(
    r"((en|de)coder\.)?layers\.\d+\.(attention\.output|cross_attention\.output|mlp\.down)\.weight"
)

_BESIDE = (
    "lm_head",
    "binary_head",
    "classification_head",
    "multichoice_head",
)  # beside `language_model`, not in it
_MAX_CHUNKS = 1000
_MAX_DEPTH = 2
_MAX_NAMES = 100_000


@dataclass(frozen=True)
class Parameter:
    """A parameter of a file, in Megatron's order.

    Attributes:
        name: ours; None for the copy of tied word embeddings that the last stage holds.
        tensor: where its values are.
        is_bias: Megatron's name ends in `.bias`.
    """

    name: str | None
    tensor: TensorRef
    is_bias: bool

    @property
    def is_decayed(self) -> bool:
        """Whether Megatron applies weight decay to it."""
        return not self.is_bias and len(self.tensor.shape) > 1


def chunks_of_tree(tree: Mapping[str, Any]) -> list[Any]:
    """What stands under `model`, or with virtual stages under `model0`, `model1`, ..."""
    if "model0" not in tree:
        return [tree.get("model")]
    numbered = (tree.get(f"model{index}") for index in range(_MAX_CHUNKS))
    return list(takewhile(lambda chunk: chunk is not None, numbered))


def is_core(tree: Mapping[str, Any]) -> bool:
    """Whether a file is Megatron Core's: names in one flat dict."""
    model = chunks_of_tree(tree)[0]
    return isinstance(model, dict) and any(
        str(key).startswith(("decoder.", "embedding.")) for key in model
    )


def architecture_of(models: Iterable[Any]) -> str:
    """The kind of network that trees are parts of, see `ModelConfig.architecture`."""
    trees = [model for model in models if isinstance(model, dict)]
    keys = {key for model in trees for key in model}
    for language in (model.get("language_model") for model in trees):
        keys |= set(language) if isinstance(language, dict) else set()
    if "decoder" in keys:
        return "t5"
    return "bert" if keys & {"lm_head", "pooler"} else "gpt"


class FirstLayers(NamedTuple):
    """Numbers of a stage's first layer in a GPT, a BERT or a T5's encoder, and in its decoder."""

    encoder: int
    decoder: int = 0


def list_parameters(
    model: Any,
    first: FirstLayers,
    *,
    architecture: str = "gpt",
    tied: bool = True,
    is_first: bool = True,
) -> list[Parameter]:
    """The parameters of a file's `model`, in the order in which Megatron registers them.

    Args:
        model: the tree under the key `model`.
        first: where the stage's layers begin.
        architecture: see `architecture_of`.
        tied: the output shares the word embeddings.
        is_first: of the first stage; embeddings elsewhere are copies.

    Raises:
        CheckpointError: it is of another kind, or a tensor has a name that is not known.
    """
    if is_core({"model": model}):
        return [
            Parameter(
                _our_core_name(path, first.encoder, tied=tied),
                _tensor(value, path),
                is_bias=path.endswith("bias"),
            )
            for path, value in _flatten(model, "")
            if not _is_core_state(path)
        ]
    if not isinstance(model, dict) or not isinstance(model.get("language_model"), dict):
        raise CheckpointError(
            "no `language_model`: not a GPT, BERT or T5 file of Megatron-LM up to 23.08"
        )
    language = model["language_model"]
    extra = sorted({*model, *language} - _KNOWN_KEYS)
    if extra:
        raise CheckpointError(
            f"it holds {', '.join(extra)}: GPT, BERT and T5 files are read so far"
        )
    return [
        Parameter(name, tensor, is_bias=path.endswith(".bias"))
        for path, tensor in _tensors(model, language)
        for name in [_our_name(path, first, architecture, is_first=is_first)]
    ]


_KNOWN_KEYS = {
    "language_model",
    "word_embeddings_for_head",
    "embedding",
    "encoder",
    "transformer",
    "decoder",
    "pooler",
    "output_layer",
    *_BESIDE,
}


def _tensors(
    model: Mapping[str, Any], language: Mapping[str, Any]
) -> Iterator[tuple[str, TensorRef]]:
    """Megatron's path of each tensor, without the parts that differ between versions."""
    encoder = language.get("encoder", language.get("transformer", {}))
    trees = {
        "embedding": language.get("embedding", {}),
        "encoder": encoder,
        "decoder": language.get("decoder", {}),
        "pooler": language.get("pooler", {}),
        "output_layer": language.get("output_layer", {}),
        "word_embeddings_for_head": model.get("word_embeddings_for_head", {}),
        **{top: model.get(top, {}) for top in _BESIDE},
    }
    for top, tree in trees.items():
        for path, value in _flatten(tree, top):
            if path.endswith("inv_freq"):
                continue  # rotary frequencies follow from the flags
            yield path, _tensor(value, path)


def _tensor(value: Any, path: str) -> TensorRef:
    if not isinstance(value, TensorRef):
        raise CheckpointError(f"{path} is no tensor")
    return value


def _flatten(tree: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts by dotted path; at most two levels, and as many as a model has."""
    if not isinstance(tree, dict):
        yield path, tree
        return
    if depth == _MAX_DEPTH or len(tree) > _MAX_NAMES:
        raise CheckpointError(f"{path} holds more than a model does")
    for key, value in tree.items():
        if type(key) is not str:
            raise CheckpointError(f"{path} holds a name that is no text")
        yield from _flatten(value, f"{path}.{key}" if path else key, depth + 1)


def _our_name(path: str, first: FirstLayers, architecture: str, *, is_first: bool) -> str | None:
    top, _, rest = path.partition(".")
    if top == "word_embeddings_for_head":
        return None
    if path in _HEADS:
        return _HEADS[path]
    if top == "embedding" and rest in _EMBEDDINGS:
        return _EMBEDDINGS[rest] if is_first else None
    stack = f"{top}." if architecture == "t5" else ""
    if rest in _FINAL:
        return stack + _FINAL[rest]
    match = _LAYER.fullmatch(rest)
    known = _DECODER_PARTS if top == "decoder" else _LAYER_PARTS
    if match and match.group(2) in known:
        layer, part, kind = match.groups()
        start = first.decoder if top == "decoder" else first.encoder
        return f"{stack}layers.{start + int(layer)}.{known[part]}.{kind}"
    raise CheckpointError(f"parameter {path} has no place in our {architecture}")


_PATHS = {  # keys under which Megatron 23.08 keeps what stands outside the layers
    **{
        ours: ("language_model", "embedding", *theirs.split("."))
        for theirs, ours in _EMBEDDINGS.items()
    },
    **{
        ours: (*(() if head in _BESIDE else ("language_model",)), head, rest)
        for theirs, ours in _HEADS.items()
        for head, _, rest in [theirs.partition(".")]
        if not rest.startswith("norm.")
    },
}
_STACKED = re.compile(r"(?:(encoder|decoder)\.)?(?:layers\.(\d+)\.(.+)|final_norm)\.(weight|bias)")


def _written(parts: Mapping[str, str]) -> dict[str, str]:
    """Our modules of a layer, with their names in 23.08."""
    return {
        ours: theirs
        for theirs, ours in parts.items()
        if not theirs.startswith("attention.") and not theirs.endswith("_norm")
    }


_WRITTEN = {"encoder": _written(_LAYER_PARTS), "decoder": _written(_DECODER_PARTS)}


def megatron_path(name: str, first_layer: int) -> tuple[str, ...]:
    """The keys under which Megatron 23.08 keeps one of our parameters in a file's `model`.

    Args:
        name: one that Megatron has.
        first_layer: number of the stage's first layer.
    """
    if name in _PATHS:
        return _PATHS[name]
    match = _STACKED.fullmatch(name)
    assert match, name
    stack, layer, module, kind = match.groups()
    stack = stack or "encoder"
    if layer is None:
        return ("language_model", stack, f"final_layernorm.{kind}")
    local = f"layers.{int(layer) - first_layer}.{_WRITTEN[stack][module]}.{kind}"
    return ("language_model", stack, local)


def count_layers(model: Any) -> FirstLayers:
    """Layers that a file's `model` holds: what it moves the next stage's first layers by."""
    if is_core({"model": model}):
        return FirstLayers(_core_layers(list(model)))
    language = model.get("language_model", {}) if isinstance(model, dict) else {}
    encoder = language.get("encoder", language.get("transformer", {}))
    return FirstLayers(_count(encoder), _count(language.get("decoder", {})))


def _count(stack: Iterable[Any]) -> int:
    matches = (_LAYER.fullmatch(str(path)) for path in stack)
    return len({match.group(1) for match in matches if match})


@dataclass(frozen=True)
class Arrangement:
    """How Megatron's rows become ours.

    Attributes:
        version: the file's `checkpoint_version`.
        heads: attention heads in one tensor-parallel part.
        swiglu: the up projection holds gate and up.
    """

    version: float
    heads: int
    swiglu: bool

    def arrange(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor-parallel part of parameter `name`, or of its optimizer state, as ours."""
        if ".attention.qkv." in name and self.version < 2:
            return self._rows_by_head(tensor, 3)
        if ".cross_attention.key_value." in name and self.version < 2:
            return self._rows_by_head(tensor, 2)
        if ".mlp.up." in name and self.swiglu:
            return tensor.unflatten(0, (2, -1))  # [2, f/t, h]: gate, up
        return tensor

    def flatten(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The reverse of `arrange` for version 2.0 and later."""
        assert self.version >= 2, self.version
        return tensor.flatten(0, 1) if ".mlp.up." in name and self.swiglu else tensor

    def _rows_by_head(self, tensor: torch.Tensor, kinds: int) -> torch.Tensor:
        """Rows of each head's (query,) key and value together, as since version 2.0."""
        if self.version == 0:
            split = tensor.unflatten(0, (kinds, self.heads, -1)).transpose(0, 1)
        else:
            split = tensor.unflatten(0, (self.heads, -1, kinds)).transpose(1, 2)
        return split.flatten(0, 2)

    def split_dim(self, name: str) -> int | None:
        """The dimension (of ours) that tensor ranks split; None where each holds all of it."""
        if ".mlp.up." in name and self.swiglu:
            return 1
        if _COLUMN.fullmatch(name):
            return 0
        return 1 if _ROW.fullmatch(name) else None
