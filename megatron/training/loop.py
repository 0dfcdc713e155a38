"""The training loop: steps, and callbacks around them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.training.callbacks.base import Callback, Leave
from megatron.training.run import Run
from megatron.training.step import StepOutcome, Updates, any_rank, leave_out


def train(run: Run, callbacks: Sequence[Callback]) -> Leave | None:
    """Train until done, or until somebody asks to leave; None when done.

    Callbacks run in the order given (`callbacks.standard` says why in that order).
    """
    for callback in callbacks:
        callback.on_start(run)
    try:
        leave = _steps(run, callbacks)
    except Exception:
        for callback in callbacks:
            callback.on_failure(run)
        raise
    run.optimizer.wait_for_weights()
    for callback in callbacks:
        callback.on_end(run, leave)
    return leave


def _steps(run: Run, callbacks: Sequence[Callback]) -> Leave | None:
    leave = None
    if any_rank(run.exit.wanted, run):
        leave = Leave(run.exit.reason, run.exit.by_signal)
    updates = Updates(run)
    while leave is None and not run.finished:
        if run.leaves_out_next:
            leave_out(run)
            for callback in callbacks:
                callback.after_left_out(run)
            continue
        is_interrupted = any(callback.interrupts(run) for callback in callbacks)
        for callback in callbacks:
            callback.before_step(run)
        outcome = updates.make(look_ahead=not is_interrupted)
        leave = _leave_after(run, outcome)
        for callback in callbacks:
            callback.after_step(run, outcome, leave)
    return leave


def _leave_after(run: Run, outcome: StepOutcome) -> Leave | None:
    if outcome.exit_wanted:
        return Leave(run.exit.reason, run.exit.by_signal)
    interval = run.config.training.exit_interval
    if interval and run.progress.iteration % interval == 0:
        return Leave(f"--exit-interval {interval}")
    return None
