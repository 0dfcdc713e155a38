"""Boxes of indices: intersections, and whether parts tile a whole."""

import itertools
import math
import random
import time

import pytest
import torch

from megatron.checkpoint.entries import Box, boxes_of_range, is_tiled


def test_within_picks_the_common_part():
    whole = torch.arange(60).reshape(6, 10)
    outer, wanted = Box((2, 3), (4, 5)), Box((0, 6), (4, 4))
    common = outer.intersect(wanted)
    assert common == Box((2, 6), (2, 2))
    held = whole[2:6, 3:8]
    assert torch.equal(held[common.slices_in(outer)], whole[2:4, 6:8])


def test_boxes_that_touch_do_not_meet():
    assert Box((0, 0), (2, 3)).intersect(Box((2, 0), (2, 3))) is None


def test_a_scalar_is_tiled_by_one_box():
    scalar = Box((), ())
    assert is_tiled((), [scalar])
    assert not is_tiled((), [])
    assert not is_tiled((), [scalar, scalar])
    assert scalar.intersect(scalar) == scalar


def test_tiling_agrees_with_counting_every_index():
    rng = random.Random(0)
    verdicts = set()
    for _ in range(3000):
        shape = (rng.randint(1, 3), rng.randint(1, 3))
        boxes = [
            Box(
                (rng.randint(0, 2), rng.randint(0, 2)),
                (rng.randint(0, shape[0]), rng.randint(0, shape[1])),
            )
            for _ in range(rng.randint(1, 4))
        ]
        indices = [
            index
            for box in boxes
            for index in itertools.product(
                *(range(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
            )
        ]
        every = sorted(itertools.product(range(shape[0]), range(shape[1])))
        inside = all(box.fits(shape) for box in boxes)
        expected = inside and sorted(indices) == every
        assert is_tiled(shape, boxes) == expected, (shape, boxes)
        verdicts.add(expected)
    assert verdicts == {True, False}


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_twenty_thousand_pieces_take_less_than_a_second(axis):
    count, shape = 20_000, [4, 3, 2]
    shape[axis] = count
    part = [1 if i == axis else size for i, size in enumerate(shape)]
    boxes = [Box(tuple(k if i == axis else 0 for i in range(3)), tuple(part)) for k in range(count)]
    random.Random(0).shuffle(boxes)
    started = time.process_time()
    assert is_tiled(tuple(shape), boxes)
    assert not is_tiled(tuple(shape), [*boxes[1:], boxes[1]])  # a gap, and an overlap elsewhere
    assert time.process_time() - started < 10  # comparing all pairs takes minutes


def test_a_grid_of_pieces_is_checked_in_three_dimensions():
    cuts = [(0, 1, 4), (0, 2, 3), (0, 5)]
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    boxes = [
        Box(tuple(a for a, _ in corner), tuple(b - a for a, b in corner))
        for corner in itertools.product(*spans)
    ]
    assert is_tiled((4, 3, 5), boxes)
    assert is_tiled((4, 3, 5), [*boxes, Box((1, 1, 1), (0, 1, 1))])  # an empty box fills nothing
    for i in range(len(boxes)):
        assert not is_tiled((4, 3, 5), boxes[:i] + boxes[i + 1 :])
        assert not is_tiled((4, 3, 5), [*boxes, boxes[i]])
    assert not is_tiled((4, -3, 5), [])
    assert is_tiled((4, 0, 5), [])


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 1, 3), (2, 3, 2, 2)])
def test_boxes_of_a_range_are_its_elements_in_order(shape):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for start, end in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        boxes = boxes_of_range(shape, start, end)
        parts = [whole[box.slices_in(Box.whole(shape))] for box in boxes]
        assert [value for part in parts for value in part.flatten().tolist()] == list(
            range(start, end)
        )
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        assert all(part.numel() == box.volume for part, box in zip(parts, boxes, strict=True))
