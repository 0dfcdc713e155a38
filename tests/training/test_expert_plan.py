"""The experts' plan matches what a run exchanges, holds and saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.config import parse_config
from megatron.models.costs import MicroBatch
from megatron.models.mixture import Mixture
from megatron.models.mixture_plan import MixturePlan
from megatron.models.plans import model_plan
from megatron.models.router import Routing
from megatron.parallel import collectives, expert_exchange
from megatron.parallel.build import BuildContext
from megatron.parallel.expert_exchange import gathers_all
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize
from megatron.planner.memory import estimate_memory
from megatron.training.expert_plan import expert_rows, full_at, plan_exchange
from tests.distributed import run_sharing_memory
from tests.parity.mixtures import MixtureCase
from tests.training.toy import TOY, build_toy, train_toy

GIB = 2**30


def _config(words, world_size):
    config = parse_config([*TOY, *words], world_size=world_size).config
    return config, model_plan(config.model, 104)


def _mixture(plan) -> MixturePlan:
    return next(each.mlp for each in plan.layers if isinstance(each.mlp, MixturePlan))


def _bytes_sent(layout, words):
    """Return the bytes that a process sends to others for the experts."""
    sent, exchange = [0], dist.all_to_all_single
    gather, scatter = collectives.all_gather_single, collectives.reduce_scatter_single
    share = (layout.expert.size - 1) / layout.expert.size

    def counted(received, x, *sizes, **options):
        if x.ndim == 2 and x.shape[1] > 2:  # not the row counts
            rows = options.get("input_split_sizes") or sizes[1]
            others = sum(rows) - rows[layout.expert.rank]
            sent[0] += others * x[0].numel() * x.element_size()
        return exchange(received, x, *sizes, **options)

    def gathered(result, x, **options):
        if options["group"] is layout.expert.group:
            sent[0] += int(result.numel() * share) * x.element_size()
        return gather(result, x, **options)

    def scattered(result, x, **options):
        if options["group"] is layout.expert.group:
            sent[0] += int(x.numel() * share) * x.element_size()
        return scatter(result, x, **options)

    dist.all_to_all_single = counted
    collectives.all_gather_single = gathered
    collectives.reduce_scatter_single = scattered
    train_toy(layout, words)
    return sent[0]


@pytest.mark.parametrize("gathers", [True, False])
def test_as_many_bytes_are_sent_as_the_plan_says(gathers, monkeypatch):
    """Every token goes to all experts, so the plan is not an average."""
    if not gathers:
        monkeypatch.setattr(expert_exchange, "_NEARLY_ALL", 1.1)
    case = MixtureCase(2, expert=2, iterations=1, network="--moe-router-topk 8")
    config, plan = _config(case.words, 2)
    exchange = plan_exchange(config, _mixture(plan), 2)
    assert (exchange.mean_destinations, exchange.max_destinations) == (1.0, 1)
    assert exchange.groups == ((0, 1),)
    micro_batches, layers = 2, 3
    ahead = exchange.tokens * (4 * 32 + 8 * 12 + 4 * 32) * layers  # a next update's forward pass
    for sent in run_sharing_memory(2, _bytes_sent, case.words, **case.sizes):
        assert sent == exchange.bytes * micro_batches * layers + ahead


@pytest.mark.parametrize(("experts", "chosen", "ranks"), [(8, 2, 4), (8, 3, 2), (6, 1, 3)])
def test_a_token_reaches_as_many_processes_on_average(experts, chosen, ranks):
    words = f"--num-experts {experts} --moe-router-topk {chosen} --train-iters 1"
    words += f" --expert-model-parallel-size {ranks} --global-batch-size {ranks}"
    config, plan = _config(words.split(), ranks)
    exchange = plan_exchange(config, _mixture(plan), ranks)
    generator = torch.Generator().manual_seed(1)
    choices = torch.rand(20_000, experts, generator=generator).topk(chosen).indices
    owners = torch.nn.functional.one_hot(choices // exchange.local, ranks).amax(1)
    expected = owners[:, 1:].sum(1).double().mean().item()
    if gathers_all(experts, chosen, ranks):
        expected = ranks - 1
    assert exchange.mean_destinations == pytest.approx(expected, rel=0.02)


def test_groups_are_those_of_the_layout():
    words = "--num-experts 8 --tensor-model-parallel-size 2 --expert-model-parallel-size 2"
    config, plan = _config([*words.split(), "--train-iters", "1"], 8)
    exchange = plan_exchange(config, _mixture(plan), 8)
    assert exchange.describe_groups() == "0 2 | 1 3 | 4 6 | 5 7"
    (experts, *_), memory = expert_rows(config, plan, 2, 8)[0], expert_rows(config, plan, 2, 8)[-1]
    assert experts == "experts"
    assert "(2.00 times an even share)" in memory[1]


def test_the_device_is_full_from_an_imbalance_on():
    words = "--num-experts 8 --expert-model-parallel-size 8 --train-iters 1 --dry-run".split()
    words += ["--micro-batch-size", "4", "--global-batch-size", "32"]
    config, plan = _config(words, 8)
    even, worst = (
        estimate_memory(config, plan, Layout.at(0, 8, expert=8), 1, each).total for each in (1, 4)
    )
    limit = (even + 2 * worst) / 3  # three even shares
    assert expert_rows(config, plan, 1, 8)[-1][1].endswith("(4.00 times an even share)")
    assert expert_rows(config, plan, 1, 8, limit)[-1][1].endswith(
        "is full at 3.00 times an even share"
    )
    assert full_at(8 * GIB, 10 * GIB, GIB, 4).endswith("is not enough for any load")
    assert full_at(14 * GIB, 10 * GIB, GIB, 4).endswith("enough for any load")


@pytest.mark.parametrize(
    ("chosen", "ranks", "capacity", "worst"),
    [
        (2, 8, None, 4.0),
        (2, 2, None, 2.0),
        (6, 2, None, 4 / 3),
        (2, 8, 1.25, 1.25),
        (2, 8, 0.5, 1.0),
        (2, 4, 9, 4.0),
    ],
)
def test_the_largest_imbalance(chosen, ranks, capacity, worst):
    words = f"--num-experts 8 --moe-router-topk {chosen} --train-iters 1".split()
    _, plan = _config(words, 1)
    mixture = _mixture(plan)
    mixture = replace(mixture, router=replace(mixture.router, chosen=chosen, capacity=capacity))
    assert Mixture.largest_imbalance(mixture, ranks, 64) == pytest.approx(worst)


def _saved_bytes(layout, plan, tokens, choices, recomputed):
    """Return the bytes that the experts save for backward, excluding weights."""
    context = BuildContext(layout, recomputed=recomputed)
    mixture = Mixture(plan, context)
    initialize(mixture.named_parameters(), 1)
    weights = {p.untyped_storage().data_ptr() for p in mixture.parameters()}
    saved = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in weights:
            saved[x.untyped_storage().data_ptr()] = x  # keeps its memory alive
        return x

    x = torch.randn(tokens, plan.hidden, requires_grad=True)
    factors = torch.rand(choices.shape, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        routing = Routing(choices, factors)
        arrived = mixture._exchange.dispatch(x, *routing, equal_counts=True)
        mixture._exchange.combine(mixture.experts(arrived), arrived)()
    return sum(x.untyped_storage().nbytes() for x in saved.values())


@pytest.mark.parametrize("gated", [False, True])
def test_what_an_uneven_load_keeps_is_what_is_estimated(gated):
    """Both processes send all tokens to the first one's experts, which makes two even shares."""
    words = f"--num-experts 8 --train-iters 1 {'--swiglu' * gated} --disable-bias-linear".split()
    words += ["--hidden-size", "64", "--moe-ffn-hidden-size", "96"]
    _, plan = _config(words, 1)
    mixture, tokens = _mixture(plan), 128
    generator = torch.Generator().manual_seed(1)
    even = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(tokens)])
    even[::2], even[1::2] = torch.tensor([0, 5]), torch.tensor([2, 7])  # one expert on each
    uneven = even % 4
    grid = {"expert": 2}
    batch = MicroBatch(sequences=1, length=tokens)
    balanced, first = (
        run_sharing_memory(2, _saved_bytes, mixture, tokens, choices, frozenset(), **grid)[0]
        for choices in (even, uneven)
    )
    predicted = Mixture.activation_bytes(replace(mixture, shared=None), replace(batch, imbalance=2))
    predicted -= Mixture.activation_bytes(replace(mixture, shared=None), batch)
    predicted += 4 * 2 * tokens * 96 * gated  # plain PyTorch also keeps SiLU(gate)
    assert first - balanced == pytest.approx(predicted, rel=0.01)


def _held(layout, words):
    """Return the bytes of weights between updates, of gradients, and of optimizer states."""
    run = build_toy(layout, words)
    parts = [run.optimizer.gradients.part(p) for _, p in run.named_parameters()]
    gradients = {
        p.main_grad.untyped_storage().data_ptr(): p.main_grad.untyped_storage().nbytes()
        for _, p in run.named_parameters()
    }
    states = sum(t.numel() * 4 for t, _ in run.optimizer.named_tensors().values())
    return sum(part.numel() * 4 for part in parts), sum(gradients.values()), states


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("expert_tensor", [1, 2])
def test_weights_gradients_and_states_are_those_estimated(stage, expert_tensor):
    """Two pairs of processes divide the experts between them, or split each expert."""
    case = MixtureCase(4, tensor=2, expert=2, expert_tensor=expert_tensor)
    case = replace(case, flags=f"--sequence-parallel --zero-stage {stage}")
    config, plan = _config(case.words, 4)
    estimate = estimate_memory(config, plan, Layout.at(0, 4, **case.sizes), 2)
    weights, gradients, states = run_sharing_memory(4, _held, case.words, **case.sizes)[0]
    assert states == pytest.approx(estimate.optimizer, rel=0.02)
    if stage == 0:
        assert weights == estimate.parameters
        assert gradients == pytest.approx(estimate.gradients, rel=0.1)  # slots are aligned
    if stage == 3:
        assert gradients == pytest.approx(4 * estimate.optimizer / 8, rel=0.02)
        assert weights == gradients
        assert estimate.parameters > weights
