"""Checks of `--fp8-format`. See `checks`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.fields import fields_of
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunOptions

MULTIPLE = 16  # sizes of a matrix that hardware multiplies in 8 bits

# Settings that only the delayed recipe has, with the least value of those that are numbers.
_OF_HISTORY = {
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": None,
}


def fp8(config: RunOptions, world_size: int) -> Iterator[str]:
    numbers = config.precision
    yield from _history(numbers)
    yield from _gather(config)
    if numbers.fp8_format is None:
        if not numbers.fp8_wgrad:
            yield "--no-fp8-wgrad has no meaning without --fp8-format: drop it"
        if numbers.fp8_recipe != "tensorwise":
            yield (
                f"--fp8-recipe {numbers.fp8_recipe} has no meaning without --fp8-format: add it, "
                "or drop the flag"
            )
        return
    if not (numbers.bf16 or numbers.fp16):
        yield f"--fp8-format {numbers.fp8_format} rounds 16-bit tensors: add --bf16"
    if config.parallel.zero_stage == 3:
        yield (
            f"--fp8-format {numbers.fp8_format} keeps 8-bit copies of whole weights, which "
            "--zero-stage 3 is there to avoid: use --zero-stage 1 or 2, or drop --fp8-format"
        )
    yield from _sizes(config)


def _history(numbers: PrecisionConfig) -> Iterator[str]:
    """Of --fp8-recipe delayed alone. Values that change nothing may stand in any script."""
    own = [field for field in fields_of(PrecisionConfig) if field.name in _OF_HISTORY]
    for field in own:
        value, least = getattr(numbers, field.name), _OF_HISTORY[field.name]
        if numbers.fp8_recipe == "delayed":
            if least is not None and value < least:
                yield f"{field.spell(value)}: must be at least {least}"
        elif value != field.default:
            yield (
                f"{field.spell(value)} belongs to --fp8-recipe delayed: add that, or drop this flag"
            )


def _gather(config: RunOptions) -> Iterator[str]:
    numbers, stage = config.precision, config.parallel.zero_stage or 0
    if not numbers.fp8_param_gather:
        return
    shown = "--fp8-param-gather"
    if numbers.fp8_format is None:
        yield f"{shown} gathers the weights of 8-bit layers: add --fp8-format, or drop the flag"
    if numbers.fp8_recipe == "rowwise":
        yield (
            f"{shown} with --fp8-recipe rowwise: what a process updates may end within a row, and "
            "each row has a scale: use tensorwise or delayed, or drop the flag"
        )
    if stage == 0:
        yield (
            f"{shown}: without a shared update there is nothing to gather: add "
            "--use-distributed-optimizer, or drop the flag"
        )


def _sizes(config: RunOptions) -> Iterator[str]:
    model, parallel, data = config.model, config.parallel, config.data
    split = max(1, parallel.tensor_model_parallel_size)
    micro_batch, context = config.training.micro_batch_size or 0, parallel.context_parallel_size
    head, heads = model.kv_channels or 0, model.num_attention_heads or 0
    groups = model.num_query_groups if model.group_query_attention else 0
    sizes = {
        "--hidden-size": (model.hidden_size, 1),
        "--ffn-hidden-size": (model.ffn_hidden_size, split),
        "--num-attention-heads x --kv-channels": (heads * head, split),
        "(--num-attention-heads + 2 x --num-query-groups) x --kv-channels": (
            (heads + 2 * groups) * head if groups else 0,
            split,
        ),
        "--micro-batch-size x --seq-length": (
            micro_batch * (data.seq_length or 0),
            max(1, context),
        ),
        "--micro-batch-size x --decoder-seq-length": (
            micro_batch * (data.decoder_seq_length or 0),
            1,
        ),
    }
    for name, (size, parts) in sizes.items():
        if size and size % (MULTIPLE * parts):
            share = f" on each of {parts} processes" if parts > 1 else ""
            yield (
                f"--fp8-format {config.precision.fp8_format}: {name} {size} is not a multiple of "
                f"{MULTIPLE}{share}: use a multiple of {MULTIPLE * parts}, or drop --fp8-format"
            )
