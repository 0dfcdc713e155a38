"""The Mamba-2 mixer: its scan, documents, states and counted costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.stages import ModelPart
from megatron.kernels.segments import Segments
from megatron.models.arithmetic import count_parameters, count_part_parameters
from megatron.models.block import Block
from megatron.models.costs import MicroBatch, WeightSplit
from megatron.models.gpt import GPTModel
from megatron.models.mamba import Mamba, scan, step
from megatron.models.plan import InitPlan
from megatron.models.recurrence import CausalConvolution
from megatron.models.recurrent_plan import MambaPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize
from tests.models.small import VOCAB, config, kept_for_backward, plan

PLAN = MambaPlan(
    hidden=10,
    init=InitPlan(0.3, 2),
    heads=6,
    head_size=7,
    groups=3,
    state=5,
    epsilon=1e-5,
    chunk=4,
)
HYBRID: dict[str, Any] = {
    "hybrid_layer_pattern": "M-*M",
    "num_layers": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "mamba_num_groups": 2,
    "mamba_state_dim": 5,
    "position_embedding_type": "none",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


PARALLEL: dict[str, Any] = {
    **HYBRID,
    "hybrid_layer_pattern": None,
    "num_layers": 2,
    "parallel_mamba": True,
    "mamba_norm": False,
    "mamba_multipliers": (0.8, 1.1, 0.9, 1.3, 0.7),
    "mlp_multipliers": (0.9, 1.2),
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "swiglu": True,
}


def mixer(mamba: MambaPlan = PLAN, *, recompute: bool = False) -> Mamba:
    recomputed = frozenset({"core_attn"} if recompute else ())
    made = Mamba(mamba, BuildContext(Layout.single(), recomputed=recomputed))
    initialize(made.named_parameters(), seed=3)
    return made


def tokens(length: int, samples: int = 2) -> Tensor:
    return torch.randn(length, samples, 10, generator=torch.Generator().manual_seed(length))


def inputs(length: int, samples: int = 2, groups: int = 3) -> list[Tensor]:
    """Return x, time steps, rates, B and C of a scan, in float64."""
    draw = torch.Generator().manual_seed(4)
    sizes = ((2, 7), (2,), (5,), (5,))
    x, steps, b, c = (
        torch.randn(length, samples, groups, *size, generator=draw, dtype=torch.float64)
        for size in sizes
    )
    rates = -torch.rand(groups, 2, generator=draw, dtype=torch.float64) * 3
    return [x, steps.exp(), rates, b, c]


def one_by_one(parts: list[Tensor], documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the recurrence step by step, as it is defined."""
    x, steps, rates, b, c = parts
    state = x.new_zeros(*x.shape[1:], b.shape[-1])
    results = []
    for token in range(len(x)):
        if documents is not None and token:
            same = documents[token] == documents[token - 1]
            state = state * same[:, None, None, None, None]
        decay = (steps[token] * rates).exp()
        added = torch.einsum("bgr,bgrp,bgn->bgrpn", steps[token], x[token], b[token])
        state = decay[..., None, None] * state + added
        results.append(torch.einsum("bgrpn,bgn->bgrp", state, c[token]))
    return torch.stack(results), state


@pytest.mark.parametrize("chunk", [1, 3, 4, 11, 128])
def test_the_scan_is_the_recurrence(chunk: int) -> None:
    parts = inputs(11)
    expected, last = one_by_one(parts)
    found, state = scan(*parts, None, None, chunk=chunk)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(state, last)


def test_a_scan_continues_from_a_state() -> None:
    parts = inputs(11)
    expected, last = one_by_one(parts)
    x, steps, rates, b, c = parts
    first, state = scan(
        *(part[:6] for part in (x, steps)), rates, b[:6], c[:6], None, None, chunk=4
    )
    then, state = scan(x[6:10], steps[6:10], rates, b[6:10], c[6:10], state, None, chunk=4)
    one, state = step(x[10:], steps[10:], rates, b[10:], c[10:], state)
    torch.testing.assert_close(torch.cat((first, then, one)), expected)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
def test_states_start_anew_in_each_document(chunk: int) -> None:
    """Documents end within chunks and at chunk boundaries, and some span several chunks."""
    lengths = ([1, 2, 9, 1, 3], [4, 8, 4])
    rows = [
        torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) + 10 * index
        for index, row in enumerate(lengths)
    ]
    documents = torch.stack(rows, 1)
    parts = inputs(16)
    expected, _ = one_by_one(parts, documents)
    found, _ = scan(*parts, None, documents, chunk=chunk)
    torch.testing.assert_close(found, expected)


def test_documents_are_computed_as_if_alone() -> None:
    made, x = mixer(), tokens(12)
    ends = torch.tensor([0, 5, 12, 12 + 7, 12 + 7, 24])
    whole = made(x, Segments(ends.int(), (2, 12)), None)
    for sample, first, last in ((0, 0, 5), (0, 5, 12), (1, 0, 7), (1, 7, 12)):
        part = slice(first, last), slice(sample, sample + 1)
        torch.testing.assert_close(whole[part], made(x[part], None, None))
    assert not torch.allclose(whole, made(x, None, None))


def test_gradients_are_those_of_the_recurrence() -> None:
    parts = [part.requires_grad_() for part in inputs(9)]
    weights = torch.randn(9, 2, 3, 2, 7, dtype=torch.float64)
    expected = torch.autograd.grad((one_by_one(parts)[0] * weights).sum(), parts)
    found = torch.autograd.grad((scan(*parts, None, None, chunk=4)[0] * weights).sum(), parts)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_recomputation_changes_no_gradient() -> None:
    x = tokens(9)
    gradients = []
    for recompute in (False, True):
        made = mixer(recompute=recompute)
        made(x, None, None).square().sum().backward()
        gradients.append([parameter.grad for parameter in made.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert torch.equal(one, other)


def test_initial_decays_and_time_steps_are_in_their_ranges() -> None:
    made = mixer(replace(PLAN, heads=300, groups=3))
    rates = made.decay.exp()
    assert 1 <= rates.min() < 2
    assert 15 < rates.max() <= 16
    steps = torch.nn.functional.softplus(made.time_step)
    assert 0.001 <= steps.min() < 0.0015
    assert 0.07 < steps.max() <= 0.1001
    assert steps.median() < 0.02, "log-uniform"


def test_layers_of_a_pattern_have_one_part() -> None:
    layers = plan(config(**HYBRID)).layers
    assert [layer.mlp is None for layer in layers] == [True, False, True, True]


@pytest.mark.parametrize("flags", [HYBRID, PARALLEL], ids=["pattern", "beside attention"])
def test_parameters_are_counted_as_they_are_built(flags: dict[str, Any]) -> None:
    network = plan(config(**flags))
    model = GPTModel(network, BuildContext(Layout.single(), torch.device("meta")))
    assert count_parameters(network) == sum(each.numel() for each in model.parameters())
    part = ModelPart(range(2), embedding=True, head=False)
    half = BuildContext(Layout.at(1, 2, tensor=2), torch.device("meta"))
    held = sum(each.numel() for each in GPTModel(network, half, part).parameters())
    assert count_part_parameters(network, part, WeightSplit(tensor=2)) == held


def test_operations_are_those_that_pytorch_counts() -> None:
    made = mixer()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        made(tokens(12, 1), None, None)
    products, scores = (part / 3 for part in Mamba.flops(PLAN, 12, 0))
    # The masked halves of chunks are computed too.
    masked = 12 * PLAN.chunk * (PLAN.groups * PLAN.state + PLAN.inner)
    assert counter.get_total_flops() == products + scores + masked


@pytest.mark.parametrize("recompute", [False, True])
def test_activation_bytes_are_about_those_that_autograd_keeps(recompute: bool) -> None:
    mamba = replace(PLAN, hidden=64, heads=16, head_size=16, groups=2, state=32, chunk=32)
    made = mixer(mamba, recompute=recompute)
    x = torch.randn(128, 2, 64, requires_grad=True)
    with kept_for_backward(made) as kept:
        out = made(x, None, None)
    assert out.requires_grad
    parts = frozenset({"core_attn"} if recompute else ())
    batch = MicroBatch(sequences=2, length=128, recomputed=parts)
    held = sum(kept.values()) - x.nbytes  # x, the normalization's output, is counted there
    assert Mamba.activation_bytes(mamba, batch) == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize("flags", [HYBRID, PARALLEL], ids=["pattern", "beside attention"])
def test_no_layer_looks_ahead(flags: dict[str, Any]) -> None:
    network = plan(config(**flags))
    model = GPTModel(network, BuildContext(Layout.single())).eval()
    initialize(model.named_parameters(), 1)
    text = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    changed = text.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    before, after = model(text), model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7:], before[:, 7:])
    assert Block.flops(network.layers[0], 12).scores > 0


def test_the_convolution_starts_as_pytorch_s_does() -> None:
    """Both are uniform, up to the inverse square root of the number of tokens that it reads."""
    made = CausalConvolution(400, 4, BuildContext(Layout.single()))
    initialize(made.named_parameters(), seed=3)
    bound = 4**-0.5
    assert made.bias is not None
    for drawn in (made.weight, made.bias):
        assert 0.98 * bound < drawn.abs().max().item() <= bound
        assert abs(drawn.abs().mean().item() - bound / 2) < 0.05 * bound
