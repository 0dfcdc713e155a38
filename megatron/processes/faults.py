"""Faults injected into a process (`--fault-inject`), to test how a run survives them.

Faults are triggered where the journal records what the process does next, so a run without faults
executes no extra code. Hooks on the model's modules corrupt values.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.reliability import Fault
from megatron.device import StreamMarks
from megatron.errors import print_to_stderr
from megatron.parallel.journal import Journal, Transfer

_EXIT_CODE = 1
_SPIKE = 1000.0  # factor by which the fault "spike" multiplies values
_CORRUPTING = ("nan", "spike", "flip")
_FULL_BYTES = 4096  # the largest file that a process can write after the fault "full"
_FOREVER = 1e9  # seconds
# The operations in the journal at which faults are triggered. All others are operations of the
# pipeline schedule.
_OPERATIONS = {
    "loading of the checkpoint": "load",
    "loading of micro-batch": "data",
    "first forward pass": "forward",
    "forward": "forward",
    "backward": "backward",
    "optimizer step": "optimizer",
    "saving a checkpoint": "save",
}
# The highest bit of the fraction: flipping it changes a value by a quarter to a half.
_FLIPPED = {
    torch.float32: (torch.int32, 22),
    torch.bfloat16: (torch.int16, 6),
    torch.float16: (torch.int16, 9),
    torch.float64: (torch.int64, 51),
}


class InjectedFaultError(Exception):
    """Raised when the fault "exception" is triggered."""


class FaultyJournal(Journal):
    """A journal that injects faults at the points that it records.

    Args:
        marks: The marks that track a GPU's progress; `None` on a CPU.
        faults: The faults of this process in this attempt.
    """

    def __init__(self, marks: StreamMarks | None, faults: Sequence[Fault]) -> None:
        """Store the faults to inject."""
        super().__init__(marks)
        self._faults = list(faults)
        self._modules: list[nn.Module] = []
        self._last_iteration = 0
        self._last = (0, "")
        self._factor = 1.0  # slowdown of the current operation
        self._since = self._waited = self._waits_since = 0.0

    def enter(self, operation: object) -> None:
        """Record that the process is in `operation`, and trigger the faults that are due."""
        if self._factor > 1.0:  # a fault prolongs the operation that is ending
            if self._marks is not None:
                torch.accelerator.synchronize()
            own_seconds = time.monotonic() - self._since - self._waited
            time.sleep(max(0.0, own_seconds) * (self._factor - 1.0))
        super().enter(operation)
        if self.iteration > self._last_iteration:
            self._last_iteration = self.iteration
            self._trigger("step")
        text = str(operation)
        point = next((name for start, name in _OPERATIONS.items() if text.startswith(start)), None)
        if point == "data":
            self._trigger(point)
        elif point is not None and (self.iteration, text) != self._last:
            # After loading data within a forward pass, the process is in that pass again.
            self._last = (self.iteration, text)
            self._trigger(point)
        factors = [
            fault.factor
            for fault in self._faults
            if fault.factor and self.iteration >= fault.step and fault.point in (point, "step")
        ]
        self._factor = max(factors, default=1.0) if point is not None else 1.0
        self._since, self._waited = time.monotonic(), 0.0

    def begin_wait(self, transfer: Transfer) -> None:
        """Record that the process is waiting. Slowdown faults do not prolong waits."""
        super().begin_wait(transfer)
        self._waits_since = time.monotonic()

    def end_wait(self) -> None:
        """Record that the process is no longer waiting."""
        super().end_wait()
        self._waited += time.monotonic() - self._waits_since

    @contextmanager
    def external_collective(self, kind: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """Record a collective that another library runs, and count its time as waiting."""
        with super().external_collective(kind, ranks):
            yield
        self._waited += time.monotonic() - self._waits_since

    def attach(self, modules: list[nn.Module]) -> None:
        """Attach the faults that corrupt values to these modules of the model."""
        self._modules = modules
        for module in modules:
            module.register_forward_hook(self._corrupt_output)

    def _due(self, point: str, *, in_hook: bool = False) -> list[Fault]:
        """Return the faults that are due, and remove those that are triggered only once."""
        due = []
        for fault in list(self._faults):
            is_slow, corrupts = fault.kind == "slow", fault.kind in _CORRUPTING
            is_now = self.iteration == fault.step or (is_slow and self.iteration > fault.step)
            if fault.point != point or not is_now or in_hook != (corrupts and point != "step"):
                continue
            if not is_slow or self.iteration == fault.step:
                print_to_stderr(f"fault injected at {time.time():.3f}: {fault}")
            if not is_slow:
                self._faults.remove(fault)
            due.append(fault)
        return due

    def _trigger(self, point: str) -> None:
        for fault in self._due(point):
            if fault.kind == "flip":
                parameter = next(self._modules[0].parameters())
                flip_bit(parameter.detach())
            elif fault.kind in ("slow", "hang"):
                time.sleep(fault.seconds if fault.kind == "slow" else _FOREVER)
            elif fault.kind == "exception":
                raise InjectedFaultError(str(fault))
            elif fault.kind == "full":
                _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_BYTES, hard_limit))
            elif fault.seconds:
                timer = threading.Timer(fault.seconds, _end, (fault.kind,))
                timer.daemon = True
                timer.start()
            else:
                _end(fault.kind)

    def _corrupt_output(self, module: nn.Module, inputs: object, output: Any) -> Any:
        """Corrupt the output of a forward pass, or the gradient that its backward pass receives."""
        if not module.training:
            return None
        for fault in self._due("forward", in_hook=True):
            output = _map(_CORRUPTIONS[fault.kind], output)
        for fault in self._due("backward", in_hook=True):
            _map(methodcaller("register_hook", _CORRUPTIONS[fault.kind]), output)
        return output


def attach_faults(journal: Journal, modules: list[nn.Module]) -> None:
    """Attach this process's faults, if any, to its model, so that they can corrupt values."""
    if isinstance(journal, FaultyJournal):
        journal.attach(modules)


def _end(kind: str) -> None:
    """Kill, stop or exit this process without any message."""
    if kind == "exit":
        os._exit(_EXIT_CODE)
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def flip_bit(tensor: Tensor) -> Tensor:
    """Flip the most significant fraction bit of one element in place, and return the tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    integer_dtype, bit = _FLIPPED[local.dtype]
    bits = local.view(-1).view(integer_dtype)
    bits[bits.numel() // 2] ^= 1 << bit
    return tensor


_CORRUPTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda tensor: tensor * math.nan,
    "spike": lambda tensor: tensor * _SPIKE,
    "flip": lambda tensor: flip_bit(tensor.contiguous().clone()),
}


def _map(change: Callable[[Tensor], Any], output: Any) -> Any:
    """Apply a function to every tensor in a module's output that requires gradients."""
    if isinstance(output, Tensor):
        return change(output) if output.requires_grad else output
    if isinstance(output, Mapping):
        return {key: _map(change, value) for key, value in output.items()}
    if isinstance(output, tuple | list):
        return type(output)(_map(change, value) for value in output)
    return output
