"""Who averages a run's gradients, by its flags; and what pipeline stages add up besides."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from megatron.config import RunConfig
from megatron.config.precision import PrecisionConfig
from megatron.device import Device
from megatron.models.position_bias import POSITION_TABLES
from megatron.optimizer.rules import rules_of
from megatron.parallel.buckets import BUCKET_BYTES, plan_buckets
from megatron.parallel.every_layer import attach_slots, fp8_weights
from megatron.parallel.fp8_products import Fp8Products
from megatron.parallel.gradients import GradientBuffer, traits_of
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.pipeline.schedule import schedule_kind
from megatron.parallel.pipeline.waves import parameter_waves
from megatron.parallel.replicas import Gradients, shares_weights
from megatron.parallel.tied import WORDS, Tie, tie_tables, tie_words, tied_names
from megatron.training.recipe import Recipe


def share_gradients(
    config: RunConfig, recipe: Recipe, parts: list[nn.Module], layout: Layout, device: Device
) -> tuple[Gradients, list[Tie]]:
    """The gradients of a model's parts, as the processes that hold the same weights share them;
    and the parameters that other stages hold too. Collective over the pipeline.

    Stage 3 of ZeRO puts shards in the place of the parts' parameters.
    """
    words = recipe.head.is_language_model and not config.model.untie_embeddings_and_output_weights
    tables = POSITION_TABLES if config.model.position_embedding_type == "relative" else ()
    gradients: Gradients
    if shares_weights(config.parallel, layout):
        gradients = _sharded_model(config, parts, layout, device)
    else:
        gradients = _buffer(config, parts, layout, tied_names(layout, words=words, tables=tables))
    named_parameters = _named_parameters(parts)  # as they are now
    dtype = torch.float32 if gradients.shares_weights else _gradient_dtype(config.precision)
    ties = tie_words(named_parameters, layout, is_tied=words) + tie_tables(
        named_parameters,
        tables,
        layout,
        device=device.torch_device,
        gradient_dtype=dtype,
    )
    return gradients, ties


def uses_torch_ddp(config: RunConfig, layout: Layout) -> bool:
    """Whether PyTorch's data parallelism averages the gradients, and not their buffer."""
    return config.parallel.ddp_impl == "torch" and layout.replica.size > 1


def gathered_in_8_bits(
    config: RunConfig, parts: list[nn.Module]
) -> dict[nn.Parameter, Fp8Products]:
    """Weights that processes which share the update send each other in 8 bits."""
    return fp8_weights(parts) if config.precision.fp8_param_gather else {}


def _sharded_model(
    config: RunConfig, parts: list[nn.Module], layout: Layout, device: Device
) -> Gradients:
    from megatron.parallel.sharded import ShardedModel  # imports much

    return ShardedModel(
        parts,
        layout,
        device=device.torch_device,
        compute_dtype=config.precision.weight_dtype,
        reduce_dtype=_gradient_dtype(config.precision),
    )


def _buffer(
    config: RunConfig, parts: list[nn.Module], layout: Layout, tied: Collection[str]
) -> GradientBuffer:
    """Where whole parameters' gradients live.

    Args:
        tied: names of parameters that other stages hold too.
    """
    is_torch = uses_torch_ddp(config, layout)
    named_parameters = _named_parameters(parts)
    waves = parameter_waves(parts, schedule_kind(config.parallel, len(parts)))
    in_8_bits = gathered_in_8_bits(config, parts)
    choose_rule = rules_of(config.optimizer)
    traits = [
        replace(
            traits_of(name, parameter),
            waves=waves[id(parameter)],
            gathered_in_8_bits=parameter in in_8_bits,
            is_tied=name in tied,
            comes_first=name in tied and name == WORDS and layout.pipeline.is_last,
            needs_whole=choose_rule(name, parameter).needs_whole,
        )
        for name, parameter in named_parameters
        if parameter.requires_grad
    ]
    # Alone: PyTorch's data parallelism averages the gradients in place.
    replicas = Axis() if is_torch else layout.replica
    plan = plan_buckets(
        traits,
        replicas={"data": replicas.size},
        zero_stage=config.parallel.zero_stage or 0,
        gradients_in_fp32=config.precision.accumulate_allreduce_grads_in_fp32,
        bucket_bytes=BUCKET_BYTES,
    )
    gradients = GradientBuffer(
        named_parameters,
        plan,
        {"data": replicas},
        tensor=layout.tensor,
        overlap=config.parallel.overlap_grad_reduce,
    )
    if config.precision.gradient_accumulation_fusion and not is_torch:  # which waits for autograd
        for part in parts:
            attach_slots(part, gradients)
    return gradients


def _named_parameters(parts: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [pair for part in parts for pair in part.named_parameters()]


def _gradient_dtype(numbers: PrecisionConfig) -> torch.dtype:
    in_fp32 = numbers.accumulate_allreduce_grads_in_fp32
    return torch.float32 if in_fp32 else numbers.weight_dtype
