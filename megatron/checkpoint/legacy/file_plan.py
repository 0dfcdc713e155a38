"""Plan where Megatron-LM 23.08 or Megatron Core stores each parameter: its file, split and name.

A file's parameters are in the order in which Megatron registers them, because its optimizer numbers
them in this order. If a T5's decoder begins on a later stage
(`--pipeline-model-parallel-split-rank`), that stage has a copy of all embeddings. If the output
shares the word embeddings, a last stage without embeddings has a copy of them.

The two programs' files differ in their names, and in the order of a layer's parameters. Megatron
Core registers attention's output projection before its QKV projection, and a projection of
Transformer Engine contains the normalization that precedes it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron.checkpoint.core.names import NamingScheme
from megatron.checkpoint.entries import Box
from megatron.checkpoint.legacy import names
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelOptions
from megatron.config.stages import ModelPart, megatron_layout_problem, parts_of_stage
from megatron.errors import CheckpointError

VERSION = 3.0  # the `checkpoint_version` of the files written
_WORDS = "embedding.word.weight"
_VOCABULARY = (_WORDS, "output.weight", "output.bias")
_ENCODER_LAYER = re.compile(r"encoder\.layers\.\d+\.attention_norm\.weight")  # one per layer

# The modules of a GPT's layer in the order in which Megatron Core registers them, with its local
# layers and with Transformer Engine's.
_AFTER_ATTENTION = ("attention.query_norm", "attention.key_norm", "mlp_norm", "mlp.up", "mlp.down")
_LOCAL_LAYER = ("attention_norm", "attention.output", "attention.qkv", *_AFTER_ATTENTION)
_ENGINE_LAYER = ("attention.output", "attention_norm", "attention.qkv", *_AFTER_ATTENTION)
_LOCAL_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_mlp_layernorm"}

Shapes = Mapping[str, tuple[int, ...]]
Paths = Iterable[tuple[str, tuple[str, ...]]]  # native names, and the keys in a file's `model`


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
        parts: The model's parts, first to last. Each stage has the same number of parts.
        split: The numbers of tensor-parallel ranks and pipeline stages.
        arrangement: The row order and the splits of parameters in the files.

    Raises:
        CheckpointError: Megatron's model lacks a parameter, has biases that this one lacks, or its
            parameters or layers cannot be split this way.
    """
    encoder = sum(_ENCODER_LAYER.fullmatch(name) is not None for name in shapes)  # 0 if not a T5
    _check(shapes, parts, split.pipeline_model_parallel_size, encoder)
    return _plan_ranks(
        shapes, parts, split, arrangement, lambda part: _parameter_paths(shapes, part, encoder)
    )


def plan_core_files(
    shapes: Shapes,
    parts: list[ModelPart],
    split: ParallelOptions,
    arrangement: names.Arrangement,
    model: ModelConfig,
    *,
    is_engine: bool,
) -> list[FilePlan]:
    """Plan the files of Megatron Core's `torch` format, ordered by stage and tensor rank.

    Args:
        shapes: The shapes of all parameters of a BERT, or of a GPT without mixtures of experts, by
            native name without "model.".
        parts: The model's parts, first to last.
        split: The numbers of tensor-parallel ranks and pipeline stages.
        arrangement: The row order and the splits of parameters in the files.
        model: The network.
        is_engine: Whether Megatron Core builds the layers from Transformer Engine's modules.

    Raises:
        CheckpointError: Megatron Core's model lacks a parameter, a parameter cannot be split this
            way, or the parts have different numbers of layers.
    """
    scheme = NamingScheme(
        model=vars(model),
        is_stacked=False,
        gated=model.is_gated,
        shards_states=False,
        final_norm="decoder.final_layernorm",
        layers=[{} if is_engine else _LOCAL_NORMS] * model.num_layers,
        depths={},
    )
    order = _ENGINE_LAYER if is_engine else _LOCAL_LAYER
    paths = {part: list(_core_paths(shapes, part, scheme, order)) for part in parts}
    extra = sorted(shapes.keys() - {name for path in paths.values() for name, _ in path})
    if extra:
        raise CheckpointError(
            f"{extra[0]} cannot be written in Megatron Core's torch format: use torch_dist, or the "
            "native format"
        )
    sizes = [str(len(part.layers)) for part in parts]
    if len(set(sizes)) > 1:
        raise CheckpointError(
            f"stages with {', '.join(sizes)} layers cannot be written in Megatron Core's torch "
            "format: give each the same number, or use torch_dist or the native format"
        )
    return _plan_ranks(shapes, parts, split, arrangement, paths.__getitem__)


def _plan_ranks(
    shapes: Shapes,
    parts: list[ModelPart],
    split: ParallelOptions,
    arrangement: names.Arrangement,
    paths_of: Callable[[ModelPart], Paths],
) -> list[FilePlan]:
    """Return the plan of each rank's file, ordered by stage and tensor rank.

    Args:
        shapes: The shapes of all parameters, by native name without "model.".
        parts: The model's parts, first to last.
        split: The numbers of tensor-parallel ranks and pipeline stages.
        arrangement: The row order and the splits of parameters in the files.
        paths_of: A function that yields the names and paths of the possible parameters of a part.
    """
    tensor, stages = split.tensor_model_parallel_size, split.pipeline_model_parallel_size
    plans = []
    for stage in range(stages):
        for rank in range(tensor):
            chunks = tuple(
                tuple(
                    FileParameter(path, name, _box(name, shapes[name], arrangement, rank, tensor))
                    for name, path in paths_of(part)
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


def _core_paths(
    shapes: Shapes, part: ModelPart, scheme: NamingScheme, order: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (native name, Megatron Core's path) for each possible parameter, in Core's order.

    The number of a layer in a file counts from the first layer of the part.
    """
    is_bert = "head.dense.weight" in shapes

    def outside(modules: names.Modules) -> Iterator[tuple[str, tuple[str, ...]]]:
        for native, (core,) in modules.items():
            for kind in names.KINDS:
                name = f"{native}.{kind}"
                if name != "output.weight" or name in shapes:
                    yield name, (f"{core}.{kind}",)
                elif not part.embedding:
                    yield _WORDS, (f"{core}.{kind}",)

    if part.embedding:
        yield from outside(names.CORE_EMBEDDINGS)
    for index, layer in enumerate(part.layers):
        for name in (f"{module}.{kind}" for module in order for kind in names.KINDS):
            path = scheme.locate(f"model.layers.{index}.{name}", ()).name
            path = path.replace("decoder.", "encoder.", 1) if is_bert else path
            yield f"layers.{layer}.{name}", (path,)
    if part.head:
        yield from outside(names.CORE_BERT_HEADS if is_bert else names.CORE_HEADS)


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
