"""Execution of a step: run its tokens through the model, and send the chosen tokens to every rank.

On a GPU, steps in which every sequence adds one token are recorded as CUDA graphs and replayed. The
GPU then gets all kernels of a step in one call. Launching them one by one would take the CPU longer
than the GPU needs to run them. Training has backward passes too, so it records its passes in
`training/recorded_passes.py`. Both modules use `megatron.device.GraphRecorder`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from operator import add
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.device import AsyncRead, Device
from megatron.inference.cache import CacheMemory, StateRows, StepCache
from megatron.inference.request import Retrieved
from megatron.inference.sampling import Choice, Chosen, choose, result_width, unpack
from megatron.inference.scheduler import UNKNOWN, Integers, Row, Sequence, StepPlan
from megatron.kernels.cached_sequences import Chunks, Singles
from megatron.kernels.paged_attention import PART
from megatron.models.gpt import GPTModel
from megatron.parallel.adapter_stack import AdapterRows
from megatron.parallel.collectives import broadcast, gather_to
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.pipeline.p2p import PipelineChannel
from megatron.parallel.pipeline.schedule import Operation

logger = logging.getLogger(__name__)

_Outputs = tuple[Tensor, Tensor | None]  # logits, and hidden states if they are kept


class LogitsRequest(NamedTuple):
    """A token whose logits are needed, and how to choose or score a token from them.

    Attributes:
        row: Index of the row in the plan.
        offset: Index of the token in the row.
        choice: How to choose a token from the logits, or score one.
    """

    row: int
    offset: int
    choice: Choice


class StepExecutor(Protocol):
    """The interface that an engine needs from an executor.

    Attributes:
        device: Device of the model.
        replica: Ranks of the copy of the model to which this process belongs, stage by stage.
    """

    device: Device
    replica: Axis

    def begin(self, plan: StepPlan, requests: Many[LogitsRequest]) -> Callable[[], list[Chosen]]:
        """Queue the work of a plan, and return a function that waits for its results."""
        ...

    def retrieved(self, plan: StepPlan) -> list[Retrieved]:
        """Return the passages that a plan reads for the first time."""
        ...


@dataclass
class Executor:
    """An executor of steps for the part of the model that this process holds.

    Attributes:
        model: This process's part of the model, in evaluation mode; with virtual pipeline stages,
            the last of its parts.
        layout: This process's position in the parallel layout.
        memory: The KV cache of the layers in this part.
        device: Device of the model and the cache.
        channel: Connection to the neighboring stages.
        replica: Ranks of the copy of the model to which this process belongs, stage by stage.
        graphs: Recordings of steps in which every sequence adds one token. `None` runs them like
            any other step.
        vocab_size: Number of vocabulary entries that can be chosen. Any other entries are padding.
        adapters: The model's adapters, or `None` if it has none.
        earlier_parts: The model parts on this process that run before `model`.
        keeps_states: Whether to keep the hidden states of each step, from which the model's
            multi-token prediction layers make drafts.

    Attributes of the last step:
        states: Normalized hidden states [s, 1, h] of the step's tokens; `None` without
            `keeps_states`, and before the last stage.
    """

    model: GPTModel
    layout: Layout
    memory: CacheMemory
    device: Device
    channel: PipelineChannel
    replica: Axis
    graphs: DecodeGraphs | None
    vocab_size: int
    adapters: AdapterRows | None = None
    earlier_parts: Many[GPTModel] = ()
    keeps_states: bool = False

    def __post_init__(self) -> None:
        """Set the state before the first step, without chosen tokens."""
        self.states: Tensor | None = None
        self._chosen = torch.zeros(0, dtype=torch.int64)  # the last step's tokens, on the device
        # The index in `_chosen` of a sequence's next token.
        self._chosen_index: dict[Sequence, int] = {}

    @torch.no_grad()
    def begin(self, plan: StepPlan, requests: Many[LogitsRequest]) -> Callable[[], list[Chosen]]:
        """Queue the work of a plan. Collective.

        A token may be `UNKNOWN` if the previous step is still choosing it. Such tokens pass from
        step to step on the device, without a copy to the host.

        Args:
            plan: The step to compute.
            requests: The tokens whose logits are needed.

        Returns:
            A function that waits for the device, and returns the result for each of `requests`.
        """
        logits = None
        self.memory.copy_states(
            [(row.restore_slot, row.sequence.state_slot) for row in plan if row.restore_slot >= 0]
        )
        # Graphs are for steps that compute no prompt and choose a token after each of their tokens.
        if (
            self.graphs is not None
            and plan[-1].is_decode
            and len(requests) == sum(row.size for row in plan)
        ):
            singles = tuple(single for row in plan for single in row.split_tokens())
            replayed = self.graphs.run(singles, self._sources(singles), self._chosen)
            if replayed is not None:
                logits, self.states = replayed
        if logits is None:
            outputs = [(request.row, request.offset) for request in requests]
            logits = self._run_stages(*self.inputs(plan, outputs))
        self.memory.copy_states(
            [(row.sequence.state_slot, row.snapshot_slot) for row in plan if row.snapshot_slot >= 0]
        )
        if not requests:
            return list
        choices = [request.choice for request in requests]
        if self.layout.pipeline.is_last:
            logits = gather_to(logits[0], self.layout.tensor)[:, : self.vocab_size]
            result = choose(logits, choices)
        else:
            shape, device = (len(choices), result_width(choices)), self.device.torch_device
            result = torch.empty(shape, dtype=torch.float64, device=device)
        # All ranks use the result of the last stage's first rank, so that they cannot differ.
        broadcast(result, self.replica, self.replica.size - self.layout.tensor.size)
        # The next step reads the tokens chosen now from `_chosen`, at most one per sequence. Scored
        # prompt tokens are left out, because a step can have more of them than sequences.
        tokens = result[:, 0]
        chosen = [i for i, choice in enumerate(choices) if choice.target is None]
        if len(chosen) < len(requests):
            tokens = tokens[self.device.send(np.array(chosen, dtype=np.int64))]
        self._chosen = tokens.long().clamp(min=0)  # a negative "token" ends its request
        self._chosen_index = {
            plan[requests[i].row].sequence: index for index, i in enumerate(chosen)
        }
        reading = AsyncRead(result.flatten())
        return lambda: unpack(reading.wait(), choices)

    def retrieved(self, plan: StepPlan) -> list[Retrieved]:
        """Return no passages, because GPT models read none."""
        return []

    def _run_stages(self, tokens: Tensor, cache: StepCache) -> Tensor:
        """Return this stage's hidden states [s, 1, h], or logits [1, k, v/t] on the last stage."""
        pipeline, parts = self.layout.pipeline, (*self.earlier_parts, self.model)
        channel = self.channel.with_shapes(lambda _: (tokens.shape[1], 1, self.model.plan.hidden))
        before, after = ((pipeline.rank + step) % pipeline.size for step in (-1, 1))
        for chunk, part in enumerate(parts):
            hidden = None
            if chunk > 0 or not pipeline.is_first:
                receive = Operation("receive_activation", 0, chunk, before)
                channel.post_receive(receive)
                hidden = channel.receive(receive)
            states = part.states(tokens, hidden, cache)
            if part is not self.model or not pipeline.is_last:
                channel.send(Operation("send_activation", 0, chunk, after), states)
        result = states
        if pipeline.is_last:
            self.states = states if self.keeps_states else None
            result = self.model.logits(states[cache.outputs])
        channel.finish()
        return result

    def _sources(self, plan: StepPlan) -> list[int]:
        """Return the index in `_chosen` of each row's last token, or -1 if the token is known."""
        return [
            self._chosen_index[row.sequence] if row.tokens[-1] == UNKNOWN else -1 for row in plan
        ]

    def inputs(self, plan: StepPlan, outputs: Many[tuple[int, int]]) -> tuple[Tensor, StepCache]:
        """Return the token ids [1, s], and the step's view of the cache.

        Also set the adapter of each token, if the model has adapters.

        Each token of a sequence with drafts is treated like a separate sequence. It therefore uses
        the same kernel as in steps without drafts, and its results are bitwise identical.

        Args:
            plan: The step to compute.
            outputs: The tokens whose logits are needed, each as the index of its row and its index
                in the row.
        """
        send = self.device.send
        row_starts = np.cumsum([0] + [row.size for row in plan])
        positions = [np.arange(row.start, row.start + row.size) for row in plan]
        num_decode_rows = sum(row.is_decode for row in plan)  # these come first
        output_indices = [row_starts[row] + offset for row, offset in outputs]
        singles = None
        if num_decode_rows:
            lengths = np.concatenate(positions[:num_decode_rows]).astype(np.int32) + 1
            sizes = [row.size for row in plan[:num_decode_rows]]
            tables = send(np.repeat(_tables(plan[:num_decode_rows]), sizes, axis=0))
            longest = int(lengths.max())
            singles = Singles(tables, send(lengths), longest, self.memory.block_size)
        cache = StepCache(
            memory=self.memory,
            positions=send(np.concatenate(positions)),
            lengths=send(np.concatenate([*map(self._lengths, plan, positions)])),
            slots=self._slots(plan, positions),
            outputs=send(np.array(output_indices, dtype=np.int64)),
            singles=singles,
            chunks=self._chunks(plan[num_decode_rows:]) if num_decode_rows < len(plan) else None,
            rows=self._state_rows(plan, num_decode_rows) if self.memory.states else None,
        )
        known = np.array([token for row in plan for token in row.tokens], dtype=np.int64)
        tokens = send(known)
        if self.adapters is not None:
            adapters = np.repeat(_adapters(plan), [row.size for row in plan])
            self.adapters.of_tokens = send(adapters) if adapters.any() else None
            of_outputs = adapters[np.array(output_indices, dtype=np.int64)]
            self.adapters.of_outputs = send(of_outputs) if adapters.any() else None
        unknown = np.flatnonzero(known == UNKNOWN)
        if len(unknown):
            sources = [source for source in self._sources(plan) if source >= 0]
            tokens[send(unknown)] = self._chosen[send(np.array(sources))]
        return tokens.unsqueeze(0), cache

    def _lengths(self, row: Row, positions: Integers) -> Integers:
        """Return the sequence length that determines each token's rotary frequencies."""
        if self.model.plan.dynamic_context is None:
            return np.full(len(positions), len(row.sequence.tokens))
        # A token keeps the rotation that it had when it was new, even if it is computed again.
        return np.maximum(positions + 1, row.sequence.prompt_length)

    def _chunks(self, rows: StepPlan) -> Chunks:
        starts = tuple(row.start for row in rows)
        sizes = tuple(row.size for row in rows)
        lengths = tuple(map(add, starts, sizes))
        slots = self._slots(rows, [*map(np.arange, lengths)]) if any(starts) else None
        ends = np.cumsum([[0, *sizes], [0, *lengths]], axis=1, dtype=np.int32)
        return Chunks(starts, sizes, self.device.send(ends), slots)

    def _state_rows(self, plan: StepPlan, singles: int) -> StateRows:
        assert not any(row.drafts for row in plan), "states cannot be rolled back past a draft"
        chunks = tuple((row.size, row.start == 0) for row in plan[singles:])
        return StateRows(self.device.send(_state_slots(plan)), singles, chunks)

    def _slots(self, rows: StepPlan, positions: Many[Integers]) -> Tensor:
        """Return the cache slots of the tokens at some positions of each row's sequence."""
        size = self.memory.block_size
        slots = [
            row.blocks[row_positions // size] * size + row_positions % size
            for row, row_positions in zip(rows, positions, strict=True)
        ]
        return self.device.send(np.concatenate(slots))


def _adapters(rows: Many[Row]) -> Integers:
    """Return the index of each row's adapter."""
    return np.fromiter((row.sequence.adapter for row in rows), np.int64, len(rows))


def _state_slots(rows: Many[Row]) -> Integers:
    """Return the state slot of each row's sequence."""
    return np.fromiter((row.sequence.state_slot for row in rows), np.int64, len(rows))


def _tables(rows: Many[Row]) -> NDArray[np.int32]:
    """Return the rows' blocks as a matrix, padded with zeros."""
    tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.blocks)] = row.blocks
    return tables


def batch_sizes_to_record(largest: int) -> list[int]:
    """Return the batch sizes to record: only a few, and each not much larger than the previous one.

    Args:
        largest: The largest batch size.
    """
    counts = {1, 2, 4, 8, *range(16, 64, 16), *range(64, 128, 32), *range(128, largest + 1, 64)}
    return sorted({*(count for count in counts if count < largest), largest})


def lengths_to_record(longest: int) -> list[int]:
    """Return the maximum sequence lengths for which to record.

    Each is four times the previous one, except that the last is `longest`, rounded up. A recording
    for longer sequences is only slightly slower for shorter ones. Up to the first length, a single
    block of threads processes all keys, so no partial results have to be merged.

    Args:
        longest: Length of the longest sequence, in tokens.
    """
    lengths = [PART]
    while lengths[-1] < longest:
        lengths.append(4 * lengths[-1])
    return [*lengths[:-1], -(-longest // PART) * PART]


class DecodeGraphs:
    """CUDA graphs of steps in which every sequence adds one token, recorded when first needed.

    Each recording is for one number of sequences and one maximum length, with or without adapters.
    A step uses the smallest recording in which it fits, padded with empty rows. All recordings read
    the same input memory. The copies to this memory are queued on the device, so a step may be
    queued while another one runs.
    """

    def __init__(
        self,
        model: GPTModel,
        memory: CacheMemory,
        device: Device,
        max_sequences: int,
        adapters: AdapterRows | None = None,
        *,
        keeps_states: bool = False,
    ) -> None:
        """Allocate the input memory.

        Args:
            model: The whole model, in this single process.
            memory: The cache, with attention that can be recorded.
            device: Device of the model and the cache.
            max_sequences: Maximum number of sequences in a step. Each token of a sequence with
                drafts counts as a sequence.
            adapters: The model's adapters, or `None` if it has none.
            keeps_states: Whether `run` also returns hidden states.
        """
        self._adapters, self._keeps_states = adapters, keeps_states
        self._model, self._memory, self._device = model, memory, device
        self._record = device.recorder()
        self._batch_sizes = batch_sizes_to_record(max_sequences)
        self._lengths = lengths_to_record(model.plan.positions)
        self._recordings: dict[tuple[int, int, bool], Callable[[], _Outputs]] = {}
        self._is_enabled = True
        # Rows: token, its index in `_chosen` or -1, position, slot, length with the new token,
        # adapter, state slot.
        self._inputs = torch.zeros(7, max_sequences, dtype=torch.int64, device=device.torch_device)
        self._chosen = torch.zeros_like(self._inputs[0])
        width = -(-model.plan.positions // memory.block_size)
        self._tables = self._inputs.new_zeros(max_sequences, width, dtype=torch.int32)
        self._table_blocks: list[Integers | None] = [None] * max_sequences

    def run(self, plan: StepPlan, sources: Many[int], chosen: Tensor) -> _Outputs | None:
        """Return logits [1, u, v] and hidden states [u, 1, h] of the plan's u sequences.

        The result is `None` if recording fails or has failed before. The states are `None` if they
        are not kept.

        Args:
            plan: A step in which every sequence adds one token.
            sources: Index in `chosen` of each sequence's token, or -1 if the plan has the token.
            chosen: Tokens that the previous step chose or will choose, int64, at most
                `max_sequences`.
        """
        if not self._is_enabled:
            return None
        count = next(count for count in self._batch_sizes if count >= len(plan))
        required = max(row.start for row in plan) + 1
        longest = next(length for length in self._lengths if length >= required)
        self._write_inputs(plan, sources, count)
        if max(sources) >= 0:
            self._chosen[: len(chosen)] = chosen
        is_adapted = any(row.sequence.adapter for row in plan)
        key = count, longest, is_adapted
        replay = self._recordings.get(key)
        if replay is None:
            # Recording runs the step, which must not happen twice to any sequence's states.
            state_slots = self._inputs[-1, :count].clone()
            self._inputs[-1, :count] = self._memory.state_slots
            try:
                replay = self._record(lambda: self._step(*key))
            except RuntimeError:  # any CUDA error: everything also runs without graphs, only slower
                logger.exception("recording a step failed: CUDA graphs are off")
                self._is_enabled = False
                return None
            self._inputs[-1, :count] = state_slots
            self._recordings[key] = replay
        logits, states = replay()
        return logits[:, : len(plan)], None if states is None else states[: len(plan)]

    def _step(self, count: int, longest: int, is_adapted: bool) -> _Outputs:
        """Compute a step from the input memory."""
        known, sources, positions, slots, lengths, adapters, state_slots = self._inputs[:, :count]
        if self._adapters is not None:
            self._adapters.of_tokens = adapters if is_adapted else None
            self._adapters.of_outputs = self._adapters.of_tokens
        tokens = torch.where(sources >= 0, self._chosen[sources.clamp(min=0)], known)
        cache = StepCache(
            memory=self._memory,
            positions=positions,
            lengths=lengths,
            slots=slots,
            outputs=torch.arange(count, device=tokens.device),
            singles=Singles(self._tables[:count], lengths.int(), longest, self._memory.block_size),
            chunks=None,
            rows=StateRows(state_slots, count) if self._memory.states else None,
        )
        states = self._model.states(tokens.unsqueeze(0), None, cache)
        return self._model.logits(states), states if self._keeps_states else None

    def _write_inputs(self, plan: StepPlan, sources: Many[int], count: int) -> None:
        """Copy the step's tokens and tables into the input memory."""
        size, used = self._memory.block_size, len(plan)
        tokens = [row.tokens[0] for row in plan]
        starts = np.fromiter((row.start for row in plan), np.int64, used)
        last_blocks = np.fromiter((row.blocks[row.start // size] for row in plan), np.int64, used)
        spare = self._memory.spare_slot, self._memory.state_slots
        empty_row = np.array([[0], [-1], [0], [spare[0]], [0], [0], [spare[1]]])
        inputs = np.repeat(empty_row, count, axis=1)
        slots = last_blocks * size + starts % size
        inputs[:, :used] = (
            *(tokens, sources, starts, slots, starts + 1),
            *(_adapters(plan), _state_slots(plan)),
        )
        self._inputs[:, :count] = self._device.send(inputs)
        # Copy only the tables that have changed.
        changed = [i for i, row in enumerate(plan) if self._table_blocks[i] is not row.blocks]
        if not changed:
            return
        for i in changed:
            self._table_blocks[i] = plan[i].blocks
        tables = self._device.send(_tables([plan[i] for i in changed]))
        rows = self._device.send(np.array(changed))
        self._tables[:, : tables.shape[1]].index_copy_(0, rows, tables)
