"""A function over many tasks in several processes: results in order, memory bounded, no hangs."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.errors import UserError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Task = TypeVar("Task")
Result = TypeVar("Result")


@contextlib.contextmanager
def map_in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], workers: int
) -> Iterator[Iterator[Result]]:
    """`function(task)` for each task, in order, computed by `workers` processes.

    A context manager: workers leave while the caller finishes what it makes of the last results,
    and are waited for at the end. With one worker everything happens in this process. With more,
    at most two tasks a worker are under way, so neither tasks nor results pile up. Where processes
    cannot be forked, `function` travels to them by its `__reduce__`. No task is None.

    Raises:
        UserError: as raised by `function` or `tasks`.
        RuntimeError: a worker failed in another way or was killed.
    """
    if workers <= 1:
        yield map(function, tasks)
        return
    pool = _Pool(function, workers)
    try:
        yield pool.run(tasks)
    finally:
        pool.close()


class _Pool:
    """Task i goes to worker i modulo their number; a thread hands out, the caller collects."""

    def __init__(self, function: Callable[[Any], Any], workers: int) -> None:
        import multiprocessing  # 25 ms that one worker need not spend

        # Forking shares what is loaded already; macOS offers it but its libraries do not bear it.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            self._ends.append(ours)
            # A forked worker must not hold our ends: it would never see that we are gone.
            inherited = list(self._ends) if sys.platform == "linux" else []
            process = context.Process(
                target=_serve, args=(theirs, function, inherited), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
        self._free = threading.Semaphore(2 * workers)
        self._order: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()
        self._stopped = False

    def run(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """The results. Handing out begins at once, not when the first is asked for."""
        threading.Thread(target=self._hand_out, args=(tasks,), daemon=True).start()
        return self._results()

    def _results(self) -> Iterator[Any]:
        while (worker := self._order.get()) is not None:
            if isinstance(worker, Exception):
                raise worker
            yield self._collect(worker)
            self._free.release()

    def _hand_out(self, tasks: Iterable[Any]) -> None:
        try:
            for i, task in enumerate(tasks):
                self._free.acquire()
                if self._stopped:
                    return
                worker = i % len(self._ends)
                self._order.put(worker)
                # A worker that died is reported by the one who waits for its result.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._ends[worker].send(task)
            # No task is left: their 70 MB take 8 ms to give back, beside the last writing.
            for end in self._ends:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    end.send(None)
            self._order.put(None)
        except Exception as error:  # handed to the caller's thread, which raises it
            self._order.put(error)

    def _collect(self, worker: int) -> Any:
        try:
            result, error = self._ends[worker].recv()
        except (EOFError, OSError):  # before a result, or in the middle of one
            process = self._processes[worker]
            process.join(timeout=5)
            raise RuntimeError(
                f"a worker process ended with exit code {process.exitcode} (-9: killed, most "
                "often for lack of memory; then use fewer --workers)"
            ) from None
        if error is None:
            return result
        raise error if isinstance(error, UserError) else RuntimeError(error)

    def close(self) -> None:
        """Stop everything, finished or not."""
        self._stopped = True
        self._free.release()
        for process in self._processes:
            # Workers hold nothing to save; a fresh one still has the parent's SIGTERM handler.
            process.kill()
        for process in self._processes:
            process.join()
        for end in self._ends:
            end.close()


def _serve(
    connection: Connection, function: Callable[[Any], Any], inherited: list[Connection]
) -> None:
    """Answer tasks until there is none any more, or the other end closes."""
    # Ctrl-C reaches every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for end in inherited:
        end.close()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (task := connection.recv()) is not None:
            connection.send(_answer(function, task))


def _answer(function: Callable[[Any], Any], task: Any) -> tuple[Any, UserError | str | None]:
    try:
        return function(task), None
    except UserError as error:
        return None, error
    except Exception:
        return None, traceback.format_exc()
