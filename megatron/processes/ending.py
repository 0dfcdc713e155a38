"""Ending a run early, because of an error or on request."""

from __future__ import annotations

import math
import os
import re
import signal
import time
import traceback
from types import FrameType

import torch.distributed as dist

from megatron.errors import (
    EXIT_OK,
    EXIT_SAVED_ON_SIGNAL,
    ConfigError,
    CrashLoopError,
    NumericsError,
    OutputClosedError,
    UserError,
    print_to_stderr,
)
from megatron.parallel.journal import Journal
from megatron.processes.launch import Launch, write_error_file
from megatron.processes.watchdog import CRASHED, GRACE, LOST, Watchdog, ranks_text

_POLL_SECONDS = 1.0  # between checks for the kill switch, which is often on a shared file system
_MAX_INTERRUPTS = 3  # pressing Ctrl-C this many times ends the process immediately


def report(error: Exception, launch: Launch) -> None:
    """Print a `UserError` as its message, and any other exception with its traceback.

    The text is also passed to torchrun, for its final report.
    """
    # These errors are the same on all ranks.
    is_same_on_all_ranks = isinstance(error, ConfigError | NumericsError | CrashLoopError)
    prefix = "" if is_same_on_all_ranks or launch.world_size == 1 else f"[rank {launch.rank}] "
    if isinstance(error, ConfigError):
        text = "\n".join(f"error: {problem}" for problem in error.problems)
    elif isinstance(error, UserError):
        text = f"{prefix}error: {error}"
    else:
        text = f"{prefix}error: this is a bug, not a mistake on your part\n"
        text += "".join(traceback.format_exception(error)).removesuffix("\n")
    print_to_stderr(text)
    write_error_file(text)


def exit_code_of(error: Exception) -> int:
    """Return the exit code of a process that ends with this error."""
    return error.exit_code if isinstance(error, UserError) else CRASHED


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0].removesuffix(":")


def end_run(error: Exception, launch: Launch, journal: Journal, watchdog: Watchdog) -> SystemExit:
    """End the run on all processes because of an error in this one.

    Only the first process to fail prints its error. Errors that other processes raise because that
    process is gone add no information.

    Args:
        error: The error that stopped this process.
        launch: The ranks of this process.
        journal: The record of this process's progress.
        watchdog: The watchdog, which notifies the other processes.

    Returns:
        The exception for this process to raise, with the exit code that all processes share.
    """
    is_user_error = isinstance(error, UserError)
    code = exit_code_of(error)
    _, iteration, operation = journal.position
    # The iteration is 0 before training and in programs that do not train.
    position = f"iteration {iteration}, {operation}" if iteration else str(operation)
    message = first_line(error)
    # Communication fails if another process is gone, which may have announced why.
    blames_peer = not is_user_error and (
        isinstance(error, dist.DistError) or journal.waits_for is not None
    )

    def reason(silent: frozenset[int]) -> str:
        if not blames_peer:
            return message if is_user_error else f"{type(error).__name__} in {position}: {message}"
        cause = f"{ranks_text(silent)} ended without reporting an error"
        # The communication library's message, without its source position and advice.
        summary = re.sub(r"^\[\S*\] ", "", message).split(". ")[0]
        return f"{cause if silent else 'a connection broke'}, in {position} ({summary})"

    verdict, is_own = watchdog.end_run(code, reason, blames_peer=blames_peer)
    if is_own and blames_peer:
        print_to_stderr(f"[rank {launch.rank}] error: {verdict.reason}: {LOST}")
    elif is_own:
        report(error, launch)
    exit_message = watchdog.exit_message(verdict)
    if exit_message is not None:
        print_to_stderr(exit_message)
    watchdog.end_within(GRACE, verdict.code, None)  # the reason has been printed
    watchdog.delay_exit()
    return SystemExit(verdict.code)


class ExitRequest:
    """A request to exit early, because of a signal, a time limit, a file, or closed output.

    The request only sets a flag, which is reduced over all ranks together with the losses of every
    step. If any rank has a request, all ranks exit after the same iteration, with a checkpoint if
    --save is given.

    Args:
        handle_signals: Whether to install handlers for SIGTERM and SIGINT.
        duration_minutes: The time limit in minutes, or `None` for no limit.
        kill_switch: The file whose existence requests an exit, or `None`.
    """

    def __init__(
        self, handle_signals: bool, duration_minutes: int | None, kill_switch: str | None = None
    ) -> None:
        """Start the clock, and install signal handlers if requested."""
        self._signal: str | None = None
        self._interrupts = 0
        self._is_unread = False
        self._minutes = duration_minutes
        self._deadline = time.monotonic() + 60.0 * (duration_minutes or 0)
        self._kill_switch = kill_switch
        self._next_poll = -math.inf
        self._is_switched = False
        self._handles_signals = handle_signals
        for signum in (signal.SIGTERM, signal.SIGINT) if handle_signals else ():
            signal.signal(signum, self._handle)

    def close(self) -> None:
        """Ignore SIGTERM from here on if it was handled, because all ranks have agreed to exit.

        A scheduler's signal reaches some ranks later than others. Python removes handlers while it
        shuts down, so a late signal would kill the process and change its exit code.
        """
        if self._handles_signals:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(signum).name
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts >= _MAX_INTERRUPTS:
                raise KeyboardInterrupt

    def report_unread_log(self) -> None:
        """Request an exit because nobody reads this process's log anymore."""
        self._is_unread = True

    @property
    def code(self) -> int:
        """The exit code if this request must end the run before any further work, otherwise 0."""
        if self._signal is not None:
            return EXIT_SAVED_ON_SIGNAL
        return OutputClosedError.exit_code if self._is_unread else EXIT_OK

    @property
    def is_requested(self) -> bool:
        """Whether this process has been asked to exit. Other processes may not know yet."""
        now = time.monotonic()
        if self._kill_switch is not None and not self._is_switched and now >= self._next_poll:
            self._next_poll = now + _POLL_SECONDS
            self._is_switched = os.path.exists(self._kill_switch)  # False if it cannot be read
        return self.code != EXIT_OK or self._is_late or self._is_switched

    @property
    def _is_late(self) -> bool:
        return self._minutes is not None and time.monotonic() >= self._deadline

    @property
    def reason(self) -> str:
        """The reason for the exit, for the log."""
        if self._signal is not None:
            return f"received {self._signal}"
        if self._is_unread:
            return "nobody is reading this log anymore"
        if self._is_late:
            return f"--exit-duration-in-mins {self._minutes} has elapsed"
        if self._is_switched or (self._kill_switch and os.path.exists(self._kill_switch)):
            return f"--kill-switch-file {self._kill_switch} exists"
        return "another rank asked to exit"
