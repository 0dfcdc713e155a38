"""Leaving early and together: signals and time limits become one request that all ranks see.

A handler only sets a flag. The flag travels with the losses that every step reduces anyway, so
all ranks leave after the same iteration, with a checkpoint.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

_PATIENCE = 3  # Ctrl-C this often ends the process at once


class ExitRequest:
    """Whether this process was asked to leave, and why.

    Args:
        handle_signals: install handlers for SIGTERM and SIGINT.
        duration_minutes: leave after so many minutes; None: no limit.
    """

    def __init__(self, *, handle_signals: bool, duration_minutes: int | None) -> None:
        self._signal: str | None = None
        self._interrupts = 0
        self._deadline = (
            None if duration_minutes is None else time.monotonic() + 60.0 * duration_minutes
        )
        self._duration_minutes = duration_minutes
        if handle_signals:
            signal.signal(signal.SIGTERM, self._handle)
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts >= _PATIENCE:
                raise KeyboardInterrupt

    @property
    def by_signal(self) -> bool:
        return self._signal is not None

    @property
    def wanted(self) -> bool:
        """This process wants to leave. Other processes may not know yet."""
        return self.by_signal or self._late

    @property
    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def reason(self) -> str:
        """For the log."""
        if self._signal is not None:
            return f"received {self._signal}"
        if self._late:
            return f"--exit-duration-in-mins {self._duration_minutes} is over"
        return "another rank asked to leave"
