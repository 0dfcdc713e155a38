"""The order of rows in Megatron Core's projections, where it differs from ours.

Latent attention rotates channels 2i and 2i + 1 of a head together, whereas we rotate channels i and
i + r/2 of the r channels that carry positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.config.fields import MAX_WIDTH
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError

# Parameters whose rows are in the order of one kind of attention: whether that is latent attention.
_OF_ONE_KIND = {
    "attention.qkv.weight": False,
    "attention.query_up.weight": True,
    "attention.latent_down.weight": True,
}
_DEPTH = re.compile(r"mtp\.\d+\.layer\.")


@dataclass(frozen=True)
class RowOrder:
    """Where the rows of one of our tensors are among the rows of Megatron Core's tensor.

    Attributes:
        positions: The index of the row in Core's tensor for each of our rows, int64 [rows]. It is a
            permutation.
    """

    positions: Tensor

    def runs(self, start: int, count: int) -> Iterator[tuple[int, int, slice | Tensor]]:
        """Yield the ranges of Core's rows that contain consecutive rows of ours.

        Args:
            start: The first of our rows.
            count: The number of our rows.

        Yields:
            The first row of a range in Core's tensor, the number of its rows, and the indices of
            these rows among ours, counted from `start`.
        """
        rows, ours = self.positions[start : start + count].sort()
        ends = torch.nonzero(rows.diff() != 1).flatten() + 1
        for first, end in zip([0, *ends.tolist()], [*ends.tolist(), len(rows)], strict=True):
            index = ours[first:end]
            is_range = bool((index.diff() == 1).all())
            yield (
                int(rows[first]),
                end - first,
                slice(int(index[0]), int(index[0]) + len(index)) if is_range else index,
            )


def row_order(model: Mapping[str, Any], parameter: str, rows: int) -> RowOrder | None:
    """Return the order of a parameter's rows, or `None` if it is the same as ours.

    Args:
        model: The flags of the network. Missing ones have their defaults.
        parameter: Our name for the parameter, without the layer of the decoder.
        rows: The number of its rows.

    Raises:
        CheckpointError: The sizes of the network are invalid, or do not match the number of rows;
            or the network has no such parameter.
    """
    inside, is_latent = _DEPTH.sub("", parameter), bool(model.get("multi_latent_attention"))
    if inside in _OF_ONE_KIND and is_latent != _OF_ONE_KIND[inside]:
        kind = "latent" if is_latent else "ordinary"
        raise CheckpointError(f"{parameter} does not exist in a network with {kind} attention")
    match inside:
        case "attention.query_up.weight":
            heads, unrotated = size_of(model, "num_attention_heads"), size_of(model, "qk_head_dim")
        case "attention.latent_down.weight":
            heads, unrotated = 1, size_of(model, "kv_lora_rank")
        case _:
            return None
    rotated = size_of(model, "qk_pos_emb_head_dim")
    if rows != heads * (unrotated + rotated):
        raise CheckpointError(
            f"{parameter} has {rows:,} rows instead of {heads * (unrotated + rotated):,}"
        )
    positions = torch.arange(rows).view(heads, -1)
    pairs = positions[:, unrotated:].unflatten(1, (-1, 2))
    return RowOrder(torch.cat((positions[:, :unrotated], pairs.mT.flatten(1)), dim=1).flatten())


def size_of(model: Mapping[str, Any], name: str) -> int:
    """Return a size of a network, which may come from a file.

    Args:
        model: The flags of the network. Missing ones have their defaults.
        name: The name of the flag.

    Raises:
        CheckpointError: It is not a number, or is too small or too large.
    """
    size = model.get(name, getattr(ModelConfig, name, None))
    if type(size) is not int or not 1 <= size <= MAX_WIDTH:
        raise CheckpointError(f"{name} is {size!r:.80}: it must be from 1 to {MAX_WIDTH:,}")
    return size
