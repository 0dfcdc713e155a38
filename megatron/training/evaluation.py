"""Evaluation: the losses on held-out samples."""

from __future__ import annotations

from megatron.command import print_line
from megatron.data.sample import ControlledDataset, SampleDataset
from megatron.errors import EXIT_OK
from megatron.training.batches import BatchPlan, batches_from, evaluation_position
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.callbacks.scalars import Scalars
from megatron.training.log_line import validation_lines
from megatron.training.passes import Passes
from megatron.training.run import Run
from megatron.training.step import StepOutcome, reduce_losses


def evaluate(run: Run, dataset: SampleDataset, *, skip: int) -> dict[str, float] | None:
    """Compute mean losses over `--eval-iters` global batches. Collective.

    With --calculate-per-token-loss, the mean is over all labels in the loss mask.

    Args:
        run: The run whose model is evaluated.
        dataset: Held-out samples.
        skip: The number of samples to skip first.

    Returns:
        Losses by name, or `None` if a rank was asked to exit immediately during the evaluation.
    """
    plan = BatchPlan.for_evaluation(run.config, run.layout.data.size)
    count = plan.micro_batches_at(0)
    batches = batches_from(run, dataset, consumed=skip, micro_batch=plan.micro_batch)
    totals: dict[str, float] = {}
    weights = 0.0
    for part in run.parts:
        part.eval()
    for _ in range(run.config.evaluation.eval_iters):
        passes = Passes(run, batches, count, micro_batch=plan.micro_batch)
        passes.forward()
        losses, weight, (exit_requested,) = reduce_losses(passes, [run.exit.code != EXIT_OK], run)
        if exit_requested:
            return None
        weights += weight
        for name, value in losses.items():
            totals[name] = totals.get(name, 0.0) + weight * value
    # Without files of logits for held-out samples, a distilled model has only one of its losses.
    missing = totals.keys() - passes.losses.keys() if passes.losses else set()
    return {name: total / (weights or 1.0) for name, total in totals.items() if name not in missing}


def evaluate_and_report(
    run: Run,
    split: str,
    scalars: Scalars,
    *,
    where: str,
    skip: int,
    at_end_of_training: bool = False,
) -> None:
    """Evaluate a split unless it is empty, print Megatron's lines and write the scalars.

    Args:
        run: The run whose model is evaluated.
        split: "validation" or "test".
        scalars: The callback that writes the results.
        where: The point in the run, for the printed lines.
        skip: The number of samples to skip first.
        at_end_of_training: Whether this is the evaluation after the last update.
    """
    dataset = run.datasets[("training", "validation", "test").index(split)]
    if dataset is None or run.config.evaluation.eval_iters == 0:
        return
    controls = dataset.controls if isinstance(dataset, ControlledDataset) else {}
    reported: dict[str, float] = {}
    with run.timers.measure("eval-time", level=0):
        for control, samples in {"": dataset, **controls}.items():
            losses = evaluate(run, samples, skip=skip)
            if losses is None:
                return
            reported |= {f"{name} {control}".rstrip(): value for name, value in losses.items()}
        average = run.optimizer.average
        if run.config.evaluation.eval_averaged_weights and average is not None and average.count:
            run.layers.forget_weights()
            with run.amax_history.unrecorded(), run.optimizer.averaged_weights():
                losses = evaluate(run, dataset, skip=skip)
            run.layers.forget_weights()
            if losses is None:
                return
            reported |= {f"{name} of averaged weights": value for name, value in losses.items()}
    if run.is_log_rank:
        print_line(validation_lines(where, reported, has_perplexity=run.recipe.head.has_perplexity))
    scalars.after_evaluation(run, split, reported, at_end_of_training=at_end_of_training)
    if run.config.training.empty_unused_memory_level == 2:
        run.device.empty_cache()


class Evaluation(Callback):
    """A callback that validates every `--eval-interval` iterations, after any checkpoint."""

    def __init__(self, scalars: Scalars) -> None:
        """Store the callback that writes the results."""
        self._scalars = scalars

    def interrupts(self, run: Run) -> bool:
        """Return whether an evaluation follows the next update."""
        return run.config.evaluation.is_due(run.progress.iteration + 1)

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Evaluate if an evaluation is due, unless the run ends immediately."""
        iteration = run.progress.iteration
        exits_now = early_exit is not None and early_exit.is_immediate
        if not run.config.evaluation.is_due(iteration) or exits_now:
            return
        skip, where = evaluation_position(run, iteration - 1), f"iteration {iteration}"
        evaluate_and_report(run, "validation", self._scalars, where=where, skip=skip)


def final_evaluation(run: Run, scalars: Scalars) -> None:
    """Report validation and test loss after the last update, on samples not evaluated before.

    With --skip-train, begin at the first sample of both, as Megatron does.
    """
    skips_training = run.config.training.skip_train
    skip = 0 if skips_training else evaluation_position(run, run.progress.iteration)
    for split, data, skipped in (("validation", "val", skip), ("test", "test", 0)):
        where = f"the end of training for {data} data"
        evaluate_and_report(run, split, scalars, where=where, skip=skipped, at_end_of_training=True)
