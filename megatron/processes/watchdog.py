"""A watchdog that ends the run on all processes when one of them hangs, fails or disappears.

Every process has two threads in addition to the one that trains. The exchange thread communicates:
every second it publishes the position of the process and checks whether another process has ended
the run. The watch thread checks the time, and ends the process at its deadline.

Any call to the store may wait forever, because a store whose machine is frozen still accepts
connections, and PyTorch's timeouts do not cover its answers. Therefore only the exchange thread
asks the store for the states of other processes, and nothing depends on that thread: the watch
thread uses no network and no file, and never waits for its output to be read. The deadline is set
before the processes connect, and again before the first call that ends a run.

The first process to find a reason to end the run announces it to all others (`Verdict`). In a hang,
that is the first process to exceed the time limit for a collective or message. It collects the
positions of the others and prints why the run hangs (`explain`, a pure function). All processes
then exit with the same code, no matter what their main thread is waiting for.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from itertools import groupby
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from megatron.errors import HangError, print_to_stderr
from megatron.parallel.journal import Journal
from megatron.processes.launch import Launch

if TYPE_CHECKING:
    from megatron.processes.hang_files import HangFiles

BEAT = 1.0  # seconds between heartbeats
_SILENCE = 3.0  # after this many seconds without a heartbeat, a process counts as dead
_LINGER = 2.0  # from a verdict until its author exits, so that the others can read it
# From an alarm until a process stops waiting for a verdict. A verdict takes 4 s to reach the
# others, and longer on busy machines. All processes must exit within 10 s.
_PATIENCE = 8.0
GRACE = 5.0  # from a verdict until the watchdog ends a process that has not exited by itself
_PRINT = 1.0  # until a process that ends stops waiting for the reader of its output
CRASHED = 1  # Python's exit code after an uncaught exception
LOST = (
    "was it killed, did it run out of memory, or is its machine down? See the launcher's report "
    "and the system log"
)
_PACKAGE = Path(__file__).parents[1]
# PyTorch code that communicates. DistributedDataParallel also does so outside the hooks that inform
# the journal: in the second forward pass, when it rebuilds its buckets.
_TORCH_DISTRIBUTED = Path(dist.__file__).parent
_TORCH_DDP = _TORCH_DISTRIBUTED.parent / "nn" / "parallel" / "distributed.py"
# The functions that print. Output may go to another machine, where it may never be read.
_OUTPUT = (_PACKAGE / "command.py", _PACKAGE / "errors.py")
_COMMUNICATION_FILES = {
    "journal.py",
    "collectives.py",
    "layout.py",
    "exchange.py",
    "symmetric_memory.py",
}

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """A collective or message that a process is waiting for (a `journal.Transfer`).

    Attributes:
        kind: The kind of operation, such as "all-reduce".
        ranks: The global ranks of its group, or the other end of a message.
        number: The sequence number of the collective in its group, counted from 1, or `None` for a
            message.
    """

    kind: str
    ranks: Ranks
    number: int | None


@dataclass(frozen=True)
class State:
    """The state that a process publishes.

    Attributes:
        beat: A counter that increases as long as the process is alive.
        iteration: The current update, counted from 1; 0 before the first.
        operation: A description of the current operation.
        operation_count: The number of operations entered so far.
        wait: The collective or message that the process is waiting for, if any.
        device_is_behind: Whether the process is waiting for its device, which may itself be waiting
            for a collective or message.
        started: The number of collectives that the process has started in each group, keyed by the
            global ranks of the group.
        source: The current position in the source code.
    """

    beat: int
    iteration: int
    operation: str
    operation_count: int
    wait: Wait | None
    device_is_behind: bool
    started: dict[Ranks, int]
    source: str

    def to_text(self) -> str:
        """Return the state as Python literals. In JSON, tuples cannot be keys."""
        return repr(astuple(self))

    @classmethod
    def from_text(cls, text: bytes) -> State:
        """Return the state that `to_text` wrote."""
        beat, iteration, operation, operation_count, wait, *rest = ast.literal_eval(text.decode())
        return cls(beat, iteration, operation, operation_count, wait and Wait(*wait), *rest)


def explain(
    states: Mapping[int, State | None], silent: frozenset[int], seconds: float
) -> tuple[frozenset[int], str]:
    """Find the ranks that kept the others waiting, and write the report to print.

    Args:
        states: The last state of each rank, or `None` for a rank that never published one.
        silent: The ranks that no longer publish their state.
        seconds: The time limit for a collective or message.

    Returns:
        The ranks that kept the others waiting (none if every rank has joined), and the report.
    """
    waiting = waiting_states(states, silent)
    absent_by_rank = {
        rank: absent_ranks(state, rank, states, silent) for rank, state in waiting.items()
    }
    missing = frozenset().union(*absent_by_rank.values()) - absent_by_rank.keys()
    blocked = [rank for rank, absent in absent_by_rank.items() if absent & missing]
    blocked = blocked or list(absent_by_rank)
    # Positions are comparable between ranks of one pipeline stage.
    earliest = min(
        blocked,
        key=lambda rank: (waiting[rank].iteration, waiting[rank].operation_count),
        default=None,
    )
    if not missing and earliest is not None:
        # If all ranks are waiting, name those that are already past the earliest wait.
        missing = absent_by_rank[earliest]
    missing = missing or silent or frozenset(states.keys() - waiting.keys())
    # One line per set of ranks in the same state, beginning with those not waiting.
    texts = {rank: _describe(rank, state, silent) for rank, state in states.items()}
    ranks_by_text: dict[str, list[int]] = {}
    for rank in sorted(texts, key=lambda rank: (rank in waiting, texts[rank], rank)):
        ranks_by_text.setdefault(texts[rank], []).append(rank)
    lines = [
        _headline(missing, None if earliest is None else waiting[earliest], seconds),
        *(f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_by_text.items()),
        "If nothing is broken and an operation simply takes that long, raise "
        "--distributed-timeout-minutes.",
    ]
    return missing, "\n  ".join(lines)


def waiting_states(states: Mapping[int, State | None], silent: frozenset[int]) -> dict[int, State]:
    """Return the states of the ranks that are alive and waiting for others or for their devices.

    Args:
        states: The last state of each rank, or `None` for a rank that never published one.
        silent: The ranks that no longer publish their state.
    """
    return {
        rank: state
        for rank, state in states.items()
        if state is not None and rank not in silent and (state.wait or state.device_is_behind)
    }


def absent_ranks(
    state: State, rank: int, states: Mapping[int, State | None], silent: frozenset[int]
) -> frozenset[int]:
    """Return the ranks that a waiting process appears to be waiting for.

    Args:
        state: The state of the waiting process.
        rank: The rank of the waiting process.
        states: The last state of each rank, or `None` for a rank that never published one.
        silent: The ranks that no longer publish their state.
    """
    wait = state.wait
    if wait is None:  # its device waits for a collective that the process has started
        expected = state.started
    elif wait.number is None:  # a message, not a collective
        return frozenset(wait.ranks)
    else:
        expected = {wait.ranks: wait.number}
    absent = set()
    for ranks, number in expected.items():
        for peer in set(ranks) - {rank}:
            peer_state = states.get(peer)
            if peer in silent or peer_state is None or peer_state.started.get(ranks, 0) < number:
                absent.add(peer)
    return frozenset(absent)


def _headline(missing: frozenset[int], waiting: State | None, seconds: float) -> str:
    limit = f"within {seconds:g} s (--distributed-timeout-minutes {seconds / 60:g})"
    if waiting is None:
        return f"hang: {ranks_text(missing)} made no progress {limit}"
    position = f"iteration {waiting.iteration}, {waiting.operation}"
    communication = f"the {waiting.wait.kind}" if waiting.wait else "the communication"
    if not missing:
        return (
            f"hang in {position}: every rank has joined {communication}, which did not end "
            f"{limit}: check the network and the devices"
        )
    return f"hang in {position}: {ranks_text(missing)} did not join {communication} {limit}"


def _describe(rank: int, state: State | None, silent: frozenset[int]) -> str:
    if state is None:
        return "never reported its state"
    position = f"iteration {state.iteration}, {state.operation}"
    if rank in silent:
        return f"no sign of life (stopped, killed, or cut off); last seen in {position}"
    if state.wait is not None:
        others = ranks_text([other for other in state.wait.ranks if other != rank])
        return f"waits in {position}, for {state.wait.kind} with {others}, at {state.source}"
    if state.device_is_behind:
        return f"waits for its device in {position}, at {state.source}"
    return f"alive in {position}, at {state.source}"


def ranks_text(ranks: Sequence[int] | frozenset[int]) -> str:
    """Return ranks as text: "rank 3", "ranks 0-2, 5"."""
    ordered = sorted(ranks)
    runs = []
    for _, members in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in members]
        runs.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(runs)}"


@dataclass(frozen=True)
class Verdict:
    """The reason why the run ends.

    Attributes:
        code: The exit code of every process.
        rank: The rank that ended the run and printed the whole error.
        reason: The reason in one line.
        iteration: The update during which that rank ended the run, counted from 1; 0 before the
            first.
        missing: The ranks that hung or disappeared, as text; "" if the rank itself failed.
    """

    code: int
    rank: int
    reason: str
    iteration: int = 0
    missing: str = ""

    def is_same_failure(self, other: Verdict) -> bool:
        """Return whether both verdicts mean the same failure, perhaps seen by different ranks."""
        failure = (self.code, self.iteration, self.missing)
        return failure == (other.code, other.iteration, other.missing)


class _Deadline(NamedTuple):
    """The time (`time.monotonic`) by which this process ends, its exit code and last message."""

    time: float
    code: int
    text: str | None


class _Claim(NamedTuple):
    """This process's request to end the run; see `Watchdog.end_run` for the fields."""

    code: int
    reason: Callable[[frozenset[int]], str]
    blames_peer: bool


class Watchdog:
    """A watchdog for one process of a run, from construction to `stop`.

    While the processes connect, and again once the run is ending, the watchdog ends this process at
    a fixed time, which `end_within` sets. In between, once `begin` has been called, it ends the
    process if a collective or message takes too long.

    Args:
        launch: The ranks of this process. If a rank on another machine printed the whole error, the
            first rank on this machine prints why the run ends.
        seconds: The maximum time that a process may wait for another.
        record: A function that is called with the verdict, in the process that announces it.
        files: The files in which a hang is recorded, if any.
    """

    def __init__(
        self,
        launch: Launch,
        seconds: float,
        record: Callable[[Verdict], None] | None = None,
        files: HangFiles | None = None,
    ) -> None:
        """Start the watch thread."""
        self._record, self._files = record, files
        self._launch, self._rank, self._seconds = launch, launch.rank, seconds
        self._main = threading.get_ident()
        self._store: dist.Store = dist.HashStore()  # until `connect`
        self._journal = Journal()
        self._beat = 0
        self._progress, self._since = self._journal.progress, time.monotonic()
        self._is_hanging = False
        self._claim: _Claim | None = None
        self._is_author = False  # whether the verdict is this process's claim
        self._verdict: Verdict | None = None
        self._decided = threading.Event()  # set once there is a verdict
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._deadline: _Deadline | None = None
        self._last_answer = time.monotonic()  # when the store last answered
        self._exchanger = threading.Thread(target=self._exchange, name="_exchange", daemon=True)
        threading.Thread(target=self._watch, name="_watch", daemon=True).start()

    def begin(self, journal: Journal) -> None:
        """Detect hangs from here on, and no longer end the process at a fixed time.

        Args:
            journal: The record of this process's progress.
        """
        self._journal = journal
        self._deadline = None

    def connect(self, store: dist.Store) -> None:
        """Exchange states and verdicts with the other processes from here on.

        Args:
            store: A separate connection to the store, because a connection that one thread waits on
                blocks all other threads.
        """
        self._store = store
        self._exchanger.start()

    def end_within(self, seconds: float, code: int, text: str | None) -> None:
        """Make the watch thread end this process after some time, unless it has ended by itself.

        Args:
            seconds: The time until the process is ended. An earlier deadline stays in force, with
                the new code and message.
            code: The exit code.
            text: The last message of the process, or `None` if it has already printed why it ends.
        """
        deadline = time.monotonic() + seconds
        self._deadline = _Deadline(
            min(deadline, self._deadline.time) if self._deadline else deadline, code, text
        )

    def begin_end(self) -> None:
        """Set a deadline for closing the process groups, unless a deadline is already set."""
        if self._deadline is None:
            limit = f"{self._seconds:g} s (--distributed-timeout-minutes {self._seconds / 60:g})"
            text = f"[rank {self._rank}] error: hang: the run is over, but its process groups did "
            self.end_within(self._seconds, HangError.exit_code, f"{text}not end within {limit}")

    def stop(self) -> None:
        """Stop watching, because the process groups have ended normally."""
        self._stopped.set()
        self._wake.set()
        if self._exchanger.is_alive():
            self._exchanger.join(timeout=BEAT)

    def end_run(
        self, code: int, reason: Callable[[frozenset[int]], str], *, blames_peer: bool
    ) -> tuple[Verdict, bool]:
        """Announce that this process failed, unless another has already ended the run.

        From here on, the watch thread ends the process if any part of its shutdown takes too long.

        Args:
            code: The exit code for all processes.
            reason: A function of the ranks that no longer publish their state, which returns the
                reason in one line.
            blames_peer: Whether the error seems to be caused by another process. If so, first
                give that process time to announce its own error, or to fall silent.

        Returns:
            The verdict that applies, and whether this call announced it (always true if no other
            process can be reached).
        """
        own_verdict = Verdict(code, self._rank, reason(frozenset()))
        seconds = _SILENCE * (2 if blames_peer else 1)
        self.end_within(seconds + GRACE, code, f"[rank {self._rank}] error: {own_verdict.reason}")
        self._claim = _Claim(code, reason, blames_peer)
        self._wake.set()
        deadline = time.monotonic() + seconds
        while (
            time.monotonic() < deadline
            and not self._store_is_silent
            and not self._decided.wait(BEAT / 4)
        ):
            continue
        return (
            (self._verdict, self._is_author) if self._verdict is not None else (own_verdict, True)
        )

    def delay_exit(self) -> None:
        """Delay the exit of rank 0 if the store may end with it or with its launcher."""
        if self._rank == 0 and not self._store_is_silent and not self._launch.store_outlives_ranks:
            time.sleep(_LINGER)

    def _exchange(self) -> None:
        """Exchange states and verdicts. No other thread uses the store, which may never answer."""
        try:
            self._store.set(f"process/{self._rank}", f"{os.getpid()} {_process_namespace()}")
            while not self._stopped.is_set():
                self._publish()
                if not self._has_verdict():
                    if self._claim is not None:
                        code, reason, blames_peer = self._claim
                        silent = self._poll_states()[1] if blames_peer else frozenset[int]()
                        if not self._has_verdict():
                            self._is_author = self._publish_verdict(code, reason(silent), silent)
                            self._has_verdict()
                    elif self._is_hanging:
                        self._explain_hang()
                    elif time.monotonic() - self._since >= 2 * BEAT:
                        self._explain_loss(self._ended_on_this_machine())
                self._wake.wait(BEAT)
                self._wake.clear()
            # `_ended_on_this_machine` ignores this entry.
            self._store.set(f"process/{self._rank}", "0 done")
        except Exception:  # the store ended with the process that hosted it
            return  # `_watch` still detects hangs

    def _publish(self) -> None:
        self._beat += 1
        self._store.set(f"state/{self._rank}", self._state().to_text())

    def _has_verdict(self) -> bool:
        """Return whether there is a verdict. If another rank announced a hang, end this process."""
        if self._verdict is None and self._store.check(["verdict"]):
            verdict = self._verdict = Verdict(**json.loads(self._store.get("verdict")))
            self.end_within(GRACE, verdict.code, self.exit_message(verdict))
            self._decided.set()
            if verdict.rank != self._rank and verdict.code == HangError.exit_code:
                if self._files is not None:
                    self._files.write_stacks(verdict.reason)
                self.delay_exit()
                self._exit(verdict.code, self.exit_message(verdict))
        self._last_answer = time.monotonic()
        return self._verdict is not None

    def _publish_verdict(self, code: int, reason: str, missing: frozenset[int]) -> bool:
        """Publish this verdict unless there is one already, and return whether it was published."""
        is_first = self._store.add("verdicts", 1) == 1
        if is_first:
            missing_text = ranks_text(missing) if missing else ""
            iteration = self._journal.position.iteration
            verdict = Verdict(code, self._rank, reason, iteration, missing_text)
            self._store.set("verdict", json.dumps(asdict(verdict)))
            if self._record is not None:
                self._record(verdict)
        return is_first

    def _explain_hang(self) -> None:
        if self._store.add("alarms", 1) > 1:
            return
        states, silent = self._poll_states()
        missing, report = explain(states, silent, self._seconds)
        if self._publish_verdict(HangError.exit_code, report.splitlines()[0], missing):
            print_to_stderr(f"error: {report}")
            if self._files is not None:
                self._files.write_report(report, states, silent)
                self._files.write_stacks(report.splitlines()[0])
            time.sleep(_LINGER)
            self._exit(HangError.exit_code)

    def _explain_loss(self, ended: frozenset[int]) -> None:
        """End the run if ranks on this machine ended without a verdict while this process waits.

        gloo reports a broken connection, but a device waits forever for a process that was killed.
        """
        if not ended:
            return
        position = self._journal.position
        reason = (
            f"{ranks_text(ended)} ended without reporting an error, in iteration "
            f"{position.iteration}, {position.operation}"
        )
        if self._publish_verdict(CRASHED, reason, ended):
            print_to_stderr(f"[rank {self._rank}] error: {reason}: {LOST}")
            time.sleep(_LINGER)
            self._exit(CRASHED)

    def _poll_states(self) -> tuple[dict[int, State | None], frozenset[int]]:
        """Return the state of every rank, and the ranks that no longer publish theirs.

        This takes a few seconds. It stops early if a process on this machine has ended, or once
        there is a verdict, because the process that announced it exits soon.
        """
        earlier, deadline = self._states(), time.monotonic() + _SILENCE
        ended = frozenset[int]()
        while time.monotonic() < deadline and not self._has_verdict():
            self._publish()  # another rank may be polling too
            time.sleep(BEAT / 4)
            ended_before, ended = ended, self._ended_on_this_machine()
            if ended and ended == ended_before:  # several may end within a moment
                break
        states = self._states()
        silent = ended or frozenset(
            rank for rank, state in states.items() if state == earlier[rank]
        )
        # A live rank's beat changes.
        return states | {self._rank: self._state()}, silent - {self._rank}

    def _ended_on_this_machine(self) -> frozenset[int]:
        """Return the other ranks on this machine whose processes have ended."""
        ended = []
        for rank in self._launch.machine:
            key = f"process/{rank}"
            if rank == self._rank or not self._store.check([key]):
                continue
            pid, _, namespace = self._store.get(key).decode().partition(" ")
            if namespace != _process_namespace():
                continue
            state = "X"
            with suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "ZX":  # a zombie has ended too
                ended.append(rank)
        return frozenset(ended)

    def _states(self) -> dict[int, State | None]:
        keys = {rank: f"state/{rank}" for rank in range(self._launch.world_size)}
        return {
            rank: State.from_text(self._store.get(key)) if self._store.check([key]) else None
            for rank, key in keys.items()
        }

    def _state(self) -> State:
        journal, position = self._journal, self._journal.position
        return State(
            beat=self._beat,
            iteration=position.iteration,
            operation=str(position.operation),
            operation_count=position.number,
            wait=self._wait(),
            device_is_behind=journal.device_is_behind,
            started=dict(journal.started),
            source=source_of(sys._current_frames().get(self._main)),
        )

    def _wait(self) -> Wait | None:
        """Return the collective or message that the main thread is waiting for, if any.

        Two kinds of calls wait before the journal knows what they wait for: the first collective
        or message of a group, and calls that form groups. They are recognized by the thread's
        position.
        """
        transfer = self._journal.waits_for
        if transfer is not None:
            return Wait(transfer.kind, transfer.ranks, transfer.number)
        if self._journal.device_is_behind or not self._main_thread_is_in(
            _TORCH_DISTRIBUTED, _TORCH_DDP
        ):
            return None
        return Wait("communication", tuple(range(self._launch.world_size)), None)

    def _main_thread_is_in(self, *paths: Path) -> bool:
        frame = sys._current_frames().get(self._main)
        file = Path(frame.f_code.co_filename if frame is not None else "")
        return any(file.is_relative_to(path) for path in paths)

    def _watch(self) -> None:
        """Check the deadline, and look for a hang, at intervals.

        This thread never waits for a network, a file system or a reader of its output.
        """
        while not self._stopped.wait(BEAT / 4):
            with suppress(Exception):  # for example, memory ran out; the next check may succeed
                self._check_time()

    def _check_time(self) -> None:
        """End this process if its time is up, or raise the alarm if it has waited for too long.

        While the store does not answer, the main thread counts as waiting, even if it is not.
        Nobody could tell this process that the others have ended, and the files that it uses may be
        on the store's machine.
        """
        now, deadline = time.monotonic(), self._deadline
        progress, store_is_silent = self._journal.progress, self._store_is_silent
        # Once the store stops answering, no other process can tell this one why the run hangs.
        if deadline is not None and (
            now >= deadline.time or (self._is_hanging and store_is_silent)
        ):
            self._exit(deadline.code, deadline.text)
        waits = self._journal.device_is_behind or self._main_thread_is_in(*_OUTPUT) or self._wait()
        if progress != self._progress or not (waits or store_is_silent):
            self._progress, self._since = progress, now
        elif deadline is None and now - self._since >= self._seconds:
            patience = 0.0 if store_is_silent else _PATIENCE
            self.end_within(patience, HangError.exit_code, None)  # even if the report fails
            self.end_within(patience, HangError.exit_code, self._local_report())
            self._is_hanging = True
            self._wake.set()

    @property
    def _store_is_silent(self) -> bool:
        """Whether the store has not answered for some seconds, or no longer exists."""
        return time.monotonic() - self._last_answer > GRACE

    def _local_report(self) -> str:
        """Return the hang report to print if the other ranks' states cannot be read."""
        report = explain({self._rank: self._state()}, frozenset(), self._seconds)[1].splitlines()
        return (
            f"[rank {self._rank}] error: {report[0]}; the state of the other ranks is unknown, "
            "since the launcher's store does not answer: the network to the machine of rank 0 is "
            f"down, or the run there has ended\n{report[1]}"
        )

    def exit_message(self, verdict: Verdict) -> str | None:
        """Return why this process exits, or `None` if its machine's log already says so."""
        if verdict.rank in self._launch.machine or self._rank != self._launch.machine.start:
            return None
        return f"[rank {self._rank}] exits: rank {verdict.rank} ended the run: {verdict.reason}"

    def _exit(self, code: int, text: str | None = None) -> None:
        """End the process, even if its main thread is blocked or nobody reads its output."""

        def write_last() -> None:
            with suppress(OSError, ValueError):  # the log's disk is full, or its reader has ended
                if text is not None:
                    sys.stderr.write(text + "\n")
                sys.stderr.flush()
                sys.stdout.flush()

        try:
            writer = threading.Thread(target=write_last, daemon=True)
            writer.start()
            writer.join(timeout=_PRINT)
        finally:  # even if no thread can be started
            os._exit(code)


def _process_namespace() -> str:
    """Return this process's PID namespace, which differs between containers, or "" if unknown."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def source_of(frame: FrameType | None) -> str:
    """Return a thread's position: the innermost line of our code outside the communication code.

    This reads no source file, because files may be on a machine that no longer answers.
    """
    frames = walk_stack(frame) if frame is not None else ()
    stack = [(Path(call.f_code.co_filename), call.f_code.co_name, line) for call, line in frames]
    own_code = [entry for entry in stack if entry[0].is_relative_to(_PACKAGE)]
    own_code = [entry for entry in own_code if entry[0].name not in _COMMUNICATION_FILES] or stack
    if not own_code:
        return "an unknown position"
    positions = [own_code[0]]
    if own_code[0] is not stack[0] and stack[0][0].name not in _COMMUNICATION_FILES:
        positions.append(stack[0])
    return ", ".join(f"{path.name}:{line} in {name}" for path, name, line in positions)
