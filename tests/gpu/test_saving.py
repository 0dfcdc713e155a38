"""Saves of a GPU's tensors in the background."""

import time

import pytest
import torch

from megatron.checkpoint.background import BackgroundSaver
from megatron.checkpoint.entries import Entry
from megatron.checkpoint.store import save
from megatron.device import Device
from megatron.parallel.layout import Layout

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


def test_copies_leave_the_device_fast_and_are_those_of_the_call(tmp_path):
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
    waited = saver.start(1, state, {}, since=time.perf_counter())
    for tensor in tensors.values():
        tensor.zero_()  # the training goes on
    saver.wait()
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert waited < size / 10e9 + 0.1  # a slow link has 25 GB/s, pageable memory 3
    name = "iter_0000001/rank_00000.safetensors"
    assert (tmp_path / "now" / name).read_bytes() == (tmp_path / "later" / name).read_bytes()
