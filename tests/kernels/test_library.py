"""Calling kernels: on the right GPU and stream, from every thread, with arguments that fit."""

import ctypes
import threading
from contextlib import contextmanager

import pytest
import torch

from megatron.kernels import library as module
from megatron.kernels.fp8 import AMAX
from megatron.kernels.library import KernelError, KernelLibrary

KERNEL = module.Kernel("kernel", "pvid")


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    gpu = 0

    def get_device(self):
        return self.gpu


def on(gpu):
    tensor = torch.zeros(2).as_subclass(OnGpu)
    tensor.gpu = gpu
    return tensor


class Machine:
    """Two GPUs that keep a record of what they are told."""

    def __init__(self, library, monkeypatch):
        self.current, self.record = 0, []
        library._loaded.set_device = lambda gpu: self.record.append(f"library on {gpu}") or 0
        library._functions["kernel"] = self.run
        monkeypatch.setattr(module, "current_gpu", lambda: self.current)
        monkeypatch.setattr(module, "stream_handle", lambda gpu: 100 + gpu)
        monkeypatch.setattr(module, "Device", lambda _: self)

    def run(self, *values):
        self.record.append(f"run on {self.current}, stream {values[-1]}")
        return 0

    @contextmanager
    def as_current(self):
        before, self.current = self.current, self.wanted
        yield
        self.current = before

    def launch(self, library, gpu):
        self.wanted, self.record = gpu, []
        library.launch(KERNEL, on(gpu), on(gpu), 1, 2.0)
        return self.record


@pytest.fixture
def fresh(emulated):
    return KernelLibrary(emulated.path)


def test_the_gpu_is_set_when_it_changes_only(fresh, monkeypatch):
    machine = Machine(fresh, monkeypatch)
    first, second = "run on 0, stream 100", "run on 1, stream 101"
    assert machine.launch(fresh, 0) == ["library on 0", first]
    assert machine.launch(fresh, 0) == [first]
    assert machine.launch(fresh, 1) == ["library on 1", second]
    assert machine.current == 0
    assert machine.launch(fresh, 0) == ["library on 0", first]
    machine.current = 1  # PyTorch's has changed meanwhile
    assert machine.launch(fresh, 0) == ["library on 0", first]
    assert machine.launch(fresh, 1) == ["library on 1", second]
    assert machine.launch(fresh, 1) == [second]


def test_each_thread_has_its_own(fresh, monkeypatch):
    machine = Machine(fresh, monkeypatch)
    machine.launch(fresh, 0)
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(machine.launch(fresh, 0)))
    thread.start()
    thread.join()
    assert seen[0] == "library on 0"
    assert len(machine.launch(fresh, 0)) == 1


def test_arguments_that_do_not_fit(fresh, monkeypatch):
    Machine(fresh, monkeypatch)
    for arguments, said in (
        ((on(0), on(0), 1), "takes 4 arguments"),
        ((on(0), on(1), 1, 2.0), "tensors of"),
        ((torch.zeros(2, 2).t(), None, 1, 2.0), "not contiguous"),
        ((1, None, 1, 2.0), "takes a tensor"),
        ((None, None, 1, 2.0), "takes tensors"),
    ):
        with pytest.raises(KernelError, match=said):
            fresh.launch(KERNEL, *arguments)
    with pytest.raises(ctypes.ArgumentError):
        fresh.launch(AMAX, torch.zeros(2), torch.zeros(()), 2, torch.zeros(1))
