"""Rules on adapters (LoRA): what they cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator

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
