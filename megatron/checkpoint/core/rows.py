"""The order of rows in Megatron Core's projections, where it differs from ours.

Latent attention and --rotary-interleaved rotate channels 2i and 2i + 1 of a head together, whereas
we rotate channels i and i + r/2 of the r channels that carry positions. Scores are the same if the
channels of queries and keys are in the same order, so either network can be loaded as the other. A
gated delta net and a Mamba-2 mixer have a tensor for each part of their input projection and of
their convolution, with the rows of all heads, whereas we store all parts in one tensor whose rows
are ordered by head or group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.config.fields import MAX_WIDTH
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError

# Parameters that exist in only one kind of attention: latent (True) or ordinary (False).
_OF_ONE_KIND = {
    "attention.qkv.weight": False,
    "attention.query_up.weight": True,
    "attention.latent_down.weight": True,
}
# Parameters of ordinary attention whose rows depend on --rotary-interleaved.
_INTERLEAVED = re.compile(r"attention\.(?:qkv|query_norm|key_norm)\.(?:weight|bias)")
_DEPTH = re.compile(r"mtp\.\d+\.layer\.")
_DELTA_PARTS = ("query", "key", "value", "z", "beta", "alpha")
_MAMBA_PARTS = ("z", "x", "B", "C", "dt")
# The parts that the convolution reads.
_CONVOLVED = ("query", "key", "value", "x", "B", "C")
# Endings of the names of tensors that hold one part of a parameter.
PARTS = (*_DELTA_PARTS, *_MAMBA_PARTS[1:])


@dataclass(frozen=True)
class RowOrder:
    """The location of the rows of one of our tensors in Megatron Core's tensors.

    Attributes:
        positions: For each of our rows, its index among the rows of all of Core's tensors, int64
            [rows]. It is a permutation.
        parts: The ending of each tensor's name, such as ".query", and the number of its rows. A
            single tensor with all rows has the ending "".
        has_axis: Whether Core's tensors have a dimension of size 1 after that of the rows, as the
            weights of convolutions do.
    """

    positions: Tensor
    parts: tuple[tuple[str, int], ...]
    has_axis: bool = False

    def runs(self, start: int, count: int) -> Iterator[tuple[str, int, int, slice | Tensor]]:
        """Yield the ranges of Core's rows that contain consecutive rows of ours.

        Args:
            start: The first of our rows.
            count: The number of our rows.

        Yields:
            The ending of the name of one of Core's tensors, the first row of a range in it, the
            number of its rows, and the indices of these rows among ours, counted from `start`.
        """
        rows, ours = self.positions[start : start + count].sort()
        offsets = accumulate((size for _, size in self.parts), initial=0)
        for (ending, _), (first, stop) in zip(self.parts, pairwise(offsets), strict=True):
            low, high = torch.searchsorted(rows, torch.tensor([first, stop])).tolist()
            ends = (torch.nonzero(rows[low:high].diff() != 1).flatten() + low + 1).tolist()
            for begin, end in pairwise([low, *ends, high] if high > low else ()):
                index = ours[begin:end]
                is_range = bool((index.diff() == 1).all())
                yield (
                    ending,
                    int(rows[begin]) - first,
                    end - begin,
                    slice(int(index[0]), int(index[0]) + len(index)) if is_range else index,
                )

    def stored_shape(self, shape: Sequence[int], rows: int) -> tuple[int, ...]:
        """Return the shape of one of Core's tensors.

        Args:
            shape: The shape of our tensor.
            rows: The number of rows of Core's tensor.
        """
        return (rows, *(1,) * self.has_axis, *shape[1:])


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
    is_interleaved = bool(model.get("rotary_interleaved")) and not is_latent
    if is_interleaved and _INTERLEAVED.fullmatch(inside):
        return _interleaved(model, inside, parameter, rows)
    match inside:
        case "attention.query_up.weight":
            heads, unrotated = size_of(model, "num_attention_heads"), size_of(model, "qk_head_dim")
            return _rotated(model, parameter, rows, heads, unrotated)
        case "attention.latent_down.weight":
            return _rotated(model, parameter, rows, 1, size_of(model, "kv_lora_rank"))
        case "attention.input.weight":
            return _grouped(parameter, rows, *_recurrent_parts(model, parameter), has_axis=False)
        case "attention.convolution.weight" | "attention.convolution.bias":
            groups, parts = _recurrent_parts(model, parameter)
            parts = {name: width for name, width in parts.items() if name in _CONVOLVED}
            is_weight = inside.endswith("weight")
            return _grouped(parameter, rows, groups, parts, has_axis=is_weight)
    return None


def _rotated(
    model: Mapping[str, Any], parameter: str, rows: int, heads: int, unrotated: int
) -> RowOrder:
    """Return the order of the rows of heads whose last channels rotate."""
    rotated = size_of(model, "qk_pos_emb_head_dim")
    _check_rows(parameter, rows, heads * (unrotated + rotated))
    positions = torch.arange(rows).view(heads, -1)
    kept, pairs = positions[:, :unrotated], positions[:, unrotated:]
    return RowOrder(torch.cat((kept, _halves(pairs)), dim=1).flatten(), (("", rows),))


def _halves(channels: Tensor) -> Tensor:
    """Reorder channels [..., r] from adjacent pairs that rotate together to two halves."""
    return channels.unflatten(-1, (-1, 2)).mT.flatten(-2)


def _interleaved(model: Mapping[str, Any], inside: str, parameter: str, rows: int) -> RowOrder:
    """Return the order of rows in ordinary attention with --rotary-interleaved."""
    size, groups, queries = size_of(model, "kv_channels"), 1, 0
    if inside.startswith("attention.qkv."):
        heads = size_of(model, "num_attention_heads")
        groups = size_of(model, "num_query_groups") if model.get("group_query_attention") else heads
        queries = heads // groups
    percent = model.get("rotary_percent", 1.0)
    if type(percent) not in (int, float) or not 0 < percent <= 1:
        raise CheckpointError(f"rotary_percent is {percent!r:.80}: it must be above 0, at most 1")
    rotated = int(size * percent)
    parts = queries + 2 if queries else 1  # per group: query heads, a key and a value head
    if rotated % 2 or rows != groups * parts * size:
        raise CheckpointError(
            f"{parameter} has {rows:,} rows, which do not match num_attention_heads, "
            "num_query_groups, kv_channels and rotary_percent"
        )
    positions = torch.arange(rows).view(groups, parts, size)
    turning = positions[:, : queries + 1]  # values do not rotate
    turning = torch.cat((_halves(turning[..., :rotated]), turning[..., rotated:]), dim=-1)
    ordered = torch.cat((turning, positions[:, queries + 1 :]), dim=1).flatten()
    return RowOrder(ordered, (("", rows),))


def _recurrent_parts(model: Mapping[str, Any], parameter: str) -> tuple[int, dict[str, int]]:
    """Return the number of groups, and the total width of each part of the input projection.

    The groups of a gated delta net are its key heads.
    """
    if model.get("hybrid_layer_pattern") is not None:
        groups, state = size_of(model, "mamba_num_groups"), size_of(model, "mamba_state_dim")
        size = size_of(model, "mamba_head_dim")
        default = 2 * size_of(model, "hidden_size") // size
        heads = size_of({"mamba_num_heads": default, **model}, "mamba_num_heads")
        if heads % groups:
            raise CheckpointError(f"mamba_num_heads is {heads}, with {groups} groups")
        vectors = groups * state
        mamba_widths = (heads * size, heads * size, vectors, vectors, heads)
        return groups, dict(zip(_MAMBA_PARTS, mamba_widths, strict=True))
    if model.get("experimental_attention_variant") is None:
        raise CheckpointError(f"{parameter} does not exist in a network without gated delta nets")
    groups, heads = (size_of(model, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if heads % groups:
        raise CheckpointError(f"linear_num_value_heads is {heads}, with {groups} key heads")
    keys = groups * size_of(model, "linear_key_head_dim")
    values = heads * size_of(model, "linear_value_head_dim")
    widths = (keys, keys, values, values, heads, heads)
    return groups, dict(zip(_DELTA_PARTS, widths, strict=True))


def _grouped(
    parameter: str, rows: int, groups: int, parts: Mapping[str, int], *, has_axis: bool
) -> RowOrder:
    """Return the order of rows that we order by group and Core orders by part."""
    _check_rows(parameter, rows, sum(parts.values()))
    by_part = torch.arange(rows).split(list(parts.values()))
    ordered = torch.cat([part.view(groups, -1) for part in by_part], dim=1).flatten()
    return RowOrder(ordered, tuple((f".{name}", width) for name, width in parts.items()), has_axis)


def _check_rows(parameter: str, rows: int, expected: int) -> None:
    if rows != expected:
        raise CheckpointError(f"{parameter} has {rows:,} rows instead of {expected:,}")


def size_of(model: Mapping[str, Any], name: str) -> int:
    """Return a size of a network, which may come from a file.

    Args:
        model: The flags of the network. Missing ones have their defaults.
        name: The name of the flag.

    Raises:
        CheckpointError: The size is not a number, or is too small or too large.
    """
    size = model.get(name, getattr(ModelConfig, name, None))
    if type(size) is not int or not 1 <= size <= MAX_WIDTH:
        raise CheckpointError(f"{name} is {size!r:.80}: it must be from 1 to {MAX_WIDTH:,}")
    return size
