"""Mixture layers against an fp64 loop over tokens and experts: outputs and all gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.stages import whole_model
from megatron.models.arithmetic import (
    count_active_parameters,
    count_parameters,
    count_part_experts,
    count_part_matrices,
    count_part_parameters,
    largest_matrix,
)
from megatron.models.costs import MicroBatch, WeightSplit
from megatron.models.gpt import GPTModel
from megatron.models.mixture import Mixture
from megatron.models.mixture_plan import MixturePlan, RouterPlan
from megatron.models.plan import InitPlan, MLPPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.expert_linear import ExpertLinear
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout
from megatron.parallel.pipeline.weight_gradients import WeightGradientQueue
from tests.models import naive_mixture as naive
from tests.models.small import config, kept_for_backward, new_context, plan
from tests.parallel.buffers import new_buffer

SEQUENCE, BATCH, HIDDEN, EXPERTS = 7, 3, 8, 5
INIT = InitPlan(0.02, 1)
GATED = MLPPlan(hidden=HIDDEN, init=INIT, inner=6, activation="swiglu", gated=True, bias=False)
PLAIN = replace(GATED, activation="gelu", gated=False, bias=True)
ROUTER = RouterPlan(hidden=HIDDEN, init=INIT, experts=EXPERTS, chosen=2)


def mixture_plan(expert=GATED, shared=None, gate=False, weighs=False, weighs_input=False, **router):
    return MixturePlan(
        hidden=HIDDEN,
        init=INIT,
        bias=expert.bias,
        router=replace(ROUTER, **router),
        expert=expert,
        shared=shared,
        gates_shared=gate,
        weighs_shared=weighs,
        weighs_input=weighs_input,
    )


SHARED, PLAIN_SHARED = replace(GATED, inner=10), replace(PLAIN, inner=10)
PLANS = {
    "gated": mixture_plan(),
    "biases": mixture_plan(PLAIN),
    "gated with biases": mixture_plan(replace(GATED, bias=True)),
    "shared": mixture_plan(shared=SHARED),
    "shared behind a gate": mixture_plan(shared=SHARED, gate=True),
    "shared with biases behind a gate": mixture_plan(PLAIN, PLAIN_SHARED, gate=True),
    "residual": mixture_plan(shared=GATED, weighs=True),
    "residual with biases": mixture_plan(PLAIN, PLAIN, weighs=True, chosen=1, scores_all=True),
    "residual, dropped": mixture_plan(shared=GATED, weighs=True, capacity=0.25),
    "one of five": mixture_plan(chosen=1, scores_all=True),
    "every expert": mixture_plan(chosen=EXPERTS),
    "a single expert": mixture_plan(experts=1, chosen=1),
    "dropped": mixture_plan(PLAIN, capacity=0.5),
    "sigmoid": mixture_plan(score="sigmoid", scale=2.5),
    "weighted inputs": mixture_plan(
        shared=SHARED,
        weighs_input=True,
        chosen=1,
        score="sigmoid",
        balancing=(("aux_loss", 0.2),),
    ),
    "weighted inputs, dropped": mixture_plan(
        PLAIN, weighs_input=True, chosen=1, score="sigmoid", capacity=0.5
    ),
    "losses": mixture_plan(z_loss=0.1, balancing=(("aux_loss", 0.2),)),
}


def build(layer, dtype=torch.float32, **options):
    torch.manual_seed(1)
    context = BuildContext(Layout.single(), dtype=dtype, **options)
    mixture = Mixture(layer, context)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixture, context


def tokens(dtype=torch.float32):
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2))
    return x.to(dtype)


PULL = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3))


def weights_of(parameters, prefix, expert=None):
    """Return the weights that `naive.mlp` needs of an expert or of the shared experts."""
    found = {}
    for name, key in (("up", "up"), ("down", "down")):
        for kind in ("weight", "bias"):
            tensor = parameters.get(f"{prefix}.{name}.{kind}")
            if tensor is None:
                continue
            part = tensor if expert is None else tensor[expert]
            rows = part.reshape(-1, part.shape[-1]) if kind == "weight" else part.flatten()
            found[key if kind == "weight" else f"{key}_bias"] = rows
    return found


def loop(layer, parameters, x):
    """Return outputs [T, h] and the sum of the router's losses with their coefficients."""
    logits = (x @ parameters["router.weight"].t()).flatten(0, 1)
    assignment = naive.assign(logits, layer.router)
    if layer.router.capacity is not None:
        assignment = naive.without_overflow(assignment, layer.router)
    out = []
    for token, factors in zip(x.flatten(0, 1), assignment, strict=True):
        total = torch.zeros_like(token)
        for expert, factor in factors.items():
            weights = weights_of(parameters, "experts", expert)
            if layer.weighs_input:
                total = total + naive.mlp(factor * token, weights, layer.expert)
            else:
                total = total + factor * naive.mlp(token, weights, layer.expert)
        if layer.shared is not None:
            shared = naive.mlp(token, weights_of(parameters, "shared"), layer.shared)
            if layer.gates_shared:
                shared = shared * torch.sigmoid(parameters["shared_gate"] @ token)
            if layer.weighs_shared:
                scores = parameters["coefficient.weight"] @ token + parameters["coefficient.bias"]
                of_experts, of_shared = scores.exp() / scores.exp().sum()
                total, shared = total * of_experts, shared * of_shared
            total = total + shared
        out.append(total)
    loss = torch.zeros((), dtype=x.dtype)
    for _, coefficient in layer.router.balancing:
        loss = loss + coefficient * naive.balancing_loss(logits, layer.router)
    if layer.router.z_loss is not None:
        loss = loss + layer.router.z_loss * naive.z_loss(logits)
    return torch.stack(out).view_as(x), loss


def expected(layer, mixture, x):
    """Return the outputs, the input's gradient and every parameter's gradient, in fp64."""
    named = mixture.named_parameters()
    parameters = {n: p.detach().double().requires_grad_() for n, p in named}
    x = x.detach().double().requires_grad_()
    out, loss = loop(layer, parameters, x)
    ((out * PULL.double()).sum() + loss).backward()
    return out.detach(), x.grad, {name: p.grad for name, p in parameters.items()}


def same(ours, theirs, tolerance, what):
    theirs = torch.zeros_like(ours, dtype=torch.float64) if theirs is None else theirs
    error = (ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-3)
    assert error <= tolerance, (what, error)


def check(layer, mixture, gradient_of, tolerance, dtype=torch.float32, backward=None):
    out, x_grad, gradients = expected(layer, mixture, tokens(dtype))
    x = tokens(dtype).requires_grad_()
    ours = mixture(x)
    assert ours.dtype == dtype
    (backward or torch.Tensor.backward)((ours * PULL.to(dtype)).sum())
    same(ours, out, tolerance, "outputs")
    same(x.grad, x_grad, tolerance, "inputs")
    for name, parameter in mixture.named_parameters():
        same(gradient_of(parameter).view_as(parameter), gradients[name], tolerance, name)


@pytest.mark.parametrize("layer", PLANS.values(), ids=PLANS)
def test_outputs_and_gradients(layer):
    mixture, _ = build(layer)
    check(layer, mixture, lambda parameter: parameter.grad, 1e-5)


@pytest.mark.parametrize("name", ["shared behind a gate", "gated with biases"])
def test_16_bits_stay_close(name):
    mixture, _ = build(PLANS[name], torch.bfloat16)
    check(PLANS[name], mixture, lambda parameter: parameter.grad, 2e-2, torch.bfloat16)


@pytest.mark.parametrize("layer", [PLANS["shared"], PLANS["biases"], PLANS["dropped"]])
def test_gradients_go_to_their_slots(layer):
    mixture, context = build(layer)
    buffer = new_buffer(mixture.named_parameters(), Layout.single(), accumulate_in_fp32=True)
    context.registry.bind_slots(buffer)

    def backward(loss):
        buffer.zero()
        with buffer.micro_batch(is_last=True):
            loss.backward()

    check(layer, mixture, buffer.gradient, 1e-5, backward=backward)


def test_a_second_micro_batch_adds_to_the_slots():
    mixture, context = build(PLANS["biases"])
    buffer = new_buffer(mixture.named_parameters(), Layout.single(), accumulate_in_fp32=True)
    context.registry.bind_slots(buffer)
    buffer.zero()
    once = {}
    for is_last in (False, True):
        with buffer.micro_batch(is_last=is_last):
            (mixture(tokens()) * PULL).sum().backward()
        if not is_last:
            once = {n: buffer.gradient(p).clone() for n, p in mixture.named_parameters()}
    for name, parameter in mixture.named_parameters():
        torch.testing.assert_close(buffer.gradient(parameter), 2 * once[name])


@pytest.mark.parametrize("slots", [False, True], ids=["autograd", "slots"])
@pytest.mark.parametrize("layer", [PLANS["shared"], PLANS["dropped"]])
def test_weight_gradients_may_wait(layer, slots):
    queue = WeightGradientQueue()
    mixture, context = build(layer, weight_gradients=queue)
    deferred = {id(p) for p in context.registry.deferrable_weights}
    assert {id(mixture.experts.up.weight), id(mixture.experts.down.weight)} <= deferred
    if slots:
        buffer = new_buffer(mixture.named_parameters(), Layout.single(), accumulate_in_fp32=True)
        context.registry.bind_slots(buffer)
        buffer.zero()

    def backward(loss):
        with queue.collecting("pass"):
            if slots:
                with buffer.micro_batch(is_last=True):
                    loss.backward()
            else:
                loss.backward()
        grad = mixture.experts.up.weight.grad
        assert grad is None or not grad.any()
        queue.run("pass")

    gradient = buffer.gradient if slots else lambda parameter: parameter.grad
    check(layer, mixture, gradient, 1e-5, backward=backward)


def test_experts_without_tokens_add_nothing():
    """All tokens go to experts 0 and 1: the other experts' gradients exist and are zero."""
    mixture, _ = build(PLANS["biases"])
    with torch.no_grad():
        mixture.router.weight[2:] = 0
        mixture.router.weight[:2] = 1
    x = tokens().abs().requires_grad_()
    (mixture(x) * PULL).sum().backward()
    for parameter in mixture.experts.parameters():
        assert parameter.grad[:2].any()
        assert not parameter.grad[2:].any()


def test_a_router_that_sends_nothing_away_leaves_zeros():
    """All choices but one are dropped: the other outputs are 0, not uninitialized memory."""
    layer = mixture_plan(chosen=1, scores_all=True, capacity=0.01)
    mixture, _ = build(layer)
    out = mixture(tokens()).flatten(0, 1)
    assert out.any(1).sum() <= EXPERTS
    check(layer, build(layer)[0], lambda parameter: parameter.grad, 1e-5)


def test_tokens_do_not_change_each_other():
    mixture, _ = build(PLANS["shared behind a gate"])
    with torch.no_grad():
        together = mixture.eval()(tokens())
        alone = torch.stack([mixture(tokens()[i : i + 1])[0] for i in range(SEQUENCE)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


NETWORKS = {
    "plain": {},
    "gated, shared": {"swiglu": True, "moe_shared_expert_intermediate_size": 24},
    "gate": {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
    "residual": {"mlp_type": "residual", "moe_ffn_hidden_size": 12},
    "own width": {"moe_ffn_hidden_size": 12, "add_bias_linear": False},
    "one dense layer": {"moe_layer_freq": "[0]+[1]*2"},
    "biased": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}


@pytest.mark.parametrize("flags", NETWORKS.values(), ids=NETWORKS)
def test_counts_are_those_of_the_built_model(flags):
    network = config(num_experts=(4,), **flags)
    record = plan(network)
    model = GPTModel(record, new_context(network, device="meta"))
    assert count_parameters(record) == sum(p.numel() for p in model.parameters())
    kinds = [type(layer.mlp) is Mixture for layer in model.layers.values()]
    assert kinds == [layer.mlp.kind == "mixture" for layer in record.layers]
    products = [m for m in model.layers.modules() if isinstance(m, (Linear, ExpertLinear))]
    matrices = sum(module.weight.numel() for module in products)
    assert count_part_matrices(record, whole_model(3), WeightSplit()) == matrices


GRIDS = [
    (2, {"tensor": 2}),
    (4, {"expert": 2}),
    (4, {"tensor": 2, "expert": 2}),
    (4, {"tensor": 2, "expert": 4, "expert_tensor": 1}),
    (8, {"tensor": 4, "expert": 2, "expert_tensor": 1}),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("flags", NETWORKS.values(), ids=NETWORKS)
def test_counts_are_those_of_each_process(flags, grid):
    world, sizes = grid
    network, layout = config(num_experts=(4,), **flags), Layout.at(world - 1, world, **sizes)
    record = plan(network)
    split = WeightSplit(
        tensor=layout.tensor.size,
        expert=layout.expert.size,
        expert_tensor=layout.expert_tensor.size,
    )
    model = GPTModel(record, new_context(network, layout=layout, device="meta"))
    whole = whole_model(3)
    held = list(model.parameters())
    assert count_part_parameters(record, whole, split) == sum(p.numel() for p in held)
    experts = sum(p.numel() for p in held if p.spec.is_expert)
    assert count_part_experts(record, whole, split) == experts > 0
    products = [m for m in model.layers.modules() if isinstance(m, (Linear, ExpertLinear))]
    matrices = [module.weight.numel() for module in products]
    assert count_part_matrices(record, whole, split) == sum(matrices)
    assert largest_matrix(record, split) == max(*matrices, model.embedding.word.weight.numel())


def test_active_parameters_are_those_of_one_token():
    """Count a dense network as wide as the experts that a token uses, plus the router."""
    network = config(
        num_experts=(4,), moe_router_topk=2, moe_ffn_hidden_size=8, add_bias_linear=False
    )
    dense = config(ffn_hidden_size=16, add_bias_linear=False)
    active = count_active_parameters(plan(network))
    assert active == count_parameters(plan(dense)) + 3 * 4 * 16
    assert active < count_parameters(plan(network))
    assert count_active_parameters(plan(dense)) == count_parameters(plan(dense))


@pytest.mark.parametrize(
    "name", ["gated", "shared behind a gate", "residual", "one of five", "every expert"]
)
def test_operations_are_those_that_pytorch_counts(name):
    """Forward is a third of the total; only the experts that a token uses count."""
    mixture, _ = build(PLANS[name])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixture.eval()(tokens())
    work = Mixture.flops(PLANS[name], SEQUENCE, 0)
    # PyTorch also counts the weighted sum of several rows as a product.
    chosen = PLANS[name].router.chosen
    combined = 2 * SEQUENCE * BATCH * chosen * HIDDEN if chosen > 1 else 0
    assert counter.get_total_flops() == work.products * BATCH // 3 + combined


@pytest.mark.parametrize("name", ["gated", "shared", "one of five", "every expert"])
def test_the_estimate_of_activations_is_close_to_what_autograd_keeps(name):
    mixture, _ = build(PLANS[name])
    x = tokens().requires_grad_()
    with kept_for_backward(mixture) as kept:
        mixture(x)
    held = sum(size for address, size in kept.items() if address != x.data_ptr())
    counted = Mixture.activation_bytes(
        PLANS[name], MicroBatch(sequences=BATCH, length=SEQUENCE, width=4)
    )
    assert held == pytest.approx(counted, rel=0.25)
