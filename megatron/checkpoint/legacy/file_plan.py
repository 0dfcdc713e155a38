"""Plan where Megatron-LM 23.08 keeps every parameter: which file, which name, which part of it.

The order of a file's parameters is that in which Megatron registers them, by which its optimizer
numbers them. If a T5's decoder begins on a later stage (`--pipeline-model-parallel-split-rank`),
that stage has a copy of all embeddings, and the last one has a copy of the word embeddings for the
output, unless it is that stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.checkpoint.entries import Box
from megatron.checkpoint.legacy import names
from megatron.config.stages import ModelPart, megatron_misfit, parts_of_stage
from megatron.errors import CheckpointError

VERSION = 3.0  # `checkpoint_version` of what is written
_WORDS = "embedding.word.weight"
_VOCABULARY = (_WORDS, "output.weight", "output.bias")
_TIED = "(tied)"
_ENCODER_LAYER = re.compile(r"encoder\.layers\.\d+\.attention_norm\.weight")  # one of each

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class FileParameter:
    """A parameter in a file.

    Attributes:
        path: Keys under `model`, outermost first.
        name: Our name.
        box: The part of ours that the file holds.
    """

    path: tuple[str, ...]
    name: str
    box: Box

    @property
    def is_decayed(self) -> bool:
        """Whether Megatron applies weight decay to it: to matrices, but to no bias."""
        return not self.path[-1].endswith("bias") and len(self.box.shape) > 1


@dataclass(frozen=True)
class FilePlan:
    """One rank's file.

    Attributes:
        folder: `mp_rank_TT` or `mp_rank_TT_PPP`.
        tensor_rank: Which tensor-parallel part it is.
        stage: Which pipeline stage it is.
        chunks: The parameters of each of the stage's virtual stages.
    """

    folder: str
    tensor_rank: int
    stage: int
    chunks: tuple[tuple[FileParameter, ...], ...]

    def parameters(self) -> list[FileParameter]:
        """Return all of them in the optimizer's order: decayed ones first."""
        found = [one for chunk in self.chunks for one in chunk]
        return sorted(found, key=lambda one: not one.is_decayed)


def plan_files(
    shapes: Shapes, parts: Sequence[ModelPart], *, tensor: int, stages: int, gated: bool
) -> list[FilePlan]:
    """Plan the files of a checkpoint, by stage and tensor rank.

    Args:
        shapes: The shapes of all parameters, by our names without "model.".
        parts: The model's parts, first to last; each stage has as many, of equal size.
        tensor: The number of tensor-parallel ranks.
        stages: The number of pipeline stages.
        gated: The up projections hold gate and up.

    Raises:
        CheckpointError: A parameter has no place in Megatron's model, or cannot be split so.
    """
    _check(shapes, parts, stages)
    arrangement = names.Arrangement(VERSION, heads=0, gated=gated)
    plans = []
    for stage in range(stages):
        for rank in range(tensor):
            chunks = tuple(
                tuple(_parameters(shapes, part, arrangement, rank, tensor))
                for part in parts_of_stage(list(parts), stage, stages)
            )
            folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            plans.append(FilePlan(folder, rank, stage, chunks))
    return plans


def _check(shapes: Shapes, parts: Sequence[ModelPart], stages: int) -> None:
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


def _encoder_layers(shapes: Shapes) -> int:
    """Return the layers of a T5's encoder, and 0 for other networks."""
    return sum(_ENCODER_LAYER.fullmatch(name) is not None for name in shapes)


def _stacks(shapes: Shapes, part: ModelPart) -> Iterator[tuple[str, range, bool]]:
    """Yield the stacks of a part: what their names begin with, its layers, whether it ends them."""
    encoder = _encoder_layers(shapes)
    if encoder:
        of_encoder, of_decoder = part.halves(encoder)
        yield "encoder.", of_encoder, encoder - 1 in of_encoder
        yield "decoder.", of_decoder, part.head
    else:
        yield "", part.layers, part.head


def _names(shapes: Shapes, part: ModelPart) -> Iterator[str]:
    """Yield all that could stand in a part, in Megatron's order, and _TIED for the copy."""
    encoder = _encoder_layers(shapes)
    has_embedding = part.embedding or (encoder > 0 and part.layers.start == encoder)
    if has_embedding:
        yield from names.parameters_of(names.EMBEDDINGS)
    for stack, layers, ends in _stacks(shapes, part):
        table = names.DECODER_LAYER if stack == "decoder." else names.LAYER
        modules = [f"layers.{index}.{module}" for index in layers for module in table]
        modules += ["final_norm"] * ends
        yield from (f"{stack}{module}.{kind}" for module in modules for kind in names.KINDS)
    if part.head:
        yield from names.parameters_of(names.AFTER_LAYERS)
        if not has_embedding:
            yield _TIED
        yield from names.parameters_of(names.HEADS)


def _parameters(
    shapes: Shapes, part: ModelPart, arrangement: names.Arrangement, rank: int, ranks: int
) -> Iterator[FileParameter]:
    stacks = list(_stacks(shapes, part))
    for name in _names(shapes, part):
        if name == _TIED and "output.weight" not in shapes:
            box = _box(_WORDS, shapes[_WORDS], arrangement, rank, ranks)
            yield FileParameter(names.TIED_COPY, _WORDS, box)
        elif name in shapes:
            first = next((layers.start for stack, layers, _ in stacks if name.startswith(stack)), 0)
            box = _box(name, shapes[name], arrangement, rank, ranks)
            yield FileParameter(names.megatron_path(name, first), name, box)


def _box(
    name: str, shape: tuple[int, ...], arrangement: names.Arrangement, rank: int, ranks: int
) -> Box:
    """Return the part of a parameter that a tensor-parallel rank holds."""
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
