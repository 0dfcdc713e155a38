"""Where Megatron-LM 23.08 keeps every parameter: which file, under which name, which part of it.

A plan, as data. The order of a file's parameters is that in which Megatron registers them, by
which its optimizer numbers them.

Where a T5's decoder begins on a later stage (`--pipeline-model-parallel-split-rank`) that stage has
a copy of all embeddings, and the last one a copy of the word embeddings for the output, unless it
is that stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.checkpoint.entries import Box
from megatron.checkpoint.legacy.names import Arrangement, megatron_path
from megatron.config.stages import ModelPart, megatron_misfit, parts_of_stage
from megatron.errors import CheckpointError

VERSION = 3.0  # `checkpoint_version` of what is written
_WORDS = "embedding.word.weight"
_VOCABULARY = (_WORDS, "output.weight", "output.bias")
_TIED = "(tied)"
_TIED_PATH = ("word_embeddings_for_head", "weight")
_ENCODER_LAYER = re.compile(r"encoder\.layers\.\d+\.attention_norm\.weight")  # one of each

# In the order of registration; those that a model lacks are left out.
_BEFORE_LAYERS = (
    "embedding.word.weight",
    "embedding.position.weight",
    "embedding.token_type.weight",
)
_ATTENTION = ("attention_norm", "attention.qkv", "attention.output")
_MLP = ("mlp_norm", "mlp.up", "mlp.down")
_CROSS = (
    "cross_norm",
    "cross_attention.query",
    "cross_attention.key_value",
    "cross_attention.output",
)
_KINDS = ("weight", "bias")
_IN_LAYER = {
    "": (*_ATTENTION, *_MLP),
    "encoder.": (*_ATTENTION, *_MLP),
    "decoder.": (*_ATTENTION, *_CROSS, *_MLP),
}
_AFTER_LAYERS = (
    "pooler.dense.weight",
    "pooler.dense.bias",
    "output.weight",
)
# Here the last stage has its copy of tied word embeddings.
_LAST = (
    "output.bias",
    "head.dense.weight",
    "head.dense.bias",
    "head.norm.weight",
    "head.norm.bias",
    "binary_head.weight",
    "binary_head.bias",
    "classification_head.weight",
    "classification_head.bias",
    "multichoice_head.weight",
    "multichoice_head.bias",
)


@dataclass(frozen=True)
class FileParameter:
    """A parameter in a file.

    Attributes:
        path: keys under `model`, outermost first.
        name: ours.
        box: the part of ours that the file holds.
    """

    path: tuple[str, ...]
    name: str
    box: Box

    @property
    def is_decayed(self) -> bool:
        """Whether Megatron applies weight decay to it: matrices, but no bias."""
        return not self.path[-1].endswith("bias") and len(self.box.shape) > 1


@dataclass(frozen=True)
class FilePlan:
    """One rank's file.

    Attributes:
        folder: `mp_rank_TT` or `mp_rank_TT_PPP`.
        tensor_rank: which tensor-parallel part.
        stage: which pipeline stage.
        chunks: parameters of each of the stage's virtual stages.
    """

    folder: str
    tensor_rank: int
    stage: int
    chunks: tuple[tuple[FileParameter, ...], ...]

    def slots(self) -> list[FileParameter]:
        """All of them, in the optimizer's order: decayed ones first."""
        found = [slot for chunk in self.chunks for slot in chunk]
        return sorted(found, key=lambda slot: not slot.is_decayed)


def plan_files(
    shapes: Mapping[str, tuple[int, ...]],
    parts: Sequence[ModelPart],
    *,
    tensor: int,
    stages: int,
    swiglu: bool,
) -> list[FilePlan]:
    """The files of a checkpoint, by stage and tensor rank.

    Args:
        shapes: of all parameters, by our names without "model.".
        parts: the model's, first to last; of every stage equally many, of equal size.
        tensor: tensor-parallel ranks.
        stages: pipeline stages.
        swiglu: the up projections hold gate and up.

    Raises:
        CheckpointError: a parameter has no place in Megatron's model, or cannot be split so.
    """
    _check(shapes, parts, stages)
    arrangement = Arrangement(VERSION, heads=0, swiglu=swiglu)
    plans = []
    for stage in range(stages):
        for rank in range(tensor):
            chunks = tuple(
                tuple(_slots(shapes, part, arrangement, rank, tensor))
                for part in parts_of_stage(list(parts), stage, stages)
            )
            folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            plans.append(FilePlan(folder, rank, stage, chunks))
    return plans


def _check(shapes: Mapping[str, tuple[int, ...]], parts: Sequence[ModelPart], stages: int) -> None:
    placed = {name for part in parts for name in _names(shapes, part)}
    extra = sorted(shapes.keys() - placed)
    if extra:
        raise CheckpointError(
            f"{extra[0]} has no place in a model of Megatron-LM 23.08: use the native format"
        )
    if "layers.0.attention.qkv.bias" in shapes and "layers.0.mlp.up.bias" not in shapes:
        raise CheckpointError(
            "--add-qkv-bias: Megatron-LM 23.08 has biases in all linear layers or in none: use the "
            "native format"
        )
    encoder = _encoder_layers(shapes)
    misfit = megatron_misfit(list(parts), stages, encoder or None)
    if misfit:
        remedy = "use the native format"
        if encoder:
            remedy = f"convert with another --target-pipeline-parallel-split-rank, or {remedy}"
        raise CheckpointError(f"Megatron-LM 23.08 {misfit}: {remedy}")


def _names(shapes: Mapping[str, tuple[int, ...]], part: ModelPart) -> Iterator[str]:
    """All that could stand in a part of a model, in Megatron's order; _TIED for the copy."""
    encoder = _encoder_layers(shapes)
    has_embedding = part.embedding or (encoder > 0 and part.layers.start == encoder)
    if has_embedding:
        yield from _BEFORE_LAYERS
    for stack, (layers, ends) in _stacks(shapes, part).items():
        modules = [f"layers.{index}.{name}" for index in layers for name in _IN_LAYER[stack]]
        modules += ["final_norm"] * ends
        yield from (f"{stack}{module}.{kind}" for module in modules for kind in _KINDS)
    if part.head:
        yield from _AFTER_LAYERS
        if not has_embedding:
            yield _TIED
        yield from _LAST


def _encoder_layers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of a T5; 0 of the others."""
    return sum(_ENCODER_LAYER.fullmatch(name) is not None for name in shapes)


def _stacks(
    shapes: Mapping[str, tuple[int, ...]], part: ModelPart
) -> dict[str, tuple[range, bool]]:
    """By what our names of a part's layers begin with: their numbers, and whether the last of the
    stack is among them. A T5 has two stacks."""
    encoder = _encoder_layers(shapes)
    if not encoder:
        return {"": (part.layers, part.head)}
    of_encoder, of_decoder = part.halves(encoder)
    ends = encoder - 1 in of_encoder
    return {"encoder.": (of_encoder, ends), "decoder.": (of_decoder, part.head)}


def _slots(
    shapes: Mapping[str, tuple[int, ...]],
    part: ModelPart,
    arrangement: Arrangement,
    rank: int,
    ranks: int,
) -> Iterator[FileParameter]:
    stacks = _stacks(shapes, part)
    for name in _names(shapes, part):
        if name == _TIED and "output.weight" not in shapes:
            yield FileParameter(
                _TIED_PATH, _WORDS, _box(_WORDS, shapes[_WORDS], arrangement, rank, ranks)
            )
        elif name in shapes:
            starts = [found[0].start for stack, found in stacks.items() if name.startswith(stack)]
            path = megatron_path(name, *starts or [0])
            yield FileParameter(path, name, _box(name, shapes[name], arrangement, rank, ranks))


def _box(name: str, shape: tuple[int, ...], arrangement: Arrangement, rank: int, ranks: int) -> Box:
    """The part of a parameter that a tensor-parallel rank holds."""
    dim = arrangement.split_dim(name)
    if dim is None:
        return Box.whole(shape)
    size, left = divmod(shape[dim], ranks)
    if left:
        or_else = ""
        if name in _VOCABULARY:
            or_else = ", or --true-vocab-size (or the tokenizer's files): rows are padded then"
        raise CheckpointError(
            f"{name} {list(shape)} does not split among {ranks} tensor-parallel ranks: give "
            "--target-tensor-parallel-size (of a run: --tensor-model-parallel-size) a number that "
            f"divides {shape[dim]}{or_else}"
        )
    offset, part = [0] * len(shape), list(shape)
    offset[dim], part[dim] = rank * size, size
    return Box(tuple(offset), tuple(part))
