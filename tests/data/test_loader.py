"""The loader and its samplers: order, resumption, layouts, random state, workers, signals."""

from __future__ import annotations

import multiprocessing
import multiprocessing.resource_sharer
import os
import re
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data.loader import (
    CyclicSampler,
    SingleSampler,
    _leave_signals_to_parent,
    _LoadingContext,
    build_loader,
    lost_workers,
)
from megatron.data.mock import MockDataset
from megatron.errors import DataError, ShortageError

DATASET = MockDataset(40, seq_length=8, vocab_size=100, seed=1, split=0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_come_in_the_samplers_order(num_workers: int) -> None:
    sampler = SingleSampler(40, 8, 2, 1, 2)
    batches = list(build_loader(DATASET, sampler, num_workers=num_workers, seed=1))
    assert [batch["id"].tolist() for batch in batches] == list(sampler)
    for batch in batches:
        assert batch["text"].shape == (2, 9)
        assert batch["text"].dtype == batch["id"].dtype == torch.int64
        want = [DATASET[i]["text"].tolist() for i in batch["id"].tolist()]
        assert batch["text"].tolist() == want


def test_workers_send_batches_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """To open shared tensors, the training process would connect to the worker for each one."""

    def refuse(*_: object) -> None:
        raise AssertionError("a batch came through shared memory")

    monkeypatch.setattr(multiprocessing.resource_sharer.DupFd, "detach", refuse)
    batch = next(iter(build_loader(DATASET, CyclicSampler(40, 0, 2), num_workers=1, seed=1)))
    assert batch["text"].tolist() == [DATASET[i]["text"].tolist() for i in batch["id"].tolist()]
    batch["text"].add_(1)  # and is writable


@pytest.mark.parametrize("num_workers", [0, 1])
def test_no_global_random_state_is_drawn(num_workers: int) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = build_loader(DATASET, CyclicSampler(40, 0, 4), num_workers=num_workers, seed=1)
    assert len(list(islice(loader, 3))) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_outlive_the_jobs_signals_and_end_with_the_loader() -> None:
    others = set(multiprocessing.active_children())
    batches = build_loader(DATASET, CyclicSampler(40, 0, 4), num_workers=2, seed=1)
    for _ in range(2):
        next(batches)  # one from each worker, which has installed its handlers by then
    processes = set(multiprocessing.active_children()) - others
    assert len(processes) == 2
    workers = [process.pid for process in processes]
    for pid in workers:
        os.kill(pid, signal.SIGINT)
    # A launcher sends SIGTERM to all processes of the job, so it does not come from the parent.
    for pid in workers:
        subprocess.run(["kill", "-TERM", str(pid)], check=True)
    assert len(list(islice(batches, 30))) == 30
    for process in processes:
        process.terminate()  # from the parent, as when the interpreter exits
    for process in processes:
        process.join(120)
        assert process.exitcode == 0


def test_workers_start_and_end_on_a_system_that_does_not_say_who_sent_a_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(signal, "sigtimedwait")  # for the workers too, which are forked
    others = set(multiprocessing.active_children())
    batches = build_loader(DATASET, CyclicSampler(40, 0, 4), num_workers=1, seed=1)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    worker.terminate()
    worker.join(120)
    assert worker.exitcode == 0


_KILLED_WITH_WORKERS = """
import multiprocessing, os, signal
from megatron.data.loader import build_loader
from megatron.data.mock import MockDataset

# A batch is more than a pipe holds.
dataset = MockDataset(40, seq_length=30_000, vocab_size=100, seed=1, split=0)
batches = build_loader(dataset, [[i] for i in range(40)], num_workers=2, seed=1)
next(batches), next(batches)
print(*(process.pid for process in multiprocessing.active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_when_the_training_process_is_killed(tmp_path: Path) -> None:
    output = tmp_path / "workers.txt"
    with output.open("w") as stream:  # unlike a pipe, a file has no end that workers hold open
        killed = subprocess.Popen([sys.executable, "-c", _KILLED_WITH_WORKERS], stdout=stream)
    assert killed.wait(240) == -signal.SIGKILL
    workers = output.read_text().split()
    assert len(workers) == 2
    deadline = time.monotonic() + 120
    while alive := [pid for pid in workers if _is_running(int(pid))]:
        if time.monotonic() > deadline:
            for pid in alive:
                os.kill(int(pid), signal.SIGKILL)
            pytest.fail(f"{len(alive)} of 2 workers wait for somebody to read their batches")
        time.sleep(0.1)


_WORKER_KILLED = """
import os, signal, threading
from multiprocessing.connection import Connection
import torch
from megatron.data.loader import build_loader, lost_workers
from megatron.data.mock import MockDataset
from megatron.errors import UserError

# The thread that pins, as it is with a GPU.
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda *_: torch.device("cpu")
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.set_device_index = lambda _: None
torch.Tensor.pin_memory = lambda self, *_: self

def send_half(connection, data):
    if len(data) > 1000:
        os.write(connection.fileno(), data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    os.write(connection.fileno(), data)

class Killed(MockDataset):
    def __getitem__(self, index):
        if index == 9:
            Connection._send = send_half  # in this worker
        return super().__getitem__(index)

for pin_memory in (False, True):
    dataset = Killed(40, seq_length=30_000, vocab_size=100, seed=1, split=0)
    sampler = [[i] for i in range(40)]
    batches = build_loader(dataset, sampler, num_workers=2, seed=1, pin_memory=pin_memory)
    try:
        with lost_workers():
            print(next(batches)["id"].tolist(), "pin_memory" in str(threading.enumerate()))
            for batch in batches:
                pass
    except UserError as error:
        print(error)
    del batches
    print("ended", flush=True)
"""


def test_a_worker_that_is_killed_in_the_middle_of_a_batch_ends_the_loading() -> None:
    words = [sys.executable, "-c", _WORKER_KILLED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True)
    said = re.compile(r"a data loading process \(pid \d+\) ended unexpectedly: (killed|exited)")
    first, second = np.array_split(done.stdout.splitlines(), 2)
    for lines, is_pinned in ((first, False), (second, True)):
        assert lines[0] == f"[0] {is_pinned}"
        assert said.match(lines[1])
        assert lines[2:] == ["ended"]


def test_other_errors_than_a_worker_s_end_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="^Caught") as caught, lost_workers():
        raise RuntimeError("Caught RuntimeError in DataLoader worker process 0.")
    assert caught.type is RuntimeError


def _is_running(pid: int) -> bool:
    """Return whether the process exists and has not ended; it may still be a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_single_takes_its_slice_of_each_block() -> None:
    ranks = [list(SingleSampler(26, 0, 4, rank, 3)) for rank in range(3)]
    assert ranks == [
        [[0, 1, 2, 3], [12, 13, 14, 15]],
        [[4, 5, 6, 7], [16, 17, 18, 19]],
        [[8, 9, 10, 11], [20, 21, 22, 23]],
    ]  # 24 and 25 do not fill a block
    assert list(SingleSampler(26, 12, 4, 1, 3)) == ranks[1][1:]
    assert list(SingleSampler(26, 24, 4, 1, 3)) == []


def test_a_single_process_takes_every_sample() -> None:
    assert list(SingleSampler(7, 2, 2)) == [[2, 3], [4, 5]]
    sampler = iter(CyclicSampler(5, 0, 2))
    epochs = [[next(sampler) for _ in range(2)] for _ in range(2)]
    assert all(sorted(sum(epoch, [])) == [0, 1, 2, 3] for epoch in epochs)


def test_single_reaches_the_last_block_of_a_dataset_of_whole_blocks() -> None:
    assert list(SingleSampler(24, 0, 4, 1, 3)) == [[4, 5, 6, 7], [16, 17, 18, 19]]
    assert list(SingleSampler(24, 12, 4, 2, 3)) == [[20, 21, 22, 23]]
    assert list(SingleSampler(24, 24, 4, 2, 3)) == []


def steps(sampler: type, total: int, consumed: int, sizes: list[int], global_batch: int) -> list:
    """Return each step's samples, with `sizes[i]` data-parallel ranks at step i, micro-batch 1."""
    sets = []
    for size in sizes:
        loaders = [iter(sampler(total, consumed, 1, rank, size)) for rank in range(size)]
        taken = [
            i for loader in loaders for batch in islice(loader, global_batch // size) for i in batch
        ]
        assert len(taken) == len(set(taken)) == global_batch
        sets.append(set(taken))
        consumed += global_batch
    return sets


def test_single_steps_do_not_depend_on_the_number_of_processes() -> None:
    """Change 4 -> 2 -> 1 -> 3 processes with a fixed global batch (docs/reliability.md, row 7)."""
    changing = steps(SingleSampler, 1000, 0, [4, 4, 2, 2, 1, 1, 3, 3], 12)
    assert changing == [set(range(12 * i, 12 * i + 12)) for i in range(8)]


def test_single_follows_a_growing_global_batch() -> None:
    sampler, consumed, seen = iter(SingleSampler(100, 0, 2, 1, 2)), 0, []
    for global_batch in (4, 4, 8, 12):
        batches = list(islice(sampler, global_batch // 4))
        resumed = list(islice(SingleSampler(100, consumed, 2, 1, 2), global_batch // 4))
        assert batches == resumed
        consumed += global_batch
        seen += batches
    assert seen == [[i, i + 1] for i in range(2, 28, 4)]


def test_cyclic_without_sharding_does_not_depend_on_the_number_of_processes() -> None:
    def sampler(total: int, consumed: int, micro: int, rank: int, size: int) -> CyclicSampler:
        return CyclicSampler(total, consumed, micro, rank, size, data_sharding=False)

    sizes = [4, 2, 1, 3, 4, 2]
    changing = steps(sampler, 36, 0, sizes, 12)  # two epochs of three steps
    assert changing == steps(sampler, 36, 0, [1] * 6, 12)
    assert set.union(*changing[:3]) == set.union(*changing[3:]) == set(range(36))
    assert changing[:3] != changing[3:]


def test_cyclic_shuffles_each_share() -> None:
    samplers = [CyclicSampler(45, 0, 2, rank, 2) for rank in range(2)]
    order = torch.randperm(22, generator=torch.Generator().manual_seed(0))
    for rank, sampler in enumerate(samplers):
        batches = list(islice(sampler, 11))
        assert sum(batches, []) == (order + 22 * rank).tolist()
    second = torch.randperm(22, generator=torch.Generator().manual_seed(1)).tolist()
    assert list(islice(samplers[0], 11, 22)) == [second[i : i + 2] for i in range(0, 22, 2)]


@pytest.mark.parametrize("data_sharding", [True, False])
@pytest.mark.parametrize("consumed", [0, 4, 40, 44, 88, 132])
def test_cyclic_resumes(consumed: int, data_sharding: bool) -> None:
    whole = CyclicSampler(45, 0, 2, 1, 2, data_sharding)
    resumed = CyclicSampler(45, consumed, 2, 1, 2, data_sharding)
    assert list(islice(resumed, 20)) == list(islice(whole, consumed // 4, consumed // 4 + 20))


def test_cyclic_refuses_a_consumed_count_of_other_sizes() -> None:
    with pytest.raises(DataError, match="cyclic"):
        CyclicSampler(45, 6, 2, 0, 2)


@pytest.mark.parametrize("sampler", [SingleSampler, CyclicSampler])
def test_a_dataset_below_one_block_is_refused(sampler: type) -> None:
    with pytest.raises(DataError, match="7 samples"):
        sampler(7, 0, 2, 0, 4)


_WITHOUT_SHARED_MEMORY = """
from megatron.data.loader import build_loader
from megatron.data.mock import MockDataset
from megatron.errors import ShortageError

dataset = MockDataset(4, seq_length=8, vocab_size=100, seed=1, split=0)
try:
    next(build_loader(dataset, [[0]], num_workers=2, seed=1))
except ShortageError as error:
    print(error)
"""


def test_too_little_shared_memory_names_the_flag() -> None:
    """A file system of 4 KB is mounted in this test's own namespace."""
    mounted = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"']
    tried = subprocess.run(["env", *mounted, "sh", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("user namespaces are not allowed here")
    words = [*mounted, "sh", sys.executable, "-c", _WITHOUT_SHARED_MEMORY]
    said = subprocess.check_output(words, text=True, timeout=240)
    assert said.startswith("there is too little shared memory for the locks of the data loading")
    assert "--num-workers 0" in said


def _load_nothing() -> None:
    _leave_signals_to_parent(0)
    time.sleep(600)


def test_a_loading_process_that_is_ended_before_it_has_begun_ends() -> None:
    """It inherits the training process's handler, which only records the signal."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        processes = [_LoadingContext().Process(target=_load_nothing) for _ in range(5)]
        for process in processes:
            process.start()
            process.terminate()
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0] * 5
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in processes:
            process.kill()
            process.join()


def test_a_loading_process_without_memory_ends_without_a_traceback(capfd, monkeypatch) -> None:
    """It may fail in PyTorch's code, outside the part whose errors PyTorch sends to the parent."""

    def worker_loop(*arguments: object) -> None:
        raise ImportError("_generator.so: failed to map segment from shared object")

    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_loop", worker_loop)
    sampler = SingleSampler(total_samples=8, consumed_samples=0, micro_batch=2)
    with pytest.raises(ShortageError, match="data loading process"), lost_workers():
        next(build_loader([{}] * 8, sampler, num_workers=2, seed=1))
    assert capfd.readouterr().err == ""
