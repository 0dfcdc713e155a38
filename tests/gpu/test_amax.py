"""Amaxes that kernels pass to fp8 layers equal those of the tensors that the layers cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.device import Device
from megatron.kernels.amax import FusedAmax
from megatron.models.gpt import GPTModel
from megatron.models.recompute import RecomputePlan
from megatron.parallel.parameter import initialize
from tests.models.small import LLAMA, config, new_context, plan

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
WIDE: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 256,
    "kv_channels": 64,
    "ffn_hidden_size": 512,
    "max_position_embeddings": 128,
}
OLD: dict[str, Any] = {
    **WIDE,
    "swiglu": False,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
}


def _train(
    flags: dict[str, Any], recompute: RecomputePlan | None, numbers: dict[str, Any]
) -> list[Tensor]:
    """Return losses and gradients of two micro-batches with passes interleaved as in a pipeline."""
    precision = PrecisionConfig(bf16=True, fp8_format="hybrid", **numbers)
    network = config(**flags)
    context = new_context(network, precision, device=DEVICE.torch_device, dtype=torch.bfloat16)
    model = GPTModel(plan(network), context, recompute=recompute)
    initialize(model.named_parameters(), 1)
    texts = torch.randint(64, (2, 2, 129), generator=torch.Generator().manual_seed(1))
    texts = texts.to(DEVICE.torch_device)
    losses = [model(text[:, :-1], labels=text[:, 1:]).mean() for text in texts]
    losses[0].backward()
    (7 * losses[1]).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach() for loss in losses] + [grad for grad in gradients if grad is not None]


@pytest.mark.parametrize("flags", [WIDE, OLD], ids=["llama", "gpt"])
@pytest.mark.parametrize("wgrad", [True, False])
@pytest.mark.parametrize(
    "recompute",
    [
        None,
        RecomputePlan("selective"),
        RecomputePlan("full"),
        RecomputePlan("full", "block", 1),
    ],
)
def test_an_amax_handed_over_is_that_of_the_tensor(
    flags: dict[str, Any],
    wgrad: bool,
    recompute: RecomputePlan | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed: list[bool] = []
    take = FusedAmax.pop

    def checked(self: FusedAmax, x: Tensor) -> Tensor | None:
        amax = take(self, x)
        handed.append(amax is not None)
        if amax is not None:
            assert amax.equal(x.detach().abs().amax().float())
        return amax

    monkeypatch.setattr(FusedAmax, "pop", checked)
    numbers = {"fp8_wgrad": wgrad}
    result = _train(flags, recompute, numbers)
    # A layer takes four amaxes in the forward pass and four in the backward pass. No kernel
    # computes that of attention's output.
    assert sum(handed) >= len(handed) * 3 / 4

    def measured(self: FusedAmax, x: Tensor) -> None:
        take(self, x)

    monkeypatch.setattr(FusedAmax, "pop", measured)
    torch.testing.assert_close(_train(flags, recompute, numbers), result, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_other_recipes_hand_nothing_over(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedAmax, "allocate", None)  # any call would fail
    losses = _train(WIDE, None, {"fp8_recipe": recipe})
    assert all(x.isfinite().all() for x in losses)
