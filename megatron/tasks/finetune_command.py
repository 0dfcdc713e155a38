"""Command line and execution of a finetuning task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.find import scan
from megatron.checkpoint.reader import Reader
from megatron.config import (
    ParsedRun,
    Program,
    RunConfig,
    parse_config,
    rules_data,
    rules_model,
    rules_reliability,
    rules_training,
)
from megatron.config.checks import RULES, Rule, find_problems
from megatron.config.fields import fields_of
from megatron.config.logging import ProfilingConfig
from megatron.config.model import ModelOptions
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.run import RunOptions, flatten
from megatron.config.tasks import FinetuneConfig, TaskConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.inference.load import open_existing, saved_config
from megatron.processes.launch import Launch
from megatron.processes.process import print_notices
from megatron.tasks.classify import GLUE, Example, read_glue, read_race
from megatron.tasks.finetune import FinetuneRecipe, Finetuning
from megatron.tasks.results import check_results
from megatron.tasks.table import PROGRAM, flags_of_other_tasks
from megatron.tasks.target import HEADS, Target
from megatron.tasks.texts import find_missing, find_mistakes
from megatron.training.pretrain import Extras, dry_run, pretrain
from megatron.training.recipe import Recipe

# The rules that need the length of the run, which is known only after the data has been read.
LATE_RULES: tuple[Rule, ...] = (
    rules_model.required_length,
    rules_training.samples,
    rules_training.length,
    rules_training.warm_up,
)
PRETRAINING_RULES: tuple[Rule, ...] = (
    rules_data.sources,
    rules_data.blends,
    rules_data.split,
    rules_data.tokenizer,
    rules_model.required,
    rules_training.per_token_loss,
    rules_reliability.save_interval,  # without it, the run saves after each epoch
)
# The fields that have no effect if nothing is trained.
_TRAINING_FIELDS: dict[str, tuple[str, ...]] = {
    "model": (
        *("attention_dropout", "hidden_dropout"),
        *("init_method_std", "init_method_xavier_uniform"),
    ),
    "precision": (
        *("loss_scale", "initial_loss_scale", "min_loss_scale"),
        *("loss_scale_window", "hysteresis"),
    ),
    "optimizer": tuple(
        field.name
        for field in fields_of(OptimizerConfig)
        if field.name not in ("optimizer", "optimizer_cpu_offload")  # these two affect memory
    ),
    "schedule": tuple(field.name for field in fields_of(ScheduleConfig)),
    "training": (
        *("recompute_activations", "recompute_granularity", "recompute_modules"),
        *("recompute_method", "recompute_num_layers", "exit_interval", "exit_duration_in_mins"),
        *("kill_switch_file", "calculate_per_token_loss", "on_nonfinite"),
        *("max_nonfinite_skips", "check_for_nan_in_loss_and_grad"),
    ),
    "parallel": ("overlap_grad_reduce", "overlap_param_gather"),
    "checkpoint": (
        *("save_interval", "save_interval_in_mins", "ckpt_format", "async_save", "keep_latest"),
        *("save_retain_interval", "mean_hours_between_failures", "no_save_optim", "no_save_rng"),
    ),
    "profiling": tuple(field.name for field in fields_of(ProfilingConfig)),
}
_MICRO_BATCH = 8  # the default micro-batch size of an evaluation
RACE = Target("RACE", tuple("ABCD"), texts=4)


def run(task: str, arguments: list[str], launch: Launch) -> int:
    """Finetune and evaluate, and return the exit code. Collective.

    Raises:
        UserError: A flag, a checkpoint or the data is invalid.
    """
    started = time.monotonic()
    parsed = parse(task, arguments, launch.world_size)
    return run_finetuning(parsed, launch, started, partial(prepare, task, parsed))


def run_finetuning(
    parsed: ParsedRun,
    launch: Launch,
    started: float,
    build: Callable[[int], tuple[RunConfig, Recipe, Extras]],
) -> int:
    """Prepare and run finetuning, and return the exit code. Collective.

    Args:
        parsed: The command line, whose first extra options are those of the task and of finetuning.
        launch: This process's rank and the number of processes.
        started: The time at which the command started (`time.monotonic`).
        build: A function that reads the data and returns the arguments of `pretrain`, given the
            number of processes.

    Raises:
        UserError: A flag, a checkpoint or the data is invalid.
    """
    print_notices(parsed.notices, launch)
    training = parsed.config.training
    simulated_world_size = training.dry_run_world_size if training.dry_run else None
    config, recipe, extras = build(simulated_world_size or launch.world_size)
    if training.dry_run:
        return dry_run(config, recipe, launch)
    if launch.rank == 0:
        options, tuning = parsed.extra[:2]
        data = (*(tuning.train_data or ()), *(options.valid_data or ()))
        check_results(options, data, _resumed_folder(config))
    return pretrain(config, recipe, launch, started, extras)


def _resumed_folder(config: RunConfig) -> Path | None:
    """Return the --save folder if the run continues from a checkpoint in it, otherwise `None`."""
    options = config.checkpoint
    if options.save is None or options.load is None or options.finetune:
        return None
    save = Path(options.save)
    is_same = save.resolve() == Path(options.load).resolve()
    return save if is_same and not config.training.skip_train and scan(save)[0] else None


def prepare(
    task: str, parsed: ParsedRun, world_size: int
) -> tuple[RunConfig, FinetuneRecipe, Finetuning]:
    """Read the data, which determines the run's length, and return the arguments of `pretrain`.

    Raises:
        ConfigError: A flag does not fit the run's length, or the samples do not fill a batch.
        DataError: A file is not in the format of the task.
    """
    options, task_options = parsed.extra
    target, read = find_target(task)
    paths = task_options.train_data or () if task_options.epochs else ()
    train = [example for path in paths for example in read(path, flag="--train-data")]
    valid = {path: read(path) for path in options.valid_data or ()}
    config, samples_per_epoch = with_length(parsed.config, task_options, len(train), world_size)
    recipe = FinetuneRecipe(
        target,
        train,
        [example for examples in valid.values() for example in examples],
        samples_per_epoch,
    )
    batch = config.training.global_batch_size
    extras = Finetuning(
        recipe,
        pretrained=task_options.pretrained_checkpoint,
        valid=valid,
        epoch_ends=epoch_ends(task_options.epochs or 0, samples_per_epoch or len(train), batch),
        options=options,
    )
    return config, recipe, extras


def parse(task: str, arguments: list[str], world_size: int) -> ParsedRun:
    """Parse a command line, which overrides the settings of the pretrained checkpoint.

    The length of the run is not set yet, because it depends on the data.

    Raises:
        ConfigError: One or more flags are wrong. The message names all of them.
        CheckpointError: The checkpoint is missing or not a BERT, or its head does not fit the task.
    """

    def check(options: TaskConfig, task_options: FinetuneConfig) -> Iterator[str]:
        if task_options.epochs is None or task_options.epochs < 0:
            yield f"--task {task} needs --epochs: give a number, or 0 to evaluate only"
        if task_options.epochs and not task_options.train_data:
            yield f"--task {task} needs --train-data: give the file to train on, or --epochs 0"
        if task_options.epochs == 0 and not options.valid_data:
            yield "--epochs 0 without --valid-data: there is nothing to do: give --valid-data"
        if options.results is not None and not options.valid_data:
            yield (
                f"--results {options.results} without --valid-data: nothing is evaluated: give "
                "--valid-data, or drop --results"
            )
        yield from find_missing("--train-data", task_options.train_data)
        yield from find_mistakes(options)

    def reads(given: Mapping[str, Any]) -> set[str] | None:
        if given.get("epochs") != 0:
            return None  # all fields
        unused = {
            f"{section}.{name}" for section, names in _TRAINING_FIELDS.items() for name in names
        }
        return set(flatten(RunOptions())) - unused

    parsed = parse_config(
        arguments,
        world_size=world_size,
        architecture="bert",
        program=Program(
            name=PROGRAM,
            extra=(TaskConfig, FinetuneConfig),
            find_start=partial(_pretrained, target=find_target(task)[0]),
            rules=[
                *(rule for rule in RULES if rule not in (*LATE_RULES, *PRETRAINING_RULES)),
                _required,
                refuse_pretraining_flags,
            ],
            reads=reads,
            check_extra=check,
            flags_of_other_tasks=flags_of_other_tasks(task),
        ),
    )
    options, task_options = parsed.extra
    if task_options.epochs and parsed.config.training.skip_train:
        raise ConfigError(
            f"--skip-train cannot be combined with --epochs {task_options.epochs}: to evaluate "
            "only, give --epochs 0"
        )
    batches = parsed.config.evaluation.eval_iters
    notices = list(parsed.notices)
    if batches and not options.valid_data:
        notices.append(f"--eval-iters {batches} has no effect without --valid-data")
    if parsed.config.training.calculate_per_token_loss:
        notices.append(
            "--calculate-per-token-loss has no effect, because the loss is counted per sample"
        )
    if not task_options.epochs:
        unused = {"--train-data": task_options.train_data, "--keep-last": task_options.keep_last}
        notices += [f"{flag} has no effect with --epochs 0" for flag in unused if unused[flag]]
    return replace(parsed, notices=tuple(notices))


def find_target(task: str) -> tuple[Target, Callable[..., list[Example]]]:
    """Return the task's target and the function that reads one of its files."""
    return (RACE, read_race) if task == "RACE" else (GLUE[task][0], partial(read_glue, task))


def with_length(
    config: RunConfig, task_options: FinetuneConfig, samples: int, world_size: int
) -> tuple[RunConfig, int | None]:
    """Return the configuration with --train-iters set, and the number of samples per epoch.

    Without --keep-last, an epoch ends with its last full batch. With --keep-last, all samples of
    all epochs are used: the number is `None`, and only the last batch of the run is completed with
    samples from a further epoch. It is also `None` if nothing is trained and the samples do not
    fill a batch.

    Raises:
        ConfigError: A flag does not fit the resulting number of iterations, or the samples do not
            fill a batch.
    """
    batch = config.training.global_batch_size
    epochs = task_options.epochs or 0
    if epochs and samples < batch and not task_options.keep_last:
        raise ConfigError(
            f"--train-data has {samples} examples, fewer than a batch of {batch}: lower "
            "--global-batch-size, or give --keep-last"
        )
    samples_per_epoch = None if task_options.keep_last else samples // batch * batch
    iterations = epochs * (samples // batch) if samples_per_epoch else -(-epochs * samples // batch)
    training = replace(
        config.training, train_iters=iterations, train_samples=None, train_tokens=None
    )
    config = replace(config, training=training)
    problems = find_problems(config, world_size, rules=LATE_RULES)
    if problems:
        raise ConfigError(problems)
    return config, samples_per_epoch or None


def epoch_ends(epochs: int, samples: int, batch: int) -> frozenset[int]:
    """Return the updates, counted from 1, that train on the last sample of an epoch.

    Samples that do not fill a batch are combined with the first samples of the next epoch.
    """
    return frozenset(-(-epoch * samples // batch) for epoch in range(1, epochs + 1))


def refuse_lengths(given: Mapping[str, Any]) -> None:
    """Reject flags that set the length of a run, because --epochs sets it.

    Raises:
        ConfigError: Such a flag is given.
    """
    lengths = ("train_iters", "train_samples", "train_tokens")
    lengths_given = {flag: given[flag] for flag in lengths if flag in given}
    if lengths_given:
        flags = ", ".join("--" + flag.replace("_", "-") for flag in lengths_given)
        raise ConfigError(f"{flags}: --epochs sets the length of training: drop {flags}")


def _pretrained(given: Mapping[str, Any], target: Target) -> RunOptions:
    """Return the settings that flags override, read from --pretrained-checkpoint or --load."""
    refuse_lengths(given)
    flag, folder = next(
        (
            (f"--{name.replace('_', '-')}", given[name])
            for name in ("pretrained_checkpoint", "load")
            if given.get(name) is not None
        ),
        ("", None),
    )
    start = RunOptions(model=ModelOptions(architecture="bert"))
    only_evaluates = given.get("epochs") == 0
    if folder is not None:
        step = given.get("ckpt_step") if flag == "--load" else None
        reader = open_existing(
            folder,
            flag=flag,
            step=step,
            verify=False,
            allow_foreign=given.get("allow_foreign_checkpoints", False),
        )
        start = saved_config(reader, folder, "bert", flag=flag)
        if only_evaluates or flag == "--load":
            _check_head(reader, target, f"{flag} {folder}", only_evaluates=only_evaluates)
    return replace(
        start,
        # A classifier needs the pooler, which a model without a binary head lacks.
        model=replace(start.model, bert_binary_head=True),
        training=replace(
            start.training,
            skip_train=only_evaluates,
            micro_batch_size=_MICRO_BATCH if only_evaluates else start.training.micro_batch_size,
        ),
        checkpoint=replace(start.checkpoint, no_load_optim=only_evaluates),
        evaluation=replace(start.evaluation, eval_iters=0),
    )


def _check_head(reader: Reader, target: Target, source: str, *, only_evaluates: bool) -> None:
    """Check that a finetuned model has the task's head.

    Raises:
        CheckpointError: The model has no head, or the head of another task.
    """
    heads = {
        name.removesuffix(".bias").removeprefix("model."): reader.global_shape(name)[0]
        for name in reader.names()
        if name in (f"model.{head}.bias" for head in HEADS)
    }
    if not heads:
        reason = ", and --epochs 0 trains none" if only_evaluates else ""
        remedy = "train one with --epochs"
        if not only_evaluates:
            remedy = "give this one as --pretrained-checkpoint"
        raise CheckpointError(
            f"{source}: this model has no head for a task{reason}: give the folder of a finetuned "
            f"model, such as its `best`, or {remedy}"
        )
    if heads.get(target.head_name) != target.head.outputs:
        description = " and ".join(
            f"{name} with {outputs} output{'s' * (outputs > 1)}" for name, outputs in heads.items()
        )
        raise CheckpointError(
            f"{source}: this model was finetuned for another task: it has {description}, but "
            f"--task {target.task} needs {target.head_name} with {target.head.outputs}: give "
            "the folder of a model that was finetuned for this task"
        )


def _required(config: RunOptions, world_size: int) -> Iterator[str]:
    if config.model.num_layers is None:
        yield "--pretrained-checkpoint is required: give the folder of a pretrained BERT"
    else:  # the checkpoint names its tokenizer, unless the checkpoint is old
        yield from rules_model.required(config, world_size)
        yield from rules_data.tokenizer(config, world_size)


def refuse_pretraining_flags(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error message for each flag that only makes sense in pretraining.

    Args:
        config: The run's options.
        world_size: The number of processes.
    """
    if config.data.dataloader_type == "cyclic":
        yield "--dataloader-type cyclic: a task always shuffles each epoch: drop it"
    if config.training.rampup_batch_size is not None:
        yield "--rampup-batch-size: epochs need batches of the same size: drop it"
    if config.training.step_batch_size_schedule is not None:
        yield "--step-batch-size-schedule: epochs need batches of the same size: drop it"
    if config.training.iterations_to_skip is not None:
        yield "--iterations-to-skip: this could skip the end of an epoch: drop it"
    if config.logging.log_validation_ppl_to_tensorboard:
        yield (
            "--log-validation-ppl-to-tensorboard: a task's loss is not a token loss and has no "
            "perplexity: drop it"
        )
    if config.checkpoint.ckpt_format == "torch":
        yield "--ckpt-format torch: Megatron Core has no heads for tasks: use native or legacy"
    if config.data.mock_data:
        yield "--mock-data: give labeled texts as --train-data"
    if config.model.lora_rank is not None:
        yield (
            f"--lora-rank {config.model.lora_rank}: a task trains all weights, because its head "
            "is new: drop the flag, or train adapters with pretrain_bert.py"
        )
