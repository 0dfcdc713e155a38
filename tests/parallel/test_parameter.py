"""Initialization by global index: known answers, shards equal slices, distributions."""

import math

import pytest
import torch
from torch import nn

from megatron.parallel import parameter as initialization
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import Init, ParameterSpec, fill, initialize, philox
from megatron.parallel.random import derive_key, derive_seed, micro_batch_seed
from tests.parallel.buffers import new_parameter

NORMAL = Init("normal", 0.02)
KEY = (1, 2)

# kat_vectors of the Random123 distribution: counter, key, result.
PHILOX_ANSWERS = [
    ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        (0xFFFFFFFF, 0xFFFFFFFF),
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def part(global_shape, shape, offset, *, init=NORMAL, dtype=torch.float32):
    tensor = torch.full(shape, math.nan, dtype=dtype)
    fill(tensor, ParameterSpec(global_shape, shape, offset, init), KEY)
    return tensor


def whole(shape, **options):
    return part(shape, shape, (0,) * len(shape), **options)


@pytest.mark.parametrize(("counter", "key", "answer"), PHILOX_ANSWERS)
def test_philox_known_answers(counter, key, answer):
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert [int(word) for word in words] == answer


@pytest.mark.parametrize(
    ("global_shape", "shape", "offset"),
    [
        ((7,), (3,), (2,)),
        ((8, 12), (4, 12), (4, 0)),
        ((8, 12), (8, 6), (0, 6)),
        ((9, 7), (3, 5), (2, 1)),
        ((2, 9, 5), (2, 3, 5), (0, 4, 0)),
        ((3, 5, 7), (2, 3, 4), (1, 1, 2)),
    ],
)
@pytest.mark.parametrize("chunk", [3, 8, 2**21])
def test_any_part_equals_the_slice_of_the_whole(global_shape, shape, offset, chunk, monkeypatch):
    box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    expected = whole(global_shape)[box]
    monkeypatch.setattr(initialization, "CHUNK", chunk)
    torch.testing.assert_close(part(global_shape, shape, offset), expected, rtol=0, atol=0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("shape", "dim"), [((16, 6), 0), ((6, 20), 1), ((2, 12, 5), 1)])
def test_tensor_parallel_parts_join_to_the_whole(shape, dim, size):
    single = new_parameter(shape, init=NORMAL)
    initialize([("layer.weight", single)], seed=1)
    parts = []
    for rank in range(size):
        axis = Layout.at(rank, size, tensor=size).tensor
        parts.append(new_parameter(shape, init=NORMAL, axis=axis, split_dim=dim))
        initialize([("layer.weight", parts[-1])], seed=1)
    torch.testing.assert_close(torch.cat(list(parts), dim), single, rtol=0, atol=0)


def test_padding_the_vocabulary_further_keeps_the_rows():
    torch.testing.assert_close(whole((10, 6)), whole((16, 6))[:10], rtol=0, atol=0)


def test_elements_beyond_four_billion_blocks_do_not_repeat_the_first():
    far = part((2**36,), (8,), (2**34,))
    assert not torch.equal(far, part((2**36,), (8,), (0,)))
    assert torch.equal(far[4:], part((2**36,), (4,), (2**34 + 4,)))


def test_no_more_blocks_of_random_words_are_computed_than_needed(monkeypatch):
    blocks = []
    monkeypatch.setattr(
        initialization, "philox", lambda c, key: blocks.append(c[0].numel()) or philox(c, key)
    )
    for shape, offset in (((8,), 0), ((8,), 2), ((6,), 2), ((1,), 3)):
        part((100,), shape, (offset,))
    assert blocks == [2, 3, 2, 1]


def test_normal_distribution():
    values = whole((1000, 1000), dtype=torch.float64).flatten() / NORMAL.scale
    count = values.numel()
    assert abs(values.mean().item()) < 4 / math.sqrt(count)
    assert abs(values.var().item() - 1) < 4 * math.sqrt(2 / count)
    assert abs((values**4).mean().item() - 3) < 4 * math.sqrt(96 / count)
    neighbors = (values[:-1] * values[1:]).mean().item()
    assert abs(neighbors) < 4 / math.sqrt(count)
    inside = (values.abs() < 1).double().mean().item()
    assert inside == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.003)


def test_uniform_distribution():
    values = whole((500, 1000), init=Init("uniform", 0.5), dtype=torch.float64)
    assert -0.5 <= values.min().item() < -0.4999
    assert 0.4999 < values.max().item() <= 0.5
    assert values.var().item() == pytest.approx(1 / 12, rel=0.01)


def test_low_precision_is_the_rounded_value():
    expected = whole((5, 7), dtype=torch.float64).bfloat16()
    torch.testing.assert_close(whole((5, 7), dtype=torch.bfloat16), expected, rtol=0, atol=0)


def test_constants():
    assert torch.equal(whole((3, 2), init=Init("zeros")), torch.zeros(3, 2))
    assert torch.equal(whole((3, 2), init=Init("ones")), torch.ones(3, 2))


def test_values_depend_on_seed_and_name_only():
    def values(name, seed, before=()):
        parameter = new_parameter((4, 4), init=NORMAL)
        others = [(f"other{i}", new_parameter((3,), init=NORMAL)) for i in before]
        initialize([*others, (name, parameter)], seed)
        return parameter

    first = values("a", 1)
    assert isinstance(first, nn.Parameter)
    assert torch.equal(first, values("a", 1, before=range(3)))
    assert not torch.equal(first, values("b", 1))
    assert not torch.equal(first, values("a", 2))


def test_seeds_keep_their_parts_apart():
    seeds = {
        derive_seed(*parts) for parts in [(1, 23), (12, 3), ("1", 23), (1, 2, 3), ("a", "b"), ()]
    }
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "a") == derive_seed(1, "a")
    assert micro_batch_seed(1, 0) != micro_batch_seed(1, 4) != micro_batch_seed(2, 4)
    assert all(0 <= word < 2**32 for word in derive_key(1, "a"))


def test_seeds_are_the_same_in_every_process_and_release():
    assert micro_batch_seed(1234, 0) == 6797456491368868765


def test_cannot_split_unevenly():
    axis = Layout.at(0, 4, tensor=4).tensor
    with pytest.raises(ValueError, match="does not divide evenly over 4 ranks"):
        new_parameter((6, 2), init=NORMAL, axis=axis, split_dim=0)
