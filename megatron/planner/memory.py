"""An estimate of the memory that a process needs, from arithmetic alone.

It counts parameters (with their 8-bit copies, or packed into 8 or 4 bits), gradients, optimizer
states and the activations saved for the backward pass. Temporary buffers, rounding by the allocator
and the CUDA context are not included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.config import RunConfig
from megatron.config.optimizer import FORMAT_FIELDS, STATE_BYTES, OptimizerConfig
from megatron.config.stages import ModelPart, even_parts, parts_of_stage, plan_model, whole_model
from megatron.kernels.quantize import bytes_of
from megatron.models.adapters import count_adapters
from megatron.models.arithmetic import (
    count_depth_parameters,
    count_part_experts,
    count_part_matrices,
    count_part_parameters,
    head_activations,
    largest_layer,
    largest_layer_matrix,
    largest_matrix,
    part_activations,
)
from megatron.models.costs import MicroBatch, WeightSplit
from megatron.models.freezing import frozen_format, trained_share
from megatron.models.mixture_plan import MixturePlan
from megatron.models.plan import ModelPlan
from megatron.models.recompute import RecomputePlan
from megatron.parallel.buckets import BUCKET_BYTES
from megatron.parallel.exchange import SLOTS
from megatron.parallel.expert_exchange import gathers_all
from megatron.parallel.layout import Layout
from megatron.parallel.pipeline.schedule import activation_bound, loss_bound, schedule_kind
from megatron.parallel.replicas import shares_weights

_GIB, _MIB = 1024.0**3, 1024.0**2


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a process, in bytes.

    Attributes:
        parameters: Weights and their 8-bit copies.
        gradients: Gradients kept until the update.
        optimizer: Optimizer moments, master weights and averages of the weights.
        activations: Activations kept for the backward pass.
        messages: Buffers to which other GPUs of the machine write.
        host: Host memory for optimizer states and gradients that are offloaded.
        teacher: A teacher's weights, and its logits and hidden states until they are compared with
            the student's.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    messages: int = 0
    host: int = 0
    teacher: int = 0

    @property
    def total(self) -> int:
        """The total number of bytes on the device."""
        persistent = self.parameters + self.gradients + self.optimizer
        return persistent + self.activations + self.messages + self.teacher

    @property
    def amount(self) -> str:
        """The total as text with its unit."""
        return amount(self.total)

    def describe(self) -> str:
        """Return the total and its parts as text."""
        names = ["parameters", "gradients", "optimizer", "activations"]
        names += [name for name in ("messages", "teacher") if getattr(self, name)]
        parts = ", ".join(f"{name} {amount(getattr(self, name))}" for name in names)
        host = f", and {amount(self.host)} of host memory" if self.host else ""
        return f"{self.amount} ({parts}){host}"


def amount(size: int) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"


def largest_process(
    config: RunConfig, plan: ModelPlan, world_size: int, imbalance: float = 1.0
) -> MemoryEstimate:
    """Return the estimate for the process that needs the most memory.

    Pipeline stages differ, but all ranks of a stage need the same amount if all experts get the
    same number of tokens.

    Args:
        config: The run's configuration.
        plan: The plan of the whole network.
        world_size: The number of processes.
        imbalance: The number of tokens of the process's experts in every mixture layer, as a
            multiple of an even share.

    Raises:
        ConfigError: The layers do not fit the stages.
    """
    parallel, training = config.parallel, config.training
    stages = parallel.pipeline_model_parallel_size
    data = world_size // math.prod(
        parallel.sizes[name] for name in ("tensor", "context", "pipeline")
    )
    micro_batches = training.global_batch_size // (training.micro_batch_size * data)
    model_parts = plan_model(config.model, parallel)
    stage_ranks = Layout.at(0, world_size, **parallel.grid).pipeline.ranks
    distinct: dict[object, int] = {}  # among stages with the same layers, the first needs the most
    for stage in range(stages):
        parts = parts_of_stage(model_parts, stage, stages)
        layers = [id(plan.layers[i]) for part in parts for i in part.layers]
        ends = [(part.embedding, part.head, len(part.layers)) for part in parts]
        distinct.setdefault((*layers, *ends), stage)
    estimates = [
        estimate_memory(
            config,
            plan,
            Layout.at(stage_ranks[stage], world_size, **parallel.grid),
            micro_batches,
            imbalance,
        )
        for stage in distinct.values()
    ]
    return max(estimates, key=lambda estimate: estimate.total)


def checkpoint_bytes(config: RunConfig, plan: ModelPlan) -> int:
    """Return the size of the tensors in a checkpoint, in bytes.

    Averages of weights (--ema-decay, --lawa-interval) are counted as if all of them existed.

    Args:
        config: The run's configuration.
        plan: The plan of the whole network.
    """
    counts = _Counts.of(config, plan, Layout.single(), [whole_model(len(plan.layers))])
    options, width = config.optimizer, config.precision.weight_dtype.itemsize
    adapters = 0
    if config.model.lora_rank is not None:
        adapters = count_adapters(config.model, plan.embedding.vocabulary)
    per_update: float = _average_bytes(options)
    if options.lawa_interval is not None:
        per_update += 4  # the mean of the snapshots
    if not config.checkpoint.no_save_optim:
        # States with scales are decoded before they are saved, and other programs expect fp32.
        is_native = config.checkpoint.ckpt_format == "native"
        formats = {"bf16": "bf16", "fp8": "bf16"} if is_native else {}
        saved: dict[str, Any] = {
            name: formats.get(getattr(options, name), "fp32") for name in FORMAT_FIELDS
        }
        matrices = counts.matrices / max(counts.parameters, 1)
        per_update += _state_bytes(replace(options, **saved), matrices, has_copy=width == 2)
    weights = width * (counts.parameters + adapters)
    return weights + math.ceil(per_update * counts.share(counts.updated))


def largest_message(config: RunConfig, layout: Layout, texts: int) -> int:
    """Return the size in bytes of the largest message that a split layer sends to one rank.

    A message is one tensor rank's shard of a micro-batch's hidden states.

    Args:
        config: The run's configuration.
        layout: The grid of processes as this process sees it.
        texts: The number of sequences in a sample.
    """
    width = config.precision.weight_dtype.itemsize
    data = config.data
    neighbors = config.model.neighbor_tokens(data.seq_length)
    sequence = max(data.seq_length, data.decoder_seq_length or 0, neighbors)
    rows = sequence // layout.context.size // layout.tensor.size
    sequences = config.largest_micro_batch * texts
    return width * rows * sequences * config.model.hidden_size


def largest_expert_message(config: RunConfig, plan: ModelPlan, layout: Layout) -> int:
    """Return the size in bytes of the largest message between expert-parallel ranks.

    If every rank sends all its tokens to all other ranks, a message contains their hidden states.
    The size is 0 without expert parallelism, if each rank receives only the tokens routed to its
    experts, or if micro-batches are halved to overlap messages with computation
    (--overlap-moe-expert-parallel-comm).

    Args:
        config: The run's configuration.
        plan: The plan of the whole network.
        layout: The grid of processes as this process sees it.
    """
    ranks, width = layout.expert.size, config.precision.weight_dtype.itemsize
    routers = [layer.mlp.router for layer in plan.layers if isinstance(layer.mlp, MixturePlan)]
    if ranks == 1 or config.parallel.overlap_moe_expert_parallel_comm:
        return 0
    if not any(gathers_all(router.experts, router.chosen, ranks) for router in routers):
        return 0
    batch = replace(micro_batch(config, layout), sequences=config.largest_micro_batch)
    tokens = batch.expert_tokens * plan.head_spec.sequences
    return width * tokens * plan.hidden


def exchange_bytes(config: RunConfig, plan: ModelPlan, layout: Layout) -> int:
    """Return the bytes that a process reserves for messages from other GPUs of its machine."""
    expert = layout.expert.size * largest_expert_message(config, plan, layout)
    if not config.parallel.tp_comm_overlap or layout.tensor.size == 1:
        return SLOTS * expert
    texts = plan.head_spec.sequences
    return SLOTS * (expert + layout.tensor.size * largest_message(config, layout, texts))


def micro_batch(config: RunConfig, layout: Layout) -> MicroBatch:
    """Return the micro-batch on the process at `layout`, with one sequence per sample.

    With a decoder, the length is that of the decoder's sequences.
    """
    return MicroBatch(
        sequences=config.training.micro_batch_size,
        length=config.data.decoder_seq_length or config.data.seq_length,
        tensor=layout.tensor.size,
        sequence=layout.sequence.size,
        expert_tensor=layout.expert_tensor.size,
        context=layout.context.size,
        width=config.precision.weight_dtype.itemsize,
    )


def estimate_memory(
    config: RunConfig, plan: ModelPlan, layout: Layout, micro_batches: int, imbalance: float = 1.0
) -> MemoryEstimate:
    """Return the memory estimate for the process at `layout`.

    Args:
        config: The run's configuration.
        plan: The plan of the whole network.
        layout: The grid of processes as this process sees it.
        micro_batches: The number of micro-batches per update.
        imbalance: The load of the process's experts, as a multiple of an even share.

    Raises:
        ConfigError: The layers do not fit the stages.
    """
    model_parts = plan_model(config.model, config.parallel)
    parts = parts_of_stage(model_parts, layout.pipeline.rank, layout.pipeline.size)
    kind = schedule_kind(config.parallel, len(parts))
    live_activations = activation_bound(
        kind, layout.pipeline.rank, layout.pipeline.size, len(parts), micro_batches
    )
    texts, numbers = plan.head_spec.sequences, config.precision
    recompute = RecomputePlan.from_config(
        config.training, split_inputs=config.parallel.distribute_saved_activations
    )
    recomputed = recompute.parts if recompute else frozenset()
    # No fused kernel supports softcapping.
    is_bounded = config.model.attn_logit_softcapping is not None
    keeps_scores = is_bounded or not config.model.masked_softmax_fusion
    batch = replace(
        micro_batch(config, layout),
        sequences=config.training.micro_batch_size * texts,
        imbalance=imbalance,
        keeps_scores=keeps_scores and "core_attn" not in recomputed,
        recomputed=recomputed,
        losses=loss_bound(kind, micro_batches),
        chunked_loss=numbers.cross_entropy_fusion_impl == "linear",
    )
    lengths = (config.data.seq_length, config.data.decoder_seq_length)
    activations = sum(
        part_activations(plan, part, batch, recompute, *lengths) * live_activations // len(parts)
        for part in parts
    )
    if parts[-1].head:
        activations += head_activations(plan, batch)
    return replace(
        _weight_memory(config, plan, layout, parts),
        activations=activations,
        messages=exchange_bytes(config, plan, layout),
        teacher=_teacher_bytes(config, plan.teacher, layout, batch, live_activations),
    )


def _teacher_bytes(
    config: RunConfig,
    teacher: ModelPlan | None,
    layout: Layout,
    batch: MicroBatch,
    live_activations: int,
) -> int:
    """Return the bytes that a teacher takes on a process.

    `live_activations` is the number of (micro-batch, part) activations that the process keeps.
    """
    if teacher is None:
        return 0
    count = len(plan_model(config.model, config.parallel))
    model_parts = even_parts(len(teacher.layers), count)
    parts = parts_of_stage(model_parts, layout.pipeline.rank, layout.pipeline.size)
    split = _split_by(layout)
    teacher_bytes = batch.width * sum(count_part_parameters(teacher, part, split) for part in parts)
    if parts[-1].head:
        teacher_bytes += head_activations(teacher, batch)
    # A part's input is one message for student and teacher. The student's gradient needs it.
    hidden = batch.width * batch.tokens * teacher.hidden // batch.sequence
    receiving = sum(not part.embedding for part in parts)
    return teacher_bytes + hidden * live_activations * receiving // len(parts)


def _split_by(layout: Layout) -> WeightSplit:
    return WeightSplit(
        tensor=layout.tensor.size,
        expert=layout.expert.size,
        expert_tensor=layout.expert_tensor.size,
    )


def _moment_bytes(options: OptimizerConfig, matrices: float) -> float:
    """Return the bytes of an optimizer's moments per parameter.

    Args:
        options: The optimizer's options.
        matrices: The fraction of the parameters that are in matrices.
    """
    if options.optimizer == "muon":  # one moment for a matrix, two for other parameters
        # The temporary memory of Muon's iterations is not counted, because the activations, which
        # have been freed by then, take more.
        return 4 * (2 - matrices)
    if options.optimizer == "sgd":
        return 4 * (options.sgd_momentum > 0)
    return sum(STATE_BYTES[options.state_format(kind)] for kind in ("exp_avg", "exp_avg_sq"))


def _state_bytes(options: OptimizerConfig, matrices: float, *, has_copy: bool) -> float:
    """Return the bytes of an optimizer's moments and weights per updated parameter.

    Args:
        options: The optimizer's options.
        matrices: The fraction of the parameters that are in matrices.
        has_copy: Whether the optimizer has its own copy of the weights.
    """
    master = STATE_BYTES[options.state_format("master")]
    return _moment_bytes(options, matrices) + master * has_copy


def _average_bytes(options: OptimizerConfig) -> int:
    """Return the bytes of averages of the weights per updated parameter."""
    if not options.averages_weights:
        return 0
    return 4 * (1 if options.ema_decay is not None else options.lawa_window)


@dataclass(frozen=True)
class _Counts:
    """The numbers of parameters of a process's model parts.

    Attributes:
        parameters: All parameters, before ZeRO divides them.
        outside: The parameters outside the layers.
        matrices: The parameters in the layers' matrices.
        fp8: The parameters in matrices of layers that may compute in FP8.
        updated: The parameters that this process would update if all were trained.
        trained: The fraction of the parameters that have gradients and states.
    """

    parameters: int
    outside: int
    matrices: int
    fp8: int
    updated: int
    trained: float

    @classmethod
    def of(
        cls, config: RunConfig, plan: ModelPlan, layout: Layout, parts: Sequence[ModelPart]
    ) -> _Counts:
        """Count the parameters of a process's model parts."""
        split = _split_by(layout)
        parameters = sum(count_part_parameters(plan, part, split) for part in parts)
        outside = sum(
            count_part_parameters(plan, replace(part, layers=range(0)), split) for part in parts
        )
        updated = parameters
        if config.parallel.zero_stage > 0:
            experts = sum(count_part_experts(plan, part, split) for part in parts)
            updated = (parameters - experts) // layout.replica.size
            updated += experts // layout.expert_replica.size
        fp8 = config.precision.fp8_layers(len(plan.layers))
        fp8_parts = []
        for part in parts:
            ends = max(part.layers.start, fp8.start), min(part.layers.stop, fp8.stop)
            fp8_parts.append(replace(part, layers=range(*ends)))
        return cls(
            parameters,
            # The depths of multi-token prediction are gathered like layers.
            outside - parts[-1].head * count_depth_parameters(plan, split),
            sum(count_part_matrices(plan, part, split) for part in parts),
            sum(count_part_matrices(plan, part, split) for part in fp8_parts),
            updated,
            trained_share(config.model, plan, parts),
        )

    def share(self, count: int) -> int:
        """Return how many out of `count` parameters are trained."""
        return math.ceil(self.trained * count)


def _weight_memory(
    config: RunConfig, plan: ModelPlan, layout: Layout, parts: Sequence[ModelPart]
) -> MemoryEstimate:
    """Return the memory for weights, gradients and optimizer states of a process's model parts."""
    counts, numbers = _Counts.of(config, plan, layout, parts), config.precision
    width, on_host = numbers.weight_dtype.itemsize, config.optimizer.optimizer_cpu_offload
    is_shared = shares_weights(config.parallel, layout)
    summed = 4 if numbers.accumulate_allreduce_grads_in_fp32 else width
    held = _shared_bytes if is_shared else _whole_bytes
    weights, gradients = held(config, plan, layout, counts, summed)
    has_copy = on_host or (width == 2 and not is_shared)
    state_bytes = _average_bytes(config.optimizer) + _state_bytes(
        config.optimizer, counts.matrices / max(counts.parameters, 1), has_copy=has_copy
    )
    states = math.ceil(state_bytes * counts.share(counts.updated))
    host_gradients = (4 if is_shared else summed) * counts.share(counts.updated)
    return MemoryEstimate(
        parameters=weights,
        gradients=gradients,
        optimizer=0 if on_host else states,
        activations=0,
        host=states + host_gradients if on_host else 0,
    )


def _shared_bytes(
    config: RunConfig, plan: ModelPlan, layout: Layout, counts: _Counts, summed: int
) -> tuple[int, int]:
    """Return the bytes of weights and of gradients if processes share the weights.

    `summed` is the number of bytes per gradient element while gradients are summed.
    """
    split, width = _split_by(layout), config.precision.weight_dtype.itemsize
    # Two layers are gathered at a time: the current one and the next. The next one exists twice
    # while it arrives as one buffer and is split into parameters. Experts are gathered only in the
    # layer that needs them.
    layer, experts = largest_layer(plan, split)
    gathered = 3 * layer - experts
    weights = 4 * counts.updated + width * (counts.outside + gathered)
    packed_format = frozen_format(config.model)
    if packed_format is not None:
        # Codes and scales are kept and gathered. Products read one whole matrix at a time.
        shard = counts.updated - (counts.parameters - counts.matrices) // layout.replica.size
        in_layers = gathered * counts.matrices // (counts.parameters - counts.outside)
        weights += bytes_of(shard, packed_format, width) - 4 * shard
        weights += bytes_of(in_layers, packed_format, width)
        weights += width * (largest_layer_matrix(plan, split) - in_layers)
    reduced = width * counts.outside + (width + summed) * layer
    return weights, counts.share(4 * counts.updated + reduced)


def _whole_bytes(
    config: RunConfig, plan: ModelPlan, layout: Layout, counts: _Counts, summed: int
) -> tuple[int, int]:
    """Return the bytes of weights and of gradients if processes have whole weights.

    `summed` is the number of bytes per gradient element while gradients are summed.
    """
    split, numbers, matrices = _split_by(layout), config.precision, counts.matrices
    width, in_8_bits = numbers.weight_dtype.itemsize, counts.fp8 if numbers.fp8_format else 0
    weights = width * counts.parameters + 2 * in_8_bits  # the 8-bit copies and their transposes
    packed_format = frozen_format(config.model)
    if packed_format is not None:  # products read one matrix at a time in their own format
        largest = largest_layer_matrix(plan, split)
        weights += bytes_of(matrices, packed_format, width) + width * (largest - matrices)
    gradients = summed * counts.share(counts.parameters)
    if config.parallel.zero_stage == 2 and layout.replica.size > 1:
        in_transit = 2 * max(BUCKET_BYTES, summed * largest_matrix(plan, split))
        if numbers.fp8_param_gather:  # all small weights share one bucket
            small = counts.parameters - counts.outside - in_8_bits
            in_transit += min(BUCKET_BYTES, summed * small)
        gradients = summed * counts.share(counts.updated) + min(in_transit, gradients)
    if config.parallel.ddp_impl == "torch" and layout.replica.size > 1:
        gradients *= 2  # DistributedDataParallel has its own buckets
    return weights, gradients
