"""Activations moved to host memory after a module's forward pass and back for its backward pass.

Both copies overlap with the computation of other modules. The tensors of the latest modules stay on
the device until a later module begins, so the backward pass starts without waiting.
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
# copies of the call before these.
_UNDER_WAY = 2


class _Kept:
    """A tensor that autograd keeps: on the device, in host memory, or both.

    Args:
        source: The tensor on the device.
        host: Host memory of the same shape.
        call: The module call that keeps the tensor.
    """

    def __init__(self, source: Tensor, host: Tensor, call: _Call) -> None:
        """Start with the tensor on the device only."""
        self.source: Tensor | None = source
        self.host, self.call = host, call
        self.left: QueuedCopy | None = None
        self.returned: QueuedCopy | None = None


class _Call:
    """One call of a module, whose tensors go to the host and come back together.

    Args:
        before: The previous call in the same forward pass, whose tensors the backward pass needs
            next.
    """

    def __init__(self, before: _Call | None) -> None:
        """Create an object without tensors."""
        self.before = before
        # Autograd is the owner, so that a tensor is freed as soon as backward has used it.
        self.kept: list[weakref.ref[_Kept]] = []

    def tensors(self) -> list[_Kept]:
        """Return the tensors that backward has not used yet."""
        return [kept for reference in self.kept if (kept := reference()) is not None]


class HostActivations:
    """Tensors that modules keep in host memory for the backward pass.

    Args:
        device: The device on which the modules run.
        modules: The names of the modules whose tensors go to the host.
        least: The minimum number of elements of a tensor that is moved.

    Attributes:
        bytes_sent: The number of bytes copied to the host so far.
    """

    def __init__(
        self,
        device: torch.device,
        modules: frozenset[str],
        least: int,
    ) -> None:
        """Create an object without tensors."""
        self._device, self._modules, self._least = device, modules, least
        self._out, self._back = CopyStream(device), CopyStream(device)
        self._last: _Call | None = None
        self._under_way: deque[_Call] = deque()
        self._weights = set[int]()
        # A tensor that two modules keep, such as the output of one and input of the other, is
        # copied once.
        self._known: dict[tuple[object, ...], weakref.ref[_Kept]] = {}
        self.bytes_sent = 0

    def keeping(self, module: str) -> Callable[[], AbstractContextManager[object]]:
        """Return a function that creates a context manager for one call of a module.

        Args:
            module: The name of the module.
        """
        return self._begin if module in self._modules else nullcontext

    def begin_pass(self, weights: Iterable[nn.Parameter]) -> None:
        """Record the beginning of a forward pass whose backward pass needs no earlier tensors.

        Args:
            weights: The weights of its modules, which stay on the device.
        """
        self._last = None
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}

    def _begin(self) -> AbstractContextManager[object]:
        """Return the context manager for one call."""
        if not torch.is_grad_enabled():
            return nullcontext()
        call = self._last = _Call(self._last)
        self._under_way.append(call)
        while len(self._under_way) > _UNDER_WAY:
            for kept in self._under_way.popleft().tensors():
                assert kept.left is not None
                kept.left.delay_device()  # before other tensors use the memory
                kept.source = None

        def pack(x: Tensor) -> Tensor | _Kept:
            is_large = x.device.type == self._device.type and x.numel() >= self._least
            # Autograd passes objects other than the parameters, with the same memory.
            if is_large and x.untyped_storage().data_ptr() not in self._weights:
                return self._pack(x.detach(), call)
            return x.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def _pack(self, x: Tensor, call: _Call) -> _Kept:
        key = x.data_ptr(), x.shape, x.stride(), x.dtype
        known = self._known.get(key, lambda: None)()
        if known is not None and known.source is not None:
            return known
        host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        kept = _Kept(x, host, call)
        self._out.wait_for_device()  # the module has computed the tensor by now
        kept.left = self._out.copy(host, x)
        self.bytes_sent += host.numel() * host.itemsize
        call.kept.append(weakref.ref(kept))
        self._known = {k: one for k, one in self._known.items() if one() is not None}
        self._known[key] = call.kept[-1]
        return kept

    def _unpack(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._fetch(kept.call)
        if kept.call.before is not None:
            self._fetch(kept.call.before)
        assert kept.source is not None
        if kept.returned is not None:
            kept.returned.delay_device()
        return kept.source

    def _fetch(self, call: _Call) -> None:
        """Start copying a call's tensors back, except those that are still on the device."""
        away = [kept for kept in call.tensors() if kept.source is None]
        if not away:
            return
        for kept in away:
            kept.source = torch.empty_like(kept.host, device=self._device)
        self._back.wait_for_device()  # the memory may have belonged to other tensors
        for kept in away:
            assert kept.source is not None
            kept.returned = self._back.copy(kept.source, kept.host)
