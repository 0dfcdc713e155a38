"""Rules for settings that Megatron-LM's files cannot store, checked before the first save."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron.config.fields import divisors
from megatron.config.hybrid import MAMBA
from megatron.config.model import ModelOptions
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunOptions
from megatron.config.stages import megatron_layout_problem, possible_plan

# With one of these, a pattern of --freeze may match some layers and not others.
_LAYER_NUMBER = re.compile(r"[0-9?[]")


def core_files(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that --ckpt-format torch_dist cannot store."""
    checkpoint, model = config.checkpoint, config.model
    if checkpoint.ckpt_format != "torch_dist" or checkpoint.save is None:
        return
    remedy = "use --ckpt-format native"
    if needs_engine(model) and checkpoint.transformer_impl == "local":
        yield (
            "--ckpt-format torch_dist with --transformer-impl local: Megatron Core has gated delta "
            "nets and hybrid models only with Transformer Engine: drop --transformer-impl local"
        )
    has_mamba = MAMBA in (model.hybrid_layer_pattern or "")
    is_plain = not config.parallel.use_distributed_optimizer and not checkpoint.no_save_optim
    if has_mamba and is_plain and (config.precision.bf16 or config.precision.fp16):
        yield (
            "--ckpt-format torch_dist with Mamba-2 in 16 bits: Megatron Core keeps some of its "
            "weights in fp32, and saves their optimizer states only with the distributed "
            "optimizer: add --use-distributed-optimizer or --no-save-optim"
        )
    if model.architecture != "gpt":
        yield f"--ckpt-format torch_dist: only GPTs are written for Megatron Core: {remedy}"
    for name in unsupported_by_core(model):
        yield f"--ckpt-format torch_dist with {name}: Megatron Core does not support it: {remedy}"
    if config.optimizer.optimizer == "sgd" and config.parallel.use_distributed_optimizer:
        yield (
            "--ckpt-format torch_dist with --use-distributed-optimizer: Megatron Core's "
            "distributed optimizer stores Adam's states, not those of --optimizer sgd: drop one "
            "of the three flags"
        )
    if config.schedule.decoupled_lr is not None and not checkpoint.no_save_optim:
        yield (
            f"--ckpt-format torch_dist with --decoupled-lr {config.schedule.decoupled_lr:g}: such "
            f"optimizer states are not written for Megatron Core: {remedy}"
        )
    frozen = [pattern for pattern in model.freeze or () if _LAYER_NUMBER.search(pattern)]
    if frozen and not checkpoint.no_save_optim:
        yield (
            f"--ckpt-format torch_dist with --freeze {' '.join(frozen)}: Megatron Core stores the "
            "optimizer states of all layers in one tensor: freeze the same weights in every layer, "
            "use --ckpt-format native, or add --no-save-optim"
        )
    yield from _muon_states(config)
    yield from _schedule_in_tokens(config)


def core_torch_files(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that --ckpt-format torch cannot store.

    `checkpoint.legacy.file_plan` rejects parameters that have no place in such files.
    """
    checkpoint, model, parallel = config.checkpoint, config.model, config.parallel
    if checkpoint.ckpt_format != "torch" or checkpoint.save is None:
        return
    flag, remedy = "--ckpt-format torch", "use --ckpt-format native"
    if model.architecture not in ("gpt", "bert"):
        yield f"{flag}: only GPTs and BERTs are written in this format: {remedy}"
    if model.architecture == "bert" and checkpoint.transformer_impl == "local":
        yield (
            f"{flag} with --transformer-impl local: Megatron Core's pretrain_bert.py builds "
            "Transformer Engine's layers regardless of this flag: drop it"
        )
    for name in unsupported_by_core(model):
        yield f"{flag} with {name}: Megatron Core does not support it: {remedy}"
    for name, on in (
        ("--softmax-type learnable", model.softmax_type == "learnable"),
        (f"--mtp-num-layers {model.mtp_num_layers}", bool(model.mtp_num_layers)),
        (f"--fp8-format {config.precision.fp8_format}", config.precision.fp8_format is not None),
    ):
        if on:
            yield f"{flag} with {name}: it cannot be written in this format: use torch_dist"
    problem = tensor_split_problem(model, parallel.tensor_model_parallel_size)
    if problem and model.group_query_attention:  # without groups, other rules reject the split
        yield f"{flag}: Megatron Core {problem}, or {remedy}"
    sizes = [str(len(part.layers)) for part in possible_plan(model, parallel)]
    if len(set(sizes)) > 1:
        yield (
            f"{flag}: every stage must have the same number of layers, but here they have "
            f"{', '.join(sizes)}: use --ckpt-format torch_dist or native"
        )
    if checkpoint.no_save_optim:
        return
    for name, on in (
        ("--use-distributed-optimizer", parallel.use_distributed_optimizer),
        (
            f"--decoupled-lr {config.schedule.decoupled_lr}",
            config.schedule.decoupled_lr is not None,
        ),
        (f"--freeze {' '.join(model.freeze or ())}", bool(model.freeze)),
        ("--apply-wd-to-qk-layernorm", config.optimizer.apply_wd_to_qk_layernorm),
    ):
        if on:
            yield (
                f"{flag} with {name}: the optimizer's states cannot be written in this format: "
                "use --ckpt-format native, or add --no-save-optim"
            )
    yield from _muon_states(config)
    yield from _schedule_in_tokens(config)


def _muon_states(config: RunOptions) -> Iterator[str]:
    """Yield an error if Megatron-LM's checkpoints cannot store the optimizer's states."""
    checkpoint = config.checkpoint
    if config.optimizer.optimizer == "muon" and not checkpoint.no_save_optim:
        yield (
            f"--ckpt-format {checkpoint.ckpt_format} with --optimizer muon: its states cannot be "
            "written in Megatron-LM's formats: use --ckpt-format native, or --no-save-optim"
        )


def _schedule_in_tokens(config: RunOptions) -> Iterator[str]:
    """Yield an error if Megatron-LM's checkpoints cannot store the schedule."""
    checkpoint = config.checkpoint
    if config.schedule.in_tokens(config.training) and not checkpoint.no_save_optim:
        cause = "--lr-decay-tokens" if config.schedule.lr_decay_tokens else "--train-tokens"
        yield (
            f"--ckpt-format {checkpoint.ckpt_format} with {cause}: schedules of Megatron-LM count "
            "samples: use --ckpt-format native"
        )


def legacy_files(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that --ckpt-format legacy cannot store.

    `checkpoint.legacy.file_plan` rejects the same settings in a conversion.
    """
    checkpoint, model = config.checkpoint, config.model
    if checkpoint.ckpt_format != "legacy":
        return
    for name, on in (
        ("--qk-layernorm", model.qk_layernorm),
        ("--add-qkv-bias", model.add_qkv_bias and not model.add_bias_linear),
        ("--attention-output-gate", model.attention_output_gate),
        ("--softmax-type learnable", model.softmax_type == "learnable"),
        ("--quick-geglu", model.quick_geglu),
        ("--glu-linear-offset", model.glu_linear_offset != 0),
        ("--activation-func-clamp-value", model.activation_func_clamp_value is not None),
        (f"--mtp-num-layers {model.mtp_num_layers}", model.mtp_num_layers is not None),
    ):
        if on:
            yield (
                f"{name}: Megatron-LM 23.08, the target of --ckpt-format legacy, does not support "
                "such weights: use --ckpt-format native"
            )
    for name in unsupported_by_legacy(model):
        yield (
            f"{name}: Megatron-LM 23.08, the target of --ckpt-format legacy, does not support this "
            "network: use --ckpt-format native"
        )
    problem = tensor_split_problem(model, config.parallel.tensor_model_parallel_size)
    if problem and model.group_query_attention:  # without groups, other rules reject the split
        yield f"--ckpt-format legacy: Megatron-LM 23.08 {problem}, or use --ckpt-format native"
    if config.optimizer.optimizer == "sgd" and config.parallel.use_distributed_optimizer:
        yield (
            "--ckpt-format legacy with --use-distributed-optimizer: Megatron-LM's file stores "
            "Adam's states, not those of --optimizer sgd: drop one of the three flags"
        )
    frozen = " ".join(("--freeze", *model.freeze)) if model.freeze else ""
    frozen = "--retro-freeze-gpt" if model.retro_freeze_gpt else frozen
    is_flat = config.parallel.use_distributed_optimizer and not checkpoint.no_save_optim
    if frozen and is_flat:
        yield (
            f"--ckpt-format legacy with --use-distributed-optimizer and {frozen}: Megatron-LM's "
            "file stores the optimizer states of all weights: drop one of the three, use "
            "--ckpt-format native, or add --no-save-optim"
        )
    if config.schedule.decoupled_lr is not None and not checkpoint.no_save_optim:
        yield (
            f"--ckpt-format legacy with --decoupled-lr {config.schedule.decoupled_lr:g}: "
            "Megatron-LM 23.08 has no such learning rate, and its optimizer files cannot store "
            "one: use --ckpt-format native"
        )
    yield from _muon_states(config)
    yield from _schedule_in_tokens(config)
    parts, layers = possible_plan(model, config.parallel), model.num_layers
    stages = config.parallel.pipeline_model_parallel_size
    is_t5 = model.architecture == "t5"
    problem = megatron_layout_problem(parts, stages, layers if is_t5 else None)
    if problem:
        remedy = "use --ckpt-format native"
        if is_t5:
            remedy = f"choose another --pipeline-model-parallel-split-rank, or {remedy}"
        yield f"--ckpt-format legacy: Megatron-LM 23.08 {problem}: {remedy}"


def unused_by_core(model: ModelOptions) -> Iterator[str]:
    """Yield a notice for each setting that Megatron Core supports but its own script ignores."""
    factor = model.rope_scaling_factor
    if model.use_rope_scaling and factor != 8:
        yield (
            f"--rope-scaling-factor {factor:g}: Megatron Core's pretrain_gpt.py computes with 8, "
            f"regardless of the flag: give its GPTModel rope_scaling_factor={factor:g}"
        )


def unsupported_by_core(model: ModelOptions) -> Iterator[str]:
    """Yield a network's flags that Megatron Core does not support."""
    if model.apply_residual_connection_post_layernorm:  # Core reads the flag but does not use it
        yield "--apply-residual-connection-post-layernorm"
    # Core's YaRN ignores --rotary-percent, and its multi-token prediction does not support YaRN.
    if model.rope_type == "yarn" and not model.multi_latent_attention:
        if model.rotary_percent != 1:
            yield f"--rope-type yarn with --rotary-percent {model.rotary_percent:g}"
        if model.mtp_num_layers:
            yield f"--rope-type yarn with --mtp-num-layers {model.mtp_num_layers}"
    yield from unsupported_flags(model)


def unsupported_by_legacy(model: ModelOptions) -> Iterator[str]:
    """Yield a network's flags that Megatron-LM 23.08 does not support."""
    if model.hybrid_layer_pattern is not None:
        yield f"--hybrid-layer-pattern {model.hybrid_layer_pattern}"
    if model.num_experts and model.moe_router_bias and model.add_bias_linear:
        yield "--moe-router-bias"
    if model.rope_type == "yarn":
        yield "--rope-type yarn"
    yield from unsupported_flags(model)


def needs_engine(model: ModelOptions) -> bool:
    """Return whether Megatron Core builds a network only from Transformer Engine's modules."""
    return (
        model.experimental_attention_variant is not None or model.hybrid_layer_pattern is not None
    )


def unsupported_flags(model: ModelOptions) -> Iterator[str]:
    """Yield a network's flags that neither Megatron-LM 23.08 nor Megatron Core supports."""
    counts = f"--num-experts {' '.join(map(str, model.num_experts or ()))}"
    for name, on in (
        (
            f"--position-embedding-type {model.position_embedding_type}",
            model.position_embedding_type in ("relative", "alibi"),
        ),
        ("--geglu", model.geglu),
        ("--relu", model.relu),
        (counts, len(model.expert_counts) > 1),
        ("--mlp-type residual", model.mlp_type == "residual"),
        ("--scale-decoder-outputs", model.scale_decoder_outputs),
        ("--disable-output-bias", not model.add_output_bias),
        (f"--softmax-scale {model.softmax_scale}", model.softmax_scale is not None),
        (
            f"--attn-logit-softcapping {model.attn_logit_softcapping}",
            model.attn_logit_softcapping is not None,
        ),
        (
            f"--final-logit-softcapping {model.final_logit_softcapping}",
            model.final_logit_softcapping is not None,
        ),
        (f"--window-rotary-base {model.window_rotary_base}", model.window_rotary_base is not None),
        (f"--norm-placement {model.norm_placement}", model.norm_placement != "before"),
        ("--scale-embeddings", model.scale_embeddings),
        ("--parallel-residual", model.parallel_residual),
        ("--disable-layernorm-bias", not model.layernorm_bias),
        ("--disable-bias-attention", not model.add_bias_attention),
        ("--lm-head-bias", model.lm_head_bias),
        (f"--logit-scale {model.logit_scale}", model.logit_scale is not None),
        ("--parallel-mamba", model.parallel_mamba),
        ("--embed-layernorm", model.embed_layernorm),
        (
            f"--rope-type {model.rope_type}",
            model.rope_type in ("longrope", "dynamic", "proportional"),
        ),
        # Megatron Core has these biases if all linear layers have biases.
        (
            "--moe-router-bias with --disable-bias-linear",
            bool(model.num_experts) and model.moe_router_bias and not model.add_bias_linear,
        ),
        (
            f"--rope-high-freq-factor {model.rope_high_freq_factor:g}",
            model.use_rope_scaling and model.rope_high_freq_factor != 4,
        ),
        (
            "--qk-layernorm-scope each-head",
            model.qk_layernorm and model.qk_layernorm_scope == "each-head",
        ),
        *_latent_flags(model),
        *_delta_flags(model),
        *_hybrid_flags(model),
        # Megatron Core normalizes in all layers.
        ("--qk-l2-norm with --no-rope-freq", model.qk_l2_norm and model.no_rope_freq is not None),
        (
            f"--attention-chunk-size {model.attention_chunk_size}",
            model.attention_chunk_size is not None,
        ),
        (
            f"--attention-temperature-scale {model.attention_temperature_scale}",
            model.attention_temperature_scale is not None,
        ),
    ):
        if on:
            yield name


def _latent_flags(model: ModelOptions) -> Iterator[tuple[str, bool]]:
    """Yield flags that Megatron Core ignores with latent attention, and whether they are on."""
    stretch = model.rotary_seq_len_interpolation_factor or 1
    for name, on in (
        (f"--no-rope-freq {model.no_rope_freq}", model.no_rope_freq is not None),
        (f"--rotary-seq-len-interpolation-factor {stretch:g}", stretch != 1),
        ("--use-rope-scaling", model.use_rope_scaling),
        (
            "--no-yarn-correction-range-round-to-int",
            model.rope_type == "yarn" and not model.yarn_correction_range_round_to_int,
        ),
    ):
        yield f"--multi-latent-attention with {name}", model.multi_latent_attention and on


def _delta_flags(model: ModelOptions) -> Iterator[tuple[str, bool]]:
    """Yield flags with which gated delta nets differ from Core's, and whether they are on."""
    variant = model.experimental_attention_variant
    for name, on in (
        ("--apply-layernorm-1p", model.apply_layernorm_1p),
        (f"--normalization {model.normalization}", model.normalization != "RMSNorm"),
        ("an activation other than --swiglu", not model.swiglu),
    ):
        yield f"--experimental-attention-variant {variant} with {name}", variant is not None and on


def _hybrid_flags(model: ModelOptions) -> Iterator[tuple[str, bool]]:
    """Yield flags with which hybrid models differ from Core's, and whether they are on."""
    pattern = model.hybrid_layer_pattern or ""
    has_mamba = MAMBA in pattern
    for name, on in (
        ("--multi-latent-attention", model.multi_latent_attention),
        ("--qk-layernorm", model.qk_layernorm),
        ("--qk-l2-norm", model.qk_l2_norm),
        ("--disable-mamba-norm", has_mamba and not model.mamba_norm),
        # Core always normalizes the output of Mamba-2 with 1e-5.
        (f"--norm-epsilon {model.norm_epsilon}", has_mamba and model.norm_epsilon != 1e-5),
    ):
        yield f"--hybrid-layer-pattern {pattern} with {name}", bool(pattern) and on


def unsupported_state(precision: PrecisionConfig, style: str | None, flag: str) -> Iterator[str]:
    """Yield a line for each part of the training state that Megatron-LM 23.08 does not support.

    Args:
        precision: The run's number formats.
        style: The style of the run's learning-rate decay, or `None` to leave it out.
        flag: The flag that asks for Megatron-LM's files.
    """
    if precision.fp8_format and precision.fp8_recipe == "delayed":
        yield (
            f"{flag}: Megatron-LM's files cannot store the amax history of --fp8-recipe delayed: a "
            "run that resumes from them starts a new history"
        )
    if style in ("WSD", "range-test"):
        yield (
            f"{flag}: Megatron-LM 23.08 does not support --lr-decay-style {style}: to resume "
            "there, use --override-opt_param-scheduler and another style"
        )


def tensor_split_problem(model: ModelOptions, ranks: int) -> str:
    """Return why Megatron-LM 23.08 cannot split attention among this many ranks, or "".

    If there are more ranks than query groups, this package repeats keys and values instead.
    """
    for flag, count in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", model.num_query_groups if model.group_query_attention else None),
    ):
        if count and ranks > 0 and count % ranks:
            return (
                f"gives every tensor-parallel rank whole heads, and {flag} {count} is not "
                f"divisible by {ranks} ranks: use {divisors(count)}"
            )
    return ""
