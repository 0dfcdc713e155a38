"""Log-probabilities of whole documents in packed rows, and the base class of recipes that use them.

Every context rank gets the sums over whole documents, although it computes the losses of only some
of their tokens.

Shapes: b rows of s tokens contain k segments. The padding of a row is also a segment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.models.gpt import GPTModel
from megatron.models.plan import HeadSpec
from megatron.parallel.collectives import copy_to, reduce_from
from megatron.parallel.context.split import local_positions
from megatron.parallel.layout import Axis
from megatron.training.recipe import Recipe


class ComparingRecipe(Recipe):
    """The base class of recipes for GPT models whose losses compare whole documents."""

    architecture = "gpt"
    network = GPTModel
    head = HeadSpec(compares=True)


class DocumentSums(NamedTuple):
    """The sums over each segment's tokens that count in the loss.

    Attributes:
        log_probs: The log-probabilities, fp64 [k].
        tokens: The number of tokens, fp64 [k].
    """

    log_probs: Tensor
    tokens: Tensor


def document_sums(losses: Tensor, trained: Tensor, ends: Tensor, axis: Axis) -> DocumentSums:
    """Return each segment's log-probability and number of tokens. Collective over the context axis.

    All context ranks return the same values, and each may compute the same loss from them. The mean
    of their gradients, which training computes, is then the gradient of the loss.

    Args:
        losses: The loss of each label on this context rank, [b, s/C].
        trained: 1 for labels that count and 0 for all others, in whole rows, [b, s].
        ends: 0, then the end of each segment, counted over the tokens of all rows, [k + 1].
        axis: The context axis, of C ranks.
    """
    rows, length = trained.shape
    positions = local_positions(length, axis, trained.device)
    token_indices = (
        torch.arange(rows, device=trained.device)[:, None] * length + positions
    ).flatten()
    # On every rank, tokens are in the order of their documents, so that each document is a range.
    bounds = torch.searchsorted(token_indices, ends)
    is_counted = trained.double()
    local = _sums(-losses.double() * is_counted[:, positions], bounds)
    # Each rank's gradient goes to all ranks, because its loss depends on the tokens of all ranks.
    return DocumentSums(reduce_from(copy_to(local, axis), axis), _sums(is_counted, ends))


def _sums(values: Tensor, bounds: Tensor) -> Tensor:
    return torch.segment_reduce(values.flatten(), "sum", offsets=bounds.long(), initial=0)
