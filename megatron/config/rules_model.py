"""Rules for required flags, for the network except attention, and for number formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

from megatron.config.experts import mixture_layers
from megatron.config.fields import divisors
from megatron.config.model import ModelOptions, flash_head_problem
from megatron.config.resolve import longest_sequence
from megatron.config.retro import retro_layers
from megatron.config.rules_parallel import Exclusions, excluded
from megatron.config.run import RunOptions, field_at, flatten
from megatron.config.stages import LAYOUT_FLAG, possible_plan, predictions_in
from megatron.errors import ConfigError

MULTIPLE = 16  # the dimensions of 8-bit matrix products must be multiples of this
_FEWEST_BUCKETS = 4
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
_NOT_WITH_GATING: Exclusions = {
    "model.moe_router_score_function": (("softmax",), "its scores are a softmax"),
    "model.moe_router_num_groups": ((None,), "it has no groups"),
    "model.moe_router_topk_scaling_factor": ((None,), "its weights are the scores"),
    "model.moe_router_enable_expert_bias": ((False,), "it has no biases"),
    "model.moe_token_drop_policy": (
        ("probs",),
        "it chooses the kept tokens in its own way",
    ),
}
_NOT_WITH_SINKHORN: Exclusions = {
    "model.moe_router_gating": (("core",), "DeepSpeed has no such router"),
    "model.moe_router_score_function": (
        ("softmax",),
        "weights are a softmax (a sigmoid for a single expert)",
    ),
    "model.moe_router_num_groups": ((None,), "it balances over all experts"),
    "model.moe_router_topk_scaling_factor": ((None,), "weights are the scores"),
    "model.moe_router_enable_expert_bias": ((False,), "both balance the choice of experts"),
}
_NOT_WITH_MULTI_TOKEN: Exclusions = {
    "preferences.preference_loss": ((None,), "it is a loss of whole answers"),
    "model.position_embedding_type": (
        ("rope", "none"),
        "as in Megatron Core, its positions are rope or none",
    ),
    "model.embed_layernorm": ((False,), "its layers read embeddings without a normalization"),
}
_ACTIVATIONS = (
    "swiglu",
    "geglu",
    "quick_geglu",
    "relu",
    "squared_relu",
    "openai_gelu",
    "onnx_safe",
)


def required(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if a size of the network, of samples or of batches, or --lr is missing.

    Runs that only evaluate, and range tests, need no --lr.
    """
    paths = [f"model.{name}" for name in _REQUIRED]
    paths += ["data.seq_length", "training.micro_batch_size"]
    if not config.training.skip_train and config.schedule.lr_decay_style != "range-test":
        paths.append("schedule.lr")
    values = flatten(config)
    for path in paths:
        if values[path] is None:
            yield f"{field_at(path).names[0]} is required: give it a value"


def required_length(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if the length of the run is missing."""
    training = config.training
    has_epochs = config.finetuning.train_epochs is not None
    if config.schedule.lr_wsd_branch_from is not None:
        return  # the branch ends with its final decay
    if not training.has_count and training.train_tokens is None and not has_epochs:
        yield (
            "the length of the run is required: give --train-iters, --train-samples or "
            f"--train-tokens{', or --train-epochs' * config.finetuning.sft}"
        )


def heads(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if the hidden size or the number of heads is not divisible as required."""
    model = config.model
    hidden, count, groups = model.hidden_size, model.num_attention_heads, model.num_query_groups
    if not count or count < 1:
        return
    is_derived = model.kv_channels == (hidden or 0) // count and not model.multi_latent_attention
    if hidden and hidden > 0 and is_derived and hidden % count:
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
    """Yield an error for each mistake in the position embedding."""
    model, length = config.model, longest_sequence(config.data)
    longest, factor = model.max_position_embeddings, 1.0
    if model.rope_type == "dynamic":
        factor = model.rotary_scaling_factor
    if length and longest and longest * factor < length:
        name = "--seq-length" if length == config.data.seq_length else "--decoder-seq-length"
        times = f" x --rotary-scaling-factor {factor:g}" if factor > 1 else ""
        yield (
            f"--max-position-embeddings {longest}{times} is less than {name} {length}: "
            f"use at least {math.ceil(length / factor)}"
        )
    fits = 0 < model.rotary_percent <= 1 and not model.multi_latent_attention
    if fits and model.position_embedding_type == "rope" and model.kv_channels:
        rotating = int(model.kv_channels * model.rotary_percent)
        if model.rope_type == "proportional" and model.kv_channels % 2:
            yield (
                f"--rope-type proportional with --kv-channels {model.kv_channels}: channels of a "
                "whole head form pairs: choose an even number"
            )
        if rotating < 2 or rotating % 2:
            yield (
                f"--rotary-percent {model.rotary_percent} of --kv-channels {model.kv_channels} "
                f"rotates {rotating} channels, but channels rotate in pairs: choose values that "
                "give an even number"
            )
    stretch = model.rotary_seq_len_interpolation_factor or 1
    if model.use_rope_scaling and stretch > 1:
        yield (
            f"--use-rope-scaling and --rotary-seq-len-interpolation-factor {stretch:g} both extend "
            "the context: use one of them"
        )


def activation_function(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if several activation functions are given."""
    values = {name: getattr(config.model, name) for name in _ACTIVATIONS}
    chosen = [field_at(f"model.{name}").spell(True) for name, on in values.items() if on]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)}: an MLP has a single activation function: use one of them"


def multi_token(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with multi-token prediction."""
    depths, layout = config.model.mtp_num_layers, config.parallel.pipeline_model_parallel_layout
    predictions = 0
    if layout is not None:
        with suppress(ConfigError):  # another rule reports it
            predictions = predictions_in(layout)
    if predictions and predictions != depths:
        yield (
            f"{LAYOUT_FLAG} {layout}: names {predictions} layer{'s' * (predictions > 1)} of "
            f"multi-token prediction (m), and --mtp-num-layers is {depths or 'not given'}: name as "
            "many, or none"
        )
    if not depths:
        return
    flag = f"--mtp-num-layers {depths}"
    yield from excluded(config, flag, _NOT_WITH_MULTI_TOKEN)
    if config.distillation.is_on:
        yield (
            f"{flag} cannot be combined with distillation, which has its own loss: drop one of them"
        )


def experts(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the experts and their router."""
    model = config.model
    counts, topk = model.expert_counts, model.moe_router_topk
    flag = f"--num-experts {' '.join(map(str, model.num_experts or ()))}"
    if model.num_experts and not counts:
        yield f"{flag}: no layer has more than one expert: drop the flag"
    if not counts:
        return
    if model.architecture != "gpt":
        yield (
            f"{flag}: only a GPT has mixture layers, and this model is a "
            f"{model.architecture.upper()}: drop the flag"
        )
    try:
        mixture_layers(model, model.num_layers or 1)
    except ValueError as error:
        if model.num_layers or "layers" not in str(error):
            yield f"--moe-layer-freq {model.moe_layer_freq}: {error}"
    if topk > counts[0] > 0:
        yield f"--moe-router-topk {topk} is above --num-experts {counts[0]}: lower it"
    if model.mlp_type == "residual" and model.moe_shared_expert_intermediate_size is not None:
        yield (
            "--mlp-type residual with --moe-shared-expert-intermediate-size "
            f"{model.moe_shared_expert_intermediate_size}: both are MLPs that every token passes "
            "through: drop one of them"
        )
    if model.moe_router_enable_expert_bias and model.moe_router_score_function == "softmax":
        yield (
            "--moe-router-enable-expert-bias requires --moe-router-score-function sigmoid or "
            "sqrtsoftplus, whose scores do not depend on each other: change one of them"
        )
    kinds, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if len(kinds) != len(weights):
        yield (
            f"--moe-aux-loss-coeff has {len(weights)} value{'s' * (len(weights) > 1)}, and "
            f"--moe-router-load-balancing-type {len(kinds)}: give one coefficient for each loss"
        )
    elif len(set(kinds)) < len(kinds):
        yield "--moe-router-load-balancing-type names a loss twice: name each once"


def without_router_biases(model: ModelOptions) -> Iterator[str]:
    """Yield a notice if Megatron Core would give routers biases that this network lacks."""
    has_core_routers = model.num_experts and model.moe_router_gating == "core"
    if has_core_routers and model.add_bias_linear and not model.moe_router_bias:
        yield (
            "--num-experts with biases: Megatron Core 0.15 and later also has biases in routers: "
            "add --moe-router-bias to train the same network"
        )


def sinkhorn(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each router flag that cannot be combined with Sinkhorn balancing."""
    model = config.model
    kinds = model.moe_router_load_balancing_type
    if not model.num_experts or "sinkhorn" not in kinds:
        return
    yield from excluded(config, "--moe-router-load-balancing-type sinkhorn", _NOT_WITH_SINKHORN)
    if len(kinds) > 1:
        yield (
            f"--moe-router-load-balancing-type {' '.join(kinds)}: sinkhorn balances without a "
            "loss: use it alone"
        )
    elif any(model.moe_aux_loss_coeff):
        yield (
            "--moe-router-load-balancing-type sinkhorn balances without a loss: drop "
            "--moe-aux-loss-coeff"
        )


def gating(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each router flag that DeepSpeed's gating does not support."""
    model = config.model
    if not model.num_experts or model.moe_router_gating != "deepspeed":
        return
    yield from excluded(config, "--moe-router-gating deepspeed", _NOT_WITH_GATING)
    topk = model.moe_router_topk
    if model.noisy_gate_policy == "RSample" and topk != 1:
        yield (
            f"--noisy-gate-policy RSample with --moe-router-topk {topk}: it draws a token's only "
            "expert: use --moe-router-topk 1, or drop the flag"
        )
    if model.noisy_gate_policy == "Jitter" and model.moe_input_jitter_eps is not None:
        yield (
            f"--noisy-gate-policy Jitter with --moe-input-jitter-eps {model.moe_input_jitter_eps}: "
            "both multiply the router's input by noise: drop one of them"
        )


def expert_groups(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the flags for groups of experts."""
    model = config.model
    topk = model.moe_router_topk
    groups, group_topk = model.moe_router_num_groups, model.moe_router_group_topk
    score_topk = model.moe_router_group_score_topk
    if (groups is None) != (group_topk is None):
        yield "--moe-router-num-groups and --moe-router-group-topk must be combined: give both"
    if groups is None or group_topk is None or min(groups, group_topk, *model.expert_counts) < 1:
        return  # `bounds` reports the last case
    for count in model.expert_counts:
        if count % groups:
            yield (
                f"--num-experts {count} is not divisible by --moe-router-num-groups {groups}: "
                f"use {divisors(count)}"
            )
        elif group_topk > groups:
            yield (
                f"--moe-router-group-topk {group_topk} is above --moe-router-num-groups {groups}: "
                "lower it"
            )
        elif score_topk is not None:
            maximum = count // groups
            if score_topk > maximum:
                yield (
                    f"--moe-router-group-score-topk {score_topk} is above the {maximum} experts of "
                    "a group: lower it"
                )
            if topk > group_topk * maximum:
                yield (
                    f"--moe-router-topk {topk} is above the {group_topk * maximum} experts of "
                    f"--moe-router-group-topk {group_topk} groups: lower it"
                )
        elif topk % group_topk or topk // group_topk > count // groups:
            yield (
                f"--moe-router-topk {topk}: each of the --moe-router-group-topk {group_topk} "
                f"groups of {count // groups} experts contributes the same number: use a multiple "
                f"of {group_topk} up to {group_topk * (count // groups)}"
            )


def normalization(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the normalization."""
    model = config.model
    placed = f"--norm-placement {model.norm_placement}"
    if model.parallel_residual:
        for name, on in (
            (placed, model.norm_placement != "before"),
            (
                "--apply-residual-connection-post-layernorm",
                model.apply_residual_connection_post_layernorm,
            ),
        ):
            if on:
                yield (
                    f"--parallel-residual with {name}: attention and MLP read the same input, "
                    "normalized for each: drop one of them"
                )
    if model.norm_placement != "before" and model.apply_residual_connection_post_layernorm:
        yield (
            f"--norm-placement {model.norm_placement} with "
            "--apply-residual-connection-post-layernorm, which takes the residual after a "
            "normalization before each block: drop one of them"
        )


def precision(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the flags of 16-bit training and of fused operations."""
    options, head = config.precision, config.model.kv_channels
    if options.fp16 and options.bf16:
        yield "--fp16 and --bf16 cannot be combined: use one of them"
    problem = flash_head_problem(head) if config.model.use_flash_attn and head else ""
    if problem:
        yield (
            f"--use-flash-attn: {problem}: choose another --num-attention-heads or --kv-channels, "
            "or drop the flag"
        )
    impl, bound = options.cross_entropy_fusion_impl, config.model.final_logit_softcapping
    if impl == "linear" and bound is not None:
        yield (
            f"--cross-entropy-fusion-impl linear with --final-logit-softcapping {bound:g}: its "
            "chunks of scores are not bounded: use native"
        )
    if impl != "native" and not options.cross_entropy_loss_fusion:
        yield (
            f"--cross-entropy-fusion-impl {impl} cannot be combined with "
            "--no-cross-entropy-loss-fusion: drop one of them"
        )
    dynamic = options.fp16 and options.loss_scale is None
    if dynamic and options.min_loss_scale > options.initial_loss_scale:
        yield (
            f"--min-loss-scale {options.min_loss_scale:g} is above --initial-loss-scale "
            f"{options.initial_loss_scale:g}: lower it"
        )


def architecture(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each value that the architecture does not support."""
    kind, context = config.model.architecture, config.parallel.context_parallel_size
    positions = config.model.position_embedding_type
    for name, supporting in (("relative", "t5"), ("alibi", "gpt")):
        if positions == name and kind != supporting:
            yield (
                f"--position-embedding-type {name} is only for {supporting.upper()}, and this "
                f"model is a {kind.upper()}: drop it"
            )
    if kind not in ("gpt", "retro") and context > 1:
        yield (
            f"--context-parallel-size {context}: context parallelism does not support the padding "
            f"masks of {kind.upper()}: use 1"
        )


def relative_positions(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for invalid relative position buckets and for incompatible settings."""
    model, parallel = config.model, config.parallel
    buckets, longest = model.relative_attention_num_buckets, model.relative_attention_max_distance
    if model.position_embedding_type != "relative":
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
    parts = possible_plan(config.model, parallel)
    if parallel.zero_stage == 3 and len(parts) > parallel.pipeline_model_parallel_size:
        yield (
            "--zero-stage 3 with --position-embedding-type relative and virtual stages: the "
            "virtual stages of a rank share a table, which would be freed while another one needs "
            "it: use --zero-stage 1, or one virtual stage"
        )


def t5(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each missing setting that T5 requires, and for unsupported settings."""
    if config.model.architecture != "t5":
        return
    length, parallel = config.data.decoder_seq_length, config.parallel
    if length is None:
        yield "--decoder-seq-length is required: give it a value, like --encoder-seq-length"
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


def retro(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each missing setting that Retro requires, and for unsupported settings."""
    model, parallel, chunk = config.model, config.parallel, config.model.retro_chunk_length
    if model.architecture != "retro":
        return
    if config.data.retro_workdir is None:
        yield "--retro-workdir is required: give the folder that tools/retro/main.py created"
        return
    layers, length = model.num_layers or 0, config.data.seq_length or 0
    if layers > 0 and not retro_layers(layers):
        yield (
            f"--num-layers {layers}: the first layer that attends to neighbors is number "
            f"{retro_layers(layers).start + 1}: use at least that many layers, or pretrain_gpt.py"
        )
    if config.data.mock_data:
        yield "--mock-data: Retro's data comes from --retro-workdir: drop it"
    if not chunk or chunk < 1:
        return
    chunks_text, tensor = f"chunks of {chunk} tokens", parallel.tensor_model_parallel_size
    if length % chunk:
        yield (
            f"--seq-length {length} is not divisible into {chunks_text} of --retro-workdir: use a "
            f"multiple of {chunk}"
        )
    elif parallel.context_parallel_size > 1 and length % (
        2 * parallel.context_parallel_size * chunk
    ):
        yield (
            f"--context-parallel-size {parallel.context_parallel_size}: the pieces of --seq-length "
            f"{length}, two for each process, do not end between {chunks_text}: use fewer processes"
        )
    retrieved = chunk * model.retro_num_retrieved_chunks
    if parallel.sequence_parallel and tensor > 0 and retrieved % tensor:
        yield (
            f"--sequence-parallel: a neighbor has {retrieved} tokens, which do not divide evenly "
            f"over --tensor-model-parallel-size {tensor}: drop it, or use another size"
        )
    longest = model.max_position_embeddings
    if model.position_embedding_type == "learned_absolute" and longest and retrieved > longest:
        yield (
            f"--retro-num-retrieved-chunks {model.retro_num_retrieved_chunks}: a neighbor has "
            f"{retrieved} tokens, more than --max-position-embeddings {longest}: use fewer"
        )


def fp8(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the settings of FP8 training."""
    precision, stage = config.precision, config.parallel.zero_stage or 0
    if precision.fp8_param_gather and precision.fp8_recipe == "rowwise":
        yield (
            "--fp8-param-gather with --fp8-recipe rowwise: a process's shard may end within a row, "
            "and each row has its own scale: use tensorwise or delayed, or drop the flag"
        )
    if precision.fp8_param_gather and stage == 0:
        yield (
            "--fp8-param-gather requires a sharded update: add --use-distributed-optimizer, or "
            "drop the flag"
        )
    if precision.fp8_format is None:
        return
    flag = f"--fp8-format {precision.fp8_format}"
    if not (precision.bf16 or precision.fp16):
        yield f"{flag} requires 16-bit weights: add --bf16"
    if precision.fp16 and config.model.num_experts:
        yield f"{flag} with --num-experts requires bf16: use --bf16 in place of --fp16"
    if stage == 3:
        yield (
            f"{flag} keeps 8-bit copies of whole weights, which defeats the purpose of "
            "--zero-stage 3: use --zero-stage 1 or 2, or drop --fp8-format"
        )
    layers = config.model.num_layers
    if layers and precision.first_last_layers_bf16 and not precision.fp8_layers(layers):
        yield (
            f"--num-layers-at-start-in-bf16 {precision.num_layers_at_start_in_bf16} and "
            f"--num-layers-at-end-in-bf16 {precision.num_layers_at_end_in_bf16} leave none of "
            f"--num-layers {layers} in FP8: lower them, or drop {flag}"
        )
    for name, size, parts in _sizes(config):
        if size % (MULTIPLE * parts):
            share = f" on each of {parts} processes" if parts > 1 else ""
            yield (
                f"{flag}: {name} {size} is not a multiple of {MULTIPLE}{share}: use a multiple of "
                f"{MULTIPLE * parts}, or drop --fp8-format"
            )


def _sizes(config: RunOptions) -> Iterator[tuple[str, int, int]]:
    """Yield each dimension of an 8-bit matrix product: its name, size and number of shards."""
    model, parallel, data = config.model, config.parallel, config.data
    split, context = max(1, parallel.tensor_model_parallel_size), parallel.context_parallel_size
    micro_batch = config.training.micro_batch_size or 0
    heads = model.num_attention_heads or 0
    yield from mlp_sizes(config)
    yield from _attention_sizes(model, heads, split)
    if model.experimental_attention_variant is not None:
        keys = model.linear_num_key_heads * model.linear_key_head_dim
        value_heads = model.linear_num_value_heads
        values = value_heads * model.linear_value_head_dim
        yield "--linear-num-value-heads x --linear-value-head-dim", values, split
        projected = 2 * (keys + values + value_heads)
        yield "the input projection of gated delta nets, with width", projected, split
    yield "--micro-batch-size x --seq-length", micro_batch * (data.seq_length or 0), max(1, context)
    if config.evaluation.takes_place and config.evaluation.eval_micro_batch_size:
        evaluated = config.evaluation.eval_micro_batch_size * (data.seq_length or 0)
        yield "--eval-micro-batch-size x --seq-length", evaluated, max(1, context)
    decoder_tokens = micro_batch * (data.decoder_seq_length or 0)
    yield "--micro-batch-size x --decoder-seq-length", decoder_tokens, 1


def mlp_sizes(config: RunOptions) -> Iterator[tuple[str, int, int]]:
    """Yield each width of the MLPs and experts: its name, size and number of shards."""
    model, parallel = config.model, config.parallel
    split = max(1, parallel.tensor_model_parallel_size)
    yield "--hidden-size", model.hidden_size or 0, 1
    yield "--ffn-hidden-size", model.ffn_hidden_size or 0, split
    if model.num_experts:
        of_experts = parallel.expert_tensor_parallel_size or split
        yield "--moe-ffn-hidden-size", model.moe_ffn_hidden_size or 0, of_experts
        shared = model.moe_shared_expert_intermediate_size or 0
        yield "--moe-shared-expert-intermediate-size", shared, split


def _attention_sizes(model: ModelOptions, heads: int, split: int) -> Iterator[tuple[str, int, int]]:
    """Yield each dimension of attention's projections: its name, size and number of shards."""
    if model.multi_latent_attention:
        plain, rotary = model.qk_head_dim, model.qk_pos_emb_head_dim
        yield "--num-attention-heads x --v-head-dim", heads * model.v_head_dim, split
        yield "--q-lora-rank", model.q_lora_rank or 0, 1
        yield "--kv-lora-rank", model.kv_lora_rank, 1
        yield "--kv-lora-rank + --qk-pos-emb-head-dim", model.kv_lora_rank + rotary, 1
        name = "--num-attention-heads x (--qk-head-dim + --qk-pos-emb-head-dim)"
        yield name, heads * (plain + rotary), split
        name = "--num-attention-heads x (--qk-head-dim + --v-head-dim)"
        yield name, heads * (plain + model.v_head_dim), split
        return
    head, gates = model.kv_channels or 0, 1 + model.attention_output_gate
    yield "--num-attention-heads x --kv-channels", heads * head, split
    if model.group_query_attention:
        queries = f"{gates} x " * (gates > 1) + "--num-attention-heads"
        name = f"({queries} + 2 x --num-query-groups) x --kv-channels"
        yield name, (gates * heads + 2 * model.num_query_groups) * head, split
