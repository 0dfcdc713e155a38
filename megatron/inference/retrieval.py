"""An executor for Retro models, and construction of an engine for a GPT or Retro model.

A block of Retro's cache stores a chunk of the text: the keys and values of its tokens, as for GPT,
and those of its neighbors in the layers that read them. Neighbors are looked up and encoded once,
in the step that computes the chunk's last token.

Shapes: s new tokens, C chunks that end among them; chunks of m tokens, each with k neighbors of r
tokens; h hidden, n heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.inference.build import EngineOptions, build_engine, make_cache, stage_channel
from megatron.inference.cache import StepCache
from megatron.inference.engine import BatchEngine
from megatron.inference.executor import Executor
from megatron.inference.load import Loaded
from megatron.inference.request import EngineLimits, NeighborPassage, Retrieved
from megatron.inference.scheduler import Integers, Row, SchedulerSettings, StepPlan
from megatron.inference.scheduler import Sequence as Text
from megatron.kernels.cached_sequences import Singles
from megatron.kernels.chunk_attention import describe_chunks
from megatron.kernels.library import find_library
from megatron.kernels.paged_attention import choose_paged_attention
from megatron.models.attention import AttentionCore
from megatron.models.plan import ModelPlan, RetrievalAttentionPlan, RetrievalPlan
from megatron.models.retro import RetroModel
from megatron.parallel.layout import Axis
from megatron.retro.dataset import Ids
from megatron.retro.retriever import Retriever, open_retriever

ARCHITECTURES = ("gpt", "retro")  # architectures that `build_any_engine` accepts
_MAX_CACHED = 4096  # number of chunks whose neighbors are cached


class ChunkMemory:
    """The part of Retro's cache that belongs to chunks: one chunk for each block.

    Args:
        plan: The network, all of whose layers this process holds.
        blocks: Number of blocks. One more is allocated for the padding of batches.
        device: Device of the memory.
        dtype: Number format.

    Attributes:
        sizes: Sizes of chunks and neighbors.
        inputs: Inputs of the first Retro layer's cross-attention, [blocks + 1, m, h]. The
            encoder of neighbors reads the inputs of a whole chunk, which may be computed over
            several steps.
        layers: Keys and values of the chunks' neighbors by 1-based layer number,
            [2, (blocks + 1) r k, n, d].
        size_bytes: Size of all tensors in bytes.
    """

    def __init__(
        self, plan: ModelPlan, blocks: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Allocate the memory."""
        attention = _neighbor_attention(plan)
        self.sizes = _sizes(plan)
        self.inputs = torch.zeros(
            blocks + 1, self.sizes.chunk, plan.hidden, device=device, dtype=dtype
        )
        rows = (blocks + 1) * self.sizes.keys
        self.layers = {
            number: torch.zeros(2, rows, layer.heads, layer.head_size, device=device, dtype=dtype)
            for number, layer in attention.items()
        }
        self.size_bytes = sum(x.nbytes for x in (self.inputs, *self.layers.values()))

    @staticmethod
    def block_bytes(plan: ModelPlan, dtype: torch.dtype) -> int:
        """Return the number of bytes that each block takes.

        Args:
            plan: The network, all of whose layers this process holds.
            dtype: Number format.
        """
        sizes = _sizes(plan)
        keys = sum(2 * sizes.keys * layer.query for layer in _neighbor_attention(plan).values())
        return dtype.itemsize * (sizes.chunk * plan.hidden + keys)


def _neighbor_attention(plan: ModelPlan) -> dict[int, RetrievalAttentionPlan]:
    """Return each Retro layer's attention to neighbors, by 1-based layer number."""
    return {
        number: layer.cross_attention
        for number, layer in enumerate(plan.layers, 1)
        if isinstance(layer.cross_attention, RetrievalAttentionPlan)
    }


def _sizes(plan: ModelPlan) -> RetrievalPlan:
    return next(iter(_neighbor_attention(plan).values())).retrieval


@dataclass(frozen=True, kw_only=True)
class RetroStepCache(StepCache):
    """A step's view of the cache: the `models.retrieval.RetrievalCache` that Retro receives.

    Attributes:
        chunk_memory: The part of the cache that belongs to chunks.
        neighbors: Tokens of the neighbors of the chunks that end in this step, [1, C, k, r].
        ending_blocks: Blocks of these chunks, int64 [C].
        neighbor_singles: For each sequence that adds one token, the neighbors that it reads, in the
            form of a cached sequence; `None` if there are no such sequences.
        groups: Blocks of the chunks that the tokens of all other sequences read, int64 [G].
        query_indices: For each of these tokens, its index among the G m queries of all groups,
            int64 [tokens].
    """

    chunk_memory: ChunkMemory
    neighbors: Tensor
    ending_blocks: Tensor
    neighbor_singles: Singles | None
    groups: Tensor
    query_indices: Tensor

    def whole_chunks(self, x: Tensor) -> Tensor:
        """Store inputs [s, 1, h] of new tokens; return the inputs of whole chunks [C m, 1, h]."""
        inputs = self.chunk_memory.inputs
        inputs.flatten(0, 1).index_copy_(0, self.slots, x[:, 0].to(inputs.dtype))
        return inputs[self.ending_blocks].flatten(0, 1).unsqueeze(1).to(x.dtype)

    def attend_to_neighbors(
        self, query: Tensor, key_value: Tensor | None, core: AttentionCore
    ) -> Tensor:
        """Store the neighbors' keys and values, then attend from each token to its neighbors.

        Args:
            query: Queries [s, 1, n, d].
            key_value: Keys and values of the neighbors of the chunks that end in this step, [r k,
                C, n, 2, d]; `None` if there are none.
            core: The layer's attention.

        Returns:
            Attention output [s, 1, n d].
        """
        memory, sizes = self.chunk_memory.layers[core.layer_number], self.chunk_memory.sizes
        by_block = memory.unflatten(1, (-1, sizes.keys))  # [2, blocks, r k, n, d]
        if key_value is not None:
            by_block.index_copy_(1, self.ending_blocks, key_value.permute(3, 1, 0, 2, 4))
        rows, parts, count = query.squeeze(1), [], 0
        if self.neighbor_singles is not None:
            count = self.neighbor_singles.lengths.numel()
            (keys, values), options = memory, core.options(None)
            paged, singles = self.memory.paged, self.neighbor_singles
            out = paged.singles(rows[:count], keys, values, singles, options)
            parts.append(out.flatten(1))
        if len(self.groups):
            groups = query.new_zeros(len(self.groups) * sizes.chunk, *query.shape[2:])
            groups.index_copy_(0, self.query_indices, rows[count:])
            queries = groups.unflatten(0, (-1, sizes.chunk)).transpose(0, 1)  # [m, G, n, d]
            keys, values = by_block[:, self.groups].transpose(1, 2)  # [r k, G, n, d]
            out = core(queries, keys, values, None).transpose(0, 1).flatten(0, 1)  # [G m, n d]
            parts.append(out[self.query_indices])
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(1)


@dataclass(kw_only=True)
class RetroExecutor(Executor):
    """An executor of steps for a Retro model in a single process. A cache block stores one chunk.

    Attributes:
        chunk_memory: The part of the cache that belongs to chunks.
        retriever: The retriever that finds the neighbors of a chunk.
    """

    chunk_memory: ChunkMemory
    retriever: Retriever
    _reported: WeakKeyDictionary[Text, int] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        """Start with an empty cache of neighbors."""
        super().__post_init__()

        # Chunks are looked up one by one, so a chunk's neighbors depend on nothing else in a step.
        @lru_cache(_MAX_CACHED)
        def retrieve(chunk: tuple[int, ...]) -> tuple[Ids, list[NeighborPassage]]:
            neighbors = self.retriever.find(np.array([chunk]))
            return self.retriever.tokens(neighbors), self.retriever.passages(neighbors)

        self._retrieve = retrieve

    def retrieved(self, plan: StepPlan) -> list[Retrieved]:
        """Return the passages of chunks that a plan completes or finds in the cache.

        Each chunk of a sequence is reported once.
        """
        m, events = self.chunk_memory.sizes.chunk, []
        for row in plan:
            # A preempted sequence recomputes chunks that have already been reported.
            first = self._reported.get(row.sequence, 0)
            end = (row.start + row.size) // m
            self._reported[row.sequence] = max(first, end)
            passages = tuple(
                replace(passage, chunk=index)
                for index in range(first, end)
                for passage in self._retrieve(self._chunk(row, index))[1]
            )
            if passages:
                events.append(Retrieved(row.sequence.request, passages))
        return events

    def inputs(
        self, plan: StepPlan, outputs: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, RetroStepCache]:
        """Return the token ids [1, s], and the step's view of the cache.

        Args:
            plan: The step, in which every token is known.
            outputs: The tokens whose logits are needed, as for `Executor.inputs`.
        """
        tokens, cache = super().inputs(plan, outputs)
        send, sizes = self.device.send, self.chunk_memory.sizes
        m, keys = sizes.chunk, sizes.keys
        ending = [
            (row, index)
            for row in plan
            for index in range(row.start // m, (row.start + row.size) // m)
        ]
        neighbors = np.zeros((len(ending), sizes.neighbors, sizes.retrieved), np.int64)
        for i, (row, index) in enumerate(ending):
            neighbors[i] = self._retrieve(self._chunk(row, index))[0][0]
        num_decode_rows = sum(row.is_decode for row in plan)
        # The chunk that each token reads ended at or before it. The first m - 1 tokens of a text
        # read none, so their results from the first block are discarded.
        chunks_read = [
            np.maximum(np.arange(row.start + 1, row.start + row.size + 1) // m - 1, 0)
            for row in plan
        ]
        blocks = [row.blocks[chunks] for row, chunks in zip(plan, chunks_read, strict=True)]
        singles = None
        if num_decode_rows:
            tables = send(np.stack(blocks[:num_decode_rows]).astype(np.int32))
            lengths = send(np.full(num_decode_rows, keys, np.int32))
            singles = Singles(tables, lengths, keys, keys)
        groups, query_indices = _grouped(plan[num_decode_rows:], blocks[num_decode_rows:], m)
        return tokens, RetroStepCache(
            **vars(cache),
            chunk_memory=self.chunk_memory,
            neighbors=send(neighbors[None]),
            ending_blocks=send(np.array([row.blocks[index] for row, index in ending], np.int64)),
            neighbor_singles=singles,
            groups=send(groups),
            query_indices=send(query_indices),
        )

    def _chunk(self, row: Row, index: int) -> tuple[int, ...]:
        """Return the tokens of a chunk of a row's sequence."""
        m = self.chunk_memory.sizes.chunk
        return tuple(row.sequence.tokens[index * m : (index + 1) * m])


def check_retrieval(config: RunConfig, embedder: str | None) -> None:
    """Check flags that only GPT or only Retro supports, before the model is loaded.

    Args:
        config: The run's configuration.
        embedder: The value of --bert-embedder-load.

    Raises:
        ConfigError: A flag does not fit the kind of model.
    """
    parallel = config.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if config.model.architecture == "gpt":
        if embedder is not None:
            raise ConfigError(
                f"--bert-embedder-load {embedder} is for Retro models, and --load holds a GPT "
                "model: drop it"
            )
    elif ranks > 1:
        raise ConfigError(
            f"a Retro model generates text on a single process, not on {ranks}: drop "
            "--tensor-model-parallel-size and --pipeline-model-parallel-size"
        )


def build_any_engine(
    loaded: Loaded,
    device: Device,
    options: EngineOptions,
    *,
    embedder: str | None = None,
    replica: Axis | None = None,
) -> BatchEngine:
    """Return an engine for a GPT or Retro model in memory. Collective over the model's layout.

    Args:
        loaded: The model. GPT models must be built in a `serving_context`.
        device: Device that the model is on.
        options: Options of the engine. For Retro, the length of a chunk replaces the block size,
            steps are not recorded as graphs, and there are no drafts.
        embedder: For Retro, the value of --bert-embedder-load (`open_retriever`).
        replica: Ranks of this copy of the model, as for `build_engine`.

    Raises:
        CheckpointError: There is no embedding network.
        ConfigError: `build_engine` or `make_cache` rejects the model or the options, or Retro's
            working folder does not fit the embedding network.
        DataError: Retro's working folder is damaged, or was made with a different tokenizer.
    """
    model, config = loaded.model, loaded.config
    if not isinstance(model, RetroModel):
        return build_engine(loaded, device, options, replica=replica)
    retriever = open_retriever(config, loaded.tokenizer, device, embedder)
    dtype, plan, max_sequences = config.precision.weight_dtype, model.plan, options.max_sequences
    options = replace(options, block_size=config.model.chunk_length)
    library, torch_device = find_library(device.torch_device), device.torch_device
    invariant = config.model.batch_invariant_mode
    paged = choose_paged_attention(
        library.library, plan.head_size, dtype, batch_invariant=invariant
    )
    memory = make_cache(
        *(loaded, options, paged, device), extra_bytes=ChunkMemory.block_bytes(plan, dtype)
    )
    chunk_memory = ChunkMemory(plan, memory.blocks, torch_device, dtype)
    vocab_size, cache_tokens = loaded.tokenizer.vocab_size, memory.blocks * memory.block_size
    size = f"{(memory.size_bytes + chunk_memory.size_bytes) / 1e9:.3g} GB"
    chunks = describe_chunks(plan.head_size, dtype, torch_device)
    return BatchEngine(
        RetroExecutor(
            model=model.eval(),
            layout=loaded.layout,
            memory=memory,
            device=device,
            channel=stage_channel(loaded, device),
            replica=replica or loaded.layout.world,
            graphs=None,
            vocab_size=vocab_size,
            chunk_memory=chunk_memory,
            retriever=retriever,
        ),
        SchedulerSettings(
            blocks=memory.blocks,
            block_size=memory.block_size,
            max_sequences=max_sequences,
            max_tokens=max(max_sequences, options.max_step_tokens),
        ),
        EngineLimits(
            vocab_size=vocab_size,
            max_length=config.data.seq_length,
            cache_tokens=cache_tokens,
            max_beams=max_sequences,
        ),
        seed=options.seed,
        looks_ahead=False,  # the last chunk's neighbors depend on the token that is being chosen
        panel_rows=[
            ("passages", f"{config.data.retro_workdir}, for each complete chunk of a text"),
            ("attention", f"new tokens: {paged.name}; prompts: {chunks}"),
            (
                "cache",
                f"{cache_tokens:,} tokens and the passages of {memory.blocks:,} chunks: {size}",
            ),
            ("batch", f"up to {max_sequences:,} sequences"),
        ],
    )


def _grouped(rows: StepPlan, blocks: Sequence[Integers], m: int) -> tuple[Integers, Integers]:
    """Group the tokens of rows by the chunk that they read.

    Args:
        rows: The rows of a step.
        blocks: The block of the chunk that each token of a row reads.
        m: Number of tokens in a chunk.

    Returns:
        The block of each group, [G], and the index of each token among the G m positions of all
        groups, [tokens].
    """
    groups, indices, count = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for row, chunk_blocks in zip(rows, blocks, strict=True):
        ends = np.arange(row.start + 1, row.start + row.size + 1)
        group = ends // m - ends[0] // m
        _, firsts = np.unique(group, return_index=True)
        groups.append(chunk_blocks[firsts])
        indices.append((count + group) * m + ends % m)
        count += len(firsts)
    return np.concatenate(groups), np.concatenate(indices)
