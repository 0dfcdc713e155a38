"""Activations moved to host memory after a module's forward pass and back for its backward pass.

Both copies overlap with the computation of other modules. The tensors of the most recent modules
stay on the device until a later module begins, so the backward pass starts without waiting.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from megatron.device import CopyStream, QueuedCopy

# The number of module calls whose tensors may be in transit to the host. The device waits for the
# copies of any earlier call.
_MAX_CALLS_IN_TRANSIT = 2


class _SavedTensor:
    """A tensor saved by autograd: on the device, in host memory, or both.

    Args:
        source: The tensor on the device.
        host: Host memory of the same shape.
        call: The module call that saves the tensor.
    """

    def __init__(self, source: Tensor, host: Tensor, call: _ModuleCall) -> None:
        """Start with the tensor on the device only."""
        self.source: Tensor | None = source
        self.host, self.call = host, call
        self.to_host: QueuedCopy | None = None
        self.to_device: QueuedCopy | None = None


class _ModuleCall:
    """One call of a module, whose saved tensors are copied to the host and back together.

    Args:
        previous: The previous call in the same forward pass, whose tensors the backward pass needs
            next.
    """

    def __init__(self, previous: _ModuleCall | None) -> None:
        """Create a call without saved tensors."""
        self.previous = previous
        # Only autograd owns a tensor, so the tensor is freed once the backward pass has used it.
        self.saved: list[weakref.ref[_SavedTensor]] = []

    def tensors(self) -> list[_SavedTensor]:
        """Return the saved tensors that the backward pass has not used yet."""
        return [saved for reference in self.saved if (saved := reference()) is not None]


class HostActivations:
    """Tensors that modules save in host memory for the backward pass.

    Args:
        device: The device on which the modules run.
        modules: The names of the modules whose tensors are copied to the host.
        min_elements: The minimum number of elements of a tensor that is copied to the host.

    Attributes:
        bytes_sent: The number of bytes copied to the host so far.
    """

    def __init__(
        self,
        device: torch.device,
        modules: frozenset[str],
        min_elements: int,
    ) -> None:
        """Create an object that stores no tensors yet."""
        self._device, self._modules, self._min_elements = device, modules, min_elements
        self._out, self._back = CopyStream(device), CopyStream(device)
        self._last: _ModuleCall | None = None
        self._in_transit: deque[_ModuleCall] = deque()
        self._weights = set[int]()
        # A tensor that two modules save, as the output of one and the input of the other, is copied
        # only once.
        self._saved: dict[tuple[object, ...], weakref.ref[_SavedTensor]] = {}
        self.bytes_sent = 0

    def offloading(self, module: str) -> Callable[[], AbstractContextManager[object]]:
        """Return a function that creates a context manager for each call of a module.

        The context manager makes autograd save tensors in host memory if `modules` contains the
        module.

        Args:
            module: The name of the module.
        """
        return self._begin if module in self._modules else nullcontext

    def begin_pass(self, weights: Iterable[nn.Parameter]) -> None:
        """Record the beginning of a forward pass whose backward pass needs no earlier tensors.

        Args:
            weights: The weights of the modules, which stay on the device.
        """
        self._last = None
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}

    def _begin(self) -> AbstractContextManager[object]:
        """Return the context manager for one call."""
        if not torch.is_grad_enabled():
            return nullcontext()
        call = self._last = _ModuleCall(self._last)
        self._in_transit.append(call)
        while len(self._in_transit) > _MAX_CALLS_IN_TRANSIT:
            for saved in self._in_transit.popleft().tensors():
                assert saved.to_host is not None
                saved.to_host.delay_device()  # before other tensors use the memory
                saved.source = None

        def pack(x: Tensor) -> Tensor | _SavedTensor:
            is_large = x.device.type == self._device.type and x.numel() >= self._min_elements
            # Autograd passes different tensor objects that share the parameters' memory.
            if is_large and x.untyped_storage().data_ptr() not in self._weights:
                return self._pack(x.detach(), call)
            return x.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def _pack(self, x: Tensor, call: _ModuleCall) -> _SavedTensor:
        key = x.data_ptr(), x.shape, x.stride(), x.dtype
        existing = self._saved.get(key, lambda: None)()
        if existing is not None and existing.source is not None:
            return existing
        host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        saved = _SavedTensor(x, host, call)
        self._out.wait_for_device()  # the module has computed the tensor by now
        saved.to_host = self._out.copy(host, x)
        self.bytes_sent += host.numel() * host.itemsize
        call.saved.append(weakref.ref(saved))
        self._saved = {
            k: reference for k, reference in self._saved.items() if reference() is not None
        }
        self._saved[key] = call.saved[-1]
        return saved

    def _unpack(self, saved: Tensor | _SavedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._fetch(saved.call)
        if saved.call.previous is not None:
            self._fetch(saved.call.previous)
        assert saved.source is not None
        if saved.to_device is not None:
            saved.to_device.delay_device()
        return saved.source

    def _fetch(self, call: _ModuleCall) -> None:
        """Start copying a call's tensors back, except those that are still on the device."""
        offloaded = [saved for saved in call.tensors() if saved.source is None]
        if not offloaded:
            return
        for saved in offloaded:
            saved.source = torch.empty_like(saved.host, device=self._device)
        self._back.wait_for_device()  # the memory may have belonged to other tensors
        for saved in offloaded:
            assert saved.source is not None
            saved.to_device = self._back.copy(saved.source, saved.host)
