"""Gated delta nets and gated attention against their equations, and their counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron.kernels.segments import Segments
from megatron.models.attention import SelfAttention
from megatron.models.costs import MicroBatch, WeightSplit
from megatron.models.delta_net import GatedDeltaNet
from megatron.models.plan import InitPlan
from megatron.models.recurrent_plan import GatedDeltaNetPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize
from tests.models.small import LLAMA, SEQUENCE, batch, gpt, kept_for_backward

HIDDEN, KEY_HEADS, SERVES, KEYS, VALUES, TAPS = 16, 2, 3, 5, 7, 4
NETWORK: dict[str, Any] = {
    **LLAMA,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "[0,1,0]",
    "linear_conv_kernel_dim": TAPS,
    "linear_key_head_dim": KEYS,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": KEY_HEADS * SERVES,
    "linear_value_head_dim": VALUES,
}


def delta_net() -> GatedDeltaNet:
    """Return the layer with random weights and chunks of 8 tokens, so that a sequence has two."""
    layer = gpt(NETWORK).eval().layers["1"].attention
    assert isinstance(layer, GatedDeltaNet)
    layer.plan = replace(layer.plan, chunk=8)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return layer


def tokens() -> Tensor:
    return torch.randn(SEQUENCE, 2, HIDDEN, generator=torch.Generator().manual_seed(3))


def by_equations(layer: GatedDeltaNet, x: Tensor) -> Tensor:
    """Compute one sample and one head, one token at a time."""
    widths = (KEYS, KEYS, SERVES * VALUES, SERVES * VALUES, SERVES, SERVES)
    rows = (x @ layer.input.weight.T).unflatten(2, (KEY_HEADS, -1))
    filters = layer.convolution.weight.unflatten(0, (KEY_HEADS, -1))
    outputs = torch.zeros(len(x), x.shape[1], KEY_HEADS, SERVES, VALUES)
    for sample in range(x.shape[1]):
        for head in range(KEY_HEADS):
            part = rows[:, sample, head]
            mixed, others = part[:, : sum(widths[:3])], part[:, sum(widths[:3]) :]
            padded = F.pad(mixed, (0, 0, TAPS - 1, 0))
            turned = sum(padded[tap : tap + len(x)] * filters[head, :, tap] for tap in range(TAPS))
            query, key, values = F.silu(turned).split(widths[:3], dim=1)
            query = query / (query.square().sum(1, keepdim=True) + 1e-6).sqrt() / KEYS**0.5
            key = key / (key.square().sum(1, keepdim=True) + 1e-6).sqrt()
            gates, rates, steps = others.split(widths[3:], dim=1)
            for served in range(SERVES):
                number, state = head * SERVES + served, torch.zeros(KEYS, VALUES)
                of_head = slice(served * VALUES, (served + 1) * VALUES)
                for place in range(len(x)):
                    step = F.softplus(steps[place, served] + layer.time_step[number])
                    state = (-layer.decay[number].exp() * step).exp() * state
                    wrong = values[place, of_head] - key[place] @ state
                    rate = rates[place, served].sigmoid()
                    state = state + torch.outer(key[place], rate * wrong)
                    read = query[place] @ state
                    read = read / (read.square().mean() + layer.plan.epsilon).sqrt()
                    read = read * layer.norm.weight * F.silu(gates[place, of_head])
                    outputs[place, sample, head, served] = read
    return outputs.flatten(2) @ layer.output.weight.T


def test_it_computes_its_equations() -> None:
    layer, x = delta_net(), tokens()
    with torch.no_grad():
        found, expected = layer(x, None, None), by_equations(layer, x)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_documents_are_computed_as_if_alone() -> None:
    layer, x = delta_net(), tokens()
    ends = torch.tensor([0, 5, 6, SEQUENCE, SEQUENCE + 9, 2 * SEQUENCE])
    mask = Segments.of(ends, torch.zeros(2, SEQUENCE))
    with torch.no_grad():
        found = layer(x, mask, None)
        for sample, start, end in ((0, 0, 5), (0, 5, 6), (0, 6, 12), (1, 0, 9), (1, 9, 12)):
            alone = layer(x[start:end, sample : sample + 1], None, None)
            together = found[start:end, sample : sample + 1]
            torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_recomputation_changes_no_gradient() -> None:
    layer, x = delta_net(), tokens()
    gradients = []
    for recompute in (False, True):
        layer.recompute = recompute
        layer.zero_grad()
        layer(x, None, None).square().sum().backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
    for kept, again in zip(*gradients, strict=True):
        assert kept is not None
        torch.testing.assert_close(kept, again)


def test_initial_decays_are_between_one_and_sixteen() -> None:
    decay = gpt({**NETWORK, "linear_num_value_heads": 2 * 500}).layers["1"].attention.decay.exp()
    assert 1 < decay.min() < 1.2
    assert 15.8 < decay.max() < 16
    assert abs(decay.mean().item() - 8.5) < 0.5


def test_parameters_and_work_are_counted() -> None:
    layers = gpt(NETWORK).layers
    for index, kind in (("0", SelfAttention), ("1", GatedDeltaNet)):
        layer: Any = layers[index].attention
        counted = sum(a * b for a, b in kind.matrices(layer.plan, WeightSplit()))
        counted += kind.vectors(layer.plan, WeightSplit())
        assert counted == sum(parameter.numel() for parameter in layer.parameters())
    plan = layers["1"].attention.plan
    assert isinstance(plan, GatedDeltaNetPlan)
    once, twice = (GatedDeltaNet.flops(plan, 64 * times, 0) for times in (1, 2))
    assert twice == tuple(2 * part for part in once)  # linear in the sequence length


@pytest.mark.parametrize(
    "sizes",
    [
        {"key_heads": 2, "value_heads": 8, "key_size": 16, "value_size": 24, "chunk": 32},
        {"key_heads": 4, "value_heads": 4, "key_size": 32, "value_size": 64, "chunk": 16},
    ],
)
def test_work_is_about_what_pytorch_counts(sizes: dict[str, int]) -> None:
    plan = GatedDeltaNetPlan(hidden=64, init=InitPlan(0.02, 2), epsilon=1e-6, **sizes)
    layer = GatedDeltaNet(plan, BuildContext(Layout.single()))
    initialize(layer.named_parameters(), 1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(128, 1, 64), None, None, None)
    counts = counter.get_flop_counts()["Global"]
    products, scores = (part / 3 for part in GatedDeltaNet.flops(plan, 128, 0))
    assert products == counts[torch.ops.aten.mm]
    # PyTorch counts neither the triangular systems nor the convolution.
    assert 1 <= scores / counts[torch.ops.aten.bmm] < 1.5


@pytest.mark.parametrize("recompute", [False, True])
def test_activation_bytes_are_about_those_that_autograd_keeps(recompute: bool) -> None:
    sizes = {"key_heads": 2, "value_heads": 8, "key_size": 16, "value_size": 24, "chunk": 32}
    plan = GatedDeltaNetPlan(hidden=64, init=InitPlan(0.02, 2), epsilon=1e-6, **sizes)
    parts = frozenset({"core_attn"} if recompute else ())
    layer = GatedDeltaNet(plan, BuildContext(Layout.single(), recomputed=parts))
    initialize(layer.named_parameters(), 1)
    x = torch.randn(128, 2, 64, requires_grad=True)
    with kept_for_backward(layer) as kept:
        out = layer(x, None, None)
    assert out.requires_grad
    batch = MicroBatch(sequences=2, length=128, recomputed=parts)
    held = sum(kept.values()) - x.nbytes  # x, the normalization's output, is counted there
    assert GatedDeltaNet.activation_bytes(plan, batch) == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_gated_attention_multiplies_by_the_sigmoid(qk_layernorm: bool) -> None:
    flags = {**NETWORK, "qk_layernorm": qk_layernorm}
    model, plain = gpt(flags).eval(), gpt({**flags, "attention_output_gate": False}).eval()
    layer, other = model.layers["0"].attention, plain.layers["0"].attention
    plan, x = layer.plan, tokens()
    (rotation,) = model.rotation(torch.arange(SEQUENCE))
    groups, heads, size = plan.kv_heads, plan.heads // plan.kv_heads, plan.head_size
    rows = layer.qkv.weight.unflatten(0, (groups, 2 * heads + 2, size))
    with torch.no_grad():
        without = torch.cat((rows[:, :heads], rows[:, 2 * heads :]), dim=1)
        other.qkv.weight.copy_(without.flatten(0, 2))
        other.output.weight.copy_(torch.eye(HIDDEN))
        attended = other(x, None, rotation)
        gates = x @ rows[:, heads : 2 * heads].flatten(0, 2).T
        expected = (attended * gates.sigmoid()) @ layer.output.weight.T
        torch.testing.assert_close(layer(x, None, rotation), expected)


def test_both_learn() -> None:
    model, (text, labels) = gpt(NETWORK), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(text, labels=labels).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
