"""A GPT cut into parts is the same network: values, gradients, names."""

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.config.stages import plan_parts
from megatron.models.arithmetic import count_part_parameters
from megatron.models.costs import WeightSplit
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize
from tests.models.small import LLAMA, batch, config, new_context, plan

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


def _build(flags, part=None):
    network = config(num_layers=4, **NO_DROPOUT, **flags)
    model = GPTModel(plan(network), new_context(network), part)
    initialize(model.named_parameters(), 1)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_parts_in_a_row_equal_the_whole(tied):
    flags = {"untie_embeddings_and_output_weights": not tied}
    whole = _build(flags)
    cut = plan_parts(4, ParallelConfig(pipeline_model_parallel_size=2))
    first, last = (_build(flags, part) for part in cut)
    tokens, labels = batch()
    expected = whole(tokens, labels=labels)
    loss = last(tokens, labels=labels, hidden=first(tokens))
    assert torch.equal(loss, expected)

    expected.sum().backward()
    loss.sum().backward()
    gradients = {}
    for part in (first, last):
        for name, parameter in part.named_parameters():
            gradients.setdefault(name, []).append(parameter.grad)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(sum(gradients.pop(name)), parameter.grad)
    assert not gradients
    assert ("embedding.word.weight" in dict(last.named_parameters())) == tied


@pytest.mark.parametrize("flags", [{}, {"untie_embeddings_and_output_weights": True}, LLAMA])
def test_arithmetic_counts_what_each_process_holds(flags):
    network = config(**{"num_layers": 4, **flags})
    cut = plan_parts(4, ParallelConfig(pipeline_model_parallel_size=2))
    for rank in range(4):
        layout = Layout.at(rank, 4, tensor=2, pipeline=2)
        part = cut[layout.pipeline.rank]
        model = GPTModel(plan(network), new_context(network, layout=layout, device="meta"), part)
        held = sum(parameter.numel() for parameter in model.parameters())
        assert count_part_parameters(plan(network), part, WeightSplit(tensor=2)) == held
