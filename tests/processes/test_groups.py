"""The steps in which processes form their groups and end them."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.errors import HangError
from megatron.parallel.journal import Journal
from megatron.processes import groups
from megatron.processes.groups import process_group
from megatron.processes.launch import Launch


class _Watchdog:
    """A watchdog that only records its calls."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return lambda *words: self._calls.append((name, *words))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace what communicates by functions that record their calls."""
    calls: list[Any] = []

    def new_watchdog(launch: Launch, seconds: float, *_: object) -> _Watchdog:
        calls.append(("watchdog", launch, seconds))
        return _Watchdog(calls)

    def rendezvous(launch: Launch, timeout: timedelta) -> SimpleNamespace:
        calls.append(("rendezvous", timeout))
        return SimpleNamespace(host="first", port=7)

    def connect(host: str, port: int, **options: Any) -> dist.Store:
        calls.append(("connection", host, port, options))
        return dist.HashStore()

    def begin_groups(backend: str, **options: Any) -> None:
        calls.append(("groups", backend, options["rank"], options["timeout"]))

    def destroy() -> None:
        calls.append("destroyed")

    monkeypatch.setattr(groups, "Watchdog", new_watchdog)
    monkeypatch.setattr(groups, "_rendezvous", rendezvous)
    monkeypatch.setattr(groups, "_store_of_attempt", lambda store, launch: "attempt")
    monkeypatch.setattr(groups, "check_devices", lambda *words: calls.append(("check", *words)))
    monkeypatch.setattr(groups, "StreamMarks", lambda device: f"marks of {device}")
    monkeypatch.setattr(groups.Layout, "connect", lambda self, kind, journal: journal)
    monkeypatch.setattr(dist, "TCPStore", connect)
    monkeypatch.setattr(groups.secrets, "randbits", lambda bits: 2**bits - 1)
    monkeypatch.setattr(dist, "init_process_group", begin_groups)
    monkeypatch.setattr(dist, "all_reduce", calls.append)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    return calls


_DEVICES: dict[str, Any] = {
    "gloo": SimpleNamespace(type="cpu", is_gpu=False),
    "cpu:gloo,accelerator:nccl": SimpleNamespace(
        type="accelerator", is_gpu=True, torch_device="accelerator 0"
    ),
}


_SECOND = {"is_master": False, "wait_for_workers": False}  # a connection to a store that exists


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("backend", _DEVICES)
def test_groups_form_and_end_in_order(backend: str, rank: int, calls: list[Any]) -> None:
    config, launch = ParallelConfig(distributed_timeout_minutes=2.0), Launch(rank, 2)
    device, before_end = _DEVICES[backend], ExitStack()
    before_end.callback(lambda: calls.append("callbacks"))
    with process_group(config, launch, device, before_end, ["x"]) as journal:
        calls.append("work")
    assert isinstance(journal, Journal)
    assert journal._marks == ("marks of accelerator 0" if device.is_gpu else None)
    token, connected = calls.pop(7), calls.pop(7)
    # The sum is the number that rank 0 has drawn.
    assert token.tolist() == [2**62 - 1 if rank == 0 else 0]
    assert connected[0] == "connect"
    text = (
        f"[rank {rank}] error: the 2 processes did not all connect within "
        "--distributed-timeout-minutes 2 (the launcher's store does not answer): is the command "
        "running on every machine, and can each machine reach the address and port of the first "
        "one?"
    )
    assert calls == [
        ("watchdog", launch, 120.0),
        ("end_within", 120.0 + groups.GRACE, 5, text),
        ("rendezvous", timedelta(minutes=2)),
        ("check", "attempt", launch, device, ["x"]),
        ("connection", "first", 7, {**_SECOND, "timeout": timedelta(minutes=2)}),
        ("begin", journal),
        ("groups", backend, rank, timedelta(minutes=3)),  # PyTorch does not name the missing rank
        "work",
        ("begin_end",),
        "callbacks",
        "destroyed",
        ("stop",),
    ]


def test_after_an_error_the_watchdog_keeps_running(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_run(error: Exception, *words: object) -> SystemExit:
        calls.append(str(error))
        return SystemExit(9)

    monkeypatch.setattr(groups, "end_run", end_run)
    words = (ParallelConfig(), Launch(0, 2), _DEVICES["gloo"], ExitStack(), [])
    with pytest.raises(SystemExit) as ending, process_group(*words):
        raise ValueError("a bug")
    assert ending.value.code == 9
    assert calls[-3:] == ["a bug", ("begin_end",), "destroyed"]


@pytest.mark.parametrize(
    ("step", "error", "said"),
    [
        ("_rendezvous", dist.DistError("refused"), r"did not all connect within .* \(refused\): "),
        ("all_reduce", RuntimeError("closed"), "could not form their groups: .* other. closed$"),
    ],
)
def test_processes_that_do_not_meet_say_why(
    step: str, error: Exception, said: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(groups if step == "_rendezvous" else dist, step, fail)
    words = (ParallelConfig(), Launch(0, 2), _DEVICES["gloo"], ExitStack(), [])
    with pytest.raises(HangError, match=said), process_group(*words):
        pass
    assert ("stop",) not in calls


def test_processes_share_the_store_of_a_job_under_its_own_names(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(groups, "_store_of_attempt", lambda *_: store)
    groups.job_store(Launch(1, 2), timedelta(seconds=1)).set("a", "b")
    assert store.get("job/a") == b"b"
    groups.job_store(Launch(), timedelta(seconds=1)).set("a", "c")  # a single process has its own
    assert store.get("job/a") == b"b"
    assert len(calls) == 1
