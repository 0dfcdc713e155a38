"""Flags that change nothing because another one is missing: taken, and said. See `checks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.data import APPENDS_SENTINELS
from megatron.config.rules_data import tokenizer_files
from megatron.config.run import RunOptions, field_at, flatten


@dataclass(frozen=True)
class _Dependent:
    """Fields of a section that change something only where `on` says so.

    Attributes:
        why: what follows "changes nothing".
    """

    section: str
    fields: tuple[str, ...]
    on: Callable[[RunOptions], Any]
    why: str


_DEPENDENT: tuple[_Dependent, ...] = (
    _Dependent(
        "training",
        ("calculate_per_token_loss",),
        lambda c: c.model.architecture != "gpt" or c.data.eod_mask_loss,
        "without --eod-mask-loss: every token counts",
    ),
    _Dependent(
        "model",
        ("num_query_groups",),
        lambda c: c.model.group_query_attention,
        "without --group-query-attention",
    ),
    _Dependent(
        "model",
        ("rotary_percent", "rotary_base", "rotary_seq_len_interpolation_factor"),
        lambda c: c.model.position_embedding_type == "rope",
        "without --position-embedding-type rope",
    ),
    _Dependent(
        "model",
        ("rope_scaling_factor",),
        lambda c: c.model.use_rope_scaling,
        "without --use-rope-scaling",
    ),
    _Dependent(
        "model",
        ("add_qkv_bias",),
        lambda c: not c.model.add_bias_linear,
        "without --disable-bias-linear: all linear layers have biases",
    ),
    _Dependent(
        "model",
        ("masked_softmax_fusion",),
        lambda c: not c.model.use_flash_attn,
        "with --use-flash-attn: its kernels hold no scores",
    ),
    _Dependent(
        "training",
        ("max_nonfinite_skips",),
        lambda c: c.training.on_nonfinite == "skip",
        "without --on-nonfinite skip",
    ),
    _Dependent(
        "training",
        ("manual_gc_interval",),
        lambda c: c.training.manual_gc,
        "with --no-manual-gc",
    ),
    _Dependent(
        "precision",
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        lambda c: c.precision.fp16 and c.precision.loss_scale is None,
        "without --fp16 and its dynamic loss scale",
    ),
    _Dependent(
        "precision",
        ("loss_scale",),
        lambda c: c.precision.fp16 or c.precision.bf16,
        "without --fp16 or --bf16",
    ),
    _Dependent(
        "optimizer",
        ("adam_beta1", "adam_beta2", "adam_eps"),
        lambda c: c.optimizer.optimizer == "adam",
        "with --optimizer sgd",
    ),
    _Dependent(
        "optimizer",
        ("sgd_momentum",),
        lambda c: c.optimizer.optimizer == "sgd",
        "without --optimizer sgd",
    ),
    _Dependent(
        "schedule",
        ("lr_warmup_init",),
        lambda c: (
            c.schedule.lr_warmup_fraction
            or c.schedule.lr_warmup_iters
            or c.schedule.lr_warmup_samples
        ),
        "without a warm-up",
    ),
    _Dependent(
        "schedule",
        ("decoupled_min_lr",),
        lambda c: c.schedule.decoupled_lr is not None,
        "without --decoupled-lr",
    ),
    _Dependent(
        "schedule",
        ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        lambda c: c.checkpoint.load is not None,
        "without --load",
    ),
    _Dependent(
        "parallel",
        ("cp_comm_type",),
        lambda c: c.parallel.context_parallel_size > 1,
        "without --context-parallel-size: no process shares a sequence",
    ),
    _Dependent(
        "tokenizer",
        ("tiktoken_pattern", "tiktoken_num_special_tokens", "tokenizer_special_tokens"),
        lambda c: c.tokenizer.tokenizer_type == "TikTokenizer",
        "without --tokenizer-type TikTokenizer",
    ),
    _Dependent(
        "tokenizer",
        ("vocab_extra_ids",),
        lambda c: c.tokenizer.tokenizer_type in APPENDS_SENTINELS,
        "without a WordPiece or SentencePiece vocabulary",
    ),
    _Dependent(
        "data",
        ("split",),
        lambda c: c.data.data_path is not None,
        "without --data-path",
    ),
    _Dependent(
        "data",
        ("data_sharding",),
        lambda c: c.data.dataloader_type == "cyclic",
        "without --dataloader-type cyclic",
    ),
    _Dependent(
        "checkpoint",
        ("finetune", "no_load_optim", "no_load_rng"),
        lambda c: c.checkpoint.load is not None,
        "without --load",
    ),
    _Dependent(
        "checkpoint",
        (
            *("save_interval", "save_interval_in_mins", "ckpt_format"),
            *("keep_latest", "save_retain_interval"),
            *("mean_hours_between_failures", "async_save", "no_save_optim", "no_save_rng"),
        ),
        lambda c: c.checkpoint.save is not None,
        "without --save: no checkpoints are written",
    ),
    _Dependent(
        "logging",
        (
            *("tensorboard_log_interval", "log_timers_to_tensorboard"),
            *("log_batch_size_to_tensorboard", "log_learning_rate_to_tensorboard"),
            *("log_loss_scale_to_tensorboard", "log_validation_ppl_to_tensorboard"),
            *("log_memory_to_tensorboard", "log_world_size_to_tensorboard"),
        ),
        lambda c: c.logging.tensorboard_dir or c.logging.wandb_project or c.logging.metrics_jsonl,
        "without --tensorboard-dir, --wandb-project or --metrics-jsonl",
    ),
    _Dependent(
        "evaluation",
        ("eval_interval",),
        lambda c: c.evaluation.eval_iters,
        "with --eval-iters 0",
    ),
    _Dependent(
        "logging",
        ("tensorboard_queue_size",),
        lambda c: c.logging.tensorboard_dir,
        "without --tensorboard-dir",
    ),
    _Dependent(
        "logging",
        ("barrier_with_l1_time", "timing_log_option"),
        lambda c: c.logging.timing_log_level,
        "without --timing-log-level",
    ),
    _Dependent(
        "profiling",
        ("profile_step_start", "profile_step_end", "profile_ranks", "profile_dir"),
        lambda c: c.profiling.profile,
        "without --profile",
    ),
)


def dependent(config: RunOptions, start: RunOptions) -> Iterator[str]:
    """One line for each of these flags that was given in vain.

    Args:
        start: the run that the flags change: what it says already was not given.
    """
    values, before = flatten(config), flatten(start)
    files = tokenizer_files(config.tokenizer.tokenizer_type)
    unread = _Dependent(
        "tokenizer",
        tuple({"vocab_file", "merge_file", "tokenizer_model", "vocab_size"} - {*files}),
        lambda c: c.tokenizer.tokenizer_type is None,
        f"with --tokenizer-type {config.tokenizer.tokenizer_type}",
    )
    for entry in (*_DEPENDENT, unread):
        if entry.on(config):
            continue
        for path in (f"{entry.section}.{name}" for name in sorted(entry.fields)):
            if values[path] != before[path] and values[path] is not None:
                yield f"{field_at(path).spell(values[path])} changes nothing {entry.why}"
