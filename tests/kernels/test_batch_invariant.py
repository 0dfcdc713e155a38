"""A token has the same bits in any batch: products, attention, and both against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.attention import AttentionOptions, attention_reference
from megatron.kernels.batch_invariant import (
    attend,
    batch_invariant_attention,
    batch_invariant_product,
)
from megatron.kernels.segments import Segments

pytestmark = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="--batch-invariant-mode is refused without MKL"
)
# n, g, d, tokens
SHAPES = [(4, 2, 16, 40), (2, 2, 32, 200), (8, 4, 64, 300), (3, 1, 80, 150), (2, 1, 128, 90)]


@pytest.mark.parametrize("inputs", [32, 96, 128, 512, 1024, 4096])
@pytest.mark.parametrize("outputs", [12, 64, 259, 1024])
def test_rows_of_a_product_do_not_depend_on_their_number(inputs: int, outputs: int) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(300, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    whole = batch_invariant_product(x, weight, bias)
    torch.testing.assert_close(whole, F.linear(x, weight, bias))
    for rows in (1, 2, 3, 4, 5, 16, 17, 64, 200):
        for start in (0, 7):
            part = batch_invariant_product(x[start : start + rows], weight, bias)
            assert torch.equal(part, whole[start : start + rows]), rows


@pytest.mark.parametrize("special", [False, True], ids=["plain", "bounded, with sinks and biases"])
@pytest.mark.parametrize(("heads", "groups", "size", "tokens"), SHAPES)
def test_one_query_finds_what_all_find(
    heads: int, groups: int, size: int, tokens: int, special: bool
) -> None:
    """This also holds in batches with other lengths, and for prompts in chunks."""
    torch.manual_seed(1)
    options = AttentionOptions()
    if special:
        slopes = torch.rand(heads) * 0.1
        options = AttentionOptions(softcap=2.0, sinks=torch.randn(heads), slopes=slopes)
    query = torch.randn(1, heads, tokens, size)
    key, value = torch.randn(2, 1, groups, tokens, size)
    causal = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    whole = attend(query, key, value, causal, options)
    for last in range(0, tokens, 7):
        end = last + 1
        alone = attend(
            query[:, :, last:end], key[:, :, :end], value[:, :, :end], _seen(end), options
        )
        assert torch.equal(alone[0, :, 0], whole[0, :, last])
        longest = min(tokens, end + 70)
        others = [torch.randn(2, x.shape[1], longest, size) for x in (query, key, value)]
        mine = (query[:, :, last:end], key[:, :, :longest], value[:, :, :longest])
        q, k, v = (
            torch.cat((other[:, :, : x.shape[2]], x)) for other, x in zip(others, mine, strict=True)
        )
        seen = torch.arange(longest) < torch.tensor([longest, 1, end])[:, None]
        assert torch.equal(
            attend(q, k, v, seen[:, None, None], options)[2, :, 0], whole[0, :, last]
        )
        start = max(0, last - 9)
        chunk = attend(
            query[:, :, start:end],
            key[:, :, :end],
            value[:, :, :end],
            causal[:, :, start:end, :end],
            options,
        )
        assert torch.equal(chunk, whole[:, :, start:end])


def _seen(keys: int) -> Tensor:
    return torch.ones(1, 1, 1, keys, dtype=torch.bool)


@pytest.mark.parametrize("kind", ["causal", "documents", "mask", "all"])
def test_values_and_gradients_are_those_of_the_reference(kind: str) -> None:
    torch.manual_seed(1)
    shapes = [(70, 2, heads, 8) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    ends = torch.tensor([0, 5, 5, 70, 71, 140, 140])
    mask: Tensor | Segments | None = None
    if kind == "documents":
        mask = Segments.of(ends, torch.zeros(2, 70))
    elif kind == "mask":
        mask = (torch.rand(2, 1, 70, 70) > 0.5) | torch.eye(70, dtype=torch.bool)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 5.0], requires_grad=True)
    options = AttentionOptions(mask, causal=kind == "causal", scale=0.3)
    expected = attention_reference(*tensors, options._replace(scale=None))
    found = batch_invariant_attention(*tensors, options._replace(scale=None))
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, tensors, upstream),
        torch.autograd.grad(expected, tensors, upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    scaled = batch_invariant_attention(*tensors, options)
    torch.testing.assert_close(scaled, attention_reference(*tensors, options))
    options = options._replace(softcap=0.8, sinks=sinks)
    results = [form(*tensors, options) for form in (batch_invariant_attention, attention_reference)]
    torch.testing.assert_close(*results)
    gradients = [torch.autograd.grad(out, [*tensors, sinks], upstream) for out in results]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    if kind in ("causal", "documents"):  # with biases, a query's last key is its own
        options = options._replace(slopes=torch.tensor([0.5, 0.1, 0.02, 0.004]))
        biased = batch_invariant_attention(*tensors, options)
        torch.testing.assert_close(biased, attention_reference(*tensors, options))
        assert not torch.allclose(biased, results[0])


def test_a_document_has_the_same_bits_anywhere_in_a_row() -> None:
    torch.manual_seed(1)
    document = torch.randn(3, 75, 1, 4, 16)
    alone = batch_invariant_attention(*document, AttentionOptions())
    for before in (1, 16, 33):
        row = torch.randn(3, before + 80, 1, 4, 16)
        row[:, before : before + 75] = document
        ends = torch.tensor([0, before, before + 75, before + 80])
        segments = Segments.of(ends, torch.zeros(1, before + 80))
        found = batch_invariant_attention(*row, AttentionOptions(segments))
        assert torch.equal(found[before : before + 75], alone)
