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
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.callbacks.checkpoints import Checkpoints
from megatron.training.callbacks.scalars import Scalars
from megatron.training.rerun import Rerun
from megatron.training.run import Run
from megatron.training.step import StepOutcome

FILE = "suspicious_iteration.json"  # in --save
_MAX_BYTES = 2**16
_LEAST = 1e-30  # the smallest divisor, so that nothing is divided by 0


@dataclass(frozen=True)
class _Suspicion:
    """An iteration that gave the same values twice, and must be computed on other machines.

    Attributes:
        iteration: The iteration, from 1.
        hosts: The machines on which it was computed.
        told: A description of its values.
    """

    iteration: int
    hosts: list[str]
    told: str


class SuspiciousUpdates(Callback):
    """A callback that acts on the result of a second computation, as Megatron Core does.

    If the values differ, a machine made a transient error. The run saves the state before the
    update and exits with code 17. If they are the same, the cause is the data, or a machine that is
    always wrong. Unless the flags skip the update anyway, the run then saves and exits with code
    16, so that other machines can compute the update. Their result shows the cause.
    """

    def __init__(self, scalars: Scalars, checkpoints: Checkpoints | None) -> None:
        """Store the callbacks that record events and that save, if any."""
        self._scalars, self._checkpoints = scalars, checkpoints
        self._suspicion: _Suspicion | None = None

    def on_start(self, run: Run) -> None:
        """Read the suspicion that an earlier start of the run left unresolved. Collective."""
        if run.config.checkpoint.save is None:
            return
        path = Path(run.config.checkpoint.save) / FILE
        found = JsonExchange(run.layout.world).on_main(lambda: _read(path))
        self._suspicion = None if found is None else _Suspicion(**found)

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        """Report a second computation, and end the run if its result requires that.

        Raises:
            TransientFaultError: A machine made an error.
            SuspiciousResultError: Other machines must compute the update to show whether a machine
                or the data is at fault.
        """
        rerun, at = outcome.rerun, run.progress.iteration
        before = self._suspicion
        known = before if before is not None and before.iteration == at else None
        if known is not None:
            self._forget(run)
        if rerun is None:
            if known is not None:
                self._tell(
                    run,
                    f"iteration {at} gave {known.told} on {', '.join(known.hosts)}, and is no "
                    "longer suspicious: one of these machines computes wrong results",
                )
            return
        if not rerun.is_same:
            self._end_after_error(run, rerun)
        told = f"iteration {at}: computed again, it gives {_words(rerun.second)} as before"
        flags = run.config.training
        keeps_all = not flags.check_for_nan_in_loss_and_grad
        goes_on = outcome.found_spike or flags.on_nonfinite == "skip" or keeps_all
        if known is not None and not set(known.hosts) & set(rerun.hosts):
            self._tell(run, f"{told}, on other machines too: the data is at fault")
        elif known is not None:
            self._tell(run, f"{told}, but on the same machines: the data or a machine is at fault")
        elif goes_on or run.config.checkpoint.save is None:
            self._tell(run, f"{told}: the data or a machine is at fault")
        else:
            self._leave_to_others(run, rerun, told)

    def _end_after_error(self, run: Run, rerun: Rerun) -> None:
        at = run.progress.iteration
        who = f"{'one of ' * (len(rerun.ranks) > 1)}{ranks_text(rerun.ranks)}"
        where = f"{who} (on {', '.join(rerun.hosts)})"
        if not rerun.ranks:
            where = f"the communication between {', '.join(rerun.hosts)}"
        told = (
            f"iteration {at}: {_words(rerun.first)}, but {_words(rerun.second)} when it was "
            f"computed again from the same samples and weights: a transient error of {where}"
        )
        self._tell(run, told)
        rerun.undo()
        saved = self._save(run)
        raise TransientFaultError(
            f"{told}. The parameters are unchanged{saved}; test or replace the machine (megatron "
            "health), and start again"
        )

    def _leave_to_others(self, run: Run, rerun: Rerun, told: str) -> None:
        suspicion = _Suspicion(run.progress.iteration, rerun.hosts, _words(rerun.second))
        self._tell(run, told)
        if run.layout.world.is_first:
            path = Path(str(run.config.checkpoint.save)) / FILE
            with writing_to("--save", path.parent):
                replace_file(path, json.dumps(asdict(suspicion)).encode() + b"\n")
        rerun.undo()
        saved = self._save(run)
        raise SuspiciousResultError(
            f"{told}: the data or a machine is at fault. The parameters are unchanged{saved}. "
            "Start again, on other machines if possible: the run computes the iteration once more "
            "and says which. --on-nonfinite skip skips such updates instead"
        )

    def _save(self, run: Run) -> str:
        """Save unless that is already done, and return a clause for the message. Collective."""
        at = run.progress.iteration
        if self._checkpoints is None or at == 0:
            return ""
        newest = self._checkpoints.newest(run)
        if newest is None or newest[1] != at:
            checkpointing.save_run(run)
        return f", and the checkpoint of iteration {at} is saved"

    def _forget(self, run: Run) -> None:
        self._suspicion = None
        if run.layout.world.is_first:
            with suppress(OSError):
                (Path(str(run.config.checkpoint.save)) / FILE).unlink()

    def _tell(self, run: Run, text: str) -> None:
        self._scalars.event(run, "rerun", text)
        if run.is_log_rank:
            print_line(f"WARNING: {text}")


class ResultDifferences(Callback):
    """A callback that reports how much two computations of each update differ (report_stats)."""

    def __init__(self) -> None:
        """Create the callback, with no differences recorded yet."""
        self._found: list[float] = []

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        """Record the largest relative difference, and print a line at each log interval."""
        assert outcome.rerun is not None
        self._found.append(largest_difference(outcome.rerun))
        if run.progress.iteration % run.config.logging.log_interval:
            return
        if run.is_log_rank:
            print_line(
                f" computed twice | updates: {len(self._found)} | with different losses: "
                f"{sum(one > 0 for one in self._found)} | largest relative difference: "
                f"{max(self._found):.3g} |"
            )
        self._found = []


def largest_difference(rerun: Rerun) -> float:
    """Return the largest relative difference of a loss; infinite if one is not finite."""
    if rerun.is_same:
        return 0.0
    pairs = [(rerun.first[name], second) for name, second in rerun.second.items()]
    if not all(math.isfinite(one) for pair in pairs for one in pair):
        return math.inf
    return max(abs(a - b) / max(abs(a), abs(b), _LEAST) for a, b in pairs)


def _words(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())


def _read(path: Path) -> dict[str, object] | None:
    """Return the contents of the file, or `None` if it is missing or not in our format."""
    try:
        with open_trusted(path) as file:
            held = json.loads(file.read(_MAX_BYTES))
        return asdict(_Suspicion(int(held["iteration"]), list(held["hosts"]), str(held["told"])))
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
