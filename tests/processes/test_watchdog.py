"""The watchdog ends a process in time, whatever the store, the network and the output do."""

from __future__ import annotations

import builtins
import linecache
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.errors import print_to_stderr
from megatron.parallel.journal import Journal, Transfer
from megatron.processes import watchdog
from megatron.processes.hang_files import REPORT, HangFiles
from megatron.processes.launch import Launch
from megatron.processes.process import processes, run_process
from megatron.processes.watchdog import Watchdog
from tests.config.command import parse
from tests.reliability.processes import wait_until
from tests.reliability.scoreboard.commands import Command, CommandResult


class MuteStore(dist.HashStore):
    """A store that stops answering once it is frozen."""

    def __init__(self) -> None:
        """Start as a store that answers."""
        super().__init__()
        self.frozen = threading.Event()

    def check(self, keys: list[str]) -> bool:
        """Answer, or block forever."""
        if self.frozen.is_set():
            threading.Event().wait()
        return bool(super().check(keys))


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BEAT", "_SILENCE", "_LINGER", "_PATIENCE", "GRACE"):
        monkeypatch.setattr(watchdog, name, getattr(watchdog, name) / 5)
    monkeypatch.setattr(watchdog, "_PRINT", 60.0)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give slow threads time: a watchdog whose time is up would end the process of the tests."""
    for name in ("_SILENCE", "_PATIENCE", "GRACE"):
        monkeypatch.setattr(watchdog, name, 120.0)


@pytest.fixture
def _unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes whose output nobody reads end soon."""
    monkeypatch.setattr(watchdog, "_PRINT", 0.2)


def _polls_briefly(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the watchdog wait only a moment for signs of life, but let its callers wait long."""
    poll = dog._poll_states

    def briefly() -> tuple[dict[int, watchdog.State | None], frozenset[int]]:
        monkeypatch.setattr(watchdog, "_SILENCE", 0.6)
        return poll()

    monkeypatch.setattr(dog, "_poll_states", briefly)


def _ended(function: Callable[[], object], folder: Path) -> CommandResult:
    """Run the function in a new process, which must end before the function does."""

    def run() -> int:
        function()
        time.sleep(600)
        return 0

    with Command(run, folder / "output") as command:
        return command.end()


def _connected(store: dist.Store, seconds: float = 600.0, rank: int = 0) -> Watchdog:
    found = Watchdog(Launch(rank, 2), seconds)
    found.begin(Journal())
    found.connect(store)
    return found


@pytest.mark.parametrize("blames_peer", [False, True])
def test_an_error_needs_no_answer_of_the_store(
    blames_peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_SILENCE", 600.0)
    store = MuteStore()
    dog = _connected(store)
    wait_until(lambda: store.check(["state/0"]), 60.0)
    store.frozen.set()
    started = time.monotonic()
    verdict, is_own = dog.end_run(6, lambda gone: f"gone: {gone}", blames_peer=blames_peer)
    assert time.monotonic() - started < 300.0
    assert is_own
    assert verdict == watchdog.Verdict(6, 0, "gone: frozenset()", 0, "")
    dog.stop()


@pytest.mark.usefixtures("_patient")
def test_the_silent_rank_is_named_while_the_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    dog = _connected(dist.HashStore())
    _polls_briefly(dog, monkeypatch)
    verdict, is_own = dog.end_run(1, lambda gone: f"gone: {sorted(gone)}", blames_peer=True)
    assert is_own
    assert verdict.reason == "gone: [1]"
    dog.stop()


@pytest.mark.usefixtures("_patient")
def test_a_process_of_this_machine_that_has_ended_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    ended = subprocess.Popen(["true"])
    wait_until(lambda: Path(f"/proc/{ended.pid}/stat").read_text().split()[2] == "Z", 60.0)
    namespace = os.readlink("/proc/self/ns/pid")
    for rank, process in ((1, f"{os.getpid()} {namespace}"),
                          (2, f"{ended.pid} of another container"),
                          (3, f"{ended.pid} {namespace}")):  # fmt: skip
        store.set(f"process/{rank}", process)
    dog = Watchdog(Launch(0, 4, 0, 4), 600.0)
    monkeypatch.setattr(dog, "_explain_loss", lambda ended: None)  # if the error comes late
    dog.begin(Journal())
    dog.connect(store)
    started = time.monotonic()
    verdict, is_own = dog.end_run(1, lambda gone: f"gone: {sorted(gone)}", blames_peer=True)
    assert is_own
    assert verdict.reason == "gone: [3]"
    assert time.monotonic() - started < 120.0  # not after the time for a sign of life
    dog.stop()
    ended.wait()


class LaggingJournal(Journal):
    """The journal of a process whose device never finishes its work."""

    @property
    def device_is_behind(self) -> bool:
        """Always true."""
        return True


@pytest.mark.parametrize(("left", "code"), [("it was killed", 1), ("it was done", 9)])
def test_a_device_does_not_wait_for_a_process_that_has_ended(
    tmp_path: Path, left: str, code: int
) -> None:
    """If a process ended normally, the device may have long work of its own."""

    def wait() -> None:
        store = dist.HashStore()
        with subprocess.Popen(["true"]) as ended:
            namespace = "done" if left == "it was done" else os.readlink("/proc/self/ns/pid")
        store.set("process/1", f"{ended.pid} {namespace}")
        dog = Watchdog(Launch(0, 2, 0, 2), 60.0)
        dog.begin(LaggingJournal())
        dog.connect(store)
        if code == 9:
            time.sleep(4.0)
            os._exit(9)

    ended = _ended(wait, tmp_path)
    assert ended.code == code
    message = "rank 0] error: rank 1 ended without reporting an error, in iteration 0, "
    assert (message in ended.output) == (code == 1)


def test_a_process_that_stops_normally_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT", 60.0)  # as long as it waits for its thread
    store = dist.HashStore()
    dog = _connected(store, rank=1)
    wait_until(lambda: store.check(["process/1"]), 60.0)
    dog.stop()
    assert store.get("process/1") == b"0 done"


@pytest.mark.usefixtures("_patient")
def test_a_rank_that_polls_the_others_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    other = Watchdog(Launch(1, 2), 600.0)
    other.begin(Journal())
    polling = threading.Thread(
        target=other.end_run, args=(1, lambda gone: "lost"), kwargs={"blames_peer": True}
    )
    polling.start()
    wait_until(lambda: other._claim is not None, 60.0)
    other.connect(store)
    wait_until(lambda: other._beat >= 2, 60.0)  # it polls, and longer than the next one will
    dog = _connected(store)
    _polls_briefly(dog, monkeypatch)
    looks = list[dict[int, watchdog.State | None]]()
    states = dog._states

    def look() -> dict[int, watchdog.State | None]:
        """Read the states once the other process has changed its own, for up to a minute."""
        with suppress(AssertionError):
            wait_until(lambda: not looks or states()[1] != looks[0][1], 60.0)
        looks.append(states())
        return looks[-1]

    monkeypatch.setattr(dog, "_states", look)
    verdict, is_own = dog.end_run(1, lambda gone: f"gone: {sorted(gone)}", blames_peer=True)
    assert is_own
    assert verdict.reason == "gone: []"
    polling.join()
    dog.stop()
    other.stop()


@pytest.mark.usefixtures("_patient")
def test_a_verdict_of_another_is_heard_before_its_own_is_announced() -> None:
    store = dist.HashStore()
    store.add("verdicts", 1)
    store.set("verdict", '{"code": 6, "rank": 1, "reason": "a damaged sample"}')
    dog = _connected(store)
    verdict, is_own = dog.end_run(1, lambda gone: "a connection broke", blames_peer=True)
    assert not is_own
    assert verdict == watchdog.Verdict(6, 1, "a damaged sample")
    dog.stop()


class SlowStore(dist.HashStore):
    """A store that takes a moment to write."""

    def set(self, key: str, value: str) -> None:
        """Write, after a moment."""
        time.sleep(0.1)
        super().set(key, value)


@pytest.mark.usefixtures("_patient")
def test_an_error_and_the_end_of_a_run_do_not_wait_for_the_next_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "BEAT", 120.0)
    store, started = SlowStore(), time.monotonic()
    dog = _connected(store)
    wait_until(lambda: store.check(["state/0"]), 60.0)
    verdict, is_own = dog.end_run(6, lambda gone: "a damaged sample", blames_peer=False)
    assert (verdict, is_own) == (watchdog.Verdict(6, 0, "a damaged sample"), True)
    wait_until(lambda: dog._beat >= 2, 60.0)
    time.sleep(0.5)
    assert dog._beat == 2  # one at the start, one with the error
    dog.stop()
    assert store.get("process/0") == b"0 done"
    assert time.monotonic() - started < 120.0


def test_the_end_after_an_error_has_an_end(tmp_path: Path) -> None:
    def hang() -> None:
        store = MuteStore()
        store.frozen.set()
        _connected(store).end_run(6, lambda gone: "a damaged sample", blames_peer=False)

    ended = _ended(hang, tmp_path)
    assert ended.code == 6
    assert ended.output == "[rank 0] error: a damaged sample\n"


def test_the_end_of_a_run_has_an_end(tmp_path: Path) -> None:
    ended = _ended(lambda: _connected(dist.HashStore(), 0.5).begin_end(), tmp_path)
    assert ended.code == 5
    assert "[rank 0] error: hang: the run is over, but its process groups did not" in ended.output


def test_processes_that_meet_have_a_time_until_which(tmp_path: Path) -> None:
    def hang() -> None:
        sys.stdout.write("a line without an end")
        Watchdog(Launch(0, 2), 9.0).end_within(0.5, 5, "never met")

    assert _ended(hang, tmp_path) == CommandResult(5, "never met\na line without an end")


def test_an_end_that_is_due_is_not_put_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> None:
        dog, is_set_up = Watchdog(Launch(0, 2), 9.0), threading.Event()
        check = dog._check_time
        monkeypatch.setattr(dog, "_check_time", lambda: is_set_up.wait() and check())
        dog.end_within(0.5, 6, "first")
        dog.end_within(500.0, 7, "second")
        dog.begin_end()
        is_set_up.set()

    assert _ended(hang, tmp_path) == CommandResult(7, "second\n")  # or it hangs


def _fill_errors() -> None:
    """Make stderr a full pipe that nobody reads."""
    _, send = os.pipe()
    os.set_blocking(send, False)
    with suppress(BlockingIOError):
        while True:
            os.write(send, bytes(4096))
    os.set_blocking(send, True)
    os.dup2(send, 2)


@pytest.mark.usefixtures("_unread")
def test_output_that_nobody_reads_keeps_no_process_that_is_to_end(tmp_path: Path) -> None:
    def hang() -> None:
        _fill_errors()
        Watchdog(Launch(0, 2), 9.0).end_within(0.5, 5, "a report that does not fit")
        print_to_stderr("another that does not fit")

    assert _ended(hang, tmp_path).code == 5


@pytest.mark.usefixtures("_unread")
def test_an_error_that_cannot_be_printed_keeps_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error was raised before the processes met, so nothing else ends this one."""

    def refuse(*_: object) -> None:
        _fill_errors()
        raise dist.DistError("connection refused")

    monkeypatch.setattr("megatron.processes.groups._rendezvous", refuse)
    monkeypatch.setattr("megatron.processes.groups.GRACE", 0.5)
    config = parse("--distributed-timeout-minutes 0.01", world_size=2).config

    def work(launch: Launch) -> int:
        with processes(config, launch):
            return 0

    def hang() -> int:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
        return run_process([], work)

    assert _ended(hang, tmp_path).code == 5


def test_without_an_answer_from_the_store_all_work_is_limited(tmp_path: Path) -> None:
    """A file may be on the frozen machine, and nobody can confirm that the others ended."""

    def hang() -> None:
        store = MuteStore()
        store.frozen.set()
        _connected(store, 0.5)

    ended = _ended(hang, tmp_path)
    assert ended.code == 5
    assert "hang: rank 0 made no progress within 0.5 s" in ended.output
    assert "the launcher's store does not answer" in ended.output


def test_a_hang_ends_as_soon_as_the_store_is_mute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process waits for an explanation only while somebody can give one."""
    monkeypatch.setattr(watchdog, "_PATIENCE", 600.0)

    def hang() -> None:
        store, journal = MuteStore(), Journal()
        store.frozen.set()
        journal.begin_wait(Transfer(journal, "all-reduce", (0, 1), 1, None))
        dog = Watchdog(Launch(0, 2), 0.2)
        dog.begin(journal)
        dog.connect(store)

    ended = _ended(hang, tmp_path)
    assert ended.code == 5
    assert "rank 1 did not join the all-reduce within 0.2 s" in ended.output


@pytest.mark.usefixtures("_patient")
def test_a_hang_is_explained_recorded_and_announced_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_SILENCE", 0.1)
    monkeypatch.setattr(watchdog, "_LINGER", 0.01)

    def hang() -> None:
        journal = Journal()
        dog = Watchdog(Launch(1, 2), 0.15, print, HangFiles(tmp_path, 1))
        dog.begin(journal)
        dog.connect(dist.HashStore())
        journal.begin_wait(Transfer(journal, "all-reduce", (0, 1), 1, None))

    ended = _ended(hang, tmp_path)
    reason = "hang in iteration 0, start-up: rank 0 did not join the all-reduce within 0.15 s"
    assert ended.code == 5
    assert (
        f"error: {reason} (--distributed-timeout-minutes 0.0025)\n  rank 0: never" in ended.output
    )
    verdict = f"Verdict(code=5, rank=1, reason='{reason} (--distributed-timeout-minutes 0.0025)', "
    assert f"{verdict}iteration=0, missing='rank 0')" in ended.output
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["rank_00001.json", REPORT]


@pytest.mark.usefixtures("_patient")
def test_a_hang_that_another_process_explains_is_not_explained_again(tmp_path: Path) -> None:
    """It waits for the other's verdict, and ends with its code and without a report of its own."""

    def hang() -> None:
        store, journal = dist.HashStore(), Journal()
        store.add("alarms", 1)
        dog = Watchdog(Launch(3, 4, 1, 2), 0.15, None, HangFiles(tmp_path, 3))
        dog.begin(journal)
        dog.connect(store)
        journal.begin_wait(Transfer(journal, "all-reduce", (0, 3), 1, None))
        wait_until(lambda: dog._is_hanging, 60.0)
        store.set("verdict", '{"code": 5, "rank": 0, "reason": "a hang"}')

    ended = _ended(hang, tmp_path)
    assert ended == CommandResult(5, "")  # rank 2 prints the reason on this machine
    assert [path.name for path in tmp_path.glob("*.json")] == ["rank_00003.json"]


@pytest.mark.usefixtures("_patient")
def test_work_for_which_nobody_waits_is_not_limited(tmp_path: Path) -> None:
    def work() -> int:
        _connected(dist.HashStore(), 0.2)
        time.sleep(2.0)
        return 0

    with Command(work, tmp_path / "output") as command:
        assert command.end() == CommandResult(0, "")


@pytest.mark.usefixtures("_unread")
def test_a_process_whose_output_nobody_reads_keeps_others_waiting(tmp_path: Path) -> None:
    """The reader may be on a frozen machine, as that of `srun` or `ssh` can be."""

    def hang() -> None:
        _fill_errors()
        Watchdog(Launch(0, 2), 0.5).begin(Journal())
        print_to_stderr("a line that does not fit")

    assert _ended(hang, tmp_path).code == 5


def test_a_report_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources may be on a frozen machine."""

    def refuse(*_: object) -> None:
        raise AssertionError("a file is read")

    dog = Watchdog(Launch(0, 2), 9.0)
    try:
        with monkeypatch.context() as patch:
            for module, name in ((os, "stat"), (builtins, "open"), (linecache, "checkcache")):
                patch.setattr(module, name, refuse)
            report = dog._local_report()
    finally:
        dog.stop()
    assert "rank 0: alive in iteration 0, start-up, at watchdog.py" in report


def test_a_thread_outside_of_the_package_has_a_position_too() -> None:
    position = watchdog.source_of(sys._getframe())
    assert re.fullmatch(
        r"test_watchdog.py:\d+ in test_a_thread_outside_of_the_package\w+", position
    )
    assert watchdog.source_of(None) == "an unknown position"


@pytest.mark.parametrize(
    ("files", "position"),
    [
        (["/a/run.py", "training/step.py"], "step.py:2 in call"),
        (["training/step.py", "parallel/collectives.py"], "step.py:2 in call"),
        (
            ["training/loop.py", "data/loader.py", "/a/mmap.py"],
            "loader.py:2 in call, mmap.py:2 in call",
        ),
        (
            ["training/step.py", "parallel/journal.py", "/a/c10d.py"],
            "step.py:2 in call, c10d.py:2 in call",
        ),
        (["/a/run.py", "parallel/journal.py"], "journal.py:2 in call"),
        (["/a/run.py"], "run.py:2 in call"),
    ],
)
def test_a_position_is_in_our_code_outside_communication(files: list[str], position: str) -> None:
    """The innermost call is shown, too, unless it is of our own communication code."""

    def innermost() -> str:
        return watchdog.source_of(sys._getframe(1))

    package, function = Path(watchdog.__file__).parents[1], innermost
    for file in reversed(files):
        scope = {"inner": function}
        exec(compile("def call():\n    return inner()", package / file, "exec"), scope)  # noqa: S102
        function = scope["call"]
    assert function() == position


@pytest.mark.parametrize(
    ("rank", "author", "said"),
    [
        (2, 0, "[rank 2] exits: rank 0 ended the run: a disk is full"),
        (3, 0, None),  # rank 2 says it for this machine
        (2, 3, None),  # its log has the error itself
    ],
)
def test_the_first_rank_of_another_machine_says_why_it_exits(
    rank: int, author: int, said: str | None
) -> None:
    dog = Watchdog(Launch(rank, 4, rank % 2, 2), 9.0)
    dog.stop()
    assert dog.exit_message(watchdog.Verdict(8, author, "a disk is full")) == said


@pytest.mark.parametrize(
    ("launch", "is_silent", "delays"),
    [
        (Launch(0, 2), False, True),
        (Launch(1, 2), False, False),
        (Launch(0, 2), True, False),
        (Launch(0, 2, store_outlives_ranks=True), False, False),
    ],
)
@pytest.mark.usefixtures("_patient")
def test_only_the_process_with_the_store_stays_for_the_others(
    launch: Launch, is_silent: bool, delays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dog = Watchdog(launch, 9.0)
    dog.stop()
    slept: list[float] = []
    monkeypatch.setattr(watchdog.time, "sleep", slept.append)
    dog._last_answer = time.monotonic() - (watchdog.GRACE + 1.0 if is_silent else 0.0)
    dog.delay_exit()
    assert slept == [watchdog._LINGER] * delays


def test_a_call_that_forms_a_group_is_a_communication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal does not know about it, and PyTorch would wait for it a minute longer."""
    monkeypatch.setattr(watchdog, "GRACE", 60.0)  # the store is not asked, and not silent either

    def hang() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2)

    def watched() -> None:
        Watchdog(Launch(0, 2), 0.5).begin(Journal())
        hang()

    ended = _ended(watched, tmp_path)
    assert ended.code == 5
    assert "hang in iteration 0, start-up: rank 1 did not join the communication" in ended.output
