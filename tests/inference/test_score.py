"""Scores of given tokens: how samples share batches, and what Retro reads along with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.data import DataOptions
from megatron.config.run import ModelRun
from megatron.device import Device
from megatron.inference import score as module
from megatron.inference.load import Loaded
from megatron.inference.score import Sample, Scorer, score_targets, windows
from megatron.parallel.layout import Axis, Layout
from tests.models import test_retro as small


@pytest.mark.parametrize(
    ("split", "lengths"), [(1, [20, 16, 8]), (2, [20, 16, 16]), (3, [20, 20, 20])]
)
def test_samples_of_about_the_same_length_share_a_batch(split: int, lengths: list[int]) -> None:
    """The longest come first. Batches are padded to eights for each rank of a sequence."""
    scorer: Any = object.__new__(Scorer)
    layout = SimpleNamespace(sequence=SimpleNamespace(size=split))
    scorer.loaded, scorer.micro_batch = SimpleNamespace(layout=layout), 2
    scorer._length_multiple, scorer.window = module._MULTIPLE, 20
    plan = scorer._plan([3, 20, 0, 9, 17])
    assert [[*batch.samples] for batch in plan] == [[1, 4], [3, 0], [2]]
    assert [batch.length for batch in plan] == lengths


def test_windows_score_each_token_but_the_first_once() -> None:
    def found(count: int, window: int, step: int) -> list[tuple[int, int, int]]:
        """Return the first and last token of each window, and how many it scores."""
        samples = windows(np.arange(count), window, step)
        return [(int(s.tokens[0]), int(s.tokens[-1]), s.scored) for s in samples]

    assert found(10, 4, 2) == [(0, 4, 4), (2, 6, 2), (4, 8, 2), (6, 9, 1)]
    assert found(10, 4, 99) == [(0, 4, 4), (4, 8, 4), (8, 9, 1)]
    assert found(9, 4, 4) == [(0, 4, 4), (4, 8, 4)]
    assert (found(2, 4, 1), found(1, 4, 1), found(0, 4, 1)) == ([(0, 1, 1)], [], [])


def test_padding_has_no_probability_and_the_first_of_the_likeliest_is_greedy() -> None:
    """The tests of the tasks that score compare layouts."""
    logits = torch.tensor([[0.0, 2, 2, -1, 9, 9], [3, 1, 2, 3, 9, 9], [0, 0, 0, 1, 9, 9]])
    targets = torch.tensor([2, 0, 3])
    expected = logits[:, :4].log_softmax(1)[torch.arange(3), targets]
    scores, greedy = score_targets(logits, targets, Axis(), entries=4)
    torch.testing.assert_close(scores, expected)
    assert greedy.tolist() == [False, True, True]


@pytest.mark.parametrize(("rank", "kept"), [(0, [0, 1, 2]), (1, [0]), (2, [])])
def test_each_rank_leaves_out_its_own_padding(
    rank: int, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "all_reduce", lambda x, *_: x)
    axis: Any = SimpleNamespace(size=3, rank=rank)
    logits = torch.zeros(1, 3)
    score_targets(logits, torch.tensor([0]), axis, entries=4)
    assert (logits[0] == 0).nonzero().flatten().tolist() == kept


@torch.no_grad()
def test_retro_reads_the_neighbors_of_each_sample_s_whole_chunks() -> None:
    flags = {"max_position_embeddings": 40}
    config = ModelRun(
        model=small.config(**{**small.FLAGS, **flags}), data=DataOptions(seq_length=32)
    )
    model, vocab = small.retro(flags).eval(), small.VOCAB - 3  # the last entries are padding
    tokenizer: Any = SimpleNamespace(vocab_size=vocab)
    loaded = Loaded(model, tokenizer, config, 0, Layout.single())  # type: ignore[arg-type]
    draw, m = np.random.default_rng(3), config.model.chunk_length
    samples = []
    for length, scored in ((3, 3), (2 * m, 5), (2 * m + 1, 1), (32, 32), (m, 0)):
        neighbors = draw.integers(vocab, size=(length // m, 3, 2 * m))
        tokens = draw.integers(vocab, size=length + 1)
        samples.append(Sample(tokens, scored, lambda neighbors=neighbors: neighbors))
    done: list[tuple[int, int]] = []
    scorer = Scorer(loaded, Device.cpu(), 2)
    assert (scorer.window, scorer._length_multiple) == (32, m)  # whole chunks of its samples
    found = scorer.score(samples, lambda *count: done.append(count))
    assert done == [(1, 3), (2, 3), (3, 3)]
    for sample, score in zip(samples, found, strict=True):
        assert sample.neighbors is not None
        length = len(sample.tokens) - 1
        chunks = -(-length // m)
        inputs, read = np.zeros(chunks * m, np.int64), np.zeros((chunks, 3, 2 * m), np.int64)
        inputs[:length], read[: length // m] = sample.tokens[:-1], sample.neighbors()
        logits = model(torch.from_numpy(inputs[None]), torch.from_numpy(read[None]))
        part = slice(length - sample.scored, length)
        scores, targets = logits[0, part, :vocab].log_softmax(1), torch.tensor(sample.tokens[1:])
        own = scores.gather(1, targets[part, None])
        assert score.log_probability == pytest.approx(own.sum().item(), abs=1e-4)
        assert score.is_greedy == bool((scores.argmax(1) == targets[part]).all())
