"""Errors that tell a user what to change, and the exit codes of commands.

Every user mistake is a `UserError`: entry points print its message without a traceback and exit
with its code. Failed assertions and other exceptions are our own bugs.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

EXIT_OK = 0
EXIT_SAVED_ON_SIGNAL = 3


def say_on_stderr(text: str) -> None:
    """Print a line on the error stream at once, even if output is piped.

    If the disk of the log is full, the line is dropped, so that neither the work nor its exit code
    changes.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        drop_unwritten(sys.stderr)


def drop_unwritten(stream: TextIO) -> None:
    """Drop the buffered output that a stream could not write, for example to a full disk.

    Python would otherwise try to write it again with the next line and at exit.
    """
    number = stream.fileno()
    kept, null = os.dup(number), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, number)
        stream.flush()
    finally:
        os.dup2(kept, number)
        os.close(kept)
        os.close(null)


def warn(text: str) -> None:
    """Print a warning that the user may act on while the work continues."""
    say_on_stderr(f"WARNING: {text}")


class UserError(Exception):
    """A problem that the user can fix. The message names flag or file, value and remedy."""

    exit_code = 1


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or does not fit this run."""

    exit_code = 4


class HangError(UserError):
    """A rank did not join a collective in time."""

    exit_code = 5


class DataError(UserError):
    """A corpus, index or tokenizer file is missing, damaged, or does not fit this run."""

    exit_code = 6


class NumericsError(UserError):
    """Loss or gradients stopped being finite."""

    exit_code = 7


class StorageError(UserError):
    """A disk is full, read-only or missing."""

    exit_code = 8


class ShortageError(UserError):
    """The device, or the host, has less memory than the run needs."""

    exit_code = 10


class OutputClosedError(UserError):
    """The reader of the log has gone."""

    exit_code = 141  # the shell's code for a program that SIGPIPE ended


class ConfigError(UserError):
    """One or more configuration mistakes, all of them reported at once.

    Attributes:
        problems: The mistakes, one line each.
    """

    exit_code = 9

    def __init__(self, problems: list[str] | str) -> None:
        """Store one mistake or several."""
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))
