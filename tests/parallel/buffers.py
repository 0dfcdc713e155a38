"""Gradient buffers and optimizers for tests: a plan and its executor in one call."""

from collections.abc import Collection
from dataclasses import replace

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.optimizer.groups import split_groups
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.rules import rules_of
from megatron.parallel.buckets import BUCKET_BYTES, plan_buckets
from megatron.parallel.build import BuildContext
from megatron.parallel.gradients import GradientBuffer, traits_of
from megatron.parallel.layout import Axis, Layout


def new_parameter(shape, *, axis=None, device="cpu", **options):
    """Return a parameter on one process, or this rank's part of it along a tensor axis."""
    layout = replace(Layout.single(), tensor=axis or Axis())
    return BuildContext(layout, device=torch.device(device)).new_parameter(shape, **options)


def new_buffer(
    named_parameters,
    layout,
    *,
    accumulate_in_fp32: bool,
    bucket_bytes: int = BUCKET_BYTES,
    zero_stage: int = 0,
    overlap: bool = False,
    tied: Collection[str] = (),
    in_8_bits: Collection[str] = (),
    idle: Collection[str] = (),
    partial: Collection[str] = (),
    whole: Collection[str] = (),
) -> GradientBuffer:
    """Return a buffer for these parameters; other arguments are sets of names with that trait."""
    named = list(named_parameters)
    traits = [
        replace(
            traits_of(name, parameter),
            is_tied=name in tied,
            gathered_in_8_bits=name in in_8_bits,
            may_be_idle=name in idle,
            is_partial=name in partial or traits_of(name, parameter).is_partial,
            needs_whole=name in whole,
        )
        for name, parameter in named
        if parameter.requires_grad
    ]
    axes = {"data": layout.replica, "expert_data": layout.expert_replica}
    plan = plan_buckets(
        traits,
        replicas={name: axis.size for name, axis in axes.items()},
        zero_stage=zero_stage,
        gradients_in_fp32=accumulate_in_fp32,
        bucket_bytes=bucket_bytes,
    )
    tensor = {"data": layout.tensor, "expert_data": layout.expert_tensor}
    return GradientBuffer(named, plan, axes, tensor=tensor, overlap=overlap)


def new_optimizer(
    named_parameters, gradients, config=None, precision=None, layout=None, *, rules=None, **options
) -> Optimizer:
    """Return an optimizer for these parameters, which waits for the weights that it gathers."""
    config, precision = config or OptimizerConfig(), precision or PrecisionConfig()
    groups = split_groups(
        named_parameters, rules or rules_of(config), decouples=options.pop("decouples", False)
    )
    weights = gradients.share_weights(None, {})
    return Optimizer(groups, gradients, config, precision, layout, weights=weights, **options)
