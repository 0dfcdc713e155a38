"""Rules on adapters (LoRA): what they cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.adapters import FROZEN_BLOCK
from megatron.config.fields import near_multiples
from megatron.config.run import RunOptions


def adapters(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that does not go together with adapters."""
    model, parallel, rank = config.model, config.parallel, config.model.lora_rank
    if rank is None:
        return
    shown = f"--lora-rank {rank}"
    if config.precision.fp8_format is not None:
        yield f"{shown}: frozen weights do not multiply in 8 bits: use --bf16 without --fp8-format"
    if model.use_dora and parallel.zero_stage == 3:
        yield (
            "--use-dora: the lengths of rows are not known while weights are in shards: use "
            "--zero-stage 2, or drop the flag"
        )
    groups, tensor = model.num_query_groups, parallel.tensor_model_parallel_size
    if model.group_query_attention and groups and groups < tensor:
        yield (
            f"{shown}: --tensor-model-parallel-size {tensor} divides the {groups} query groups: "
            f"use at most {groups}"
        )
    if config.checkpoint.ckpt_format != "native":
        yield (
            f"{shown}: --ckpt-format {config.checkpoint.ckpt_format} has no adapters: use native, "
            "and merge them when you convert the checkpoint"
        )
    if model.frozen_weights_dtype is not None:
        yield from _packed_weights(config)


def _packed_weights(config: RunOptions) -> Iterator[str]:
    """Yield an error for each setting that does not go together with packed frozen weights."""
    shown = f"--frozen-weights-dtype {config.model.frozen_weights_dtype}"
    if config.parallel.zero_stage == 3:
        yield (
            f"{shown}: --zero-stage 3 keeps shards of weights in fp32, and gathers them in the "
            "weights' format: use --zero-stage 2, or drop the flag"
        )
    if config.parallel.ddp_impl == "torch":
        yield (
            f"{shown}: --DDP-impl torch sends all weights to all processes: use --DDP-impl local, "
            "or drop the flag"
        )
    for name, size, parts in _row_widths(config):
        if size % (FROZEN_BLOCK * parts):
            share = f" on each of {parts} processes" if parts > 1 else ""
            yield (
                f"{shown}: {name} {size} is not a multiple of {FROZEN_BLOCK}{share}, and so many "
                f"weights share a scale: use {near_multiples(size, FROZEN_BLOCK * parts)}, fewer "
                "tensor-parallel processes, or drop the flag"
            )


def _row_widths(config: RunOptions) -> Iterator[tuple[str, int, int]]:
    """Yield the name and size of each linear layer's input, and the parts that it is cut into."""
    model, parallel = config.model, config.parallel
    split = max(1, parallel.tensor_model_parallel_size)
    yield "--hidden-size", model.hidden_size or 0, 1
    heads, head = model.num_attention_heads or 0, model.kv_channels or 0
    yield "--num-attention-heads x --kv-channels", heads * head, split
    yield "--ffn-hidden-size", model.ffn_hidden_size or 0, split
    if model.num_experts:
        of_experts = parallel.expert_tensor_parallel_size or split
        yield "--moe-ffn-hidden-size", model.moe_ffn_hidden_size or 0, of_experts
        shared = model.moe_shared_expert_intermediate_size or 0
        yield "--moe-shared-expert-intermediate-size", shared, split
