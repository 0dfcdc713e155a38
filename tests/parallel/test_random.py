"""Random numbers that differ over an axis, but only inside a split region."""

from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from megatron.parallel.layout import Layout
from megatron.parallel.random import split_region

CPU = torch.device("cpu")


def _axis(rank: int, size: int = 2):
    return Layout.at(rank, size, tensor=size).tensor


def _draw(rank: int, *sites: int | str, seed: int = 1) -> list[torch.Tensor]:
    """Return numbers drawn before the regions, inside each, and after them."""
    torch.manual_seed(seed)
    drawn = [torch.rand(4)]
    for site in sites:
        with split_region(_axis(rank), CPU, site):
            drawn.append(torch.rand(4))
    return [*drawn, torch.rand(4)]


def test_ranks_differ_inside_and_agree_outside():
    first, second = _draw(0, "a"), _draw(1, "a")
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])
    torch.manual_seed(1)
    assert torch.equal(torch.stack((torch.rand(4), torch.rand(4))), torch.stack(first[::2]))


def test_sites_and_seeds_differ_and_repeat():
    _, one, two, again, _ = _draw(0, "a", "b", "a")
    assert not torch.equal(one, two)
    assert torch.equal(one, again)
    assert not torch.equal(one, _draw(0, "a", seed=2)[1])


def test_one_process_draws_as_without():
    torch.manual_seed(1)
    with split_region(replace(_axis(0, 1)), CPU, "a"):
        inside = torch.rand(4)
    torch.manual_seed(1)
    assert torch.equal(inside, torch.rand(4))


def test_an_error_leaves_the_generator_where_it_was():
    torch.manual_seed(1)
    try:
        with split_region(_axis(1), CPU, "a"):
            raise KeyError
    except KeyError:
        pass
    after = torch.rand(4)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(4))


def test_recomputation_draws_the_same():
    x = torch.ones(64, requires_grad=True)
    masks = []

    def drop(x):
        with split_region(_axis(1), CPU, "a"):
            out = torch.dropout(x * 2, 0.5, True)
        masks.append(out.detach() != 0)
        return out.square()

    torch.manual_seed(1)
    out = checkpoint(drop, x, use_reentrant=False)
    torch.manual_seed(2)  # the next micro-batch has started in the meantime
    out.sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks)
