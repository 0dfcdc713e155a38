"""GPU-specific behavior: times measured on its stream, random numbers from its seed."""

import time

import pytest
import torch

from megatron.device import Device, gpu_count

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]


def test_marks_time_the_work_between_them_and_wait_for_nothing():
    x = torch.randn(8192, 8192, device=DEVICE.torch_device)
    x @ x  # loads the library
    DEVICE.synchronize()
    started = time.perf_counter()
    before = DEVICE.mark()
    for _ in range(20):
        x @ x
    after = DEVICE.mark()
    queued = time.perf_counter() - started
    DEVICE.synchronize()
    finished = time.perf_counter() - started
    assert queued < 0.5 * finished
    assert DEVICE.seconds_between(before, after) == pytest.approx(finished, rel=0.2)


def test_there_is_a_gpu_to_count():
    assert gpu_count() >= 1


@pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")
def test_a_seed_is_of_the_device_not_of_the_current_one():
    other = Device.pick(1)
    with DEVICE.as_current():
        drawn = []
        for _ in range(2):
            other.seed(1234)
            drawn.append(torch.rand(8, device=other.torch_device))
    assert torch.equal(*drawn)


@pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")
def test_a_recording_is_of_its_device_not_of_the_current_one():
    other = Device.pick(1)
    x = torch.ones(8, device=other.torch_device)
    with DEVICE.as_current():
        DEVICE.recorder()(lambda: torch.ones(8, device=DEVICE.torch_device) + 1)
        doubled, replay = other.recorder().record(lambda: 2 * x)
        x.fill_(5)
        replay()
    other.synchronize()
    assert doubled.tolist() == [10.0] * 8
