"""What a CPU can show of the device: buffers, peaks by name, memory and marks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from megatron import device as module
from megatron.device import Device, StagingBuffers, StreamMarks, cuda_release, datasheet_flops


def test_each_thread_keeps_a_staging_buffer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "StagingBuffer", lambda device, size: [device, size])
    buffers, gpu, both = StagingBuffers(7), torch.device("cuda", 3), Barrier(2)

    def take(_: int) -> tuple[object, object]:
        both.wait()  # so that two threads run
        return buffers.for_device(gpu), buffers.for_device(gpu)

    with ThreadPoolExecutor(2) as pool:
        (first, again), (other, _) = pool.map(take, range(2))
    assert first == [Device(gpu), 7]
    assert first is again
    assert first is not other


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 125),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
    ],
)
def test_the_peak_of_the_datasheet(name: str, teraflops: int) -> None:
    assert datasheet_flops(name) == teraflops * 1e12
    assert Device.cpu().peak_flops is None


@pytest.mark.parametrize(("version", "release"), [("12.8", "12"), ("13.0", "13"), (None, "")])
def test_the_release_of_cuda_is_its_major_version(
    monkeypatch: pytest.MonkeyPatch, version: str | None, release: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert cuda_release() == release


def test_a_host_buffer_is_zero_and_may_be_empty() -> None:
    buffer = Device.cpu().host_buffer(10_000)
    assert buffer.dtype == torch.uint8
    assert buffer.numel() == 10_000
    assert not buffer.any()
    Device.cpu().host_buffer(0)
    with pytest.raises(MemoryError, match="bytes of memory: "):
        Device.cpu().host_buffer(2**62)


def test_the_memory_of_a_cpu_process_is_its_resident_memory() -> None:
    before = Device.cpu().memory()
    ballast = torch.ones(2**24)  # 64 MB
    after = Device.cpu().memory()
    grown = after.allocated - before.allocated
    assert 0.9 * 2**26 < grown < 2 * 2**26
    assert after.reserved == after.allocated <= after.peak_allocated == after.peak_reserved
    del ballast


def test_marks_count_how_far_the_queue_is_behind() -> None:
    """Marks are numbered modulo 2**16, so a run may queue any number of them."""
    marks = StreamMarks(torch.device("cpu"))
    assert marks.lag(3) == 3
    for number in (5, 2**16 - 1, 2**16, 2**17 + 1):
        marks.put(number)
        assert marks.lag(number) == 0
        assert marks.lag(number + 4) == 4
        assert marks.lag(number + 2**16) == 0
