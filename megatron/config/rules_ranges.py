"""Checks of single numbers: how small and how large each may be. See `checks`.

Whole numbers beyond 64 bits are refused where they are read (`fields`). Here stands what is smaller
than that for a reason of its own, and what only a product makes too large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron.config.fields import fields_of
from megatron.config.resolve import data_parallel_size
from megatron.config.run import RunOptions, flatten, sections
from megatron.config.stages import MAX_LAYERS

_AT_LEAST: Mapping[str, int] = {
    "model.num_layers": 1,
    "model.decoder_num_layers": 1,
    "model.hidden_size": 1,
    "model.ffn_hidden_size": 1,
    "model.num_attention_heads": 1,
    "model.kv_channels": 1,
    "model.num_query_groups": 1,
    "model.max_position_embeddings": 1,
    "model.relative_attention_max_distance": 1,
    "model.rotary_seq_len_interpolation_factor": 1,
    "model.make_vocab_size_divisible_by": 1,
    "model.init_method_std": 0,
    "training.micro_batch_size": 1,
    "training.global_batch_size": 1,
    "training.train_iters": 0,
    "training.train_samples": 1,
    "training.seed": 0,
    "training.recompute_num_layers": 1,
    "training.exit_interval": 1,
    "training.exit_duration_in_mins": 1,
    "training.max_nonfinite_skips": 1,
    "training.manual_gc_interval": 0,
    "training.dry_run_world_size": 1,
    "precision.hysteresis": 1,
    "precision.loss_scale_window": 1,
    "optimizer.weight_decay": 0,
    "optimizer.start_weight_decay": 0,
    "optimizer.end_weight_decay": 0,
    "optimizer.clip_grad": 0,
    "schedule.lr": 0,
    "schedule.min_lr": 0,
    "schedule.decoupled_lr": 0,
    "schedule.decoupled_min_lr": 0,
    "schedule.lr_warmup_init": 0,
    "schedule.lr_warmup_iters": 0,
    "schedule.lr_warmup_samples": 0,
    "schedule.lr_decay_iters": 1,
    "schedule.lr_decay_samples": 1,
    "schedule.lr_wsd_decay_iters": 1,
    "schedule.lr_wsd_decay_samples": 1,
    "parallel.tensor_model_parallel_size": 1,
    "parallel.pipeline_model_parallel_size": 1,
    "parallel.context_parallel_size": 1,
    "parallel.local_rank": 0,
    "tokenizer.vocab_size": 1,
    "tokenizer.vocab_extra_ids": 0,
    "data.seq_length": 1,
    "data.decoder_seq_length": 1,
    "data.num_workers": 0,
    "evaluation.eval_iters": 0,
    "evaluation.eval_interval": 1,
    "checkpoint.save_interval": 1,
    "checkpoint.keep_latest": 1,
    "checkpoint.save_retain_interval": 1,
    "checkpoint.ckpt_step": 0,
    "logging.log_interval": 1,
    "logging.tensorboard_log_interval": 1,
    "logging.tensorboard_queue_size": 1,
    "profiling.profile_step_start": 0,
}
_ABOVE_ZERO = (
    "model.norm_epsilon",
    "model.rotary_base",
    "model.softmax_scale",
    "parallel.distributed_timeout_minutes",
    "model.rope_scaling_factor",
    "precision.loss_scale",
    "precision.initial_loss_scale",
    "precision.min_loss_scale",
    "optimizer.adam_eps",
    "checkpoint.save_interval_in_mins",
    "checkpoint.mean_hours_between_failures",
)
_BELOW_ONE = (
    "model.attention_dropout",
    "model.hidden_dropout",
    "optimizer.adam_beta1",
    "optimizer.adam_beta2",
    "optimizer.sgd_momentum",
    "schedule.lr_warmup_fraction",
)
_IDS = 2**31 - 1  # token ids and offsets of samples are kept in 32 bits
_WIDTH = 2**24  # of a matrix, so that no product of its sides overflows
_AT_MOST: Mapping[str, float] = {
    "model.num_layers": MAX_LAYERS,
    "model.decoder_num_layers": MAX_LAYERS,
    "model.hidden_size": _WIDTH,
    "model.ffn_hidden_size": _WIDTH,
    "model.num_attention_heads": 2**16,
    "model.num_query_groups": 2**16,
    "model.kv_channels": 2**16,
    "model.max_position_embeddings": _IDS,
    "model.make_vocab_size_divisible_by": _IDS,
    "model.relative_attention_num_buckets": _WIDTH,
    "training.micro_batch_size": _WIDTH,
    "training.seed": 2**32 - 1,  # numpy's generators take 32 bits
    "parallel.pipeline_model_parallel_size": MAX_LAYERS,
    "parallel.local_rank": 2**15 - 1,
    "parallel.distributed_timeout_minutes": 365 * 24 * 60,
    "tokenizer.vocab_size": _IDS,
    "tokenizer.vocab_extra_ids": 2**20,
    "tokenizer.tiktoken_num_special_tokens": 2**20,
    "data.seq_length": _IDS,
    "data.decoder_seq_length": _IDS,
    "data.num_workers": 1024,
}
_COUNTABLE = 2**63 - 1  # samples of a dataset
_MOST_PASSES = 2**20  # of an update: a pipeline's schedule lists every one


def spellings() -> dict[str, str]:
    """ "section.field" to the flag as a user types it."""
    return {
        f"{name}.{field.name}": field.names[0]
        for name, section in sections().items()
        for field in fields_of(section)
        if field.names
    }


def bounds(config: RunOptions, world_size: int) -> Iterator[str]:
    names, values = spellings(), flatten(config)
    for path, least in _AT_LEAST.items():
        if values[path] is not None and values[path] < least:
            yield f"{names[path]} {values[path]}: must be at least {least}"
    for path in _ABOVE_ZERO:
        if values[path] is not None and values[path] <= 0:
            yield f"{names[path]} {values[path]}: must be above 0"
    for path in _BELOW_ONE:
        if values[path] is not None and not 0 <= values[path] < 1:
            yield f"{names[path]} {values[path]}: must be at least 0 and below 1"
    for path, most in _AT_MOST.items():
        if values[path] is not None and values[path] > most:
            yield f"{names[path]} {values[path]}: must be at most {most}"


def samples(config: RunOptions, world_size: int) -> Iterator[str]:
    """Numbers that are fine alone, and together count more samples than can be counted."""
    training, evaluation = config.training, config.evaluation
    iterations, batch = training.train_iters, training.global_batch_size
    if not batch or batch < 1:
        return
    if iterations is not None and iterations * batch > _COUNTABLE:
        yield (
            f"--train-iters {iterations} x --global-batch-size {batch} are more than {_COUNTABLE} "
            f"samples: use at most {_COUNTABLE // batch} (--exit-interval, "
            "--exit-duration-in-mins and SIGTERM end a run before that, with a checkpoint)"
        )
        return
    if iterations is None:
        iterations = (training.train_samples or 0) // batch
    evaluations = iterations // max(evaluation.eval_interval, 1) + 1
    if evaluations * evaluation.eval_iters * batch > _COUNTABLE:
        yield (
            f"--eval-iters {evaluation.eval_iters} x --global-batch-size {batch} x {evaluations} "
            f"evaluation(s) are more than {_COUNTABLE} samples: use at most "
            f"{_COUNTABLE // (evaluations * batch)}, or a larger --eval-interval"
        )


def passes(config: RunOptions, world_size: int) -> Iterator[str]:
    """Micro-batches of one update."""
    micro, batch = config.training.micro_batch_size, config.training.global_batch_size
    if not micro or not batch or micro < 1:
        return
    each = micro * data_parallel_size(config, world_size)
    if batch // each > _MOST_PASSES:
        yield (
            f"--global-batch-size {batch} is {batch // each} micro-batches of each process in one "
            f"update: use at most {_MOST_PASSES * each}, or a larger --micro-batch-size"
        )
