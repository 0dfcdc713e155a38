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
from megatron.parallel.every_layer import set_overlap
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
    """The model that a run's flags describe, or a part of it.

    Args:
        network: GPTModel, or what is constructed as it is.

    Weights that processes share are fp32 and have no memory yet: see `ShardedModel`.
    """
    parallel, numbers = config.parallel, config.precision
    is_shared = shares_weights(parallel, layout)
    model = network(
        config.model,
        numbers,
        layout,
        padded_vocab_size=padded_vocab_size,
        part=part,
        recompute=RecomputePlan.from_config(
            config.training, split_inputs=parallel.distribute_saved_activations
        ),
        cp_comm_type=parallel.cp_comm_type,
        device=device.torch_device,
        parameter_device=torch.device("meta") if is_shared else None,
        dtype=torch.float32 if is_shared else numbers.weight_dtype,
    )
    set_overlap(model, parallel.async_tensor_model_parallel_allreduce)
    return model
