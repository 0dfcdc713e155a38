"""Cross entropy over a part of the vocabulary, against float64: plain form and kernel."""

import math

import pytest
import torch

from megatron.finetuning.rollouts import label_log_probs
from megatron.kernels.cross_entropy import REFERENCE, choose_cross_entropy
from megatron.parallel.distillation import VocabularyPart
from megatron.parallel.layout import Layout
from tests.kernels.compare import seed_afresh

N = 5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 7, 8, 1000, 17001]  # around what a block reads at once; unaligned row starts


def problem(size, dtype, device="cpu"):
    seed_afresh()
    logits = (4 * torch.randn(N, size)).to(dtype)
    labels = torch.randint(size, (N,))
    labels[0], labels[-1] = -3, size  # on other ranks
    upstream = torch.rand(N)
    upstream[1] = 0
    return [x.to(device) for x in (logits, labels, upstream)]


def exact(logits, labels, upstream):
    """Return maxima, sums, targets and gradient."""
    double = logits.double()
    maxima = double.amax(-1)
    powers = (double - maxima[:, None]).exp()
    mine = (labels >= 0) & (labels < logits.shape[1])
    targets = torch.zeros_like(maxima)
    one_hot = torch.zeros_like(double)
    for i in mine.nonzero()[:, 0].tolist():
        targets[i], one_hot[i, labels[i]] = double[i, labels[i]], 1
    gradient = upstream[:, None] * (powers / powers.sum(-1, keepdim=True) - one_hot)
    return maxima, powers.sum(-1), targets, gradient


def check(form, inputs, tolerance=1e-5):
    logits, labels, upstream = inputs
    maxima, sums, targets, gradient = exact(*inputs)
    found, repeated = (form.statistics(logits, labels) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(found, repeated, strict=True))
    assert torch.equal(found.maxima.double(), maxima)
    assert torch.equal(found.targets.double(), targets)
    torch.testing.assert_close(found.sums.double(), sums, rtol=tolerance, atol=0)
    out = torch.full_like(logits, math.nan)
    form.gradient(logits, labels, found.maxima, found.sums, upstream, out)
    rounding = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(out.double(), gradient, rtol=rounding + 1e-5, atol=1e-6)
    again = logits.clone()
    form.gradient(again, labels, found.maxima, found.sums, upstream, again)
    assert torch.equal(again, out)  # in place: the same bits


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_equals_float64(size, dtype):
    check(REFERENCE, problem(size, dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_equals_float64(kernels, size, dtype):
    library, device = kernels
    check(choose_cross_entropy(library, in_16_bits=False), problem(size, dtype, device))


@pytest.mark.gpu
def test_kernel_at_training_sizes(kernels):
    library, device = kernels
    if device.type == "cpu":
        pytest.skip("too large for the emulator")
    form = choose_cross_entropy(library, in_16_bits=False)
    for size in (131072, 128257):
        check(form, problem(size, torch.bfloat16, device))


def test_extreme_logits(kernels):
    library, device = kernels
    logits = torch.zeros(4, 2000, device=device)
    logits[0, 3], logits[1], logits[2, 1999], logits[3, 5] = 1e4, -1e4, math.nan, -math.inf
    labels = torch.zeros(4, dtype=torch.int64, device=device)
    for form in (REFERENCE, choose_cross_entropy(library, in_16_bits=False)):
        found = form.statistics(logits, labels)
        assert found.maxima[:2].tolist() == [1e4, -1e4]
        assert found.sums[:2].tolist() == [1, 2000]
        assert found.sums[2].isnan()  # no form overlooks it
        assert found.sums[3].item() == pytest.approx(1999)


@pytest.mark.parametrize("shape", [(1, 6), (3, 4)])
def test_log_probabilities_without_the_padding_of_the_vocabulary(kernels, shape):
    """Without its padding, a row of logits ends before the next one begins."""
    library, device = kernels
    seed_afresh()
    made = torch.randn(*shape, 16, device=device, requires_grad=True)
    labels = torch.randint(11, shape, device=device)
    vocabulary = VocabularyPart(Layout.single().tensor, 11)
    form = choose_cross_entropy(library, in_16_bits=False)
    found = label_log_probs(1.0 * made, labels, vocabulary, form)
    exact = made[..., :11].double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    upstream = torch.rand(shape, device=device)
    want, got = (torch.autograd.grad((x * upstream).sum(), made)[0] for x in (exact, found))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not got[..., 11:].any()


def test_choice():
    assert choose_cross_entropy(None, in_16_bits=False) is REFERENCE
    assert "16 bits" in str(choose_cross_entropy(None, in_16_bits=True))
