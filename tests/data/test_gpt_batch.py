"""Inputs, labels, masks and positions against a plain loop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megatron.data.gpt import DocumentEnds, longest_segment, make_batch, shorten
from megatron.data.loader import collate
from megatron.data.sample import LONGEST_SEGMENT, SEGMENT_ENDS
from megatron.kernels.segments import Segments

EOD = 0


def loop(row: list[int]) -> tuple[list[float], list[int], list[list[bool]]]:
    """Return loss mask, positions and attention of one sample's inputs, token by token."""
    documents, positions, document, position = [], [], 0, 0
    for token in row:
        documents.append(document)
        positions.append(position)
        position += 1
        if token == EOD:
            document, position = document + 1, 0
    size = len(row)
    attends = [
        [key <= query and documents[key] == documents[query] for key in range(size)]
        for query in range(size)
    ]
    return [float(token != EOD) for token in row], positions, attends


@pytest.mark.parametrize(("positions", "loss"), itertools.product([False, True], repeat=2))
def test_equals_the_loop(positions: bool, loss: bool) -> None:
    text = torch.randint(0, 4, (5, 33), generator=torch.Generator().manual_seed(0))
    text[0] = 1  # no end at all
    text[1, :2] = EOD  # ends at the very start
    text[2, -2:] = EOD  # an end as the last input and as the last label
    samples = DocumentEnds([{"text": row.numpy(), "id": i} for i, row in enumerate(text)], EOD)
    loaded = collate([samples[i] for i in range(len(text))])
    assert torch.equal(loaded["text"], text)
    batch = make_batch(
        loaded,
        eod=EOD,
        reset_position_ids=positions,
        eod_mask_loss=loss,
    )
    assert torch.equal(batch.tokens, text[:, :-1])
    assert torch.equal(batch.labels, text[:, 1:])
    assert batch.loss_mask.dtype == torch.float32
    mask = Segments.of(loaded[SEGMENT_ENDS], batch.tokens).mask
    assert mask.shape == (5, 1, 32, 32)
    for i, row in enumerate(text[:, :-1].tolist()):
        want_loss, want_positions, want_attention = loop(row)
        assert batch.loss_mask[i].tolist() == (want_loss if loss else [1.0] * 32)
        assert batch.position_ids[i].tolist() == (want_positions if positions else [*range(32)])
        assert mask[i, 0].tolist() == want_attention


@pytest.mark.parametrize(("documents", "segments"), [(2, 16), (8, 16), (9, 32), (16, 32), (17, 64)])
def test_documents_are_filled_up_with_empty_ones(documents: int, segments: int) -> None:
    """A power of two limits the number of shapes. Empty documents mask nothing."""
    ends = np.append(np.arange(1, documents), 32)
    found = collate([{SEGMENT_ENDS: ends}, {SEGMENT_ENDS: ends}])[SEGMENT_ENDS]
    listed = [0, *ends, *(32 + ends)]
    assert found.tolist() == listed + [64] * (segments + 1 - len(listed))
    tokens = torch.zeros(2, 32)
    plain = Segments.of(torch.tensor(listed), tokens)
    assert torch.equal(Segments.of(found, tokens).mask, plain.mask)


@pytest.mark.parametrize(("lengths", "longest"), [([1, 1], 128), ([128, 5], 128), ([9, 300], 384)])
def test_the_longest_document_is_known_without_reading_the_batch(
    lengths: list[int], longest: int
) -> None:
    """The length is rounded up to whole tiles of the kernel."""
    ends = np.cumsum(lengths)
    batch = collate([{SEGMENT_ENDS: ends}])
    assert batch[LONGEST_SEGMENT].shape == (longest, 0)
    assert longest_segment(batch) == longest
    assert longest_segment({SEGMENT_ENDS: batch[SEGMENT_ENDS]}) is None
    text = torch.zeros(1, int(ends[-1]) + 1)
    assert shorten({**batch, "text": text}, 2)[LONGEST_SEGMENT].shape == (2, 0)
