"""The callbacks of a pretraining run, in order, and the start-up panel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.training import TrainingConfig
from megatron.training.callbacks.base import Callback
from megatron.training.callbacks.bubble import PipelineBubble
from megatron.training.callbacks.checkpoints import Checkpoints
from megatron.training.callbacks.garbage import EmptyCache, GarbageCollection
from megatron.training.callbacks.logging import LogLine
from megatron.training.callbacks.nonfinite import NonFinitePolicy
from megatron.training.callbacks.profiling import Profile
from megatron.training.callbacks.sample_ids import SampleIds
from megatron.training.callbacks.scalars import Scalars
from megatron.training.callbacks.terminal import ProgressBar
from megatron.training.evaluation import Evaluation, EvaluationListener
from megatron.training.panel import (
    Row,
    describe_lengths,
    device_rows,
    format_panel,
    model_flops,
    size_rows,
)
from megatron.training.run import Run
from megatron.training.writers import Writer


def standard_callbacks(
    run: Run, writers: Sequence[Writer]
) -> tuple[list[Callback], list[EvaluationListener]]:
    """Callbacks in the order in which they run, and those that hear evaluations.

    The profile first: it must close around the step alone. Then the non-finite policy, so that
    nothing is logged or saved after a step that ends the run. Then what belongs to an
    iteration, and the log line that times it. The checkpoint comes before the evaluation: an
    evaluation that fails must not cost the training before it. The line's time leaves both out.
    """
    config = run.config
    flops = model_flops(config, run.padded_vocab_size, run.recipe.ending)
    scalars = Scalars(writers)
    callbacks: list[Callback] = []
    if config.profiling.profile and run.layout.world.rank in config.profiling.profile_ranks:
        callbacks.append(Profile())
    callbacks += [NonFinitePolicy(), scalars]
    if config.data.log_sample_ids:
        callbacks.append(SampleIds(Path(config.checkpoint.save or ".") / "samples.jsonl"))
    if config.training.manual_gc:
        callbacks.append(GarbageCollection())
    if config.training.empty_unused_memory_level:
        callbacks.append(EmptyCache())
    callbacks += [LogLine(flops), ProgressBar()]
    if run.operation_clock is not None:
        callbacks.append(PipelineBubble(run.operation_clock, writers))
    if config.checkpoint.save:
        callbacks.append(Checkpoints())
    if config.evaluation.eval_iters:
        callbacks.append(Evaluation([scalars]))
    return callbacks, [scalars]


def start_panel(run: Run, seconds: float) -> str:
    """Every decision and its reason, before the first iteration."""
    config = run.config
    rows: list[Row] = [
        *device_rows(config, run.device, run.recipe.describe_kernels(run.parts[0])),
        *_recording_rows(config.training),
        *size_rows(
            config,
            run.layout.world.size,
            run.padded_vocab_size,
            ending=run.recipe.ending,
        ),
        ("data", _describe_data(run)),
        ("tokenizer", f"{config.tokenizer.tokenizer_type}, {run.tokenizer.vocab_size:,} entries"),
        ("checkpoints", _describe_checkpoints(run)),
        ("set up in", f"{seconds:.1f} s"),
    ]
    return format_panel(f"{run.recipe.program}: {run.train_iterations:,} iterations", rows)


def _recording_rows(training: TrainingConfig) -> list[Row]:
    if training.cuda_graph_impl == "none":
        return []
    first = training.cuda_graph_warmup_steps + 1
    return [("passes", f"recorded in iteration {first} and run again (--cuda-graph-impl)")]


def _describe_data(run: Run) -> str:
    data = run.config.data
    has_corpus = any((data.data_path, data.train_data_path, data.valid_data_path))
    source = "indexed files" if has_corpus else "the task's files"
    source = "generated tokens (--mock-data)" if data.mock_data else source
    of_task = not has_corpus and not data.mock_data  # which evaluates on files of its own
    sizes = ", ".join(
        f"{name} {0 if split is None else len(split):,}"
        for name, split in zip(("training", "validation", "test"), run.datasets, strict=True)
        if split or not of_task
    )
    texts = run.recipe.ending.texts
    of_each = f"{texts} x " * (texts > 1) + describe_lengths(data)
    return f"{source}; samples of {of_each} tokens{sizes and ': '}{sizes}"


def _describe_checkpoints(run: Run) -> str:
    options = run.config.checkpoint
    loaded = (
        f"continuing {options.load} at iteration {run.progress.iteration}"
        if run.progress.iteration
        else f"weights from {options.load}"
        if options.finetune
        else f"weights from {run.pretrained}"
        if run.pretrained is not None
        else "starting fresh"
    )
    return f"{loaded}; {_describe_saving(options, has_epochs=bool(run.save_at))}"


def _describe_saving(options: CheckpointConfig, *, has_epochs: bool) -> str:
    if not options.save:
        return "not saving (--save is not given)"
    every = [
        f"{number:g} {unit}"
        for number, unit in (
            (options.save_interval, "iterations"),
            (options.save_interval_in_mins, "minutes"),
        )
        if number is not None
    ]
    every += ["epoch"] * has_epochs
    how = " in the background" if options.async_save else ""
    kept = f", keeping the newest {options.keep_latest}" if options.keep_latest else ""
    return f"saving to {options.save} every {' or '.join(every)}{how}{kept}, and at the end"
