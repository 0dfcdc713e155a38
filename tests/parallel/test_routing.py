"""The record of routers: what an update adds to it, and what resets it."""

from __future__ import annotations

import pytest
import torch

from megatron.parallel.layout import Layout
from megatron.parallel.routing import Routers, attach
from tests.distributed import run_distributed

CPU = torch.device("cpu")


def test_losses_and_counts_add_up_until_they_are_popped() -> None:
    routers = Routers()
    first = routers.add(3, ["balance", "z"], None, CPU)
    second = routers.add(2, ["z"], None, CPU)
    assert first.loss_scale is second.loss_scale
    assert first.loss_scale.item() == 1
    assert first.bias is None
    for update in (1, 2):
        for _ in range(2):
            first.add_loss("z", torch.tensor(1.5))
            first.add_loss("balance", torch.tensor(0.25))
            first.count(torch.tensor([[0, 2], [2, -1], [-1, -1]]))
            second.count(torch.tensor([[1]]))
        assert first.counts.tolist() == [2, 0, 4]
        assert second.counts.tolist() == [0, 2]
        assert [losses.tolist() for losses in routers.pop_losses()] == [[0.5, 3], [0]]
        assert not first.counts.any()
        assert not first.losses.any()
        assert first.load.tolist() == [2 * update, 0, 4 * update]
    assert [load.tolist() for load in routers.pop_loads()] == [[4, 0, 8], [0, 4]]
    assert [load.tolist() for load in routers.pop_loads()] == [[0, 0, 0], [0, 0]]


def test_recomputed_layers_record_nothing_and_have_the_seed_of_their_micro_batch() -> None:
    routers = Routers()
    state = routers.add(2, ["z"], None, CPU)
    hits = torch.tensor([6.0, 0.0]), torch.tensor([0.0, 3.0])
    contexts = []
    for seed in (0, 1):
        routers.seed = seed
        contexts += [routers.paused(), routers.paused()]
        mean = state.mean_hits(hits[seed])
        assert mean.tolist() == [[6, 0], [3, 1.5]][seed]
    with contexts[0]:
        assert (state.seed, routers.is_paused) == (0, True)
        state.add_loss("z", torch.tensor(1.0))
        state.count(torch.tensor([[0]]))
        assert state.mean_hits(hits[0]).tolist() == [6, 0]
    assert (state.seed, routers.is_paused) == (1, False)
    assert not state.losses.any()
    assert not state.counts.any()
    assert state.mean_hits(hits[0]).tolist() == [4, 1]
    routers.pop_losses()
    assert state.mean_hits(hits[1]).tolist() == [0, 3]  # a new update has its own mean
    with contexts[1], pytest.raises(KeyError):  # nothing is left of the earlier update
        state.mean_hits(hits[0])


def _biases(layout: Layout) -> list[list[float]]:
    routers = Routers()
    routers.add(2, [], None, CPU)  # has no biases
    states = [routers.add(4, [], 0.5, CPU), routers.add(2, [], 0.25, CPU)]
    states[0].count(torch.tensor([[0, layout.world.rank, 2 * layout.world.rank + 1]]))
    states[1].count(torch.tensor([[0], [1]]))
    for _ in range(2):
        routers.update_biases(layout)
    return [state.bias.tolist() for state in states if state.bias is not None]


def test_biases_move_toward_an_even_load_of_the_global_batch() -> None:
    assert _biases(Layout.single()) == [[-1, -1, 1, 1], [0, 0]]
    # The second rank alone has as many tokens for the last expert as for the first.
    assert run_distributed(2, _biases) == 2 * [[[-1, -1, 1, 1], [0, 0]]]
    Routers().update_biases(Layout.single())


def test_the_backward_pass_of_a_tensor_scales_the_loss_attached_to_it() -> None:
    x, weight = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    scale = torch.tensor(1.0)
    out = attach(x * 2, weight.square().bfloat16(), scale)
    scale.fill_(8)  # known only when the backward pass runs
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    assert weight.grad == 8 * 2 * 3
