"""Parameters that several parts of a model hold: copies, kept equal.

Under a pipeline the first stage looks words up, and the last one scores them; every stage with
layers of a T5's encoder, or decoder, reads that one's relative positions. All copies start with the
same values (their name is the same); adding their gradients before the update keeps them the same.
Parts in one process share one parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis, Layout

WORDS = "embedding.word.weight"


@dataclass(frozen=True)
class Tie:
    """One such parameter, which other stages have too.

    Attributes:
        axis: the stages that add up, among them all that hold a copy.
        copy: this process's; `None` if it has none, and adds nothing.
        nothing: what it adds then, like a copy's gradient.
    """

    axis: Axis
    copy: nn.Parameter | None
    nothing: Tensor | None = None

    def add_up(self) -> None:
        """Add the copies' gradients. Collective over the axis."""
        if self.copy is not None:
            gradient: Tensor = self.copy.main_grad  # type: ignore[attr-defined]
        else:
            assert self.nothing is not None
            gradient = self.nothing.zero_()
        if gradient.numel():  # of a shard there may be none, then nowhere
            all_reduce(gradient, self.axis)


def tied_names(layout: Layout, *, words: bool, tables: Sequence[str]) -> frozenset[str]:
    """Return the names of parameters that other stages may hold too.

    Args:
        layout: this process among the others.
        words: the output layer uses the word embeddings.
        tables: names of parameters that any stages may hold.
    """
    names = set(tables) if layout.pipeline.size > 1 else set()
    return frozenset(names | {WORDS} if words and layout.embedding.size > 1 else names)


def tie_words(
    named_parameters: Iterable[tuple[str, nn.Parameter]], layout: Layout, *, is_tied: bool
) -> list[Tie]:
    """Return the word embeddings as a tie, if another stage holds them too.

    Args:
        named_parameters: held by this process.
        layout: this process among the others.
        is_tied: the output layer uses the word embeddings.
    """
    if layout.embedding.size == 1 or not is_tied:
        return []
    return [Tie(layout.embedding, dict(named_parameters)[WORDS])]


def tie_tables(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    names: Sequence[str],
    layout: Layout,
    *,
    device: torch.device,
    gradient_dtype: torch.dtype,
) -> list[Tie]:
    """Return the parameters of which any stages of a pipeline hold copies.

    Collective over the pipeline.

    Args:
        named_parameters: held by this process, with their `main_grad`, which may be of a shard.
        names: of the parameters.
        layout: this process among the others.
        device: of the gradients.
        gradient_dtype: type of the gradients.
    """
    if layout.pipeline.size == 1 or not names:
        return []
    held = dict(named_parameters)
    copies = [held.get(name) for name in names]
    sizes = [0 if one is None else one.main_grad.numel() for one in copies]  # type: ignore[attr-defined]
    holders = [int(one is not None) for one in copies]
    sums = all_reduce(torch.tensor([sizes, holders], device=device), layout.pipeline).tolist()
    ties = []
    for copy, size, count in zip(copies, *sums, strict=True):
        absent = torch.zeros(size // count, dtype=gradient_dtype, device=device)
        ties.append(Tie(layout.pipeline, copy, absent if copy is None else None))
    return ties


class SharedTable(nn.Module):
    """A module that several parts of a model have, each under the same name."""

    def __init__(self) -> None:
        """Begin with parameters of its own."""
        super().__init__()
        self._original: tuple[SharedTable, ...] = ()  # in a tuple: no child of this module

    @property
    def original(self) -> SharedTable | None:
        """The module of another part of the model, in this process, that has the parameters."""
        return self._original[0] if self._original else None

    def use(self, original: SharedTable) -> None:
        """Give up the parameters, and use that module's."""
        for name, _ in list(self.named_parameters()):
            delattr(self, name)
        self._original = (original,)


def unite_copies(parts: Iterable[nn.Module]) -> None:
    """Let the parts of a model in one process share their tables, so that each is there once."""
    found: dict[str, SharedTable] = {}
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, SharedTable):
                first = found.setdefault(name, module)
                if first is not module:
                    module.use(first)


def borrowed_parameters(part: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of other parts' tables that a part uses."""
    for module in part.modules():
        if isinstance(module, SharedTable) and module.original is not None:
            yield from module.original.parameters()
