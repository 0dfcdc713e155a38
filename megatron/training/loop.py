"""The training loop: steps and the callbacks around them, in order."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from megatron.errors import EXIT_OK, EXIT_SAVED_ON_SIGNAL, OutputClosedError
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.callbacks.checkpoints import Checkpoints
from megatron.training.callbacks.data import BadLines, SampleIds
from megatron.training.callbacks.health import HealthCheck
from megatron.training.callbacks.logging import LogLine, ProgressBar
from megatron.training.callbacks.memory import EmptyCache, GarbageCollection
from megatron.training.callbacks.non_persistent import Goodput, NonPersistentCheckpoints
from megatron.training.callbacks.profiling import PipelineBubble, Profile
from megatron.training.callbacks.replica_hashes import QueryKeyNorms, ReplicaHashes
from megatron.training.callbacks.scalars import Scalars
from megatron.training.callbacks.skipped_updates import SkippedUpdates
from megatron.training.callbacks.stragglers import Stragglers
from megatron.training.callbacks.suspicious_updates import ResultDifferences, SuspiciousUpdates
from megatron.training.evaluation import Evaluation
from megatron.training.run import Run
from megatron.training.step import Updates, any_rank, skip_iteration
from megatron.training.writers import Writer


def standard_callbacks(run: Run, writers: Sequence[Writer]) -> tuple[list[Callback], Scalars]:
    """Return the run's callbacks in order, and the callback that records evaluation results.

    The profile comes first, because it must enclose only the step. The policies on suspicious and
    skipped updates follow, so that nothing is logged or saved after a step that ends the run; a
    comparison of the replicas comes before the checkpoint for the same reason. Next are the
    callbacks that belong to an iteration, and the log line that times it. The checkpoint comes
    before the evaluation, so that a failed evaluation does not lose the training before it. The
    time in the log line includes neither.
    """
    config = run.config
    scalars = Scalars(writers)
    callbacks: list[Callback] = []
    if config.profiling.profile and run.layout.world.rank in config.profiling.profile_ranks:
        callbacks.append(Profile())
    checkpoints = Checkpoints(scalars) if config.checkpoint.save else None
    saves_non_persistent = config.checkpoint.non_persistent_save_interval is not None
    non_persistent = NonPersistentCheckpoints(scalars) if saves_non_persistent else None
    if config.reliability.rerun_mode == "validate_results":
        callbacks.append(SuspiciousUpdates(scalars, checkpoints))
    elif config.reliability.rerun_mode == "report_stats":
        callbacks.append(ResultDifferences())
    callbacks += [SkippedUpdates(scalars, checkpoints, non_persistent), Goodput(), scalars]
    if config.training.check_weight_hash_across_dp_replicas_interval:
        callbacks.append(ReplicaHashes())
    if config.training.test_mode and config.model.qk_layernorm:
        callbacks.append(QueryKeyNorms())
    callbacks += _iteration_callbacks(run, scalars)
    callbacks.append(LogLine())
    if run.is_log_rank and sys.stderr.isatty():
        callbacks.append(ProgressBar())
    if run.operation_clock is not None:
        callbacks.append(PipelineBubble(run.operation_clock, scalars))
    if checkpoints is not None:
        callbacks.append(checkpoints)
    if non_persistent is not None:
        callbacks.append(non_persistent)
    if config.evaluation.takes_place:
        callbacks.append(Evaluation(scalars))
    if config.finetuning.sample_prompts is not None:
        from megatron.training.callbacks.samples import SampleAnswers  # few runs need an engine

        callbacks.append(SampleAnswers(run, scalars))
    return callbacks, scalars


def _iteration_callbacks(run: Run, scalars: Scalars) -> list[Callback]:
    """Return the callbacks whose time counts as part of an iteration."""
    config = run.config
    callbacks: list[Callback] = []
    if run.timers.sections is not None:
        callbacks.append(Stragglers(run.timers.sections, scalars))
    if config.data.skip_bad_lines:
        callbacks.append(BadLines())
    if config.data.log_sample_ids:
        callbacks.append(SampleIds())
    if config.reliability.health_check or config.reliability.gpu_sniff_test_interval:
        callbacks.append(HealthCheck())
    if config.training.manual_gc:
        callbacks.append(GarbageCollection())
    if config.training.empty_unused_memory_level:
        callbacks.append(EmptyCache())
    return callbacks


def train(run: Run, callbacks: Sequence[Callback]) -> EarlyExit | None:
    """Train to the end, or until an early exit is requested.

    Returns:
        The reason for an early exit, or `None` if training is complete.
    """
    for callback in callbacks:
        callback.on_start(run)
    try:
        early_exit = _steps(run, callbacks)
    except Exception:
        for callback in callbacks:
            callback.on_failure(run)
        raise
    run.optimizer.wait_for_weights()
    for callback in callbacks:
        callback.on_end(run, early_exit)
    if run.quorum is not None:
        run.quorum.leave()
    return early_exit


def _steps(run: Run, callbacks: Sequence[Callback]) -> EarlyExit | None:
    early_exit = None
    if any_rank([run.exit.is_requested], run)[0]:
        early_exit = _agreed_exit(run)
    updates, exit_interval = Updates(run), run.config.training.exit_interval
    while early_exit is None and not run.finished:
        if run.skips_next:
            skip_iteration(run)
            for callback in callbacks:
                callback.after_skipped(run)
            continue
        is_interrupted = any(callback.interrupts(run) for callback in callbacks)
        for callback in callbacks:
            callback.before_step(run)
        outcome = updates.make(look_ahead=not is_interrupted)
        if outcome.exit_requested:
            early_exit = _agreed_exit(run)
        elif exit_interval and run.progress.iteration % exit_interval == 0:
            early_exit = EarlyExit(f"--exit-interval {exit_interval}")
        for callback in callbacks:
            callback.after_step(run, outcome, early_exit)
    return early_exit


def _agreed_exit(run: Run) -> EarlyExit:
    """Return the reason for the exit, with an exit code that is the same on all ranks. Collective.

    If ranks disagreed, they would not all take part in an evaluation that is due now.
    """
    codes = (EXIT_SAVED_ON_SIGNAL, OutputClosedError.exit_code)
    requested = any_rank([run.exit.code == code for code in codes], run)
    return EarlyExit(run.exit.reason, max([EXIT_OK, *itertools.compress(codes, requested)]))
