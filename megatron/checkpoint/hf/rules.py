"""How our parameters are made of a Hugging Face folder's tensors, and come apart again.

Each form is a pure function of shapes: `join` and `split` undo each other bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Form(Protocol):
    """One of ours from several of theirs, and back."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our parameter from their tensors."""

    def split(self, whole: Tensor) -> list[Tensor]:
        """Their tensors from our parameter."""


@dataclass(frozen=True)
class Same:
    """The same tensor."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def split(self, whole: Tensor) -> list[Tensor]:
        return [whole]


@dataclass(frozen=True)
class Transposed:
    """GPT-2 keeps matrices as [in, out], we as [out, in]."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].t()

    def split(self, whole: Tensor) -> list[Tensor]:
        return [whole.t()]


@dataclass(frozen=True)
class GateUp:
    """Gate [f, h] and up [f, h], with us one tensor [2, f, h]."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(parts))

    def split(self, whole: Tensor) -> list[Tensor]:
        return list(whole.unbind(0))


@dataclass(frozen=True)
class ByGroup:
    """Queries [n d, ...], keys [g d, ...] and values [g d, ...], with us ordered by group.

    Rows of a group: its n / g query heads, its key, its value. Both sides rotate channel i of a
    head with channel i + d/2, so no row moves within a head.
    """

    heads: int
    groups: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        by_group = [part.unflatten(0, (self.groups, -1)) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(self, whole: Tensor) -> list[Tensor]:
        queries = self.heads // self.groups
        by_group = whole.unflatten(0, (self.groups, queries + 2, -1))
        return [
            by_group[:, :queries].flatten(0, 2),
            by_group[:, queries].flatten(0, 1),
            by_group[:, queries + 1].flatten(0, 1),
        ]


@dataclass(frozen=True)
class KeyValueByHead:
    """Keys [n d, ...] and values [n d, ...] of an attention to an encoder, with us head by head."""

    heads: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        by_head = [part.unflatten(0, (self.heads, -1)) for part in parts]
        return torch.stack(by_head, dim=1).flatten(0, 2)

    def split(self, whole: Tensor) -> list[Tensor]:
        by_head = whole.unflatten(0, (self.heads, 2, -1))
        return [part.flatten(0, 1) for part in by_head.unbind(1)]


@dataclass(frozen=True)
class FusedByHead:
    """GPT-2's [h, 3 n d] (or a bias [3 n d]): all queries, all keys, all values side by side."""

    heads: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        by_kind = _transposed(parts[0]).unflatten(0, (3, self.heads, -1))
        return by_kind.transpose(0, 1).flatten(0, 2)

    def split(self, whole: Tensor) -> list[Tensor]:
        by_head = whole.unflatten(0, (self.heads, 3, -1))
        return [_transposed(by_head.transpose(0, 1).flatten(0, 2))]


def _transposed(x: Tensor) -> Tensor:
    return x.t() if x.dim() == 2 else x


@dataclass(frozen=True)
class Rule:
    """One of our parameters.

    Attributes:
        name: ours.
        shape: ours.
        theirs: names of the tensors that make it up.
        form: how.
        piece: of the model, which files may lack as a whole; "": they may not.
    """

    name: str
    shape: Shape
    theirs: tuple[str, ...]
    form: Form
    piece: str = ""

    def shapes(self) -> list[Shape]:
        """Shapes of their tensors, in order."""
        parts = self.form.split(torch.empty(self.shape, device="meta"))
        return [tuple(part.shape) for part in parts]


def present(rules: Sequence[Rule], held: Iterable[Rule]) -> list[Rule]:
    """The rules without those of pieces that nothing at all is held of."""
    pieces = {rule.piece for rule in held} | {""}
    return [rule for rule in rules if rule.piece in pieces]
