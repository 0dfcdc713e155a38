"""GPU implementations give the same results as the plain forms on a CPU."""

from functools import partial

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.device import Device
from megatron.kernels.attention import (
    AttentionOptions,
    attention_reference,
    choose_attention,
    find_flash_package,
    flash_attention,
)
from megatron.models.gpt import GPTModel
from megatron.models.recompute import RecomputePlan
from megatron.parallel.collectives import Communication
from megatron.parallel.cross_entropy import linear_cross_entropy, vocabulary_cross_entropy
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import Init, initialize
from megatron.parallel.products import LinearCall
from tests.models.small import LLAMA, batch, config, new_context, plan
from tests.models.small import config as model_config
from tests.parallel.buffers import new_parameter

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
S, B, N = 128, 2, 4


def heads(groups, size, dtype):
    generator = torch.Generator().manual_seed(groups)
    query = torch.randn(S, B, N, size, generator=generator)
    key, value = torch.randn(2, S, B, groups, size, generator=generator)
    return [x.to(DEVICE.torch_device, dtype).requires_grad_() for x in (query, key, value)]


def with_gradients(function, inputs, options, **others):
    return gradients_of(partial(function, options=options, **others), inputs)


def gradients_of(function, inputs):
    for x in inputs:
        x.grad = None
    out = function(*inputs)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype))
    return [out.detach().float(), *(x.grad.float() for x in inputs)]


@pytest.mark.parametrize("groups", [1, 2, N])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("which", ["causal", "all", "mask", "padding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_attention_equals_plain(groups, size, which, dtype):
    mask = None
    if which == "mask":
        mask = torch.ones(S, S, dtype=torch.bool).tril()
        mask[60:, :60] = False
        mask = mask.expand(B, 1, S, S).to(DEVICE.torch_device)
    if which == "padding":  # for BERT and T5: one row for all queries of a sample
        lengths = torch.tensor([S, S - 50], device=DEVICE.torch_device)
        mask = (torch.arange(S, device=DEVICE.torch_device) < lengths[:, None])[:, None, None, :]
    options = AttentionOptions(mask, which == "causal", layer_number=2)
    choice = choose_attention(model_config(), PrecisionConfig(), DEVICE.torch_device)
    inputs = heads(groups, size, dtype)
    ours = with_gradients(choice.function, inputs, options)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    plain = with_gradients(attention_reference, doubles, options, softmax_in_fp32=False)
    tolerance = 2e-3 if dtype == torch.float32 else 3e-2
    for got, expected in zip(ours, plain, strict=True):
        assert (got - expected).abs().max() < tolerance * max(1, expected.abs().max().item())
    if which in ("causal", "padding") and dtype != torch.float32:
        flash = with_gradients(flash_attention, inputs, options)
        for got, expected in zip(flash, plain, strict=True):
            assert (got - expected).abs().max() < tolerance * max(1, expected.abs().max().item())


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_the_flash_package_equals_the_formula(size, causal):
    package = find_flash_package(DEVICE.torch_device)
    if package is None:
        pytest.skip("needs flash-attn-4 and a Hopper GPU or newer")
    inputs = heads(2, size, torch.bfloat16)
    ours = gradients_of(partial(package, causal=causal, scale=None), inputs)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    reference = partial(
        attention_reference, options=AttentionOptions(causal=causal), softmax_in_fp32=False
    )
    plain = gradients_of(reference, doubles)
    for got, expected in zip(ours, plain, strict=True):
        assert (got - expected).abs().max() < 3e-2 * max(1, expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initialization_equals_that_of_a_cpu(dtype):
    def values(device):
        parameter = new_parameter((999, 1001), init=Init("normal", 0.02), device=device)
        initialize([("a", parameter)], seed=1)
        return parameter.detach().to(dtype).cpu()

    here, there = values(DEVICE.torch_device), values("cpu")
    torch.testing.assert_close(here, there, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_equals_that_of_a_cpu(dtype):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(64, 2, 50304, generator=generator).to(dtype)
    labels = torch.randint(50304, (64, 2), generator=generator)

    def run(device):
        part = logits.to(device).requires_grad_()
        loss = vocabulary_cross_entropy(part, labels.to(device), Layout.single().tensor)
        loss.mean().backward()
        return loss.detach().cpu(), part.grad.cpu()

    for ours, expected in zip(run(DEVICE.torch_device), run("cpu"), strict=True):
        torch.testing.assert_close(
            ours, expected, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-7
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_chunked_cross_entropy_keeps_the_factor_of_its_gradients(dtype):
    """16 bits would round one token's share of so many: by 0.2% in bf16, by half in fp16."""
    count = 3 * 2**19
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 2, 32, generator=generator).to(DEVICE.torch_device, dtype)
    weight = torch.randn(1024, 32, generator=generator).to(DEVICE.torch_device, dtype)
    labels = torch.randint(1024, (64, 2), generator=generator).to(DEVICE.torch_device)

    def input_gradient(count):
        read = x.detach().requires_grad_()
        loss = linear_cross_entropy(LinearCall(read, weight), labels, Communication())
        (64 * loss.total / count).backward()
        return read.grad.float()

    # Rounding errors of single values average out in the sum; an error of the factor would not.
    one = input_gradient(1.0)
    ratio = (input_gradient(count) * count * one).sum() / one.square().sum()
    assert ratio.item() == pytest.approx(1, rel=5e-4)


@pytest.mark.parametrize("flags", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_equals_that_of_a_cpu(flags, dtype):
    """Compare without dropout; with it, recomputation gives the same bits as the plain run."""
    still = {**flags, "attention_dropout": 0.0, "hidden_dropout": 0.0, "kv_channels": 8}

    def run(flags, device, dtype, recompute=None):
        network, numbers = config(**flags), PrecisionConfig(bf16=dtype == torch.bfloat16)
        context = new_context(network, numbers, device=device, dtype=dtype)
        model = GPTModel(plan(network), context, recompute=recompute)
        initialize(model.named_parameters(), seed=1)
        DEVICE.seed(1)
        tokens, labels = (x.to(device) for x in batch())
        loss = model(tokens, labels=labels)
        loss.mean().backward()
        return loss.detach().cpu(), [p.grad.float().cpu() for p in model.parameters()]

    loss, grads = run(still, DEVICE.torch_device, dtype)
    expected_loss, expected = run(still, "cpu", torch.float32)
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(grads, expected, strict=True):
        assert (ours - theirs).norm() < 3 * tolerance * theirs.norm().clamp(min=1e-3)
    noisy = {**still, "attention_dropout": 0.2, "hidden_dropout": 0.2}
    plain, _ = run(noisy, DEVICE.torch_device, dtype)
    for kept in (RecomputePlan("selective"), RecomputePlan("full", "uniform", 2)):
        again, _ = run(noisy, DEVICE.torch_device, dtype, kept)
        assert torch.equal(plain, again)
