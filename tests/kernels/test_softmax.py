"""Masked and causal softmax, by their definitions."""

import pytest
import torch

from megatron.kernels.attention import masked_softmax
from tests.kernels.compare import BF16, FP32, fresh

B, N = 2, 3


@pytest.fixture
def scores():
    return 4 * torch.randn(B, N, 4, 6, generator=fresh())


def test_mask(scores):
    mask = torch.rand(B, 1, 4, 6, generator=fresh()) > 0.4
    mask[..., 2] = True
    mask[0, 0, 1] = False  # a query that may not attend to anything
    out = masked_softmax(scores, mask, causal=True, factor=0.5, dtype=FP32)
    for b, n, i in [(0, 0, 0), (1, 2, 3), (0, 1, 2)]:
        terms = torch.where(mask[b, 0, i], (0.5 * scores[b, n, i].double()).exp(), 0)
        torch.testing.assert_close(out[b, n, i].double(), terms / terms.sum())
    assert torch.equal(out[0, :, 1], torch.full((N, 6), 1 / 6))


def test_causal(scores):
    causal = masked_softmax(scores, None, causal=True, factor=1.0, dtype=FP32)
    assert (causal[:, :, 0, 3:] == 0).all()
    assert (causal[:, :, 0, :3] > 0).all()
    rounded = masked_softmax(scores, None, causal=True, factor=1.0, dtype=BF16)
    assert torch.equal(rounded, causal.to(BF16))
