"""Tied word embeddings under a pipeline: two copies of one parameter, kept equal.

The first stage looks words up, the last one scores them. Both start with the same values (their
name is the same); adding their gradients before the update keeps them the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis

_TIED = "embedding.word.weight"


def tied_copy(
    named_parameters: Iterable[tuple[str, nn.Parameter]], embedding: Axis, *, is_tied: bool
) -> nn.Parameter | None:
    """The parameter that another stage holds too; None where there is none.

    Args:
        named_parameters: held by this process.
        embedding: a pipeline's two ends, see `Layout.embedding`.
        is_tied: the output layer uses the word embeddings.
    """
    if embedding.size == 1 or not is_tied:
        return None
    return dict(named_parameters)[_TIED]


def share_tied_gradients(copy: nn.Parameter | None, embedding: Axis) -> None:
    """Add the two copies' gradients. Collective over a pipeline's two ends, where both hold one."""
    if copy is not None:
        gradient: Tensor = copy.main_grad  # type: ignore[attr-defined]
        all_reduce(gradient, embedding)
