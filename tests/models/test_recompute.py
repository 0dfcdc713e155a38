"""The recomputation plan: which layers run together and which are recomputed."""

import weakref
from dataclasses import replace

import pytest
import torch

from megatron.config.training import TrainingOptions
from megatron.models.costs import MicroBatch
from megatron.models.recompute import (
    LayerGroup,
    RecomputePlan,
    discarding_output,
    layer_groups,
)
from tests.models.small import batch, gpt, loss_and_gradients

MIXTURE = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_experts": (4,),
    "moe_layer_freq": "([0]+[1]*2)",
    "moe_shared_expert_intermediate_size": 8,
    "moe_aux_loss_coeff": (1e-2,),
    "swiglu": True,
    "add_bias_linear": False,
}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (None, [(range(2, 7), False)]),
        (RecomputePlan("selective"), [(range(2, 7), False)]),
        (
            RecomputePlan("full", "uniform", 2),
            [(range(2, 4), True), (range(4, 6), True), (range(6, 7), True)],
        ),
        (
            RecomputePlan("full", "block", 2),
            [(range(2, 3), True), (range(3, 4), True), (range(4, 7), False)],
        ),
        (RecomputePlan("full", "block", 5), [(range(i, i + 1), True) for i in range(2, 7)]),
    ],
)
def test_groups(plan, expected):
    assert layer_groups(plan, range(2, 7)) == [LayerGroup(*group) for group in expected]


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ({}, None),
        ({"recompute_granularity": "selective"}, RecomputePlan("selective")),
        ({"recompute_granularity": "full"}, RecomputePlan("full", "uniform", 1)),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("moe", "mlp")},
            RecomputePlan("selective", modules=("moe", "mlp")),
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 3,
            },
            RecomputePlan("full", "block", 3),
        ),
    ],
)
def test_plan_from_flags(flags, plan):
    assert RecomputePlan.from_config(TrainingOptions(**flags)) == plan


@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        (RecomputePlan("selective"), 10 + 20 + 30),
        (RecomputePlan("full", "uniform", 1), 3 * 4 + 30),
        (RecomputePlan("full", "uniform", 2), 2 * 4 + 2 * 30),
        (RecomputePlan("full", "uniform", 5), 4 + 3 * 30),
        (RecomputePlan("full", "uniform", 2, split_inputs=True), 2 * 2 + 2 * 30),
        (RecomputePlan("full", "block", 1), 4 + 20 + 30),
        (RecomputePlan("full", "block", 2), 2 * 4 + 30),
        (RecomputePlan("full", "block", 3), 3 * 4 + 30),
    ],
)
def test_bytes_of_three_layers_on_two_tensor_ranks(plan, kept):
    """Layers keep 10, 20 and 30 bytes, and their input has 4."""
    micro_batch = MicroBatch(sequences=1, length=1, tensor=2)
    assert plan.bytes_kept([10, 20, 30], 4, micro_batch) == kept
    whole = replace(plan, split_inputs=False).bytes_kept([10, 20, 30], 4, micro_batch)
    # With sequence parallelism, the input is already split.
    assert plan.bytes_kept([10, 20, 30], 4, replace(micro_batch, sequence=2)) == whole
    assert plan.bytes_kept([], 4, micro_batch) == 0


def test_a_forgotten_tensor_is_computed_once_for_all_that_ask():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    calls = []

    def double():
        calls.append(1)
        return kept * 2

    y = x * 2
    kept, memory = x.detach(), weakref.ref(y.untyped_storage())
    with discarding_output(y, double):
        out = (y.flatten() * y.flatten().exp()).sum() + (y @ y.t()).sum()
    del y
    assert memory() is None
    assert not calls
    out.backward()
    assert len(calls) == 1
    z = x.detach() * 2
    ones = torch.ones(3, 3, dtype=torch.float64)
    torch.testing.assert_close(x.grad, 2 * ((1 + z) * z.exp() + 2 * ones @ z))


def test_a_recomputed_tensor_is_freed_after_its_last_use():
    x = torch.randn(3, 4, requires_grad=True)
    found = []

    def double():
        again = kept * 2
        found.append(weakref.ref(again.untyped_storage()))
        return again

    y, kept = x * 2, x.detach()
    with discarding_output(y, double):
        out = (y * y.exp()).sum() + (y @ y.t()).sum()
    del y
    out.backward(retain_graph=True)  # the graph, which outlives it, does not hold it
    (memory,) = found
    assert memory() is None


def test_a_graph_without_a_backward_pass_is_freed():
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    with discarding_output(y, lambda: y):
        z = y.sigmoid()  # sigmoid saves its result
    memory = weakref.ref(z.untyped_storage())
    del z
    assert memory() is None


def _counts(model):
    return [state.counts.tolist() for state in model.layers.routers.states]


@pytest.mark.parametrize("module", ["layernorm", "mlp", "moe", "moe_act", "shared_experts"])
def test_parts_of_a_mixture_give_the_same_bits(module):
    kept, again = gpt(MIXTURE), gpt(MIXTURE, recompute=_parts(module))
    expected = loss_and_gradients(kept)
    torch.testing.assert_close(loss_and_gradients(again), expected, rtol=0, atol=0)
    assert _counts(again) == _counts(kept)


@pytest.mark.parametrize(("modules", "runs"), [((), 1), (("shared_experts",), 2)])
def test_shared_experts_run_again_only_if_they_are_recomputed(modules, runs):
    model, calls = gpt(MIXTURE, recompute=_parts(*modules)), []
    model.layers["1"].mlp.shared.up.register_forward_hook(lambda *_: calls.append(1))
    loss_and_gradients(model)
    assert len(calls) == runs


def _parts(*modules):
    return RecomputePlan("selective", modules=modules)


def _kept(model):
    """Return whether forward saves norm outputs and experts' values before and after activation."""
    seen = []

    def watch(activation):
        def watched(x):
            out = activation(x)
            seen.extend(weakref.ref(each.untyped_storage()) for each in (x, out))
            return out

        return watched

    for name, module in model.layers.named_modules():
        if name.endswith(("attention_norm", "mlp_norm")):
            module.register_forward_hook(
                lambda _m, _i, out: seen.append(weakref.ref(out[1].untyped_storage()))
            )
        elif name.endswith("experts"):
            module.activation = watch(module.activation)
    tokens, labels = batch()
    loss = model(tokens, labels=labels)
    alive = [ref() is not None for ref in seen]
    loss.mean().backward()
    return "".join("01"[each] for each in alive)


@pytest.mark.parametrize(
    ("modules", "kept"),
    [
        ((), "11 1111 1111"),
        (("layernorm",), "00 0011 0011"),
        (("moe_act",), "11 1110 1110"),
        (("layernorm", "moe_act"), "00 0010 0010"),
        (("moe",), "11 1100 1100"),  # the recomputed part's input is saved
        (("moe", "moe_act"), "11 1100 1100"),
        (("layernorm", "mlp"), "01 0011 0011"),
    ],
)
def test_what_is_recomputed_is_not_kept(modules, kept):
    """Test a dense layer with two norms, and two mixtures with two norms and an activation."""
    assert _kept(gpt(MIXTURE, recompute=_parts(*modules))) == kept.replace(" ", "")
