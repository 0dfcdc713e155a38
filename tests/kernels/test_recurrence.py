"""Recurrent mixers on the package flash-linear-attention, whose functions are replaced here.

The stand-ins have the documented interfaces of fla-core 0.6 and compute token by token.
`tests/gpu/test_linear_mixers.py` runs the package itself.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.kernels import recurrence
from megatron.kernels.delta_rule import chunked_delta_rule, delta_rule_step
from megatron.kernels.recurrence import (
    RecurrenceChoice,
    RecurrenceKernels,
    choose_recurrence,
)
from megatron.models.delta_net import GatedDeltaNet
from megatron.models.mamba import Mamba, scan, step
from megatron.models.plan import InitPlan
from megatron.models.recurrence import RecurrentMixer
from megatron.models.recurrent_plan import GatedDeltaNetPlan, MambaPlan
from megatron.parallel.build import BuildContext, Kernels
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize
from tests.models.small import config as model_config

B, GROUPS, HEADS, P, N = 2, 3, 2, 7, 5
KEY_HEADS, SERVES, E, D = 2, 3, 5, 7
CPU, ALONE = torch.device("cpu"), Layout.single().context


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """[B, T, H, K], [B, T, H, V], [B, T, H]; states [B, H, K, V], or [B, H, V, K] if asked."""
    assert q.shape == k.shape
    assert v.shape[:3] == g.shape[:3] == q.shape[:3]
    g = g.unsqueeze(-1) if g.dim() == 3 else g
    shape = (*q.shape[::2], q.shape[3], v.shape[3])
    state = v.new_zeros(shape)
    if initial_state is not None:
        state = initial_state.mT if state_v_first else initial_state
    assert state.shape == shape
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t, :, :, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None]
        read = (q[:, t, :, :, None] * state).sum(2)
        outputs.append(read * (q.shape[3] ** -0.5 if scale is None else scale))
    final = (state.mT if state_v_first else state) if output_final_state else None
    return torch.stack(outputs, 1), final


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
    """The same with decays [B, T, H, K]."""
    assert g.shape == q.shape
    return simple_gla(q, k, v, g, **options)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """[B, T, H, K], [B, T, HV, V], [B, T, HV]; states [B, HV, K, V]."""
    assert q.shape == k.shape
    assert v.shape[:3] == g.shape[:3] == beta.shape
    if g.dim() == 3:
        g = g.unsqueeze(-1)
    serves = v.shape[2] // q.shape[2]
    assert serves * q.shape[2] == v.shape[2]
    if use_qk_l2norm_in_kernel:
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    q, k = (part.repeat_interleave(serves, dim=2) for part in (q, k))
    state = v.new_zeros(*v.shape[::2], q.shape[3], v.shape[3])
    if initial_state is not None:
        assert initial_state.shape == state.shape
        state = initial_state
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t, :, :, None].exp() * state
        wrong = v[:, t] - (k[:, t, :, :, None] * state).sum(2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * wrong).unsqueeze(2)
        outputs.append((q[:, t, :, :, None] * state).sum(2))
    out = torch.stack(outputs, 1) * (q.shape[3] ** -0.5 if scale is None else scale)
    return out, state if output_final_state else None


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    **options: Any,
) -> Any:
    """The same, with decays by channel before the rates."""
    assert g is not None
    assert beta is not None
    assert gk is gv is None
    return gated_delta_rule(q, k, v, g, beta, **options)


def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    """The same with decays [B, T, HV, K]."""
    assert g.shape == (*v.shape[:3], q.shape[3])
    return gated_delta_rule(q, k, v, g, beta, **options)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, None]:
    """[B, T, D], [D, W], [D]; states [B, D, W], the first of which is not read."""
    width = weight.shape[1]
    if initial_state is None:
        initial_state = x.new_zeros(len(x), x.shape[2], width)
    assert initial_state.shape == (len(x), x.shape[2], width)
    padded = torch.cat((initial_state[:, :, 1:], x.mT), dim=2)
    out = F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight)).mT
    assert activation in (None, "silu")
    return F.silu(out) if activation else out, None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    bias: None,
    z: Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> Tensor:
    """[..., D], [D], [..., D]; normalizes groups of channels."""
    assert x.shape == z.shape
    assert weight.shape == x.shape[-1:]
    if not norm_before_gate:
        x = x * F.silu(z)
    groups = x.unflatten(-1, (-1, group_size))
    x = (groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight
    return x * F.silu(z) if norm_before_gate else x


class StandIns(RecurrenceKernels):
    """Replaces the package for sequences of any length and number format."""

    @staticmethod
    def takes(projected: Tensor, states: tuple[Tensor, ...] | None) -> bool:
        return True


KERNELS = StandIns(
    *(simple_gla, simple_gla),
    *(gated_delta_rule, recurrent_gated_delta_rule),
    *(causal_conv1d, rms_norm),
)


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def scan_inputs(length: int) -> list[Tensor]:
    each = (length, B, GROUPS)
    x, steps, b, c, rates = draw(
        length, (*each, HEADS, P), (*each, HEADS), (*each, N), (*each, N), (GROUPS, HEADS)
    )
    return [x, steps.exp(), -rates.exp(), b, c]


def rule_inputs(length: int) -> list[Tensor]:
    each, heads = (length, B), KEY_HEADS * SERVES
    query, key, value, decay, rate = draw(
        length,
        (*each, KEY_HEADS, E),
        (*each, KEY_HEADS, E),
        (*each, heads, D),
        (*each, heads),
        (*each, heads),
    )
    return [query, key, value, -decay.exp(), rate.sigmoid()]


def ends_of(length: int) -> Tensor:
    """Return documents that differ between samples, some of a single token."""
    first, second = torch.arange(length) // 4, (torch.arange(length) + 5) // 6
    return torch.stack((first, second), dim=1)


def gradients(function: Any, parts: list[Tensor], **options: Any) -> list[Tensor]:
    """Return outputs, states and the gradients of all parts."""
    parts = [part.detach().requires_grad_() for part in parts]
    out, state = function(*parts, **options)
    (weights,) = draw(1, tuple(out.shape))
    ((out * weights).sum() + state.sin().sum()).backward()
    return [out, state, *(part.grad for part in parts)]


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize(("has_documents", "has_state"), [(0, 0), (1, 0), (0, 1)])
def test_scans_equal_the_reference(length: int, has_documents: bool, has_state: bool) -> None:
    parts = scan_inputs(length)
    state = draw(3, (B, GROUPS, HEADS, P, N))[0] if has_state else None
    others = {"state": state, "documents": ends_of(length) if has_documents else None}
    expected = gradients(scan, parts, **others, chunk=4)
    torch.testing.assert_close(gradients(KERNELS.scan, parts, **others), expected)
    by_channel = replace(KERNELS, simple_gla=recurrence._by_channel(gla))
    torch.testing.assert_close(gradients(by_channel.scan, parts, **others), expected)


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_delta_rules_equal_the_reference(length: int, has_documents: bool, has_state: bool) -> None:
    parts = rule_inputs(length)
    state = draw(3, (B, KEY_HEADS * SERVES, E, D))[0] if has_state else None
    others = {"state": state, "documents": ends_of(length) if has_documents else None}
    expected = gradients(chunked_delta_rule, parts, **others, chunk=4)
    torch.testing.assert_close(gradients(KERNELS.delta_rule, parts, **others), expected)
    by_channel = replace(KERNELS, gated_delta_rule=recurrence._by_channel(kda))
    torch.testing.assert_close(gradients(by_channel.delta_rule, parts, **others), expected)


def test_single_tokens_equal_the_reference() -> None:
    (state,) = draw(5, (B, GROUPS, HEADS, P, N))
    parts = scan_inputs(1)
    torch.testing.assert_close(KERNELS.step(*parts, state), step(*parts, state))
    (state,) = draw(5, (B, KEY_HEADS * SERVES, E, D))
    query, key, value, decay, rate = rule_inputs(1)
    found = KERNELS.delta_rule_step(query, key, value, decay, rate, state=state)
    torch.testing.assert_close(found, delta_rule_step(query, key, value, decay, rate, state=state))


INIT = InitPlan(0.3, 2)
PLANS = {
    "mamba": MambaPlan(
        hidden=10, init=INIT, heads=6, head_size=P, groups=3, state=N, epsilon=1e-5, chunk=4
    ),
    "delta net": GatedDeltaNetPlan(
        hidden=10,
        init=INIT,
        key_heads=KEY_HEADS,
        value_heads=KEY_HEADS * SERVES,
        key_size=E,
        value_size=D,
        epsilon=1e-5,
        chunk=4,
    ),
}


def mixer(kind: str, kernels: RecurrenceKernels | None) -> RecurrentMixer:
    """Return a mixer with random weights that runs these kernels."""
    choice = RecurrenceChoice("stand-ins", "", kernels)
    context = BuildContext(Layout.single(), kernels=replace(Kernels(), recurrence=choice))
    plan = PLANS[kind]
    made = Mamba(plan, context) if isinstance(plan, MambaPlan) else None
    made = made or GatedDeltaNet(plan, context)
    initialize(made.named_parameters(), seed=3)
    return made


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("kind", PLANS)
def test_mixers_equal_the_references(kind: str, has_documents: bool) -> None:
    results = []
    for kernels in (KERNELS, None):
        made = mixer(kind, kernels)
        (x,) = draw(2, (9, B, 10))
        x = x.float().requires_grad_()
        projected = made.input(x).unflatten(2, (-1, made._group))
        out, states = made.mix(projected, None, ends_of(9) if has_documents else None, ALONE)
        made.output(out.flatten(2)).square().sum().backward()
        results.append([out, *states, x.grad, *(p.grad for p in made.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", PLANS)
def test_mixers_continue_from_their_states(kind: str) -> None:
    made, reference = mixer(kind, KERNELS), mixer(kind, None)
    (x,) = draw(2, (12, B, 10))
    projected = made.input(x.float()).unflatten(2, (-1, made._group)).detach()
    with torch.no_grad():
        expected, last = reference.mix(projected, None, None, ALONE)
        outputs, states = [], None
        for start, end in ((0, 5), (5, 11), (11, 12)):
            out, states = made.mix(projected[start:end], states, None, ALONE)
            outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, last, rtol=1e-4, atol=1e-5)


def test_kernels_run_in_16_bits_for_long_sequences_and_single_tokens() -> None:
    states = (torch.zeros(1),)
    for length, has_states, is_taken in (
        (64, False, True),
        (63, False, False),
        (1, False, False),
        (1, True, True),
        (2, True, False),
    ):
        tokens = torch.zeros(length, 1, 4, dtype=torch.bfloat16)
        assert RecurrenceKernels.supports(tokens, states if has_states else None) == is_taken
        assert not RecurrenceKernels.supports(tokens.float(), states if has_states else None)


def test_compilers_trace_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(64, 1, 4, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not RecurrenceKernels.supports(tokens, None)


HYBRID = {"hybrid_layer_pattern": "M*", "num_layers": 2, "mamba_num_heads": 4}
BF16 = PrecisionConfig(bf16=True)


def pretend(
    monkeypatch: pytest.MonkeyPatch, *, release: str, triton: str, capability: tuple[int, int]
) -> None:
    """Pretend that this machine has a GPU, the package and Triton."""
    device = SimpleNamespace(is_gpu=True, capability=capability)
    functions = (
        *("chunk_simple_gla", "fused_recurrent_simple_gla"),
        *("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        *("chunk_gla", "chunk_kda", "causal_conv1d", "rmsnorm_fn"),
    )
    paths = ("triton", "fla", "fla.ops", "fla.ops.simple_gla", "fla.ops.gated_delta_rule")
    paths += ("fla.ops.gla", "fla.ops.kda", "fla.modules", "fla.modules.causal_conv1d")
    for path in (*paths, "fla.modules.norm", "fla.modules.norm.layernorm_gated"):
        module = ModuleType(path)
        vars(module).update({name: name for name in functions}, __version__=triton)
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(recurrence, "Device", lambda _: device)
    monkeypatch.setattr(recurrence, "version", lambda _: release)


@pytest.mark.parametrize(
    ("triton", "capability", "scan_name"),
    [
        ("3.6.0", (9, 0), "chunk_gla"),
        ("3.7.1", (9, 0), "chunk_simple_gla"),
        ("3.10.0+git1", (9, 0), "chunk_simple_gla"),
        ("3.3.1", (9, 0), "chunk_simple_gla"),
        ("3.6.0", (8, 0), "chunk_simple_gla"),
        ("3.6.0", (10, 0), "chunk_simple_gla"),
    ],
)
def test_functions_follow_triton_and_the_gpu(
    triton: str,
    capability: tuple[int, int],
    scan_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, release="0.6.0", triton=triton, capability=capability)
    choice = choose_recurrence(model_config(**HYBRID), BF16, CPU)
    assert choice.kernels is not None
    assert choice.name == "fla-core 0.6.0"
    assert choice.reason.startswith(scan_name)
    usual = scan_name == "chunk_simple_gla"
    assert (choice.kernels.simple_gla == scan_name) == usual  # otherwise a wrapper of chunk_gla
    assert (choice.kernels.gated_delta_rule == "chunk_gated_delta_rule") == usual
    assert ("need Triton 3.7.1" not in choice.reason) == usual


def test_the_reason_says_why_the_package_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = model_config(**HYBRID)

    def reason(model: Any = hybrid, precision: PrecisionConfig = BF16) -> str:
        choice = choose_recurrence(model, precision, CPU)
        assert choice.kernels is None
        assert choice.name == "PyTorch operations"
        return choice.reason

    assert "CPU" in reason()
    gpu = {"triton": "3.7.1", "capability": (9, 0)}
    pretend(monkeypatch, release="0.6.0", **gpu)
    assert "no recurrent layers" in reason(model_config())
    assert "TF32" in reason(precision=PrecisionConfig())
    assert "--mamba-head-dim 24" in reason(replace(hybrid, mamba_head_dim=24))
    assert "--mamba-state-dim 512" in reason(replace(hybrid, mamba_state_dim=512))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert "--deterministic-mode" in reason()
    pretend(monkeypatch, release="0.5.2", **gpu)
    assert "0.5.2 is older than 0.6" in reason()
    pretend(monkeypatch, release="0.6.0", **gpu)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "fla-core 0.6.0 cannot be imported: import of triton" in reason()
    monkeypatch.undo()
    monkeypatch.setattr(
        recurrence, "Device", lambda _: SimpleNamespace(is_gpu=True, capability=(9, 0))
    )
    assert "pip install fla-core" in reason()
