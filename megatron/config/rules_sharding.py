"""Checks of what data-parallel processes share, and how. See `checks`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.resolve import data_parallel_size
from megatron.config.run import RunOptions


def sharding(config: RunOptions, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    stage = parallel.zero_stage or 0
    if parallel.use_distributed_optimizer and stage == 0:
        yield "--use-distributed-optimizer and --zero-stage 0 exclude each other: keep one"
    if parallel.overlap_param_gather and stage == 0:
        yield (
            "--overlap-param-gather: without a shared update there is nothing to gather: add "
            "--use-distributed-optimizer, or drop the flag"
        )
    if stage == 3 and parallel.pipeline_schedule == "zero-bubble":
        yield (
            "--zero-stage 3 with --pipeline-schedule zero-bubble: a layer's weights are given back "
            "before its weight gradients are computed: use 1f1b, or --zero-stage 1"
        )


def torch_ddp(config: RunOptions, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    if parallel.ddp_impl != "torch":
        return
    shown, remedy = "--DDP-impl torch", "use --DDP-impl local"
    if parallel.zero_stage:
        yield (
            f"{shown} shares nothing, --zero-stage {parallel.zero_stage} (or "
            f"--use-distributed-optimizer) asks for it: {remedy}, or --zero-stage 0"
        )
    if parallel.pipeline_model_parallel_size > 1:
        yield (
            f"{shown} follows one backward at a time, --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size} has several under way: {remedy}"
        )
    if config.precision.accumulate_allreduce_grads_in_fp32:
        yield (
            f"{shown} sums gradients in the weights' format, --bf16 and "
            f"--accumulate-allreduce-grads-in-fp32 in fp32: {remedy}"
        )


def no_effect(config: RunOptions, world_size: int) -> Iterator[str]:
    """Notices: what is done anyway, and what one process has nobody to do it with."""
    parallel = config.parallel
    if data_parallel_size(config, world_size) * parallel.context_parallel_size == 1:
        yield from _alone(config)
        return
    if parallel.zero_stage == 3:
        for name, on in (
            ("--overlap-grad-reduce", parallel.overlap_grad_reduce),
            ("--overlap-param-gather", parallel.overlap_param_gather),
        ):
            if on:
                yield f"{name}: --zero-stage 3 always communicates while it computes"
    if parallel.ddp_impl == "torch" and parallel.overlap_grad_reduce:
        yield "--overlap-grad-reduce: --DDP-impl torch always reduces during backward"


def _alone(config: RunOptions) -> Iterator[str]:
    parallel = config.parallel
    distributed = parallel.use_distributed_optimizer
    stage = "--use-distributed-optimizer" if distributed else f"--zero-stage {parallel.zero_stage}"
    # Files of Megatron-LM are others with its flag, for any number of processes.
    is_kept = distributed and config.checkpoint.ckpt_format == "legacy"
    given = [
        name
        for name, on in (
            (stage, parallel.zero_stage and not is_kept),
            ("--DDP-impl torch", parallel.ddp_impl == "torch"),
            ("--overlap-grad-reduce", parallel.overlap_grad_reduce),
            ("--overlap-param-gather", parallel.overlap_param_gather),
            ("--fp8-param-gather", config.precision.fp8_param_gather),
        )
        if on
    ]
    if given:
        yield f"{', '.join(given)}: one data-parallel process: there is nobody to share with"
