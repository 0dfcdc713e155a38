"""Which layers each stage and chunk of a pipeline holds: a plan, as data.

A model is cut into stages x chunks parts, in order. Part k stands on stage k % stages as its chunk
k // stages, so with several chunks every micro-batch passes every stage several times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from megatron.config.fields import MAX_LAYERS
from megatron.config.model import ModelOptions
from megatron.config.parallel import ParallelOptions
from megatron.errors import ConfigError

LAYOUT_FLAG = "--pipeline-model-parallel-layout"
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
# What deals out layers by numbers.
_DEALING = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    *_ENDS,
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_UNSET = ParallelOptions()
Parallel = TypeVar("Parallel", bound=ParallelOptions)
_TOKEN = re.compile(r"\s*(?:(?P<symbol>[EtL|()])|\*(?P<count>\d{1,5})|(?P<comma>,))")


@dataclass(frozen=True)
class ModelPart:
    """A run of consecutive layers, with what stands before the first and after the last.

    Attributes:
        layers: Global layer indices.
        embedding: Whether this part begins the model.
        head: Whether this part ends the model: final normalization, output, loss.
    """

    layers: range
    embedding: bool
    head: bool

    def halves(self, encoder: int) -> tuple[range, range]:
        """Of a T5, the part's layers of the encoder, and those of the decoder counted from 0.

        Args:
            encoder: layers of the whole encoder, which come first.
        """
        start, stop = self.layers.start, self.layers.stop
        below = range(max(start, encoder) - encoder, max(stop, encoder) - encoder)
        return range(start, min(stop, encoder)), below


def whole_model(num_layers: int) -> ModelPart:
    """Return all layers in one part."""
    return ModelPart(range(num_layers), embedding=True, head=True)


def plan_model(model: ModelOptions, config: ParallelOptions) -> list[ModelPart]:
    """Return the parts of a model, first to last. A decoder's layers follow its encoder's."""
    encoder, decoder = model.num_layers, model.decoder_num_layers or 0
    assert encoder is not None, "a rule asks for it"
    return plan_parts(encoder + decoder, config, decoder_layers=decoder)


def may_be_planned(model: ModelOptions, config: ParallelOptions) -> bool:
    """Return whether there are stages and layers, and not too many. Otherwise `bounds` says so."""
    stages, layers = config.pipeline_model_parallel_size, model.num_layers or 0
    most = max(stages, layers, model.decoder_num_layers or 0)
    return stages > 0 and layers > 0 and most <= MAX_LAYERS


def possible_plan(model: ModelOptions, config: ParallelOptions) -> list[ModelPart]:
    """Return the parts of a model, or none if a rule refuses the plan."""
    try:
        return plan_model(model, config) if may_be_planned(model, config) else []
    except ConfigError:
        return []


def plan_parts(
    num_layers: int, config: ParallelOptions, *, decoder_layers: int = 0
) -> list[ModelPart]:
    """Return the parts of the given number of layers, as the flags ask.

    Args:
        num_layers: The total number of layers.
        config: The flags of parallelism.
        decoder_layers: The number of layers at the end that form a T5's decoder.

    Raises:
        ConfigError: the layers do not fit the stages, or leave one with nothing, or the layout
            string cannot be read, or two flags that deal out layers were given.
    """
    _check_sizes(config)
    stages, encoder = config.pipeline_model_parallel_size, num_layers - decoder_layers
    shown = f"--num-layers {encoder}"
    if decoder_layers:
        shown += f" + --decoder-num-layers {decoder_layers} = {num_layers}"
    if config.pipeline_model_parallel_split_rank is not None:
        counts = _split_counts(encoder, decoder_layers, config)
    elif config.pipeline_model_parallel_layout is not None:
        counts = parse_layout(config.pipeline_model_parallel_layout, num_layers, stages, shown)
    else:
        counts = _even_counts(num_layers, config, shown)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    parts = [
        ModelPart(range(end - count, end), embedding=i == 0, head=i == len(counts) - 1)
        for i, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]
    _check_no_idle_stage(parts, config)
    return parts


def dealing_flags(config: ParallelOptions) -> list[str]:
    """Return the given flags that deal out layers by numbers; a layout string excludes them."""
    return _shown(config, _DEALING)


def with_layout(config: Parallel, text: str) -> Parallel:
    """Return the flags with a layout string instead of whatever else deals out layers."""
    unset = {name: getattr(_UNSET, name) for name in _DEALING}
    return replace(config, pipeline_model_parallel_layout=text, **unset)


def _shown(config: ParallelOptions, names: Iterable[str]) -> list[str]:
    """Write those that were given, as on a command line."""
    given = {name: getattr(config, name) for name in names}
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in given.items()
        if value != getattr(_UNSET, name)
    ]


def parts_of_stage(parts: list[ModelPart], stage: int, stages: int) -> list[ModelPart]:
    """Return the chunks that one stage holds, in order."""
    return parts[stage::stages]


def megatron_misfit(parts: list[ModelPart], stages: int, encoder: int | None) -> str:
    """Why Megatron-LM 23.08 never cuts a model into such parts; empty if it does.

    Args:
        parts: of the model, first to last.
        stages: pipeline stages that hold them.
        encoder: layers of a T5's encoder, its decoder's follow; None: no T5.
    """
    halves = [parts]
    if encoder is not None and len(parts) > 1:
        if len(parts) > stages:
            return "has no virtual stages of a T5"
        if any(part.layers.start < encoder < part.layers.stop for part in parts):
            return "gives a stage layers of a T5's encoder or of its decoder, here one has both"
        count = sum(part.layers.start < encoder for part in parts)
        halves = [parts[:count], parts[count:]]
    for half in halves:
        sizes = [len(part.layers) for part in half]
        if len(set(sizes)) > 1:
            return "gives every stage equally many layers, here they have " + ", ".join(
                map(str, sizes)
            )
    return ""


def chunks_of(num_layers: int, config: ParallelOptions) -> int:
    """Model parts of each stage.

    Raises:
        ConfigError: --num-layers-per-virtual-pipeline-stage does not divide a stage's layers.
    """
    stages = config.pipeline_model_parallel_size
    if config.pipeline_model_parallel_layout is not None:
        return len(_expand(config.pipeline_model_parallel_layout)) // stages
    if config.num_virtual_stages_per_pipeline_rank is not None:
        return config.num_virtual_stages_per_pipeline_rank
    layers = config.num_layers_per_virtual_pipeline_stage
    if layers is None:
        return 1
    slots = num_layers + _counted_extras(config)
    if slots % (stages * layers):
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {layers} x --pipeline-model-parallel-size "
            f"{stages} does not divide {slots} layers: choose one that does, or say who holds "
            f"what with {LAYOUT_FLAG}"
        )
    return slots // (stages * layers)


def _check_sizes(config: ParallelOptions) -> None:
    """Numbers of layers and parts that can be, and no two answers to one question."""
    first, last = (
        config.decoder_first_pipeline_num_layers,
        config.decoder_last_pipeline_num_layers,
    )
    layers, parts = (
        config.num_layers_per_virtual_pipeline_stage,
        config.num_virtual_stages_per_pipeline_rank,
    )
    values = (
        ("--num-layers-per-virtual-pipeline-stage", layers, 1),
        ("--num-virtual-stages-per-pipeline-rank", parts, 1),
        ("--decoder-first-pipeline-num-layers", first, 0),
        ("--decoder-last-pipeline-num-layers", last, 0),
    )
    low = [
        f"{name} {value}: must be at least {least}"
        for name, value, least in values
        if value is not None and value < least
    ]
    if low:
        raise ConfigError(low)
    given = {name: f"{name} {value}" for name, value, _ in values if value is not None}
    extras = _counted_extras(config)
    if layers is not None and parts is not None:
        raise ConfigError(
            f"{' and '.join(list(given.values())[:2])} both set the number of virtual stages: use "
            "one of them"
        )
    if extras and (first is not None or last is not None):
        raise ConfigError(
            f"{' and '.join(given.values())} and counting embedding or loss as a layer both "
            "distribute layers: use one of them"
        )
    others = dealing_flags(config)
    if config.pipeline_model_parallel_layout is not None and others:
        raise ConfigError(
            f"{LAYOUT_FLAG} {config.pipeline_model_parallel_layout} cannot be combined with "
            f"{others[0]}, because both distribute layers: use one of them"
        )


def _check_no_idle_stage(parts: list[ModelPart], config: ParallelOptions) -> None:
    """A stage may be without layers where it has the embedding or the loss, not without all."""
    stages = config.pipeline_model_parallel_size
    idle = [
        str(stage)
        for stage in range(stages)
        if not any(
            part.layers or part.embedding or part.head
            for part in parts_of_stage(parts, stage, stages)
        )
    ]
    if idle:
        text = config.pipeline_model_parallel_layout
        dealt = _shown_ends(config) if text is None else f"{LAYOUT_FLAG} {text}"
        raise ConfigError(
            f"{dealt}: of --pipeline-model-parallel-size {stages} stages, number "
            f"{' and '.join(idle)} (from 0) would be empty, without layers, embedding or loss: "
            "give it some, or use fewer stages"
        )


def _shown_ends(config: ParallelOptions) -> str:
    """Write the given numbers of layers of the first and the last stage."""
    return " and ".join(_shown(config, _ENDS))


def _counted_extras(config: ParallelOptions) -> int:
    """Return how many of embedding and loss count as a layer."""
    return int(config.account_for_embedding_in_pipeline_split) + int(
        config.account_for_loss_in_pipeline_split
    )


def _even_counts(num_layers: int, config: ParallelOptions, shown: str) -> list[int]:
    """Return the layers of each part: equal, except for fixed ends and counted extras.

    Args:
        num_layers: The layers to deal out.
        config: The flags of parallelism.
        shown: The number of layers by its flags.
    """
    stages = config.pipeline_model_parallel_size
    chunks = chunks_of(num_layers, config)
    if _shown_ends(config):
        return _fixed_ends(num_layers, chunks, config, shown)
    embedding = int(config.account_for_embedding_in_pipeline_split)
    loss = int(config.account_for_loss_in_pipeline_split)
    slots, parts = num_layers + embedding + loss, stages * chunks
    if slots % parts:
        counted = [n for n, on in (("embedding", embedding), ("loss", loss)) if on]
        extras = f" with {' and '.join(counted)} = {slots}" if counted else ""
        raise ConfigError(
            f"{shown}{extras} does not divide over "
            f"--pipeline-model-parallel-size {stages} x {chunks} virtual stage(s): use a multiple "
            f"of {parts}, or say who holds what with {LAYOUT_FLAG} or "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )
    counts = [slots // parts] * parts
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _split_counts(encoder: int, decoder: int, config: ParallelOptions) -> list[int]:
    """Return encoder layers for the stages below the split rank, decoder layers for the others."""
    stages, split = config.pipeline_model_parallel_size, config.pipeline_model_parallel_split_rank
    assert split is not None
    shown = f"--pipeline-model-parallel-split-rank {split}"
    others = [
        name
        for name, given in (
            (LAYOUT_FLAG, config.pipeline_model_parallel_layout),
            ("virtual stages", chunks_of(encoder + decoder, config) > 1),
            ("--decoder-first-pipeline-num-layers", config.decoder_first_pipeline_num_layers),
            ("--decoder-last-pipeline-num-layers", config.decoder_last_pipeline_num_layers),
            ("counting embedding or loss as a layer", _counted_extras(config)),
        )
        if given
    ]
    if others:
        raise ConfigError(
            f"{shown} cannot be combined with {others[0]}, because both distribute layers: use one "
            "of them (a layout string also covers a T5, encoder layers first)"
        )
    if not 0 < split < stages:
        raise ConfigError(
            f"{shown}: the encoder and the decoder each need at least one of "
            f"--pipeline-model-parallel-size {stages} stages: use a number from 1 to one less than "
            "that, or drop the flag"
        )
    counts = []
    for name, layers, over in (("encoder", encoder, split), ("decoder", decoder, stages - split)):
        if layers % over:
            raise ConfigError(
                f"{shown} leaves {over} stage(s) for the {layers} {name} layers, which do not "
                "divide evenly over them: choose another rank, or drop the flag"
            )
        counts += [layers // over] * over
    return counts


def _fixed_ends(num_layers: int, chunks: int, config: ParallelOptions, shown: str) -> list[int]:
    """Give first and last stage their numbers, and let the others share the rest equally."""
    stages, given = config.pipeline_model_parallel_size, _shown_ends(config)
    if stages == 1:
        raise ConfigError(
            f"{given}: one stage holds all layers: give --pipeline-model-parallel-size, or drop it"
        )
    if chunks > 1:
        raise ConfigError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers support a "
            f"single virtual stage only: use {LAYOUT_FLAG}"
        )
    first, last = (
        [] if count is None else [count]
        for count in (
            config.decoder_first_pipeline_num_layers,
            config.decoder_last_pipeline_num_layers,
        )
    )
    rest, others = num_layers - sum(first + last), stages - len(first + last)
    if rest < 0 or rest % max(others, 1) or (rest and not others):
        raise ConfigError(
            f"{given} leaves {rest} of {shown} for the other {others} of "
            f"--pipeline-model-parallel-size {stages} stages, which does not divide evenly: choose "
            f"other numbers, or say who holds what with {LAYOUT_FLAG}"
        )
    return [*first, *[rest // max(others, 1)] * others, *last]


def parse_layout(text: str, num_layers: int, stages: int, shown: str) -> list[int]:
    """Return the layers of each part from a string such as `Ett|tt|tt|ttL`.

    `E` embedding, `t` a layer, `L` loss, `|` next part; `t*3` and `(tt|)*2` repeat. Parts are in
    the order of the model, a T5's encoder first.

    Args:
        text: The layout string.
        num_layers: The layers that it must name.
        stages: The pipeline stages.
        shown: The number of layers by its flags.

    Raises:
        ConfigError: It cannot be read, or does not fit this model on these stages.
    """
    parts = _expand(text)
    if not parts[0].startswith("E") or not parts[-1].endswith("L"):
        raise ConfigError(f"{LAYOUT_FLAG} {text}: must begin with E and end with L")
    if "E" in "".join(parts)[1:] or "L" in "".join(parts)[:-1]:
        raise ConfigError(f"{LAYOUT_FLAG} {text}: E and L must appear once, at the ends")
    counts = [part.count("t") for part in parts]
    if sum(counts) != num_layers:
        raise ConfigError(f"{LAYOUT_FLAG} {text}: has {sum(counts)} layers, not {shown}")
    if len(counts) % stages:
        raise ConfigError(
            f"{LAYOUT_FLAG} {text}: {len(counts)} parts do not divide over "
            f"--pipeline-model-parallel-size {stages}"
        )
    return counts


def _expand(text: str) -> list[str]:
    """Return the string without repetitions, cut at `|`."""
    stack: list[list[str]] = [[]]
    position = 0
    while position < len(text.rstrip()):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ConfigError(
                f"{LAYOUT_FLAG} {text}: cannot read {text[position:]!r}: use E, t, L, |, "
                "parentheses and *N"
            )
        position = match.end()
        _apply_token(match, stack, text)
    if len(stack) != 1:
        raise ConfigError(f"{LAYOUT_FLAG} {text}: a parenthesis is not closed")
    return "".join(stack[0]).split("|")


def _apply_token(match: re.Match[str], stack: list[list[str]], text: str) -> None:
    symbol = match["symbol"]
    if symbol == "(":
        stack.append([])
    elif symbol == ")":
        if len(stack) == 1:
            raise ConfigError(f"{LAYOUT_FLAG} {text}: a parenthesis is not opened")
        group = "".join(stack.pop())
        stack[-1].append(group)
    elif symbol is not None:
        stack[-1].append(symbol)
    elif match["count"] is not None:
        if not stack[-1]:
            raise ConfigError(f"{LAYOUT_FLAG} {text}: *{match['count']} repeats nothing")
        if len(stack[-1][-1]) * int(match["count"]) > MAX_LAYERS:
            raise ConfigError(f"{LAYOUT_FLAG} {text}: more than {MAX_LAYERS} symbols")
        stack[-1][-1] *= int(match["count"])
