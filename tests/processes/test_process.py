"""What processes must have in common before they train together."""

import errno
import json
import os
import re
import signal
import threading
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from megatron.config import rules_parallel
from megatron.config.parallel import ParallelConfig
from megatron.config.reliability import Fault
from megatron.device import Device
from megatron.errors import ConfigError, HangError, ShortageError, StorageError
from megatron.kernels.library import LibraryChoice
from megatron.parallel.layout import Layout
from megatron.processes import groups, process
from megatron.processes.crashes import CrashLog
from megatron.processes.faults import FaultyJournal
from megatron.processes.groups import (
    DeviceReport,
    check_devices,
    device_problems,
    process_group,
)
from megatron.processes.hang_files import HangFiles
from megatron.processes.launch import Launch
from megatron.processes.process import expect_same_kernels, print_notices, processes
from megatron.processes.watchdog import Verdict
from tests.config.command import parse
from tests.distributed import run_distributed
from tests.launch import start_ranks
from tests.repository import ROOT
from tests.training.toy import TOY

FUSED = LibraryChoice(object(), "as if")  # type: ignore[arg-type]
PLAIN = LibraryChoice(None, "no NVRTC")


def _answers(layout: Layout) -> list[str]:
    answers = []
    for plain in (set(), {0, 1, 2}, {1}, {0, 2}):
        try:
            expect_same_kernels(PLAIN if layout.world.rank in plain else FUSED, layout.world)
            answers.append("")
        except ConfigError as error:
            answers.append(str(error))
    return answers


def test_fused_kernels_are_for_all_processes_or_none() -> None:
    ranks = run_distributed(3, _answers)
    assert ranks[0] == ranks[1] == ranks[2]
    everywhere, nowhere, one, two = ranks[0]
    assert everywhere == nowhere == ""
    assert one.startswith("rank 1 of 3 cannot use the fused kernels")
    assert two.startswith("ranks 0, 2 of 3")


def _refusal(layout: Layout) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "find_library", lambda _: PLAIN if layout.world.rank else FUSED)
        patch.setattr(process, "process_group", lambda *_: nullcontext(layout))
        try:
            with processes(parse("").config, Launch()):
                return ""
        except ConfigError as error:
            return str(error)


def test_processes_with_different_kernels_do_not_begin() -> None:
    for said in run_distributed(2, _refusal):
        assert said.startswith("rank 1 of 2 cannot use the fused kernels")


def test_a_deterministic_run_lets_pytorch_choose_no_other_algorithm(monkeypatch) -> None:
    chosen = []

    def pick(_: int) -> None:
        fills = torch.utils.deterministic.fill_uninitialized_memory
        chosen.append((torch.are_deterministic_algorithms_enabled(), fills))

    monkeypatch.setattr("megatron.processes.process.Device.pick", pick)
    monkeypatch.setattr("megatron.processes.process.prepare", lambda *_, **__: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        for words in ("", "--deterministic-mode"):
            with pytest.raises(AttributeError), processes(parse(words).config, Launch()):
                pass
    finally:
        torch.use_deterministic_algorithms(False)
    assert chosen == [(False, True), (True, False)]


def test_what_a_device_has_nothing_for_is_refused_before_the_processes_meet(monkeypatch) -> None:
    monkeypatch.setattr("megatron.processes.process.Device.pick", lambda _: Device.cpu())
    monkeypatch.setattr("megatron.processes.groups._rendezvous", None)
    config = parse("--bf16 --use-flash-attn --cuda-graph-impl local").config
    with pytest.raises(ConfigError) as caught, processes(config, Launch()):
        pass
    assert caught.value.problems == [
        "--use-flash-attn requires a GPU, and this run is on cpu: drop it",
        "--cuda-graph-impl local requires a GPU, and this run is on cpu: drop it",
    ]


def test_numbers_in_8_bits_need_a_gpu_that_has_them() -> None:
    def problems(capability):
        gpu = SimpleNamespace(is_gpu=True, capability=capability, name="A100")
        return list(rules_parallel.device(parse("--bf16 --fp8-format hybrid").config, gpu, 1))

    assert problems((9, 0)) == problems((8, 9)) == []
    assert problems((8, 0))[0].startswith(
        "--fp8-format hybrid: A100 does not support 8-bit matrix products"
    )


def test_experts_in_8_bits_need_a_hopper() -> None:
    """PyTorch's grouped products have no kernel for Ada and Blackwell."""

    def problems(capability):
        gpu = SimpleNamespace(is_gpu=True, capability=capability, name="B200")
        config = parse("--bf16 --fp8-format hybrid --num-experts 4").config
        return list(rules_parallel.device(config, gpu, 1))

    assert not problems((9, 0))
    for other in ((8, 9), (10, 0), (12, 0)):
        (line,) = problems(other)
        assert line.startswith("--fp8-format hybrid with --num-experts")
        assert "B200" in line


@pytest.mark.parametrize(
    ("gpus", "visible", "processes", "is_refused"),
    [(1, None, 2, True), (1, "3", 2, False), (2, "0,1", 3, True), (2, None, 2, False)],
)
def test_processes_that_would_share_a_gpu_are_refused(
    gpus, visible, processes, is_refused, monkeypatch
) -> None:
    """A launcher that shows each process one GPU sets CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(process, "gpu_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    problems = list(process._shared_gpus(processes))
    assert len(problems) == is_refused
    assert all(f"--nproc-per-node {gpus})" in problem for problem in problems)


def test_memory_of_several_machines_is_not_mapped() -> None:
    gpu = Device(torch.device("cuda", 0))
    words = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
    config = parse(words, world_size=6).config
    (line,) = rules_parallel.device(config, gpu, 3)
    assert "does not divide the number of processes on a machine, 3," in line
    assert not list(rules_parallel.device(config, gpu, 4))


NO_GPU = """
import os, sys
sys.path.insert(0, {root!r})
import torch
from megatron import device
from megatron.processes import process
import pretrain_gpt

def pick(local_rank=0):  # a GPU on the first process alone
    return device.Device(torch.device("cuda", 0) if local_rank in {gpus} else torch.device("cpu"))

device.Device.pick = staticmethod(pick)
process.find_library = lambda _: None
device.Device.activate = lambda _: None
sys.exit(pretrain_gpt.main(pretrain_gpt.GPTRecipe()))
"""


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ((0,), r"error: rank 1 of 2 \(on .+\) found no GPU, but the other ranks did: "),
        ((), "error: --use-flash-attn requires a GPU, and this run is on cpu: drop it\n"),
    ],
)
def test_all_processes_hear_what_one_of_them_lacks(tmp_path, gpus, message) -> None:
    """They exit at once with its code, and none waits for the one that would have left."""
    script = tmp_path / "script.py"
    script.write_text(NO_GPU.format(root=str(ROOT), gpus=gpus))
    streams = [tmp_path / f"{name}{rank}" for name in ("out", "err") for rank in (0, 1)]
    flags = [*TOY, "--train-iters", "1", "--bf16", "--use-flash-attn"]
    ranks = start_ranks([str(script), *flags], os.environ, streams[:2], streams[2:])
    try:
        for rank in ranks:
            rank.join(120)
        assert [rank.exitcode for rank in ranks] == [ConfigError.exit_code] * 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    first, second = (path.read_text() for path in streams[2:])
    assert re.match(message, first)
    assert first.count("error:") == 1
    assert second == ""


# Both ranks start first: on a busy machine, one could otherwise come after the other has given up.
KILLED = """
import os, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
import torch.distributed as dist
import pretrain_gpt

ready = [pathlib.Path(__file__).with_name("ready" + rank) for rank in "01"]
ready[int(os.environ["RANK"])].touch()
while not all(file.exists() for file in ready):
    time.sleep(0.01)

if os.environ["RANK"] == "1":
    dist.{call} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(pretrain_gpt.main(pretrain_gpt.GPTRecipe()))
"""


@pytest.mark.parametrize("call", ["init_process_group", "all_reduce"])
def test_a_process_that_is_killed_while_groups_form_ends_the_other(tmp_path, call) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED.format(root=str(ROOT), call=call))
    output = [tmp_path / str(rank) for rank in (0, 1)]
    flags = [*TOY, "--train-iters", "1", "--distributed-timeout-minutes", "0.1"]
    ranks = start_ranks([str(script), *flags], os.environ, output, output)
    try:
        for rank in ranks:
            rank.join(120)
        assert [rank.exitcode for rank in ranks] == [HangError.exit_code, -signal.SIGKILL]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    said = output[0].read_text()
    assert "error: " in said
    assert "Traceback" not in said


def test_a_line_names_the_ranks_that_it_concerns() -> None:
    def say(*found: tuple[str, str, list[str]]) -> list[str]:
        return device_problems([DeviceReport(*each) for each in found])

    assert say(("cpu", "a", []), ("cpu", "b", [])) == []
    assert say(("cuda", "a", ["x", "y"]), ("cuda", "b", ["x", "z"]), ("cuda", "b", ["x"])) == [
        "x",
        "rank 0 of 3 (on a): y",
        "rank 1 of 3 (on b): z",
    ]
    (line,) = say(("cuda", "a", []), *[("cpu", f"m{i // 2}", ["x"]) for i in range(12)])
    assert line.startswith("ranks 1-12 of 13 (on m0, m1, m2, m3, ...) found no GPU")


def test_a_process_alone_asks_nobody() -> None:
    expect_same_kernels(PLAIN, Layout.single().world)
    with pytest.raises(AssertionError):
        expect_same_kernels(PLAIN, Layout.at(0, 2).world)


def test_the_first_rank_stays_until_the_others_have_heard_what_is_wrong(monkeypatch) -> None:
    monkeypatch.setattr(groups, "_LINGER", 120.0)
    store, raised = HashStore(), []

    def check(rank: int) -> None:
        try:
            check_devices(store, Launch(rank, 3), Device.cpu(), ["x"])
        except ConfigError as error:
            raised.append((rank, str(error)))

    store.set("device/2", json.dumps(["cpu", "b", ["x"]]))
    first = threading.Thread(target=check, args=(0,))
    first.start()
    for rank in (1, 2):
        first.join(0.3)
        assert first.is_alive()
        check(rank)
    first.join(60)
    assert sorted(raised) == [(0, "x"), (1, "x"), (2, "x")]


@pytest.mark.parametrize("unmet", [[], ["x"]])
def test_the_first_rank_does_not_stay_for_ranks_that_have_ended(unmet, monkeypatch) -> None:
    monkeypatch.setattr(groups, "_LINGER", 0.1 if unmet else 600.0)
    store = HashStore()
    store.set("device/1", json.dumps(["cpu", "b", unmet]))
    with pytest.raises(ConfigError, match="^x$") if unmet else nullcontext():
        check_devices(store, Launch(0, 2), Device.cpu(), unmet)


@pytest.mark.parametrize("faults", [[], [Fault.parse("step:0:9:kill")]], ids=str)
def test_a_single_process_records_why_it_fails(faults: list[Fault]) -> None:
    verdicts: list[Verdict] = []

    def fail() -> None:
        alone = (ParallelConfig(), Launch(), Device.cpu(), ExitStack(), [])
        with process_group(*alone, verdicts.append, faults) as layout:
            assert isinstance(layout.journal, FaultyJournal) == bool(faults)
            layout.journal.iteration = 3
            layout.journal.enter("saving a checkpoint")
            raise StorageError("the disk is full:\nmake room")

    with pytest.raises(StorageError):
        fail()
    assert verdicts == [Verdict(8, 0, "the disk is full", 3)]


def test_a_process_has_its_own_faults_of_this_attempt_and_a_folder_for_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[object, ...]] = []
    recorded: list[int] = []
    monkeypatch.setattr(process, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(process, "record_collectives", recorded.append)
    monkeypatch.setattr(
        process, "process_group", lambda *words: given.append(words) or nullcontext(Layout.single())
    )
    faults = [f"step:{fault}" for fault in ("0:2:kill@1", "1:2:kill", "1:3:kill@1", "1:4:kill@all")]
    words = [f"--fault-inject {fault}" for fault in faults]
    save = f"--save {tmp_path}/run --save-interval 5"
    dump = f"--flight-recorder-dump-path {tmp_path}/dump --flight-recorder-trace-buffer-size 7"
    for more in ("", save, f"{save} {dump}"):
        config = parse(*words, more, world_size=2).config
        with processes(config, Launch(1, 2, restart_count=1)):
            pass
    assert [group[-2] for group in given] == [[Fault.parse(fault) for fault in faults[2:]]] * 3
    assert [group[-1] for group in given] == [
        None,
        HangFiles(tmp_path / "run" / "hang", 1),
        HangFiles(tmp_path / "dump", 1),
    ]
    assert recorded == [7]


def test_a_process_hands_on_what_its_groups_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[object, ...]] = []
    prepared: list[tuple[object, ...]] = []
    activated: list[str] = []
    monkeypatch.setattr(
        process, "prepare", lambda launch, deterministic: prepared.append((launch, deterministic))
    )
    monkeypatch.setattr(process.Device, "pick", lambda _: Device.cpu())
    monkeypatch.setattr(process.Device, "activate", lambda self: activated.append(self.type))
    monkeypatch.setattr(process, "_shared_gpus", lambda processes: [f"{processes} share a GPU"])
    monkeypatch.setattr(
        process, "process_group", lambda *words: given.append(words) or nullcontext(Layout.single())
    )
    launch, at_end, crashes = Launch(1, 2, 1, 2), ExitStack(), CrashLog(tmp_path)
    gloo, nccl = (
        parse(f"--distributed-backend {backend}", world_size=2).config
        for backend in ("gloo", "nccl")
    )
    with processes(gloo, launch, at_end, crashes):
        pass
    with processes(gloo, launch):
        pass
    assert activated == ["cpu"] * 2
    with pytest.raises(AssertionError), processes(nccl, launch):
        pass
    assert activated == ["cpu"] * 2  # a device that does not meet the requirements is left alone
    assert prepared == [(launch, False)] * 3
    assert [words[1] for words in given] == [launch] * 3
    assert given[0][3] is at_end
    assert [words[4] for words in given] == [[], [], ["2 share a GPU"]]
    assert [words[5] for words in given] == [crashes.record, None, None]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 0, ""),
        (StorageError("the disk is full"), 8, "[rank 1] error: the disk is full\n"),
        (OSError(errno.EMFILE, ""), ShortageError.exit_code, "[rank 1] error: too many open files"),
        (ConfigError("--lr is required"), ConfigError.exit_code, ""),  # rank 0 prints it
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["none", "storage", "shortage", "flags", "Ctrl-C"],
)
def test_what_a_process_prints_and_returns(
    error: BaseException | None,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(process, "_PRINT_SECONDS", 0.0)
    monkeypatch.setattr(process, "prepare_streams", lambda: calls.append("streams"))
    monkeypatch.setattr(process, "begin_command", lambda: calls.append("command"))
    monkeypatch.setattr(process, "read_launch", lambda use_mpi: Launch(1, 2))

    def work(launch: Launch) -> int:
        calls.append(launch)
        if error is not None:
            raise error
        return 0

    assert process.run_process([], work) == code
    assert calls == ["streams", "command", Launch(1, 2)]
    found = capsys.readouterr().err
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_a_bug_of_a_process_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "read_launch", lambda use_mpi: Launch(1, 2))

    def work(_: Launch) -> int:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        process.run_process([], work)


def test_notices_are_printed_by_the_first_rank_alone() -> None:
    printed: list[str] = []
    for rank in (0, 1):
        print_notices(["a", "b"], Launch(rank, 2), printed.append)
    assert printed == ["note: a", "note: b"]
