"""Blocks: the plain form against autograd, merging rows, and the choice."""

import math

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.errors import ConfigError
from megatron.kernels.attention import choose_attention
from megatron.models.context import over_context
from megatron.parallel.context.block import (
    choose_block,
    flash_backward,
    flash_forward,
    merge,
    reference_backward,
    reference_forward,
)
from megatron.parallel.layout import Axis
from tests.models.small import config
from tests.parallel.context.inputs import heads, one_process, weights_of

CPU = torch.device("cpu")
TWO = Axis(size=2, ranks=(0, 1))


def by_head(inputs):
    return [x.permute(1, 2, 0, 3) for x in inputs]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_form_equals_attention(groups, causal):
    inputs = heads(9, groups)
    out, *gradients = by_head(
        [x.unflatten(2, (4, 8)) if x.dim() == 3 else x for x in one_process(inputs, causal=causal)]
    )
    got, logsumexp = reference_forward(*by_head(inputs), causal=causal)
    torch.testing.assert_close(got, out, rtol=1e-5, atol=1e-6)
    grad = weights_of(torch.empty(9, 2, 32)).unflatten(2, (4, 8)).permute(1, 2, 0, 3)
    back = reference_backward(grad, *by_head(inputs), got, logsumexp, causal=causal)
    for ours, theirs in zip(back, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def in_two_blocks(forward, backward, inputs, grad):
    """Result, log-sum-exp and gradients of full attention, from an early and a late block of keys.

    Backward of each block sees the merged result, and only the late queries of the early block.
    """
    query, key, value = inputs
    half = key.shape[2] // 2
    halves = [(x[:, :, :half], x[:, :, half:]) for x in (key, value)]
    (early_key, late_key), (early_value, late_value) = halves
    part, logsumexp = forward(query, early_key, early_value, causal=False)
    out = part.to(logsumexp.dtype)
    late = [x[:, :, half:] for x in (query, out, logsumexp, grad)]
    merge(late[1], late[2], *forward(late[0], late_key, late_value, causal=True))
    rounded = out.to(query.dtype)
    early = backward(grad, query, early_key, early_value, rounded, logsumexp, causal=False)
    other = backward(
        late[3], late[0], late_key, late_value, rounded[:, :, half:], late[2], causal=True
    )
    grad_query = early[0].to(out.dtype).clone()
    grad_query[:, :, half:] += other[0]
    pairs = zip(early[1:], other[1:], strict=True)
    return out, logsumexp, grad_query, *(torch.cat(pair, 2) for pair in pairs)


def test_blocks_merge():
    inputs = [x.double().requires_grad_() for x in by_head(heads(16, 2))]
    allowed = torch.ones(16, 16, dtype=torch.bool)
    allowed[:8, 8:] = False
    allowed[8:, 8:].tril_()
    query, key, value = inputs
    scores = (query @ key.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~allowed, -math.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    grad = weights_of(expected)
    expected.backward(grad.double())
    got = in_two_blocks(
        reference_forward, reference_backward, [x.detach().float() for x in inputs], grad
    )
    wanted = (expected, scores.logsumexp(-1), *(x.grad for x in inputs))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-5, atol=1e-5)


def test_sums_are_in_fp32():
    query, key, value = (x.bfloat16() for x in by_head(heads(64, 2)))
    out, logsumexp = reference_forward(query, key, value, causal=True)
    wide, wide_sum = reference_forward(query.float(), key.float(), value.float(), causal=True)
    assert out.dtype == logsumexp.dtype == torch.float32
    assert torch.equal(out, wide)
    assert torch.equal(logsumexp, wide_sum)


def test_the_flash_form_calls_operations_that_torch_has():
    """Types and shapes on the meta device; values are compared on a GPU."""
    query, key, value = (x.bfloat16().to("meta") for x in by_head(heads(16, 2)))
    out, logsumexp = flash_forward(query, key, value, causal=True)
    assert out.shape == query.shape
    assert (logsumexp.shape, logsumexp.dtype) == (query.shape[:3], torch.float32)
    half = logsumexp[:, :, 8:]
    late = [x[:, :, 8:] for x in (out, query)]
    gradients = flash_backward(late[0], late[1], key, value, late[0], half, causal=False)
    assert [g.shape for g in gradients] == [late[1].shape, key.shape, value.shape]


def test_choice_on_a_cpu():
    block = choose_block(64, torch.bfloat16, CPU)
    assert (block.name, block.reason) == ("plain", "no flash kernel on cpu")


def _choice(comm_type, axis=TWO, precision=None, **flags):
    model, precision = config(**flags), precision or PrecisionConfig()
    alone = choose_attention(ModelConfig(), PrecisionConfig(), CPU)
    return alone, over_context(alone, comm_type, axis, model, precision, CPU)


def test_the_choice_is_printable():
    assert str(_choice("p2p")[1]) == "plain (no flash kernel on cpu; ring of 2 context ranks)"
    _, plain = _choice("p2p", masked_softmax_fusion=False)
    assert str(plain) == "plain (--no-masked-softmax-fusion; ring of 2 context ranks)"
    alone, ulysses = _choice("a2a")
    assert str(ulysses) == f"fused ({alone.reason}; all-to-all over 2 context ranks)"
    for comm_type in ("p2p", "a2a"):
        alone, same = _choice(comm_type, Axis())
        assert same is alone


def test_a_ring_refuses_flash_where_it_cannot_run():
    with pytest.raises(ConfigError, match="--use-flash-attn: no flash kernel on cpu"):
        _choice("p2p", precision=PrecisionConfig(bf16=True), use_flash_attn=True)
