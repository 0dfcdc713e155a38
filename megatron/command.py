"""The output and exit of commands: log lines, panels, error messages, interrupts, exit codes."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from megatron.errors import EXIT_OK, OutputClosedError, UserError, drop_unwritten, say_on_stderr

PanelRow = tuple[str, str]  # a line of a start-up panel: its name and its value


def say(text: str) -> None:
    """Print a line at once, above the progress bar if there is one.

    If standard output cannot be written (full disk), the line goes to the error stream. If that
    fails too, the line is dropped, because a run must not end because of its log.

    Raises:
        OutputClosedError: The reader of standard output has gone.
    """
    try:
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.write(text)
        else:
            sys.stdout.write(text + "\n")  # one write keeps the lines of several ranks apart
        sys.stdout.flush()
    except BrokenPipeError as error:
        if not _lost_its_reader():
            raise
        raise OutputClosedError(
            "the program that read this run's log has ended, as `| head` does after its last "
            "line, so the run ends too: to keep it running, write the log to a file (> log.txt)"
        ) from error
    except OSError as error:
        drop_unwritten(sys.stdout)
        say_on_stderr(f"(log: {error.strerror}) {text}")


def format_panel(title: str, rows: Sequence[PanelRow]) -> str:
    """Return aligned `name  value` lines between rules."""
    width = max(len(name) for name, _ in rows)
    body = [f"  {name.ljust(width)}  {value}" for name, value in rows]
    rule = "-" * min(100, max(map(len, [title, *body])))
    return "\n".join([rule, title, rule, *body, rule])


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process silently, with exit code 130, until a command begins.

    `run_command` and `run_process` restore the normal handling. Scripts call this before they
    import torch. The import takes seconds, during which Python would print a traceback, or some
    import would swallow the interrupt.
    """
    # Otherwise SIGINT is ignored or handled already.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def take_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that temporary files are removed."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: object) -> NoReturn:
    os._exit(128 + number)


def run_command(work: Callable[[], int | None]) -> int:
    """Run a command and return its exit code.

    SIGTERM unwinds the stack like Ctrl-C, so that temporary files are removed, and exits with 143.
    Call this from the main thread.

    Args:
        work: The command, a function that may return an exit code.

    Returns:
        The code that `work` returns, 0 by default; the code of a UserError, after printing its
        message on stderr; 130 after Ctrl-C; 141 if the reader of stdout has gone.
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

    Some daemons and `>&-` close them. Python then sets them to `None`, and the next file to be
    opened would get their descriptors and receive the output of libraries.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - stays open


def _lost_its_reader() -> bool:
    """Return whether stdout's reader has gone (`| head`).

    If so, the remaining output is dropped, because Python would fail to print it at exit.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def leave(code: int) -> NoReturn:
    """End the process at once, after a command is done and its files are closed.

    Python would first free every object one by one, which takes 35 ms with a vocabulary loaded.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
