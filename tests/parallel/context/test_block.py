"""Attention blocks: the plain form against autograd, merging rows, and the choice of block."""

import math

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.errors import ConfigError
from megatron.kernels.attention import choose_attention
from megatron.parallel.build import attention_over
from megatron.parallel.context.block import (
    BlockOptions,
    QueryRows,
    choose_block,
    flash_backward,
    flash_forward,
    merge,
    reference_backward,
    reference_forward,
)
from megatron.parallel.layout import Axis
from tests.models.small import config
from tests.models.small import config as model_config
from tests.parallel.context.inputs import by_head, heads, one_process, weights_of

CPU = torch.device("cpu")
TWO = Axis(size=2, ranks=(0, 1))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_form_equals_attention(groups, causal):
    inputs = heads(9, groups)
    out, *gradients = by_head(
        [x.unflatten(2, (4, 8)) if x.dim() == 3 else x for x in one_process(inputs, causal=causal)]
    )
    options = BlockOptions(causal, dropout=0.0)
    got, logsumexp, rng_state = reference_forward(*by_head(inputs), options)
    torch.testing.assert_close(got, out, rtol=1e-5, atol=1e-6)
    grad = weights_of(torch.empty(9, 2, 32)).unflatten(2, (4, 8)).permute(1, 2, 0, 3)
    query, key, value = by_head(inputs)
    rows = QueryRows(grad, query, got, logsumexp)
    back = reference_backward(rows, key, value, options, rng_state)
    for ours, theirs in zip(back, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def in_two_blocks(forward, backward, inputs, grad, dropout=0.0):
    """Return result, log-sum-exp and gradients of attention over an early and a late block of keys.

    Both backward passes see the merged result; the late block has only the late queries.
    """
    past, own = BlockOptions(False, dropout), BlockOptions(True, dropout)
    query, key, value = inputs
    half = key.shape[2] // 2
    halves = [(x[:, :, :half], x[:, :, half:]) for x in (key, value)]
    (early_key, late_key), (early_value, late_value) = halves
    part, logsumexp, of_early = forward(query, early_key, early_value, past)
    out = part.to(logsumexp.dtype)
    late = [x[:, :, half:] for x in (query, out, logsumexp, grad)]
    *added, of_late = forward(late[0], late_key, late_value, own)
    merge(late[1], late[2], *added)
    rounded = out.to(query.dtype)
    early = backward(
        QueryRows(grad, query, rounded, logsumexp),
        *(early_key, early_value, past, of_early),
    )
    other = backward(
        QueryRows(late[3], late[0], rounded[:, :, half:], late[2]),
        *(late_key, late_value, own, of_late),
    )
    grad_query = early[0].to(out.dtype).clone()
    grad_query[:, :, half:] += other[0]
    pairs = zip(early[1:], other[1:], strict=True)
    return out, logsumexp, grad_query, *(torch.cat(pair, 2) for pair in pairs)


def pairs_of_two_blocks(length):
    """Return which pairs the two blocks cover, bool [q, k]."""
    allowed = torch.ones(length, length, dtype=torch.bool)
    allowed[: length // 2, length // 2 :] = False
    allowed[length // 2 :, length // 2 :].tril_()
    return allowed


def formula_in_two_blocks(inputs, grad, factors=None):
    """Return the expected `in_two_blocks`, in float64; `factors` [b, n, q, k] multiply weights."""
    query, key, value = inputs = [x.detach().double().requires_grad_() for x in inputs]
    allowed = pairs_of_two_blocks(key.shape[2]).to(key.device)
    times = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(times, 1).mT / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~allowed, -math.inf)
    weights = scores.softmax(-1)
    if factors is not None:
        weights = weights * factors
    out = weights @ value.repeat_interleave(times, 1)
    out.backward(grad.double())
    return out.detach(), scores.logsumexp(-1).detach(), *(x.grad for x in inputs)


def dropped_factors(forward, inputs, dropout, rtol=1e-5):
    """Return the factors [b, n, q, k] by which two blocks' dropout multiplies weights, d = k.

    The values are unit vectors, so the results are the weights.
    """
    query, key, value = inputs
    units = torch.eye(key.shape[2]).to(value).expand_as(value)

    def nothing(rows, key, value, *_):
        return torch.zeros_like(rows.query), torch.zeros_like(key), torch.zeros_like(value)

    units = (query, key, units)
    weights = in_two_blocks(forward, nothing, units, query, dropout)[0]
    whole = formula_in_two_blocks(units, query)[0]
    factors = torch.where(weights > 0, 1 / (1 - dropout), 0.0)
    torch.testing.assert_close(weights.double(), whole * factors, rtol=rtol, atol=1e-6)
    return factors.double()


def test_blocks_merge():
    inputs = by_head(heads(16, 2))
    grad = weights_of(inputs[0])
    got = in_two_blocks(reference_forward, reference_backward, inputs, grad)
    for ours, theirs in zip(got, formula_in_two_blocks(inputs, grad), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 4])
def test_blocks_drop_the_same_weights_in_both_directions(groups):
    """Blocks also merge to the formula's result with the masks drawn in forward."""
    inputs = by_head(heads(32, groups, d=32))
    state = torch.random.get_rng_state()
    factors = dropped_factors(reference_forward, inputs, dropout=0.25)
    seen = factors[pairs_of_two_blocks(32).expand_as(factors)]
    assert (seen == 0).double().mean() == pytest.approx(0.25, abs=0.03)
    assert not torch.equal(factors[:, :, 16:, :16] > 0, factors[:, :, :16, :16] > 0)
    torch.random.set_rng_state(state)
    grad = weights_of(inputs[0])
    got = in_two_blocks(reference_forward, reference_backward, inputs, grad, dropout=0.25)
    wanted = formula_in_two_blocks(inputs, grad, factors)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_sums_are_in_fp32():
    query, key, value = (x.bfloat16() for x in by_head(heads(64, 2)))
    options = BlockOptions(causal=True, dropout=0.0)
    out, logsumexp, _ = reference_forward(query, key, value, options)
    wide, wide_sum, _ = reference_forward(query.float(), key.float(), value.float(), options)
    assert out.dtype == logsumexp.dtype == torch.float32
    assert torch.equal(out, wide)
    assert torch.equal(logsumexp, wide_sum)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_flash_form_calls_operations_that_torch_has(dropout):
    """Check types and shapes on the meta device; values are compared on a GPU."""
    query, key, value = (x.bfloat16().to("meta") for x in by_head(heads(16, 2)))
    out, logsumexp, rng_state = flash_forward(query, key, value, BlockOptions(True, dropout))
    assert len(rng_state) == (2 if dropout else 0)
    assert out.shape == query.shape
    assert (logsumexp.shape, logsumexp.dtype) == (query.shape[:3], torch.float32)
    half = logsumexp[:, :, 8:]
    late = [x[:, :, 8:] for x in (out, query)]
    options = BlockOptions(causal=False, dropout=dropout)
    rows = QueryRows(late[0], late[1], late[0], half)
    gradients = flash_backward(rows, key, value, options, rng_state)
    assert [g.shape for g in gradients] == [late[1].shape, key.shape, value.shape]


def test_choice_on_a_cpu():
    block = choose_block(64, torch.bfloat16, CPU)
    assert (block.name, block.reason) == ("plain", "no flash kernel on cpu")


def _choice(comm_type, axis=TWO, precision=None, **flags):
    model, precision = config(**flags), precision or PrecisionConfig()
    alone = choose_attention(model_config(), PrecisionConfig(), CPU)
    return alone, attention_over(axis, comm_type, model, precision, CPU)


def test_the_choice_says_why():
    _, ring = _choice("p2p")
    assert (ring.name, ring.reason) == ("plain", "no flash kernel on cpu; ring of 2 context ranks")
    _, plain = _choice("p2p", masked_softmax_fusion=False)
    assert plain.name == "plain"
    assert plain.reason == "--no-masked-softmax-fusion; ring of 2 context ranks"
    alone, ulysses = _choice("a2a")
    assert ulysses.name == "fused"
    assert ulysses.reason == f"{alone.reason}; all-to-all over 2 context ranks"
    for comm_type in ("p2p", "a2a"):
        alone, same = _choice(comm_type, Axis())
        assert same == alone


def test_a_ring_refuses_flash_where_it_cannot_run():
    with pytest.raises(ConfigError, match="--use-flash-attn: no flash kernel on cpu"):
        _choice("p2p", precision=PrecisionConfig(bf16=True), use_flash_attn=True)
