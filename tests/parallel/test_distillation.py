"""KL divergence from a teacher, with whole and split vocabularies, against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from megatron.parallel import distillation
from megatron.parallel.distillation import (
    TopLogProbs,
    VocabularyPart,
    distillation_losses,
    top_log_probs,
)
from megatron.parallel.layout import Layout
from tests.distributed import run_distributed

S, B, V, REAL = 5, 3, 16, 13  # the last three entries are padding


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    student, teacher = (3 * torch.randn(2, S, B, V, generator=generator)).to(dtype)
    labels = torch.randint(REAL, (S, B), generator=generator)
    weights = torch.rand(2, S, B, generator=generator)  # gradients of each token's losses
    return student, teacher, labels, weights


def reference(temperature, k=None, dtype=torch.float32):
    """Return PyTorch's losses and gradient, from whole logits in fp64."""
    student, teacher, labels, weights = problem(dtype)
    student, teacher = student.double().requires_grad_(), teacher.double()
    ours = F.log_softmax(student[..., :REAL] / temperature, -1)
    theirs = F.log_softmax(teacher[..., :REAL] / temperature, -1)
    if k is not None:
        order = theirs.argsort(-1, descending=True)
        ours, theirs = (_as_outcomes(x.gather(-1, order), k) for x in (ours, theirs))
    kl = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1) * temperature**2
    ce = F.cross_entropy(student.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    (ce * weights[0] + kl * weights[1]).sum().backward()
    return ce.detach(), kl.detach(), student.grad


def _as_outcomes(log_probs, k):
    return torch.cat((log_probs[..., :k], log_probs[..., k:].logsumexp(-1, keepdim=True)), -1)


def run(layout, temperature=1.0, k=None, dtype=torch.float32, reuse=False):
    student, teacher, labels, weights = problem(dtype)
    axis = layout.tensor
    mine, theirs = (x.chunk(axis.size, -1)[axis.rank].clone() for x in (student, teacher))
    before = mine.clone()
    mine.requires_grad_()
    vocabulary = VocabularyPart(axis, REAL)
    if k is not None:
        rows = theirs.reshape(-1, theirs.shape[-1])
        top = top_log_probs(rows, vocabulary, k=k, temperature=temperature)
        theirs = TopLogProbs(*(x.view(S, B, *x.shape[1:]) for x in top))
    result = distillation_losses(
        mine * 1, labels, theirs, vocabulary, temperature=temperature, reuse_logits=reuse
    )
    (result.cross_entropy * weights[0] + result.divergence * weights[1]).sum().backward()
    assert torch.equal(mine, before)
    return result.cross_entropy.detach(), result.divergence.detach(), mine.grad


def check(result, wanted, **bounds):
    for ours, theirs in zip(result, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **bounds)


@pytest.mark.parametrize("chunk", [1, 2 * V, 2**24])
@pytest.mark.parametrize("k", [None, 1, 4])
def test_equals_pytorch(k, chunk, monkeypatch):
    monkeypatch.setattr(distillation, "CHUNK", chunk)
    for temperature in (1.0, 2.5):
        result = run(Layout.single(), temperature, k, reuse=chunk == 1)
        check(result, reference(temperature, k), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [REAL, 1000])
def test_top_of_the_whole_vocabulary_is_the_whole_distribution(k):
    check(run(Layout.single(), 2.0, k), reference(2.0), rtol=1e-6, atol=1e-6)


def _split(layout):
    return [run(layout, 2.0, k) for k in (None, 4, REAL)]


@pytest.mark.parametrize("size", [2, 8])  # the last of 8 ranks holds only padding
def test_split_vocabulary_equals_pytorch(size):
    results = run_distributed(size, _split, tensor=size)
    for of_rank, k in zip(zip(*results, strict=True), (None, 4, None), strict=True):
        wanted = reference(2.0, k)
        for ce, kl, _ in of_rank:
            check((ce, kl), wanted[:2], rtol=1e-6, atol=1e-6)
        grad = torch.cat([grad for *_, grad in of_rank], -1)
        torch.testing.assert_close(grad.double(), wanted[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [None, 4])
def test_16_bit_logits_lose_nothing_in_the_losses(k):
    ce, kl, grad = run(Layout.single(), 2.0, k, torch.bfloat16)
    wanted = reference(2.0, k, torch.bfloat16)
    check((ce, kl), wanted[:2], rtol=1e-6, atol=1e-5)
    assert grad.dtype == torch.bfloat16
    # Two rounded numbers are added and may nearly cancel.
    torch.testing.assert_close(grad.double(), wanted[2], rtol=2**-7, atol=2**-8)


def test_padding_has_no_share_in_the_divergence():
    student, teacher, labels, _ = problem()
    logits = student.clone().requires_grad_()
    vocabulary = VocabularyPart(Layout.single().tensor, REAL)
    distillation_losses(logits, labels, teacher, vocabulary).divergence.sum().backward()
    assert (logits.grad[..., REAL:] == 0).all()
    assert (logits.grad[..., :REAL] != 0).all()


def test_top_p_keeps_what_reaches_it_and_the_rest_is_all_others():
    chances = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01]])
    vocabulary = VocabularyPart(Layout.single().tensor, 4)
    top = top_log_probs(chances.log(), vocabulary, k=4, p=0.7)
    assert top.ids.tolist() == [[0, 1, -1, -1], [0, -1, -1, -1]]
    torch.testing.assert_close(top.rest.exp(), torch.tensor([0.2, 0.03]))
    top = top_log_probs(chances.log(), vocabulary, k=3, p=0.7, min_k=2)
    assert (top.ids >= 0).sum(1).tolist() == [2, 2]


def test_rounded_log_probabilities_are_normalized():
    """A student equal to its teacher has no gradient, however the stored values are rounded."""
    _, teacher, labels, _ = problem()
    vocabulary = VocabularyPart(Layout.single().tensor, REAL)
    top = top_log_probs(teacher.reshape(-1, V), vocabulary, k=5)
    rough = TopLogProbs(top.ids, top.values.half(), top.rest)
    rough = TopLogProbs(*(x.view(S, B, *x.shape[1:]) for x in rough))
    logits = teacher.clone().requires_grad_()
    kl = distillation_losses(logits, labels, rough, vocabulary).divergence
    assert (kl.abs() < 1e-5).all()
    kl.sum().backward()
    torch.testing.assert_close(logits.grad.sum(-1), torch.zeros(S, B), rtol=0, atol=1e-6)
