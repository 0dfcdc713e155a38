"""Calling kernels: on the right GPU and stream, from every thread, with matching arguments."""

import ctypes
import struct
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.kernels import library as module
from megatron.kernels.driver import LaunchConfig
from megatron.kernels.fp8 import AMAX
from megatron.kernels.library import KernelError, KernelLibrary
from megatron.kernels.plans import KernelLaunch, Pointer


def plan(x, y, size, factor):
    """Launch two kernels: the second at an offset in y, the first only for odd sizes."""
    first = [
        KernelLaunch("column_sums_kernel<float>", (size,), (32, 2), (x, None, y, None, size, 7))
    ]
    second = KernelLaunch(
        "adam_kernel<float, float>", (1,), (1,), (y, y.after(8), x, None, x, size)
    )
    later = replace(second, parameters=(*second.parameters, factor, factor, factor, 0.5, factor))
    return [*(first if size % 2 else []), later]


KERNEL = module.Kernel("kernel", "pvid", plan)


class OnGpu(torch.Tensor):
    """A tensor that reports being on a GPU."""

    gpu = 0

    def get_device(self):
        return self.gpu


def on(gpu):
    tensor = torch.zeros(2).as_subclass(OnGpu)
    tensor.gpu = gpu
    return tensor


class Machine:
    """Two GPUs that record what they are told."""

    capability, is_gpu, wanted = (9, 0), True, 0

    def __init__(self, library, monkeypatch):
        self.current, self.record = 0, []
        library._launch = self.run
        library._driver = SimpleNamespace(
            make_current=lambda gpu: self.record.append(f"library on {gpu}"),
            allow_shared_memory=lambda *_: None,
            find=lambda _, name: name,
            error=lambda code: f"error {code}",
        )
        monkeypatch.setattr(module, "current_gpu", lambda: self.current)
        monkeypatch.setattr(module, "stream_handle", lambda gpu: 100 + gpu)
        monkeypatch.setattr(module, "Device", lambda _: self)

    def run(self, config, kernel, parameters, nothing):
        stream = LaunchConfig.from_address(config).stream
        self.record.append(f"run on {self.current}, stream {stream}")
        return 0

    @contextmanager
    def as_current(self):
        before, self.current = self.current, self.wanted
        yield
        self.current = before

    def launch(self, library, gpu):
        self.wanted, self.record = gpu, []
        library.launch(KERNEL, on(gpu), on(gpu), 2, 2.0)
        return self.record


@pytest.fixture
def fresh(emulated):
    return KernelLibrary(emulated.path, emulated._driver)


def test_the_gpu_is_set_when_it_changes_only(fresh, monkeypatch):
    machine = Machine(fresh, monkeypatch)
    first, second = "run on 0, stream 100", "run on 1, stream 101"
    assert machine.launch(fresh, 0) == ["library on 0", first]
    assert machine.launch(fresh, 0) == [first]
    assert machine.launch(fresh, 1) == ["library on 1", second]
    assert machine.current == 0
    assert machine.launch(fresh, 0) == ["library on 0", first]
    machine.current = 1  # PyTorch's has changed in between
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
        ((on(0), on(1), 1, 2.0), "tensors are on"),
        ((torch.zeros(2, 2).t(), None, 1, 2.0), "not contiguous"),
        ((1, None, 1, 2.0), "takes a tensor"),
        ((None, None, 1, 2.0), "takes tensors"),
    ):
        with pytest.raises(KernelError, match=said):
            fresh.launch(KERNEL, *arguments)
    with pytest.raises(KernelError, match="takes an integer, not Tensor"):
        fresh.launch(AMAX, torch.zeros(2), torch.zeros(()), 2, torch.zeros(1))
    with pytest.raises(KernelError, match="column_sums_kernel<float>: 2147483649 for a parameter"):
        fresh.launch(KERNEL, on(0), on(0), 2**31 + 1, 2.0)


class Recorder:
    """Records what the driver is given at each launch."""

    def __init__(self, library, monkeypatch):
        self.machine = Machine(library, monkeypatch)
        self.calls = []
        library._launch = self.run

    def run(self, config, kernel, parameters, nothing):
        config = LaunchConfig.from_address(config)
        letters = module.parameters()[kernel.partition("<")[0]]
        addresses = (ctypes.c_void_p * len(letters)).from_address(parameters)
        values = []
        for letter, address in zip(letters, addresses, strict=True):
            size = struct.calcsize(letter)
            values += struct.unpack(letter, ctypes.string_at(address, size))
        grid, block = list(config.grid), list(config.block)
        self.calls.append((kernel, grid, block, config.attribute_count, values))
        return 0


def test_the_driver_gets_every_parameter_in_its_type(fresh, monkeypatch):
    machine = Recorder(fresh, monkeypatch)
    x, y = on(0), on(0)
    a, b = x.data_ptr(), y.data_ptr()
    for size, factor in ((3, 2.5), (4, 1.5), (3, -1.0)):
        machine.calls.clear()
        fresh.launch(KERNEL, x, y, size, factor)
        first = ("column_sums_kernel<float>", [size, 1, 1], [32, 2, 1], 0, [a, 0, b, 0, size, 7])
        numbers = [size, factor, factor, factor, 0.5, factor]
        second = (
            "adam_kernel<float, float>",
            [1, 1, 1],
            [1, 1, 1],
            0,
            [b, b + 8, a, 0, a, *numbers],
        )
        assert machine.calls == ([first, second] if size == 3 else [second])
    assert len(fresh._thread.plans) == 2


def test_only_hopper_and_later_start_a_kernel_before_the_one_ahead_ends(fresh, monkeypatch):
    machine = Recorder(fresh, monkeypatch)
    early = module.Kernel("early", "p", lambda x: [replace(plan(x, x, 2, 1.0)[0], early=True)])
    for capability, count in (((8, 0), 0), ((9, 0), 1), ((10, 0), 1)):
        fresh._thread.plans.clear()
        machine.machine.capability = capability
        fresh.launch(early, on(0))
        assert machine.calls[-1][3] == count


def test_plans_do_not_pile_up(fresh, monkeypatch):
    Machine(fresh, monkeypatch)
    monkeypatch.setattr(module, "MAX_PLANS", 3)
    for size in range(2, 20, 2):
        fresh.launch(KERNEL, on(0), on(0), size, 2.0)
    assert 1 <= len(fresh._thread.plans) <= 3


def test_a_plan_that_does_not_fit_its_kernel_is_refused(fresh, monkeypatch):
    Machine(fresh, monkeypatch)
    for parameters, said in (
        ((Pointer(0),), "takes 3 parameters"),
        ((Pointer(0), Pointer(0), Pointer(0)), "Pointer.*for a parameter 'q'"),
        ((0.5, Pointer(0), 4), "0.5 for a parameter 'P'"),
    ):
        launch = KernelLaunch("take_gradient_kernel<float, true>", (1,), (1,), parameters)
        with pytest.raises(KernelError, match=said):
            fresh.launch(module.Kernel("wrong", "p", lambda _, x=launch: [x]), on(0))
    unknown = KernelLaunch("unknown_kernel", (1,), (1,), ())
    with pytest.raises(KernelError, match="unknown_kernel is not among the compiled kernels"):
        fresh.launch(module.Kernel("unknown", "p", lambda _: [unknown]), on(0))


def test_an_error_of_the_driver_is_raised_by_name(emulated):
    empty = KernelLaunch(
        "take_gradient_kernel<float, true>", (0,), (1,), (Pointer(0), Pointer(0), 4)
    )
    with pytest.raises(KernelError, match=r"^empty: emulated error \(see emulator.cpp\)$"):
        emulated.launch(module.Kernel("empty", "p", lambda _: [empty]), torch.zeros(4))
