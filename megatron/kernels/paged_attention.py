"""Attention from new tokens to a key-value cache that is stored in blocks.

A layer's cache consists of two tensors [slots, g, d], or of one tensor [slots, 1, w] with latent
vectors, from which keys and values are computed. Block i begins at slot i * block_size. A step
processes s tokens of any number of sequences. The sequences that add a single token each
("singles") come first, followed by chunks of prompts.

In 16 bits on a GPU, the kernels process the keys of a query in an order that depends only on the
positions of the keys. The bits of the result therefore do not depend on the other sequences or on
where a prompt is split into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.attention import (
    AttentionOptions,
    add_slopes,
)
from megatron.kernels.batch_invariant import attend
from megatron.kernels.cached_sequences import Chunks, Singles, chunk_starts
from megatron.kernels.chunk_attention import chunk_attention
from megatron.kernels.library import DTYPE_CODES, VECTOR_BYTES, Kernel, KernelLibrary, operator
from megatron.kernels.plans import WARP, KernelLaunch, Number, PlanError, Pointer, divide_up
from megatron.kernels.sources import FLOATS, constant, instance


class _PagedAttention(NamedTuple):
    """The arguments of kernels that compute attention of one query per row.

    16-bit values are multiplied on tensor cores, other values in fp32. A query sees the last token
    of its sequence and the `window` tokens before it.
    """

    query: Pointer  # [rows, groups * per_group, head_size], like out
    keys: Pointer  # [slots, groups, head_size], like values
    values: Pointer
    tables: Pointer  # int32 [rows, table_width]
    lengths: Pointer  # int32 [rows], at most parts * PART
    partial: (
        Pointer | None
    )  # scratch, fp32 [rows, heads, parts, head_size + 2]; unused for one part
    out: Pointer
    sinks: Pointer | None  # fp32 [heads]
    rows: int
    groups: int
    per_group: int
    head_size: int
    table_width: int
    block_size: int
    parts: int
    window: int
    dtype: int
    scale: Number
    softcap: Number  # the bound of scores; 0 for none

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        name = FLOATS[self.dtype]
        if name == "float":
            source, vectors = "paged_attention_fp32.cu", divide_up(self.head_size, 4)
            if self.head_size % 4 or not 1 <= vectors <= WARP:
                raise PlanError(f"heads of {self.head_size} channels in fp32 are not supported")
            lanes, threads = 16 if vectors <= 16 else 32, constant(source, "kThreads")
            heads = self.per_group if self.per_group <= 2 else constant(source, "kMostHeads")
            kernel = instance("paged_attention_fp32_kernel", lanes, heads)
            shared = threads // lanes * heads * (self.head_size + 2) * 4
        else:
            if self.head_size % 8 or not 8 <= self.head_size <= 256:
                raise PlanError(f"heads of {self.head_size} channels in 16 bits are not supported")
            source = "paged_attention.cu"
            heads, warps = constant(source, "kHeads"), constant(source, "kWarps")
            threads = warps * WARP
            width = next(width for width in (64, 128, 256) if self.head_size <= width)
            kernel = instance("paged_attention_kernel", name, width)
            shared = warps * min(self.per_group, heads) * self.head_size * 4
        sizes = (*self[9:14], self.window)  # from groups to block_size
        grid = (self.parts, self.groups * divide_up(self.per_group, heads), self.rows)
        parameters = (*self[:8], *sizes, self.scale, self.softcap)  # tensors first
        launches = [KernelLaunch(kernel, grid, (threads,), parameters, shared=shared)]
        if self.parts > 1:
            join = instance("join_parts_kernel", name)
            heads_and_rows = (self.groups * self.per_group, self.rows)
            tensors = (self.partial, self.lengths, self.out, self.sinks)
            join_parameters = (*tensors, self.head_size, self.parts, self.window)
            launches.append(KernelLaunch(join, heads_and_rows, (self.head_size,), join_parameters))
        return launches


class _LatentAttention(NamedTuple):
    """The arguments of kernels that compute attention of one query per row to latent vectors.

    Values are in 16 bits and multiplied on tensor cores. A query sees the last token of its
    sequence and the `window` tokens before it.
    """

    query: Pointer  # [rows, heads, width]
    vectors: Pointer  # [slots, width]
    tables: Pointer  # int32 [rows, table_width]
    lengths: Pointer  # int32 [rows], at most parts * PART
    partial: Pointer | None  # scratch, fp32 [rows, heads, parts, rank + 2]; unused for one part
    out: Pointer  # [rows, heads, rank]
    sinks: Pointer | None  # fp32 [heads]
    rows: int
    heads: int
    width: int
    rank: int
    table_width: int
    block_size: int
    parts: int
    window: int
    dtype: int
    scale: Number
    softcap: Number  # the bound of scores; 0 for none

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        source, name = "latent_attention.cu", FLOATS[self.dtype]
        columns, warps = constant(source, "kColumns"), constant(source, "kWarps")
        products = 2 if self.heads <= 2 * columns else constant(source, "kMostHeads") // columns
        kernel = instance("latent_attention_kernel", name, products)
        padded = divide_up(self.width, 32) * 32 + constant(source, "kPadding")
        # Queries, the weights of the part, and its slots.
        shared = products * columns * padded * 2 + PART // 16 * products * 256 + PART * 8
        grid = (self.parts, divide_up(self.heads, products * columns), self.rows)
        sizes = (*self[8:13], self.window)  # from heads to block_size
        parameters = (*self[:7], *sizes, self.scale, self.softcap)  # tensors first
        launches = [KernelLaunch(kernel, grid, (warps * WARP,), parameters, shared=shared)]
        if self.parts > 1:
            threads = min(self.rank, _JOIN_THREADS)
            grid = (self.heads, self.rows, divide_up(self.rank, threads))
            tensors = (self.partial, self.lengths, self.out, self.sinks)
            join_parameters = (*tensors, self.rank, self.parts, self.window)
            join = instance("join_parts_kernel", name)
            launches.append(KernelLaunch(join, grid, (threads,), join_parameters))
        return launches


class _AppendToCache(NamedTuple):
    """The arguments of a kernel that copies new keys and values to slots of the cache."""

    key: Pointer  # [tokens, width], like value
    value: Pointer
    keys: Pointer
    values: Pointer
    slots: Pointer  # [tokens], the row of keys and values for each token
    tokens: int
    width: int  # in units of 16 bytes

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        threads = min(
            divide_up(self.width, WARP) * WARP, constant("append_to_cache.cu", "kThreads")
        )
        parameters = (self.key, self.value, self.keys, self.values, self.slots, self.width)
        return [KernelLaunch("append_to_cache_kernel", (self.tokens,), (threads,), parameters)]


PAGED_ATTENTION = Kernel.of("paged_attention", _PagedAttention)
LATENT_ATTENTION = Kernel.of("latent_attention", _LatentAttention)
APPEND_TO_CACHE = Kernel.of("append_to_cache", _AppendToCache)
_PLAIN = AttentionOptions()
PART = 256  # the number of keys that a thread block processes, as in paged_attention.cuh
LARGEST_VECTORS = 32  # the maximum number of 16-byte vectors per head, as in the .cu files
_JOIN_THREADS = 128  # the maximum number of threads of a block that merges latent results


class LatentHeads(Protocol):
    """The computation of a layer's keys and values from cached latent vectors of w channels.

    The computation is linear. Queries can therefore attend to the keys and values or, after a
    linear map, to the vectors themselves, which is cheaper if there are few queries. Each of t
    tensor-parallel processes has n/t of the n heads.

    Attributes:
        rank: The number of leading channels of each vector from which values are computed.
    """

    rank: int

    def expanded(self, latent: Tensor, tokens: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values [l, n/t, d] of vectors [l, w].

        Args:
            latent: The vectors [l, w]. Their sequences may have different adapters.
            tokens: A function that returns, for each vector, the index in the step of a new token
                of its sequence, int64 [l].
        """
        ...

    def absorbed(self, query: Tensor) -> Tensor:
        """Map queries for keys to queries for cached vectors, [s, n/t, w].

        Args:
            query: The queries of the first tokens of the step, [s, n/t, d].
        """
        ...

    def values(self, mixed: Tensor) -> Tensor:
        """Map weighted sums of vectors to weighted sums of values, [s, n/t, d].

        Args:
            mixed: The weighted sums of vectors for the first tokens of the step, [s, n/t, rank].
        """
        ...


class LatentSizes(NamedTuple):
    """The sizes of cached latent vectors.

    Attributes:
        width: The number of channels w.
        rank: The number of leading channels from which values are computed.
    """

    width: int
    rank: int


def choose_paged_attention(
    library: KernelLibrary | None,
    head_size: int,
    dtype: torch.dtype,
    *,
    latent: LatentSizes | None = None,
    batch_invariant: bool = False,
    has_slopes: bool = False,
    chunk_remainder: int = 0,
) -> PagedAttention:
    """Choose the kernels if there is a library that supports the sizes, otherwise PyTorch.

    Args:
        library: Compiled kernels; `None` means PyTorch's operations.
        head_size: The number of channels of a head.
        dtype: The data type of the cache.
        latent: The sizes of latent vectors, if they are cached instead of keys and values.
        batch_invariant: Whether results must be bitwise identical to those of training.
        has_slopes: Whether ALiBi biases are added to the scores.
        chunk_remainder: The number of tokens in a chunk, modulo the size of a cache block.
    """
    if batch_invariant:
        return BatchInvariantPaged()
    if library is None or has_slopes or chunk_remainder:
        reason = "no fused kernels"
        if has_slopes:
            reason = "--position-embedding-type alibi: no kernel adds biases"
        elif chunk_remainder:
            reason = "--attention-chunk-size: no kernel divides blocks of the cache"
        return PagedAttention(reason)
    if latent is not None:
        max_rank = constant("latent_attention.cu", "kMostRank")
        fits = dtype.itemsize == 2 and latent.width % 8 == latent.rank % 8 == 0
        if dtype not in DTYPE_CODES or not fits or latent.rank > max_rank:
            sizes = f"{latent.rank} and {latent.width - latent.rank} channels"
            return PagedAttention(f"no fused kernel for latent vectors of {sizes} in {dtype}")
        return FusedPaged(library)
    vectors, remainder = divmod(head_size * dtype.itemsize, VECTOR_BYTES)
    if remainder or vectors > LARGEST_VECTORS or dtype not in DTYPE_CODES:
        return PagedAttention(f"no fused kernel for heads of {head_size} in {dtype}")
    return FusedPaged(library)


class PagedAttention:
    """Attention to a cache, and writing to the cache, in plain PyTorch.

    Args:
        reason: The reason for not using kernels.

    Attributes:
        name: The name for the start-up panel.
        can_capture: Whether CUDA graphs can capture `singles`, because the same kernels run for all
            lengths up to `Singles.longest`.
    """

    can_capture = False

    def __init__(self, reason: str = "as requested") -> None:
        """Store the reason."""
        self.name = f"plain PyTorch ({reason})"

    def singles(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        singles: Singles,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of one query per sequence.

        Args:
            query: The queries [u, n, d].
            keys: The cached keys [slots, g, d], including those of the new tokens.
            values: The cached values [slots, g, d].
            singles: The sequences.
            options: The attention options; the mask and `causal` are not used.

        Returns:
            The results [u, n, d], which are undefined for sequences without tokens.
        """
        # Heads of a group are passed as positions, which share keys, so that no key is copied.
        key, value, visible = self._gathered(keys, values, singles, options)
        by_group = query.unflatten(1, (keys.shape[1], -1))
        if options.slopes is not None:
            positions = torch.arange(key.shape[2], device=key.device)
            distances = (positions + 1 - singles.lengths[:, None])[:, None]  # [u, 1, l]
            visible = add_slopes(visible, options.slopes, distances, query.dtype)  # [u, n, 1, l]
            visible = visible.view(*by_group.shape[:3], -1)
        if options.softcap is not None or options.sinks is not None:
            return _with_scores(by_group, key, value, visible, options).flatten(1, 2)
        out = F.scaled_dot_product_attention(
            by_group, key, value, attn_mask=visible, scale=options.scale
        )
        return out.flatten(1, 2)

    def latent_singles(
        self,
        query: Tensor,
        vectors: Tensor,
        heads: LatentHeads,
        singles: Singles,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of one query per sequence to latent vectors.

        Args:
            query: The queries [u, n, d].
            vectors: The cached vectors [slots, 1, w], including those of the new tokens.
            heads: The layer that computes keys and values from these vectors.
            singles: The sequences.
            options: The attention options; the mask and `causal` are not used.

        Returns:
            The results [u, n, d], which are undefined for sequences without tokens.
        """
        values = vectors[..., : heads.rank]
        mixed = self.singles(heads.absorbed(query), vectors, values, singles, options)
        return heads.values(mixed)

    def _gathered(
        self, keys: Tensor, values: Tensor, singles: Singles, options: AttentionOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values [u, g, l, d] by sequence, and their visibility, [u, 1, 1, l].

        l is the upper bound on the lengths or the length of a chunk, whichever is smaller.
        """
        size, lengths, longest = singles.block_size, singles.lengths[:, None], singles.longest
        starts = torch.zeros_like(lengths)
        if options.chunk is not None:
            starts, longest = chunk_starts(lengths, options.chunk), min(longest, options.chunk)
        offsets = torch.arange(longest, device=keys.device)
        # A chunk may be longer than its sequence.
        positions = (starts + offsets).clamp(max=singles.tables.shape[1] * size - 1)  # [u, l]
        slots = singles.tables.gather(1, positions // size).long() * size + positions % size
        key, value = (x[slots].transpose(1, 2) for x in (keys, values))  # [u, g, l, d]
        lengths = lengths - starts
        visible = offsets < lengths
        if options.window is not None:
            visible &= offsets >= lengths - 1 - options.window
        return key, value, visible[:, None, None]

    def chunks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: tuple[Tensor, Tensor],
        chunks: Chunks,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of consecutive tokens of prompts (see `chunk_attention`)."""
        return chunk_attention(query, key, value, cache, chunks, options)

    def append(
        self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Write new keys and values to the cache.

        Args:
            key: The keys of the new tokens, [s, g, d].
            value: The values of the new tokens, [s, g, d].
            keys: The cached keys [slots, g, d].
            values: The cached values [slots, g, d].
            slots: The slot of each new token, int64 [s].
        """
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)


class BatchInvariantPaged(PagedAttention):
    """Attention that is bitwise equal to `batch_invariant_attention` in training."""

    def __init__(self) -> None:
        """Set the name."""
        super().__init__("--batch-invariant-mode")

    def singles(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        singles: Singles,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of one query per sequence."""
        key, value, visible = self._gathered(keys, values, singles, options)
        return attend(query.unsqueeze(2), key, value, visible, options).squeeze(2)

    def latent_singles(
        self,
        query: Tensor,
        vectors: Tensor,
        heads: LatentHeads,
        singles: Singles,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of one query per sequence to keys and values computed from vectors.

        The keys and values are computed in the same way as in training.
        """
        latent, _, visible = self._gathered(vectors, vectors[..., :0], singles, options)
        sequences, _, length, _ = latent.shape
        indices = torch.arange(sequences, device=latent.device)
        tokens = partial(indices.repeat_interleave, length)
        key, value = (
            x.unflatten(0, (sequences, length)).transpose(1, 2)
            for x in heads.expanded(latent.flatten(0, 2), tokens)
        )
        return attend(query.unsqueeze(2), key, value, visible, options).squeeze(2)

    def chunks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: tuple[Tensor, Tensor],
        chunks: Chunks,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of consecutive tokens of prompts, one sequence at a time."""
        if options.chunk is not None:
            chunks = chunks.within(options.chunk)
        if chunks.slots is not None:
            key, value = (x[chunks.slots] for x in cache)  # [l, g, d]
        lengths = [start + size for start, size in zip(chunks.starts, chunks.sizes, strict=True)]
        parts = []
        splits = query.split(chunks.sizes), key.split(lengths), value.split(lengths)
        for rows in zip(*splits, strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in rows)  # [1, n or g, tokens, d]
            visible = options.visible_keys(q.shape[2], k.shape[2], query.device)
            out = attend(q, k, v, visible[None, None], options)
            parts.append(out.squeeze(0).transpose(0, 1).flatten(1))
        return torch.cat(parts)


class FusedPaged(PagedAttention):
    """Attention to a cache with a kernel for parts of the cache, and another to merge the results.

    The bits of a sequence's result do not depend on the other sequences.

    Args:
        library: Compiled kernels.
    """

    can_capture = True

    def __init__(self, library: KernelLibrary) -> None:
        """Store the compiled kernels."""
        self.name = "fused over the cache"
        self._library = library

    def singles(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        singles: Singles,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of one query per sequence."""
        if options.chunk is not None:
            singles = singles.within(options.chunk)
        return paged_attention(
            self._library,
            *(query, keys, values, singles.tables, singles.lengths),
            *(singles.longest, singles.block_size, options),
        )

    def latent_singles(
        self,
        query: Tensor,
        vectors: Tensor,
        heads: LatentHeads,
        singles: Singles,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of one query per sequence to latent vectors."""
        mixed = latent_attention(
            self._library,
            *(heads.absorbed(query), vectors, heads.rank, singles.tables, singles.lengths),
            *(singles.longest, singles.block_size, options),
        )
        return heads.values(mixed)

    def append(
        self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Write new keys and values to the cache with a kernel."""
        append_to_cache(self._library, key, value, keys, values, slots)


@operator()
def paged_attention(
    library: KernelLibrary,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    longest: int,
    block_size: int,
    options: AttentionOptions = _PLAIN,
) -> Tensor:
    """Compute attention of one query per sequence with kernels.

    Args:
        library: Compiled kernels.
        query: The queries [u, n, d].
        keys: The cached keys [slots, g, d], including those of the new tokens.
        values: The cached values [slots, g, d].
        tables: The cache blocks of each sequence, int32 [u, m].
        lengths: The number of tokens of each sequence, int32 [u].
        longest: An upper bound on the lengths.
        block_size: The number of tokens in a cache block.
        options: The attention options; the mask, `causal` and `slopes` are not used.

    Returns:
        The results [u, n, d], which are undefined for sequences without tokens.
    """
    query, sinks, window = query.contiguous(), options.sinks, options.window
    rows, heads, size = query.shape
    groups, parts = keys.shape[1], -(-longest // PART)
    partial_sums = None
    if parts > 1:
        partial_sums = query.new_empty(rows, heads, parts, size + 2, dtype=torch.float32)
    out = torch.empty_like(query)
    library.launch(
        PAGED_ATTENTION,
        *(query, keys, values, tables, lengths, partial_sums, out),
        None if sinks is None else sinks.float(),
        *(rows, groups, heads // groups, size, tables.shape[1], block_size),
        *(parts, longest if window is None else window, DTYPE_CODES[query.dtype]),
        options.scale or 1 / math.sqrt(size),
        options.softcap or 0.0,
    )
    return out


@operator()
def latent_attention(
    library: KernelLibrary,
    query: Tensor,
    vectors: Tensor,
    rank: int,
    tables: Tensor,
    lengths: Tensor,
    longest: int,
    block_size: int,
    options: AttentionOptions = _PLAIN,
) -> Tensor:
    """Compute attention of one query per sequence to cached latent vectors with kernels.

    Args:
        library: Compiled kernels.
        query: The queries [u, n, w].
        vectors: The cached vectors [slots, 1, w], including those of the new tokens.
        rank: The number of leading channels of each vector that enter the weighted sums.
        tables: The cache blocks of each sequence, int32 [u, m].
        lengths: The number of tokens of each sequence, int32 [u].
        longest: An upper bound on the lengths.
        block_size: The number of tokens in a cache block.
        options: The attention options; the mask, `causal` and `slopes` are not used.

    Returns:
        The weighted sums of the vectors' leading channels, [u, n, rank].
    """
    query, sinks, window = query.contiguous(), options.sinks, options.window
    rows, heads, width = query.shape
    parts = -(-longest // PART)
    partial_sums = None
    if parts > 1:
        partial_sums = query.new_empty(rows, heads, parts, rank + 2, dtype=torch.float32)
    out = query.new_empty(rows, heads, rank)
    library.launch(
        LATENT_ATTENTION,
        *(query, vectors, tables, lengths, partial_sums, out),
        None if sinks is None else sinks.float(),
        *(rows, heads, width, rank, tables.shape[1], block_size),
        *(parts, longest if window is None else window, DTYPE_CODES[query.dtype]),
        options.scale or 1 / math.sqrt(width),
        options.softcap or 0.0,
    )
    return out


@operator("keys", "values")
def append_to_cache(
    library: KernelLibrary, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> None:
    """Write new keys and values to the cache with a kernel (see `PagedAttention.append`)."""
    key, value = key.contiguous(), value.contiguous()
    width = key[0].numel() * key.element_size() // VECTOR_BYTES
    library.launch(APPEND_TO_CACHE, key, value, keys, values, slots, len(slots), width)


def _with_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute attention of one query per sequence, with all scores in memory.

    Args:
        query: The query heads by group, [u, g, n/g, d].
        key: The keys [u, g, l, d].
        value: The values [u, g, l, d].
        mask: A mask, bool [u, 1, 1, l], True where a query may attend; or values [u, g, n/g, l]
            that are added to the scores.
        options: The scale, the bound on the scores and the sinks.

    Returns:
        The results [u, g, n/g, d].
    """
    scores = (query @ key.transpose(2, 3)).float() * (options.scale or query.shape[-1] ** -0.5)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    has_biases = mask.is_floating_point()
    scores = scores + mask if has_biases else scores.masked_fill(~mask, -math.inf)
    total = scores.logsumexp(-1)  # [u, g, n/g]
    if options.sinks is not None:
        total = total.logaddexp(options.sinks.float().view(query.shape[1:3]))
    return (scores - total.unsqueeze(-1)).exp().to(value.dtype) @ value
