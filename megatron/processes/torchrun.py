"""torchrun, except that it exits with the code of the run and leaves time to save on SIGTERM.

    python -m megatron.processes.torchrun --nproc-per-node 8 pretrain_gpt.py ...

This command takes torchrun's flags. With --max-restarts, ranks restart without importing their
modules again (`warm`). torchrun itself exits with 1 after every failure, so a scheduler cannot tell
a run that saved and can continue (exit code 3) from one with a wrong flag (9). On SIGTERM, torchrun
also kills the ranks after 30 seconds, which is too short for a large checkpoint. This command
passes SIGTERM on to the ranks, which save and exit together. They have as much time as the
scheduler allows, and are not restarted, even with --max-restarts.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from megatron.errors import EXIT_SAVED_ON_SIGNAL, CrashLoopError, print_to_stderr
from megatron.processes.launch import SAVED, announce_launcher, prefix_log_lines
from megatron.processes.warm import ranks, start_warm

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_HELP = """usage: python -m megatron.processes.torchrun [flags of torchrun] FILE.py [its flags]

Start processes as torchrun does. Unlike torchrun, exit with the code of the run, and leave the
processes time to save on SIGTERM. `torchrun --help` lists the flags."""
# Signals on which torchrun ends immediately. By default it also does so on SIGTERM.
_SIGNALS = "SIGINT,SIGHUP,SIGQUIT,SIGUSR2"


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments, by default those of the command line.

    Returns:
        0, or the exit code of the first rank that failed, which is 128 plus the signal's number if
        a signal killed it; 3 if the ranks saved on SIGTERM. If a signal other than SIGTERM ended
        this process, the result is 128 plus that signal's number, and the ranks had 30 seconds to
        save. If a rank ended this process with `end_launcher`, the result is the exit code of
        `CrashLoopError`.
    """
    launcher_args = list(sys.argv[1:] if argv is None else argv)
    if launcher_args[:1] in (["-h"], ["--help"]):  # torchrun's own help imports torch
        print(_HELP)
        return 0
    exit_requested = threading.Event()
    signal.signal(signal.SIGTERM, partial(_pass_on, exit_requested))
    prefix_log_lines()
    announce_launcher(signal.SIGUSR2)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    def end_if_requested(signum: int, frame: object) -> None:
        if exit_requested.is_set():
            raise SignalException(f"the run saved, {SAVED.name}", SAVED)

    signal.signal(SAVED, end_if_requested)
    arguments = run.parse_args(["--signals-to-handle", _SIGNALS, *launcher_args])
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
    start_warm(arguments)
    try:
        run.run(arguments)
    except ChildFailedError as error:
        failure = first_failure(error.failures.values())
        if failure.exitcode != EXIT_SAVED_ON_SIGNAL:
            print_to_stderr(str(error))  # the table of all ranks, which torchrun prints too
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:  # the ranks have already reported it
        if error.sigval == signal.SIGUSR2:  # `end_launcher`
            return CrashLoopError.exit_code
        if error.sigval == SAVED:
            return EXIT_SAVED_ON_SIGNAL
        return 128 + error.sigval
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a late signal must not change the exit code
    return 0


def first_failure(failures: Iterable[ProcessFailure]) -> ProcessFailure:
    """Return the failure of the rank that failed on its own.

    torchrun then ends the others with SIGTERM, often within the same second, and its time stamps
    are whole seconds.

    Args:
        failures: The failures of all ranks.
    """
    ended_by_torchrun = (-signal.SIGTERM, EXIT_SAVED_ON_SIGNAL)
    return min(failures, key=lambda one: (one.timestamp, one.exitcode in ended_by_torchrun))


def _without_traceback(record: logging.LogRecord) -> bool:
    """Remove torchrun's own traceback from its log record of a failed rank, and keep the record."""
    record.exc_info = None
    return True


def _pass_on(exit_requested: threading.Event, signum: int, frame: object) -> None:
    """Record a signal and pass it on to the ranks, or exit if no rank has been started."""
    exit_requested.set()
    pids = ranks()
    if not pids:
        sys.exit(128 + signum)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


if __name__ == "__main__":
    sys.exit(main())
