"""DeepSpeed's gating against loops in fp64, and against DeepSpeed itself where it is installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.models.mixture_plan import GatingPlan, RouterPlan
from megatron.models.plan import InitPlan
from megatron.models.router import Router, expert_capacity
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.parallel.random import uniform
from tests.models import naive_gating as naive
from tests.models.test_router import check, dense, exact, scattered

SEQUENCE, BATCH, HIDDEN, EXPERTS = 16, 2, 12, 8
TOKENS = SEQUENCE * BATCH
RTS, SAMPLES = GatingPlan(selects_randomly=True), GatingPlan(samples=True)
TOP1 = RouterPlan(
    hidden=HIDDEN,
    init=InitPlan(0.02, 1),
    experts=EXPERTS,
    chosen=1,
    scores_all=True,
    balancing=(("aux_loss", 0.7),),
    capacity=1.0,
    min_capacity=2,
    gating=GatingPlan(),
)
PLANS = {
    "one, the first stay": TOP1,
    "one, random ones stay": replace(TOP1, gating=RTS),
    "one, drawn": replace(TOP1, gating=GatingPlan(samples=True, selects_randomly=True)),
    "one, all stay": replace(TOP1, capacity=None, gating=SAMPLES),
    "one, hardly any room": replace(TOP1, capacity=0.1, gating=RTS),
    "two": replace(TOP1, chosen=2, capacity=0.75),
    "two, the second drawn": replace(TOP1, chosen=2, capacity=0.75, gating=SAMPLES),
    "two, hardly any room": replace(TOP1, chosen=2, capacity=0.1, gating=SAMPLES),
    "two, all stay": replace(TOP1, chosen=2, capacity=None, gating=SAMPLES),
    "three": replace(TOP1, chosen=3, capacity=0.75),
    "three, all stay": replace(TOP1, chosen=3, capacity=None),
}
LAYER, SEED = 3, 77


def build(plan, layout=None):
    context = BuildContext(layout or Layout.single(), layer=LAYER)
    router = Router(plan, context)
    context.registry.routers.seed = SEED
    torch.manual_seed(1)
    torch.nn.init.normal_(router.weight)
    return router


def tokens():
    return torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2))


def drawn(purpose, seed=SEED):
    shape, device = (SEQUENCE, BATCH, EXPERTS), torch.device("cpu")
    return uniform(shape, device, seed, "router", LAYER, purpose).flatten(0, 1).double()


def loops(logits, plan):
    limit = None if plan.capacity is None else naive.room(len(logits), plan)
    gumbel = -torch.log(-torch.log(drawn("choice"))) * plan.gating.samples
    return naive.gates(logits, plan, limit, gumbel, drawn("selection"))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_factors_gradients_and_losses(plan):
    router = build(plan)
    routing = check(
        router,
        tokens(),
        lambda logits: loops(logits, plan).assignment,
        lambda logits: 0.7 * loops(logits, plan).loss,
    )
    _, _, logits = exact(router, tokens())
    assert router.state.losses.item() == pytest.approx(loops(logits, plan).loss.item(), rel=1e-5)
    assert bool((routing.choices < 0).any()) == (plan.capacity is not None)
    sums = routing.weights.sum(1)
    if plan.chosen > 1:  # the weights of a token's remaining experts add up to 1
        kept = (routing.choices >= 0).any(1)
        torch.testing.assert_close(sums, kept.float())
    else:
        assert (sums < 1).all()


def test_the_noise_is_of_the_micro_batch_the_layer_and_training():
    plan = PLANS["one, drawn"]
    first = build(plan)(tokens()).choices
    assert torch.equal(first, build(plan)(tokens()).choices)
    other_batch = build(plan)
    other_batch.state._routers.seed = SEED + 1
    other_layer = Router(plan, BuildContext(Layout.single(), layer=LAYER + 1))
    other_layer.state._routers.seed = SEED
    with torch.no_grad():
        other_layer.weight.copy_(other_batch.weight)
    for other in (other_batch, other_layer):
        assert not torch.equal(first, other(tokens()).choices)
    # Evaluation draws no experts, and full experts keep the same tokens in every micro-batch.
    evaluation = build(plan).eval()(tokens()).choices
    assert torch.equal(evaluation, other_batch.eval()(tokens()).choices)
    kept = evaluation >= 0
    logits = exact(other_batch, tokens())[2]
    assert torch.equal(evaluation[kept], logits.argmax(1, keepdim=True)[kept])


def test_recomputation_draws_the_micro_batch_s_numbers_again():
    router = build(PLANS["two, the second drawn"])
    routers = router.state._routers
    first = router(tokens()).choices
    again = routers.paused()  # as in backward: created in the forward pass, entered later
    routers.seed = SEED + 1  # the next micro-batch
    assert not torch.equal(first, router(tokens()).choices)
    with again:
        assert torch.equal(first, router(tokens()).choices)
    assert routers.seed == SEED + 1
    assert not routers.is_paused


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel"),
    [({"context": 2}, False), ({"tensor": 2}, True), ({"tensor": 2, "context": 2}, True)],
)
def test_ranks_that_share_sequences_draw_their_part_of_one_process_s_numbers(
    sizes, sequence_parallel
):
    world = 1
    for size in sizes.values():
        world *= size
    whole = drawn("choice").view(SEQUENCE, BATCH, EXPERTS)
    found = []
    for rank in range(world):
        layout = replace(Layout.at(rank, world, **sizes), sequence_parallel=sequence_parallel)
        router = build(TOP1, layout)
        part = router._draw(SEQUENCE // world, BATCH, torch.device("cpu"), "choice", EXPERTS)
        found.append(part.view(-1, BATCH, EXPERTS).double())
    if sizes == {"tensor": 2}:
        assert torch.equal(torch.cat(found), whole)
    else:  # each context rank has an early and a late chunk
        rows = {tuple(row.flatten().tolist()) for part in found for row in part}
        assert rows == {tuple(row.flatten().tolist()) for row in whole}
        early = SEQUENCE // 4
        first = torch.cat(found[: world // 2])
        assert torch.equal(first, torch.cat((whole[:early], whole[-early:])))


def test_draws_have_the_probabilities_of_the_softmax():
    plan = replace(TOP1, capacity=None, gating=SAMPLES, experts=4, hidden=1, balancing=())
    router = Router(plan, BuildContext(Layout.single(), layer=1))
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[0.0], [1.0], [2.0], [-1.0]]))
    choices = router(torch.ones(20000, 1, 1)).choices.flatten()
    shares = torch.bincount(choices, minlength=4) / len(choices)
    wanted = torch.softmax(router.weight.flatten(), 0)
    torch.testing.assert_close(shares, wanted, atol=0.01, rtol=0)


@pytest.fixture(scope="module")
def deepspeed():
    return pytest.importorskip(
        "deepspeed.moe.sharded_moe", reason="DeepSpeed is not installed: pip install deepspeed"
    )


def _of_deepspeed(deepspeed, monkeypatch, logits, plan):
    """Return DeepSpeed's weights [T, E], which autograd can differentiate, and its loss."""
    uniforms, gumbel = drawn("selection").float(), drawn("choice").float()
    gumbel = -torch.log(-torch.log(gumbel))
    selection = {logits.device: lambda shape: uniforms}
    monkeypatch.setattr(deepspeed, "exp_selection_uniform_map", selection)
    monkeypatch.setattr(deepspeed, "gumbel_rsample", lambda shape, device: gumbel)
    factor, drops = plan.capacity or 1.0, plan.capacity is not None
    gating = plan.gating
    if plan.chosen == 1:
        policy = "RSample" if gating.samples else None
        result = deepspeed.top1gating(
            logits,
            factor,
            plan.min_capacity,
            noisy_gate_policy=policy,
            drop_tokens=drops,
            use_rts=gating.selects_randomly,
        )
    elif plan.chosen == 2:
        result = deepspeed.top2gating(
            logits.clone(), factor, plan.min_capacity, drops, None, gating.samples
        )
    else:
        result = deepspeed.topkgating(logits, plan.chosen, factor, plan.min_capacity, drops)
    loss, weights, _, _ = result
    return weights.sum(-1), loss


@pytest.mark.parametrize(
    "name",
    # Without random selection, DeepSpeed keeps whichever tied tokens torch.topk happens to return.
    [name for name in PLANS if name != "one, the first stay"],
)
def test_deepspeed_itself_agrees(deepspeed, monkeypatch, name):
    plan = PLANS[name]
    router, x = build(plan), tokens()
    logits = (x @ router.weight.t()).flatten(0, 1).detach()
    theirs_in, pull = logits.clone().requires_grad_(), torch.randn(TOKENS, EXPERTS)
    theirs, loss = _of_deepspeed(deepspeed, monkeypatch, theirs_in, plan)
    ((theirs * pull).sum() + 0.7 * loss).backward()
    x.requires_grad_()
    ours = scattered(router(x))
    (ours * pull).sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours > 0, theirs > 0)
    assert router.state.losses.item() == pytest.approx(loss.item(), rel=1e-5)
    theirs_grad = theirs_in.grad @ router.weight.detach()
    torch.testing.assert_close(x.grad.flatten(0, 1), theirs_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.1, 1.2, 1.25, 1.7, 2.3])
def test_capacity_is_deepspeed_s_to_the_token(deepspeed, factor):
    for tokens in (1, 7, 80, 1000, 4096, 12345):
        for chosen in (1, 2, 5):
            plan = replace(TOP1, capacity=factor, chosen=chosen, min_capacity=4)
            theirs = deepspeed._capacity(
                torch.zeros(tokens, EXPERTS), torch.tensor(factor * chosen), torch.tensor(4)
            )
            assert expert_capacity(tokens, plan) == min(int(theirs), tokens)


def test_dense_is_what_the_loops_need():
    """A token without experts has a row of zeros."""
    rows = dense([{}, {2: torch.tensor(0.5, dtype=torch.float64)}])
    assert rows.tolist()[0] == [0.0] * EXPERTS
    assert rows[1, 2] == 0.5
