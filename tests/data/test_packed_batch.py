"""A micro-batch of packed samples: its loss mask, positions, and shorter sequences."""

from __future__ import annotations

import numpy as np
import torch

from megatron.data.gpt import make_batch, make_loss_mask, shorten
from megatron.data.loader import collate
from megatron.data.sample import SEGMENT_ENDS, TRAINED, Sample

_EOD = 3


def _sample(ends: list[int], trained: list[int]) -> Sample:
    text = np.arange(len(trained) + 1) % 5  # with end-of-document tokens that mean nothing here
    return {"text": text, TRAINED: np.array(trained), SEGMENT_ENDS: np.array(ends), "id": 0}


def test_examples_have_positions_and_losses_of_their_own() -> None:
    rows = [[0, 1, 1, 0, 0, 1, 0, 0], [0, 1, 0, 1, 1, 1, 1, 0]]
    loaded = collate([_sample([3, 7, 8], rows[0]), _sample([8], rows[1])])
    batch = make_batch(loaded, eod=_EOD, eod_mask_loss=True)
    assert batch.loss_mask.dtype == torch.float32
    assert batch.loss_mask.tolist() == rows
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [*range(8)]]
    assert torch.equal(make_loss_mask(loaded, eod=_EOD, eod_mask_loss=False), batch.loss_mask)


def test_a_shorter_sequence_keeps_the_beginnings() -> None:
    loaded = collate([_sample([3, 7, 8], [1] * 8), _sample([8], [0] * 8)])
    batch = make_batch(shorten(loaded, 4), eod=_EOD)
    assert batch.loss_mask.tolist() == [[1] * 4, [0] * 4]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
