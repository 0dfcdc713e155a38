"""The callbacks of a run, in the order in which they run, and why in that order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.models.build import model_plan
from megatron.training.callbacks.base import Callback
from megatron.training.callbacks.bubble import PipelineBubble
from megatron.training.callbacks.checkpoints import Checkpoints
from megatron.training.callbacks.garbage import EmptyCache, GarbageCollection
from megatron.training.callbacks.logging import LogLine
from megatron.training.callbacks.nonfinite import NonFinitePolicy
from megatron.training.callbacks.profiling import Profile
from megatron.training.callbacks.progress_bar import ProgressBar
from megatron.training.callbacks.sample_ids import SampleIds
from megatron.training.callbacks.scalars import Scalars
from megatron.training.evaluation import Evaluation, EvaluationListener
from megatron.training.panel import model_flops
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
    plan = model_plan(config.model, run.padded_vocab_size, run.recipe.head)
    flops = model_flops(config, plan)
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
