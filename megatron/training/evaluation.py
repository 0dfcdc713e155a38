"""Evaluation: the losses on held-out samples."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.command import print_line
from megatron.data.blend import JoinedDataset
from megatron.data.loader import FilledDataset
from megatron.data.sample import ControlledDataset, SampleDataset
from megatron.errors import EXIT_OK
from megatron.training.batches import BatchPlan, batches_from, evaluation_position
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.callbacks.scalars import Scalars
from megatron.training.log_line import validation_lines
from megatron.training.passes import Passes
from megatron.training.recipe import Batch
from megatron.training.run import Run
from megatron.training.step import StepOutcome, reduce_losses


def evaluate(run: Run, dataset: SampleDataset, *, skip: int) -> dict[str, float] | None:
    """Compute mean losses over `--eval-iters` global batches. Collective.

    The model stays in evaluation mode until the next update. With --calculate-per-token-loss, the
    mean is over all labels in the loss mask.

    Args:
        run: The run whose model is evaluated.
        dataset: Held-out samples.
        skip: The number of samples to skip first.

    Returns:
        Losses by name, or `None` if a rank was asked to exit immediately during the evaluation.
    """
    plan = BatchPlan.for_evaluation(run.config, run.layout.data.size)
    batches = batches_from(run, dataset, consumed=skip, micro_batch=plan.micro_batch)
    count = run.config.evaluation.eval_iters * plan.micro_batches_at(0)
    return _mean_losses(run, batches, count, plan)


def evaluate_all(run: Run, dataset: SampleDataset) -> dict[str, float] | None:
    """Compute mean losses over every sample of a dataset, for --full-validation. Collective.

    The mean is over all labels in the loss mask, as in Megatron Core.

    Args:
        run: The run whose model is evaluated.
        dataset: Held-out samples.

    Returns:
        Losses by name, or `None` if a rank was asked to exit immediately during the evaluation.
    """
    plan = BatchPlan.for_evaluation(run.config, run.layout.data.size)
    filled = FilledDataset(dataset, plan.samples_per_pass)
    batches = batches_from(run, filled, consumed=0, micro_batch=plan.micro_batch, order="single")
    count = len(filled) // plan.samples_per_pass
    return _mean_losses(run, batches, count, plan, counts_labels=True)


def _mean_losses(
    run: Run,
    batches: Iterator[Batch],
    count: int,
    plan: BatchPlan,
    *,
    counts_labels: bool = False,
) -> dict[str, float] | None:
    """Return the mean losses of `count` micro-batches of each process. Collective."""
    per_batch = plan.micro_batches_at(0)
    totals: dict[str, float] = {}
    weights = 0.0
    for part in run.parts:
        part.eval()
    for first in range(0, count, per_batch):
        size = min(per_batch, count - first)
        passes = Passes(
            run, batches, size, micro_batch=plan.micro_batch, counts_labels=counts_labels
        )
        passes.forward()
        losses, weight, (exit_requested,) = reduce_losses(passes, [run.exit.code != EXIT_OK], run)
        if exit_requested:
            return None
        weight *= size / per_batch  # the last batch may be smaller
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
    """Evaluate a split, print Megatron's lines and write the scalars. Collective.

    Nothing happens if the split is empty or the flags ask for no evaluation of it. If a rank is
    asked to exit immediately, the evaluation ends without further lines or scalars. With
    --multiple-validation-sets, each validation set has its own lines and scalars.

    Args:
        run: The run whose model is evaluated.
        split: "validation" or "test".
        scalars: The callback that writes the results.
        where: The point in the run, for the printed lines.
        skip: The number of samples to skip first.
        at_end_of_training: Whether this is the evaluation after the last update.
    """
    dataset = run.datasets.valid if split == "validation" else run.datasets.test
    options = run.config.evaluation
    uses_all = split == "validation" and options.full_validation
    if dataset is None or not (uses_all or options.eval_iters):
        return
    sets = {split: dataset}
    if uses_all and options.multiple_validation_sets and isinstance(dataset, JoinedDataset):
        names = options.validation_set_names or range(len(dataset.datasets))
        suffixed = [f"{split}-{name}" for name in names]
        sets = dict(zip(suffixed, dataset.datasets, strict=True))
    for name, held_out in sets.items():
        with run.timers.measure("eval-time", level=0):
            reported = _reported_losses(run, held_out, skip=None if uses_all else skip)
        if reported is None:
            return
        if run.is_log_rank:
            # Megatron names the test only in `where`.
            title = "validation" if name == "test" else name
            has_perplexity = run.recipe.head.has_perplexity
            print_line(validation_lines(where, reported, has_perplexity=has_perplexity, name=title))
        scalars.after_evaluation(run, name, reported, at_end_of_training=at_end_of_training)
    if run.config.training.empty_unused_memory_level == 2:
        run.device.empty_cache()


def _reported_losses(
    run: Run, dataset: SampleDataset, *, skip: int | None
) -> dict[str, float] | None:
    """Return the losses on a dataset and its controls, and those of averaged weights, by log name.

    Args:
        run: The run whose model is evaluated.
        dataset: Held-out samples.
        skip: The number of samples to skip first. `None` evaluates all samples.

    Returns:
        The losses, or `None` if a rank was asked to exit immediately.
    """

    def losses_on(samples: SampleDataset) -> dict[str, float] | None:
        return evaluate_all(run, samples) if skip is None else evaluate(run, samples, skip=skip)

    reported: dict[str, float] = {}
    controls = dataset.controls if isinstance(dataset, ControlledDataset) else {}
    for control, samples in {"": dataset, **controls}.items():
        losses = losses_on(samples)
        if losses is None:
            return None
        reported |= {f"{name} {control}".rstrip(): value for name, value in losses.items()}
    average = run.optimizer.average
    if run.config.evaluation.eval_averaged_weights and average is not None and average.count:
        run.layers.forget_weights()
        with run.amax_history.unrecorded(), run.optimizer.averaged_weights():
            losses = losses_on(dataset)
        run.layers.forget_weights()
        if losses is None:
            return None
        reported |= {f"{name} of averaged weights": value for name, value in losses.items()}
    return reported


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

    With --skip-train, begin at the first sample of both, as Megatron does. With --full-validation,
    use all validation samples.
    """
    skips_training = run.config.training.skip_train
    skip = 0 if skips_training else evaluation_position(run, run.progress.iteration)
    for split, data, skipped in (("validation", "val", skip), ("test", "test", 0)):
        where = f"the end of training for {data} data"
        evaluate_and_report(run, split, scalars, where=where, skip=skipped, at_end_of_training=True)
