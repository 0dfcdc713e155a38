"""Rules of what must be given, of the network and its number formats, by architecture."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.data import DataOptions
from megatron.config.fields import divisors, fields_of
from megatron.config.model import ModelOptions, flash_head_misfit
from megatron.config.precision import PrecisionConfig
from megatron.config.resolve import longest_sequence
from megatron.config.run import RunOptions
from megatron.config.stages import plan_model
from megatron.errors import ConfigError


def required(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield the flags that every training run must have and that are missing."""
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
    """Yield that the length of the run is missing."""
    training = config.training
    if training.train_iters is None and training.train_samples is None:
        yield "the length of the run is required: give --train-iters or --train-samples"


def heads(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield head counts that do not divide as they must."""
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
    """Yield mistakes in the position embedding."""
    model, data, length = config.model, config.data, longest_sequence(config.data)
    longest = model.max_position_embeddings
    if length and longest and longest < length:
        name = "--seq-length" if length == data.seq_length else "--decoder-seq-length"
        yield (
            f"--max-position-embeddings {longest} is less than {name} {length}: "
            f"use at least {length}"
        )
    fits = 0 < model.rotary_percent <= 1
    if fits and model.position_embedding_type == "rope" and model.kv_channels:
        rotating = int(model.kv_channels * model.rotary_percent)
        if rotating < 2 or rotating % 2:
            yield (
                f"--rotary-percent {model.rotary_percent} of --kv-channels {model.kv_channels} "
                f"rotates {rotating} channels, but channels rotate in pairs: choose values that "
                "give an even number"
            )
    if model.use_rope_scaling and model.position_embedding_type != "rope":
        yield (
            "--use-rope-scaling requires --position-embedding-type rope: add it, or drop the flag"
        )
    if model.use_rope_scaling and (model.rotary_seq_len_interpolation_factor or 1) > 1:
        yield (
            "--use-rope-scaling and --rotary-seq-len-interpolation-factor "
            f"{model.rotary_seq_len_interpolation_factor} both extend the context: use one of them"
        )


def activation_function(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield that several activation functions are named."""
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
        yield f"{' and '.join(chosen)}: an MLP has a single activation function: use one of them"


def normalization(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield mistakes in the normalization."""
    if config.model.apply_layernorm_1p and config.model.normalization != "LayerNorm":
        yield (
            "--apply-layernorm-1p requires LayerNorm and cannot be combined with --normalization "
            f"{config.model.normalization}: drop one of them"
        )


def precision(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield mistakes in the number formats, other than FP8."""
    numbers = config.precision
    half = numbers.fp16 or numbers.bf16
    if numbers.fp16 and numbers.bf16:
        yield "--fp16 and --bf16 cannot be combined: use one of them"
    if config.model.use_flash_attn and not half:
        yield "--use-flash-attn requires 16-bit weights: add --bf16 or --fp16"
    head = config.model.kv_channels
    misfit = flash_head_misfit(head) if config.model.use_flash_attn and head else ""
    if misfit:
        yield (
            f"--use-flash-attn: {misfit}: choose another --num-attention-heads or --kv-channels, "
            "or drop the flag"
        )
    if numbers.fp32_residual_connection and not half:
        yield (
            "--fp32-residual-connection requires --bf16 or --fp16: add one of them, or drop the "
            "flag"
        )
    if numbers.fp16_lm_cross_entropy and not numbers.fp16:
        yield "--fp16-lm-cross-entropy requires --fp16: add it, or drop this flag"
    impl = numbers.cross_entropy_fusion_impl
    if impl != "native" and not numbers.cross_entropy_loss_fusion:
        yield (
            f"--cross-entropy-fusion-impl {impl} cannot be combined with "
            "--no-cross-entropy-loss-fusion: drop one of them"
        )
    dynamic = numbers.fp16 and numbers.loss_scale is None
    if dynamic and numbers.min_loss_scale > numbers.initial_loss_scale:
        yield (
            f"--min-loss-scale {numbers.min_loss_scale:g} is above --initial-loss-scale "
            f"{numbers.initial_loss_scale:g}: lower it"
        )


_FEWEST_BUCKETS = 4
_SHOWN = {"gpt": "GPT", "bert": "BERT", "t5": "T5"}


def architecture(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield flags that belong to another architecture."""
    kind = config.model.architecture
    data, parallel, model = config.data, config.parallel, config.model
    split_rank = parallel.pipeline_model_parallel_split_rank
    for owner, name, given in (
        ("gpt", "--reset-position-ids", data.reset_position_ids),
        ("gpt", "--reset-attention-mask", data.reset_attention_mask),
        ("gpt", "--eod-mask-loss", data.eod_mask_loss),
        ("bert", "--bert-no-binary-head", not model.bert_binary_head),
        ("t5", f"--decoder-num-layers {model.decoder_num_layers}", model.decoder_num_layers),
        ("t5", f"--decoder-seq-length {data.decoder_seq_length}", data.decoder_seq_length),
        ("t5", f"--pipeline-model-parallel-split-rank {split_rank}", split_rank is not None),
        ("t5", "--position-embedding-type relative", model.position_embedding_type == "relative"),
        ("t5", "--scale-decoder-outputs", model.scale_decoder_outputs),
        ("t5", "--disable-output-bias", not model.add_output_bias),
        ("t5", f"--softmax-scale {model.softmax_scale}", model.softmax_scale is not None),
    ):
        if given and kind != owner:
            yield f"{name} is only for {_SHOWN[owner]}, and this model is a {_SHOWN[kind]}: drop it"
    if kind == "gpt":
        yield from _of_sentences(data)
        return
    if parallel.context_parallel_size > 1:
        yield (
            f"--context-parallel-size {parallel.context_parallel_size}: context parallelism does "
            f"not support the padding masks of {_SHOWN[kind]}: use 1"
        )


def _of_sentences(data: DataOptions) -> Iterator[str]:
    """Yield flags that only change the samples of BERT and T5."""
    for name in ("mask_prob", "short_seq_prob"):
        value = getattr(data, name)
        if value != getattr(DataOptions(), name):
            flag = f"--{name.replace('_', '-')} {value}"
            yield f"{flag} is only for BERT and T5, and this model is a GPT: drop it"


def relative_positions(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield mistakes in relative positions: their buckets, and what they do not go with."""
    model, parallel = config.model, config.parallel
    buckets, longest = model.relative_attention_num_buckets, model.relative_attention_max_distance
    if model.position_embedding_type != "relative":
        for field in ("relative_attention_num_buckets", "relative_attention_max_distance"):
            value = getattr(model, field)
            if value != getattr(ModelOptions(), field):
                yield (
                    f"--{field.replace('_', '-')} {value} requires --position-embedding-type "
                    "relative: add it, or drop this flag"
                )
        return
    if buckets < _FEWEST_BUCKETS or buckets % 2:
        yield (
            f"--relative-attention-num-buckets {buckets}: an encoder uses half of them for each "
            f"direction: use an even number of at least {_FEWEST_BUCKETS}"
        )
    elif longest <= buckets // 2:
        yield (
            f"--relative-attention-max-distance {longest}: the first {buckets // 2} distances of "
            f"--relative-attention-num-buckets {buckets} have a bucket each: use at least "
            f"{buckets // 2 + 1}"
        )
    if parallel.zero_stage == 3 and _has_virtual_stages(config):
        yield (
            "--zero-stage 3 with --position-embedding-type relative and virtual stages: the "
            "virtual stages of a rank share a table, which would be freed while another one needs "
            "it: use --zero-stage 1, or one virtual stage"
        )


def _has_virtual_stages(config: RunOptions) -> bool:
    try:
        parts = plan_model(config.model, config.parallel)
    except (ConfigError, AssertionError):  # other rules say so
        return False
    return len(parts) > config.parallel.pipeline_model_parallel_size


def t5(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield what a T5's encoder and decoder lack."""
    if config.model.architecture != "t5":
        return
    length, parallel = config.data.decoder_seq_length, config.parallel
    if length is None:
        yield "--decoder-seq-length is required: give it a value, as --encoder-seq-length"
    if config.model.group_query_attention:
        yield (
            "--group-query-attention: the cross attention of a T5 has a key and a value for every "
            "head: drop it"
        )
    tensor = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and length and tensor > 0 and length % tensor:
        yield (
            f"--decoder-seq-length {length} is not divisible by --tensor-model-parallel-size "
            f"{tensor}, as --sequence-parallel requires: use a multiple of {tensor}"
        )


MULTIPLE = 16  # sizes of a matrix that hardware multiplies in 8 bits

# Settings that only the delayed recipe has.
_OF_HISTORY = ("fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo")


def fp8(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield mistakes in the settings of FP8 training."""
    numbers = config.precision
    yield from _history(numbers)
    yield from _gather(config)
    if numbers.fp8_format is None:
        if not numbers.fp8_wgrad:
            yield "--no-fp8-wgrad requires --fp8-format: add it, or drop the flag"
        if numbers.fp8_recipe != "tensorwise":
            yield (
                f"--fp8-recipe {numbers.fp8_recipe} requires --fp8-format: add it, or drop the flag"
            )
        return
    if not (numbers.bf16 or numbers.fp16):
        yield f"--fp8-format {numbers.fp8_format} requires 16-bit weights: add --bf16"
    if config.parallel.zero_stage == 3:
        yield (
            f"--fp8-format {numbers.fp8_format} keeps 8-bit copies of whole weights, which defeats "
            "the purpose of --zero-stage 3: use --zero-stage 1 or 2, or drop --fp8-format"
        )
    yield from _sizes(config)


def _history(numbers: PrecisionConfig) -> Iterator[str]:
    """Yield the given settings of --fp8-recipe delayed without it. At their defaults they pass."""
    for field in fields_of(PrecisionConfig):
        value = getattr(numbers, field.name)
        if field.name in _OF_HISTORY and numbers.fp8_recipe != "delayed" and value != field.default:
            yield (f"{field.spell(value)} requires --fp8-recipe delayed: add it, or drop this flag")


def _gather(config: RunOptions) -> Iterator[str]:
    numbers, stage = config.precision, config.parallel.zero_stage or 0
    if not numbers.fp8_param_gather:
        return
    shown = "--fp8-param-gather"
    if numbers.fp8_format is None:
        yield f"{shown} requires --fp8-format: add it, or drop the flag"
    if numbers.fp8_recipe == "rowwise":
        yield (
            f"{shown} with --fp8-recipe rowwise: a process's shard may end within a row, and each "
            "row has its own scale: use tensorwise or delayed, or drop the flag"
        )
    if stage == 0:
        yield (
            f"{shown} requires a sharded update: add --use-distributed-optimizer, or drop the flag"
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
