"""Steps in which every sequence adds one token, recorded once and run again: a GPU then gets all
kernels of a step in one call, for which a CPU would need longer than the GPU computes.

A recording is of a number of sequences and a longest length; a step takes the next larger one and
fills it up with rows of no tokens. All recordings read the same input memory, which is written in
the device's queue: a step may be queued while another one runs. Passes of training are recorded by
`training/recorded_passes.py`, as they have a backward; both record by `megatron.device.Recorder`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.device import Device
from megatron.inference.cache import CacheMemory, StepCache
from megatron.inference.scheduler import Plan
from megatron.kernels.paged_attention import PART, PagedAttention, Singles
from megatron.models.gpt import GPTModel

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]

logger = logging.getLogger(__name__)


def row_counts(most: int) -> list[int]:
    """Numbers of sequences to record for: few, and none much larger than the one before."""
    counts = {1, 2, 4, 8, *range(16, 64, 16), *range(64, 128, 32), *range(128, most + 1, 64)}
    return sorted({*(count for count in counts if count < most), most})


def lengths_to_record(most: int) -> list[int]:
    """Longest lengths to record for, each four times the one before: parts of the keys that no
    sequence has cost little. One part is the first, as nothing is joined then."""
    lengths = [PART]
    while lengths[-1] < most:
        lengths.append(4 * lengths[-1])
    return [*lengths[:-1], -(-most // PART) * PART]


class DecodeGraphs:
    """Recordings, made when they are first needed.

    Args:
        model: of a process that is alone.
        memory: the cache.
        paged: attention that can be recorded.
        record: does work once, and gives what does it again: a `Recorder`.
        max_sequences: of a step.
        max_length: of a sequence.
        device: where all of it is.
    """

    def __init__(
        self,
        model: GPTModel,
        memory: CacheMemory,
        paged: PagedAttention,
        record: Record,
        *,
        max_sequences: int,
        max_length: int,
        device: Device,
    ) -> None:
        self._model, self._memory, self._paged, self._record = model, memory, paged, record
        self._counts = row_counts(max_sequences)
        self._lengths = lengths_to_record(max_length)
        self._recordings: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._works = True
        width = -(-max_length // memory.block_size)
        # Rows: token, where else it is (`sources`), position, slot, length (with the new token).
        self._inputs = torch.zeros(5, max_sequences, dtype=torch.int64, device=device.torch_device)
        self._chosen = torch.zeros_like(self._inputs[0])
        self._tables = torch.zeros(
            max_sequences, width, dtype=torch.int32, device=device.torch_device
        )
        self._in_tables: list[tuple[int, ...] | None] = [None] * max_sequences
        self._device = device

    def run(
        self,
        plan: Plan,
        blocks: Sequence[NDArray[np.int64]],
        sources: Sequence[int],
        chosen: Tensor,
    ) -> Tensor | None:
        """Logits [1, u, v] of the plan's sequences; None: recording does not work here.

        Args:
            plan: one token of each sequence.
            blocks: of each.
            sources: where each one's token is among `chosen`; -1: the plan has it.
            chosen: int64, what the step before chose, or will choose, `max_sequences` at most.
        """
        if not self._works:
            return None
        count = next(count for count in self._counts if count >= len(plan))
        most = max(row.start for row in plan) + 1
        longest = next(length for length in self._lengths if length >= most)
        self._fill_in(plan, blocks, sources, count)
        if max(sources) >= 0:
            self._chosen[: len(chosen)] = chosen
        replay = self._recordings.get((count, longest)) or self._new_recording(count, longest)
        return None if replay is None else replay()[:, : len(plan)]

    def _new_recording(self, count: int, longest: int) -> Callable[[], Tensor] | None:
        try:
            recording = self._record(lambda: self._step(count, longest))
        except RuntimeError:  # CUDA's, of any kind: without recordings all of it runs, slower
            logger.exception("CUDA graphs: off: recording a step failed")
            self._works = False
            return None
        self._recordings[count, longest] = recording
        return recording

    def _step(self, count: int, longest: int) -> Tensor:
        """The work of a step, from the input memory."""
        known, sources, positions, slots, lengths = self._inputs[:, :count]
        tokens = torch.where(sources >= 0, self._chosen[sources.clamp(min=0)], known)
        cache = StepCache(
            memory=self._memory,
            positions=positions,
            slots=slots,
            outputs=torch.arange(count, device=tokens.device),
            singles=Singles(
                tables=self._tables[:count],
                lengths=lengths.int(),
                longest=longest,
                block_size=self._memory.block_size,
            ),
            chunks=None,
            paged=self._paged,
        )
        return self._model(tokens.unsqueeze(0), cache=cache)

    def _fill_in(
        self, plan: Plan, blocks: Sequence[NDArray[np.int64]], sources: Sequence[int], count: int
    ) -> None:
        """Put the step's tokens and tables into the input memory."""
        size, used = self._memory.block_size, len(plan)
        starts = np.fromiter((row.start for row in plan), np.int64, used)
        last = np.fromiter((array[-1] for array in blocks), np.int64, used)
        inputs = np.empty((5, count), np.int64)
        inputs[:, used:] = np.array([[0], [-1], [0], [self._memory.spare_slot], [0]])
        inputs[0, :used] = np.fromiter((row.tokens[0] for row in plan), np.int64, used)
        inputs[1, :used] = sources
        inputs[2, :used] = starts
        inputs[3, :used] = last * size + starts % size
        inputs[4, :used] = starts + 1
        self._inputs[:, :count] = self._device.send(inputs)
        self._renew_tables(plan, blocks)

    def _renew_tables(self, plan: Plan, blocks: Sequence[NDArray[np.int64]]) -> None:
        """Those that are not what they were in this place."""
        changed = [i for i, row in enumerate(plan) if self._in_tables[i] is not row.blocks]
        if not changed:
            return
        longest = max(len(blocks[i]) for i in changed)
        tables = np.zeros((len(changed), longest), np.int32)
        for table, i in zip(tables, changed, strict=True):
            table[: len(blocks[i])] = blocks[i]
            self._in_tables[i] = plan[i].blocks
        rows = self._device.send(np.array(changed))
        self._tables[:, :longest].index_copy_(0, rows, self._device.send(tables))
