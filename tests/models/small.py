"""A GPT small enough for tests, and a batch for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.models.gpt import GPTModel
from megatron.models.plan import LANGUAGE_MODEL_HEAD, HeadSpec, ModelPlan
from megatron.models.plans import model_plan
from megatron.models.recompute import RecomputePlan
from megatron.parallel.build import BuildContext, choose_kernels
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize

VOCAB, SEQUENCE, BATCH = 64, 12, 2

LLAMA: dict[str, Any] = {
    "swiglu": True,
    "ffn_hidden_size": 24,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def config(**flags: Any) -> ModelConfig:
    sizes = {
        "num_layers": 3,
        "hidden_size": 16,
        "ffn_hidden_size": 32,
        "num_attention_heads": 4,
        "kv_channels": 4,
        "max_position_embeddings": SEQUENCE,
    }
    return ModelConfig(**{**sizes, **flags})


def plan(model: ModelConfig, head: HeadSpec = LANGUAGE_MODEL_HEAD) -> ModelPlan:
    """Return the network's plan with the vocabulary of these tests."""
    return model_plan(model, VOCAB, head)


def new_context(
    model: ModelConfig,
    precision: PrecisionConfig | None = None,
    layout: Layout | None = None,
    *,
    device: torch.device | str = "cpu",
    cp_comm_type: str = "p2p",
    **options: Any,
) -> BuildContext:
    """Return the context in which a model with these flags is built."""
    layout, where = layout or Layout.single(), torch.device(device)
    numbers = precision or PrecisionConfig()
    kernels = choose_kernels(model, numbers, layout, where, cp_comm_type=cp_comm_type)
    return BuildContext(layout, where, precision=numbers, kernels=kernels, **options)


def gpt(
    flags: dict[str, Any] | None = None,
    precision: dict[str, Any] | None = None,
    *,
    layout: Layout | None = None,
    recompute: RecomputePlan | None = None,
    cp_comm_type: str = "p2p",
    dtype: torch.dtype = torch.float32,
    overlap: bool = True,
    seed: int = 1,
) -> GPTModel:
    network, numbers = config(**(flags or {})), PrecisionConfig(**(precision or {}))
    context = new_context(
        network, numbers, layout, cp_comm_type=cp_comm_type, dtype=dtype, overlap=overlap
    )
    model = GPTModel(plan(network), context, recompute=recompute)
    initialize(model.named_parameters(), seed)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and labels [b, s]."""
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


@contextmanager
def kept_for_backward(layer: nn.Module) -> Iterator[dict[int, int]]:
    """Collect the bytes of each storage that autograd keeps, by address, except for weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory.nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield kept


def loss_and_gradients(model: GPTModel, *, seed: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss [b, s] and every parameter's gradient, with dropout seeded."""
    tokens, labels = batch()
    torch.manual_seed(seed)
    loss = model(tokens, labels=labels)
    loss.mean().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        gradients[name] = parameter.grad
    return loss.detach(), gradients
