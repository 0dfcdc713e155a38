"""An engine around a model: how much cache there is room for, and what attends over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.config import RunConfig
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.inference.cache import CacheMemory
from megatron.inference.engine import BatchEngine
from megatron.inference.executor import Executor
from megatron.inference.graphs import DecodeGraphs
from megatron.inference.load import Loaded
from megatron.inference.scheduler import SchedulerSettings
from megatron.kernels.library import find_library
from megatron.kernels.paged_attention import PagedAttention, choose_paged_attention, describe_chunks
from megatron.kernels.row_product import choose_row_product
from megatron.models.gpt import GPTModel
from megatron.models.plan import ModelPlan
from megatron.parallel.collectives import all_reduce
from megatron.parallel.every_layer import set_products
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.products import PLAIN, RowByRow

CPU_CACHE_BYTES = 2**30
GPU_CACHE_SHARE = 0.9  # of the memory that the model leaves free
# Of a GPU's free memory, not for the cache: logits and activations of a step.
GPU_STEP_BYTES = 3 * 2**30
_COUNTS = ("max_sequences", "max_step_tokens", "cache_tokens", "block_size")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes.

    Attributes:
        max_sequences: computed at a time; others wait.
        max_step_tokens: a step computes at most so many; longer prompts take several.
        cache_tokens: of all sequences together; None: what fits in memory, and no more than
            `max_sequences` of full length need.
        block_size: tokens of a block of the cache.
        seed: of requests that have none of their own.
        graphs: record steps on a GPU (CUDA graphs), where one process has the whole model.
    """

    max_sequences: int = 256
    max_step_tokens: int = 2048
    cache_tokens: int | None = None
    block_size: int = 16
    seed: int = 1234
    graphs: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError where a value is out of range."""
        problems = [
            f"{name} {value}: give 1 or more"
            for name in _COUNTS
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.max_step_tokens < self.max_sequences:
            problems.append(
                f"max_step_tokens {self.max_step_tokens} is less than max_sequences "
                f"{self.max_sequences}: each sequence of a step adds at least one token"
            )
        if problems:
            raise ConfigError(problems)


def engine_of(
    loaded: Loaded,
    device: Device,
    options: EngineOptions | None = None,
    *,
    copy: Axis | None = None,
) -> BatchEngine:
    """An engine for a checkpoint that `load_gpt` has read. Collective over its layout."""
    return build_engine(
        loaded.model,
        loaded.config,
        loaded.layout,
        device,
        vocab_size=loaded.tokenizer.vocab_size,
        options=options,
        copy=copy,
    )


def build_engine(
    model: GPTModel,
    config: RunConfig,
    layout: Layout,
    device: Device,
    *,
    vocab_size: int,
    options: EngineOptions | None = None,
    copy: Axis | None = None,
) -> BatchEngine:
    """An engine for a model in memory. Collective over `layout`.

    Args:
        model: this process's part.
        config: what it was built from.
        layout: who this process is: tensor and pipeline ranks.
        device: of the model.
        vocab_size: entries that can be chosen; those behind are padding.
        options: sizes; None: the defaults.
        copy: of several data-parallel copies of the model, the ranks of this one, stage by stage:
            each is an engine of its own. None: there is one copy, of all ranks.

    Raises:
        ConfigError: no sequence fits in memory.
    """
    options = options or EngineOptions()
    if copy is None:
        ranks = layout.tensor.size * layout.pipeline.size
        assert ranks == layout.world.size, "arguments.RULES: one copy of the model"
        assert not layout.sequence_parallel, "a step's tokens do not divide over tensor ranks"
    copy = copy or layout.world
    dtype = config.precision.weight_dtype
    plan = model.plan
    head_size = plan.attention.head_size
    row_product = choose_row_product(device.torch_device)
    set_products(model, PLAIN if row_product is None else RowByRow(row_product))
    blocks, memory = _cache(model, options, layout, device, dtype)
    library = find_library(device.torch_device)
    paged = choose_paged_attention(library.library, head_size, dtype)
    without = _why_no_graphs(options, paged, device, copy)
    graphs = None if without else _graphs(model, memory, paged, options, plan.positions, device)
    executor = Executor(
        model.eval(),
        layout,
        memory,
        copy=copy,
        paged=paged,
        graphs=graphs,
        vocab_size=vocab_size,
        hidden=plan.hidden,
        stream_dtype=config.precision.stream_dtype,
        device=device,
    )
    settings = SchedulerSettings(
        blocks=blocks,
        block_size=options.block_size,
        max_sequences=options.max_sequences,
        max_tokens=options.max_step_tokens,
    )
    chunks = describe_chunks(head_size, dtype, device.torch_device)
    return BatchEngine(
        executor,
        settings,
        vocab_size=vocab_size,
        max_length=plan.positions,
        seed=options.seed,
        looks_ahead=queues_on(device),
        choices=[
            ("attention", f"of new tokens {paged.name}; of prompts {chunks}"),
            ("products", "PyTorch's" if row_product is None else "cuBLASLt's, a row as if alone"),
            ("other kernels", str(library)),
            ("CUDA graphs", f"none ({without})" if without else "recorded when first needed"),
            ("cache", _describe_cache(blocks, options, memory, copy)),
            ("at a time", f"{options.max_sequences:,} sequences"),
        ],
    )


def _cache(
    model: GPTModel,
    options: EngineOptions,
    layout: Layout,
    device: Device,
    dtype: torch.dtype,
) -> tuple[int, CacheMemory]:
    """Blocks of the cache, and their memory. Collective."""
    attention = model.plan.attention
    groups = max(1, attention.kv_heads // layout.tensor.size)
    token_bytes = 2 * len(model.part.layers) * groups * attention.head_size * dtype.itemsize
    blocks = _blocks(options, model.plan, token_bytes, layout, device)
    memory = CacheMemory(
        model.part.layers,
        blocks=blocks,
        block_size=options.block_size,
        groups=groups,
        head_size=attention.head_size,
        device=device.torch_device,
        dtype=dtype,
    )
    return blocks, memory


def _describe_cache(blocks: int, options: EngineOptions, memory: CacheMemory, copy: Axis) -> str:
    each = " on rank 0" if copy.size > 1 else ""
    return (
        f"{blocks * options.block_size:,} tokens, {blocks:,} blocks of {options.block_size}: "
        f"{memory.size_bytes / 1e9:.3g} GB{each}"
    )


def _why_no_graphs(
    options: EngineOptions, paged: PagedAttention, device: Device, copy: Axis
) -> str:
    """What keeps steps from being recorded; empty: nothing does."""
    if not options.graphs:
        return "not asked for"
    if not records_on(device):
        return f"{device.type} has none"
    if not paged.can_capture:
        return "attention is not of fixed kernels"
    return f"{copy.size} processes have the model" if copy.size > 1 else ""


def _graphs(
    model: GPTModel,
    memory: CacheMemory,
    paged: PagedAttention,
    options: EngineOptions,
    max_length: int,
    device: Device,
) -> DecodeGraphs:
    return DecodeGraphs(
        model,
        memory,
        paged,
        device.recorder(),
        max_sequences=options.max_sequences,
        max_length=max_length,
        device=device,
    )


def queues_on(device: Device) -> bool:
    """Whether work goes on there while this process prepares more."""
    return device.is_gpu


def records_on(device: Device) -> bool:
    """Whether kernels can be recorded there."""
    return device.is_gpu


def _blocks(
    options: EngineOptions, plan: ModelPlan, token_bytes: int, layout: Layout, device: Device
) -> int:
    """How many, the same on every rank."""
    most = options.max_sequences * plan.positions
    tokens = options.cache_tokens
    if tokens is None:
        tokens = min(most, _cache_bytes(device) // token_bytes)
    blocks = torch.tensor(tokens // options.block_size, device=device.torch_device)
    count = int(all_reduce(blocks, layout.world, dist.ReduceOp.MIN))
    if count < 1:
        raise ConfigError(
            f"the key-value cache has room for {tokens} tokens, less than one block of "
            f"{options.block_size}: give it more memory, or split the model over more GPUs"
        )
    return count


def _cache_bytes(device: Device) -> int:
    if not device.is_gpu:
        return CPU_CACHE_BYTES
    return max(0, int((device.free_memory() - GPU_STEP_BYTES) * GPU_CACHE_SHARE))
