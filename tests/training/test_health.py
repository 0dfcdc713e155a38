"""The machine test: what each rank measures, and what stands out."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.cli import health as command
from megatron.device import Device
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.training import health
from megatron.training.callbacks.health import HealthCheck
from megatron.training.health import Health, check_health, health_table, neighbors, problems_of
from megatron.training.loop import standard_callbacks, train
from tests.distributed import run_distributed
from tests.launch import run_ranks
from tests.training.toy import build_toy


def _ranks(count: int = 4, **changes: Any) -> list[Health]:
    """Return ranks on two machines, with changes to the last one."""
    rows = [
        Health(
            host=f"gpu-0{rank // 2}",
            device="NVIDIA H100",
            speeds={"bf16 TFLOP/s": 600.0 + rank, "disk MB/s": 900.0},
            links={(rank - 1) % count: 20.0, (rank + 1) % count: 20.0},
            digest=7,
            is_stable=True,
            clock=1e9 + 0.01 * rank,
            versions={"torch": "2.11", "NCCL": "2.28"},
        )
        for rank in range(count)
    ]
    return [*rows[:-1], replace(rows[-1], **changes)]


def test_alike_ranks_do_not_stand_out() -> None:
    assert problems_of(_ranks()) == []
    assert problems_of(_ranks(speeds={"bf16 TFLOP/s": 430.0, "disk MB/s": 640.0})) == []
    other = {"bf16 TFLOP/s": 200.0, "disk MB/s": 300.0}
    assert problems_of(_ranks(device="NVIDIA A100", speeds=other, digest=8)) == []
    # Ranks on a machine write at the same time.
    assert problems_of(_ranks(speeds={"bf16 TFLOP/s": 600.0, "disk MB/s": 90.0})) == []
    assert problems_of(_ranks(1)) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"speeds": {"bf16 TFLOP/s": 400.0, "disk MB/s": 900.0}},
            "rank 3 (on gpu-01) is slow: bf16 TFLOP/s 400 instead of 601",
        ),
        (
            {"host": "gpu-02", "speeds": {"bf16 TFLOP/s": 600.0, "disk MB/s": 90.0}},
            "the disk of --save is slow on gpu-02: 90 MB/s instead of 900",
        ),
        (
            {"links": {2: 20.0, 0: 5.0}},
            "the link between ranks 0 and 3 (on gpu-00 and gpu-01) is slow: 5 GB/s instead of 20",
        ),
        (
            {"is_stable": False},
            "rank 3 (on gpu-01) computes wrong results: the same product had different bits when "
            "it was repeated",
        ),
        ({"digest": 8}, "rank 3 (on gpu-01): different results from ranks 0-2: 8 instead of 7"),
        ({"clock": 1e9 + 7.5}, "the clock of rank 3 (on gpu-01) is 7.5 s ahead of the others"),
        (
            {"versions": {"torch": "2.11", "NCCL": "2.27"}},
            "rank 3 (on gpu-01): different version of NCCL from ranks 0-2: 2.27 instead of 2.28",
        ),
    ],
)
def test_a_rank_that_stands_out_is_named(changes: dict[str, Any], line: str) -> None:
    assert problems_of(_ranks(**changes)) == [line]


@pytest.mark.parametrize(
    ("changes", "stands_out"),
    [
        ({"speeds": {"bf16 TFLOP/s": 0.7 * 600 + 0.71, "disk MB/s": 900.0}}, False),
        ({"speeds": {"bf16 TFLOP/s": 0.7 * 600 + 0.69, "disk MB/s": 900.0}}, True),  # of 601
        ({"clock": 1e9 + 1.014}, False),  # the median of the clocks is 15 ms later than rank 0's
        ({"clock": 1e9 + 1.016}, True),
        ({"links": {2: 14.1, 0: 20.0}}, False),
        ({"links": {2: 13.9, 0: 20.0}}, True),
    ],
)
def test_the_limits_of_what_stands_out(changes: dict[str, Any], stands_out: bool) -> None:
    assert bool(problems_of(_ranks(**changes))) == stands_out


def test_the_table_of_ranks() -> None:
    rows = _ranks(3, is_stable=False, links={})
    assert health_table(rows).splitlines() == [
        "rank  host    device       bf16 TFLOP/s  disk MB/s  links GB/s      clock ms  results",
        "0     gpu-00  NVIDIA H100  600           900        20 (2), 20 (1)  -10       00000007",
        "1     gpu-00  NVIDIA H100  601           900        20 (0), 20 (2)  +0        00000007",
        "2     gpu-01  NVIDIA H100  602           900        -               +10       unstable",
        "versions of rank 0: torch 2.11, NCCL 2.28",
    ]


def test_links_between_machines_are_not_compared_with_others() -> None:
    rows = [
        replace(
            row, links={other: 300.0 if rank // 2 == other // 2 else 20.0 for other in row.links}
        )
        for rank, row in enumerate(_ranks())
    ]
    assert problems_of(rows) == []


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_rank_has_at_most_one_partner_at_a_time(ranks: int) -> None:
    rounds = list(zip(*(neighbors(rank, ranks) for rank in range(ranks)), strict=True))
    for partners in rounds:
        for rank, partner in enumerate(partners):
            assert partner is None or partners[partner] == rank != partner
    links = {frozenset((a, b)) for each in rounds for a, b in enumerate(each) if b is not None}
    chain = {frozenset((rank, rank + 1)) for rank in range(ranks - 1)}
    ring = {frozenset((0, ranks - 1))} if ranks % 2 == 0 and ranks > 2 else set()
    assert links == chain | ring


def _check(layout: Layout, folder: str) -> list[Health]:
    health._SECONDS = 0.05
    return check_health(layout, Device.cpu(), Path(folder))


def test_speeds_of_disks_are_in_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_speeds_of", lambda device: {"fp32 TFLOP/s": 0.5})
    monkeypatch.setattr(health, "_digest", lambda device: 7)
    monkeypatch.setattr(health, "_disk_speed", lambda folder: 9e8)
    (row,) = check_health(Layout.single(), Device.cpu(), tmp_path)
    assert row.speeds == {"fp32 TFLOP/s": 0.5, "disk MB/s": 900.0}
    assert (row.links, row.digest, row.is_stable) == ({}, 7, True)
    digests = iter([7, 9, 7])
    monkeypatch.setattr(health, "_digest", lambda device: next(digests))
    (row,) = check_health(Layout.single(), Device.cpu(), None)
    assert row.speeds == {"fp32 TFLOP/s": 0.5}
    assert (row.digest, row.is_stable) == (7, False)


def test_ranks_measure_themselves_and_their_links(tmp_path: Path) -> None:
    begun = time.monotonic()
    ranks = run_distributed(3, _check, str(tmp_path))
    assert time.monotonic() - begun < 100.0
    rows = ranks[0]
    assert ranks == [rows] * 3
    assert [sorted(row.links) for row in rows] == [[1], [0, 2], [1]]
    for row in rows:
        assert row.digest == rows[0].digest
        assert row.is_stable
        assert {"bf16 TFLOP/s", "fp32 TFLOP/s", "memory GB/s", "disk MB/s"} <= row.speeds.keys()
        assert "all-reduce GB/s" in row.speeds
        assert all(speed > 0 for speed in (*row.speeds.values(), *row.links.values()))
    assert not list(tmp_path.iterdir())
    lines = health_table(rows).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("rank  host")
    assert lines[-1].startswith("versions of rank 0: megatron ")


def test_a_wait_at_a_reading_of_the_clocks_is_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = waited = 0.0

    def clock() -> float:  # other processes have the core for a second whenever a clock is read
        nonlocal now, waited
        now, waited = now + 1.0, waited + 1.0
        return now

    def waits() -> float:
        clock()
        return waited

    def work() -> None:
        nonlocal now
        now += 10.0

    monkeypatch.setattr(health, "ReadyClock", lambda: SimpleNamespace(seconds=waits))
    monkeypatch.setattr(health, "time", SimpleNamespace(perf_counter=clock))
    assert health._speed(work, 60.0, Device.cpu()) == 5.0


def test_the_speed_of_a_disk_is_bytes_per_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = iter((10.0, 10.5))
    monkeypatch.setattr(health, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert health._disk_speed(tmp_path / "new") == 2 * health._DISK_BYTES
    assert list((tmp_path / "new").iterdir()) == []


def test_a_full_disk_is_a_problem_and_not_the_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "_speeds_of", lambda device: {"fp32 TFLOP/s": 0.5})
    (tmp_path / "file").touch()
    (full,) = check_health(Layout.single(), Device.cpu(), tmp_path / "file" / "run")
    said = capsys.readouterr().err
    assert said.startswith(f"WARNING: --save {tmp_path / 'file' / 'run'} cannot be written (")
    others = [
        replace(full, host=host, speeds=full.speeds | {"disk MB/s": 900.0}) for host in ("b", "c")
    ]
    problem = f"the folder of --save cannot be written to on {full.host}"
    assert problems_of([full]) == problems_of([full, *others]) == [problem]
    assert problems_of(others) == []


def test_a_speed_at_the_limit_is_not_slow() -> None:
    speeds = [4.0, 2.0, 6.0]  # the medians of the others: 4, 5, 3
    assert list(health._slow(speeds, ["a", "a", "a"], 0.4)) == []
    assert list(health._slow(speeds, ["a", "a", "a"], 0.5)) == [(1, 5.0)]
    assert list(health._slow([4.0, 2.0], ["a", "a"], 0.5)) == []
    assert list(health._slow(speeds, ["a", "b", "a"], 0.9)) == [(0, 6.0)]


def test_a_run_tests_before_it_and_at_an_interval(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_SECONDS", 0.01)
    flags = ["--train-iters", "5", "--eval-iters", "0"]
    for words, tables in (
        ([], 0),
        (["--health-check"], 1),
        (["--gpu-sniff-test-interval", "2"], 3),
    ):
        run = build_toy(Layout.single(), [*flags, *words])
        train(run, standard_callbacks(run, [])[0])
        assert capsys.readouterr().out.count("versions of rank 0: ") == tables


@pytest.mark.parametrize(
    ("interval", "iterations"), [(None, []), (1, [0, 1, 2, 3, 4, 5]), (3, [2, 5])]
)
def test_a_repeated_test_follows_the_update_at_its_interval(
    interval: int | None, iterations: list[int]
) -> None:
    run: Any = SimpleNamespace(
        config=SimpleNamespace(reliability=SimpleNamespace(gpu_sniff_test_interval=interval)),
        progress=SimpleNamespace(iteration=0),
    )
    found = []
    for run.progress.iteration in range(6):
        if HealthCheck().interrupts(run):
            found.append(run.progress.iteration)
    assert found == iterations


def test_the_command_refuses_what_is_out_of_range(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.processes.launch.is_launched", lambda: False)
    monkeypatch.setattr(command.os, "execv", lambda *_: pytest.fail("a launcher was started"))
    for share in ("1.5", "1", "0", "-1", "nan", "half"):
        with pytest.raises(SystemExit, match="9"):
            command.main(["--factor", share])
        told = f"argument --factor: {share}: give a number between 0 and 1, such as 0.7"
        assert told in capsys.readouterr().err
    assert command.main(["--processes", "0"]) == 9
    assert "--processes 0: give at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "processes"), [(0, "1"), (1, "1"), (4, "4")])
def test_the_command_starts_a_process_for_each_device(
    gpus: int, processes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("megatron.processes.launch.is_launched", lambda: False)
    monkeypatch.setattr(command.os, "execv", lambda *given: started.append(given))
    monkeypatch.setattr("megatron.device.gpu_count", lambda: gpus)
    assert command.main(["--save", "runs/a"]) == 0
    ((program, words),) = started
    assert program == words[0] == sys.executable
    assert words[words.index("--nproc-per-node") + 1] == processes
    assert words[-3:] == ["health", "--save", "runs/a"]


@pytest.mark.parametrize(("launched", "words"), [(False, ["--processes", "1"]), (True, [])])
def test_a_single_process_or_a_launched_one_starts_no_other(
    launched: bool, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.processes.launch.is_launched", lambda: launched)
    monkeypatch.setattr(command.os, "execv", lambda *_: pytest.fail("a launcher was started"))
    tests: list[Any] = []
    monkeypatch.setattr(command, "_test", lambda *given: tests.append(given) or 1)
    monkeypatch.setattr("megatron.processes.process.run_process", lambda _, work: work("launch"))
    assert command.main([*words, "--factor", "0.25", "--save", "x"]) == 1
    assert tests == [("launch", Path("x"), 0.25)]


def test_the_command_prints_a_table_and_says_what_stands_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_SECONDS", 0.01)  # the ranks are forks of this process
    # A busy machine may stop a rank for seconds before it reads the clock.
    monkeypatch.setattr(health, "_MAX_CLOCK_SECONDS", 1e9)
    words = ["-m", "megatron", "health", "--save", str(tmp_path), "--factor"]
    calm = run_ranks([*words, "1e-9"], os.environ, 2)
    assert (calm.returncode, calm.stderr) == (0, "")
    assert calm.stdout.count("\n0  ") == calm.stdout.count("\n1  ") == 1
    assert "nothing stands out" in calm.stdout
    slow = run_ranks([*words, "0.9999"], os.environ, 2)
    assert slow.returncode == 1
    assert " is slow: " in slow.stdout


def test_the_command_tests_gpus_as_a_run_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hardware queue, no NVLink multicast, and algorithms that NCCL chooses."""
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_ALGO")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    seen: list[str | None] = []

    def check(*_: object) -> list[Health]:
        seen.extend(os.environ.get(name) for name in names)
        return _ranks(1)

    monkeypatch.setattr(health, "check_health", check)
    assert command._test(Launch(), None, 0.7) == 0
    assert seen == ["1", "1", None]
    told: list[str] = []
    monkeypatch.setattr(health, "problems_of", lambda rows, factor: ["rank 0 is slow", str(factor)])
    monkeypatch.setattr("megatron.processes.launch.write_error_file", told.append)
    assert command._test(Launch(), None, 0.7) == 1
    assert told == ["rank 0 is slow; 0.7"]  # torchrun reports it
