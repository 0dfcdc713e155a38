"""How our parameters are made of a Hugging Face folder's tensors, and come apart again.

Each form is a pure function of shapes: `join` and `split` undo each other bit for bit.


What each family of models offers to reader and writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.checkpoint.huggingface.settings import Settings
from megatron.config.model import ModelConfig

Shape = tuple[int, ...]


class TensorForm(Protocol):
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
class ParameterRule:
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
    form: TensorForm
    piece: str = ""

    def shapes(self) -> list[Shape]:
        """Shapes of their tensors, in order."""
        parts = self.form.split(torch.empty(self.shape, device="meta"))
        return [tuple(part.shape) for part in parts]


def present(rules: Sequence[ParameterRule], held: Iterable[ParameterRule]) -> list[ParameterRule]:
    """The rules without those of pieces that nothing at all is held of."""
    pieces = {rule.piece for rule in held} | {""}
    return [rule for rule in rules if rule.piece in pieces]


@dataclass(frozen=True)
class Described:
    """What a config.json describes.

    Attributes:
        model: the network by our flags.
        vocab: rows of the word embedding.
        notices: lines for the user about what is different here.
        window: tokens that a token attends to, itself included; None: all before it.
    """

    model: ModelConfig
    vocab: int
    notices: tuple[str, ...] = ()
    window: int | None = None


class Family(Protocol):
    """Models that share a config.json and tensor names."""

    @property
    def name(self) -> str:
        """`model_type` in config.json."""

    @property
    def prefix(self) -> str:
        """Begins the names of all tensors but the head's; some files leave it out. Or empty."""

    @property
    def tied_head(self) -> str:
        """What files may call the word embeddings a second time, as the output's weight."""

    @property
    def head_follows_files(self) -> bool:
        """The output has a weight of its own where files hold one that differs from the word
        embeddings, although config.json may call the two tied."""

    @property
    def word_copies(self) -> tuple[str, ...]:
        """Further names that files may have for the word embeddings."""

    def architecture(self, pieces: frozenset[str]) -> str:
        """The class of `transformers`.

        Args:
            pieces: those that are there, of the ones that the family's files may lack.
        """

    def read(self, settings: Settings) -> Described:
        """The network of a config.json.

        Raises:
            CheckpointError: names the key whose value our network cannot express.
        """

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """A config.json for a network; of one that the family cannot express, the nearest.

        See `misfits`.
        """

    def rules(self, model: ModelConfig, vocab: int) -> list[ParameterRule]:
        """How each parameter is made of tensors, in the order in which files hold them."""

    def is_derived(self, name: str) -> bool:
        """Whether a tensor in a file follows from config.json (masks, frequencies)."""
