"""How a process learns its rank and place."""

import errno
import os
import signal
import socket
import subprocess
from datetime import timedelta

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.errors import ConfigError
from megatron.processes import groups
from megatron.processes import launch as launch_module
from megatron.processes.ending import report
from megatron.processes.launch import (
    Launch,
    bare_task,
    check_rendezvous_address,
    end_launcher,
    module_search_path,
    notify_saved,
    prefix_log_lines,
    prepare,
    read_launch,
    record_collectives,
    with_local_rank,
)
from megatron.processes.process import processes, run_process
from tests.config.command import parse


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    names += ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"]
    names += ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_RESTART_COUNT"]
    names += ["TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"]
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored, whatever is set in the meantime
        monkeypatch.delenv(name)


def test_the_flag_places_a_process_where_the_launcher_does_not(monkeypatch):
    assert with_local_rank(Launch(rank=5, world_size=8), 1) == Launch(5, 8, 1)
    assert with_local_rank(Launch(rank=5, world_size=8), None) == Launch(5, 8)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert with_local_rank(read_launch(), 1).local_rank == 3


_TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
_ONE_MACHINE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
_MPIRUN = {
    f"OMPI_COMM_WORLD_{name}": number
    for name, number in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
}


@pytest.mark.parametrize(
    ("variables", "launch", "machine", "is_multi_node"),
    [
        ({}, Launch(), range(1), False),
        (_TORCHRUN, Launch(5, 8, 1, 4), range(4, 8), True),
        (
            {**_TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},  # of one of two launchers
            Launch(5, 8, 1, 4),
            range(4, 8),
            True,
        ),
        (
            {**_ONE_MACHINE, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            Launch(1, 2, 1, 2, store_outlives_ranks=True),
            range(2),
            False,
        ),
        (
            {**_ONE_MACHINE, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            Launch(1, 2, 1, 2),
            range(2),
            False,
        ),
        (
            {**_ONE_MACHINE, "TORCHELASTIC_RESTART_COUNT": "1"},
            Launch(1, 2, 1, 2, restart_count=1, is_restart=True),
            range(2),
            False,
        ),
        ({"SLURM_RESTART_COUNT": "1"}, Launch(is_restart=True), range(1), False),
        (
            {**_MPIRUN, **_TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"},
            Launch(3, 4, 1, 2),
            range(2, 4),
            True,
        ),
    ],
)
def test_what_a_launcher_says_is_read(monkeypatch, variables, launch, machine, is_multi_node):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = read_launch(use_mpi="OMPI_COMM_WORLD_RANK" in variables)
    assert found == launch
    assert (found.machine, found.is_multi_node) == (machine, is_multi_node)


def test_mpirun_must_give_what_the_flag_promises(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="^--use-mpi: OMPI_COMM_WORLD_RANK is not set"):
        read_launch(use_mpi=True)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    told = "^OMPI_COMM_WORLD_RANK is 4, but OMPI_COMM_WORLD_SIZE is 4 .* as mpirun does"
    with pytest.raises(ConfigError, match=told):
        read_launch(use_mpi=True)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")  # without the number on this machine
    assert read_launch(use_mpi=True) == Launch(3, 4, 0, 1)


class _Network:
    """A UDP socket of a machine that reaches 10.0.0.x through ib0, and nothing else."""

    _ADDRESSES = {"lo": "127.0.0.1", "ib0": "10.0.0.7"}  # eth0 has no address

    def __init__(self, *_):
        self._address = "0.0.0.0"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def fileno(self):
        return 5

    def connect(self, address):
        if not address[0].startswith(("10.0.0.", "127.")):
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        self._address = self._ADDRESSES["lo" if address[0].startswith("127.") else "ib0"]

    def getsockname(self):
        return self._address, 40000

    @classmethod
    def ioctl(cls, descriptor, request, structure):
        """Answer SIOCGIFADDR: a name of 16 bytes, then a family, a port and an address."""
        name = structure.rstrip(b"\0").decode()
        if (descriptor, request, len(structure)) != (5, 0x8915, 256) or name not in cls._ADDRESSES:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return structure[:16] + b"\2\0\0\0" + socket.inet_aton(cls._ADDRESSES[name]) + bytes(8)


@pytest.mark.parametrize(
    ("address", "launch", "interface"),
    [
        ("10.0.0.1", Launch(2, 4, 0, 2), "ib0"),
        ("10.0.0.1", Launch(2, 4, 2, 4), None),  # a single machine
        ("127.0.0.1", Launch(2, 4, 0, 2), None),
        ("192.0.2.1", Launch(2, 4, 0, 2), None),
    ],
)
def test_gloo_uses_the_network_that_reaches_the_first_machine(
    monkeypatch, address, launch, interface
):
    monkeypatch.setattr(launch_module.socket, "socket", _Network)
    monkeypatch.setattr(
        launch_module.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")]
    )
    monkeypatch.setattr(launch_module.fcntl, "ioctl", _Network.ioctl)
    monkeypatch.setenv("MASTER_ADDR", address)
    for value, expected in ((None, interface), ("mine", "mine")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", value or "")
        if value is None:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        prepare(launch, deterministic=False)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


def test_variables_for_a_log_and_for_reports_of_hangs_are_the_user_s_if_set(monkeypatch):
    recorders = ["TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"]
    names = ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", *recorders]
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for first, expected in ((True, ["[rank ${rank}] ", "2000", "2000"]), (False, ["mine"] * 3)):
        for name in names if not first else ():
            monkeypatch.setenv(name, "mine")
        prefix_log_lines()
        record_collectives(2000)
        assert [os.environ[name] for name in names] == expected


@pytest.mark.parametrize("by_flag", [False, True])
def test_processes_meet_also_where_nobody_tells_how_many_a_machine_has(monkeypatch, by_flag):
    monkeypatch.setenv("WORLD_SIZE", "2")
    store, launches = HashStore(), []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        if not by_flag:
            monkeypatch.setenv("LOCAL_RANK", str(rank))
        launches.append(with_local_rank(read_launch(), rank if by_flag else None))
    # All share one store, and each is among the ranks of its machine.
    assert [groups._store_of_attempt(store, launch) is store for launch in launches] == [True] * 2
    assert [launch.machine for launch in launches] == [range(1), range(2)]


def test_a_run_reads_the_flag(monkeypatch):
    chosen = []
    monkeypatch.setattr("megatron.processes.process.Device.pick", chosen.append)
    with pytest.raises(AttributeError), processes(parse("--local_rank 2").config, Launch()):
        pass
    assert chosen == [2]


@pytest.mark.parametrize("deterministic", [False, True])
def test_variables_that_gpus_read_are_set_unless_the_user_has_set_them(monkeypatch, deterministic):
    names = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8" if deterministic else None,
        "NCCL_ALGO": "Ring" if deterministic else None,
    }
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    prepare(Launch(2, 4, 1), deterministic=deterministic)
    assert {name: os.environ.get(name) for name in names} == names
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["2", "4", "1"]
    for name in names:
        monkeypatch.setenv(name, "mine")
    prepare(Launch(), deterministic=deterministic)
    assert {os.environ[name] for name in names} == {"mine"}


def test_processes_that_do_not_know_where_to_meet(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(
        ConfigError, match="WORLD_SIZE is 4, but MASTER_PORT must also be set for the processes"
    ):
        check_rendezvous_address(4)
    for port in ("1", "29500", "65535"):
        monkeypatch.setenv("MASTER_PORT", port)
        check_rendezvous_address(4)
    for port in ("0", "65536"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ConfigError, match=f"MASTER_PORT is {port}: .* from 1 to 65535"):
            check_rendezvous_address(4)


def test_nobody_waits_for_processes_that_cannot_meet():
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2, but MASTER_ADDR and MASTER_PORT must"):
        groups.job_store(Launch(0, 2), timedelta(seconds=1))


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_NUM_TASKS": "2"}])
def test_one_of_several_tasks_of_slurm_does_not_train_alone(monkeypatch, step):
    for name, value in {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", **step}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"task 1 of 2 .*srun .* torchrun .*RANK=0 WORLD_SIZE=1"):
        read_launch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert read_launch() == Launch()
    monkeypatch.setenv("RANK", "5")  # set by torchrun inside a task
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert read_launch() == Launch(5, 8)
    assert bare_task() == 0


@pytest.mark.parametrize("task", [0, 1, 3])
def test_only_the_first_task_of_slurm_prints_the_error(monkeypatch, capsys, task):
    monkeypatch.setattr("megatron.processes.process._PRINT_SECONDS", 0.0)
    monkeypatch.setenv("SLURM_PROCID", str(task))
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert run_process([], lambda launch: 0) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert said.count("error: SLURM started this as task 0 of 4") == (task == 0)
    assert bool(said) == (task == 0)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},  # srun --pty, or srun of one task
        {"SLURM_NTASKS": "8"},  # the shell of salloc
        {"SLURM_PROCID": "0"},  # a launcher that sets no number
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_single_task_of_slurm_is_a_world_of_one(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch()


def test_one_of_several_processes_of_mpirun_does_not_train_alone(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert bare_task() == 1
    with pytest.raises(ConfigError, match=r"one of 2 processes .*: add --use-mpi, and set MASTER"):
        read_launch()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert read_launch() == Launch()


def test_torchruns_report_ends_with_our_message(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report(ConfigError(["--lr is required", "--seed is x"]), Launch(0, 2))
    said = capsys.readouterr().err
    failure = ProcessFailure(0, 1234, 9, str(tmp_path / "error.json"))
    assert str(ChildFailedError("pretrain_gpt.py", {0: failure})).count("error: --lr is req") == 1
    assert (
        failure.message["message"] + "\n" == said == "error: --lr is required\nerror: --seed is x\n"
    )


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("1", None), ("0", "0")])
def test_a_rank_beyond_the_number_of_processes(monkeypatch, rank, size):
    """Alone, it would train in silence; with others, it would wait for a rank that never comes."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(
        ConfigError, match=f"^RANK is {rank}, but WORLD_SIZE is {size or 1} .*torchrun"
    ):
        read_launch()


def test_a_launcher_that_has_ended_is_not_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the parent of a rank, or of the server that the rank was forked from."""
    told: list[tuple[int, int]] = []
    ignored: list[tuple[object, object]] = []
    monkeypatch.setattr(os, "kill", lambda *call: told.append(call))
    monkeypatch.setattr(signal, "signal", lambda *call: ignored.append(call))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as server:
        monkeypatch.setattr(os, "getppid", lambda: server.pid)
        for pid in (1, os.getpid(), server.pid):  # the first one is no ancestor of the "rank"
            monkeypatch.setenv("MEGATRON_LAUNCHER_PID", str(pid))
            notify_saved(Launch(local_rank=1))
            notify_saved(Launch(restart_count=1))  # the last attempt
            assert not told
            notify_saved(Launch())
            assert told == ([] if pid == 1 else [(pid, signal.SIGUSR1)])
            told.clear()
        server.communicate()
    assert ignored == [(signal.SIGUSR1, signal.SIG_IGN)] * 4
    for parent, launcher in ((1, None), (2**22 + 1, "1")):  # there is no process with this number
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        monkeypatch.delenv("MEGATRON_LAUNCHER_PID", raising=False)
        if launcher is not None:
            monkeypatch.setenv("MEGATRON_LAUNCHER_PID", launcher)
        notify_saved(Launch())
        assert not told


@pytest.mark.parametrize(
    ("local_rank", "restarts_left", "calls"),
    [(0, 1, 1), (0, 0, 0), (1, 1, 0)],
    ids=["first", "no restarts left", "second"],
)
def test_one_rank_of_a_machine_ends_its_launcher(
    local_rank: int, restarts_left: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    ignored: list[tuple[object, object]] = []
    monkeypatch.setattr(os, "kill", lambda *call: told.append(call))
    monkeypatch.setattr(signal, "signal", lambda *call: ignored.append(call))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(2 + restarts_left))
    monkeypatch.setenv("MEGATRON_LAUNCHER_PID", "0")
    monkeypatch.delenv("MEGATRON_LAUNCHER_SIGNAL", raising=False)
    launch = Launch(local_rank=local_rank, local_world_size=2, restart_count=2)
    end_launcher(launch)
    notify_saved(launch)  # only our own launcher is notified
    assert told == [(os.getppid(), signal.SIGHUP)] * calls
    assert ignored == [(signal.SIGHUP, signal.SIG_IGN)]


def test_without_torchrun_there_is_no_launcher_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *call: told.append(call))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    end_launcher(Launch())
    assert not told


@pytest.mark.parametrize(("previous", "inside"), [(None, "a:b"), ("", "a:b"), ("c:d", "a:b:c:d")])
def test_folders_are_on_the_search_path_for_a_while(
    previous: str | None, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", previous or "")
    if previous is None:
        monkeypatch.delenv("PYTHONPATH")
    with module_search_path(["a", "b"]):
        assert os.environ["PYTHONPATH"] == inside
    assert os.environ.get("PYTHONPATH") == previous
