"""Documents packed into samples: with a mask, and with the flash kernel without one."""

from __future__ import annotations

import pytest
import torch

from megatron.device import Device
from megatron.kernels.attention import (
    AttentionOptions,
    attention_reference,
    flash_attention,
    fused_attention,
    gpu_attention,
)
from megatron.kernels.segments import Segments
from tests.kernels.compare import fresh

DEVICE = Device.pick()
needs_gpu = pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU")


def segments_of(ends: list[int], length: int) -> Segments:
    tensor = torch.tensor(ends, dtype=torch.int32, device=DEVICE.torch_device)
    return Segments(tensor, (ends[-1] // length, length))


def test_a_mask_of_documents() -> None:
    mask = segments_of([0, 2, 2, 4, 8], 4).mask
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(mask[1, 0].cpu(), torch.ones(4, 4).tril().bool())


def test_chunks_begin_again_with_each_document() -> None:
    documents = segments_of([0, 2, 2, 9, 12, 24], 12)
    assert documents.token_positions.tolist() == [
        [0, 1, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    ]
    chunks = documents.within(3)
    assert chunks is documents.within(3)
    assert chunks.longest == 3
    ends = [*dict.fromkeys(chunks.ends.tolist())]  # without empty ones
    assert ends == [0, 2, 5, 8, 9, 12, 15, 18, 21, 24]
    assert documents.within(12) is documents


@pytest.mark.parametrize("form", [attention_reference, fused_attention])
def test_forms_that_take_a_mask_take_documents(form) -> None:
    segments = segments_of([0, 5, 8, 16], 8)
    heads = torch.randn(3, 8, 2, 3, 16, generator=fresh()).to(DEVICE.torch_device)
    found = form(*heads, AttentionOptions(segments))
    assert torch.equal(found, form(*heads, AttentionOptions(segments.mask)))
    assert not torch.equal(found, form(*heads, AttentionOptions()))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("form", [gpu_attention, flash_attention])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [64, 72, 12])
def test_on_a_gpu_results_and_gradients_are_those_of_the_formula(form, dtype, size) -> None:
    if form is flash_attention and (dtype == torch.float32 or size % 8):
        pytest.skip("refused before a run")
    segments = segments_of([0, 7, 200, 201, 201, 400], 200)
    generator = fresh()
    heads = [torch.randn(200, 2, n, size, generator=generator) for n in (4, 2, 2)]
    weight = torch.randn(200, 2, 4 * size, generator=generator).to(DEVICE.torch_device)
    results = []
    for which, kind in ((form, dtype), (attention_reference, torch.float64)):
        inputs = [x.to(DEVICE.torch_device, dtype).to(kind).requires_grad_() for x in heads]
        out = which(*inputs, AttentionOptions(segments))
        (out * weight).sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for ours, theirs in zip(*results, strict=True):
        far = (ours.double() - theirs).norm() / theirs.norm()
        assert far < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("ends", [None, [0, 100, 130, 256, 512]], ids=["whole", "documents"])
@pytest.mark.parametrize("window", [1, 40, 200])
@pytest.mark.parametrize("groups", [1, 4])
def test_on_a_gpu_a_window_is_that_of_the_formula(ends, window: int, groups: int) -> None:
    generator = torch.Generator(DEVICE.torch_device).manual_seed(window)
    segments = None if ends is None else segments_of(ends, 256)
    options = AttentionOptions(segments, window=window)
    heads = [
        torch.randn(256, 2, count, 64, device=DEVICE.torch_device, generator=generator)
        for count in (4, groups, groups)
    ]
    results = []
    for form, dtype in ((gpu_attention, torch.bfloat16), (attention_reference, torch.float64)):
        inputs = [x.to(dtype).requires_grad_() for x in heads]
        out = form(*inputs, options)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(out))
        results.append([out, *(x.grad for x in inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("ends", [None, [0, 100, 130, 256, 512]], ids=["whole", "documents"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("groups", [1, 4])
def test_on_a_gpu_sinks_are_those_of_the_formula(ends, window: int | None, groups: int) -> None:
    """This compares the result and every gradient, including the sinks'."""
    generator = torch.Generator(DEVICE.torch_device).manual_seed(groups)
    segments = None if ends is None else segments_of(ends, 256)
    heads = [
        torch.randn(256, 2, count, 64, device=DEVICE.torch_device, generator=generator)
        for count in (4, groups, groups)
    ]
    heads.append(torch.tensor([-2.0, 0.0, 3.0, 6.0], device=DEVICE.torch_device))
    results = []
    for form, dtype in ((gpu_attention, torch.bfloat16), (attention_reference, torch.float64)):
        *inputs, sinks = (x.to(torch.bfloat16).to(dtype).requires_grad_() for x in heads)
        out = form(*inputs, AttentionOptions(segments, window=window, scale=0.2, sinks=sinks))
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(out))
        results.append([out, *(x.grad for x in (*inputs, sinks))])
    for place, (ours, theirs) in enumerate(zip(*results, strict=True)):
        # A sink's gradient is a single sum over all 512 rows, most of whose terms cancel out.
        limit = 2e-2 if place == 4 else 1e-2
        assert (ours.double() - theirs).norm() / theirs.norm() < limit


@pytest.mark.gpu
@needs_gpu
def test_dropout_within_documents_keeps_the_mean_and_is_repeatable() -> None:
    query, key = (torch.zeros(256, 2, 4, 64, device=DEVICE.torch_device) for _ in range(2))
    heads = [x.bfloat16() for x in (query, key, torch.ones_like(key))]
    outs = []
    for _ in range(2):
        DEVICE.seed(3)
        segments = segments_of([0, 100, 256, 512], 256)
        out = gpu_attention(*heads, AttentionOptions(segments, dropout=0.25))
        outs.append(out.float())
    assert torch.equal(*outs)
    assert outs[0].mean().item() == pytest.approx(1, abs=0.02)
    assert outs[0].std() > 0.02
