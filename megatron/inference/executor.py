"""Carries a plan out: tokens through the model, on every rank, and what was chosen back to all."""

from __future__ import annotations

from collections.abc import Sequence as Many
from operator import add
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.device import Device, Reading
from megatron.inference.cache import CacheMemory, StepCache
from megatron.inference.graphs import DecodeGraphs
from megatron.inference.sampling import Choice, Chosen, choose, result_width, unpack
from megatron.inference.scheduler import UNKNOWN, Plan, Row, Sequence
from megatron.kernels.paged_attention import Chunks, PagedAttention, Singles
from megatron.models.gpt import GPTModel
from megatron.parallel.collectives import gather_to
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.pipeline.p2p import PipelineChannel
from megatron.parallel.pipeline.schedule import Operation

Integers = np.ndarray


class Output(NamedTuple):
    """Logits that are wanted, and what for.

    Attributes:
        row: of the plan.
        place: among the row's tokens.
        choice: what to do with them.
    """

    row: int
    place: int
    choice: Choice


class Begun:
    """A step under way.

    Args:
        reading: what `sampling.choose` gives; None: nothing is chosen.
        choices: for what.
    """

    def __init__(self, reading: Reading | None, choices: Many[Choice]) -> None:
        self._reading, self._choices = reading, choices

    def wait(self) -> list[Chosen]:
        """What was chosen for each output, once the device has come to it."""
        return [] if self._reading is None else unpack(self._reading.wait(), self._choices)


class Executor:
    """One process's part of the work.

    Args:
        model: this process's part, in evaluation mode.
        layout: who this process is.
        memory: the cache of the part's layers.
        copy: the ranks of the model's copy that this process is part of, stage by stage.
        paged: how sequences attend that add one token.
        graphs: runs steps in which every sequence adds one token; None: nothing special does.
        vocab_size: entries that can be chosen; those behind are padding.
        hidden: h.
        stream_dtype: of hidden states between stages.
        device: where all of it is.
    """

    def __init__(
        self,
        model: GPTModel,
        layout: Layout,
        memory: CacheMemory,
        *,
        copy: Axis,
        paged: PagedAttention,
        graphs: DecodeGraphs | None = None,
        vocab_size: int,
        hidden: int,
        stream_dtype: torch.dtype,
        device: Device,
    ) -> None:
        self._model = model
        self._layout = layout
        self._memory = memory
        self._copy = copy
        self._paged = paged
        self._graphs = graphs
        self._vocab_size = vocab_size
        self._hidden = hidden
        self._device = device
        self._arrays: WeakKeyDictionary[Sequence, tuple[tuple[int, ...], Integers]]
        self._arrays = WeakKeyDictionary()
        self._chosen = torch.zeros(0, dtype=torch.int64)  # by the last step, on the device,
        self._places: dict[Sequence, int] = {}  # and where in it a sequence's next token is
        self._channel = PipelineChannel.create(
            layout, ring=False, device=device.torch_device, dtype=stream_dtype, shape=()
        )

    @torch.no_grad()
    def begin(self, plan: Plan, outputs: Many[Output]) -> Begun:
        """Queue the work of a plan. Collective. Its tokens may be `UNKNOWN` where the step before
        chooses them; no host needs to know that step's result."""
        logits = self._logits(plan, outputs)
        if not outputs:
            return Begun(None, [])
        choices = [output.choice for output in outputs]
        if self._layout.pipeline.is_last:
            logits = gather_to(logits[0], self._layout.tensor)[:, : self._vocab_size]
            result = choose(logits, choices)
        else:
            width = result_width(choices)
            device = self._device.torch_device
            result = torch.empty(len(choices), width, dtype=torch.float64, device=device)
        result = self._tell_all(result)
        self._remember(result[:, 0], plan, outputs)
        return Begun(self._device.read(result.flatten()), choices)

    def _remember(self, tokens: Tensor, plan: Plan, outputs: Many[Output]) -> None:
        """Where the next step finds what is chosen now: one token a sequence at most. The prompt's
        scores choose none; there can be more of them than a step has sequences."""
        nexts = [i for i, output in enumerate(outputs) if output.choice.target is None]
        if len(nexts) < len(outputs):
            tokens = tokens[self._tensor(np.array(nexts, dtype=np.int64))]
        self._chosen = tokens.long().clamp(min=0)  # a token that is none ends its request
        self._places = {plan[outputs[i].row].sequence: place for place, i in enumerate(nexts)}

    def _logits(self, plan: Plan, outputs: Many[Output]) -> Tensor:
        """See `_through_stages`."""
        if self._graphs is not None and _all_add_one(plan, outputs):
            blocks = [self._blocks(row) for row in plan]
            logits = self._graphs.run(plan, blocks, self._sources(plan), self._chosen)
            if logits is not None:
                return logits
        return self._through_stages(*self._inputs(plan, outputs))

    def _through_stages(self, tokens: Tensor, cache: StepCache) -> Tensor:
        """This stage's result: hidden states [s, 1, h], or of the last one logits [1, k, v/t]."""
        pipeline, hidden = self._layout.pipeline, None
        channel = self._channel.with_shape((tokens.shape[1], 1, self._hidden))
        if not pipeline.is_first:
            receive = Operation("receive_activation", 0, 0, pipeline.rank - 1)
            channel.post_receive(receive)
            hidden = channel.receive(receive)
        result = self._model(tokens, hidden=hidden, cache=cache)
        assert isinstance(result, Tensor)
        if not pipeline.is_last:
            channel.send(Operation("send_activation", 0, 0, pipeline.rank + 1), result)
            channel.finish()
        return result

    def _tell_all(self, result: Tensor) -> Tensor:
        """The result of the last stage's first tensor rank, on every rank: none can differ."""
        copy = self._copy
        if copy.size > 1:
            source = copy.ranks[copy.size - self._layout.tensor.size]
            work = dist.broadcast(result, src=source, group=copy.group, async_op=True)
            copy.transfer("broadcast", work).wait()
        return result

    def _sources(self, plan: Plan) -> list[int]:
        """Where in `_chosen` the last token of each row is; -1: it is known."""
        return [self._places[row.sequence] if row.tokens[-1] == UNKNOWN else -1 for row in plan]

    def _inputs(self, plan: Plan, outputs: Many[Output]) -> tuple[Tensor, StepCache]:
        """Token ids [1, s], and where they belong."""
        size = self._memory.block_size
        firsts = np.cumsum([0] + [row.size for row in plan])
        blocks = [self._blocks(row) for row in plan]
        places = [np.arange(row.start, row.start + row.size) for row in plan]
        slots = [_slots(b, p, size) for b, p in zip(blocks, places, strict=True)]
        count = sum(row.goes_on for row in plan)  # these come first
        wanted = [firsts[output.row] + output.place for output in outputs]
        cache = StepCache(
            memory=self._memory,
            positions=self._tensor(np.concatenate(places)),
            slots=self._tensor(np.concatenate(slots)),
            outputs=self._tensor(np.array(wanted, dtype=np.int64)),
            singles=self._singles(plan[:count], blocks) if count else None,
            chunks=self._chunks(plan[count:], blocks[count:]) if count < len(plan) else None,
            paged=self._paged,
        )
        known = np.array([token for row in plan for token in row.tokens], dtype=np.int64)
        tokens = self._tensor(known)
        unknown = np.flatnonzero(known == UNKNOWN)
        if len(unknown):
            sources = [source for source in self._sources(plan) if source >= 0]
            tokens[self._tensor(unknown)] = self._chosen[self._tensor(np.array(sources))]
        return tokens.unsqueeze(0), cache

    def _singles(self, rows: Plan, blocks: Many[Integers]) -> Singles:
        lengths = np.array([row.start + 1 for row in rows], dtype=np.int32)
        longest = max(len(row.blocks) for row in rows)
        tables = np.zeros((len(rows), longest), dtype=np.int32)
        for table, row_blocks in zip(tables, blocks, strict=False):
            table[: len(row_blocks)] = row_blocks
        return Singles(
            tables=self._tensor(tables),
            lengths=self._tensor(lengths),
            longest=int(lengths.max()),
            block_size=self._memory.block_size,
        )

    def _chunks(self, rows: Plan, blocks: Many[Integers]) -> Chunks:
        slots = None
        if any(row.start for row in rows):
            size = self._memory.block_size
            places = [np.arange(row.start + row.size) for row in rows]
            parts = [_slots(b, p, size) for b, p in zip(blocks, places, strict=True)]
            slots = self._tensor(np.concatenate(parts))
        starts = tuple(row.start for row in rows)
        sizes = tuple(row.size for row in rows)
        ends = np.cumsum([[0, *sizes], [0, *map(add, starts, sizes)]], axis=1, dtype=np.int32)
        return Chunks(starts, sizes, self._tensor(ends), slots)

    def _blocks(self, row: Row) -> Integers:
        """The row's blocks as an array, made when they change."""
        known = self._arrays.get(row.sequence)
        if known is None or known[0] is not row.blocks:
            known = self._arrays[row.sequence] = (row.blocks, np.array(row.blocks, dtype=np.int64))
        return known[1]

    def _tensor(self, array: Integers) -> Tensor:
        return self._device.send(array)


def _all_add_one(plan: Plan, outputs: Many[Output]) -> bool:
    """Whether the plan is one token of each sequence, and for each the next one is wanted."""
    return len(outputs) == len(plan) and plan[-1].goes_on


def _slots(blocks: Integers, places: Integers, block_size: int) -> Integers:
    """Of these places of a sequence."""
    return blocks[places // block_size] * block_size + places % block_size
