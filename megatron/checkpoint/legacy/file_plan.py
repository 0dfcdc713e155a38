"""Plan where Megatron-LM 23.08 stores each parameter: its files, its split and its name.

A file's parameters are in the order in which Megatron registers them, because its optimizer numbers
them in this order. If a T5's decoder begins on a later stage
(`--pipeline-model-parallel-split-rank`), that stage has a copy of all embeddings. The last stage
has a copy of the word embeddings for the output, unless the decoder begins on it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.checkpoint.entries import Box
from megatron.checkpoint.legacy import names
from megatron.config.parallel import ParallelOptions
from megatron.config.stages import ModelPart, megatron_layout_problem, parts_of_stage
from megatron.errors import CheckpointError

VERSION = 3.0  # the `checkpoint_version` of the files written
_WORDS = "embedding.word.weight"
_VOCABULARY = (_WORDS, "output.weight", "output.bias")
_ENCODER_LAYER = re.compile(r"encoder\.layers\.\d+\.attention_norm\.weight")  # one per layer

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class FileParameter:
    """A parameter in a file.

    Attributes:
        path: The keys that lead to the parameter in the file's `model`, outermost first.
        name: The native name of the parameter.
        box: The part of our parameter that the file contains.
    """

    path: tuple[str, ...]
    name: str
    box: Box

    @property
    def is_decayed(self) -> bool:
        """Whether Megatron applies weight decay to the parameter. It does so only for matrices."""
        return not self.path[-1].endswith("bias") and len(self.box.shape) > 1


@dataclass(frozen=True)
class FilePlan:
    """The file of one rank.

    Attributes:
        folder: The rank's folder, `mp_rank_TT` or `mp_rank_TT_PPP`.
        tensor_rank: The tensor-parallel rank.
        stage: The pipeline stage.
        chunks: The parameters of each virtual stage of the stage.
    """

    folder: str
    tensor_rank: int
    stage: int
    chunks: tuple[tuple[FileParameter, ...], ...]

    def parameters(self) -> list[FileParameter]:
        """Return all parameters in the optimizer's order: those with weight decay first."""
        parameters = [parameter for chunk in self.chunks for parameter in chunk]
        return sorted(parameters, key=lambda parameter: not parameter.is_decayed)


def plan_files(
    shapes: Shapes, parts: list[ModelPart], split: ParallelOptions, arrangement: names.Arrangement
) -> list[FilePlan]:
    """Plan the files of a checkpoint, ordered by stage and tensor rank.

    Args:
        shapes: The shapes of all parameters, by native name without "model.".
        parts: The model's parts, first to last. Each stage has the same number of parts, and all
            parts have the same number of layers.
        split: The numbers of tensor-parallel ranks and pipeline stages.
        arrangement: The row order and the splits of parameters in the files.

    Raises:
        CheckpointError: Megatron's model lacks a parameter, or a parameter cannot be split this
            way.
    """
    tensor, stages = split.tensor_model_parallel_size, split.pipeline_model_parallel_size
    encoder = sum(_ENCODER_LAYER.fullmatch(name) is not None for name in shapes)  # 0 if not a T5
    _check(shapes, parts, stages, encoder)
    plans = []
    for stage in range(stages):
        for rank in range(tensor):
            chunks = tuple(
                tuple(
                    FileParameter(path, name, _box(name, shapes[name], arrangement, rank, tensor))
                    for name, path in _parameter_paths(shapes, part, encoder)
                    if name in shapes
                )
                for part in parts_of_stage(parts, stage, stages)
            )
            folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            plans.append(FilePlan(folder, rank, stage, chunks))
    return plans


def _check(shapes: Shapes, parts: list[ModelPart], stages: int, encoder: int) -> None:
    known = {name for part in parts for name, _ in _parameter_paths(shapes, part, encoder)}
    extra = sorted(shapes.keys() - known)
    if extra:
        missing = f"{extra[0]} does not exist in Megatron-LM 23.08"
        raise CheckpointError(f"{missing}: use the native format")
    if "layers.0.attention.qkv.bias" in shapes and "layers.0.mlp.up.bias" not in shapes:
        why = "Megatron-LM 23.08 has biases in all linear layers or in none"
        raise CheckpointError(f"--add-qkv-bias: {why}: use the native format")
    problem = megatron_layout_problem(parts, stages, encoder or None)
    if problem:
        remedy = "use the native format"
        if encoder:
            remedy = f"convert with another --target-pipeline-parallel-split-rank, or {remedy}"
        raise CheckpointError(f"Megatron-LM 23.08 {problem}: {remedy}")


def _parameter_paths(
    shapes: Shapes, part: ModelPart, encoder: int
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (native name, Megatron's path) for each possible parameter, in Megatron's order."""

    def outside(modules: names.Modules) -> Iterator[tuple[str, tuple[str, ...]]]:
        return ((name, names.megatron_path(name, 0)) for name in names.parameters_of(modules))

    has_embedding = part.embedding or (encoder > 0 and part.layers.start == encoder)
    if has_embedding:
        yield from outside(names.EMBEDDINGS)
    # Each stack: prefix of names, layers in this part, whether the stack ends in this part.
    stacks = [("", part.layers, part.head)]
    if encoder:
        encoder_layers, decoder_layers = part.halves(encoder)
        stacks = [
            ("encoder.", encoder_layers, encoder - 1 in encoder_layers),
            ("decoder.", decoder_layers, part.head),
        ]
    for stack, layers, ends in stacks:
        for layer in (f"{stack}layers.{index}" for index in layers):
            for prefix in (layer, *_retriever_layers(shapes, layer)):
                crosses = f"{prefix}.cross_norm.weight" in shapes
                for module in names.DECODER_LAYER if crosses else names.LAYER:
                    for name in (f"{prefix}.{module}.{kind}" for kind in names.KINDS):
                        yield name, names.megatron_path(name, layers.start, crosses=crosses)
        for name in (f"{stack}final_norm.{kind}" for kind in names.KINDS if ends):
            yield name, names.megatron_path(name, layers.start)
    if part.head:
        yield from outside(names.AFTER_LAYERS)
        if not has_embedding and "output.weight" not in shapes:
            yield _WORDS, names.TIED_COPY
        yield from outside(names.HEADS)


def _retriever_layers(shapes: Shapes, layer: str) -> Iterator[str]:
    """Yield the native name of each layer of the neighbor encoder in a Retro layer."""
    for index in itertools.count():
        name = f"{layer}.retriever.{index}"
        if f"{name}.attention_norm.weight" not in shapes:
            return
        yield name


def _box(
    name: str, shape: tuple[int, ...], arrangement: names.Arrangement, rank: int, ranks: int
) -> Box:
    """Return the box of a parameter that a tensor-parallel rank stores.

    Raises:
        CheckpointError: The ranks cannot split the parameter evenly.
    """
    dim = arrangement.split_dim(name)
    if dim is None:
        return Box.whole(shape)
    size, remainder = divmod(shape[dim], ranks)
    if remainder:
        padded = ", or give --true-vocab-size (or the tokenizer's files) so that rows are padded"
        raise CheckpointError(
            f"{name} {list(shape)} cannot be split among {ranks} tensor-parallel ranks: set "
            "--target-tensor-parallel-size (in a run: --tensor-model-parallel-size) to a number "
            f"that divides {shape[dim]}{padded if name in _VOCABULARY else ''}"
        )
    offset, part = [0] * len(shape), list(shape)
    offset[dim], part[dim] = rank * size, size
    return Box(tuple(offset), tuple(part))
