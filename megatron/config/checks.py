"""The table of checks, which find user mistakes before any process group or GPU is used.

Each rule reads the resolved configuration and yields one line per mistake: flag, value, remedy.
A rule skips values that are missing, unless it reports them, as `required` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator

from megatron.config import (
    rules_attention,
    rules_curriculum,
    rules_data,
    rules_finetuning,
    rules_hybrid,
    rules_legacy,
    rules_model,
    rules_optimizer,
    rules_parallel,
    rules_reliability,
    rules_retriever,
    rules_training,
)
from megatron.config.experts import mixture_layers
from megatron.config.run import RunOptions, flatten, values_of

Rule = Callable[[RunOptions, int], Iterator[str]]


def bounds(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each value that is outside its field's bounds."""
    for _, field, value in values_of(config):
        for item in (value or ()) if field.many else (value,):
            rule = field.out_of_bounds(item)
            if rule:
                yield f"{field.names[0]} {item}: {rule}"


def requirements(
    config: RunOptions, world_size: int, paths: Container[str] | None = None
) -> Iterator[str]:
    """Yield a line for each flag whose requirement is not met or that is meant for other networks.

    Values equal to a flag's default are accepted.

    Args:
        config: The resolved run.
        world_size: The number of processes.
        paths: The fields to check, by "section.field". `None` means all.
    """
    kind = config.model.architecture
    for path, field, value in values_of(config):
        required, owners = field.info.requires, field.info.only_for
        if value == field.default or (paths is not None and path not in paths):
            continue
        if owners and kind not in owners:
            *others, last = (owner.upper() for owner in owners)
            names = f"{', '.join(others)} and {last}" if others else last
            article = "an" if kind == "ict" else "a"
            yield (
                f"{field.spell(value)} is only for {names}, and this model is {article} "
                f"{kind.upper()}: drop it"
            )
        elif required is not None and not required.is_met(config):
            yield f"{field.spell(value)} requires {required.description}: add it, or drop the flag"


RULES: tuple[Rule, ...] = (
    rules_model.required,
    rules_model.required_length,
    bounds,
    requirements,
    rules_training.samples,
    rules_training.passes,
    rules_parallel.sharding,
    rules_parallel.torch_ddp,
    rules_model.architecture,
    rules_model.t5,
    rules_model.retro,
    rules_model.relative_positions,
    rules_parallel.layout,
    rules_parallel.context,
    rules_parallel.overlap,
    rules_parallel.tensor_parallel,
    rules_parallel.pipeline,
    rules_model.heads,
    rules_model.positions,
    rules_model.activation_function,
    rules_model.normalization,
    rules_finetuning.adapters,
    rules_attention.attention,
    rules_attention.latent_attention,
    rules_attention.delta_net,
    rules_model.multi_token,
    rules_hybrid.hybrid,
    rules_hybrid.parallel_mamba,
    rules_model.experts,
    rules_model.expert_groups,
    rules_model.gating,
    rules_model.sinkhorn,
    rules_parallel.experts,
    rules_model.precision,
    rules_model.fp8,
    rules_training.batch_size,
    rules_training.evaluation_batch_size,
    rules_training.batch_size_ramp,
    rules_training.batch_size_schedule,
    rules_training.length,
    rules_training.skipped_iterations,
    rules_reliability.faults,
    rules_reliability.rerun,
    rules_reliability.torchft,
    rules_reliability.non_persistent,
    rules_curriculum.curriculum,
    rules_finetuning.distillation,
    rules_training.learning_rate,
    rules_training.warm_up,
    rules_training.wsd_decay,
    rules_training.wsd_branch,
    rules_training.weight_decay,
    rules_optimizer.muon,
    rules_optimizer.mup,
    rules_optimizer.state_formats,
    rules_optimizer.averages,
    rules_training.recomputation,
    rules_training.offloading,
    rules_parallel.graphs,
    rules_training.per_token_loss,
    rules_training.nonfinite,
    rules_training.spikes,
    rules_training.replica_hashes,
    rules_reliability.save_interval,
    rules_reliability.pretrained,
    rules_reliability.retention,
    rules_reliability.checkpoint_names,
    rules_legacy.core_files,
    rules_legacy.core_torch_files,
    rules_legacy.legacy_files,
    rules_training.profiling,
    rules_training.logging,
    rules_data.sources,
    rules_data.blends,
    rules_data.validation_sets,
    rules_data.split,
    rules_data.tokenizer,
    rules_data.sentinels,
    rules_finetuning.conversations,
    rules_finetuning.samples,
    rules_finetuning.batch_invariance,
    rules_finetuning.preferences,
    rules_retriever.towers,
    rules_retriever.titles,
)


def find_problems(
    config: RunOptions,
    world_size: int,
    unknown_fields: Iterable[str] = (),
    rules: Iterable[Rule] = RULES,
) -> list[str]:
    """Return one line for each mistake in a resolved run.

    Args:
        config: The resolved run.
        world_size: The number of processes.
        unknown_fields: Names of fields whose values could not be read. This has been reported
            already. Lines about their flags are left out, because they would be about defaults that
            the user did not choose.
        rules: The rules to apply.
    """
    fields = (field for _, field, _ in values_of(config) if field.name in unknown_fields)
    flags = {name for field in fields for name in field.spellings}
    problems = (problem for rule in rules for problem in rule(config, world_size))
    return [line for line in problems if flags.isdisjoint(re.findall(r"--[\w-]+", line))]


def find_notices(config: RunOptions, world_size: int, start: RunOptions) -> list[str]:
    """Return one line for each accepted setting that has no effect or needs a warning.

    Args:
        config: The resolved run.
        world_size: The number of processes.
        start: The run before flags and YAML file are applied, but with the values taken from a
            checkpoint, because the user did not give those.
    """
    before = flatten(start)
    given = [(field, value) for path, field, value in values_of(config) if value != before[path]]
    lines = [
        f"{field.display_name}: {field.info.notice}" for field, _ in given if field.info.notice
    ]
    lines += rules_parallel.no_effect(config, world_size)
    lines += rules_curriculum.slow_lengths(config)
    lines += rules_training.range_test_only(config)
    if not start.model.num_experts:  # the network does not come from a checkpoint
        lines += rules_model.without_router_biases(config.model)
    lines += rules_optimizer.coarse_variance(config)
    lines += rules_finetuning.preference_dropout(config)
    lines += _no_effect(config, start)
    kind = config.tokenizer.tokenizer_type
    unread = {"vocab_file", "merge_file", "tokenizer_model", "vocab_size"} if kind else set()
    unread -= {*rules_data.tokenizer_files(kind)}
    for field, value in given:
        needs = field.info.needs
        if value is not None and needs is not None and not needs.is_met(config):
            lines.append(f"{field.spell(value)} has no effect without {needs.description}")
        elif value is not None and field.name in unread:
            lines.append(f"{field.spell(value)} has no effect with --tokenizer-type {kind}")
    kind = config.checkpoint.ckpt_format
    if config.checkpoint.save is not None and kind != "native":
        style = config.schedule.lr_decay_style if kind == "legacy" else None
        lines += rules_legacy.unsupported_state(config.precision, style, f"--ckpt-format {kind}")
        lines += rules_legacy.unused_by_core(config.model)
        if config.schedule.lr_warmup_style == "log":
            lines.append(
                f"--ckpt-format {kind}: Megatron-LM does not support --lr-warmup-style log: to "
                "resume there, use --override-opt_param-scheduler"
            )
    return lines


def _no_effect(config: RunOptions, start: RunOptions) -> Iterator[str]:
    """Yield notices about flags that have no effect when combined with others."""
    parallel = config.parallel
    is_single = parallel.tensor_model_parallel_size == 1
    if parallel.sequence_parallel and is_single:
        yield "--sequence-parallel: no effect with a single tensor-parallel process"
    if parallel.distribute_saved_activations and (is_single or parallel.sequence_parallel):
        reason = (
            "one tensor-parallel process"
            if is_single
            else "--sequence-parallel splits them already"
        )
        yield f"--distribute-saved-activations: {reason}: there is nothing left to split"
    training, model = config.training, config.model
    is_selective = training.recompute_granularity == "selective"
    is_given = is_selective and "mlp" in training.recompute_modules and model.num_experts
    if is_given and all(mixture_layers(model, model.num_layers or 0)):
        yield (
            "--recompute-modules mlp has no effect: no layer has a dense MLP; use moe for "
            "mixtures of experts"
        )
    iterations, profiling = config.training.train_iters, config.profiling
    if profiling.profile and iterations is not None and profiling.windows[0][0] > iterations:
        flag = "--profile-windows" if profiling.profile_windows else "--profile-step-start"
        yield (
            f"--profile has no effect: the run ends at --train-iters {iterations}, before "
            f"{flag} {profiling.windows[0][0]}"
        )
    later = [
        str(number)
        for number in config.training.iterations_to_skip or ()
        if iterations is not None and number >= iterations
    ]
    if later:
        yield (
            f"--iterations-to-skip {' '.join(later)} has no effect: the run ends earlier, at "
            f"--train-iters {iterations}"
        )
    given = config.training.skip_train and not start.training.skip_train
    if given and config.checkpoint.load is None:
        yield "--skip-train without --load: evaluating an untrained model"
