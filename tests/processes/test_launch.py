"""How a process learns who and where it is."""

import pytest
from torch.distributed import HashStore

from megatron.errors import ConfigError
from megatron.processes import groups
from megatron.processes.launch import Launch, check_meeting_place, placed, read_launch
from megatron.processes.process import processes
from tests.config.command import parse


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored, whatever is set meanwhile
        monkeypatch.delenv(name)


def test_the_flag_places_a_process_where_the_launcher_does_not(monkeypatch):
    assert placed(Launch(rank=5, world_size=8), 1) == Launch(5, 8, 1)
    assert placed(Launch(rank=5, world_size=8), None) == Launch(5, 8)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert placed(read_launch(), 1).local_rank == 3


@pytest.mark.parametrize("by_flag", [False, True])
def test_processes_meet_also_where_nobody_tells_how_many_a_machine_has(monkeypatch, by_flag):
    monkeypatch.setenv("WORLD_SIZE", "2")
    store, launches = HashStore(), []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        if not by_flag:
            monkeypatch.setenv("LOCAL_RANK", str(rank))
        launches.append(placed(read_launch(), rank if by_flag else None))
    # All in one store, and each among those of its machine.
    assert [groups._of_this_attempt(store, launch) is store for launch in launches] == [True] * 2
    assert [groups._machine(launch) for launch in launches] == [range(1), range(2)]


def test_a_run_reads_the_flag(monkeypatch):
    chosen = []
    monkeypatch.setattr("megatron.processes.process.Device.pick", chosen.append)
    with pytest.raises(AttributeError), processes(parse("--local_rank 2").config, Launch()):
        pass
    assert chosen == [2]


def test_processes_that_do_not_know_where_to_meet(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 4, and without MASTER_PORT no process"):
        check_meeting_place(4)
    monkeypatch.setenv("MASTER_PORT", "29500")
    check_meeting_place(4)


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("1", None), ("0", "0")])
def test_a_rank_that_there_is_not(monkeypatch, rank, size):
    """Alone it would train in silence, with others wait for one that never comes."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(
        ConfigError, match=f"^RANK is {rank}, and WORLD_SIZE {size or 1} .*torchrun"
    ):
        read_launch()
