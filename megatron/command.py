"""What a command prints, and how it ends: lines of its log, errors that tell the user what to mend,
interruptions, exit codes."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from megatron.errors import EXIT_OK, OutputClosedError, UserError, drop_unwritten, say_on_stderr


def say(text: str) -> None:
    """Print a line at once, above the progress bar if one is drawn.

    Where standard output cannot be written (its disk is full), the line goes to the error stream,
    or nowhere: a run does not end for its log.

    Raises:
        OutputClosedError: what read standard output has gone.
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


def end_on_interrupt() -> None:
    """From now on Ctrl-C ends the process in silence, with exit code 130, until `run_command` or
    `run_process` takes it. For a script that imports torch before, which takes seconds: Python
    would show where it was, or some import would swallow the interruption."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _end)


def take_interrupts() -> None:
    """Have Ctrl-C raise KeyboardInterrupt after all, so that temporary files go."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def run_command(work: Callable[[], int | None]) -> int:
    """Do a command's work; its exit code.

    0, or what `work` returns; a UserError's own code, after its message on stderr; 130 after
    Ctrl-C; 141 where nobody reads stdout any more. SIGTERM unwinds like Ctrl-C, so that temporary
    files go, and exits with 143. Call it from the main thread.
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
    """Give a process that was started with closed streams (`>&-`, some daemons) the null device in
    their place: Python has None there, and the next file that is opened would get their numbers,
    and with them what libraries print."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for good


def _lost_its_reader() -> bool:
    """Whether stdout's reader has gone (`| head`). What is left to be said is forgotten then, or
    Python would fail to say it once more when it ends."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def leave(code: int) -> NoReturn:
    """End the process at once, after a command is done and its files are closed.

    Python would first free every object one by one: 35 ms where a vocabulary is loaded.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
