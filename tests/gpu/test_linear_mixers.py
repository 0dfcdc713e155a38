"""Kernels of flash-linear-attention against the references of recurrent mixers.

The references compute in fp64 what the kernels compute in 16 bits. Each shape of heads
is tuned at its first use, which takes minutes; Triton keeps the result on disk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.device import Device
from megatron.kernels.delta_rule import chunked_delta_rule, delta_rule_step
from megatron.kernels.recurrence import RecurrenceKernels, find_recurrence
from megatron.models.delta_net import GatedDeltaNet
from megatron.models.mamba import Mamba, scan, step
from megatron.models.plan import InitPlan
from megatron.models.recurrence import CausalConvolution, RecurrentMixer
from megatron.models.recurrent_plan import GatedDeltaNetPlan, MambaPlan
from megatron.parallel.build import BuildContext, Kernels
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize

DEVICE = Device.pick()
WHERE = DEVICE.torch_device
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
BF16, FP32 = torch.bfloat16, torch.float32
B, ALONE = 2, Layout.single().context
# Norms of errors, relative to the norms of results. Sequences never run the kernels in fp32.
OF_RESULTS, OF_GRADIENTS = 1e-2, 2e-2


@pytest.fixture(scope="module")
def kernels() -> RecurrenceKernels:
    choice = find_recurrence(WHERE)
    print(f"{choice.name}: {choice.reason}")
    if choice.kernels is None:
        pytest.skip(choice.reason)
    return choice.kernels


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(WHERE) for shape in shapes]


def scan_inputs(
    length: int, size: int, state: int, dtype: torch.dtype, heads: tuple[int, int] = (2, 4)
) -> dict[str, Tensor]:
    each, groups = (length, B, heads[0]), heads
    x, steps, b, c, rates = draw(
        length, (*each, heads[1], size), (*each, heads[1]), (*each, state), (*each, state), groups
    )
    return {
        "x": x.to(dtype),
        "steps": torch.nn.functional.softplus(steps - 3),
        "rates": -8 * rates.sigmoid() - 0.5,
        "b": b.to(dtype) / state**0.5,
        "c": c.to(dtype),
    }


def rule_inputs(length: int, keys: int, values: int, dtype: torch.dtype) -> dict[str, Tensor]:
    each = length, B
    query, key, value, decay, rate = draw(
        length, (*each, 4, keys), (*each, 4, keys), (*each, 8, values), (*each, 8), (*each, 8)
    )
    return {
        "query": query.to(dtype),
        "key": key.to(dtype),
        "value": value.to(dtype),
        "decay": -torch.nn.functional.softplus(decay - 2),
        "rate": rate.sigmoid(),
    }


def documents_of(length: int) -> Tensor:
    """Return documents of 1 to 200 tokens, which differ between samples."""
    generator = torch.Generator().manual_seed(length)
    rows = []
    for _ in range(B):
        sizes = torch.randint(1, 200, (length,), generator=generator)
        sizes[3] = 1
        rows.append(torch.repeat_interleave(torch.arange(length), sizes)[:length])
    return torch.stack(rows, dim=1).to(WHERE)


def with_gradients(
    function: Any, parts: dict[str, Tensor], state: Tensor | None, **options: Any
) -> dict[str, Tensor]:
    """Return the output, the states after it, and the gradients of all parts."""
    parts = {name: part.detach().clone().requires_grad_() for name, part in parts.items()}
    if state is not None:
        state = state.detach().clone().requires_grad_()
    out, after = function(*parts.values(), state=state, **options)
    weights, of_state = draw(1, tuple(out.shape), tuple(after.shape))
    ((out * weights.to(out.dtype)).sum() + (after * of_state).sum()).backward()
    found = {"out": out, "after": after, **{f"d {k}": part.grad for k, part in parts.items()}}
    return found if state is None else {**found, "d state": state.grad}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Print every error, and fail if any is above the tolerance."""
    errors = {
        name: float((found[name].double() - right).detach().norm() / right.detach().norm())
        for name, right in expected.items()
    }
    print({name: f"{error:.1e}" for name, error in errors.items()})
    for name, error in errors.items():
        assert found[name].isfinite().all(), name
        assert error < (OF_GRADIENTS if name.startswith("d ") else OF_RESULTS), (name, error)


def doubles(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.double() for name, part in parts.items()}


CASES = [(64, False, False), (997, True, False), (997, False, True), (4096, True, False)]


@pytest.mark.parametrize(("size", "state_size", "dtype"), [(64, 128, BF16), (128, 64, BF16)])
@pytest.mark.parametrize(("length", "has_documents", "has_state"), CASES)
def test_scan(
    kernels: RecurrenceKernels,
    size: int,
    state_size: int,
    dtype: torch.dtype,
    length: int,
    has_documents: bool,
    has_state: bool,
) -> None:
    parts = scan_inputs(length, size, state_size, dtype)
    state = draw(3, (B, 2, 4, size, state_size))[0] if has_state else None
    documents = documents_of(length) if has_documents else None
    found = with_gradients(kernels.scan, parts, state, documents=documents)
    assert found["out"].dtype == dtype
    assert found["after"].dtype == FP32
    wide = None if state is None else state.double()
    expected = with_gradients(scan, doubles(parts), wide, documents=documents, chunk=64)
    compare(found, expected)


@pytest.mark.parametrize(("keys", "values", "dtype"), [(128, 128, BF16), (64, 64, BF16)])
@pytest.mark.parametrize(("length", "has_documents", "has_state"), CASES)
def test_delta_rule(
    kernels: RecurrenceKernels,
    keys: int,
    values: int,
    dtype: torch.dtype,
    length: int,
    has_documents: bool,
    has_state: bool,
) -> None:
    parts = rule_inputs(length, keys, values, dtype)
    state = draw(3, (B, 8, keys, values))[0] if has_state else None
    documents = documents_of(length) if has_documents else None
    found = with_gradients(kernels.delta_rule, parts, state, documents=documents)
    assert found["out"].dtype == dtype
    assert found["after"].dtype == FP32
    wide = None if state is None else state.double()
    expected = with_gradients(
        chunked_delta_rule, doubles(parts), wide, documents=documents, chunk=64
    )
    compare(found, expected)


@pytest.mark.parametrize("size", [64, 128])
def test_single_tokens(kernels: RecurrenceKernels, size: int) -> None:
    with torch.no_grad():
        parts = list(scan_inputs(1, size, 128, FP32).values())
        (state,) = draw(3, (B, 2, 4, size, 128))
        found, expected = kernels.step(*parts, state), step(*parts, state)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        parts = list(rule_inputs(1, size, size, FP32).values())
        (state,) = draw(3, (B, 8, size, size))
        found = kernels.delta_rule_step(*parts, state=state)
        expected = delta_rule_step(*parts, state=state)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("taps", [3, 4])
def test_convolution(
    kernels: RecurrenceKernels, has_state: bool, has_bias: bool, taps: int
) -> None:
    layer = CausalConvolution(90, taps, BuildContext(Layout.single(), WHERE), bias=has_bias)
    initialize(layer.named_parameters(), seed=1)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(BF16)
    x, state, weights = draw(2, (301, B, 90), (B, taps - 1, 90), (301, B, 90))
    results = []
    for chosen in (kernels, None):
        layer.zero_grad()
        tokens = x.to(BF16).requires_grad_()
        before = state.to(BF16).requires_grad_() if has_state else None
        out, after = layer(tokens, before, None, slice(None), chosen)
        (out * weights).sum().backward()
        found = {"out": out, "after": after, "d x": tokens.grad}
        found |= {f"d {name}": each.grad for name, each in layer.named_parameters()}
        results.append(found if before is None else {**found, "d state": before.grad})
    expected = doubles(results[1])
    compare(results[0], expected)
    assert torch.equal(results[0]["after"], results[1]["after"])


@pytest.mark.parametrize(("rows", "size", "gate_first"), [(2, 512, True), (8, 128, False)])
def test_gated_norm(kernels: RecurrenceKernels, rows: int, size: int, gate_first: bool) -> None:
    x, gate, weight, weights = draw(
        1, (301, B, rows, size), (301, B, rows, size), (rows, size), (301, B, rows, size)
    )
    weight = weight if gate_first else weight[0]
    results = []
    for dtype in (BF16, torch.float64):
        parts = [part.to(BF16).to(dtype).requires_grad_() for part in (x, gate, weight)]
        if dtype == BF16:
            out = kernels.gated_norm(*parts, 1e-5, gate_first=gate_first)
        else:
            values, gates = parts[0], torch.nn.functional.silu(parts[1])
            out = values * gates if gate_first else values
            out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * parts[2]
            out = out if gate_first else out * gates
        (out * weights).sum().backward()
        names = ("d x", "d gate", "d weight")
        found = {name: part.grad for name, part in zip(names, parts, strict=True)}
        results.append({"out": out, **found})
    compare(results[0], results[1])


def mixer(kind: str, kernels: RecurrenceKernels | None) -> RecurrentMixer:
    """Return a mixer in bf16 with random weights that runs these kernels."""
    choice = replace(Kernels().recurrence, kernels=kernels)
    chosen = replace(Kernels(), recurrence=choice)
    context = BuildContext(Layout.single(), WHERE, dtype=BF16, kernels=chosen)
    common = {"hidden": 256, "init": InitPlan(0.06, 2), "epsilon": 1e-5}
    made: RecurrentMixer
    if kind == "mamba":
        plan = MambaPlan(heads=8, head_size=64, groups=2, state=128, **common)
        made = Mamba(plan, context)
    else:
        heads = {"key_heads": 4, "value_heads": 8, "key_size": 128, "value_size": 128}
        made = GatedDeltaNet(GatedDeltaNetPlan(**heads, **common), context)
    initialize(made.named_parameters(), seed=3)
    return made


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("kind", ["mamba", "delta net"])
def test_mixers(kernels: RecurrenceKernels, kind: str, has_documents: bool) -> None:
    """A bf16 mixer is at most about twice as far from the fp32 reference as the bf16 reference."""
    documents = documents_of(500) if has_documents else None
    (x,) = draw(2, (500, B, 256))
    results = []
    for chosen, dtype in ((kernels, BF16), (None, BF16), (None, FP32)):
        made = mixer(kind, chosen)
        for parameter in made.parameters():
            parameter.data = parameter.data.to(dtype)
        tokens = x.to(BF16).to(dtype).requires_grad_()
        projected = made.input(tokens).unflatten(2, (-1, made._group))
        out, (_, states) = made.mix(projected, None, documents, ALONE)
        out = made.output(out.flatten(2))
        out.float().square().sum().backward()
        found = {"out": out, "states": states, "d x": tokens.grad}
        results.append(found | {f"d {n}": each.grad for n, each in made.named_parameters()})
    fused, plain, exact = results
    for name, right in exact.items():
        ours, theirs = (
            float((found[name].float() - right.float()).norm() / right.norm())
            for found in (fused, plain)
        )
        print(f"{name}: {ours:.1e}, reference in bf16: {theirs:.1e}")
        # The gradient of the time steps' biases is a sum that nearly cancels.
        most = 2.5 if name == "d time_step" else 2
        assert ours < max(most * theirs, 0.02), (name, ours, theirs)


@pytest.mark.parametrize("kind", ["mamba", "delta net"])
def test_mixers_continue_from_their_states(kernels: RecurrenceKernels, kind: str) -> None:
    made, reference = mixer(kind, kernels), mixer(kind, None)
    (x,) = draw(2, (303, B, 256))
    with torch.no_grad():
        projected = made.input(x.to(BF16)).unflatten(2, (-1, made._group))
        expected, last = reference.mix(projected, None, None, ALONE)
        outputs, states = [], None
        for start, end in ((0, 130), (130, 300), (300, 301), (301, 302), (302, 303)):
            out, states = made.mix(projected[start:end], states, None, ALONE)
            outputs.append(out)
    results = {"out": torch.cat(outputs), "states": states[1], "convolution": states[0]}
    compare(
        results,
        doubles({"out": expected, "states": last[1], "convolution": last[0]}),
    )


@pytest.mark.parametrize("kind", ["mamba", "delta net"])
def test_graphs_replay_with_other_documents(kernels: RecurrenceKernels, kind: str) -> None:
    made = mixer(kind, kernels)
    parameters = list(made.parameters())
    x = torch.zeros(500, B, 256, dtype=BF16, device=WHERE, requires_grad=True)
    documents = torch.zeros(500, B, dtype=torch.int64, device=WHERE)

    def passes() -> list[Tensor]:
        projected = made.input(x).unflatten(2, (-1, made._group))
        out = made.output(made.mix(projected, None, documents, ALONE)[0].flatten(2))
        return [out, *torch.autograd.grad(out.float().square().sum(), [x, *parameters])]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            passes()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded = passes()
    for seed in (5, 6):
        x.data.copy_(draw(seed, (500, B, 256))[0])
        documents.copy_(documents_of(500) // seed)
        graph.replay()
        torch.cuda.synchronize()
        for ours, theirs in zip(recorded, passes(), strict=True):
            assert torch.equal(ours, theirs)
