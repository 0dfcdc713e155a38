"""Which processes average a run's gradients, and which pipeline stages add up copies'."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from megatron.config import RunConfig
from megatron.config.precision import PrecisionConfig
from megatron.device import Device
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
from megatron.parallel.tied import WORDS, Tie, tie_tables, tie_words, tied_names
from megatron.training.recipe import Recipe


def named_parameters_of(parts: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of all parts, as they are now; their names are global."""
    return [pair for part in parts for pair in part.named_parameters()]


def uses_torch_ddp(config: RunConfig, layout: Layout) -> bool:
    """Return whether PyTorch's data parallelism averages the gradients, not their buffer."""
    return config.parallel.ddp_impl == "torch" and layout.replica.size > 1


def gathered_in_8_bits(config: RunConfig, layers: LayerRegistry) -> dict[nn.Parameter, Fp8Products]:
    """Return the weights that processes which share the update send each other in 8 bits."""
    return layers.fp8_weights() if config.precision.fp8_param_gather else {}


def shard_model(
    config: RunConfig, parts: list[nn.Module], layout: Layout, device: Device
) -> Gradients:
    """Put shards in the place of the parts' parameters (ZeRO stage 3), and return their gradients.

    Args:
        config: of the run.
        parts: of the model on this process.
        layout: this process among the others.
        device: where it computes.
    """
    from megatron.parallel.sharded import ShardedModel  # imports much

    return ShardedModel(
        parts,
        layout,
        device=device.torch_device,
        compute_dtype=config.precision.weight_dtype,
        reduce_dtype=_gradient_dtype(config.precision),
    )


def _ties_words(config: RunConfig, recipe: Recipe) -> bool:
    return recipe.head.is_language_model and not config.model.untie_embeddings_and_output_weights


def _tied_tables(config: RunConfig) -> tuple[str, ...]:
    return POSITION_TABLES if config.model.position_embedding_type == "relative" else ()


def tie_copies(
    config: RunConfig,
    recipe: Recipe,
    parts: list[nn.Module],
    gradients: Gradients,
    layout: Layout,
    device: Device,
) -> list[Tie]:
    """Return the parameters of which other pipeline stages hold copies.

    Collective over the pipeline.

    Args:
        config: of the run.
        recipe: what is trained.
        parts: of the model on this process.
        gradients: of the parts.
        layout: this process among the others.
        device: where it computes.
    """
    named_parameters = named_parameters_of(parts)
    dtype = torch.float32 if gradients.shares_weights else _gradient_dtype(config.precision)
    words = tie_words(named_parameters, layout, is_tied=_ties_words(config, recipe))
    return words + tie_tables(
        named_parameters,
        _tied_tables(config),
        layout,
        device=device.torch_device,
        gradient_dtype=dtype,
    )


def new_gradient_buffer(
    config: RunConfig,
    recipe: Recipe,
    parts: list[nn.Module],
    layers: LayerRegistry,
    layout: Layout,
) -> GradientBuffer:
    """Plan the buckets of whole parameters' gradients, and build the buffer that holds them.

    Args:
        config: of the run.
        recipe: what is trained.
        parts: of the model on this process.
        layers: what their layers have announced.
        layout: this process among the others.
    """
    tied = tied_names(layout, words=_ties_words(config, recipe), tables=_tied_tables(config))
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
        layers.bind_slots(gradients)
    return gradients


def _gradient_dtype(numbers: PrecisionConfig) -> torch.dtype:
    in_fp32 = numbers.accumulate_allreduce_grads_in_fp32
    return torch.float32 if in_fp32 else numbers.weight_dtype
