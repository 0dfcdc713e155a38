"""Checks of context parallelism. See `checks`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.run import RunOptions


def context(config: RunOptions, world_size: int) -> Iterator[str]:
    size, length = config.parallel.context_parallel_size, config.data.seq_length
    if size <= 1:
        return
    shown = f"--context-parallel-size {size}"
    if length and length > 0 and length % (2 * size):
        yield (
            f"--seq-length {length} is not divisible by 2 x {shown}: each process takes an early "
            f"and a late piece: use a multiple of {2 * size}"
        )
    if config.data.reset_attention_mask:
        yield f"--reset-attention-mask does not go with {shown}: drop it, or use 1"
    if config.parallel.cp_comm_type == "a2a":
        yield from _all_to_all(config, shown)


def _all_to_all(config: RunOptions, shown: str) -> Iterator[str]:
    model, size = config.model, config.parallel.context_parallel_size
    tensor = max(config.parallel.tensor_model_parallel_size, 1)
    counts = {"--num-attention-heads": model.num_attention_heads}
    if model.group_query_attention:
        counts["--num-query-groups"] = model.num_query_groups
    for name, count in counts.items():
        if count and count > 0 and count % (tensor * size):
            yield (
                f"{name} {count} is not divisible by {shown} x --tensor-model-parallel-size "
                f"{tensor} = {size * tensor}, and --cp-comm-type a2a spreads heads: use "
                "--cp-comm-type p2p, or fewer processes"
            )
