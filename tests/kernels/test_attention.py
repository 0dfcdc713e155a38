"""Attention: plain and fused forms against float64, groups, masks, dropout, the choice of
kernel."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.kernels import attention
from megatron.kernels.attention import (
    AttentionOptions,
    FlashPackage,
    attention_reference,
    choose_attention,
    find_flash_package,
    fused_attention,
)
from megatron.models.attention import alibi_slopes
from tests.config.command import parse, problems
from tests.models.small import config as model_config

S, B, N, D = 9, 2, 4, 8
CPU = torch.device("cpu")
FORMS = {"plain": attention_reference, "fused": fused_attention}


def heads(groups, dtype=torch.float32):
    generator = torch.Generator().manual_seed(groups)
    query = torch.randn(S, B, N, D, generator=generator)
    key, value = torch.randn(2, S, B, groups, D, generator=generator)
    return [x.to(dtype).requires_grad_() for x in (query, key, value)]


def documents():
    """Return a causal mask within documents; the samples are cut at different places."""
    past = torch.ones(S, S, dtype=torch.bool).tril()
    pieces = torch.tensor([[0] * 3 + [1] * (S - 3), [0] * 6 + [1] * (S - 6)])
    return (past & (pieces[:, :, None] == pieces[:, None, :])).unsqueeze(1)


def exact(query, key, value, allowed):
    """Compute one head at a time, in float64."""
    query, key, value = (x.detach().double().requires_grad_() for x in (query, key, value))
    out = []
    for b in range(B):
        for head in range(N):
            group = head // (N // key.shape[2])
            scores = query[:, b, head] @ key[:, b, group].t() / math.sqrt(D)
            scores = scores.masked_fill(~allowed[b % len(allowed), 0], -math.inf)
            out.append(scores.softmax(-1) @ value[:, b, group])
    joined = torch.stack(out).view(B, N, S, D).permute(2, 0, 1, 3).flatten(2)
    return joined, (query, key, value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [1, 2, N])
@pytest.mark.parametrize("which", ["causal", "all", "documents", "window", "window in documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_float64(form, groups, which, dtype):
    inputs = heads(groups, dtype)
    mask = documents() if "documents" in which else None
    allowed = torch.ones(1, 1, S, S, dtype=torch.bool) if mask is None else mask
    if which in ("causal", "window"):
        allowed = allowed.tril()
    window = 2 if "window" in which else None
    if window is not None:
        allowed = allowed & torch.ones(S, S, dtype=torch.bool).triu(-window)
    options = AttentionOptions(mask, which != "all", layer_number=3, window=window)
    out = FORMS[form](*inputs, options)
    expected, doubles = exact(*inputs, allowed)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    grad = torch.linspace(-1, 1, out.numel()).view_as(out)
    out.backward(grad.to(dtype))
    expected.backward(grad.double())
    for ours, theirs in zip(inputs, doubles, strict=True):
        torch.testing.assert_close(
            ours.grad.double(), theirs.grad, rtol=tolerance, atol=2 * tolerance
        )


@pytest.mark.parametrize("form", FORMS)
def test_no_look_ahead(form):
    query, key, value = (x.detach() for x in heads(2))
    before = FORMS[form](query, key, value, AttentionOptions())
    key[5:] += 1
    value[5:] -= 1
    after = FORMS[form](query, key, value, AttentionOptions())
    assert torch.equal(before[:5], after[:5])
    assert not torch.allclose(before[5:], after[5:])


@pytest.mark.parametrize("form", FORMS)
def test_dropout_zeroes_and_rescales_the_weights(form):
    """With values of one, an output is the sum of its weights: 1 on average, never exactly 1."""
    query, key, _ = (x.detach() for x in heads(N))
    torch.manual_seed(1)
    sums = torch.stack(
        [
            FORMS[form](query, key, torch.ones_like(key), AttentionOptions(dropout=0.25))
            for _ in range(200)
        ]
    )[..., ::D]
    assert sums.mean().item() == pytest.approx(1, abs=0.01)
    first = sums[:, 0]  # one weight: 0 or 1 / (1 - 0.25)
    assert torch.allclose(first.unique(), torch.tensor([0, 4 / 3]))
    assert (first == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("form", FORMS)
def test_scores_may_have_another_factor(form):
    query, key, value = heads(2)
    turned = FORMS[form](query * 3 / math.sqrt(D), key, value, AttentionOptions(scale=1 / 3))
    torch.testing.assert_close(turned, FORMS[form](query, key, value, AttentionOptions()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("which", ["causal", "window in documents"])
def test_sinks_and_bounds_equal_their_formulas(form, softcap, which):
    """A sink is a key with its own score, and a value of zero."""
    query, key, value = heads(2)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 7.0]).requires_grad_()
    mask, window = (None, None) if which == "causal" else (documents(), 2)
    options = AttentionOptions(mask, window=window, scale=0.7, softcap=softcap, sinks=sinks)
    found = FORMS[form](query, key, value, options)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    gradients = torch.autograd.grad((found * weights).sum(), (query, key, value, sinks))
    wide = [x.detach().double().requires_grad_() for x in (query, key, value, sinks)]
    scores = 0.7 * torch.einsum("qbnd,kbnd->bnqk", wide[0], wide[1].repeat_interleave(2, dim=2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    allowed = options.visible_keys(S, S, CPU) if mask is None else options.allowed(S, S, CPU)
    powers = torch.where(allowed, scores.exp(), 0.0)
    shares = powers / (powers.sum(-1, keepdim=True) + wide[3].exp()[:, None, None])
    exact = torch.einsum("bnqk,kbnd->qbnd", shares, wide[2].repeat_interleave(2, dim=2)).flatten(2)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad((exact * weights).sum(), wide)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("special", [False, True], ids=["plain", "bounded, with sinks"])
@pytest.mark.parametrize("which", ["causal", "window in documents"])
def test_biases_fall_with_the_distance(form, special, which):
    """A query that is last among fewer queries than keys has the same biases."""
    query, key, value = heads(2)
    slopes = torch.tensor(alibi_slopes(6))[:N]
    mask, window = (None, None) if which == "causal" else (documents(), 2)
    options = AttentionOptions(mask, window=window, scale=0.7, slopes=slopes)
    if special:
        options = options._replace(softcap=1.5, sinks=torch.tensor([-1.0, 0.0, 2.0, 7.0]))
    found = FORMS[form](query, key, value, options)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    gradients = torch.autograd.grad((found * weights).sum(), (query, key, value))
    wide = [x.detach().double().requires_grad_() for x in (query, key, value)]
    scores = 0.7 * torch.einsum("qbnd,kbnd->bnqk", wide[0], wide[1].repeat_interleave(2, dim=2))
    scores = 1.5 * torch.tanh(scores / 1.5) if special else scores
    for head, slope in enumerate((2**-2, 2**-4, 2**-6, 2**-8)):
        for i in range(S):
            scores[:, head, i] -= slope * (i - torch.arange(S))
    allowed = options.visible_keys(S, S, CPU) if mask is None else options.allowed(S, S, CPU)
    powers = torch.where(allowed, scores.exp(), 0.0)
    total = powers.sum(-1, keepdim=True)
    if special:
        total = total + options.sinks.double().exp()[:, None, None]
    exact = torch.einsum(
        "bnqk,kbnd->qbnd", powers / total, wide[2].repeat_interleave(2, dim=2)
    ).flatten(2)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad((exact * weights).sum(), wide)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    if mask is None:
        last = FORMS[form](query[-2:], key, value, options)
        torch.testing.assert_close(last, found[-2:], rtol=1e-5, atol=1e-6)


def test_slopes_of_a_number_of_heads_that_is_no_power_of_two():
    assert alibi_slopes(8) == [2**-i for i in range(1, 9)]
    assert alibi_slopes(3) == [2**-4, 2**-8, 2**-2]
    assert alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert alibi_slopes(1) == [2**-8]


def test_no_flash_kernel_is_asked_for_biases(monkeypatch):
    allowed = []

    @contextmanager
    def noted(kernels, **_):
        allowed.append([kernel.name for kernel in kernels])
        yield

    monkeypatch.setattr(attention, "sdpa_kernel", noted)
    monkeypatch.setattr(attention, "flash_problem", lambda *_: "")
    options = AttentionOptions(slopes=torch.tensor(alibi_slopes(N)), window=3)
    out = attention.gpu_attention(*heads(N), options)
    torch.testing.assert_close(out, attention_reference(*heads(N), options))
    assert allowed == [["EFFICIENT_ATTENTION", "MATH"]]
    package = FlashPackage(lambda *_: None, "4.0")
    query = torch.empty(4, 1, 2, 64, dtype=torch.bfloat16)
    assert package.supports(query, AttentionOptions())
    assert not package.supports(query, options)


def test_layer_scaling_keeps_fp16_scores_finite():
    query, key, value = heads(N, torch.float16)
    query = query * 150
    key = key * 150
    options = AttentionOptions(layer_number=24)
    assert not attention_reference(query, key, value, options).isfinite().all()
    scaled = attention_reference(query, key, value, options, scale_by_layer=True)
    expected = attention_reference(query.float(), key.float(), value.float(), options)
    torch.testing.assert_close(scaled.float(), expected, rtol=2e-2, atol=2e-2)


def test_softmax_in_16_bits_keeps_rounded_weights_for_backward():
    def run(softmax_in_fp32):
        inputs = heads(N, torch.bfloat16)
        out = attention_reference(*inputs, AttentionOptions(), softmax_in_fp32=softmax_in_fp32)
        out.float().square().sum().backward()
        return out, inputs[0].grad

    (fine, fine_grad), (rough, rough_grad) = run(True), run(False)
    torch.testing.assert_close(rough, fine, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(rough_grad, fine_grad, rtol=5e-2, atol=5e-2)
    assert not torch.equal(rough_grad, fine_grad)


def test_choice_on_cpu():
    fused = choose_attention(model_config(), PrecisionConfig(), CPU)
    assert fused.function is fused_attention
    assert "CPU" in str(fused)
    plain = choose_attention(model_config(masked_softmax_fusion=False), PrecisionConfig(), CPU)
    assert plain.function.func is attention_reference
    assert plain.function.keywords == {"scale_by_layer": True, "softmax_in_fp32": True}
    assert "--no-masked-softmax-fusion" in str(plain)


def test_the_choice_tells_which_kernels_may_run(monkeypatch):
    device = SimpleNamespace(is_gpu=True, capability=(9, 0))
    monkeypatch.setattr(attention, "Device", lambda _: device)
    for flash, deterministic, expected in (
        (False, False, "fused (first of cuDNN, flash, efficient that fits)"),
        (False, True, "fused (first of flash, efficient that fits)"),
        (True, False, "flash (--use-flash-attn: first of cuDNN, flash, efficient that fits)"),
        (True, True, "flash (--use-flash-attn: first of flash, efficient that fits)"),
    ):
        monkeypatch.setattr(
            torch, "are_deterministic_algorithms_enabled", lambda d=deterministic: d
        )
        model = model_config(use_flash_attn=flash)
        choice = choose_attention(model, PrecisionConfig(bf16=True), CPU)
        assert f"{choice.name} ({choice.reason})" == expected


def test_one_list_of_the_heads_that_flash_kernels_take(monkeypatch):
    """PyTorch's kernel, the package (which supports fewer sizes) and the flag's rule agree."""
    monkeypatch.setattr(attention, "Device", lambda _: SimpleNamespace(has_flash=True))
    package = FlashPackage(lambda *_: None, "4.0")
    for size, fits, fits_package in (
        (8, True, True),
        (12, False, False),
        (128, True, True),
        (136, True, False),
        (256, True, False),
        (264, False, False),
    ):
        misfit = attention.flash_problem(size, torch.bfloat16, CPU)
        assert (not misfit) == fits, size
        query = torch.empty(4, 1, 2, size, dtype=torch.bfloat16)
        assert package.supports(query, AttentionOptions()) == fits_package, size
        words = f"--use-flash-attn --bf16 --kv-channels {size}"
        if fits:
            parse(words)
        else:
            assert problems(words) == [
                f"--use-flash-attn: {misfit}: choose another --num-attention-heads or "
                "--kv-channels, or drop the flag"
            ]


def test_flash_means_kernels_that_hold_no_scores(monkeypatch):
    """This checks which kernels are allowed; that they run is tested on a GPU."""
    allowed = []

    @contextmanager
    def noted(kernels, **_):
        allowed.append([kernel.name for kernel in kernels])
        yield

    monkeypatch.setattr(attention, "sdpa_kernel", noted)
    for mask in (None, documents()):
        options = AttentionOptions(mask)
        out = attention.flash_attention(*heads(N), options)
        assert torch.equal(out, fused_attention(*heads(N), options))
    assert allowed == [["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"]] * 2


def test_the_flash_package_is_called_where_it_fits_and_nowhere_else():
    calls = []

    def flash_attn_func(query, key, value, *, causal, softmax_scale, deterministic):
        calls.append((causal, softmax_scale, deterministic))
        turned = [x.transpose(0, 1) for x in (query, key, value)]
        out = fused_attention(*turned, AttentionOptions(causal=causal, scale=softmax_scale))
        return out.unflatten(2, query.shape[2:]).transpose(0, 1), None

    package = FlashPackage(flash_attn_func, "4.0")
    both = [x.detach().bfloat16() for x in heads(2)]
    one = [x[:, :1] for x in both]
    padding = torch.ones(1, 1, 1, S, dtype=torch.bool)
    for inputs, mask, causal, scale in (
        (one, None, True, None),
        (one, None, False, 0.3),
        (both, None, True, None),
        (one, padding, False, None),
    ):
        options = AttentionOptions(mask, causal, scale=scale)
        out = attention.flash_attention(*inputs, options, package=package)
        expected = fused_attention(*inputs, options)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)
    assert calls == [(True, None, False), (False, 0.3, False)]
    assert not package.supports(one[0], AttentionOptions(dropout=0.1))
    assert not package.supports(one[0].float(), AttentionOptions())


def test_without_the_package_or_a_new_gpu_there_is_none():
    assert find_flash_package(CPU) is None


@pytest.mark.parametrize(
    ("capability", "deterministic", "found"),
    [((9, 0), True, True), ((12, 0), False, True), ((12, 0), True, False), ((8, 9), False, False)],
)
def test_the_package_is_not_taken_where_it_cannot_repeat_itself(
    capability, deterministic, found, monkeypatch
):
    device = SimpleNamespace(capability=capability)
    monkeypatch.setattr(attention, "Device", lambda _: device)
    monkeypatch.setattr(attention, "version", lambda _: "4.0")
    package = SimpleNamespace(flash_attn_func=None)
    monkeypatch.setattr(attention, "import_module", lambda _: package)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    assert (find_flash_package(CPU) is not None) == found
