"""Blocks of context parallelism: the flash kernel gives the same results as the plain form."""

import re
from dataclasses import replace

import pytest
import torch

from megatron.device import Device, gpu_count
from megatron.parallel.context.block import (
    BlockDocuments,
    BlockOptions,
    QueryRows,
    choose_block,
    flash_backward,
    flash_forward,
    plain_block,
    reference_backward,
    reference_forward,
)
from tests.gpu.processes import run_processes
from tests.parallel.context.inputs import by_head, heads, one_process, ring_in_one, weights_of
from tests.parallel.context.test_block import (
    dropped_factors,
    formula_in_two_blocks,
    in_two_blocks,
    pairs_of_two_blocks,
)
from tests.parallel.context.test_documents import ENDS, segments_of

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.has_flash, reason="needs a GPU with flash attention"),
]


def close(ours, theirs):
    bound = 2e-2 * max(1, theirs.abs().max().item())
    return (ours.float() - theirs).abs().max().item() < bound


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_blocks_equal_plain_blocks(groups, size, dtype):
    block = choose_block(size, dtype, DEVICE.torch_device)
    assert block.forward is flash_forward
    inputs = [x.to(DEVICE.torch_device, dtype) for x in by_head(heads(256, groups, d=size))]
    grad = weights_of(inputs[0].cpu()).to(DEVICE.torch_device, dtype)
    for causal in (True, False):
        options = BlockOptions(causal, dropout=0.0)
        out, logsumexp, rng_state = block.forward(*inputs, options)
        expected, expected_sum, nothing = reference_forward(*inputs, options)
        assert close(out, expected)
        assert (logsumexp - expected_sum).abs().max() < 1e-3
        query, key, value = inputs
        rows = QueryRows(grad, query, out, logsumexp)
        got = block.backward(rows, key, value, options, rng_state)
        rows = QueryRows(grad, query, expected, expected_sum)
        wanted = reference_backward(rows, key, value, options, nothing)
        assert all(map(close, got, wanted))
    got = in_two_blocks(flash_forward, flash_backward, inputs, grad)
    wanted = in_two_blocks(reference_forward, reference_backward, inputs, grad)
    assert all(map(close, got, (x.float() for x in wanted)))


@pytest.mark.parametrize("form", ["flash", "plain"])
@pytest.mark.parametrize("groups", [1, 4])
def test_blocks_drop_the_same_weights_in_both_directions(form, groups):
    """Repeat the CPU test of this name; the flash kernel's masks come from its counter."""
    forward, backward = {
        "flash": (flash_forward, flash_backward),
        "plain": (reference_forward, reference_backward),
    }[form]
    inputs = [x.to(DEVICE.torch_device, torch.bfloat16) for x in by_head(heads(256, groups, d=256))]
    generator = DEVICE.default_generator
    state = generator.get_state()
    factors = dropped_factors(forward, inputs, dropout=0.25, rtol=2e-2)
    exist = pairs_of_two_blocks(256).to(factors.device)
    dropped = (factors[exist.expand_as(factors)] == 0).double().mean().item()
    assert dropped == pytest.approx(0.25, abs=0.01)
    assert not torch.equal(factors[:, :, 128:, :128], factors[:, :, :128, :128])
    generator.set_state(state)
    grad = weights_of(inputs[0].cpu()).to(DEVICE.torch_device, torch.bfloat16)
    got = in_two_blocks(forward, backward, inputs, grad, dropout=0.25)
    wanted = formula_in_two_blocks(inputs, grad, factors)
    assert all(map(close, got, wanted))


def test_fp32_and_odd_heads_take_the_plain_form():
    device = DEVICE.torch_device
    assert choose_block(64, torch.float32, device).name == "plain"
    assert choose_block(12, torch.bfloat16, device).name == "plain"
    assert choose_block(512, torch.bfloat16, device).name == "plain"


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ENDS)
def test_a_ring_with_documents_equals_one_process(name, size, groups):
    """Check the variable-length kernel in 16 bits and the plain form, which computes in fp32.

    Some documents have no keys or no queries in a block.
    """
    length = 512
    segments = segments_of(name, length=length)
    segments = replace(segments, ends=segments.ends.to(DEVICE.torch_device))
    inputs = [x.to(DEVICE.torch_device, torch.bfloat16) for x in heads(length, groups, d=64)]
    block = choose_block(64, torch.bfloat16, DEVICE.torch_device)
    assert block.forward is flash_forward
    got = ring_in_one(inputs, segments, size=size, block=block)
    plain = ring_in_one(inputs, segments, size=size, block=plain_block("for comparison"))
    exact = one_process([x.cpu() for x in inputs], causal=True, mask=segments.mask.cpu())
    for ours, others, theirs in zip(got, plain, exact, strict=True):
        assert ours.isfinite().all()
        assert close(ours.cpu(), theirs)
        assert close(others.cpu(), theirs)


def test_a_query_without_keys_changes_nothing_on_a_gpu():
    inputs = by_head(heads(256, 2, d=64))
    query, key, value = (x.to(DEVICE.torch_device, torch.bfloat16) for x in inputs)
    ends = torch.tensor([[0, 100, 256, 512], [0, 0, 256, 512]], dtype=torch.int32)
    has_keys = torch.ones(2, 256, dtype=torch.bool, device=DEVICE.torch_device)
    has_keys[0, :100] = False
    documents = BlockDocuments(*ends.to(DEVICE.torch_device), longest=256, has_keys=has_keys)
    options = BlockOptions(False, 0.0, documents)
    out, logsumexp, rng_state = flash_forward(query, key, value, options)
    expected, expected_sum, _ = reference_forward(query, key, value, options)
    assert (logsumexp[0, :, :100] == -torch.inf).all()
    assert (out[0, :, :100] == 0).all()
    assert close(out, expected)
    rows = QueryRows(out, query, out, expected_sum.clamp(min=-10))
    for ours, theirs in zip(
        flash_backward(rows, key, value, options, rng_state),
        reference_backward(rows, key, value, options, ()),
        strict=True,
    ):
        assert close(ours, theirs)


@pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
def test_two_processes_train_on_documents_as_one_does(comm_type):
    """Train in bf16 and communicate over NCCL; each document has 31 of the 128 tokens."""
    words = "pretrain_gpt.py --config examples/gpt_tiny.yaml --bf16 --attention-dropout 0 "
    words += "--hidden-dropout 0 --vocab-size 30 --seq-length 128 --max-position-embeddings 128 "
    words += "--reset-attention-mask --reset-position-ids --global-batch-size 8"
    context = f"--context-parallel-size 2 --cp-comm-type {comm_type}"
    one, two = (
        [float(loss) for loss in re.findall(r" lm loss: (\S+)", run_processes(count, flags))]
        for count, flags in ((1, words.split()), (2, [*words.split(), *context.split()]))
    )
    assert len(one) == len(two) >= 20
    assert two == pytest.approx(one, rel=5e-3)
