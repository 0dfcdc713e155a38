"""Buffers or shards for gradients, and ties between copies of weights on pipeline stages."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from megatron.config import RunConfig
from megatron.config.precision import PrecisionConfig
from megatron.device import Device
from megatron.models.multi_token import copies_words
from megatron.models.plan import ModelPlan
from megatron.models.position_bias import POSITION_TABLES
from megatron.optimizer.rules import rules_of
from megatron.parallel.buckets import BUCKET_BYTES, plan_buckets
from megatron.parallel.fp8 import Fp8Products
from megatron.parallel.gradients import GradientBuffer, traits_of
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.pipeline.schedule import schedule_kind
from megatron.parallel.pipeline.weight_gradients import parameter_waves
from megatron.parallel.registry import LayerRegistry
from megatron.parallel.replicas import Gradients
from megatron.parallel.tied import WORD_EMBEDDING, Tie, find_ties, tied_names


def named_parameters_of(parts: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the global name and the current parameter object, for each parameter of the parts."""
    return [pair for part in parts for pair in part.named_parameters()]


def uses_torch_ddp(config: RunConfig, layout: Layout) -> bool:
    """Return whether PyTorch's DDP averages the gradients, instead of our gradient buffer."""
    return config.parallel.ddp_impl == "torch" and layout.replica.size > 1


def gathered_in_8_bits(config: RunConfig, layers: LayerRegistry) -> dict[nn.Parameter, Fp8Products]:
    """Return the `Fp8Products` of each weight that is gathered in fp8 after a sharded update."""
    return layers.fp8_weights() if config.precision.fp8_param_gather else {}


def shard_model(
    config: RunConfig, parts: list[nn.Module], layout: Layout, device: Device
) -> Gradients:
    """Replace the parts' parameters with shards (ZeRO stage 3), and return their gradients.

    Args:
        config: The run's configuration.
        parts: The parts of the model on this process.
        layout: The ranks of this process.
        device: The device of this process.
    """
    from megatron.parallel.sharded import ShardedModel  # slow to import

    return ShardedModel(
        parts,
        layout,
        device=device.torch_device,
        compute_dtype=config.precision.weight_dtype,
        reduce_dtype=_gradient_dtype(config.precision),
    )


def _tied_tables(plan: ModelPlan) -> tuple[str, ...]:
    return () if plan.position_bias is None else POSITION_TABLES


def tie_copies(
    config: RunConfig,
    plan: ModelPlan,
    parts: list[nn.Module],
    gradients: Gradients,
    layout: Layout,
    device: Device,
) -> list[Tie]:
    """Return the ties between parameters of this stage and their copies on other stages.

    Collective over the pipeline.

    Args:
        config: The run's configuration.
        plan: The whole network.
        parts: The parts of the model on this process.
        gradients: The gradients of the parts.
        layout: The ranks of this process.
        device: The device of this process.
    """
    named_parameters = named_parameters_of(parts)
    dtype = torch.float32 if gradients.shares_weights else _gradient_dtype(config.precision)
    return find_ties(
        named_parameters,
        layout,
        word_embeddings=copies_words(plan),
        tables=_tied_tables(plan),
        device=device.torch_device,
        gradient_dtype=dtype,
    )


def new_gradient_buffer(
    config: RunConfig,
    plan: ModelPlan,
    parts: list[nn.Module],
    layers: LayerRegistry,
    layout: Layout,
) -> GradientBuffer:
    """Plan gradient buckets for unsharded parameters, and build the buffer.

    With --gradient-accumulation-fusion and without PyTorch's DDP, the layers are bound to the
    buffer, to which their matrix products then add gradients directly.

    Args:
        config: The run's configuration.
        plan: The whole network.
        parts: The parts of the model on this process.
        layers: The registry in which the layers recorded their requirements.
        layout: The ranks of this process.
    """
    tied = tied_names(layout, word_embeddings=copies_words(plan), tables=_tied_tables(plan))
    is_torch = uses_torch_ddp(config, layout)
    named_parameters = named_parameters_of(parts)
    kind = schedule_kind(config.parallel, len(parts))
    waves = parameter_waves(parts, kind, layers.deferrable_weights)
    in_8_bits = gathered_in_8_bits(config, layers)
    choose_rule = rules_of(config.optimizer)
    traits = [
        replace(
            traits_of(name, parameter),
            waves=waves[id(parameter)],
            gathered_in_8_bits=parameter in in_8_bits,
            is_tied=name in tied,
            comes_first=name in tied and name == WORD_EMBEDDING and layout.pipeline.is_last,
            needs_whole=choose_rule(name, parameter).needs_whole,
        )
        for name, parameter in named_parameters
        if parameter.requires_grad
    ]
    # The buffer has a single replica if PyTorch's data parallelism averages the gradients in place.
    replicas = {"data": layout.replica, "expert_data": layout.expert_replica}
    if is_torch:
        replicas = dict.fromkeys(replicas, Axis())
    buckets = plan_buckets(
        traits,
        replicas={name: axis.size for name, axis in replicas.items()},
        zero_stage=config.parallel.zero_stage,
        gradients_in_fp32=config.precision.accumulate_allreduce_grads_in_fp32,
        bucket_bytes=BUCKET_BYTES,
    )
    gradients = GradientBuffer(
        named_parameters,
        buckets,
        replicas,
        tensor={"data": layout.tensor, "expert_data": layout.expert_tensor},
        overlap=config.parallel.overlap_grad_reduce,
    )
    # PyTorch's data parallelism expects gradients from autograd, not from fused accumulation.
    if config.precision.gradient_accumulation_fusion and not is_torch:
        layers.bind_slots(gradients)
    return gradients


def _gradient_dtype(numbers: PrecisionConfig) -> torch.dtype:
    in_fp32 = numbers.accumulate_allreduce_grads_in_fp32
    return torch.float32 if in_fp32 else numbers.weight_dtype
