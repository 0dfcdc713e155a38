"""What a process prints and tells the others when it fails."""

from __future__ import annotations

import re
import traceback

import torch.distributed as dist

from megatron.environment import Launch
from megatron.errors import ConfigError, NumericsError, UserError, say_on_stderr
from megatron.parallel.journal import Journal
from megatron.training.hang import ranks_text
from megatron.training.watchdog import BEAT, Watchdog

_CRASHED = 1  # as Python's own exit code after an exception


class RunEndedError(Exception):
    """The run has ended, everything is said: the process has but to leave with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def report(error: Exception, launch: Launch) -> None:
    """Print a user's mistake as what to mend, another exception as a traceback."""
    alike = isinstance(error, ConfigError | NumericsError)  # on all ranks
    where = "" if alike or launch.world_size == 1 else f"[rank {launch.rank}] "
    if isinstance(error, ConfigError):
        text = "\n".join(f"error: {problem}" for problem in error.problems)
    elif isinstance(error, UserError):
        text = f"{where}error: {error}"
    else:
        text = f"{where}error: this is a bug, not a mistake of yours\n"
        text += "".join(traceback.format_exception(error)).removesuffix("\n")
    say_on_stderr(text)


def end_run(
    error: Exception, launch: Launch, journal: Journal, watchdog: Watchdog
) -> RunEndedError:
    """End the run of all processes because of an error in this one.

    One process prints its error: the first that fails. What others raise afterwards, because it
    went away, says nothing new.
    """
    code = error.exit_code if isinstance(error, UserError) else _CRASHED
    place = journal.place
    where = str(place.operation)
    if place.iteration:  # none before training, and where nothing is trained
        where = f"iteration {place.iteration}, {where}"
    if not _may_follow_from_another(error, journal):
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if not isinstance(error, UserError):
            reason = f"{type(error).__name__} in {where}: {reason}"
        verdict = watchdog.end_run(code, reason)
        if verdict.rank == launch.rank:
            report(error, launch)
    elif (known := watchdog.verdict_within(3 * BEAT)) is not None:
        verdict = known
    else:
        gone = watchdog.missing()
        who = ranks_text(gone) + " went away without a word" if gone else "a connection broke"
        reason = f"{who}, in {where} ({_said(error)})"
        verdict = watchdog.end_run(code, reason)
        if verdict.rank == launch.rank:
            say_on_stderr(
                f"[rank {launch.rank}] error: {reason}: killed, out of memory, or its machine "
                "is gone? The launcher's report and the system's log say more"
            )
    farewell = watchdog.farewell(verdict)
    if farewell is not None:
        say_on_stderr(farewell)
    watchdog.let_others_hear()
    return RunEndedError(verdict.code)


def _said(error: Exception) -> str:
    """What a communication library says, without where in its source and without advice."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S*\] ", "", text).split(". ")[0]


def _may_follow_from_another(error: Exception, journal: Journal) -> bool:
    """It came out of a communication, which fails when the other end goes away."""
    return not isinstance(error, UserError) and (
        isinstance(error, dist.DistError) or journal.waits_for is not None
    )
