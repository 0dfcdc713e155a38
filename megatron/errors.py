"""Errors that tell a user what to change, and the exit codes of commands.

Every user mistake is a `UserError`: entry points print its message without a traceback and exit
with its code. Failed assertions and other exceptions are our own bugs.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

EXIT_OK = 0
EXIT_SAVED_ON_SIGNAL = 3


def print_to_stderr(text: str) -> None:
    """Print a line to the error stream immediately, even if output is piped.

    If it cannot be written, for example because the disk that holds the log is full, the line is
    dropped, so that neither the work nor its exit code changes.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        drop_unwritten(sys.stderr)


def drop_unwritten(stream: TextIO) -> None:
    """Drop the buffered output that a stream could not write, for example to a full disk.

    Python would otherwise try to write it again with the next line and at exit.
    """
    descriptor = stream.fileno()
    saved, null = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, descriptor)
        stream.flush()
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)
        os.close(null)


def warn(text: str) -> None:
    """Print a warning that the user may act on while the work continues."""
    print_to_stderr(f"WARNING: {text}")


class UserError(Exception):
    """A problem that the user can fix. It names the flag or file, the value and the remedy."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        """Set the exit code of commands that end with this error; by default, the base class's."""
        if exit_code is not None:
            cls.exit_code = exit_code


class CheckpointError(UserError, exit_code=4):
    """A checkpoint is missing, damaged, or does not fit this run."""


class HangError(UserError, exit_code=5):
    """A rank did not join a collective in time, or the processes could not connect."""


class DataError(UserError, exit_code=6):
    """A corpus, index or tokenizer file is missing, damaged, or does not fit this run."""


class NumericsError(UserError, exit_code=7):
    """The loss or the gradients are unusable, or replicas of the weights differ."""


class SuspiciousResultError(NumericsError, exit_code=16):
    """An update gave unusable values twice.

    Repeating it on a different machine shows whether the data is at fault.
    """


class TransientFaultError(NumericsError, exit_code=17):
    """A machine computed a different result when an update was repeated."""


class StorageError(UserError, exit_code=8):
    """A file or folder cannot be written, for example because the disk is full or read-only."""


class ShortageError(UserError, exit_code=10):
    """The device or the host has less memory, or allows fewer open files, than the run needs."""


# Out-of-memory messages of the operating system, PyTorch, the dynamic linker, Rust and C++.
_SHORTAGE = re.compile(
    "(can't|cannot|unable to|failed to) (allocate|mmap|map)|out of memory|bad_alloc"
    "|not enough memory|can't start new thread",
    re.IGNORECASE,
)
_REMEDY = "Free memory, raise the limit of the process or container, or use a machine with more"


def shortage_of(error: BaseException, remedy: str = _REMEDY) -> UserError | None:
    """Return the error to report if memory or file descriptors ran out, otherwise `None`.

    Memory can run out anywhere, and each library reports it differently. This is the only function
    that recognizes all of their messages.

    Args:
        error: Any exception.
        remedy: A sentence that says what to change if memory ran out.
    """
    if isinstance(error, ShortageError):
        return error
    # Code that wraps every error of a file or library cannot know which ones are about memory.
    cause: BaseException | None = error
    while cause is not None and not _is_shortage(cause):
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if cause is None:
        return None
    if _is_out_of_descriptors(cause):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return ShortageError(f"too many open files: raise the limit (`ulimit -n` is {limit})")
    request = re.search(r"allocate ([\d.]+ \w+)", str(cause))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_limited = limit != resource.RLIM_INFINITY
    return ShortageError(
        "out of memory"
        + (f": cannot allocate {request[1]}" if request else "")
        + (f" (`ulimit -v` gives each process {limit / 1e9:.2f} GB)" if is_limited else "")
        + f". {remedy}"
    )


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, UserError):  # its message may quote a file that mentions memory
        return isinstance(error, ShortageError)
    is_about_memory = isinstance(error, MemoryError) or _SHORTAGE.search(str(error)) is not None
    return is_about_memory or _is_out_of_descriptors(error)


def _is_out_of_descriptors(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


@contextmanager
def shortage_errors(remedy: str) -> Iterator[None]:
    """Turn every error about a lack of memory or file descriptors into one that names a remedy.

    Args:
        remedy: A sentence that says what to change if memory ran out.

    Raises:
        ShortageError: The device or the host ran out of memory, or the process ran out of file
            descriptors.
    """
    try:
        yield
    except Exception as error:
        shortage = shortage_of(error, remedy)
        if shortage is None or shortage is error:
            raise
        raise shortage from error


class CrashLoopError(UserError, exit_code=11):
    """The run failed twice in the same way at the same iteration, so a restart cannot help."""


class OutputClosedError(UserError, exit_code=141):
    """The reader of the log is gone. The exit code is the one that shells report after SIGPIPE."""


class ConfigError(UserError, exit_code=9):
    """One or more configuration mistakes, reported together.

    Attributes:
        problems: The mistakes, one line each.
    """

    def __init__(self, problems: list[str] | str) -> None:
        """Store one mistake or several."""
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))
