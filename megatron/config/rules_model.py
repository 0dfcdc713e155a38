"""Checks of what must be given, layout, network and precision. See `checks`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.model import flash_head_misfit
from megatron.config.resolve import longest_sequence
from megatron.config.run import RunOptions
from megatron.config.stages import MAX_LAYERS, plan_model
from megatron.errors import ConfigError

_MOST_PROCESSES = 1024  # of one model-parallel axis that a message proposes


def divisors(number: int) -> str:
    """`1, 2, 3 or 6` for 6: the process counts that divide it."""
    most = min(number, _MOST_PROCESSES)
    values = [str(value) for value in range(1, most + 1) if number % value == 0]
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"


def required(config: RunOptions, world_size: int) -> Iterator[str]:
    model, training, data = config.model, config.training, config.data
    given: dict[str, float | None] = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
        "--seq-length": data.seq_length,
        "--micro-batch-size": training.micro_batch_size,
    }
    if not training.skip_train:
        given["--lr"] = config.schedule.lr
    for name, value in given.items():
        if value is None:
            yield f"{name} is required: give it a value"


def some_length(config: RunOptions, world_size: int) -> Iterator[str]:
    training = config.training
    if training.train_iters is None and training.train_samples is None:
        yield "the length of the run is required: give --train-iters or --train-samples"


def layout(config: RunOptions, world_size: int) -> Iterator[str]:
    parallel, model = config.parallel, config.model
    tensor, pipeline, context = (
        max(parallel.tensor_model_parallel_size, 1),
        max(parallel.pipeline_model_parallel_size, 1),
        max(parallel.context_parallel_size, 1),
    )
    product = tensor * pipeline * context
    if world_size % product:
        yield (
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} x "
            f"--context-parallel-size {context} = {product} does not divide the {world_size} "
            f"launched process(es): launch a multiple of {product}"
        )
    for name, number in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--ffn-hidden-size", model.ffn_hidden_size),
        ("--hidden-size", model.hidden_size),
    ):
        if number and number > 0 and number % tensor:
            yield (
                f"{name} {number} is not divisible by --tensor-model-parallel-size {tensor}: "
                f"use {divisors(number)}"
            )


def pipeline(config: RunOptions, world_size: int) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.num_layers
    stages = parallel.pipeline_model_parallel_size
    most = max(stages, layers or 0, config.model.decoder_num_layers or 0)
    if stages < 1 or not layers or layers < 1 or most > MAX_LAYERS:
        return
    try:
        parts = plan_model(config.model, parallel)
    except ConfigError as error:
        yield from error.problems
        return
    chunks = len(parts) // stages
    if parallel.pipeline_schedule in ("1f1b", "zero-bubble") and chunks > 1:
        yield (
            f"--pipeline-schedule {parallel.pipeline_schedule}: takes one part a stage, not "
            f"{chunks}: use interleaved or gpipe, or drop the virtual stages"
        )
    if parallel.pipeline_schedule == "interleaved" and chunks == 1:
        yield (
            "--pipeline-schedule interleaved: needs virtual stages: give "
            "--num-layers-per-virtual-pipeline-stage, or use 1f1b"
        )
    if stages == 1 and chunks > 1:
        yield (
            f"{chunks} virtual stages need a pipeline: give --pipeline-model-parallel-size, or "
            "drop --num-layers-per-virtual-pipeline-stage"
        )


def tensor_parallel(config: RunOptions, world_size: int) -> Iterator[str]:
    parallel, model = config.parallel, config.model
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    groups, head, length = model.num_query_groups, model.kv_channels or 0, config.data.seq_length
    if tensor < 1 or context < 1:
        return
    rows = 2 * groups * head if model.group_query_attention else 0
    if rows > 0 and groups % tensor and tensor % groups:
        yield (
            f"--num-query-groups {groups} neither divides nor is divided by "
            f"--tensor-model-parallel-size {tensor}: use {divisors(groups)}, or a multiple of "
            f"{groups}"
        )
    elif rows > 0 and rows % tensor:
        yield (
            f"2 x --num-query-groups {groups} x --kv-channels {head} = {rows} rows of keys and "
            f"values are not divisible by --tensor-model-parallel-size {tensor}: use "
            f"{divisors(rows)}"
        )
    part = tensor * context
    if parallel.sequence_parallel and length and length > 0 and length % part:
        near = (length // part * part, -(-length // part) * part)
        yield (
            f"--seq-length {length} is not divisible by --tensor-model-parallel-size {tensor} x "
            f"--context-parallel-size {context} = {part}, as --sequence-parallel needs: use "
            f"{' or '.join(str(number) for number in near if number)}"
        )
    recomputes = config.training.recompute_granularity == "full"
    if parallel.distribute_saved_activations and not recomputes:
        yield (
            "--distribute-saved-activations: nothing is split without --recompute-granularity "
            "full: add it, or drop the flag"
        )


def heads(config: RunOptions, world_size: int) -> Iterator[str]:
    model = config.model
    hidden, count, groups = model.hidden_size, model.num_attention_heads, model.num_query_groups
    if not count or count < 1:
        return
    if hidden and hidden > 0 and model.kv_channels == hidden // count and hidden % count:
        yield (
            f"--hidden-size {hidden} is not divisible by --num-attention-heads {count}: use a "
            f"multiple of {count}, or set the size of a head with --kv-channels"
        )
    if model.group_query_attention and groups > 0 and count % groups:
        yield (
            f"--num-attention-heads {count} is not divisible by --num-query-groups {groups}: "
            f"use {divisors(count)}"
        )


def positions(config: RunOptions, world_size: int) -> Iterator[str]:
    model, data, length = config.model, config.data, longest_sequence(config.data)
    longest = model.max_position_embeddings
    if length and longest and longest < length:
        name = "--seq-length" if length == data.seq_length else "--decoder-seq-length"
        yield (
            f"--max-position-embeddings {longest} is less than {name} {length}: "
            f"use at least {length}"
        )
    if not 0 < model.rotary_percent <= 1:
        yield f"--rotary-percent {model.rotary_percent}: must be above 0 and at most 1"
    elif model.position_embedding_type == "rope" and model.kv_channels:
        rotating = int(model.kv_channels * model.rotary_percent)
        if rotating < 2 or rotating % 2:
            yield (
                f"--rotary-percent {model.rotary_percent} of --kv-channels {model.kv_channels} "
                f"rotates {rotating} channels: they turn in pairs, choose an even number"
            )
    if model.use_rope_scaling and model.position_embedding_type != "rope":
        yield (
            "--use-rope-scaling scales rotary frequencies: add --position-embedding-type rope, or "
            "drop it"
        )
    if model.use_rope_scaling and (model.rotary_seq_len_interpolation_factor or 1) > 1:
        yield (
            "--use-rope-scaling and --rotary-seq-len-interpolation-factor "
            f"{model.rotary_seq_len_interpolation_factor} both stretch the context: keep one"
        )


def activation_function(config: RunOptions, world_size: int) -> Iterator[str]:
    model = config.model
    chosen = [
        name
        for name, on in (
            ("--swiglu", model.swiglu),
            ("--geglu", model.geglu),
            ("--relu", model.relu),
            ("--squared-relu", model.squared_relu),
            ("--openai-gelu", model.openai_gelu),
            ("--onnx-safe true", model.onnx_safe),
        )
        if on
    ]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)}: an MLP has one activation function: keep one"


def normalization(config: RunOptions, world_size: int) -> Iterator[str]:
    if config.model.apply_layernorm_1p and config.model.normalization != "LayerNorm":
        yield (
            f"--apply-layernorm-1p goes with LayerNorm, not --normalization "
            f"{config.model.normalization}: drop one"
        )


def precision(config: RunOptions, world_size: int) -> Iterator[str]:
    numbers = config.precision
    half = numbers.fp16 or numbers.bf16
    if numbers.fp16 and numbers.bf16:
        yield "--fp16 and --bf16 exclude each other: keep one"
    if config.model.use_flash_attn and not half:
        yield "--use-flash-attn computes in 16 bits: add --bf16 or --fp16"
    head = config.model.kv_channels
    misfit = flash_head_misfit(head) if config.model.use_flash_attn and head else ""
    if misfit:
        yield (
            f"--use-flash-attn: {misfit}: choose another --num-attention-heads or --kv-channels, "
            "or drop the flag"
        )
    if numbers.fp32_residual_connection and not half:
        yield "--fp32-residual-connection has no meaning in fp32: drop it, or add --bf16 or --fp16"
    if numbers.fp16_lm_cross_entropy and not numbers.fp16:
        yield "--fp16-lm-cross-entropy needs --fp16: add it, or drop this flag"
    impl = numbers.cross_entropy_fusion_impl
    if impl != "native" and not numbers.cross_entropy_loss_fusion:
        yield (
            f"--cross-entropy-fusion-impl {impl} has no meaning with "
            "--no-cross-entropy-loss-fusion: drop one of them"
        )
    dynamic = numbers.fp16 and numbers.loss_scale is None
    if dynamic and numbers.min_loss_scale > numbers.initial_loss_scale:
        yield (
            f"--min-loss-scale {numbers.min_loss_scale:g} is above --initial-loss-scale "
            f"{numbers.initial_loss_scale:g}: lower it"
        )
