"""Tied parameters: copies of a parameter in several parts of a model, which stay equal.

In a pipeline, the first stage looks up word embeddings, and the last stage computes logits with
them. Every stage with layers of T5's encoder reads the encoder's relative position bias, and
likewise for the decoder. All copies start with the same values, because they have the same name,
and summing their gradients before the update keeps them equal. Parts in the same process share a
single parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis, Layout

WORD_EMBEDDING = "embedding.word.weight"


@dataclass(frozen=True)
class Tie:
    """A parameter with copies on several pipeline stages.

    Attributes:
        axis: The stages that sum their gradients, including all that have a copy.
        copy: This process's copy; `None` if this process has no copy and adds zeros.
        zeros: The zeros that a process without a copy adds, 1-D, one for each element of a copy's
            gradient.
    """

    axis: Axis
    copy: nn.Parameter | None
    zeros: Tensor | None = None

    def add_up(self) -> None:
        """Sum the gradients of all copies, in place. Collective over the axis."""
        if self.copy is not None:
            gradient: Tensor = self.copy.main_grad  # type: ignore[attr-defined]
        else:
            assert self.zeros is not None
            gradient = self.zeros.zero_()
        if gradient.numel():  # an empty shard is empty on every rank
            all_reduce(gradient, self.axis)


def tied_names(layout: Layout, *, word_embeddings: bool, tables: Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters that may have copies on several stages.

    Args:
        layout: The grid of processes as this process sees it.
        word_embeddings: Whether the output layer uses the word embeddings.
        tables: The names of the other parameters that may have a copy on any stage.
    """
    names = set(tables) if layout.pipeline.size > 1 else set()
    return frozenset(
        names | {WORD_EMBEDDING} if word_embeddings and layout.embedding.size > 1 else names
    )


def find_ties(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    layout: Layout,
    *,
    word_embeddings: bool,
    tables: Sequence[str],
    device: torch.device,
    gradient_dtype: torch.dtype,
) -> list[Tie]:
    """Return the ties of trained parameters that may have copies on several pipeline stages.

    Collective over the pipeline.

    Args:
        named_parameters: The parameters of this process. Their `main_grad` is the whole gradient or
            a shard of it.
        layout: The grid of processes as this process sees it.
        word_embeddings: Whether the output layer uses the word embeddings.
        tables: The names of the other parameters that may have a copy on any stage.
        device: The device of the gradients.
        gradient_dtype: The data type of the gradients.
    """
    parameters, ties = dict(named_parameters), []
    if word_embeddings and layout.embedding.size > 1 and parameters[WORD_EMBEDDING].requires_grad:
        ties.append(Tie(layout.embedding, parameters[WORD_EMBEDDING]))
    if layout.pipeline.size == 1 or not tables:
        return ties
    copies = [parameters.get(name) for name in tables]
    copies = [None if p is None or not p.requires_grad else p for p in copies]
    sizes = [0 if p is None else p.main_grad.numel() for p in copies]  # type: ignore[attr-defined]
    holders = [int(p is not None) for p in copies]
    sums = all_reduce(torch.tensor([sizes, holders], device=device), layout.pipeline).tolist()
    for copy, size, count in zip(copies, *sums, strict=True):
        if not count:
            continue  # frozen
        zeros = torch.zeros(size // count, dtype=gradient_dtype, device=device)
        ties.append(Tie(layout.pipeline, copy, zeros if copy is None else None))
    return ties


class SharedTable(nn.Module):
    """A module that occurs in several parts of a model, under the same name in each part."""

    def __init__(self) -> None:
        """Create a module that uses its own parameters."""
        super().__init__()
        self._original: tuple[SharedTable, ...] = ()  # a tuple, so that it is not a child module

    @property
    def original(self) -> SharedTable | None:
        """The module, in another model part of this process, that owns the parameters, if any."""
        return self._original[0] if self._original else None

    def use(self, original: SharedTable) -> None:
        """Use the parameters of `original` instead of this module's own."""
        for name, _ in list(self.named_parameters()):
            delattr(self, name)
        self._original = (original,)


def share_tables(parts: Iterable[nn.Module]) -> None:
    """Make the model parts in a process share each `SharedTable` instead of having copies."""
    tables: dict[str, SharedTable] = {}
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, SharedTable):
                table = tables.setdefault(name, module)
                if table is not module:
                    module.use(table)


def borrowed_parameters(part: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of other parts' tables that a part uses."""
    for module in part.modules():
        if isinstance(module, SharedTable) and module.original is not None:
            yield from module.original.parameters()
