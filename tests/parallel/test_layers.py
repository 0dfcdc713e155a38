"""Split layers equal the whole layer, forward and backward."""

import math

import pytest
import torch

from megatron.parallel.collectives import gather_from
from megatron.parallel.initialization import initialize
from megatron.parallel.layers import Linear, VocabularyEmbedding
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import Init, spec_of
from tests.distributed import run_distributed

INIT = Init("normal", 0.3)


def take_part(full, parameter):
    """The slice of a whole tensor that `parameter` stands for."""
    spec = spec_of(parameter)
    box = zip(spec.offset, parameter.shape, strict=True)
    return full[tuple(slice(start, start + size) for start, size in box)]


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def run_linear(layout, split, parts):
    """Output (whole), input gradient and weight gradients of a layer fed with whole inputs."""
    module = Linear(8, 12, split=split, layout=layout, init=INIT, parts=parts)
    for parameter in module.parameters():  # biases too: zeros would hide mistakes
        shape = spec_of(parameter).global_shape
        full = torch.sin(torch.arange(float(math.prod(shape)))).view(shape)
        with torch.no_grad():
            parameter.copy_(take_part(full, parameter))
    x = torch.cos(torch.arange(40.0)).view(5, 1, 8).requires_grad_()
    fed = x.chunk(layout.tensor.size, -1)[layout.tensor.rank] if split == "row" else x
    out = module(fed)
    if split == "column":
        out = gather_from(out, layout.tensor)
        if parts == 2 and layout.tensor.size == 2:  # [gate0 up0 gate1 up1] -> [gate, up]
            out = torch.cat([out.chunk(4, -1)[i] for i in (0, 2, 1, 3)], -1)
    out.backward(torch.sin(torch.arange(60.0)).view_as(out))
    return out.detach(), x.grad, gradients(module)


@pytest.mark.parametrize(("split", "parts"), [("column", 1), ("column", 2), ("row", 1)])
def test_split_linear_equals_whole(split, parts):
    out, x_grad, grads = run_linear(Layout.single(), split, parts)
    whole = Linear(8, 12, split=split, layout=Layout.single(), init=INIT, parts=parts)
    results = run_distributed(2, run_linear, split, parts, tensor=2)
    # A row-split layer gives each rank the gradient of its own part of the input.
    joined = sum(r[1] for r in results) if split == "row" else results[0][1]
    torch.testing.assert_close(joined, x_grad)
    for rank, (part_out, _, part_grads) in enumerate(results):
        torch.testing.assert_close(part_out, out)
        layout = Layout.at(rank, 2, tensor=2)
        part = Linear(8, 12, split=split, layout=layout, init=INIT, parts=parts)
        for name, parameter in part.named_parameters():
            torch.testing.assert_close(part_grads[name], take_part(grads[name], parameter))
    assert {n: tuple(p.shape) for n, p in whole.named_parameters()} == {
        n: spec_of(p).global_shape for n, p in part.named_parameters()
    }


def test_linear_is_the_plain_product():
    module = Linear(4, 6, split=None, layout=Layout.at(1, 2, tensor=2), init=INIT)
    initialize(module.named_parameters(), seed=1)
    with torch.no_grad():
        module.bias.fill_(0.5)
    x = torch.randn(3, 2, 4)
    torch.testing.assert_close(module(x), x @ module.weight.t() + 0.5)
    assert Linear(4, 6, split=None, layout=Layout.single(), init=INIT, bias=False).bias is None


def run_embedding(layout):
    module = VocabularyEmbedding(10, 4, layout=layout, init=INIT)
    initialize([("word", module.weight)], seed=2)
    tokens = torch.tensor([[0, 9, 4], [5, 4, 4]])
    out = module(tokens)
    out.backward(torch.arange(24.0).view_as(out))
    return out.detach(), module.weight.grad


def test_split_embedding_equals_whole():
    out, grad = run_embedding(Layout.single())
    results = run_distributed(2, run_embedding, tensor=2)
    for part_out, _ in results:
        torch.testing.assert_close(part_out, out)
    torch.testing.assert_close(torch.cat([g for _, g in results]), grad)


def test_lookup_in_fp32_sums_gradients_in_fp32():
    """Ones summed 4096 times: a bf16 sum gets stuck at 256."""

    def gradient(lookup_in_fp32):
        module = VocabularyEmbedding(
            2,
            1,
            layout=Layout.single(),
            init=INIT,
            lookup_in_fp32=lookup_in_fp32,
            dtype=torch.bfloat16,
        )
        initialize([("word", module.weight)], seed=2)
        out = module(torch.zeros(1, 4096, dtype=torch.long))
        assert out.dtype == torch.bfloat16
        out.backward(torch.ones_like(out))
        return module.weight.grad[0].item()

    assert gradient(True) == 4096
    assert gradient(False) < 4096
