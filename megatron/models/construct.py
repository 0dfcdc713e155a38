"""From a run's flags to one of the models, all of which are constructed alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from megatron.config import RunConfig
from megatron.config.stages import ModelPart
from megatron.device import Device
from megatron.models.recompute import RecomputePlan
from megatron.parallel.build import BuildContext, choose_kernels
from megatron.parallel.layout import Layout
from megatron.parallel.replicas import shares_weights

Model = TypeVar("Model", bound=nn.Module)


def build_model(
    network: Callable[..., Model],
    config: RunConfig,
    layout: Layout,
    device: Device,
    padded_vocab_size: int,
    part: ModelPart | None = None,
) -> Model:
    """Build the model that a run's flags describe, or a part of it.

    Weights that processes share are fp32 and have no memory yet: see `ShardedModel`.

    Args:
        network: GPTModel, or what is constructed as it is.
        config: what the flags ask for, resolved.
        layout: this process among the others.
        device: where the model runs.
        padded_vocab_size: entries of the vocabulary, padding included.
        part: what this process holds; `None` builds the whole model.
    """
    parallel, numbers = config.parallel, config.precision
    is_shared = shares_weights(parallel, layout)
    where = device.torch_device
    context = BuildContext(
        layout,
        where,
        parameter_device=torch.device("meta") if is_shared else None,
        dtype=torch.float32 if is_shared else numbers.weight_dtype,
        kernels=choose_kernels(
            config.model, numbers, layout, where, cp_comm_type=parallel.cp_comm_type
        ),
        overlap=parallel.async_tensor_model_parallel_allreduce,
    )
    return network(
        config.model,
        numbers,
        context,
        padded_vocab_size=padded_vocab_size,
        part=part,
        recompute=RecomputePlan.from_config(
            config.training, split_inputs=parallel.distribute_saved_activations
        ),
    )
