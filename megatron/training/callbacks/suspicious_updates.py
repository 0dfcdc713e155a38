"""The policy for suspicious updates that were computed twice (`--rerun-mode`)."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.checkpoint.exchange import JsonExchange
from megatron.command import print_line
from megatron.durable import open_trusted, replace_file, writing_to
from megatron.errors import SuspiciousResultError, TransientFaultError
from megatron.processes.watchdog import ranks_text
from megatron.training import checkpointing
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.callbacks.checkpoints import Checkpoints
from megatron.training.callbacks.scalars import Scalars
from megatron.training.rerun import Rerun
from megatron.training.run import Run
from megatron.training.step import StepOutcome

FILE = "suspicious_iteration.json"  # in --save
_MAX_BYTES = 2**16
_MIN_DIVISOR = 1e-30  # the smallest divisor, so that nothing is divided by 0


@dataclass(frozen=True)
class _Suspicion:
    """An iteration that gave the same values twice, and must be computed on other machines.

    Attributes:
        iteration: The iteration, counted from 1.
        hosts: The machines that computed the iteration.
        values: The losses and the gradient norm, as text.
    """

    iteration: int
    hosts: list[str]
    values: str


class SuspiciousUpdates(Callback):
    """A callback that acts on the result of a second computation, as Megatron Core does.

    If the two results differ, there was a transient fault. The run saves the state before the
    update, if --save is given, and exits with code 17. If the results are the same, the cause is
    the data, or a machine that makes the same error every time. Unless the flags skip the update
    anyway, a run with --save then saves and exits with code 16, so that other machines can compute
    the update. Their result shows the cause.
    """

    def __init__(self, scalars: Scalars, checkpoints: Checkpoints | None) -> None:
        """Store the callbacks that record events and that save, if any."""
        self._scalars, self._checkpoints = scalars, checkpoints
        self._suspicion: _Suspicion | None = None

    def on_start(self, run: Run) -> None:
        """Read the unresolved suspicion of an earlier start of the run, if any. Collective."""
        if run.config.checkpoint.save is None:
            return
        path = Path(run.config.checkpoint.save) / FILE
        suspicion = JsonExchange(run.layout.world).on_main(lambda: _read(path))
        self._suspicion = None if suspicion is None else _Suspicion(**suspicion)

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Report the second computation, if any, and end the run if its result requires that.

        Raises:
            TransientFaultError: The two results differ.
            SuspiciousResultError: Other machines must compute the update to show whether a machine
                or the data is at fault.
        """
        rerun, iteration = outcome.rerun, run.progress.iteration
        suspicion = self._suspicion
        pending = suspicion if suspicion is not None and suspicion.iteration == iteration else None
        if pending is not None:
            self._suspicion = None
            if run.layout.world.is_first:
                with suppress(OSError):
                    (Path(str(run.config.checkpoint.save)) / FILE).unlink()
        if rerun is None:
            if pending is not None:
                self._report(
                    run,
                    f"iteration {iteration} gave {pending.values} on {', '.join(pending.hosts)}, "
                    "and is no longer suspicious: one of these machines computes wrong results",
                )
            return
        if not rerun.is_same:
            self._end_after_error(run, rerun)
        losses = _losses_text(rerun.second)
        message = f"iteration {iteration}: the second computation also gives {losses}"
        flags = run.config.training
        keeps_all = not flags.check_for_nan_in_loss_and_grad
        continues = outcome.found_spike or flags.on_nonfinite == "skip" or keeps_all
        if pending is not None and not set(pending.hosts) & set(rerun.hosts):
            self._report(run, f"{message} on other machines: the data is at fault")
        elif pending is not None:
            self._report(
                run, f"{message}, but on the same machines: the data or a machine is at fault"
            )
        elif continues or run.config.checkpoint.save is None:
            self._report(run, f"{message}: the data or a machine is at fault")
        else:
            self._exit_for_other_machines(run, rerun, message)

    def _end_after_error(self, run: Run, rerun: Rerun) -> None:
        iteration = run.progress.iteration
        ranks_description = f"{'one of ' * (len(rerun.ranks) > 1)}{ranks_text(rerun.ranks)}"
        source = f"{ranks_description} (on {', '.join(rerun.hosts)})"
        if not rerun.ranks:
            source = f"the communication between {', '.join(rerun.hosts)}"
        message = (
            f"iteration {iteration}: {_losses_text(rerun.first)}, but "
            f"{_losses_text(rerun.second)} when it was computed again from the same "
            f"samples and weights: a transient error of {source}"
        )
        self._report(run, message)
        rerun.undo()
        saved = self._save(run)
        raise TransientFaultError(
            f"{message}. The parameters are unchanged{saved}; test or replace the machine "
            "(megatron health), and start again"
        )

    def _exit_for_other_machines(self, run: Run, rerun: Rerun, message: str) -> None:
        suspicion = _Suspicion(run.progress.iteration, rerun.hosts, _losses_text(rerun.second))
        self._report(run, message)
        if run.layout.world.is_first:
            path = Path(str(run.config.checkpoint.save)) / FILE
            with writing_to("--save", path.parent):
                replace_file(path, json.dumps(asdict(suspicion)).encode() + b"\n")
        rerun.undo()
        saved = self._save(run)
        raise SuspiciousResultError(
            f"{message}: the data or a machine is at fault. The parameters are unchanged{saved}. "
            "Start again, on other machines if possible: the run computes the iteration once more "
            "and reports which of the two it was. --on-nonfinite skip skips such updates instead"
        )

    def _save(self, run: Run) -> str:
        """Save unless this iteration is saved, and return a clause for the message. Collective."""
        iteration = run.progress.iteration
        if self._checkpoints is None or iteration == 0:
            return ""
        newest = self._checkpoints.newest(run)
        if newest is None or newest[1] != iteration:
            checkpointing.save_run(run)
        return f", and the checkpoint of iteration {iteration} is saved"

    def _report(self, run: Run, text: str) -> None:
        self._scalars.event(run, "rerun", text)
        if run.is_log_rank:
            print_line(f"WARNING: {text}")


class ResultDifferences(Callback):
    """A callback that reports how much two computations of each update differ.

    It is used with --rerun-mode report_stats.
    """

    def __init__(self) -> None:
        """Create the callback, with no differences recorded yet."""
        self._differences: list[float] = []

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Record the largest relative difference, and print a line at each log interval."""
        assert outcome.rerun is not None
        self._differences.append(largest_difference(outcome.rerun))
        if run.progress.iteration % run.config.logging.log_interval:
            return
        if run.is_log_rank:
            print_line(
                f" computed twice | updates: {len(self._differences)} | with different losses: "
                f"{sum(difference > 0 for difference in self._differences)} | largest relative "
                f"difference: {max(self._differences):.3g} |"
            )
        self._differences = []


def largest_difference(rerun: Rerun) -> float:
    """Return the largest relative difference of a loss.

    The result is 0 if the two computations agree. Otherwise it is infinite if a loss is not finite.
    """
    if rerun.is_same:
        return 0.0
    pairs = [(rerun.first[name], second) for name, second in rerun.second.items()]
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.inf
    return max(abs(a - b) / max(abs(a), abs(b), _MIN_DIVISOR) for a, b in pairs)


def _losses_text(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())


def _read(path: Path) -> dict[str, object] | None:
    """Return the contents of the file, or `None` if it is missing or not in our format."""
    try:
        with open_trusted(path) as file:
            content = json.loads(file.read(_MAX_BYTES))
        values = content["values"] if "values" in content else content["told"]  # an older key
        return asdict(_Suspicion(int(content["iteration"]), list(content["hosts"]), str(values)))
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
