"""Rules of how processes share a model and its update, and of what a device can do."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from megatron.config.fields import MAX_LAYERS, divisors
from megatron.config.resolve import data_parallel_size
from megatron.config.run import RunOptions
from megatron.config.stages import plan_model
from megatron.config.training import TrainingOptions
from megatron.errors import ConfigError

if TYPE_CHECKING:  # it imports torch
    from megatron.device import Device


def layout(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield why the model does not divide over its processes, or these over those launched."""
    parallel, model = config.parallel, config.model
    tensor, pipeline, context = (
        max(parallel.tensor_model_parallel_size, 1),
        max(parallel.pipeline_model_parallel_size, 1),
        max(parallel.context_parallel_size, 1),
    )
    sizes = {
        "--num-attention-heads": model.num_attention_heads,
        "--ffn-hidden-size": model.ffn_hidden_size,
        "--hidden-size": model.hidden_size,
    }
    misfits = {name: size for name, size in sizes.items() if size and size > 0 and size % tensor}
    if misfits:
        *others, last = (f"{name} {size}" for name, size in misfits.items())
        shown = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        yield (
            f"{shown} not divisible by --tensor-model-parallel-size {tensor}: "
            f"use {divisors(gcd(*misfits.values()))}"
        )
        return  # with another size, other processes are asked for
    product = tensor * pipeline * context
    if world_size % product:
        yield (
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} x "
            f"--context-parallel-size {context} = {product} does not divide the {world_size} "
            f"launched process(es): launch a multiple of {product}"
        )


def pipeline(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield why the layers do not divide over the pipeline as asked."""
    parallel, layers = config.parallel, config.model.num_layers
    stages = parallel.pipeline_model_parallel_size
    most = max(stages, layers or 0, config.model.decoder_num_layers or 0)
    if stages < 1 or not layers or layers < 1 or most > MAX_LAYERS:
        return
    try:
        parts = plan_model(config.model, parallel)
    except ConfigError as error:
        yield from error.problems
        return
    chunks = len(parts) // stages
    if parallel.pipeline_schedule in ("1f1b", "zero-bubble") and chunks > 1:
        yield (
            f"--pipeline-schedule {parallel.pipeline_schedule}: supports one part per stage, not "
            f"{chunks}: use interleaved or gpipe, or drop the virtual stages"
        )
    if parallel.pipeline_schedule == "interleaved" and chunks == 1:
        yield (
            "--pipeline-schedule interleaved requires virtual stages: give "
            "--num-layers-per-virtual-pipeline-stage, or use 1f1b"
        )
    if stages == 1 and chunks > 1:
        yield (
            f"{chunks} virtual stages require a pipeline: give --pipeline-model-parallel-size, or "
            "drop --num-layers-per-virtual-pipeline-stage"
        )


def tensor_parallel(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield why the network or its sequences do not divide over tensor-parallel processes."""
    parallel, model = config.parallel, config.model
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    groups, head, length = model.num_query_groups, model.kv_channels or 0, config.data.seq_length
    if tensor < 1 or context < 1:
        return
    rows = 2 * groups * head if model.group_query_attention else 0
    if rows > 0 and groups % tensor and tensor % groups:
        yield (
            f"--num-query-groups {groups} neither divides nor is divided by "
            f"--tensor-model-parallel-size {tensor}: use {divisors(groups)}, or a multiple of "
            f"{groups}"
        )
    elif rows > 0 and rows % tensor:
        yield (
            f"2 x --num-query-groups {groups} x --kv-channels {head} = {rows} rows of keys and "
            f"values are not divisible by --tensor-model-parallel-size {tensor}: use "
            f"{divisors(rows)}"
        )
    part = tensor * context
    if parallel.sequence_parallel and length and length > 0 and length % part:
        near = (length // part * part, -(-length // part) * part)
        yield (
            f"--seq-length {length} is not divisible by --tensor-model-parallel-size {tensor} x "
            f"--context-parallel-size {context} = {part}, as --sequence-parallel requires: use "
            f"{' or '.join(str(number) for number in near if number)}"
        )
    recomputes = config.training.recompute_granularity == "full"
    if parallel.distribute_saved_activations and not recomputes:
        yield (
            "--distribute-saved-activations requires --recompute-granularity full: add it, or "
            "drop the flag"
        )


def context(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield mistakes in context parallelism."""
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
        yield f"--reset-attention-mask cannot be combined with {shown}: drop it, or use 1"
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
                f"{tensor} = {size * tensor}, as --cp-comm-type a2a requires: use --cp-comm-type "
                "p2p, or fewer processes"
            )


def sharding(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield mistakes in what data-parallel processes share."""
    parallel = config.parallel
    stage = parallel.zero_stage or 0
    if parallel.use_distributed_optimizer and stage == 0:
        yield "--use-distributed-optimizer and --zero-stage 0 cannot be combined: use one of them"
    if parallel.overlap_param_gather and stage == 0:
        yield (
            "--overlap-param-gather requires a sharded update: add --use-distributed-optimizer, "
            "or drop the flag"
        )
    if stage == 3 and parallel.pipeline_schedule == "zero-bubble":
        yield (
            "--zero-stage 3 with --pipeline-schedule zero-bubble: a layer's weights are freed "
            "before its weight gradients are computed: use 1f1b, or --zero-stage 1"
        )


def torch_ddp(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield what does not go with --DDP-impl torch."""
    parallel = config.parallel
    if parallel.ddp_impl != "torch":
        return
    shown, remedy = "--DDP-impl torch", "use --DDP-impl local"
    if parallel.zero_stage:
        yield (
            f"{shown} shards nothing and cannot be combined with --zero-stage "
            f"{parallel.zero_stage} (or --use-distributed-optimizer): {remedy}, or --zero-stage 0"
        )
    if parallel.pipeline_model_parallel_size > 1:
        yield (
            f"{shown} supports one backward pass at a time, but --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size} has several in flight: {remedy}"
        )
    if config.precision.accumulate_allreduce_grads_in_fp32:
        yield (
            f"{shown} sums gradients in the weights' format, but --bf16 and "
            f"--accumulate-allreduce-grads-in-fp32 require fp32: {remedy}"
        )


def no_effect(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield notices of what is done anyway, and of what a single process cannot share."""
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
        yield f"{', '.join(given)}: no effect with a single data-parallel process"


_OVERLAP = "--tp-comm-overlap"


def overlap(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield what does not go with --tp-comm-overlap."""
    parallel = config.parallel
    if not parallel.tp_comm_overlap or parallel.tensor_model_parallel_size <= 1:
        return  # of the latter there is a notice
    if not parallel.sequence_parallel:
        yield (f"{_OVERLAP} requires --sequence-parallel: add it, or drop {_OVERLAP}")
    for flag, reason in _not_with_overlap(config):
        yield f"{_OVERLAP} cannot be combined with {flag}: {reason}: drop one of them"


def _not_with_overlap(config: RunOptions) -> Iterator[tuple[str, str]]:
    """Yield the flags that --tp-comm-overlap excludes, each with the reason."""
    parallel, numbers, training = config.parallel, config.precision, config.training
    if numbers.fp8_format is not None and numbers.fp8_recipe == "rowwise":
        yield (
            "--fp8-recipe rowwise",
            "a part's transpose has different scales from the whole matrix's",
        )
    if numbers.fp8_format is not None and not numbers.fp8_wgrad:
        yield "--no-fp8-wgrad", "each input would be sent twice, in 8 bits and in 16"
    if not parallel.async_tensor_model_parallel_allreduce:
        yield (
            "--no-async-tensor-model-parallel-allreduce",
            "it turns off the overlap that the first flag asks for",
        )
    if training.cuda_graph_impl != "none":
        yield (
            f"--cuda-graph-impl {training.cuda_graph_impl}",
            "a recorded graph cannot know which memory of other processes is free",
        )
    if parallel.distributed_backend != "nccl":
        yield (
            f"--distributed-backend {parallel.distributed_backend}",
            "the overlap requires GPUs that map each other's memory",
        )


def overlap_no_effect(config: RunOptions) -> Iterator[str]:
    """Yield a notice if the overlap changes nothing."""
    if config.parallel.tp_comm_overlap and config.parallel.tensor_model_parallel_size == 1:
        yield f"{_OVERLAP}: no effect with a single tensor-parallel process"


def graphs(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield what does not go with recorded passes (--cuda-graph-impl)."""
    training = config.training
    shown = f"--cuda-graph-impl {training.cuda_graph_impl}"
    if training.cuda_graph_impl == "none":
        if training.cuda_graph_warmup_steps != TrainingOptions().cuda_graph_warmup_steps:
            yield (
                f"--cuda-graph-warmup-steps {training.cuda_graph_warmup_steps} requires "
                "--cuda-graph-impl local"
            )
        return
    if training.cuda_graph_impl == "transformer_engine":
        yield f"{shown}: Transformer Engine is not used: use local"
        return
    if training.cuda_graph_impl == "full_iteration":
        yield f"{shown}: only micro-batches can be recorded, not whole iterations: use local"
        return
    if training.cuda_graph_warmup_steps < 1:
        yield (
            f"--cuda-graph-warmup-steps {training.cuda_graph_warmup_steps}: libraries initialize "
            "in the first iteration: use 1 or more"
        )
    for flag, reason in _not_recorded(config):
        yield f"{shown} cannot be combined with {flag}: {reason}: drop one of them"


def _not_recorded(config: RunOptions) -> Iterator[tuple[str, str]]:
    """Yield flags under which a pass cannot be recorded or would differ, each with the reason."""
    training, parallel, data = config.training, config.parallel, config.data
    if training.recompute_granularity is not None:
        yield (
            f"--recompute-granularity {training.recompute_granularity}",
            "recomputation sets the random state from the host",
        )
    if parallel.tensor_model_parallel_size > 1:
        yield from _not_recorded_when_split(config)
    for name, size in (
        ("--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size),
        ("--context-parallel-size", parallel.context_parallel_size),
    ):
        if size > 1:
            yield f"{name} {size}", "messages between processes are not recorded"
    if parallel.pipeline_schedule not in (None, "1f1b"):
        yield (
            f"--pipeline-schedule {parallel.pipeline_schedule}",
            "a recorded graph has room for one micro-batch",
        )
    if (parallel.zero_stage or 0) > 1:
        yield (
            f"--zero-stage {parallel.zero_stage}",
            "gradients and weights are not in one place for a whole iteration",
        )
    if parallel.ddp_impl == "torch":
        yield "--DDP-impl torch", "it averages gradients during the backward pass"
    if parallel.overlap_grad_reduce:
        yield "--overlap-grad-reduce", "a recorded backward pass cannot send gradients"
    if parallel.overlap_param_gather:
        yield "--overlap-param-gather", "a recorded forward pass cannot wait for weights"
    if data.reset_attention_mask:
        yield "--reset-attention-mask", "the number of documents differs between micro-batches"


def _not_recorded_when_split(config: RunOptions) -> Iterator[tuple[str, str]]:
    """Yield the same for layers that are split over processes."""
    model, parallel = config.model, config.parallel
    dropouts = {"--attention-dropout": model.attention_dropout}
    if parallel.sequence_parallel:
        dropouts["--hidden-dropout"] = model.hidden_dropout
    for name, value in dropouts.items():
        if value > 0:
            yield (
                f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} and {name} "
                f"{value:g}",
                "dropout masks that differ between processes are seeded by the host, layer by "
                "layer",
            )
    if parallel.distributed_backend != "nccl":
        yield (
            f"--distributed-backend {parallel.distributed_backend}",
            "only NCCL's communication can be recorded",
        )


_OLDEST_FP8 = (8, 9)


def device(config: RunOptions, device: Device, neighbours: int) -> Iterator[str]:
    """Yield a line for each flag that the device does not support.

    Not among `checks.RULES`: those hold for a dry run too, which may be for other machines.

    Args:
        config: The run.
        device: The device of one of its processes.
        neighbours: The number of processes on this machine, this one included.
    """
    if device.is_gpu:
        fp8 = config.precision.fp8_format
        if fp8 is not None and device.capability < _OLDEST_FP8:
            yield (
                f"--fp8-format {fp8}: {device.name} does not support 8-bit matrix products (Ada, "
                "Hopper and later GPUs do): drop the flag"
            )
        tensor = config.parallel.tensor_model_parallel_size
        if config.parallel.tp_comm_overlap and neighbours % tensor:
            yield (
                f"--tp-comm-overlap: --tensor-model-parallel-size {tensor} does not divide the "
                f"{neighbours} process(es) of a machine, and only GPUs of one machine map each "
                "other's memory: drop the flag"
            )
        return
    graphs = config.training.cuda_graph_impl
    for flag, is_given in (
        ("--use-flash-attn", config.model.use_flash_attn),
        (f"--cuda-graph-impl {graphs}", graphs != "none"),
    ):
        if is_given:
            yield f"{flag} requires a GPU, and this run is on {device.type}: drop it"
