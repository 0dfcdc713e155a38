"""Computed counts against real modules and published numbers."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.config.model import ModelConfig
from megatron.config.stages import whole_model
from megatron.models.arithmetic import (
    count_active_parameters,
    count_depth_parameters,
    count_parameters,
    count_part_experts,
    count_part_matrices,
    flops_per_token,
    largest_layer,
    largest_layer_matrix,
    largest_matrix,
)
from megatron.models.costs import MicroBatch, WeightSplit
from megatron.models.gpt import GPTModel
from megatron.models.head import Output
from megatron.models.plans import model_plan
from tests.models.small import BATCH, LLAMA, SEQUENCE, VOCAB, batch, config, gpt, new_context
from tests.models.test_gpt import KNOBS

GPT2_MEDIUM = ModelConfig(
    num_layers=24,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    kv_channels=64,
    max_position_embeddings=1024,
)
LLAMA_FLAGS = {key: LLAMA[key] for key in LLAMA.keys() - {"ffn_hidden_size", "num_query_groups"}}
LLAMA3_8B = ModelConfig(
    **LLAMA_FLAGS,
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    kv_channels=128,
    num_query_groups=8,
    max_position_embeddings=8192,
)
WORKLOAD_S = ModelConfig(
    **{**LLAMA_FLAGS, "group_query_attention": False},
    num_layers=24,
    hidden_size=2048,
    ffn_hidden_size=5632,
    num_attention_heads=16,
    kv_channels=128,
    max_position_embeddings=4096,
)


def built(model, vocab):
    network = GPTModel(model_plan(model, vocab), new_context(model, device="meta"))
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("knob", KNOBS)
def test_every_knob_counts(knob):
    model = config(**KNOBS[knob])
    assert count_parameters(model_plan(model, VOCAB)) == built(model, VOCAB)


@pytest.mark.parametrize(
    ("model", "vocab", "published"),
    [(GPT2_MEDIUM, 50257, 354_823_168), (LLAMA3_8B, 128256, 8_030_261_248)],
    ids=["gpt2-medium", "llama3-8b"],
)
def test_published_sizes(model, vocab, published):
    assert count_parameters(model_plan(model, vocab)) == published == built(model, vocab)


@pytest.mark.parametrize("depths", [0, 2])
@pytest.mark.parametrize("experts", [{}, {"num_experts": (4,), "moe_router_topk": 1}])
def test_layers_and_depths_are_counted_as_they_are_built(depths, experts):
    model = config(position_embedding_type="rope", mtp_num_layers=depths or None, **experts)
    plan, one = model_plan(model, VOCAB), WeightSplit()
    network = GPTModel(plan, new_context(model, device="meta"))

    def held(*names, ndim=1):
        return sum(
            p.numel()
            for name, p in network.named_parameters()
            if name.startswith(names) and p.ndim >= ndim
        )

    whole = whole_model(len(plan.layers))
    assert count_depth_parameters(plan, one) == held("mtp.")
    largest = held("mtp.0.") if depths else held("layers.0.")
    in_experts = held("layers.0.mlp.experts.")
    assert largest_layer(plan, one) == (largest, in_experts)
    layers = len(plan.layers) + depths
    assert count_part_experts(plan, whole, one) == layers * in_experts
    assert count_active_parameters(plan) == held("") - layers * in_experts * 3 // 4
    if not experts:
        assert count_part_matrices(plan, whole, one) == held("layers.", "mtp.", ndim=2)
        without_head = replace(whole, head=False)
        assert count_part_matrices(plan, without_head, one) == held("layers.", ndim=2)
        assert largest_layer_matrix(plan, one) == 3 * 16 * 16  # queries, keys and values
        assert largest_matrix(plan, one) == VOCAB * 16
        assert largest_matrix(plan, WeightSplit(tensor=2)) == VOCAB * 16 // 2


@pytest.mark.parametrize(
    ("model", "sequence", "vocab", "gflop"),
    [(WORKLOAD_S, 4096, 131072, 10.2), (LLAMA3_8B, 8192, 128256, 51.5)],
    ids=["S", "L"],
)
def test_flops_of_the_benchmark_workloads(model, sequence, vocab, gflop):
    assert round(flops_per_token(model_plan(model, vocab), sequence) / 1e9, 1) == gflop


def test_a_chunked_loss_keeps_the_gradients_of_its_input_and_weight():
    model = gpt(LLAMA, {"cross_entropy_fusion_impl": "linear", "cross_entropy_loss_fusion": True})
    output, (_, labels) = model.output, batch()
    x = torch.randn(SEQUENCE, BATCH, 16, requires_grad=True)
    kept = []
    with saved_tensors_hooks(lambda x: kept.append(x.nbytes), lambda x: x):
        output(x, labels, torch.ones(BATCH, SEQUENCE))
    mask = 4 * BATCH * SEQUENCE  # too little to be counted
    logits = 4 * BATCH * SEQUENCE * VOCAB  # a single chunk, which is freed
    counted = Output.activation_bytes(
        model.plan.output, MicroBatch(sequences=BATCH, length=SEQUENCE, chunked_loss=True)
    )
    assert sum(kept) - mask == counted - logits
