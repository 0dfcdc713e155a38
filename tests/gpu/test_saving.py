"""Saving tensors that are on a GPU."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import shard
from megatron.checkpoint.background import BackgroundSaver
from megatron.checkpoint.entries import Entry
from megatron.device import CopyStream, Device, StagingBuffer, gpu_count
from megatron.parallel.layout import Layout
from tests.checkpoint.states import save

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]


def test_host_memory_is_pinned_and_given_back():
    for _ in range(3):
        buffer = DEVICE.host_buffer(1 << 28)
        assert buffer.is_pinned()
        del buffer
    source = torch.ones(1 << 28, dtype=torch.uint8, device=DEVICE.torch_device)
    buffer = DEVICE.host_buffer(1 << 28)
    buffer.copy_(source, non_blocking=True)
    DEVICE.synchronize()
    assert int(buffer.sum()) == 1 << 28


@pytest.mark.parametrize("stable", [(), ("a", "e")])
def test_copies_leave_the_device_fast_and_are_those_of_the_call(tmp_path, stable):
    shapes = {"a": (1 << 28,), "b": (1 << 14, 1 << 13), "c": ()}  # 1.6 GB
    tensors = {name: torch.randn(s, device=DEVICE.torch_device) for name, s in shapes.items()}
    tensors["d"] = tensors["b"].t()  # not contiguous
    tensors["e"] = tensors["b"].bfloat16()
    state = {name: Entry.whole(tensor) for name, tensor in tensors.items()}
    layout = Layout.single()
    save(tmp_path / "now", 1, state, {}, layout)
    saver = BackgroundSaver(
        tmp_path / "later", state, layout, layout, DEVICE, keep=None, report=lambda *_: None
    )
    DEVICE.synchronize()
    start_time = time.perf_counter()
    queued = saver.start(1, state, {}, since=start_time, stable=stable)
    waited = time.perf_counter() - start_time
    for name in tensors.keys() - set(stable):
        tensors[name].zero_()  # training continues
    queued.delay_device()
    for name in stable:
        tensors[name].zero_()
    saver.wait()
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert (queued.delay > 0.0) == bool(stable)
    assert waited + queued.delay < size / 10e9 + 0.1  # a slow link has 25 GB/s, pageable memory 3
    now, later = (
        {path.name: path.read_bytes() for path in (tmp_path / way).glob("iter_*/rank_*")}
        for way in ("now", "later")
    )
    assert set(now) == {"rank_00000.safetensors", "rank_00000_1.safetensors"}
    assert now == later


def test_a_copy_that_is_done_delays_nothing():
    source = torch.ones(1 << 24, device=DEVICE.torch_device)
    target = DEVICE.host_buffer(source.nbytes).view(torch.float32)
    stream = CopyStream(DEVICE.torch_device, is_timed=True)
    stream.wait_for_device()
    queued = stream.copy(target, source)
    queued.wait()
    assert queued.delay == 0.0
    queued.delay_device()
    DEVICE.synchronize()
    assert queued.delay == 0.0
    assert torch.equal(target, source.cpu())


def test_pieces_are_the_tensors_bytes_and_a_writer_may_leave_early():
    tensor = torch.randint(0, 256, (10_000,), device=DEVICE.torch_device).to(torch.uint8)
    expected = tensor.cpu().numpy().tobytes()
    for size in (1, 4096, 10_000, 1 << 20):
        buffer, part = StagingBuffer(DEVICE, size), 50 if size == 1 else 10_000
        assert b"".join(map(bytes, buffer.download(tensor[:part]))) == expected[:part]
        first = buffer.download(tensor)
        assert bytes(next(first)) == expected[:size]
        first.close()
        assert b"".join(map(bytes, buffer.download(tensor[:part]))) == expected[:part]


def test_bytes_of_any_host_memory_are_brought():
    data = torch.randint(0, 256, (10_000,)).to(torch.uint8)
    for size in (999, 5000, 10_000, 1 << 20):
        target = torch.empty(10_000, dtype=torch.uint8, device=DEVICE.torch_device)
        StagingBuffer(DEVICE, size).upload(data, target.zero_())
        assert torch.equal(target.cpu(), data)


def test_a_save_that_is_waited_for_takes_little_host_memory(tmp_path):
    tensors = {str(i): torch.zeros(1 << 28, device=DEVICE.torch_device) for i in range(2)}
    save(tmp_path, 1, {"a": Entry.whole(torch.zeros(()))}, {}, Layout.single())
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak resident memory
    before = _most_resident()
    save(tmp_path, 2, {n: Entry.whole(t) for n, t in tensors.items()}, {}, Layout.single())
    taken = _most_resident() - before
    assert taken < 2.5 * shard.THREADS * shard.PIECE + (64 << 20)  # of 2 GiB


def _most_resident():
    """Return the peak resident memory in bytes."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


_SECOND_GPU = """
import sys, time, torch
from megatron.checkpoint.background import BackgroundSaver
from megatron.checkpoint.entries import Entry
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.reader import restore
from tests.checkpoint.states import save
from megatron.device import Device
from megatron.parallel.layout import Layout

device, layout = Device.pick(1), Layout.single()
device.activate()
state = {n: Entry.whole(torch.ones(1 << 22, device=device.torch_device)) for n in "abcdefgh"}
save(sys.argv[1], 1, state, {}, layout)
saver = BackgroundSaver(sys.argv[1], state, layout, layout, device, keep=None, report=print)
saver.start(2, state, {}, since=time.perf_counter())
saver.wait()
restore(open_checkpoint(sys.argv[1]), state)
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0)
"""


@pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")
def test_threads_of_the_second_gpu_open_nothing_on_the_first(tmp_path):
    command = [sys.executable, "-c", _SECOND_GPU, str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
