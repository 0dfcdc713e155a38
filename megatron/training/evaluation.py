"""Losses on held-out samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron.command import say
from megatron.config.run import evaluations_until
from megatron.data.sample import SampleDataset
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.data import batches_from
from megatron.training.log_line import validation_lines
from megatron.training.passes import Passes
from megatron.training.run import Run
from megatron.training.step import StepOutcome, reduce_losses


class EvaluationListener(Protocol):
    """Hears the results of every evaluation, on all ranks."""

    def after_evaluation(self, run: Run, split: str, losses: Mapping[str, float]) -> None: ...


def evaluate(run: Run, dataset: SampleDataset, *, skip: int) -> dict[str, float] | None:
    """Mean losses over `--eval-iters` global batches, starting after `skip` samples; with
    --calculate-per-token-loss over all their tokens that count.

    Returns None when a rank was asked to leave meanwhile. Collective.
    """
    count = run.batches.global_batch // run.batches.samples_per_pass
    batches = batches_from(run, dataset, consumed=skip)
    totals: dict[str, float] = {}
    weights = 0.0
    for part in run.parts:
        part.eval()
    for _ in range(run.config.evaluation.eval_iters):
        passes = Passes(run, batches, count)
        passes.forward()
        flags = [run.exit.by_signal]
        losses, weight, (exit_wanted,) = reduce_losses(passes.losses, flags, run, passes.weights)
        if exit_wanted:
            return None
        weights += weight
        for name, value in losses.items():
            totals[name] = totals.get(name, 0.0) + weight * value
    return {name: total / (weights or 1.0) for name, total in totals.items()}


def evaluate_and_report(
    run: Run,
    dataset: SampleDataset | None,
    listeners: Sequence[EvaluationListener],
    *,
    split: str,
    where: str,
    skip: int,
) -> None:
    """Evaluate, print Megatron's lines, tell the listeners. Nothing for an empty split."""
    if dataset is None or run.config.evaluation.eval_iters == 0:
        return
    with run.timers.measure("eval-time", level=0):
        losses = evaluate(run, dataset, skip=skip)
    if losses is None:
        return
    if run.is_log_rank:
        say(validation_lines(where, losses, has_perplexity=run.recipe.head.is_language_model))
    for listener in listeners:
        listener.after_evaluation(run, split, losses)
    if run.config.training.empty_unused_memory_level == 2:
        run.device.empty_cache()


def evaluation_position(run: Run) -> int:
    """Validation samples that earlier evaluations consumed, at the current iteration.

    A function of the iteration and the flags alone: a run resumed with the same flags evaluates on
    what the uninterrupted one would have used.
    """
    done = evaluations_until(run.config, run.progress.iteration - 1)
    return done * run.config.evaluation.eval_iters * run.batches.global_batch


class Evaluation(Callback):
    """Validation loss every `--eval-interval` iterations; after the checkpoint was saved."""

    def __init__(self, listeners: Sequence[EvaluationListener]) -> None:
        self._listeners = listeners

    def interrupts(self, run: Run) -> bool:
        return (run.progress.iteration + 1) % run.config.evaluation.eval_interval == 0

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        iteration = run.progress.iteration
        leaving_now = leave is not None and leave.by_signal
        if iteration % run.config.evaluation.eval_interval or leaving_now:
            return
        evaluate_and_report(
            run,
            run.datasets[1],
            self._listeners,
            split="validation",
            where=f"iteration {iteration}",
            skip=evaluation_position(run),
        )


def final_evaluation(run: Run, listeners: Sequence[EvaluationListener]) -> None:
    """Validation and test loss after the last update, on samples no earlier evaluation used."""
    done = evaluations_until(run.config, run.progress.iteration)
    skip = done * run.config.evaluation.eval_iters * run.batches.global_batch
    for index, split, data in ((1, "validation", "val"), (2, "test", "test")):
        evaluate_and_report(
            run,
            run.datasets[index],
            listeners,
            split=split,
            where=f"the end of training for {data} data",
            skip=skip if index == 1 else 0,
        )
