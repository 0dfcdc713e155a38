"""Stretches of tokens instead of masks: where they end, and attention within them."""

from __future__ import annotations

import pytest
import torch

from megatron.device import Device
from megatron.kernels.attention import attention_reference, cpu_attention, gpu_attention
from megatron.kernels.segments import Segments
from tests.kernels.compare import fresh

DEVICE = Device.pick()
LENGTHS = [5, 8, 0, 1]  # of 8 tokens
needs_gpu = pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU")


def padding_of(lengths: list[int], length: int) -> torch.Tensor:
    return torch.arange(length) < torch.tensor(lengths)[:, None]


def test_padding_is_a_stretch_behind_the_tokens() -> None:
    padding = padding_of(LENGTHS, 8)
    segments = Segments.of_padding(padding)
    assert segments.ends.tolist() == [0, 5, 8, 16, 16, 16, 24, 25, 32]
    assert segments.ends.dtype == torch.int32
    assert torch.equal(segments.mask[:, 0, 0], padding)


@pytest.mark.parametrize("form", [attention_reference, cpu_attention])
def test_forms_that_take_a_mask_take_stretches(form) -> None:
    segments = Segments.of_padding(padding_of([5, 8], 8))
    heads = torch.randn(3, 8, 2, 3, 16, generator=fresh())
    options = {"causal": False, "dropout": 0.0, "layer_number": 1}
    found = form(*heads, mask=segments, **options)
    assert torch.equal(found, form(*heads, mask=segments.mask, **options))


def test_documents_are_stretches_of_the_past() -> None:
    segments = Segments.of_documents(torch.tensor([0, 2, 2, 4, 8]), (2, 4))
    first = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert segments.mask[0, 0].int().tolist() == first
    assert torch.equal(segments.mask[1, 0], torch.ones(4, 4).tril().bool())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [64, 72, 12])
def test_on_a_gpu_tokens_and_gradients_are_those_of_the_formula(dtype, size) -> None:
    lengths = [200, 64, 1, 131]
    padding = padding_of(lengths, 200).to(DEVICE.torch_device)
    generator = fresh()
    heads = [torch.randn(200, 4, n, size, generator=generator) for n in (4, 2, 2)]
    weight = torch.randn(200, 4, 4 * size, generator=generator).to(DEVICE.torch_device)
    weight = weight * padding.T.unsqueeze(2)  # nothing comes back from padding
    results = []
    for form, kind in ((gpu_attention, dtype), (attention_reference, torch.float64)):
        inputs = [x.to(DEVICE.torch_device, dtype).to(kind).requires_grad_() for x in heads]
        out = form(
            *inputs, mask=Segments.of_padding(padding), causal=False, dropout=0.0, layer_number=1
        )
        (out * weight).sum().backward()
        results.append([out * padding.T.unsqueeze(2), *(x.grad for x in inputs)])
    for ours, theirs in zip(*results, strict=True):
        far = (ours.double() - theirs).norm() / theirs.norm()
        assert far < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_documents_do_not_see_each_other() -> None:
    ends = torch.tensor([0, 7, 200, 201, 400], device=DEVICE.torch_device)
    generator = fresh()
    heads = [torch.randn(200, 2, n, 64, generator=generator) for n in (4, 2, 2)]
    heads = [x.to(DEVICE.torch_device, torch.bfloat16) for x in heads]
    segments = Segments.of_documents(ends, (2, 200))
    options = {"mask": segments, "causal": True, "dropout": 0.0, "layer_number": 1}
    found = gpu_attention(*heads, **options)
    expected = attention_reference(*(x.double() for x in heads), **options)
    assert (found - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.gpu
@needs_gpu
def test_dropout_within_stretches_keeps_the_mean_and_is_repeatable() -> None:
    padding = padding_of([100, 256], 256).to(DEVICE.torch_device)
    query, key = (torch.zeros(256, 2, 4, 64, device=DEVICE.torch_device) for _ in range(2))
    value = torch.ones_like(key)
    outs = []
    for _ in range(2):
        DEVICE.seed(3)
        outs.append(
            gpu_attention(
                *(x.bfloat16() for x in (query, key, value)),
                mask=Segments.of_padding(padding),
                causal=False,
                dropout=0.25,
                layer_number=1,
            ).float()
        )
    assert torch.equal(*outs)
    tokens = outs[0][padding.T]
    assert tokens.mean().item() == pytest.approx(1, abs=0.01)
    assert tokens.std() > 0.02
