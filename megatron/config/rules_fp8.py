"""Checks of `--fp8-format`. See `checks`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig

MULTIPLE = 16  # sizes of a matrix that hardware multiplies in 8 bits


def fp8(config: RunConfig, world_size: int) -> Iterator[str]:
    numbers = config.precision
    yield from _history(numbers)
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
    least = {  # and the defaults
        "--fp8-margin": (numbers.fp8_margin, PrecisionConfig.fp8_margin),
        "--fp8-interval": (numbers.fp8_interval, PrecisionConfig.fp8_interval),
        "--fp8-amax-history-len": (
            numbers.fp8_amax_history_len,
            PrecisionConfig.fp8_amax_history_len,
        ),
    }
    algorithm = numbers.fp8_amax_compute_algo
    if numbers.fp8_recipe == "delayed":
        for name, (value, smallest) in least.items():
            if value < smallest:
                yield f"{name} {value}: must be at least {smallest}"
        return
    given = [f"{name} {value}" for name, (value, default) in least.items() if value != default]
    if algorithm != PrecisionConfig.fp8_amax_compute_algo:
        given.append(f"--fp8-amax-compute-algo {algorithm}")
    for flag in given:
        yield f"{flag} belongs to --fp8-recipe delayed: add that, or drop this flag"


def _sizes(config: RunConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    split = max(1, parallel.tensor_model_parallel_size)
    tokens = _tokens(config)
    sizes = {
        "--hidden-size": (model.hidden_size, 1),
        "--ffn-hidden-size": (model.ffn_hidden_size, split),
        "--num-attention-heads x --kv-channels": (
            (model.num_attention_heads or 0) * (model.kv_channels or 0),
            split,
        ),
        "--micro-batch-size x --seq-length": (tokens, max(1, parallel.context_parallel_size)),
    }
    for name, (size, parts) in sizes.items():
        if size and size % (MULTIPLE * parts):
            share = f" on each of {parts} processes" if parts > 1 else ""
            yield (
                f"--fp8-format {config.precision.fp8_format}: {name} {size} is not a multiple of "
                f"{MULTIPLE}{share}: use a multiple of {MULTIPLE * parts}, or drop --fp8-format"
            )


def _tokens(config: RunConfig) -> int:
    return (config.training.micro_batch_size or 0) * (config.data.seq_length or 0)
