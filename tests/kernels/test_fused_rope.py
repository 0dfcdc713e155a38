"""Splitting and rotating the fused projection: kernel against plain form in float64."""

from functools import partial

import pytest
import torch

from megatron.kernels.rope import (
    choose_split_rotate,
    fused_rotate,
    fused_split_rotate,
    rotate,
    rotation_table,
    split_rotate,
)
from tests.kernels.compare import BF16, FP16, FP32, TOLERANCE, check, fresh, run
from tests.models.small import config as model_config

pytestmark = pytest.mark.usefixtures("poisoned")
S, B = 5, 3


def case(device, dtype, *, groups, per_group, size, rotary, s=S, b=B):
    generator = fresh()
    heads = groups * per_group
    qkv = torch.randn(s, b, (heads + 2 * groups) * size, generator=generator).to(device, dtype)
    grads = [
        torch.randn(s, b, n, size, generator=generator).to(device, dtype)
        for n in (heads, groups, groups)
    ]
    if rotary == 0:
        return qkv, grads, None
    places = torch.randperm(64 + s, generator=generator)[:s]  # as in context parallelism
    cosine, sine = rotation_table(64 + s, rotary)[:, places, None, None]
    return qkv, grads, (cosine.contiguous().to(device), sine.contiguous().to(device))


def both(library, groups, size, rotation, *, contiguous=False):
    def plain(qkv):
        parts = None if rotation is None else tuple(x.to(qkv.device) for x in rotation)
        if qkv.dtype == torch.float64 and parts:
            parts = tuple(x.double() for x in parts)
        return tuple(x.contiguous() for x in split_rotate(qkv, groups, size, parts))

    def ours(qkv):
        return fused_split_rotate(library, qkv, groups, size, rotation, contiguous=contiguous)

    return ours, plain


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(
    ("groups", "per_group", "size", "rotary"),
    [(2, 1, 64, 64), (2, 3, 64, 32), (1, 4, 128, 128), (3, 2, 80, 16), (2, 1, 32, 0)],
)
def test_equals_float64(kernels, dtype, groups, per_group, size, rotary):
    library, device = kernels
    qkv, grads, rotation = case(
        device, dtype, groups=groups, per_group=per_group, size=size, rotary=rotary
    )
    views = rotary == 0 and per_group == 1
    for contiguous in (False, True):
        forms = both(library, groups, size, rotation, contiguous=contiguous)
        ours = check(*forms, [qkv], grads, TOLERANCE[dtype])
        assert all(x.is_contiguous() == (contiguous or not views) for x in ours[:3])


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(("heads", "size", "rotary"), [(3, 64, 64), (1, 128, 32), (4, 80, 16)])
def test_heads_alone_equal_float64(kernels, dtype, heads, size, rotary):
    library, device = kernels
    x, (grad, *_), rotation = case(
        device, dtype, groups=heads, per_group=1, size=size, rotary=rotary
    )
    x = x.unflatten(2, (-1, size))[:, :, :heads]
    check(
        lambda x: fused_rotate(library, x, rotation),
        lambda x: rotate(x, tuple(part.cpu().to(x.dtype) for part in rotation)),
        [x],
        [grad],
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("layout", [(1, 2, 0, 3), (1, 0, 2, 3), (0, 1, 2, 3), (3, 0, 1, 2)])
def test_takes_gradients_in_any_layout(kernels, layout):
    """Attention returns them as [b, n, s, d] or [b, s, n, d] in memory."""
    library, device = kernels
    qkv, grads, rotation = case(device, BF16, groups=2, per_group=2, size=64, rotary=64)
    fused, _ = both(library, 2, 64, rotation)
    back = [layout.index(i) for i in range(4)]
    laid = [g.permute(layout).contiguous().permute(back) for g in grads]
    for ours, expected in zip(run(fused, [qkv], laid), run(fused, [qkv], grads), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("groups", "per_group"), [(16, 1), (8, 4)])
def test_training_sizes(kernels, groups, per_group):
    library, device = kernels
    if device.type == "cpu":
        pytest.skip("too large for the emulator")
    qkv, grads, rotation = case(
        device, BF16, groups=groups, per_group=per_group, size=128, rotary=128, s=1023, b=2
    )
    check(*both(library, groups, 128, rotation), [qkv], grads, TOLERANCE[BF16])


@pytest.mark.parametrize(("size", "rotary"), [(36, 36), (96, 24)])
def test_odd_heads_take_the_plain_form(kernels, size, rotary):
    library, device = kernels
    qkv, grads, rotation = case(device, BF16, groups=2, per_group=2, size=size, rotary=rotary)
    fused, plain = both(library, 2, size, rotation)
    for ours, expected in zip(run(fused, [qkv], grads), run(plain, [qkv], grads), strict=True):
        assert torch.equal(ours, expected)


def test_choice(kernels):
    off = model_config(apply_rope_fusion=False)
    assert choose_split_rotate(model_config(), None) is split_rotate
    assert choose_split_rotate(off, kernels[0]) is split_rotate
    assert isinstance(choose_split_rotate(model_config(), kernels[0]), partial)
