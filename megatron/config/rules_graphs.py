"""Checks of passes that are recorded and run again. See `checks`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.run import RunOptions
from megatron.config.training import TrainingOptions


def graphs(config: RunOptions, world_size: int) -> Iterator[str]:
    training = config.training
    shown = f"--cuda-graph-impl {training.cuda_graph_impl}"
    if training.cuda_graph_impl == "none":
        if training.cuda_graph_warmup_steps != TrainingOptions().cuda_graph_warmup_steps:
            yield (
                f"--cuda-graph-warmup-steps {training.cuda_graph_warmup_steps} needs "
                "--cuda-graph-impl local"
            )
        return
    if training.cuda_graph_impl == "transformer_engine":
        yield f"{shown}: Transformer Engine is not used: use local"
        return
    if training.cuda_graph_impl == "full_iteration":
        yield f"{shown}: what is recorded is a micro-batch, not all of an iteration: use local"
        return
    if training.cuda_graph_warmup_steps < 1:
        yield (
            f"--cuda-graph-warmup-steps {training.cuda_graph_warmup_steps}: libraries set "
            "themselves up in a first iteration: use 1 or more"
        )
    for flag, reason in _cannot(config):
        yield f"{shown} with {flag}: {reason}: drop one"


def _cannot(config: RunOptions) -> Iterator[tuple[str, str]]:
    """Flags under which a pass cannot be recorded, or would differ from the recording; and why."""
    training, parallel, data = config.training, config.parallel, config.data
    if training.recompute_granularity is not None:
        yield (
            f"--recompute-granularity {training.recompute_granularity}",
            "recomputation sets the state of the random numbers from the host",
        )
    if parallel.tensor_model_parallel_size > 1:
        yield from _cannot_when_split(config)
    for name, size in (
        ("--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size),
        ("--context-parallel-size", parallel.context_parallel_size),
    ):
        if size > 1:
            yield f"{name} {size}", "messages between processes are not recorded"
    if parallel.pipeline_schedule not in (None, "1f1b"):
        yield (
            f"--pipeline-schedule {parallel.pipeline_schedule}",
            "a recording has room for one micro-batch",
        )
    if (parallel.zero_stage or 0) > 1:
        yield (
            f"--zero-stage {parallel.zero_stage}",
            "gradients and weights are not in one place for a whole iteration",
        )
    if parallel.ddp_impl == "torch":
        yield "--DDP-impl torch", "it averages gradients inside of the backward pass"
    if parallel.overlap_grad_reduce:
        yield "--overlap-grad-reduce", "a recorded backward pass sends no gradients"
    if parallel.overlap_param_gather:
        yield "--overlap-param-gather", "a recorded forward pass waits for no weights"
    if data.reset_attention_mask:
        yield "--reset-attention-mask", "the number of documents differs between micro-batches"


def _cannot_when_split(config: RunOptions) -> Iterator[tuple[str, str]]:
    """The same of layers that are split over processes."""
    model, parallel = config.model, config.parallel
    dropouts = {"--attention-dropout": model.attention_dropout}
    if parallel.sequence_parallel:
        dropouts["--hidden-dropout"] = model.hidden_dropout
    for name, value in dropouts.items():
        if value > 0:
            yield (
                f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} and {name} "
                f"{value:g}",
                "masks that differ between processes are seeded by the host, layer by layer",
            )
    if parallel.distributed_backend != "nccl":
        yield (
            f"--distributed-backend {parallel.distributed_backend}",
            "only NCCL's communication can be recorded",
        )
