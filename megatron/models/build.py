"""Functions that build the model a run's configuration describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from megatron.config.run import ModelRun
from megatron.config.stages import ModelPart
from megatron.device import Device
from megatron.models.adapters import add_adapters
from megatron.models.freezing import freeze, frozen_format
from megatron.models.plan import LANGUAGE_MODEL_HEAD, HeadSpec
from megatron.models.plans import model_plan
from megatron.models.recompute import RecomputePlan
from megatron.parallel.build import BuildContext, choose_kernels
from megatron.parallel.exchange import Exchange
from megatron.parallel.layout import Layout
from megatron.parallel.offload import HostActivations
from megatron.parallel.pipeline.weight_gradients import WeightGradientQueue
from megatron.parallel.registry import LayerRegistry
from megatron.parallel.replicas import shares_weights

Model = TypeVar("Model", bound=nn.Module)


def run_context(
    config: ModelRun,
    layout: Layout,
    device: Device,
    *,
    exchange: Exchange | None = None,
    expert_exchange: Exchange | None = None,
    weight_gradients: WeightGradientQueue | None = None,
    registry: LayerRegistry | None = None,
) -> BuildContext:
    """Return the context in which the layers of a run are built.

    Weights that are sharded over processes are fp32 and have no memory yet. `ShardedModel`
    allocates their shards later.

    Args:
        config: Resolved configuration of the run.
        layout: The grid of processes as this process sees it.
        device: Device on which the model runs.
        exchange: Exchange that overlaps tensor-parallel communication with matrix products; `None`
            if overlap is off.
        expert_exchange: Exchange that sends tokens to experts and back; `None` uses collectives.
        weight_gradients: Queue in which the backward pass defers weight gradients; `None` computes
            them immediately.
        registry: Registry in which layers record what they will need; `None` creates a new one.
    """
    parallel, precision = config.parallel, config.precision
    splits_sequences = parallel.sequence_parallel and layout.tensor.size > 1
    assert splits_sequences == (layout.sequence.size > 1), "the layout has these flags"
    is_shared = shares_weights(parallel, layout)
    torch_device = device.torch_device
    return BuildContext(
        layout,
        torch_device,
        parameter_device=torch.device("meta") if is_shared else None,
        dtype=torch.float32 if is_shared else precision.weight_dtype,
        precision=precision,
        kernels=choose_kernels(
            config.model, precision, layout, torch_device, cp_comm_type=parallel.cp_comm_type
        ),
        fp8_layers=precision.fp8_layers(config.model.num_layers)
        if precision.first_last_layers_bf16
        else None,
        overlap=parallel.async_tensor_model_parallel_allreduce,
        exchange=exchange,
        expert_exchange=expert_exchange,
        weight_gradients=weight_gradients,
        registry=registry or LayerRegistry(),
        frozen_format=frozen_format(config.model),
        halves_experts=layout.expert.size > 1 and parallel.overlap_moe_expert_parallel_comm,
        host_activations=HostActivations(
            torch_device,
            frozenset(config.training.offload_modules),
            config.training.min_offloaded_tensor_size,
        )
        if config.training.fine_grained_activation_offloading
        else None,
    )


def build_model(
    network: Callable[..., Model],
    config: ModelRun,
    context: BuildContext,
    padded_vocab_size: int,
    part: ModelPart | None = None,
    head: HeadSpec = LANGUAGE_MODEL_HEAD,
) -> Model:
    """Build the model, or a part of it, as the flags describe, with adapters and frozen weights.

    Args:
        network: A model class such as `GPTModel`, or a callable that takes the same arguments.
        config: Resolved configuration of the run.
        context: Context in which the layers are built, usually from `run_context`.
        padded_vocab_size: Number of vocabulary entries, padding included.
        part: Part of the model that this process holds; `None` builds the whole model.
        head: Purpose of the model's heads.
    """
    recompute = RecomputePlan.from_config(
        config.training, split_inputs=config.parallel.distribute_saved_activations
    )
    model = network(model_plan(config.model, padded_vocab_size, head), context, part, recompute)
    if config.model.lora_rank is not None:
        add_adapters(model, config.model, context)
    freeze(model.named_parameters(), config.model)
    return model
