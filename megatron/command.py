"""Command output and exit handling: log lines, panels, errors, interrupts, exit codes."""

from __future__ import annotations

import atexit
import io
import mmap
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from megatron.errors import (
    EXIT_OK,
    OutputClosedError,
    ShortageError,
    UserError,
    drop_unwritten,
    print_to_stderr,
    shortage_of,
    warn,
)

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.config.arguments import ToolParser

PanelRow = tuple[str, str]  # a row of a start-up panel: name and value
_MIN_FREE_BYTES = 16 << 20  # bytes of address space that a rehearsal must leave free
_rehearsal: list[mmap.mmap] = []  # memory reserved by a rehearsing process; empty in others
_on_output_closed: list[Callable[[], object]] = []  # the callbacks of `surviving_closed_output`


def print_line(text: str) -> None:
    """Print a line immediately, above the progress bar if there is one.

    If standard output cannot be written to (for example, the disk is full), the line goes to the
    error stream. If that also fails, the line is dropped: a run must not end because of its log.

    Raises:
        OutputClosedError: The reader of standard output is gone, and no block of
            `surviving_closed_output` is active.
    """
    try:
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.write(text)
        else:
            sys.stdout.write(text + "\n")  # a single write, so ranks do not mix lines
        sys.stdout.flush()
    except BrokenPipeError as error:
        if not _is_output_closed():
            raise
        closed = OutputClosedError(
            "the program that read this run's log has ended, as `| head` does after its last "
            "line, so the run ends too: to keep it running, write the log to a file (> log.txt)"
        )
        if not _on_output_closed:
            raise closed from error
        warn(str(closed))
        for on_close in _on_output_closed:
            on_close()
    except OSError as error:
        drop_unwritten(sys.stdout)
        print_to_stderr(f"(log: {error.strerror}) {text}")


@contextmanager
def surviving_closed_output(on_close: Callable[[], object]) -> Iterator[None]:
    """Warn, call `on_close` and continue if stdout's reader goes away inside the block.

    A training run uses this to write a checkpoint before it exits.
    """
    _on_output_closed.append(on_close)
    try:
        yield
    finally:
        _on_output_closed.remove(on_close)


def format_panel(title: str, rows: Sequence[PanelRow]) -> str:
    """Return a panel as text: the title and aligned `name  value` lines between rules."""
    width = max(len(name) for name, _ in rows)
    body = [f"  {name.ljust(width)}  {value}" for name, value in rows]
    rule = "-" * min(100, max(map(len, [title, *body])))
    return "\n".join([rule, title, rule, *body, rule])


def guard_imports() -> None:
    """End the process without a traceback on Ctrl-C or lack of memory, until a command begins.

    `run_command` and `run_process` restore the normal handling. Scripts call this before they
    import torch. That import takes seconds, during which Python would print a traceback on Ctrl-C,
    or an imported module would swallow the interrupt.

    Under `ulimit -v`, the imports are rehearsed first (see `rehearsed`).
    """
    sys.excepthook = _end_without_memory
    # Otherwise SIGINT is ignored, or already has a handler.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    _begin_rehearsal()


def _end_without_memory(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    shortage = shortage_of(error)
    if shortage is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print_to_stderr(f"error: {shortage}")
        os._exit(shortage.exit_code)


@contextmanager
def rehearsed() -> Iterator[None]:
    """Run the block in a forked process first if `ulimit -v` is set.

    When memory is short, native libraries do not always raise an error. While loading, they may
    abort, crash, or exit with 1 or 127, which only another process can observe. The block must not
    start threads or write files.

    Raises:
        ShortageError: There is too little memory for the block.
    """
    _begin_rehearsal()
    try:
        yield
    except Exception as error:
        if _rehearsal and shortage_of(error) is not None:
            os._exit(ShortageError.exit_code)
        _end_rehearsal()
        raise
    _end_rehearsal()


def _begin_rehearsal() -> None:
    """Fork a process that continues from here without output, and wait until it ends.

    Do nothing without `ulimit -v`. If the forked process ends normally, for example after --help,
    this process continues and runs the same code.

    Raises:
        ShortageError: The forked process failed, which is attributed to a lack of memory.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        shortage = shortage_of(MemoryError())
        if status and shortage is not None:
            raise shortage
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    atexit.register(os._exit, EXIT_OK)
    try:
        _rehearsal.append(mmap.mmap(-1, _MIN_FREE_BYTES))
    except OSError:
        os._exit(ShortageError.exit_code)


def _end_rehearsal() -> None:
    if _rehearsal:
        os._exit(EXIT_OK)


def begin_command() -> None:
    """End the rehearsal and the handling of Ctrl-C that `guard_imports` began.

    Ctrl-C raises KeyboardInterrupt again, so that temporary files are removed.
    """
    _end_rehearsal()
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(signum: int, frame: object) -> NoReturn:
    os._exit(128 + signum)


def _unwind(signum: int, frame: object) -> NoReturn:
    # `timeout` sends SIGTERM twice. The second one must not stop the removal of temporary files.
    signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)


def run_command(work: Callable[[], int | None]) -> int:
    """Run a command and return its exit code.

    SIGTERM and SIGHUP (a closed terminal) unwind the stack, as Ctrl-C does, so temporary files are
    removed. The process then exits with 143 or 129. Under `nohup`, SIGHUP stays ignored. Call this
    from the main thread.

    Args:
        work: The command, a function that may return an exit code.

    Returns:
        The code that `work` returns (0 by default), 130 after Ctrl-C, or 141 if the reader of
        stdout is gone. A UserError or an out-of-memory error is reported on stderr, and its exit
        code is returned.
    """
    prepare_streams()
    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, _unwind)}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, _unwind)
    try:
        begin_command()
        code = work() or EXIT_OK
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        reported = shortage_of(error) or error
        if not isinstance(reported, UserError):
            raise
        print_to_stderr(f"error: {reported}")
        return reported.exit_code
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def tool_main(
    build_parser: Callable[[], ToolParser], run: Callable[[Namespace], int | None]
) -> Callable[..., int]:
    """Return the `main` of a tool: a function that runs a command line and returns its exit code.

    Without an argument, the function runs the command line of this process.

    Args:
        build_parser: A function that returns the parser of the command line.
        run: The tool, a function of the parsed flags that may return an exit code.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        options = build_parser().read(argv)
        return run_command(lambda: run(options))

    return main


def prepare_streams() -> None:
    """Make the standard streams accept any text.

    Streams that were closed when the process started, for example by a daemon or `>&-`, are
    replaced by the null device. Python sets those to `None`, and the next file to be opened would
    get their descriptors and receive the output of libraries. Characters that the locale cannot
    encode, such as bytes of a path that is not UTF-8, are written as escapes instead of raising an
    error.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - stays open
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # false for streams of tests and notebooks
            stream.reconfigure(errors="backslashreplace")


def _is_output_closed() -> bool:
    """Return whether the reader of stdout is gone (`| head`), and if so, discard further output.

    Otherwise Python would fail to write the remaining output at exit.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def exit_immediately(code: int) -> NoReturn:
    """End the process immediately, once a command is done and its files are closed.

    Python would first free every object one by one, which takes 35 ms with a vocabulary loaded.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
