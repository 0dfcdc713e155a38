"""Which samples a process takes: against Megatron's rules, and over changing process counts."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from megatron.data.samplers import CyclicSampler, SingleSampler
from megatron.errors import DataError


def test_single_takes_its_slice_of_each_block() -> None:
    ranks = [list(SingleSampler(26, 0, 4, rank, 3)) for rank in range(3)]
    assert ranks == [
        [[0, 1, 2, 3], [12, 13, 14, 15]],
        [[4, 5, 6, 7], [16, 17, 18, 19]],
        [[8, 9, 10, 11], [20, 21, 22, 23]],
    ]  # 24 and 25 fill no block
    assert list(SingleSampler(26, 12, 4, 1, 3)) == ranks[1][1:]
    assert list(SingleSampler(26, 24, 4, 1, 3)) == []


def steps(sampler: type, total: int, consumed: int, sizes: list[int], global_batch: int) -> list:
    """Sample set of each step, with `sizes[i]` data-parallel processes at step i, micro-batch 1."""
    sets = []
    for size in sizes:
        loaders = [iter(sampler(total, consumed, 1, rank, size)) for rank in range(size)]
        taken = [
            i for loader in loaders for batch in islice(loader, global_batch // size) for i in batch
        ]
        assert len(taken) == len(set(taken)) == global_batch
        sets.append(set(taken))
        consumed += global_batch
    return sets


def test_single_steps_do_not_depend_on_the_number_of_processes() -> None:
    """Scoreboard 7: 4 -> 2 -> 1 -> 3 processes, global batch fixed."""
    changing = steps(SingleSampler, 1000, 0, [4, 4, 2, 2, 1, 1, 3, 3], 12)
    assert changing == [set(range(12 * i, 12 * i + 12)) for i in range(8)]


def test_single_follows_a_growing_global_batch() -> None:
    sampler, consumed, seen = iter(SingleSampler(100, 0, 2, 1, 2)), 0, []
    for global_batch in (4, 4, 8, 12):
        batches = list(islice(sampler, global_batch // 4))
        resumed = list(islice(SingleSampler(100, consumed, 2, 1, 2), global_batch // 4))
        assert batches == resumed
        consumed += global_batch
        seen += batches
    assert seen == [[i, i + 1] for i in range(2, 28, 4)]


def test_cyclic_without_sharding_does_not_depend_on_the_number_of_processes() -> None:
    def sampler(total: int, consumed: int, micro: int, rank: int, size: int) -> CyclicSampler:
        return CyclicSampler(total, consumed, micro, rank, size, data_sharding=False)

    sizes = [4, 2, 1, 3, 4, 2]
    changing = steps(sampler, 36, 0, sizes, 12)  # two epochs of three steps
    assert changing == steps(sampler, 36, 0, [1] * 6, 12)
    assert set.union(*changing[:3]) == set.union(*changing[3:]) == set(range(36))
    assert changing[:3] != changing[3:]


def test_cyclic_shuffles_each_share() -> None:
    samplers = [CyclicSampler(45, 0, 2, rank, 2) for rank in range(2)]
    order = torch.randperm(22, generator=torch.Generator().manual_seed(0))
    for rank, sampler in enumerate(samplers):
        batches = list(islice(sampler, 11))
        assert sum(batches, []) == (order + 22 * rank).tolist()
    second = torch.randperm(22, generator=torch.Generator().manual_seed(1)).tolist()
    assert list(islice(samplers[0], 11, 22)) == [second[i : i + 2] for i in range(0, 22, 2)]


@pytest.mark.parametrize("data_sharding", [True, False])
@pytest.mark.parametrize("consumed", [0, 4, 40, 44, 88, 132])
def test_cyclic_resumes(consumed: int, data_sharding: bool) -> None:
    whole = CyclicSampler(45, 0, 2, 1, 2, data_sharding)
    resumed = CyclicSampler(45, consumed, 2, 1, 2, data_sharding)
    assert list(islice(resumed, 20)) == list(islice(whole, consumed // 4, consumed // 4 + 20))


def test_cyclic_refuses_a_consumed_count_of_other_sizes() -> None:
    with pytest.raises(DataError, match="cyclic"):
        CyclicSampler(45, 6, 2, 0, 2)


@pytest.mark.parametrize("sampler", [SingleSampler, CyclicSampler])
def test_a_dataset_below_one_block_is_refused(sampler: type) -> None:
    with pytest.raises(DataError, match="7 samples"):
        sampler(7, 0, 2, 0, 4)
