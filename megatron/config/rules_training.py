"""Rules for batches, length, schedules, recomputation and logging."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron.config.fields import near_multiples
from megatron.config.resolve import data_parallel_size
from megatron.config.rules_parallel import Exclusions, excluded
from megatron.config.run import RunOptions, field_at
from megatron.config.training import read_batch_schedule

_NOT_WITH_OFFLOADING: Exclusions = {
    "training.recompute_granularity": ((None,), "recomputed activations are not kept at all"),
    "parallel.zero_stage": ((None, 0, 1, 2), "gathered weights would be taken for activations"),
    "precision.fp8_format": ((None,), "weights in 8 bits would be taken for activations"),
    "model.lora_rank": ((None,), "frozen weights would be taken for activations"),
}
_RAMP_WORDS = 3
_UNITS = ("iters", "samples", "tokens")
_COUNTABLE = 2**63 - 1  # the limit for the number of samples in a dataset
_MAX_PASSES = 2**20  # per update, because a pipeline's schedule lists all of them


def batch_size(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if the global batch size is not a multiple of one micro-batch per replica."""
    micro, total = config.training.micro_batch_size, config.training.global_batch_size
    replicas = data_parallel_size(config, world_size)
    if config.training.step_batch_size_schedule is not None:
        return  # `batch_size_schedule` checks every size
    if micro and micro > 0 and total and total > 0 and total % (micro * replicas):
        step = micro * replicas
        yield (
            f"--global-batch-size {total} is not divisible by --micro-batch-size {micro} x "
            f"data-parallel size {replicas} = {step}: use {near_multiples(total, step)}"
        )


def evaluation_batch_size(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if an evaluation's batch is not a multiple of one micro-batch per replica."""
    training, evaluation = config.training, config.evaluation
    own_total, own_micro = evaluation.eval_global_batch_size, evaluation.eval_micro_batch_size
    if not evaluation.takes_place or (own_total is None and own_micro is None):
        return
    total, micro = own_total or training.global_batch_size, own_micro or training.micro_batch_size
    step = (micro or 0) * data_parallel_size(config, world_size)
    if total and total > 0 and step > 0 and total % step:
        divisor = f"{'--' if own_micro is None else '--eval-'}micro-batch-size {micro}"
        cause = f"--eval-global-batch-size {total}"
        if own_total is None:
            cause = f"--global-batch-size {total}, with which evaluations run,"
        yield (
            f"{cause} is not divisible by {divisor} x data-parallel size {step // (micro or 1)} = "
            f"{step}: give --eval-global-batch-size {near_multiples(total, step)}"
        )


def batch_size_ramp(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in --rampup-batch-size."""
    ramp, training = config.training.rampup_batch_size, config.training
    if ramp is None:
        return
    flag = "--rampup-batch-size " + " ".join(str(number) for number in ramp)
    if len(ramp) != _RAMP_WORDS:
        yield f"{flag}: expected three numbers: START INCREMENT SAMPLES"
        return
    start, increment, samples = ramp
    if min(ramp) < 1:
        yield f"{flag}: start, increment and samples must be at least 1"
        return
    if training.train_iters is not None and training.train_samples is None:
        yield f"{flag} counts samples: give the length as --train-samples, not --train-iters"
    total, micro = training.global_batch_size, training.micro_batch_size
    if total and 0 < total < start:
        yield f"{flag} starts above --global-batch-size {total}: start with at most {total}"
    elif total and total > 0 and (total - start) % increment:
        yield (
            f"{flag} does not reach --global-batch-size {total} in steps of {increment}: "
            f"{total} - {start} must be a multiple of {increment}"
        )
    if micro and micro > 0:
        step = micro * data_parallel_size(config, world_size)
        if start % step or increment % step:
            yield (
                f"{flag}: start and increment must be multiples of --micro-batch-size x "
                f"data-parallel processes = {step}"
            )


def batch_size_schedule(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in --step-batch-size-schedule."""
    training, length = config.training, config.data.seq_length or 1
    if training.step_batch_size_schedule is None:
        return
    flag = f'--step-batch-size-schedule "{training.step_batch_size_schedule}"'
    try:
        schedule = read_batch_schedule(training.step_batch_size_schedule)
    except ValueError as error:
        yield f"{flag}: {error}"
        return
    if training.rampup_batch_size is not None:
        yield f"{flag} cannot be combined with --rampup-batch-size: drop one of them"
    if training.train_iters is not None and training.train_samples is None:
        yield (
            f"{flag} counts tokens: give the length as --train-samples or --train-tokens, not "
            "--train-iters"
        )
    if len({tokens // length for tokens, _ in schedule}) < len(schedule):
        yield f"{flag}: two sizes begin within the same sample of {length} tokens: drop one of them"
    largest, micro = max(batch for _, batch in schedule), training.micro_batch_size
    if training.global_batch_size not in (None, largest):
        yield (
            f"--global-batch-size {training.global_batch_size} is not the largest batch of {flag}: "
            f"drop it, or use {largest}"
        )
    step = (micro or 1) * data_parallel_size(config, world_size)
    for _, batch in schedule:
        if step > 0 and batch % step:
            yield (
                f"{flag}: the size {batch} is not a multiple of --micro-batch-size x data-parallel "
                f"processes = {step}: use {near_multiples(batch, step)}"
            )


def length(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for lengths that cannot be combined or are counted in different units."""
    training, schedule = config.training, config.schedule
    iters, samples = training.train_iters, training.train_samples
    if iters is not None and samples is not None:
        yield (
            f"--train-iters {iters} and --train-samples {samples} cannot be combined: use one of "
            "them"
        )
        return
    if iters == 0 and not training.skip_train:
        yield "--train-iters 0: must be at least 1; use --skip-train to evaluate only"
    if schedule.lr_decay_style == "range-test":
        return  # in a range test, the flags below have no effect
    if schedule.in_tokens(training):
        yield from _lengths_in_tokens(config)
        return
    for unit, other, count in (("samples", "iters", iters), ("iters", "samples", samples)):
        for name in ("lr-decay", "lr-wsd-decay", "lr-warmup"):
            value = getattr(schedule, f"{name.replace('-', '_')}_{unit}")
            if value and count is not None:
                yield (
                    f"--{name}-{unit} {value} requires --train-{unit}, but this run has "
                    f"--train-{other} {count}: use --{name}-{other}"
                )
            elif value and unit == "samples" and config.finetuning.train_epochs is not None:
                yield (
                    f"--{name}-samples {value} cannot be combined with --train-epochs, whose "
                    f"length is counted in iterations: use --{name}-iters"
                )


def _lengths_in_tokens(config: RunOptions) -> Iterator[str]:
    """Yield an error for each length that is not in tokens although the schedule is."""
    schedule, training = config.schedule, config.training
    cause = "--lr-decay-tokens" if schedule.lr_decay_tokens else "--train-tokens"
    if schedule.lr_decay_tokens is None and training.has_count:
        yield (
            f"--lr-warmup-tokens {schedule.lr_warmup_tokens} requires --lr-decay-tokens: add it, "
            "or give the warm-up in the unit of the run's length"
        )
        return
    sample = config.data.seq_length or 0
    for unit, each in (("samples", sample), ("iters", sample * (training.global_batch_size or 0))):
        for name in ("lr-decay", "lr-warmup"):
            value = getattr(schedule, f"{name.replace('-', '_')}_{unit}")
            if value:
                tokens = f" {value * each}" if each > 0 else ""
                yield (
                    f"--{name}-{unit} {value} cannot be combined with {cause}: use "
                    f"--{name}-tokens{tokens}"
                )
    if schedule.lr_decay_style == "WSD":
        remedy = "drop --lr-decay-tokens and --lr-warmup-tokens"
        if not training.has_count:
            remedy = "give --train-iters or --train-samples, too, without lengths in tokens"
        yield (
            f"--lr-decay-style WSD cannot be combined with {cause}, because its final decay counts "
            f"iterations or samples: use another style, or {remedy}"
        )


def skipped_iterations(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in --iterations-to-skip."""
    negative = [number for number in config.training.iterations_to_skip or () if number < 0]
    if negative:
        yield (
            f"--iterations-to-skip {' '.join(map(str, negative))}: iterations are counted from 0: "
            "use the number in the log minus 1"
        )


def learning_rate(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each contradiction among the learning-rate flags."""
    schedule = config.schedule
    if schedule.lr_decay_style == "range-test":
        yield from _range_test(config)
        return
    for lower, upper in (
        ("min_lr", "lr"),
        ("decoupled_min_lr", "decoupled_lr"),
        ("lr_warmup_init", "lr"),
        ("lr_warmup_init", "decoupled_lr"),
    ):
        minimum, peak = getattr(schedule, lower), getattr(schedule, upper)
        if minimum is not None and peak is not None and minimum > peak:
            flag = field_at(f"schedule.{lower}").spell(minimum)
            yield f"{flag} is above {field_at(f'schedule.{upper}').spell(peak)}: lower it"
    peak = schedule.decoupled_lr
    if peak is not None and schedule.decoupled_min_lr is None and schedule.min_lr > peak:
        yield (
            f"--min-lr {schedule.min_lr:g}, which also applies to --decoupled-lr, is above "
            f"--decoupled-lr {peak:g}: give --decoupled-min-lr"
        )
    if schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler:
        yield (
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler cannot be "
            "combined: use one of them"
        )


def _range_test(config: RunOptions) -> Iterator[str]:
    """Yield an error for each flag that a learning-rate range test does not allow."""
    schedule, training = config.schedule, config.training
    prefix = "--lr-decay-style range-test cannot be combined with"
    if schedule.decoupled_lr is not None:
        yield f"{prefix} --decoupled-lr {schedule.decoupled_lr:g}: it tries a single rate: drop one"
    if training.rampup_batch_size is not None:
        yield f"{prefix} --rampup-batch-size: its steps are equal numbers of iterations: drop one"
    if training.step_batch_size_schedule is not None:
        yield (
            f"{prefix} --step-batch-size-schedule: its steps are equal numbers of iterations: "
            "drop one"
        )
    kind = config.checkpoint.ckpt_format
    if config.checkpoint.save is not None and kind != "native":
        yield f"{prefix} --ckpt-format {kind}: Megatron-LM has no such schedule: use native"


def range_test_only(config: RunOptions) -> Iterator[str]:
    """Yield a notice if flags of the learning rate have no effect in a range test."""
    schedule = config.schedule
    if schedule.lr_decay_style != "range-test":
        return
    lengths = [f"lr_{part}_{unit}" for part in ("warmup", "decay") for unit in _UNITS]
    names = ["lr", "min_lr", "lr_warmup_fraction", "lr_warmup_init", "lr_warmup_style", *lengths]
    given = [
        field_at(f"schedule.{name}").spell(getattr(schedule, name))
        for name in names
        if getattr(schedule, name) != field_at(f"schedule.{name}").default
    ]
    if given:
        yield f"{', '.join(given)}: no effect with --lr-decay-style range-test"


def wsd_decay(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if --lr-decay-style WSD lacks the length of its final decay."""
    schedule = config.schedule
    lengths = (schedule.lr_wsd_decay_iters, schedule.lr_wsd_decay_samples)
    is_wsd = schedule.lr_decay_style == "WSD" and not config.training.skip_train
    if is_wsd and lengths == (None, None):
        yield (
            "--lr-decay-style WSD requires the length of its final decay: give "
            "--lr-wsd-decay-iters or --lr-wsd-decay-samples"
        )


def wsd_branch(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that a branch of another run does not allow."""
    schedule, checkpoint, training = config.schedule, config.checkpoint, config.training
    if schedule.lr_wsd_branch_from is None:
        return
    flag_text = f"--lr-wsd-branch-from {schedule.lr_wsd_branch_from}"
    if checkpoint.save is None:
        yield f"{flag_text} requires --save: give the branch's own folder"
    elif checkpoint.load is not None and _folder(checkpoint.load) != _folder(checkpoint.save):
        yield (
            f"{flag_text} with --load {checkpoint.load}: a branch that is started again continues "
            "from --save: drop --load"
        )
    elif _folder(checkpoint.save) == _folder(schedule.lr_wsd_branch_from):
        yield f"{flag_text}: give --save another folder, so that further branches can start there"
    for section, name in (
        *(("training", f"train_{unit}") for unit in _UNITS),
        *(("schedule", f"lr_decay_{unit}") for unit in _UNITS),
    ):
        value = getattr(getattr(config, section), name)
        if value is not None:
            yield (
                f"{field_at(f'{section}.{name}').spell(value)} with --lr-wsd-branch-from: the "
                "branch ends with its decay: drop the flag"
            )
    for flag, is_given in (
        ("--finetune", checkpoint.finetune),
        ("--no-load-optim", checkpoint.no_load_optim),
        (f"--ckpt-step {checkpoint.ckpt_step}", checkpoint.ckpt_step is not None),
        ("--skip-train", training.skip_train),
        ("--rampup-batch-size", training.rampup_batch_size is not None),
        ("--step-batch-size-schedule", training.step_batch_size_schedule is not None),
    ):
        if is_given:
            yield f"{flag} cannot be combined with --lr-wsd-branch-from: drop one of them"


def _folder(path: str) -> str:
    return os.path.realpath(path)


def warm_up(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if warm-up and WSD's final decay do not fit into the schedule.

    The rule `length` ensures that all lengths are counted in the same unit, so this rule can ignore
    the global batch size and its ramp-up.
    """
    schedule, training = config.schedule, config.training
    if schedule.lr_decay_style == "range-test":
        return
    fraction = schedule.lr_warmup_fraction
    for unit in _UNITS:
        warmup, decay = (getattr(schedule, f"lr_{part}_{unit}") for part in ("warmup", "decay"))
        if warmup > 0 and fraction is not None:
            yield (
                f"--lr-warmup-{unit} {warmup} and --lr-warmup-fraction {fraction:g} cannot be "
                "combined: use one of them"
            )
        run_length = getattr(training, f"train_{unit}")
        end = decay if decay is not None else run_length
        if not end or training.skip_train:
            continue
        source = f"--lr-decay-{unit} {end}" if decay is not None else f"--train-{unit} {end}"
        final_decay = None if unit == "tokens" else getattr(schedule, f"lr_wsd_decay_{unit}")
        if warmup > 0 and warmup >= end:
            yield f"--lr-warmup-{unit} {warmup} must be less than {source}: lower it"
        elif final_decay is not None and schedule.lr_decay_style == "WSD":
            flag = f"--lr-wsd-decay-{unit} {final_decay}"
            warmup_text = f"--lr-warmup-{unit} {warmup}"
            total: float = warmup
            if fraction is not None and 0 <= fraction < 1:
                total = round(fraction * end, 6)  # rounded, so that 0.07 x 100 is not more than 7
                warmup_text = f"--lr-warmup-fraction {fraction:g} ({total:.10g} {unit})"
            if final_decay > end:
                yield f"{flag} must be at most {source}: lower it"
            elif total + final_decay > end:
                yield (
                    f"{warmup_text} and {flag} overlap: lower one of them, so that both fit into "
                    f"{source}"
                )


def weight_decay(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the weight-decay ramp."""
    optimizer = config.optimizer
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    style = optimizer.weight_decay_incr_style
    if style == "constant":
        for name, value in (("start", start), ("end", end)):
            if value is not None and value != optimizer.weight_decay:
                yield (
                    f"--{name}-weight-decay {value:g} differs from --weight-decay "
                    f"{optimizer.weight_decay:g}: drop it with --weight-decay-incr-style constant, "
                    "or use linear or cosine"
                )
        return
    if start is None or end is None:
        yield (
            f"--weight-decay-incr-style {style} requires both --start-weight-decay and "
            "--end-weight-decay"
        )
    elif end < start:
        yield f"--end-weight-decay {end:g} is below --start-weight-decay {start:g}: raise it"


def recomputation(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each recomputation flag that is wrong, incomplete or out of range."""
    training, layers = config.training, config.model.num_layers
    count = training.recompute_num_layers
    if training.recompute_granularity == "selective":
        yield from _recomputed_modules(config)
    if training.recompute_granularity != "full":
        return
    if training.recompute_activations:
        yield (
            "--recompute-activations means --recompute-granularity selective and cannot be "
            "combined with --recompute-granularity full: use one of them"
        )
    if training.recompute_method is None:
        yield "--recompute-granularity full requires --recompute-method uniform or block"
    if count is not None and layers and count > layers:
        yield f"--recompute-num-layers {count} is above --num-layers {layers}: use 1 to {layers}"


def offloading(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that prevents keeping activations in host memory."""
    training, model = config.training, config.model
    if not training.fine_grained_activation_offloading:
        return
    flag, modules = "--fine-grained-activation-offloading", training.offload_modules
    if not modules:
        yield f"{flag} requires --offload-modules: name at least one module"
    yield from excluded(config, flag, _NOT_WITH_OFFLOADING)
    for name in ("expert_fc1", "moe_act"):
        if name in modules and not model.num_experts:
            yield f"--offload-modules {name} requires --num-experts: drop {name}"
    if "mlp_norm" in modules and model.parallel_residual and model.shared_parallel_norm:
        yield (
            "--offload-modules mlp_norm with --shared-parallel-norm, which leaves only attn_norm: "
            "drop mlp_norm"
        )
    if {"attn_norm", "mlp_norm"} & set(modules) and model.norm_placement == "after":
        yield (
            "--offload-modules attn_norm and mlp_norm are the normalizations before attention and "
            "MLP, which --norm-placement after leaves out: drop them"
        )


def _recomputed_modules(config: RunOptions) -> Iterator[str]:
    """Yield an error for each module of --recompute-modules that the network does not have."""
    model, modules = config.model, config.training.recompute_modules
    for name in ("moe", "moe_act", "shared_experts"):
        if name in modules and not model.num_experts:
            yield f"--recompute-modules {name} requires --num-experts: drop {name}"
    if "mla_up_proj" in modules and not model.multi_latent_attention:
        yield (
            "--recompute-modules mla_up_proj requires --multi-latent-attention: drop mla_up_proj"
        )
    if "mla_up_proj" in modules and model.lora_dropout:
        yield (
            f"--recompute-modules mla_up_proj with --lora-dropout {model.lora_dropout:g}: the "
            "recomputation would draw another mask: drop mla_up_proj"
        )
    shared = model.moe_shared_expert_intermediate_size
    if "shared_experts" in modules and model.num_experts and not shared:
        yield (
            "--recompute-modules shared_experts requires --moe-shared-expert-intermediate-size: "
            "drop shared_experts"
        )
    if "layernorm" in modules and config.precision.fp8_format is not None:
        yield (
            f"--recompute-modules layernorm with --fp8-format {config.precision.fp8_format}: its "
            "output is kept in 8 bits only: drop layernorm"
        )


def per_token_loss(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if a loss per sample would be averaged over tokens."""
    model = config.model
    has_order = model.architecture == "bert" and model.bert_binary_head
    if config.training.calculate_per_token_loss and has_order:
        yield (
            "--calculate-per-token-loss: BERT's segment-order loss is averaged over samples, not "
            "tokens: turn it off with --bert-no-binary-head, or drop the flag"
        )


def nonfinite(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if flags about non-finite values contradict each other."""
    training = config.training
    if training.on_nonfinite == "skip" and not training.check_for_nan_in_loss_and_grad:
        yield (
            "--on-nonfinite skip requires the check that --no-check-for-nan-in-loss-and-grad "
            "turns off: drop one of them"
        )


def spikes(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if --on-spike rewind would find no checkpoint with optimizer states."""
    checkpoint = config.checkpoint
    if config.training.on_spike != "rewind":
        return
    if checkpoint.save is None:
        yield (
            "--on-spike rewind goes back to the last checkpoint: give --save and --save-interval, "
            "or use --on-spike skip"
        )
    elif checkpoint.no_save_optim:
        yield (
            "--on-spike rewind with --no-save-optim: the checkpoints contain no optimizer state to "
            "go back to: drop --no-save-optim, or use --on-spike skip"
        )


def replica_hashes(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if replicas are to be compared, but ZeRO stage 3 keeps no replicas."""
    training = config.training
    interval = training.check_weight_hash_across_dp_replicas_interval
    for flag, is_on in (
        (f"--check-weight-hash-across-dp-replicas-interval {interval}", interval is not None),
        ("--test-mode", training.test_mode and config.model.qk_layernorm),
    ):
        if is_on and config.parallel.zero_stage == 3:
            yield (
                f"{flag} with --zero-stage 3: each process holds its own shard of the weights, so "
                "there are no copies to compare: use --zero-stage 0, 1 or 2, or drop the flag"
            )


def profiling(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the profile's range and ranks."""
    profiling = config.profiling
    if not profiling.profile:
        return
    given = " ".join(("--profile-windows", *profiling.profile_windows))
    try:
        windows = profiling.windows
    except ValueError:
        yield f"{given}: give each window as FIRST-END, for example 10-12 1000-1002"
        return
    start, end = profiling.profile_step_start, profiling.profile_step_end
    if not profiling.profile_windows and end <= start:
        yield f"--profile-step-end {end} must be above --profile-step-start {start}: raise it"
    elif sorted(numbers := [number for window in windows for number in window]) != numbers or any(
        end == start for start, end in windows
    ):
        yield f"{given}: give windows in order that do not overlap, and END above FIRST"
    absent = [str(rank) for rank in profiling.profile_ranks if not 0 <= rank < world_size]
    if absent:
        yield (
            f"--profile-ranks {' '.join(absent)}: the ranks of this run are 0 to "
            f"{world_size - 1}: use those"
        )


def logging(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if --log-pipeline-bubble is given without a pipeline."""
    if config.logging.log_pipeline_bubble and config.parallel.pipeline_model_parallel_size == 1:
        yield (
            "--log-pipeline-bubble: a single pipeline stage never waits: give "
            "--pipeline-model-parallel-size, or drop the flag"
        )


def samples(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if training or evaluation needs more samples than can be counted."""
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
    if iterations is None and training.train_samples is None:
        iterations = (training.train_tokens or 0) // max(config.data.seq_length or 1, 1) // batch
    elif iterations is None:
        iterations = (training.train_samples or 0) // batch
    evaluations = 1  # with --full-validation, --eval-iters is only the length of the test
    if evaluation.eval_interval > 0 and not evaluation.full_validation:
        evaluations += evaluation.count(iterations)
    own_batch = evaluation.eval_global_batch_size
    flag = f"--{'eval-' if own_batch else ''}global-batch-size"
    batch = own_batch or batch
    if evaluations * evaluation.eval_iters * batch > _COUNTABLE:
        yield (
            f"--eval-iters {evaluation.eval_iters} x {flag} {batch} x {evaluations} "
            f"evaluation{'s' * (evaluations > 1)} is more than {_COUNTABLE} samples: use at most "
            f"{_COUNTABLE // (evaluations * batch)}, or a larger --eval-interval"
        )


def passes(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if an update or an evaluation's batch has too many micro-batches."""
    micro, batch = config.training.micro_batch_size, config.training.global_batch_size
    evaluation, replicas = config.evaluation, data_parallel_size(config, world_size)
    cases = [("--", batch, micro, "update")]
    if evaluation.takes_place and evaluation.eval_global_batch_size:
        own_micro = evaluation.eval_micro_batch_size or micro
        cases.append(("--eval-", evaluation.eval_global_batch_size, own_micro, "evaluation batch"))
    for prefix, total, size, name in cases:
        step = (size or 0) * replicas
        if total and step > 0 and total // step > _MAX_PASSES:
            yield (
                f"{prefix}global-batch-size {total} gives each process {total // step} "
                f"micro-batches per {name}: use at most {_MAX_PASSES * step}, or a larger "
                f"{prefix}micro-batch-size"
            )
