"""Log probabilities of given tokens under a model, in any parallel layout.

Data-parallel processes take turns with the batches, pipeline stages pass them on, and each tensor
rank holds a part of the vocabulary. Every process ends up with all scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron.device import Device
from megatron.inference.load import Loaded
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis
from megatron.parallel.pipeline.executor import run_schedule
from megatron.parallel.pipeline.p2p import PipelineChannel
from megatron.parallel.pipeline.schedule import forward_only, make_schedule

_MULTIPLE = 8  # padded lengths are multiples of this, which keeps shapes few and efficient
_IN_FLIGHT = 32  # number of batches between waits for sent messages
_LOGITS = 2**27  # number of logits held in fp32 at a time

Item = TypeVar("Item")


class Sample(NamedTuple):
    """A sequence of tokens, the last of which are to be scored.

    Attributes:
        tokens: Token ids. There may be one more than fits in the model's context window, because
            the last one is only a target.
        scored: Number of tokens to score, counted from the end. Each needs a token before it.
        neighbors: For Retro, a function that returns the tokens [l, k, r] of the neighbors of the
            sample's chunks, called when they are needed. The last chunk may be incomplete.
    """

    tokens: Sequence[int] | NDArray[np.integer]
    scored: int
    neighbors: Callable[[], NDArray[np.int64]] | None = None


class Score(NamedTuple):
    """The score of a sample.

    Attributes:
        log_probability: Natural log probability of all scored tokens together.
        is_greedy: Whether each scored token is the most likely one at its position.
    """

    log_probability: float
    is_greedy: bool


class _Batch(NamedTuple):
    """The indices of the samples in one forward pass, and their padded length."""

    samples: Sequence[int]
    length: int


class Scorer:
    """A model that scores samples. Construction and `score` are collective over the layout."""

    def __init__(self, loaded: Loaded, device: Device, micro_batch: int) -> None:
        """Connect the pipeline stages.

        Args:
            loaded: The model. Padding entries of its vocabulary get no probability.
            device: Device to run on.
            micro_batch: Maximum number of samples in a forward pass.
        """
        self.loaded = loaded
        self.device = device.torch_device
        self.micro_batch = micro_batch
        model = loaded.config.model
        is_retro = model.architecture == "retro"
        # Retro's sequences consist of whole chunks.
        self._length_multiple = model.chunk_length if is_retro else _MULTIPLE
        length = loaded.config.data.seq_length
        self.window = length if is_retro else model.longest_context
        dtype = loaded.config.precision.stream_dtype
        self._channel = PipelineChannel(loaded.layout, device=self.device, dtype=dtype)

    def score(self, samples: Sequence[Sample], on_batch: Callable[[int, int], None]) -> list[Score]:
        """Return a score for each sample, in order, on every process. Collective.

        Args:
            samples: The samples, which are the same on every process.
            on_batch: A function called after each batch of this process with the number of finished
                batches and the total number of its batches.
        """
        layout = self.loaded.layout
        lengths = [len(sample.tokens) - 1 for sample in samples]
        assert max(lengths, default=0) <= self.window, "a sample is longer than the window"
        local_batches = self._plan(lengths)[layout.data.rank :: layout.data.size]
        results = torch.zeros(len(samples), 3, dtype=torch.float64)
        count = itertools.count(1)
        for group in _groups(local_batches, _IN_FLIGHT):
            self._run(group, samples, results, lambda: on_batch(next(count), len(local_batches)))
        totals = all_reduce(results.to(self.device), layout.world).tolist()
        assert all(count == 1 for _, _, count in totals), "a sample was not scored once"
        return [Score(log_probability, greedy == 1) for log_probability, greedy, _ in totals]

    def _plan(self, lengths: Sequence[int]) -> list[_Batch]:
        """Group samples of about the same length, given the length of each sample's input.

        The longest come first, so that the run fails immediately if memory is too small.
        """
        multiple = self._length_multiple * self.loaded.layout.sequence.size
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        return [
            _Batch(rows, min(-(-max(1, lengths[rows[0]]) // multiple) * multiple, self.window))
            for rows in _groups(order, self.micro_batch)
        ]

    def _run(
        self,
        batches: Sequence[_Batch],
        samples: Sequence[Sample],
        results: Tensor,
        on_batch: Callable[[], None],
    ) -> None:
        """Run some batches. On the last pipeline stage, fill in their samples' rows of `results`.

        Args:
            batches: The batches to run.
            samples: All samples, which the batches refer to by index.
            results: [samples, 3]: log probability, whether greedy, and 1 to count the sample.
            on_batch: A function called after each batch.
        """
        layout, stages = self.loaded.layout, self.loaded.layout.pipeline.size

        def step(index: int, hidden: Tensor | None) -> Tensor:
            batch_samples = [samples[i] for i in batches[index].samples]
            # Leave out each sample's last token, and pad with zeros, to which no real token
            # attends.
            tokens = np.zeros((len(batch_samples), batches[index].length), np.int64)
            for row, sample in zip(tokens, batch_samples, strict=True):
                row[: len(sample.tokens) - 1] = sample.tokens[:-1]
            inputs = [tokens]
            if batch_samples[0].neighbors is not None:
                inputs.append(self._neighbors(batch_samples, batches[index].length))
            device_inputs = [torch.from_numpy(array).to(self.device) for array in inputs]
            output = self.loaded.model(*device_inputs, hidden=hidden)
            if layout.pipeline.is_last:
                scores = self._scores(output, batch_samples)
                if layout.tensor.is_first:
                    results[list(batches[index].samples)] = scores
            on_batch()
            return output

        def shape_of(index: int) -> tuple[int, int, int]:
            """Return the shape [s, b, h] of the hidden states that stages send to each other."""
            batch, hidden = batches[index], self.loaded.model.plan.hidden
            rows = batch.length + self.loaded.config.model.neighbor_tokens(batch.length)
            return rows // layout.sequence.size, len(batch.samples), hidden

        channel = self._channel.with_shapes(shape_of)
        schedule = forward_only(make_schedule("1f1b", stages, 1, len(batches)))
        run_schedule(schedule[layout.pipeline.rank], [step], channel, before=layout.journal.enter)

    def _neighbors(self, samples: Sequence[Sample], length: int) -> NDArray[np.int64]:
        """Return the tokens [b, l, k, r] of neighbors, zeros for chunks of padding."""
        model = self.loaded.config.model
        chunks, num_neighbors = length // model.chunk_length, model.retro_num_neighbors
        tokens = np.zeros((len(samples), chunks, num_neighbors, model.neighbor_length), np.int64)
        for row, sample in zip(tokens, samples, strict=True):
            assert sample.neighbors is not None, "all samples have neighbors, or none"
            neighbors = sample.neighbors()
            row[: len(neighbors)] = neighbors
        return tokens

    def _scores(self, logits: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Return [b, 3] on the CPU: log probability, whether greedy, and 1 as the sample's count.

        Args:
            logits: Logits [b, s, v/t].
            samples: The samples of the batch.
        """
        scored = [
            (row, len(sample.tokens) - 1 - sample.scored + k, int(token))
            for row, sample in enumerate(samples)
            for k, token in enumerate(sample.tokens[len(sample.tokens) - sample.scored :])
        ]
        result = torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64).repeat(len(samples), 1)
        if not scored:
            return result
        axis, entries = self.loaded.layout.tensor, self.loaded.tokenizer.vocab_size
        rows, columns, targets = torch.tensor(scored, device=logits.device).t()
        size = max(1, _LOGITS // logits.shape[-1])
        parts = [
            score_targets(logits[row, column].float(), target, axis, entries=entries)
            for row, column, target in zip(
                rows.split(size), columns.split(size), targets.split(size), strict=True
            )
        ]
        log_probabilities, is_greedy = (
            torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True)
        )
        result[:, 0].index_add_(0, rows.cpu(), log_probabilities.double())
        result[rows.cpu()[~is_greedy], 1] = 0.0
        return result


def score_targets(
    logits: Tensor, targets: Tensor, axis: Axis, *, entries: int
) -> tuple[Tensor, Tensor]:
    """Return each target's log probability, and whether it is the most likely entry.

    If several entries are equally likely, the first counts as the most likely one. This does not
    depend on the number of ranks.

    Args:
        logits: fp32 logits [n, v/t] of this rank's part of the padded vocabulary. Changed in place.
        targets: Token ids [n] in the whole vocabulary.
        axis: The tensor axis.
        entries: Size of the vocabulary without padding.

    Returns:
        The log probabilities, fp32 [n], and whether each target is greedy, bool [n]. Both are the
        same on every rank.
    """
    size = logits.shape[1]
    first = axis.rank * size
    logits[:, max(0, entries - first) :] = torch.finfo(logits.dtype).min
    values, best = logits.max(dim=1)
    maxima = all_reduce(values.clone(), axis, dist.ReduceOp.MAX)
    out_of_range = axis.size * size
    best = all_reduce(
        torch.where(values == maxima, best + first, out_of_range), axis, dist.ReduceOp.MIN
    )
    sums = (logits - maxima[:, None]).exp().sum(dim=1)
    local = targets - first
    is_local = (local >= 0) & (local < size)
    target_logits = logits.gather(1, local.clamp(0, size - 1)[:, None]).squeeze(1) - maxima
    sums, target_logits = all_reduce(
        torch.stack((sums, torch.where(is_local, target_logits, 0.0))), axis
    )
    return target_logits - sums.log(), best == targets


def windows(tokens: NDArray[np.integer], window: int, step: int) -> Iterator[Sample]:
    """Yield a long text in overlapping windows that score every token but the first exactly once.

    The first window scores all its tokens but the first. Each later window begins `step` tokens
    after the previous one, and scores only the tokens that it adds.

    Args:
        tokens: Token ids of the text.
        window: Length of a window in tokens, without the last target.
        step: Number of tokens between the starts of two windows, limited to `window`.
    """
    step = min(step, window)
    end = min(window + 1, len(tokens))
    if end > 1:
        yield Sample(tokens[:end], end - 1)
    while end < len(tokens):
        first = end + step - window - 1
        start, end = end, min(end + step, len(tokens))
        yield Sample(tokens[first:end], end - start)


def _groups(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
