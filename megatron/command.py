"""How a command line ends: errors that tell the user what to mend, interruptions, exit codes."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from megatron.errors import EXIT_OK, UserError


def run_command(work: Callable[[], int | None]) -> int:
    """Do a command's work; its exit code.

    0, or what `work` returns; a UserError's own code, after its message on stderr; 130 after
    Ctrl-C; 141 where nobody reads stdout any more. SIGTERM unwinds like Ctrl-C, so that temporary
    files go, and exits with 143. Call it from the main thread.
    """
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = work() or EXIT_OK
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not lost_its_reader():
            raise
        return 128 + signal.SIGPIPE
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)


def lost_its_reader() -> bool:
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
