"""Tensors that are read when something is done with them: a checkpoint of which none is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map


class DeferredTensor(torch.Tensor):
    """Has shape and type from the start; every operation on it reads the values anew.

    To be written once: the values live as long as the operation's result.
    """

    read: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]
    ) -> DeferredTensor:
        tensor: DeferredTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        tensor.read = read
        return tensor

    # Results are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        args, kwargs = tree_map(_values, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _values(value: Any) -> Any:
    if not isinstance(value, DeferredTensor):
        return value
    values = value.read()
    assert values.shape == value.shape and values.dtype == value.dtype, (value.shape, values.shape)
    return values
