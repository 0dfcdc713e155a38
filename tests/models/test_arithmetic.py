"""Computed counts against real modules and published numbers."""

import pytest

from megatron.config.model import ModelConfig
from megatron.models.arithmetic import count_parameters, flops_per_token
from megatron.models.gpt import GPTModel
from megatron.models.plans import model_plan
from tests.models.small import LLAMA, VOCAB, config, new_context
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


@pytest.mark.parametrize(
    ("model", "sequence", "vocab", "gflop"),
    [(WORKLOAD_S, 4096, 131072, 10.2), (LLAMA3_8B, 8192, 128256, 51.5)],
    ids=["S", "L"],
)
def test_flops_of_the_benchmark_workloads(model, sequence, vocab, gflop):
    assert round(flops_per_token(model_plan(model, vocab), sequence) / 1e9, 1) == gflop
