"""The layers of each pipeline stage and chunk, as plain data.

A model is cut into stages x chunks parts, in order. Part k is chunk k // stages of stage k %
stages, so with several chunks every micro-batch passes through every stage several times.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from megatron.config.fields import MAX_LAYERS, fields_of
from megatron.config.model import ModelOptions
from megatron.config.parallel import ParallelOptions
from megatron.errors import ConfigError

LAYOUT_FLAG = "--pipeline-model-parallel-layout"
_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_DISTRIBUTING = (*_VIRTUAL, *_ENDS, *_COUNTED)  # flags that distribute layers by number
_SIZES = ("num_layers", "decoder_num_layers", "pipeline_model_parallel_size", *_VIRTUAL, *_ENDS)
_UNSET = ParallelOptions()
Parallel = TypeVar("Parallel", bound=ParallelOptions)
_TOKEN = re.compile(r"(?P<symbol>[EtmL|()])|\*(?P<count>\d{1,5})|(?P<other>[^\s,])")


@dataclass(frozen=True)
class ModelPart:
    """Consecutive layers of a model; the first part includes the embedding, and the last the head.

    Attributes:
        layers: Global layer indices.
        embedding: Whether this is the first part, with the embedding.
        head: Whether this is the last part, with final normalization, output and loss.
    """

    layers: range
    embedding: bool
    head: bool

    def halves(self, encoder: int) -> tuple[range, range]:
        """Return this part's ranges of T5 encoder and decoder layers, each numbered from 0.

        Args:
            encoder: The total number of encoder layers, which precede the decoder layers.
        """
        start, stop = self.layers.start, self.layers.stop
        decoder_layers = range(max(start, encoder) - encoder, max(stop, encoder) - encoder)
        return range(start, min(stop, encoder)), decoder_layers


def whole_model(num_layers: int) -> ModelPart:
    """Return a single part with all layers."""
    return ModelPart(range(num_layers), embedding=True, head=True)


def plan_model(model: ModelOptions, config: ParallelOptions) -> list[ModelPart]:
    """Return the parts of a model, from first to last. Decoder layers follow encoder layers.

    Raises:
        ConfigError: The layers do not fit the stages (see `plan_parts`).
    """
    encoder, decoder = model.num_layers, model.decoder_num_layers or 0
    assert encoder is not None, "a rule requires --num-layers"
    return plan_parts(encoder + decoder, config, decoder_layers=decoder)


def may_be_planned(model: ModelOptions, config: ParallelOptions) -> bool:
    """Return whether the number of layers is known and all sizes are in bounds.

    If not, a rule reports the error.
    """
    sizes = vars(model) | vars(config)
    fields = (*fields_of(ModelOptions), *fields_of(ParallelOptions))
    invalid = (
        field for field in fields if field.name in _SIZES and field.out_of_bounds(sizes[field.name])
    )
    return model.num_layers is not None and not any(invalid)


def possible_plan(model: ModelOptions, config: ParallelOptions) -> list[ModelPart]:
    """Return the parts of a model, or an empty list if there is no plan, which a rule reports."""
    try:
        return plan_model(model, config) if may_be_planned(model, config) else []
    except ConfigError:
        return []


def plan_parts(
    num_layers: int, config: ParallelOptions, *, decoder_layers: int = 0
) -> list[ModelPart]:
    """Split the given number of layers into parts, according to the flags.

    Args:
        num_layers: The total number of layers.
        config: The parallelism flags.
        decoder_layers: The number of layers at the end that form T5's decoder.

    Raises:
        ConfigError: The layers do not fit the stages or leave one empty, the layout string cannot
            be read, or two flags that distribute layers contradict each other.
    """
    _check_flags(config)
    stages, encoder = config.pipeline_model_parallel_size, num_layers - decoder_layers
    layers_text = f"--num-layers {encoder}"
    if decoder_layers:
        layers_text += f" + --decoder-num-layers {decoder_layers} = {num_layers}"
    if config.pipeline_model_parallel_split_rank is not None:
        counts = _split_counts(encoder, decoder_layers, config)
    elif config.pipeline_model_parallel_layout is not None:
        counts = parse_layout(
            config.pipeline_model_parallel_layout, num_layers, stages, layers_text
        )
    else:
        counts = _even_counts(num_layers, config, layers_text)
    parts = _parts_with(counts)
    _check_no_idle_stage(parts, config)
    return parts


def distributing_flags(config: ParallelOptions) -> list[str]:
    """Return the given flags that distribute layers by number, which exclude a layout string."""
    return _flags_text(config, _DISTRIBUTING)


def with_layout(config: Parallel, text: str) -> Parallel:
    """Return the flags with a layout string instead of those that distribute layers by number.

    --pipeline-model-parallel-split-rank is kept.
    """
    unset = {name: getattr(_UNSET, name) for name in _DISTRIBUTING}
    return replace(config, pipeline_model_parallel_layout=text, **unset)


def even_parts(num_layers: int, count: int) -> list[ModelPart]:
    """Return parts whose layer counts differ by at most one, with the smaller ones last."""
    return _parts_with([(num_layers + count - 1 - i) // count for i in range(count)])


def layout_of(parts: list[ModelPart]) -> str:
    """Return the layout string of parts, such as `Ett|ttL`."""
    return f"E{'|'.join('t' * len(part.layers) for part in parts)}L"


def _parts_with(counts: list[int]) -> list[ModelPart]:
    """Return the parts of a model, given the number of layers in each."""
    ends = list(accumulate(counts))
    return [
        ModelPart(range(end - count, end), embedding=i == 0, head=i == len(counts) - 1)
        for i, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def _flags_text(config: ParallelOptions, names: Collection[str]) -> list[str]:
    """Return the named flags that differ from their defaults, as written on a command line."""
    values = [(field, getattr(config, field.name)) for field in fields_of(ParallelOptions)]
    return [
        field.spell(value)
        for field, value in values
        if field.name in names and value != field.default
    ]


def parts_of_stage(parts: list[ModelPart], stage: int, stages: int) -> list[ModelPart]:
    """Return the chunks that one stage holds, in order."""
    return parts[stage::stages]


def megatron_layout_problem(parts: list[ModelPart], stages: int, encoder: int | None) -> str:
    """Return why Megatron-LM 23.08 cannot cut a model into these parts, or "".

    Args:
        parts: The parts of the model, first to last.
        stages: The number of pipeline stages that hold them.
        encoder: The number of encoder layers of T5, which come before its decoder layers, or `None`
            for other networks.
    """
    halves = [parts]
    if encoder is not None and len(parts) > 1:
        if len(parts) > stages:
            return "does not support virtual stages for a T5"
        if any(part.layers.start < encoder < part.layers.stop for part in parts):
            return (
                "gives each stage layers of either a T5's encoder or its decoder, but here one "
                "stage has both"
            )
        count = sum(part.layers.start < encoder for part in parts)
        halves = [parts[:count], parts[count:]]
    for half in halves:
        sizes = [str(len(part.layers)) for part in half]
        if len(set(sizes)) > 1:
            return (
                "gives every stage the same number of layers, but here they have "
                f"{', '.join(sizes)}"
            )
    return ""


def chunks_of(num_layers: int, config: ParallelOptions) -> int:
    """Return the number of model parts per stage.

    Raises:
        ConfigError: --num-layers-per-virtual-pipeline-stage does not divide a stage's layers, or
            the layout string cannot be read.
    """
    stages = config.pipeline_model_parallel_size
    if config.pipeline_model_parallel_layout is not None:
        return len(_expand(config.pipeline_model_parallel_layout)) // stages
    if config.num_virtual_stages_per_pipeline_rank is not None:
        return config.num_virtual_stages_per_pipeline_rank
    layers = config.num_layers_per_virtual_pipeline_stage
    if layers is None:
        return 1
    slots = num_layers + len(_flags_text(config, _COUNTED))
    if slots % (stages * layers):
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {layers} x --pipeline-model-parallel-size "
            f"{stages} does not divide {slots} layers: choose one that does, or set the layers of "
            f"each stage with {LAYOUT_FLAG}"
        )
    return slots // (stages * layers)


def _check_flags(config: ParallelOptions) -> None:
    """Reject combinations of flags that would distribute layers in two ways."""
    virtual, ends = _flags_text(config, _VIRTUAL), _flags_text(config, _ENDS)
    if len(virtual) > 1:
        raise ConfigError(
            f"{' and '.join(virtual)} both set the number of virtual stages: use one of them"
        )
    if ends and _flags_text(config, _COUNTED):
        raise ConfigError(
            f"{' and '.join(ends)} and counting embedding or loss as a layer both distribute "
            "layers: use one of them"
        )
    others = distributing_flags(config)
    if config.pipeline_model_parallel_layout is not None and others:
        raise ConfigError(
            f"{LAYOUT_FLAG} {config.pipeline_model_parallel_layout} cannot be combined with "
            f"{others[0]}, because both distribute layers: use one of them"
        )


def _check_no_idle_stage(parts: list[ModelPart], config: ParallelOptions) -> None:
    """Reject a stage that has neither layers nor embedding nor loss."""
    stages = config.pipeline_model_parallel_size
    filled = [bool(part.layers) or part.embedding or part.head for part in parts]
    idle = " and ".join(str(k) for k in range(stages) if not any(filled[k::stages]))
    if idle:
        given = " and ".join(_flags_text(config, (*_ENDS, "pipeline_model_parallel_layout")))
        raise ConfigError(
            f"{given}: stage {idle} (counted from 0) of --pipeline-model-parallel-size {stages} "
            "would have no layers, embedding or loss: give it some, or use fewer stages"
        )


def _even_counts(num_layers: int, config: ParallelOptions, layers_text: str) -> list[int]:
    """Return the number of layers in each part.

    The counts are equal, except where flags fix those of the first and last stages, or where the
    embedding and the loss count as layers.

    Args:
        num_layers: The number of layers to distribute.
        config: The parallelism flags.
        layers_text: The number of layers, as error messages show it with its flags.
    """
    stages, chunks = config.pipeline_model_parallel_size, chunks_of(num_layers, config)
    if _flags_text(config, _ENDS):
        return _fixed_ends(num_layers, chunks, config, layers_text)
    embedding, loss = (int(getattr(config, name)) for name in _COUNTED)
    slots, parts = num_layers + embedding + loss, stages * chunks
    if slots % parts:
        counted = ["embedding"] * embedding + ["loss"] * loss
        extras = f" with {' and '.join(counted)} = {slots}" if counted else ""
        raise ConfigError(
            f"{layers_text}{extras} does not divide evenly over "
            f"--pipeline-model-parallel-size {stages} x {chunks} virtual "
            f"stage{'s' * (chunks > 1)}: use a multiple of {parts}, or set the layers of each "
            f"stage with {LAYOUT_FLAG} or --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers"
        )
    counts = [slots // parts] * parts
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _split_counts(encoder: int, decoder: int, config: ParallelOptions) -> list[int]:
    """Return the layer count of each stage; stages before the split rank hold the encoder."""
    stages, split = config.pipeline_model_parallel_size, config.pipeline_model_parallel_split_rank
    assert split is not None
    flag = f"--pipeline-model-parallel-split-rank {split}"
    excluded = [*_ENDS, *_COUNTED, "pipeline_model_parallel_layout"]
    if chunks_of(encoder + decoder, config) > 1:
        excluded += _VIRTUAL
    others = _flags_text(config, excluded)
    if others:
        raise ConfigError(
            f"{flag} cannot be combined with {others[0]}, because both distribute layers: use one "
            "of them (a layout string also covers a T5, encoder layers first)"
        )
    if not 0 < split < stages:
        raise ConfigError(
            f"{flag}: the encoder and the decoder each need at least one of "
            f"--pipeline-model-parallel-size {stages} stages: use a number from 1 to one less than "
            "that, or drop the flag"
        )
    counts = []
    for name, layers, count in (("encoder", encoder, split), ("decoder", decoder, stages - split)):
        if layers % count:
            raise ConfigError(
                f"{flag} leaves {count} stage{'s' * (count > 1)} for the {layers} {name} "
                "layers, which do not divide evenly: choose another rank, or drop the flag"
            )
        counts += [layers // count] * count
    return counts


def _fixed_ends(
    num_layers: int, chunks: int, config: ParallelOptions, layers_text: str
) -> list[int]:
    """Return the requested counts for the first and last stages, and equal counts in between."""
    stages, given = config.pipeline_model_parallel_size, " and ".join(_flags_text(config, _ENDS))
    if stages == 1:
        raise ConfigError(
            f"{given}: one stage holds all layers: give --pipeline-model-parallel-size, or drop it"
        )
    if chunks > 1:
        raise ConfigError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers support a "
            f"single virtual stage only: use {LAYOUT_FLAG}"
        )
    first, last = ([] if (n := getattr(config, name)) is None else [n] for name in _ENDS)
    remaining, others = num_layers - sum(first + last), stages - len(first + last)
    if remaining < 0 or remaining % max(others, 1) or (remaining and not others):
        raise ConfigError(
            f"{given} leaves {remaining} of {layers_text} for the other {others} stages of "
            f"--pipeline-model-parallel-size {stages}, which does not divide evenly: choose "
            f"other numbers, or set the layers of each stage with {LAYOUT_FLAG}"
        )
    return [*first, *[remaining // max(others, 1)] * others, *last]


def parse_layout(text: str, num_layers: int, stages: int, layers_text: str) -> list[int]:
    """Return the number of layers in each part of a string such as `Ett|tt|tt|ttL`.

    `E` stands for the embedding, `t` for a layer and `L` for the loss. `|` starts the next part.
    The layers of multi-token prediction, which are always in the last part, may be written as `m`
    before `L`. `t*3` and `(tt|)*2` are repetitions. Parts are in the order of the model, with T5's
    encoder first.

    Args:
        text: The layout string.
        num_layers: The number of layers that it must contain.
        stages: The number of pipeline stages.
        layers_text: The number of layers as given by flags, for messages.

    Raises:
        ConfigError: The string cannot be read, or does not fit this model on these stages.
    """
    parts = _expand(text)
    if not parts[0].startswith("E") or not parts[-1].endswith("L"):
        raise ConfigError(f"{LAYOUT_FLAG} {text}: must begin with E and end with L")
    if "E" in "".join(parts)[1:] or "L" in "".join(parts)[:-1]:
        raise ConfigError(f"{LAYOUT_FLAG} {text}: E and L must appear once, at the ends")
    predictions = "".join(parts).count("m")
    if not parts[-1].endswith(f"{'m' * predictions}L"):
        raise ConfigError(
            f"{LAYOUT_FLAG} {text}: layers of multi-token prediction (m) are in the last part, "
            "between its other layers and L: move them there, or leave them out"
        )
    counts = [part.count("t") for part in parts]
    if sum(counts) != num_layers:
        raise ConfigError(
            f"{LAYOUT_FLAG} {text}: has {sum(counts)} layers, not {layers_text}: write a t for "
            "each layer"
        )
    if len(counts) % stages:
        raise ConfigError(
            f"{LAYOUT_FLAG} {text}: {len(counts)} parts do not divide evenly over "
            f"--pipeline-model-parallel-size {stages}: use a multiple of {stages} parts"
        )
    return counts


def predictions_in(text: str) -> int:
    """Return how many layers of multi-token prediction a layout string names.

    Raises:
        ConfigError: The string cannot be read.
    """
    return "".join(_expand(text)).count("m")


def _expand(text: str) -> list[str]:
    """Return the parts of a layout string, with repetitions written out."""
    groups: list[list[str]] = [[]]  # the items in each open parenthesis
    problem = ""
    for token in _TOKEN.finditer(text):
        items, symbol, count = groups[-1], token["symbol"], int(token["count"] or 0)
        if symbol == "(":
            groups.append([])
        elif symbol == ")" and len(groups) > 1:
            groups[-2].append("".join(groups.pop()))
        elif symbol == ")":
            problem = "a parenthesis is closed but not opened"
        elif symbol:
            items.append(symbol)
        elif token["other"]:
            unread = text[token.start() :]
            problem = f"cannot read {unread!r}: use E, t, m, L, |, parentheses and *N"
        elif not items:
            problem = f"*{count} repeats nothing"
        elif len(items[-1]) * count > MAX_LAYERS:
            problem = f"more than {MAX_LAYERS} symbols"
        else:
            items[-1] *= count
        if problem:
            raise ConfigError(f"{LAYOUT_FLAG} {text}: {problem}")
    if len(groups) != 1:
        raise ConfigError(f"{LAYOUT_FLAG} {text}: a parenthesis is not closed")
    return "".join(groups[0]).split("|")
