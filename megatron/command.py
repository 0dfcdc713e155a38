"""How a command prints and ends: log lines, panels, error messages, interruptions, exit codes."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import NoReturn

from megatron.errors import EXIT_OK, OutputClosedError, UserError, drop_unwritten, say_on_stderr

PanelRow = tuple[str, str]
"""A line of a start-up panel: its name and its value."""


def say(text: str) -> None:
    """Print a line at once, above the progress bar if there is one.

    If standard output cannot be written (its disk is full), the line goes to the error stream, or
    nowhere: a run does not end because of its log.

    Raises:
        OutputClosedError: The reader of standard output has gone.
    """
    try:
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.write(text)
        else:
            sys.stdout.write(text + "\n")  # one write: lines of several ranks do not mix
        sys.stdout.flush()
    except BrokenPipeError as error:
        if not _lost_its_reader():
            raise
        raise OutputClosedError(
            "the program that read this run's log has ended, as `| head` does after its last "
            "line: the run ends too. To keep it running, write the log to a file (> log.txt)"
        ) from error
    except OSError as error:
        drop_unwritten(sys.stdout)
        say_on_stderr(f"(log: {error.strerror}) {text}")


def format_panel(title: str, rows: Iterable[PanelRow]) -> str:
    """Return aligned `name  value` lines between rules."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    body = [f"  {name.ljust(width)}  {value}" for name, value in rows]
    rule = "-" * min(100, max(len(line) for line in [title, *body]))
    return "\n".join([rule, title, rule, *body, rule])


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process in silence, with exit code 130, until a command begins.

    `run_command` and `run_process` take interrupts back. This is for a script that imports torch
    first, which takes seconds: Python would print a traceback, or some import would swallow the
    interruption.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _end)


def take_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that temporary files are removed."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def run_command(work: Callable[[], int | None]) -> int:
    """Do a command's work and return its exit code.

    SIGTERM unwinds like Ctrl-C, so that temporary files are removed, and exits with 143. Call this
    from the main thread.

    Args:
        work: The command. It may return an exit code.

    Returns:
        0, or what `work` returns; a UserError's own code, after its message on stderr; 130 after
        Ctrl-C; 141 if nobody reads stdout any more.
    """
    open_missing_streams()
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        take_interrupts()
        code = work() or EXIT_OK
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _lost_its_reader():
            raise
        return 128 + signal.SIGPIPE
    except UserError as error:
        say_on_stderr(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)


def open_missing_streams() -> None:
    """Open the null device in place of standard streams that were closed at the start.

    Some daemons and `>&-` close them. Python then has `None` there, and the next file that is
    opened would get their numbers, and with them what libraries print.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for good


def _lost_its_reader() -> bool:
    """Return whether stdout's reader has gone (`| head`).

    If so, what is left to be printed is dropped: Python would fail to print it when it ends.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def leave(code: int) -> NoReturn:
    """End the process at once, after a command is done and its files are closed.

    Python would first free every object one by one: 35 ms if a vocabulary is loaded.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
