"""BERT and T5 give the same results on a GPU as on a CPU, through kernels and masks."""

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.device import Device
from megatron.models import bert
from megatron.models.recompute import RecomputePlan
from tests.models.others import batch_of, build, losses
from tests.models.test_bert_and_t5 import T5_KNOBS

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
WIDE = {"kv_channels": 8}  # a head size that the fused kernels support


def _run(kind, flags, device, dtype, recompute=None, precision=None):
    options = {"recompute": recompute, "precision": precision}
    model = build(kind, {**WIDE, **flags}, device=device, dtype=dtype, **options)
    DEVICE.seed(1)
    loss = losses(kind, model, batch_of(kind, device))
    loss.backward()
    gradients = [parameter.grad.float().cpu() for parameter in model.parameters()]
    return loss.detach().float().cpu(), gradients


@pytest.mark.parametrize(
    ("kind", "flags"), [("bert", {}), ("t5", {}), ("t5", T5_KNOBS["1.0"]), ("t5", T5_KNOBS["1.1"])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_equals_that_of_a_cpu(kind, flags, dtype):
    loss, gradients = _run(kind, flags, DEVICE.torch_device, dtype)
    expected_loss, expected = _run(kind, flags, "cpu", torch.float32)
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).norm() < 3 * tolerance * theirs.norm().clamp(min=1e-3)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_insisting_on_fused_kernels_changes_rounding_only(kind):
    loss, gradients = _run(
        kind,
        {"use_flash_attn": True},
        DEVICE.torch_device,
        torch.bfloat16,
        precision=PrecisionConfig(bf16=True),
    )
    expected_loss, expected = _run(kind, {}, "cpu", torch.float32)
    torch.testing.assert_close(loss, expected_loss, rtol=3e-2, atol=3e-2)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).norm() < 9e-2 * theirs.norm().clamp(min=1e-3)


@pytest.mark.parametrize(("kind", "flags"), [("bert", {}), ("t5", {}), ("t5", T5_KNOBS["1.1"])])
def test_recomputation_gives_the_same_bits_with_dropout(kind, flags):
    noisy = {"attention_dropout": 0.2, "hidden_dropout": 0.2, **flags}
    plain, _ = _run(kind, noisy, DEVICE.torch_device, torch.bfloat16)
    for plan in (RecomputePlan("selective"), RecomputePlan("full", "uniform", 2)):
        again, _ = _run(kind, noisy, DEVICE.torch_device, torch.bfloat16, plan)
        assert torch.equal(plain, again)


def test_samples_one_after_the_other_equal_samples_with_a_mask(monkeypatch):
    """With dropout so rare that none happens, a BERT uses the flash kernel's variable lengths."""
    rare = {"attention_dropout": 1e-9, "hidden_dropout": 0.0}
    options = {"device": DEVICE.torch_device, "dtype": torch.bfloat16}
    monkeypatch.setattr(bert, "MIN_PACKED_LENGTH", 1)
    assert build("bert", {**WIDE, **rare}, **options).min_packed_length == 1
    assert build("bert", {**WIDE, "attention_dropout": 0.0}, **options).min_packed_length is None
    loss, gradients = _run("bert", rare, DEVICE.torch_device, torch.bfloat16)
    none = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    expected_loss, expected = _run("bert", none, "cpu", torch.float32)
    torch.testing.assert_close(loss, expected_loss, rtol=3e-2, atol=3e-2)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).norm() < 9e-2 * theirs.norm().clamp(min=1e-3)
