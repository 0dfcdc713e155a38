"""Checks of `--tp-comm-overlap`. See `checks`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.run import RunOptions

FLAG = "--tp-comm-overlap"


def overlap(config: RunOptions, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    if not parallel.tp_comm_overlap or parallel.tensor_model_parallel_size <= 1:
        return  # of the latter there is a notice
    if not parallel.sequence_parallel:
        yield (
            f"{FLAG}: only what --sequence-parallel sends can travel beside parts of a product: "
            f"add that, or drop {FLAG}"
        )
    for flag, reason in _cannot(config):
        yield f"{FLAG} with {flag}: {reason}: drop one"


def _cannot(config: RunOptions) -> Iterator[tuple[str, str]]:
    """Flags with which it does not go, and why."""
    parallel, numbers, training = config.parallel, config.precision, config.training
    if numbers.fp8_format is not None and numbers.fp8_recipe == "rowwise":
        yield (
            "--fp8-recipe rowwise",
            "the transpose of a part has other scales than that of the whole",
        )
    if numbers.fp8_format is not None and not numbers.fp8_wgrad:
        yield "--no-fp8-wgrad", "an input would travel twice, in 8 bits and in 16"
    if not parallel.async_tensor_model_parallel_allreduce:
        yield "--no-async-tensor-model-parallel-allreduce", "one asks for what the other forbids"
    if training.cuda_graph_impl != "none":
        yield (
            f"--cuda-graph-impl {training.cuda_graph_impl}",
            "a recording would not know which memory of its neighbours is free",
        )
    if parallel.distributed_backend != "nccl":
        yield (
            f"--distributed-backend {parallel.distributed_backend}",
            "it is for GPUs that map each other's memory",
        )


def no_effect(config: RunOptions) -> Iterator[str]:
    """Notices: what changes nothing."""
    if config.parallel.tp_comm_overlap and config.parallel.tensor_model_parallel_size == 1:
        yield f"{FLAG}: one tensor-parallel process: there is nothing to send"
