"""The router against loops in fp64, written from Megatron Core's formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.models.mixture_plan import RouterPlan
from megatron.models.plan import InitPlan
from megatron.models.router import (
    Router,
    Routing,
    drop_choices,
    expert_capacity,
    queue_positions,
    sinkhorn,
    within_best_groups,
)
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from tests.distributed import run_sharing_memory
from tests.models import naive_mixture as naive

SEQUENCE, BATCH, HIDDEN, EXPERTS = 10, 3, 12, 8
BASE = RouterPlan(hidden=HIDDEN, init=InitPlan(0.02, 1), experts=EXPERTS, chosen=2)
SIGMOID = replace(BASE, score="sigmoid", bias_rate=1e-3)
PLANS = {
    "softmax over the chosen": BASE,
    "softmax over all": replace(BASE, scores_all=True),
    "one expert over all": replace(BASE, scores_all=True, chosen=1),
    "one expert": replace(BASE, chosen=1),
    "every expert": replace(BASE, chosen=EXPERTS),
    "scaled": replace(BASE, scale=2.5),
    "groups": replace(BASE, chosen=4, groups=4, groups_chosen=2),
    "groups of all scores": replace(BASE, scores_all=True, groups=2, groups_chosen=1),
    "sigmoid": replace(SIGMOID, bias_rate=None),
    "one sigmoid": replace(SIGMOID, bias_rate=None, chosen=1),
    "square root of softplus": replace(BASE, score="sqrtsoftplus"),
    "one square root of softplus": replace(BASE, score="sqrtsoftplus", chosen=1),
    "biased": SIGMOID,
    "biased square roots": replace(SIGMOID, score="sqrtsoftplus"),
    "all of DeepSeek-V3": replace(SIGMOID, chosen=4, groups=4, groups_chosen=2, scale=2.5),
}
BIAS = torch.linspace(-0.3, 0.3, EXPERTS)


def build(plan, context=None):
    torch.manual_seed(1)
    router = Router(plan, context or BuildContext(Layout.single()))
    torch.nn.init.normal_(router.weight)
    if router.state.bias is not None:
        router.state.bias.copy_(BIAS)
    return router


def tokens(seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)


def exact(router, x):
    """Return logits [T, E] in fp64, computed from leaves that autograd gives gradients."""
    x = x.detach().double().requires_grad_()
    weight = router.weight.detach().double().requires_grad_()
    return x, weight, (x @ weight.t()).flatten(0, 1)


def dense(assignment):
    """Return weights [T, E], 0 where a token does not use an expert."""
    rows = []
    for factors in assignment:
        row = [factors.get(e, torch.zeros((), dtype=torch.float64)) for e in range(EXPERTS)]
        rows.append(torch.stack(row))
    return torch.stack(rows)


def scattered(routing):
    """Return the same for a `Routing`."""
    kept = routing.choices >= 0
    weights = torch.zeros(len(routing.choices), EXPERTS, dtype=routing.weights.dtype)
    return weights.scatter_add(1, routing.choices.clamp(min=0), routing.weights * kept)


def check(router, x, expected, loss=None):
    """Compare weights and all gradients with `expected(logits)`, to which `loss` is added."""
    x = x.detach().requires_grad_()
    routing = router(x)
    factors = scattered(routing)
    pull = torch.randn(factors.shape, generator=torch.Generator().manual_seed(3))
    (factors * pull).sum().backward()
    x64, weight64, logits = exact(router, x)
    wanted = dense(expected(logits))
    total = (wanted * pull.double()).sum()
    if loss is not None:
        total = total + loss(logits)
    total.backward()
    torch.testing.assert_close(factors.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(factors > 0, wanted > 0)
    for ours, theirs in ((x.grad, x64.grad), (router.weight.grad, weight64.grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    return routing


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_choices_factors_and_gradients(plan):
    bias = BIAS if plan.bias_rate is not None else None
    routing = check(build(plan), tokens(), lambda logits: naive.assign(logits, plan, bias))
    assert routing.choices.shape == routing.weights.shape == (SEQUENCE * BATCH, plan.chosen)
    assert routing.weights.dtype == torch.float32


SINKHORN = {
    "one": replace(BASE, score="sigmoid", chosen=1, sinkhorn=True),
    "two": replace(BASE, scores_all=True, sinkhorn=True),
    "two, dropped": replace(BASE, scores_all=True, sinkhorn=True, capacity=0.5),
}


@pytest.mark.parametrize("plan", SINKHORN.values(), ids=SINKHORN)
def test_balanced_scores_choose_and_plain_ones_weigh(plan):
    def expected(logits):
        ranks = naive.sinkhorn(logits)
        found = []
        for row, rank in zip(logits, ranks, strict=True):
            scores = torch.sigmoid(row) if plan.chosen == 1 else row.exp() / row.exp().sum()
            best = sorted(range(EXPERTS), key=lambda e, rank=rank: -rank[e])[: plan.chosen]
            found.append({e: scores[e] for e in best})
        return found if plan.capacity is None else naive.without_overflow(found, plan)

    router = build(plan)
    check(router, tokens(), expected)
    evaluated = router.eval()(tokens())
    plain = build(replace(plan, sinkhorn=False)).eval()(tokens())
    assert torch.equal(evaluated.choices, plain.choices)  # balancing is only for training


def test_balanced_scores_have_even_sums():
    logits = 2 * torch.randn(40, EXPERTS, generator=torch.Generator().manual_seed(4))
    logits[:, 0] += 5
    scores = sinkhorn(logits + torch.linspace(0, 1000, 40).unsqueeze(1))  # no expert overflows
    even = torch.full((EXPERTS,), 1 / EXPERTS)
    torch.testing.assert_close(scores.sum(0), even, rtol=1e-4, atol=0)
    torch.testing.assert_close(scores.sum(1), torch.full((40,), 1 / 40), rtol=2e-2, atol=0)
    busiest = [torch.bincount(each.argmax(1)).max().item() for each in (logits, scores)]
    assert busiest[0] > 25
    assert busiest[1] < 15


def test_a_bias_changes_choices_but_no_factor():
    """Weights are computed from scores without biases."""
    x, router = tokens(), build(SIGMOID)
    biased = router(x)
    router.state.bias.zero_()
    plain = router(x)
    assert not torch.equal(biased.choices, plain.choices)
    same = (biased.choices == plain.choices).all(1)
    assert torch.equal(biased.weights[same], plain.weights[same])


def test_scores_are_computed_in_fp32():
    """With 16-bit weights and tokens, the products are those of fp32."""
    router = build(BASE, BuildContext(Layout.single(), dtype=torch.bfloat16))
    x = tokens().bfloat16()
    _, _, logits = exact(router, x)
    torch.testing.assert_close(
        scattered(router(x)).double(), dense(naive.assign(logits, BASE)), rtol=1e-5, atol=1e-6
    )


def test_groups_are_as_good_as_the_experts_a_token_takes_of_them():
    plan = replace(BASE, chosen=2, groups=2, groups_chosen=1)
    scores = torch.tensor([[0.9, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    kept = within_best_groups(scores, plan)[0].isfinite()
    assert kept.tolist() == [False] * 4 + [True] * 4  # 0.5 + 0.5 is above 0.9


LOSSES = {
    "aux_loss": naive.balancing_loss,
    "seq_aux_loss": lambda logits, plan: naive.balancing_loss(logits, plan, BATCH),
    "global_aux_loss": naive.balancing_loss,  # for the first micro-batch
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    "name", ["softmax over the chosen", "one expert", "groups", "biased", "biased square roots"]
)
def test_balancing_losses_and_their_gradients(kind, name):
    plan = replace(PLANS[name], balancing=((kind, 0.7),))
    bias = BIAS if plan.bias_rate is not None else None
    router = build(plan)
    check(
        router,
        tokens(),
        lambda logits: naive.assign(logits, plan, bias),
        lambda logits: 0.7 * LOSSES[kind](logits, plan),
    )
    _, _, logits = exact(router, tokens())
    assert router.state.losses.item() == pytest.approx(LOSSES[kind](logits, plan).item(), rel=1e-5)


def global_loss(router, batches, plan):
    """Return the last micro-batch's contribution to the loss, and its input's gradient."""
    for x in batches[:-1]:
        router(x)
    before = router.state.losses.clone()
    x = batches[-1].clone().requires_grad_()
    router(x).weights.sum().mul(0).backward()
    added = (router.state.losses - before).item()
    logits = [exact(router, each)[2] for each in batches]
    leaf, _, last = exact(router, batches[-1])
    loss = naive.balancing_loss(last, plan, others=logits[:-1])
    (0.7 * loss).backward()
    return added, x.grad, loss.item(), leaf.grad


def test_the_global_loss_counts_all_micro_batches_so_far():
    plan = replace(BASE, balancing=(("global_aux_loss", 0.7),))
    router = build(plan)
    batches = [tokens(seed) for seed in (2, 3, 4)]
    added, grad, loss, wanted = global_loss(router, batches, plan)
    assert added == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-6)
    router.state.reset()  # the next global batch starts over
    added, grad, loss, wanted = global_loss(router, batches[1:], plan)
    assert added == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-6)


def test_recomputation_has_the_global_loss_of_its_micro_batch():
    context = BuildContext(Layout.single())
    routers, plan = context.registry.routers, replace(BASE, balancing=(("global_aux_loss", 0.7),))
    router = build(plan, context)
    grads = []
    for again in (False, True):
        router.state.reset()
        routers.seed = 1
        paused = routers.paused()
        x = tokens().requires_grad_()
        weights = router(x).weights
        routers.seed = 2
        router(tokens(5))
        if again:
            with paused:
                weights = router(x).weights
        weights.sum().mul(0).backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert grads[0].any()


def _global_loss_of_a_rank(layout):
    router = build(replace(BASE, balancing=(("global_aux_loss", 0.7),)), BuildContext(layout))
    x = tokens(layout.data.rank).requires_grad_()
    router(x).weights.sum().mul(0).backward()
    return router.state.losses.item(), x.grad


def test_data_ranks_count_each_other_s_tokens_in_the_global_loss():
    plan = replace(BASE, balancing=(("global_aux_loss", 0.7),))
    router = build(plan)
    for rank, (loss, grad) in enumerate(run_sharing_memory(2, _global_loss_of_a_rank)):
        leaf, _, logits = exact(router, tokens(rank))
        others = [exact(router, tokens(1 - rank))[2]]
        wanted = naive.balancing_loss(logits, plan, others=others)
        (0.7 * wanted).backward()
        assert loss == pytest.approx(wanted.item(), rel=1e-5)
        torch.testing.assert_close(grad.double(), leaf.grad, rtol=1e-4, atol=1e-6)


def test_the_z_loss_and_its_gradient():
    plan = replace(BASE, z_loss=0.3)
    router = build(plan)
    check(
        router,
        tokens(),
        lambda logits: naive.assign(logits, plan),
        lambda logits: 0.3 * naive.z_loss(logits),
    )
    _, _, logits = exact(router, tokens())
    assert router.state.losses.item() == pytest.approx(naive.z_loss(logits).item(), rel=1e-5)


def test_all_losses_at_once_under_a_scale_and_drops():
    """Losses include dropped tokens, and backward multiplies them by the loss scale."""
    both = (("aux_loss", 0.2), ("seq_aux_loss", 0.4))
    plan = replace(BASE, z_loss=0.3, balancing=both, capacity=0.5)
    router = build(plan)
    router.state.loss_scale.fill_(8.0)

    def loss(logits):
        parts = [weight * LOSSES[kind](logits, plan) for kind, weight in both]
        return 8 * (0.3 * naive.z_loss(logits) + sum(parts))

    def expected(logits):
        return naive.without_overflow(naive.assign(logits, plan), plan)

    check(router, tokens(), expected, loss)
    first = router.state.losses.clone()
    router(tokens())  # losses of micro-batches accumulate until they are read
    torch.testing.assert_close(router.state.losses, 2 * first)


def test_an_even_load_has_a_loss_of_one():
    plan = replace(BASE, chosen=1, balancing=(("aux_loss", 1.0), ("seq_aux_loss", 1.0)))
    router = build(replace(plan, hidden=EXPERTS))
    torch.nn.init.eye_(router.weight)
    x = 50 * torch.eye(EXPERTS).unsqueeze(1).expand(-1, 2, -1).contiguous()
    router(x)
    torch.testing.assert_close(router.state.losses, torch.ones(2))


@pytest.mark.parametrize("mode", ["evaluation", "no gradients"])
def test_losses_and_counts_are_of_training_only(mode):
    router = build(replace(SIGMOID, z_loss=0.3, balancing=(("aux_loss", 1.0),)))
    if mode == "evaluation":
        router.eval()(tokens())
    else:
        with torch.no_grad():
            router(tokens())
    assert not router.state.losses.any()
    assert not router.state.counts.any()


@pytest.mark.parametrize("drops_last", [False, True], ids=["probability", "position"])
@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 1.3, 100.0])
def test_full_experts_drop_tokens(drops_last, factor):
    plan = replace(BASE, capacity=factor, drops_last=drops_last)
    router = build(plan)

    def expected(logits):
        return naive.without_overflow(naive.assign(logits, plan), plan)

    routing = check(router, tokens(), expected)
    dropped = routing.choices < 0
    assert dropped.any() == (factor < 2)
    assert not routing.weights[dropped].any()
    counts = torch.bincount(routing.choices[~dropped], minlength=EXPERTS)
    assert counts.max() <= expert_capacity(SEQUENCE * BATCH, plan)
    assert torch.equal(router.state.counts.long(), counts)  # without dropped tokens, as in Core


def dropped(choices, weights, plan):
    routing, limit = Routing(choices, weights), expert_capacity(len(choices), plan)
    return drop_choices(routing, queue_positions(routing, plan, None), limit, plan.experts)


@pytest.mark.parametrize("drops_last", [False, True], ids=["probability", "position"])
def test_the_first_of_equal_probabilities_stay(drops_last):
    plan = replace(BASE, experts=2, chosen=1, capacity=0.5, drops_last=drops_last)
    choices = torch.tensor([[1], [1], [0], [1], [1], [0], [1], [1]])
    weights = torch.full((8, 1), 0.5)
    kept = dropped(choices, weights, plan)  # room for 2
    assert kept.choices.flatten().tolist() == [1, 1, 0, -1, -1, 0, -1, -1]
    assert kept.weights.flatten().tolist() == [0.5, 0.5, 0.5, 0, 0, 0.5, 0, 0]


def test_the_most_probable_stay():
    plan = replace(BASE, experts=2, chosen=1, capacity=0.5)
    weights = torch.tensor([[0.1], [0.9], [0.0], [0.8]])
    kept = dropped(torch.zeros(4, 1, dtype=torch.int64), weights, plan)  # room for 1
    assert kept.choices.flatten().tolist() == [-1, 0, -1, -1]
    ends = dropped(torch.zeros(4, 1, dtype=torch.int64), weights, replace(plan, capacity=2.0))
    assert ends.choices.flatten().tolist() == [
        0,
        0,
        0,
        0,
    ]  # an expert with weight 0 still counts as chosen


def test_evaluation_may_have_a_capacity_of_its_own():
    plan = replace(BASE, capacity=0.5, eval_capacity=1.0, min_capacity=5)
    assert [expert_capacity(tokens, plan) for tokens in (64, 32, 8, 4)] == [8, 5, 5, 4]
    assert expert_capacity(64, plan, training=False) == 16
    assert expert_capacity(64, replace(plan, eval_capacity=None), training=False) == 8
    assert expert_capacity(64, replace(plan, capacity=None)) is None
    assert expert_capacity(64, replace(plan, capacity=None), training=False) == 16
    router = build(replace(BASE, capacity=0.25, eval_capacity=100.0))
    assert (router(tokens()).choices < 0).any()
    assert not (router.eval()(tokens()).choices < 0).any()


def test_noise_is_of_training_only():
    router, x = build(replace(BASE, jitter=0.3)), tokens()
    plain = build(BASE)(x).weights
    first, again = router(x).weights, router(x).weights
    assert not torch.equal(first, plain)
    assert torch.equal(first, again)
    router.state._routers.seed = 5  # another micro-batch
    assert not torch.equal(first, router(x).weights)
    router.eval()
    assert torch.equal(router(x).weights, plain)


def test_noise_multiplies_the_input_by_at_most_its_size():
    """A router with one feature and two experts shows the factor: its logits are (w x, 0)."""
    plan = replace(BASE, hidden=1, experts=2, chosen=2, jitter=0.25)
    router = Router(plan, BuildContext(Layout.single()))
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0], [0.0]]))
    routing = router(torch.ones(4000, 1, 1))
    weights = torch.zeros(4000, 2).scatter(1, routing.choices, routing.weights.detach())
    factors = torch.logit(weights[:, 0])
    assert 0.75 <= factors.min() < 0.76
    assert 1.24 < factors.max() <= 1.25
    assert factors.mean() == pytest.approx(1, abs=0.02)


def test_biases_move_towards_an_even_load():
    router = build(replace(SIGMOID, bias_rate=0.25))
    router.state.bias.zero_()
    state = router.state
    state.update_bias(torch.tensor([5.0, 1.0, 3.0, 3.0, 3.0, 3.0, 4.0, 2.0]))  # 3 on average
    assert state.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, -0.25, 0.25]


def test_all_passes_of_an_update_count_and_recomputation_does_not():
    context = BuildContext(Layout.single())
    router = build(SIGMOID, context)
    first, second = router(tokens()).choices, router(tokens(5)).choices
    with context.registry.routers.paused():
        router(tokens(6))
    counts = torch.bincount(torch.cat((first, second)).flatten(), minlength=EXPERTS)
    assert torch.equal(router.state.counts.long(), counts)
    context.registry.routers.update_biases(Layout.single())
    moved = (counts.double().mean() - counts).sign() * SIGMOID.bias_rate
    torch.testing.assert_close(router.state.bias, BIAS + moved.float())


def test_losses_are_taken_by_layer_and_forgotten():
    context = BuildContext(Layout.single())
    plan = replace(BASE, z_loss=0.3, balancing=(("aux_loss", 1.0),))
    routers = [build(plan, context) for _ in range(2)]
    for router in routers:
        router(tokens())
    each = torch.stack([router.state.losses.clone() for router in routers])
    torch.testing.assert_close(torch.stack(context.registry.routers.pop_losses()), each)
    assert not any(router.state.losses.any() or router.state.counts.any() for router in routers)
