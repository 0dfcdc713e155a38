"""Rules for how processes share a model and its update, and for what a device supports."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import gcd
from typing import TYPE_CHECKING, Any

from megatron.config.fields import divisors, near_multiples
from megatron.config.resolve import data_parallel_size
from megatron.config.run import RunOptions, field_at, flatten
from megatron.config.stages import may_be_planned, plan_model
from megatron.errors import ConfigError

if TYPE_CHECKING:  # this module imports torch
    from megatron.device import Device

_OLDEST_FP8 = (8, 9)
# PyTorch's grouped FP8 kernel is for Hopper. PyTorch also starts it on a B200, where it fails.
_GROUPED_FP8 = 9  # major compute capability
# The allowed values by "section.field", and why other values are rejected.
Exclusions = Mapping[str, tuple[Collection[Any], str]]
_NOT_WITH_TORCH_DDP: Exclusions = {
    "parallel.zero_stage": ((None, 0), "it shards nothing"),
    "parallel.pipeline_model_parallel_size": (
        (1,),
        "it supports one backward pass at a time, and a pipeline has several in flight",
    ),
    "precision.accumulate_allreduce_grads_in_fp32": (
        (False,),
        "it sums gradients in the weights' format (--bf16 turns the second flag on)",
    ),
}
_NOT_WITH_OVERLAP: Exclusions = {
    "precision.fp8_recipe": (
        ("tensorwise", "delayed"),
        "a chunk's transpose has other scales than the whole matrix's transpose",
    ),
    "precision.fp8_wgrad": ((True,), "each input would be sent twice, in 8 bits and in 16"),
    "parallel.async_tensor_model_parallel_allreduce": (
        (True,),
        "it turns off the overlap that the first flag asks for",
    ),
    "training.cuda_graph_impl": (
        ("auto", "none"),
        "a recorded graph cannot know which memory of other processes is free",
    ),
    "parallel.distributed_backend": (
        ("nccl",),
        "the overlap requires GPUs that map each other's memory",
    ),
}
# Flags that prevent the recording of a pass, or that would make a recorded pass differ.
_NOT_RECORDED: Exclusions = {
    "training.recompute_granularity": (
        (None,),
        "recomputation sets the random state from the host",
    ),
    "curriculum.curriculum_schedule": ((None,), "each length would need its own recording"),
    "training.fine_grained_activation_offloading": (
        (False,),
        "copies to the host run on their own streams, which are not recorded",
    ),
    "parallel.pipeline_model_parallel_size": ((1,), "messages between processes are not recorded"),
    "parallel.context_parallel_size": ((1,), "messages between processes are not recorded"),
    "parallel.pipeline_schedule": ((None, "1f1b"), "a recorded graph has room for one micro-batch"),
    "parallel.zero_stage": (
        (None, 0, 1),
        "gradients and weights do not keep their addresses for a whole iteration",
    ),
    "parallel.ddp_impl": (("local",), "it averages gradients during the backward pass"),
    "parallel.overlap_grad_reduce": ((False,), "a recorded backward pass cannot send gradients"),
    "parallel.overlap_param_gather": ((False,), "a recorded forward pass cannot wait for weights"),
    "reliability.fault_inject": (
        ((),),
        "faults are injected inside a pass, which is recorded as a whole",
    ),
}

# The same for mixtures of experts: every pass has the same number of rows only if this process has
# all experts.
_MIXTURE_NOT_RECORDED: Exclusions = {
    "parallel.expert_model_parallel_size": (
        (1,),
        "the number of tokens that arrive differs between passes",
    ),
    "precision.bf16": ((True,), "only bf16 products do not have to wait for the number of rows"),
    "model.moe_router_gating": (("core",), "the host seeds its random choices"),
    "model.moe_input_jitter_eps": ((None, 0.0), "the host seeds its noise"),
}
_BALANCING_NOT_RECORDED = {
    "sinkhorn": "it waits for the device",
    "global_aux_loss": "the host counts the micro-batches",
}

_NOT_WITH_EXPERTS: Exclusions = {
    "precision.fp8_param_gather": ((False,), "experts have a scale for each row"),
    "parallel.ddp_impl": (
        ("local",),
        "experts are averaged over different processes than other layers",
    ),
    "checkpoint.ckpt_format": (
        ("native", "torch_dist"),
        "such experts cannot be written in this format",
    ),
}


def excluded(config: RunOptions, flag_text: str, exclusions: Exclusions) -> Iterator[str]:
    """Yield an error for each value that cannot be combined with a flag.

    Args:
        config: The resolved run.
        flag_text: The flag that excludes other values, as messages show it.
        exclusions: The values of other fields that the flag allows, and why it excludes the rest.
    """
    values = flatten(config)
    for path, (allowed, reason) in exclusions.items():
        if values[path] in allowed:
            continue
        field = field_at(path)
        required = field.spell(next(iter(allowed)))
        if required and values[path] == field.default:  # there may be no flag to drop
            yield f"{flag_text} requires {required}: {reason}: add it"
        else:
            flag = field.spell(values[path])
            yield f"{flag_text} cannot be combined with {flag}: {reason}: drop one of them"


def layout(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each reason why the model does not fit the number of processes."""
    parallel, model = config.parallel, config.model
    tensor = max(parallel.tensor_model_parallel_size, 1)
    pipeline = max(parallel.pipeline_model_parallel_size, 1)
    context = max(parallel.context_parallel_size, 1)
    sizes = {
        "--num-attention-heads": model.num_attention_heads,
        "--ffn-hidden-size": model.ffn_hidden_size,
        "--hidden-size": model.hidden_size,
    }
    indivisible = {
        name: size for name, size in sizes.items() if size and size > 0 and size % tensor
    }
    if indivisible:
        *others, last = (f"{name} {size}" for name, size in indivisible.items())
        sizes_text = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        yield (
            f"{sizes_text} not divisible by --tensor-model-parallel-size {tensor}: "
            f"use {divisors(gcd(*indivisible.values()))}"
        )
        return  # a valid size would change the number of processes too
    product = tensor * pipeline * context
    if world_size % product:
        yield (
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} x "
            f"--context-parallel-size {context} = {product} does not divide the number of "
            f"launched processes, {world_size}: launch a multiple of {product}"
        )


def pipeline(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the pipeline: its layers, virtual stages and schedule."""
    parallel = config.parallel
    if not may_be_planned(config.model, parallel):
        return
    try:
        parts = plan_model(config.model, parallel)
    except ConfigError as error:
        yield from error.problems
        return
    stages, schedule = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
    chunks = len(parts) // stages
    if schedule in ("1f1b", "zero-bubble") and chunks > 1:
        yield (
            f"--pipeline-schedule {schedule}: supports one part per stage, not {chunks}: use "
            "interleaved or gpipe, or drop the virtual stages"
        )
    if schedule == "interleaved" and chunks == 1:
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
    """Yield an error for each dimension that does not divide evenly over tensor-parallel ranks."""
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
    shards = tensor * context
    if parallel.sequence_parallel and length and length > 0 and length % shards:
        yield (
            f"--seq-length {length} is not divisible by --tensor-model-parallel-size {tensor} x "
            f"--context-parallel-size {context} = {shards}, as --sequence-parallel requires: use "
            f"{near_multiples(length, shards)}"
        )


def experts(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the distribution of experts over processes."""
    model, parallel = config.model, config.parallel
    counts, ranks = model.expert_counts, parallel.expert_model_parallel_size
    if not counts:
        return
    tensor = parallel.tensor_model_parallel_size
    parts = parallel.expert_tensor_parallel_size or tensor
    flag = f"--num-experts {' '.join(map(str, model.num_experts or ()))}"
    yield from excluded(config, flag, _NOT_WITH_EXPERTS)
    if min(ranks, parts, tensor, parallel.pipeline_model_parallel_size) < 1:
        return  # `bounds` reports it
    common = gcd(*counts)
    if common % ranks:
        yield (
            f"{flag} is not divisible by --expert-model-parallel-size {ranks}: use "
            f"{divisors(common)}"
        )
    is_divisor = tensor % parts == 0
    if not is_divisor:
        yield (
            f"--expert-tensor-parallel-size {parts} does not divide --tensor-model-parallel-size "
            f"{tensor}: use {divisors(tensor)}"
        )
    elif parts != tensor and not parallel.sequence_parallel:
        yield (
            f"--expert-tensor-parallel-size {parts} with --tensor-model-parallel-size {tensor} "
            "requires --sequence-parallel, with which tensor ranks have different tokens: add it"
        )
    inner = model.moe_ffn_hidden_size or model.ffn_hidden_size
    if inner and is_divisor and inner % parts:
        name = "--ffn-hidden-size" if model.moe_ffn_hidden_size is None else "--moe-ffn-hidden-size"
        yield (
            f"{name} {inner} is not divisible by {parts} tensor-parallel parts of an expert: use "
            f"{near_multiples(inner, parts)}"
        )
    shared = model.moe_shared_expert_intermediate_size
    if shared and shared % tensor:
        yield (
            f"--moe-shared-expert-intermediate-size {shared} is not divisible by "
            f"--tensor-model-parallel-size {tensor}: use {near_multiples(shared, tensor)}"
        )
    stage = world_size // parallel.pipeline_model_parallel_size
    if is_divisor and stage % (ranks * parts):
        yield (
            f"--expert-model-parallel-size {ranks} x {parts} parts of an expert do not divide the "
            f"{stage} processes of a pipeline stage: use {divisors(max(stage // parts, 1))}"
        )


def context(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in context parallelism."""
    size, length, model = (
        config.parallel.context_parallel_size,
        config.data.seq_length,
        config.model,
    )
    if size <= 1:
        return
    flag = f"--context-parallel-size {size}"
    if length and length > 0 and length % (2 * size):
        yield (
            f"--seq-length {length} is not divisible by 2 x {flag}: each process takes an early "
            f"and a late piece: use a multiple of {2 * size}"
        )
    tensor = max(config.parallel.tensor_model_parallel_size, 1)
    counts = {"--num-attention-heads": model.num_attention_heads or 0}
    if model.group_query_attention:
        counts["--num-query-groups"] = model.num_query_groups
    for name, count in counts.items() if config.parallel.cp_comm_type == "a2a" else ():
        if count > 0 and count % (tensor * size):
            yield (
                f"{name} {count} is not divisible by {flag} x --tensor-model-parallel-size "
                f"{tensor} = {size * tensor}, as --cp-comm-type a2a requires: use --cp-comm-type "
                "p2p, or fewer processes"
            )


def sharding(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the sharding over data-parallel processes."""
    parallel = config.parallel
    if parallel.use_distributed_optimizer and not parallel.zero_stage:
        yield "--use-distributed-optimizer and --zero-stage 0 cannot be combined: use one of them"
    if parallel.zero_stage == 3 and parallel.pipeline_schedule == "zero-bubble":
        yield (
            "--zero-stage 3 with --pipeline-schedule zero-bubble: a layer's weights are freed "
            "before its weight gradients are computed: use 1f1b, or --zero-stage 1"
        )


def torch_ddp(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with --DDP-impl torch."""
    if config.parallel.ddp_impl == "torch":
        yield from excluded(config, "--DDP-impl torch", _NOT_WITH_TORCH_DDP)


def no_effect(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield a notice for each flag that has no effect in this layout or with other given flags."""
    parallel = config.parallel
    overlaps = {
        "--overlap-grad-reduce": parallel.overlap_grad_reduce,
        "--overlap-param-gather": parallel.overlap_param_gather,
    }
    experts = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    experts *= parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size
    has_replicas = data_parallel_size(config, world_size) * parallel.context_parallel_size > 1
    if not has_replicas and experts >= world_size:
        sharded = parallel.use_distributed_optimizer
        stage = "--use-distributed-optimizer" if sharded else f"--zero-stage {parallel.zero_stage}"
        # Megatron-LM's files differ with this flag, on any number of processes.
        is_kept = sharded and config.checkpoint.ckpt_format == "legacy"
        flags = {
            stage: parallel.zero_stage and not is_kept,
            "--DDP-impl torch": parallel.ddp_impl == "torch",
            **overlaps,
            "--fp8-param-gather": config.precision.fp8_param_gather,
        }
        given = ", ".join(flag for flag, on in flags.items() if on)
        if given:
            yield f"{given}: no effect with a single data-parallel process"
    elif parallel.zero_stage == 3:
        for flag in (flag for flag, on in overlaps.items() if on):
            yield f"{flag}: --zero-stage 3 always communicates while it computes"
    elif parallel.ddp_impl == "torch" and parallel.overlap_grad_reduce:
        yield "--overlap-grad-reduce: --DDP-impl torch always reduces during the backward pass"
    if parallel.tp_comm_overlap and parallel.tensor_model_parallel_size == 1:
        yield "--tp-comm-overlap: no effect with a single tensor-parallel process"
    if parallel.overlap_moe_expert_parallel_comm and parallel.expert_model_parallel_size == 1:
        yield "--overlap-moe-expert-parallel-comm: no effect without --expert-model-parallel-size"


def overlap(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with --tp-comm-overlap."""
    parallel, flag = config.parallel, "--tp-comm-overlap"
    if not parallel.tp_comm_overlap or parallel.tensor_model_parallel_size <= 1:
        return  # for a single process, `no_effect` yields a notice
    if not parallel.sequence_parallel:
        yield f"{flag} requires --sequence-parallel: add it, or drop {flag}"
    yield from excluded(config, flag, _NOT_WITH_OVERLAP)


def graphs(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with --cuda-graph-impl."""
    training, parallel, model = config.training, config.parallel, config.model
    flag = f"--cuda-graph-impl {training.cuda_graph_impl}"
    if training.cuda_graph_impl == "transformer_engine":
        yield f"{flag}: Transformer Engine is not used: use local"
    if training.cuda_graph_impl == "full_iteration":
        yield f"{flag}: only micro-batches can be recorded, not whole iterations: use local"
    if training.cuda_graph_impl != "local":
        return
    if training.cuda_graph_warmup_steps < 1:
        yield (
            f"--cuda-graph-warmup-steps {training.cuda_graph_warmup_steps}: libraries initialize "
            "in the first iteration: use 1 or more"
        )
    yield from excluded(config, flag, _NOT_RECORDED)
    if model.num_experts:
        yield from excluded(config, f"{flag} with --num-experts", _MIXTURE_NOT_RECORDED)
        for kind in model.moe_router_load_balancing_type:
            if kind in _BALANCING_NOT_RECORDED:
                yield (
                    f"{flag} cannot be combined with --moe-router-load-balancing-type {kind}: "
                    f"{_BALANCING_NOT_RECORDED[kind]}: use aux_loss or seq_aux_loss, or drop "
                    "--cuda-graph-impl"
                )
    if parallel.tensor_model_parallel_size <= 1:
        return
    dropouts = {
        "--attention-dropout": model.attention_dropout,
        "--lora-dropout": model.lora_dropout,
    }
    if parallel.sequence_parallel:
        dropouts["--hidden-dropout"] = model.hidden_dropout
    for name, value in dropouts.items():
        if value > 0:
            yield (
                f"{flag} cannot be combined with --tensor-model-parallel-size "
                f"{parallel.tensor_model_parallel_size} and {name} {value:g}: dropout masks that "
                "differ between processes are seeded by the host, layer by layer: drop one of them"
            )
    if parallel.distributed_backend != "nccl":
        yield (
            f"{flag} cannot be combined with --distributed-backend "
            f"{parallel.distributed_backend}: only NCCL's communication can be recorded: drop one "
            "of them"
        )


def device(config: RunOptions, device: Device, local_world_size: int) -> Iterator[str]:
    """Yield a line for each flag that the device does not support.

    This rule is not in `checks.RULES`, because those also apply to a dry run for other machines.

    Args:
        config: The run.
        device: The device of one of its processes.
        local_world_size: The number of processes on this machine.
    """
    graphs, fp8 = config.training.cuda_graph_impl, config.precision.fp8_format
    tensor = config.parallel.tensor_model_parallel_size
    if not device.is_gpu:
        flags = {
            "--use-flash-attn": config.model.use_flash_attn,
            f"--cuda-graph-impl {graphs}": graphs == "local",
        }
        for flag in (flag for flag, is_given in flags.items() if is_given):
            yield f"{flag} requires a GPU, and this run is on {device.type}: drop it"
        return
    if fp8 is not None and device.capability < _OLDEST_FP8:
        yield (
            f"--fp8-format {fp8}: {device.name} does not support 8-bit matrix products (Ada, "
            "Hopper and later GPUs do): drop the flag"
        )
    elif fp8 is not None and config.model.num_experts and device.capability[0] != _GROUPED_FP8:
        yield (
            f"--fp8-format {fp8} with --num-experts: PyTorch's grouped 8-bit products run only on "
            f"Hopper GPUs (H100, H200), and this is a {device.name}: drop --fp8-format"
        )
    if config.parallel.tp_comm_overlap and local_world_size % tensor:
        yield (
            f"--tp-comm-overlap: --tensor-model-parallel-size {tensor} does not divide the "
            f"number of processes on a machine, {local_world_size}, and only GPUs of one machine "
            "map each other's memory: drop the flag"
        )
