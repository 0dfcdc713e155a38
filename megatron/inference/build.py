"""Construction of an engine for a model, with its cache, attention and CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.config.generation import Speculation
from megatron.config.model import ModelConfig
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.inference.cache import CacheMemory
from megatron.inference.engine import BatchEngine
from megatron.inference.executor import DecodeGraphs, Executor
from megatron.inference.load import Loaded
from megatron.inference.request import EngineLimits
from megatron.inference.scheduler import SchedulerSettings
from megatron.inference.speculation import Drafter, MultiTokenDrafter, NgramDrafter
from megatron.kernels.chunk_attention import describe_chunks
from megatron.kernels.library import find_library
from megatron.kernels.paged_attention import LatentSizes, PagedAttention, choose_paged_attention
from megatron.kernels.row_product import choose_row_product
from megatron.models.plan import (
    AttentionPlan,
    LatentAttentionPlan,
    ModelPlan,
    multi_token_plan,
)
from megatron.models.recurrent_plan import ParallelMambaPlan, RecurrentPlan, StateSpec
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.pipeline.p2p import PipelineChannel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CPU_CACHE_BYTES = 2**30
_GPU_CACHE_SHARE = 0.9  # fraction of the memory left after loading the model
# GPU memory kept free for a step's logits and activations.
_GPU_STEP_BYTES = 3 * 2**30
_SEQUENCES_PER_SNAPSHOT = 4  # running sequences for each snapshot of states
_UNUSED_HEAD = 64  # head size for choosing kernels if a model has no attention


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        max_sequences: Maximum number of sequences computed at once. Others wait.
        max_step_tokens: Maximum number of tokens in a step, or `max_sequences` if that is larger.
            Longer prompts take several steps.
        cache_tokens: Capacity of the cache in tokens, for all sequences together. `None` uses as
            many as fit in memory (on a CPU, in 1 GiB), but no more than `max_sequences` sequences
            of full length need.
        block_size: Number of tokens in a cache block.
        seed: Seed for requests that do not set one.
        speculation: The method of speculative decoding; `None` generates one token at a time.
        graphs: Whether to record steps as CUDA graphs on a GPU. This needs a single process that
            holds the whole model.
    """

    max_sequences: int = 256
    max_step_tokens: int = 2048
    cache_tokens: int | None = None
    block_size: int = 16
    seed: int = 1234
    graphs: bool = True
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is out of range."""
        problems = [
            f"{name} {value}: give 1 or more"
            for name in ("max_sequences", "max_step_tokens", "cache_tokens", "block_size")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if problems:
            raise ConfigError(problems)


def build_engine(
    loaded: Loaded,
    device: Device,
    options: EngineOptions,
    *,
    replica: Axis | None = None,
    channel: PipelineChannel | None = None,
) -> BatchEngine:
    """Return an engine for a model in memory. Collective over its layout.

    Args:
        loaded: The model, built in a `serving_context`.
        device: Device that the model is on.
        options: Options of the engine.
        replica: Ranks of this copy of the model, stage by stage, if there are several data-parallel
            copies, each with its own engine. `None` means that all ranks hold a single copy.
        channel: The connection to the neighboring stages; `None` creates one.

    Raises:
        ConfigError: The cache does not fit in memory (`make_cache`), or the model does not support
            text generation or the method of speculative decoding.
    """
    layout, precision = loaded.layout, loaded.config.precision
    model = loaded.model.eval()
    if replica is None:
        ranks = layout.tensor.size * layout.pipeline.size
        assert ranks == layout.world.size, "a rule requires a single copy of the model"
        assert not layout.sequence_parallel, "a step's tokens cannot be divided among tensor ranks"
    replica = replica or layout.world
    torch_device, dtype, plan = device.torch_device, precision.weight_dtype, model.plan
    head_size = plan.head_size or _UNUSED_HEAD
    library = find_library(torch_device)
    model_config = loaded.config.model
    has_slopes = model_config.position_embedding_type == "alibi"
    paged = choose_paged_attention(
        *(library.library, head_size, dtype),
        latent=_latent_sizes(plan),
        batch_invariant=model_config.batch_invariant_mode,
        has_slopes=has_slopes,
        chunk_remainder=(model_config.attention_chunk_size or 0) % options.block_size,
    )
    speculation = options.speculation
    reads_states = speculation is not None and speculation.method == "mtp"
    check_speculation(model_config, speculation)
    memory = make_cache(loaded, options, paged, device)
    no_graphs_reason = _why_no_graphs(options, device, paged, replica)
    channel = channel or stage_channel(loaded, device)
    max_sequences, block_size = options.max_sequences, options.block_size
    vocab_size = loaded.tokenizer.vocab_size
    graphs, graph_status = None, f"off ({no_graphs_reason})"
    if not no_graphs_reason:
        graph_status = "recorded when first needed"
        max_rows = max_sequences * (1 + (speculation.num_speculative_tokens if speculation else 0))
        graphs = DecodeGraphs(
            model, memory, device, max_rows, loaded.adapters, keeps_states=reads_states
        )
    cache_tokens = memory.blocks * block_size
    has_row_product = choose_row_product(torch_device) is not None
    is_bounded = model_config.attn_logit_softcapping is not None
    chunks = describe_chunks(
        head_size, dtype, torch_device, is_bounded=is_bounded, has_slopes=has_slopes
    )
    executor = Executor(
        *(model, layout, memory, device, channel, replica, graphs, vocab_size),
        *(loaded.adapters, loaded.earlier_parts),
        keeps_states=reads_states,
    )
    return BatchEngine(
        executor,
        SchedulerSettings(
            blocks=memory.blocks,
            block_size=block_size,
            max_sequences=max_sequences,
            max_tokens=max(max_sequences, options.max_step_tokens),
            has_states=bool(model_config.has_states),
            snapshots=_snapshots(options) if model_config.has_states else 0,
            trained_context=plan.trained_context,
            dynamic_context=plan.dynamic_context,
        ),
        EngineLimits(
            vocab_size=vocab_size,
            max_length=plan.positions,
            cache_tokens=cache_tokens,
            max_beams=max_sequences,
            adapters=0 if loaded.adapters is None else len(loaded.adapters.names),
        ),
        seed=options.seed,
        looks_ahead=is_asynchronous(device),
        panel_rows=[
            ("attention", f"new tokens: {paged.name}; prompts: {chunks}"),
            ("products", "cuBLASLt, independent of the batch" if has_row_product else "PyTorch"),
            ("other kernels", str(library)),
            ("CUDA graphs", graph_status),
            ("cache", _describe_cache(memory, block_size, replica)),
            ("batch", f"up to {max_sequences:,} sequences"),
            *([("drafts", describe_speculation(speculation))] if speculation else []),
        ],
        drafter=None if speculation is None else new_drafter(executor, speculation),
    )


def _describe_cache(memory: CacheMemory, block_size: int, replica: Axis) -> str:
    size = f"{memory.size_bytes / 1e9:.3g} GB{' on rank 0' * (replica.size > 1)}"
    states = " and states" * bool(memory.states)
    tokens = f"{memory.blocks * block_size:,} tokens"
    return f"{tokens}, {memory.blocks:,} blocks of {block_size}{states}: {size}"


def stage_channel(loaded: Loaded, device: Device) -> PipelineChannel:
    """Return the connection of this process's stage to its neighbors. Collective over all ranks.

    Args:
        loaded: The model whose stages to connect.
        device: Device that the model is on.
    """
    return PipelineChannel(
        loaded.layout,
        device=device.torch_device,
        dtype=loaded.config.precision.stream_dtype,
        ring=bool(loaded.earlier_parts),
    )


def _why_no_graphs(
    options: EngineOptions, device: Device, paged: PagedAttention, replica: Axis
) -> str:
    """Return why steps are not recorded as CUDA graphs, or "" if they are."""
    if not options.graphs:
        return "turned off"
    if not is_asynchronous(device):
        return f"not available on {device.type}"
    if not paged.can_capture:
        return "the attention kernels cannot be recorded"
    return f"the model is split over {replica.size} processes" if replica.size > 1 else ""


def check_speculation(model: ModelConfig, speculation: Speculation | None) -> None:
    """Check that the model supports the speculative decoding that --speculative-config requests.

    Raises:
        ConfigError: The model is Retro, has recurrent layers, or has too few multi-token prediction
            layers for the method mtp.
    """
    if speculation is None:
        return
    if model.architecture == "retro":
        raise ConfigError(
            "--speculative-config: a Retro model looks up neighbors for each chunk it completes, "
            "and draft tokens may be rejected: drop it"
        )
    if model.has_states:
        raise ConfigError(
            "--speculative-config: the states of recurrent layers cannot be rolled back past "
            "a rejected draft token: drop it"
        )
    if speculation.method != "mtp":
        return
    depths = model.mtp_num_layers or 0
    num_tokens = speculation.num_speculative_tokens
    prefix = f"--speculative-config: num_speculative_tokens {num_tokens} with the method mtp"
    if not depths:
        raise ConfigError(
            f"{prefix}: the model predicts one token at a time: use the method ngram, or a model "
            "trained with --mtp-num-layers"
        )
    if num_tokens > depths:
        raise ConfigError(
            f"{prefix}: the model was trained with --mtp-num-layers {depths}: give at most {depths}"
        )


def new_drafter(executor: Executor, speculation: Speculation) -> Drafter:
    """Return the drafter for a method of speculative decoding."""
    tokens = speculation.num_speculative_tokens
    if speculation.method == "mtp":
        return MultiTokenDrafter(executor, tokens)
    return NgramDrafter(tokens, speculation.prompt_lookup_max, speculation.prompt_lookup_min)


def describe_speculation(speculation: Speculation) -> str:
    """Return the start-up panel's description of speculative decoding."""
    count = speculation.num_speculative_tokens
    tokens = f"up to {count} token{'s' * (count > 1)}"
    if speculation.method == "mtp":
        return f"{tokens} by the model's multi-token prediction layers"
    shortest, longest = speculation.prompt_lookup_min, speculation.prompt_lookup_max
    return f"{tokens} that followed an earlier occurrence of the last {longest} to {shortest}"


def is_asynchronous(device: Device) -> bool:
    """Return whether the device runs asynchronously, and can record and replay its work."""
    return device.is_gpu


def _latent_sizes(plan: ModelPlan) -> LatentSizes | None:
    """Return the sizes of the latent vectors that the layers cache; `None` if there are none."""
    mixers = (layer.mixer for layer in plan.layers)
    latent = (x for x in mixers if isinstance(x, LatentAttentionPlan))
    return next((LatentSizes(x.rank + x.rope_size, x.rank) for x in latent), None)


def make_cache(
    loaded: Loaded,
    options: EngineOptions,
    paged: PagedAttention,
    device: Device,
    *,
    extra_bytes: int = 0,
) -> CacheMemory:
    """Return a cache for `options.cache_tokens` tokens, or as many as fit in memory. Collective.

    The number of blocks is the same on every rank. If `options.cache_tokens` is set, free memory is
    not checked.

    Args:
        loaded: The model, whose layers determine the size of a block.
        options: Options of the engine.
        paged: Attention over the cache.
        device: Device of the model and the cache.
        extra_bytes: Bytes that the caller allocates for each block in addition to keys and
            values.

    Raises:
        ConfigError: The states of `options.max_sequences` sequences, or a single block, do not fit
            in memory; `options.cache_tokens` is less than a block; or a mixer keeps neither keys
            and values nor states.
    """
    model, layout, dtype = loaded.model, loaded.layout, loaded.config.precision.weight_dtype
    shapes, states = {}, {}
    layers = (index for part in (*loaded.earlier_parts, model) for index in part.part.layers)
    mixers = {index: model.plan.layers[index].mixer for index in layers}
    ahead = multi_token_plan(model.plan)
    if ahead is not None and model.part.head and options.speculation is not None:
        num_drafts = options.speculation.num_speculative_tokens
        depths = ahead.layers[: num_drafts if options.speculation.method == "mtp" else 0]
        mixers |= {ahead.layer_offset + i: layer.mixer for i, layer in enumerate(depths)}
    for index, mixer in mixers.items():
        if isinstance(mixer, AttentionPlan):
            shapes[index] = mixer.cached(layout.tensor.size)
            if isinstance(mixer, ParallelMambaPlan):
                states[index] = mixer.mamba.states(layout.tensor.size)
        elif isinstance(mixer, RecurrentPlan):
            states[index] = mixer.states(layout.tensor.size)
        elif mixer is not None:
            raise ConfigError(
                f"layer {index} ({mixer.kind}) keeps neither keys and values nor states, so it "
                "cannot generate text: extend RecurrentPlan (docs/tour.md, How to add)"
            )
    token_bytes = dtype.itemsize * sum(map(math.prod, shapes.values()))
    block_bytes = options.block_size * token_bytes + extra_bytes
    tokens = options.cache_tokens
    if tokens is None:
        size = _CPU_CACHE_BYTES
        if device.is_gpu:
            size = max(0, int((device.free_memory() - _GPU_STEP_BYTES) * _GPU_CACHE_SHARE))
        tokens = options.max_sequences * model.plan.positions
        state_slots = options.max_sequences + _snapshots(options)
        available = size - state_slots * _state_bytes(states, dtype)
        if available <= 0:
            raise ConfigError(
                f"the states of {options.max_sequences} sequences need more than the "
                f"{size / 1e9:.3g} GB of free memory: allow fewer sequences at once"
            )
        if block_bytes:
            tokens = min(tokens, available * options.block_size // block_bytes)
    blocks = torch.tensor(tokens // options.block_size, device=device.torch_device)
    num_blocks = int(all_reduce(blocks, layout.world, dist.ReduceOp.MIN))
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache has room for {tokens} tokens, less than one block of "
            f"{options.block_size}: give it more memory, or split the model over more GPUs"
        )
    return CacheMemory(
        *(shapes, paged, num_blocks, options.block_size, device.torch_device, dtype),
        recurrent=states,
        state_slots=options.max_sequences + _snapshots(options),
    )


def _snapshots(options: EngineOptions) -> int:
    """Return the number of state snapshots to keep, for prompts that share a prefix."""
    return -(-options.max_sequences // _SEQUENCES_PER_SNAPSHOT)


def _state_bytes(states: Mapping[int, tuple[StateSpec, ...]], dtype: torch.dtype) -> int:
    """Return the size of one sequence's states, in bytes.

    Args:
        states: The states of each recurrent layer.
        dtype: Number format of states that do not have their own.
    """
    all_specs = (spec for specs in states.values() for spec in specs)
    return sum(math.prod(spec.shape) * (spec.dtype or dtype).itemsize for spec in all_specs)


def replica_ranks(layout: Layout) -> Axis:
    """Return the ranks of this process's copy of the model, stage by stage. Collective."""
    if layout.data.size == 1:
        return layout.world
    ranks = tuple(
        stage - layout.tensor.rank + part
        for stage in layout.pipeline.ranks
        for part in range(layout.tensor.size)
    )
    return Axis(
        size=len(ranks),
        rank=ranks.index(layout.world.rank),
        ranks=ranks,
        group=_group_of(layout, ranks),
        journal=layout.journal,
    )


def _group_of(layout: Layout, ranks: tuple[int, ...]) -> ProcessGroup | None:
    """Return the process group of these ranks, or `None` for a single rank. Collective.

    Every process creates the groups of all replicas, in the same order.
    """
    if len(ranks) == 1:
        return None
    step = layout.data.ranks[1] - layout.data.ranks[0]
    first = [rank - layout.data.rank * step for rank in ranks]
    groups = [
        dist.new_group([rank + index * step for rank in first]) for index in range(layout.data.size)
    ]
    group: ProcessGroup = groups[layout.data.rank]
    return group
