"""Rules for optimizers, the number formats of their states, averaged weights, and muP."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.run import RunOptions

_FP8_BETA2 = 0.98  # above this beta2, rounding errors exceed a quarter of an 8-bit variance


def muon(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with --optimizer muon."""
    optimizer, model, flag = config.optimizer, config.model, "--optimizer muon"
    if optimizer.optimizer != "muon":
        return
    if optimizer.optimizer_cpu_offload:
        yield (
            f"{flag} with --optimizer-cpu-offload: a CPU is too slow for its matrix products: "
            "save memory with --zero-stage 1 to 3, or use --optimizer adam"
        )
    steps, sets = optimizer.muon_num_ns_steps, 5
    if optimizer.muon_coefficient_type == "quintic" and steps % sets:
        yield (
            f"--muon-num-ns-steps {steps} is not divisible by {sets}, the coefficients of "
            "--muon-coefficient-type quintic: use simple, or another number"
        )
    tensor = config.parallel.tensor_model_parallel_size
    groups = model.num_query_groups if model.group_query_attention else None
    splits_qkv = optimizer.muon_tp_mode != "duplicated" and optimizer.muon_split_qkv
    if splits_qkv and groups and groups < tensor:
        yield (
            f"--muon-tp-mode {optimizer.muon_tp_mode} with --num-query-groups {groups} and "
            f"--tensor-model-parallel-size {tensor}: a process has no whole group of queries, keys "
            "and values: use --muon-tp-mode duplicated, or --muon-no-split-qkv"
        )


def mup(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that this package's muP does not cover."""
    model, optimizer, flag = config.model, config.optimizer, "--use-mup"
    if not model.use_mup:
        return
    parallel = config.parallel
    is_ring = parallel.context_parallel_size > 1 and parallel.cp_comm_type == "p2p"
    for given, why, remedy in (
        (
            "--optimizer sgd" * (optimizer.optimizer == "sgd"),
            "its learning rates would have to grow with the width",
            "use --optimizer adam",
        ),
        (
            f"--muon-scale-mode {optimizer.muon_scale_mode}"
            * (optimizer.optimizer == "muon" and optimizer.muon_scale_mode != "unit_rms_norm"),
            "its updates grow with the width",
            "use --muon-scale-mode unit_rms_norm",
        ),
        (
            "--init-method-xavier-uniform" * model.init_method_xavier_uniform,
            "it sets its own standard deviation",
            "use --init-method-std",
        ),
        (
            f"--softmax-scale {model.softmax_scale}" * (model.softmax_scale is not None),
            "muP has its own scale",
            "use --mup-attn-scale-power and --mup-base-head-dim",
        ),
        (
            "--multi-latent-attention" * model.multi_latent_attention,
            "the sizes of its latent vectors do not follow the width",
            "drop one of the two",
        ),
        (
            "--hybrid-layer-pattern" * (model.hybrid_layer_pattern is not None),
            "Mamba has parameters without a rule",
            "drop one of the two",
        ),
        (
            f"--experimental-attention-variant {model.experimental_attention_variant}"
            * (model.experimental_attention_variant is not None),
            "gated delta nets have parameters without a rule",
            "drop one of the two",
        ),
        (
            "--cp-comm-type p2p" * is_ring,
            "a ring does not scale the attention scores",
            "use --cp-comm-type a2a",
        ),
        (
            f"--ckpt-format {config.checkpoint.ckpt_format}"
            * (config.checkpoint.save is not None and config.checkpoint.ckpt_format != "native"),
            "its files do not contain muP's settings",
            "use --ckpt-format native",
        ),
        (
            f"--mup-embedding-mult {model.mup_embedding_mult:g}"
            * (
                model.mup_embedding_mult != 1
                and model.position_embedding_type == "learned_absolute"
            ),
            "it multiplies words, but not learned positions",
            "use --position-embedding-type rope, or drop the factor",
        ),
    ):
        if given:
            yield f"{flag} with {given}: {why}: {remedy}"


def state_formats(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each optimizer state that cannot have the requested format."""
    optimizer, precision = config.optimizer, config.precision
    is_half = precision.bf16 or precision.fp16
    if optimizer.use_precision_aware_optimizer and optimizer.optimizer != "adam":
        yield (
            f"--use-precision-aware-optimizer with --optimizer {optimizer.optimizer}: its states "
            "are in fp32: use --optimizer adam, or drop the flag"
        )
    if optimizer.main_params_dtype != "fp32":
        flag = f"--main-params-dtype {optimizer.main_params_dtype}"
        if not is_half:
            yield f"{flag} requires --bf16 or --fp16: fp32 weights need no masters: drop the flag"
        elif config.parallel.zero_stage == 3:
            yield (
                f"{flag} with --zero-stage 3, whose shards already are the fp32 weights: use "
                "--zero-stage 1 or 2, or drop the flag"
            )
        if optimizer.optimizer_cpu_offload:
            yield (
                f"{flag} with --optimizer-cpu-offload: weights in host memory are in fp32: drop "
                "one of the two flags"
            )
    if optimizer.main_grads_dtype != "fp32" and not precision.bf16:
        yield (
            f"--main-grads-dtype {optimizer.main_grads_dtype} requires --bf16: add it, or drop the "
            "flag"
        )
    elif optimizer.main_grads_dtype != "fp32" and precision.accumulate_allreduce_grads_in_fp32:
        yield (
            f"--main-grads-dtype {optimizer.main_grads_dtype} with "
            "--accumulate-allreduce-grads-in-fp32: drop one of the two flags"
        )


def averages(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that conflicts with keeping or loading averaged weights."""
    optimizer, checkpoint = config.optimizer, config.checkpoint
    kind = checkpoint.ckpt_format
    if optimizer.ema_decay is not None and optimizer.lawa_interval is not None:
        yield (
            f"--ema-decay {optimizer.ema_decay:g} and --lawa-interval {optimizer.lawa_interval} "
            "cannot be combined: a run keeps one average: drop one of them"
        )
    if optimizer.averages_weights and checkpoint.save is not None and kind != "native":
        flag = "--lawa-interval" if optimizer.ema_decay is None else "--ema-decay"
        yield f"{flag} with --ckpt-format {kind}, whose files cannot contain averages: use native"
    continues = not (checkpoint.finetune or checkpoint.no_load_optim or config.training.skip_train)
    if checkpoint.load_averaged_weights and continues:
        yield (
            "--load-averaged-weights: the optimizer's states belong to other weights: add "
            "--finetune, --no-load-optim or --skip-train, or drop the flag"
        )


def coarse_variance(config: RunOptions) -> Iterator[str]:
    """Yield a notice if --adam-beta2 is too large for a second moment in FP8."""
    optimizer = config.optimizer
    if optimizer.exp_avg_sq_dtype == "fp8" and optimizer.adam_beta2 > _FP8_BETA2:
        yield (
            f"--exp-avg-sq-dtype fp8 with --adam-beta2 {optimizer.adam_beta2:g}: rounding errors "
            f"add up over 1 / (1 - beta2) steps: use --adam-beta2 0.95 or --exp-avg-sq-dtype bf16"
        )
