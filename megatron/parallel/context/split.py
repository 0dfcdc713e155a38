"""The division of a sequence among context ranks.

With a causal mask, a token attends to all tokens before it, so late tokens cost more. The sequence
is divided into 2C equal chunks for C ranks, and rank r holds chunks r and 2C - 1 - r. Every rank
then has the same amount of work. Locally, the early chunk comes before the late chunk.

Documents in a sequence (`Segments`) do not change the division. A token then attends only within
its document, so a rank's work depends on the documents in its two chunks. The work is guaranteed to
be equal only with one document per sequence. With documents much shorter than a chunk, the work
averages out: chunks differ only by a few documents. With documents as long as a few chunks, the
ranks that hold the end of a document have more work.

Shapes: s sequence, C context-parallel size, b micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.segments import Segments
from megatron.parallel.collectives import all_to_all
from megatron.parallel.layout import Axis


class TokenBatch(NamedTuple):
    """A GPT micro-batch in the format that the model expects (b micro-batch, s sequence).

    Attributes:
        tokens: The inputs, `[b, s]` int64.
        labels: The token after each input, `[b, s]` int64.
        loss_mask: 1 for labels that count in the loss, otherwise 0, `[b, s]` float32.
        position_ids: The position of each input, `[b, s]` int64.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor


def local_positions(sequence: int, axis: Axis, device: torch.device | None = None) -> Tensor:
    """Return the positions of this rank's tokens in the whole sequence, int64 [s/C], in order.

    Args:
        sequence: The length s, a multiple of 2C.
        axis: The context axis.
        device: The device of the result.
    """
    return split_sequence(torch.arange(sequence, device=device), axis, dim=0)


def split_sequence(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's shard of `x`: [..., s, ...] -> [..., s/C, ...].

    Args:
        x: A tensor with whole sequences. s must be a multiple of 2C unless C is 1.
        axis: The context axis.
        dim: The sequence dimension.
    """
    if axis.size == 1:
        return x
    chunks = _chunks(x, axis.size, dim)
    return torch.cat((chunks[axis.rank], chunks[-1 - axis.rank]), dim)


def context_part(batch: TokenBatch, axis: Axis) -> TokenBatch:
    """Return this context rank's shard of a micro-batch: tensors `[b, s/C]` for C ranks.

    Gradients and losses are averaged over context ranks. To obtain a mean over the whole batch, a
    rank's loss must be C * (loss * loss_mask).sum() / whole loss_mask.sum(). The denominator is
    computed from `batch`, which every context rank has, and not from the shard.

    Args:
        batch: The micro-batch, with whole sequences `[b, s]`.
        axis: The context axis.
    """
    if axis.size == 1:
        return batch
    return TokenBatch(*(split_sequence(x, axis, dim=1) for x in batch))


def split_for_all(x: Tensor, size: int, dim: int) -> list[Tensor]:
    """Return the shards of all ranks in rank order: [..., s, ...] -> C of [..., s/C, ...].

    Args:
        x: A tensor with whole sequences. s must be a multiple of 2C.
        size: The context-parallel size C.
        dim: The sequence dimension.
    """
    chunks = _chunks(x, size, dim)
    return [torch.cat((chunks[rank], chunks[-1 - rank]), dim) for rank in range(size)]


def join_sequence(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join the shards of all ranks into whole sequences, the inverse of `split_for_all`.

    Args:
        parts: The shards [..., s/C, ...], in rank order.
        dim: The sequence dimension.
    """
    if len(parts) == 1:
        return parts[0]
    early, late = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*early, *reversed(late)), dim)


def gather_sequences(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's channels of whole sequences: [s/C, b, C, ...] -> [s, b, ...]. Collective.

    Args:
        x: The channels of each rank, for the tokens of this rank's shard of the sequence. Ranks
            compute their channels independently of each other until `scatter_sequences`.
        axis: The context axis.
    """
    if axis.size == 1:
        return x.squeeze(2)
    return join_sequence(all_to_all(x.movedim(2, 0), axis).unbind(0), dim=0)


def scatter_sequences(x: Tensor, axis: Axis) -> Tensor:
    """Undo `gather_sequences`: [s, b, ...] -> [s/C, b, C, ...]. Collective.

    Args:
        x: This rank's channels of whole sequences.
        axis: The context axis.
    """
    if axis.size == 1:
        return x.unsqueeze(2)
    parts = torch.stack(split_for_all(x, axis.size, dim=0))  # [C, s/C, b, ...]
    return all_to_all(parts, axis).movedim(0, 2)


def split_segments(segments: Segments, size: int) -> tuple[Tensor, Tensor]:
    """Count the tokens of each segment in each rank's early and late chunks.

    A rank's tokens of a segment are adjacent in its shard, even if they are in both chunks.

    Args:
        segments: The segments of whole sequences.
        size: The context-parallel size C.

    Returns:
        The counts in early chunks and in late chunks, each int32 [C, segments].
    """
    length = segments.shape[1]
    assert length % (2 * size) == 0, f"{length} tokens in {2 * size} chunks"
    chunk, starts, ends = length // (2 * size), segments.ends[:-1], segments.ends[1:]
    chunks = torch.arange(2 * size, dtype=torch.int32, device=starts.device).unsqueeze(1)
    firsts = starts - starts % length + chunk * chunks  # [2C, segments]: starts of chunks
    common = torch.minimum(ends, firsts + chunk) - torch.maximum(starts, firsts)
    early, late = common.clamp(min=0).chunk(2)
    return early, late.flip(0)


def _chunks(x: Tensor, size: int, dim: int) -> tuple[Tensor, ...]:
    assert x.shape[dim] % (2 * size) == 0, f"{x.shape[dim]} tokens in {2 * size} chunks"
    return x.chunk(2 * size, dim)
