"""Divergence from a teacher's distribution, over a vocabulary split over tensor ranks.

Logits keep their dtype. fp32 values exist only for a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.cross_entropy import CHUNK, REFERENCE
from megatron.parallel.collectives import all_gather, all_reduce
from megatron.parallel.cross_entropy import join_statistics, local_labels
from megatron.parallel.layout import Axis


class TopLogProbs(NamedTuple):
    """The most likely next tokens in a teacher's distribution, the same on every tensor rank.

    Attributes:
        ids: The tokens, as ids in the whole vocabulary, [..., k]; -1 means no entry.
        values: The log-probabilities of these tokens, [..., k]; -inf for no entry.
        rest: The log-probability of all other tokens together, [...]; -inf if there are none.
    """

    ids: Tensor
    values: Tensor
    rest: Tensor


class VocabularyPart(NamedTuple):
    """The entries of a vocabulary that a tensor rank holds.

    Attributes:
        axis: The tensor axis.
        entries: The size of the tokenizer's vocabulary. A teacher's distribution excludes the
            padding after these entries.
    """

    axis: Axis
    entries: int

    def real(self, size: int) -> int:
        """Return the number of this rank's `size` entries that are not padding."""
        return min(max(self.entries - self.axis.rank * size, 0), size)


class DistillationLosses(NamedTuple):
    """Two losses per token, fp32 [s, b], equal on every tensor rank.

    Attributes:
        cross_entropy: -log softmax(logits)[label].
        divergence: T^2 * KL(teacher || student), with both distributions at temperature T. The
            factor keeps the magnitude of gradients the same for every T (Hinton et al., 2015).
    """

    cross_entropy: Tensor
    divergence: Tensor


def distillation_losses(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | TopLogProbs,
    vocabulary: VocabularyPart,
    *,
    temperature: float = 1.0,
    reuse_logits: bool = False,
) -> DistillationLosses:
    """Return each token's cross entropy, and its divergence from a teacher's distribution.

    If only the teacher's top k are known, the distributions have k + 1 outcomes: the k tokens, and
    any other token. The divergence never exceeds the divergence over the whole vocabulary. The
    forward pass is collective over the tensor axis.

    Args:
        logits: This rank's shard of the logits over the padded vocabulary, [s, b, v/t].
        labels: The labels [s, b], as ids in the whole vocabulary.
        teacher: The teacher's logits [s, b, v/t], or its top k log-probabilities at `temperature`
            for [s, b] tokens.
        vocabulary: The tensor axis, and the size of the vocabulary without padding.
        temperature: The temperature T, by which logits are divided for the divergence.
        reuse_logits: Whether the backward pass overwrites the logits with their gradient. If so,
            nothing else may need the logits, and the backward pass can run only once.
    """
    n = labels.numel()
    parts: tuple[Tensor, ...]
    if isinstance(teacher, TopLogProbs):
        ids, values, rest = teacher
        values, rest = values.reshape(n, -1).float(), rest.reshape(n).float()
        # Log-probabilities rounded to 16 bits no longer add up to 1.
        total = torch.cat((values, rest[:, None]), 1).logsumexp(1)
        parts = (ids.reshape(n, -1).long(), values - total[:, None], rest - total)
    else:
        parts = (teacher.detach().reshape(n, -1),)
    options = _Options(vocabulary, temperature, reuse_logits)
    return DistillationLosses(*_Distillation.apply(logits, labels, options, *parts))


def top_log_probs(
    logits: Tensor,
    vocabulary: VocabularyPart,
    *,
    k: int,
    p: float | None = None,
    min_k: int = 1,
    temperature: float = 1.0,
) -> TopLogProbs:
    """Return the top k of softmax(logits / temperature), equal on every tensor rank. Collective.

    Args:
        logits: This rank's shard of the logits of n tokens, [n, v/t].
        vocabulary: The tensor axis, and the size of the vocabulary without padding.
        k: The maximum number of entries per token; values above the vocabulary size keep all.
        p: The total probability to cover with as few entries as possible, at most k; `None` keeps k
            entries.
        min_k: The minimum number of entries, regardless of `p` but not above k.
        temperature: The temperature, by which logits are divided.

    Returns:
        The ids and values [n, k], the most likely first, and `rest` [n].
    """
    axis, size = vocabulary.axis, logits.shape[1]
    real, k = vocabulary.real(size), min(k, vocabulary.entries)
    all_ids, all_values, rests = [], [], []
    for rows in _chunks(logits.shape[0], size):
        x = logits[rows, :real].float() / temperature
        log_sum = _log_sum(x, axis)
        values, ids = x.topk(min(k, real), dim=1)
        values = _gather(values, -torch.inf, k, axis)
        ids = _gather(ids + axis.rank * size, -1, k, axis)
        values, order = values.topk(k, dim=1)
        ids, values = ids.gather(1, order), values - log_sum[:, None]
        if p is not None:
            probabilities = values.exp()
            is_kept = (probabilities.cumsum(1) - probabilities < p) | (
                torch.arange(k, device=x.device) < min_k
            )
            ids, values = ids.where(is_kept, -1), values.where(is_kept, -torch.inf)
        _, is_top = _locate(ids, axis.rank * size, real)
        all_ids.append(ids)
        all_values.append(values)
        rests.append(_log_sum(x.masked_fill(is_top, -torch.inf), axis) - log_sum)
    return TopLogProbs(torch.cat(all_ids), torch.cat(all_values), torch.cat(rests))


class _Options(NamedTuple):
    """The settings of `distillation_losses`."""

    vocabulary: VocabularyPart
    temperature: float
    reuse_logits: bool


class _Distillation(torch.autograd.Function):
    """An autograd function for both losses, which saves the logits and a few values per token."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, options: _Options, *teacher: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, axis = logits.reshape(-1, logits.shape[-1]), options.vocabulary.axis
        n, size = rows.shape
        local = local_labels(labels, axis, size)
        part = REFERENCE.statistics(rows, local)
        maxima, sums, loss = join_statistics(part, local, size, axis)
        divergence = torch.empty_like(loss)
        # Two values per token: the log of the student's sum of exponentials; and the log of the
        # teacher's sum or, with a top k, of the student's probability outside the top k.
        notes = torch.empty(2, n, device=rows.device)
        for chunk_rows in _chunks(n, size):
            chunk = _chunk_of(rows, teacher, chunk_rows, options)
            divergence[chunk_rows], notes[0, chunk_rows], notes[1, chunk_rows] = chunk.divergence()
        ctx.save_for_backward(logits, local, maxima, sums, notes, *teacher)
        ctx.options = options
        divergence *= options.temperature**2
        return loss.view(labels.shape), divergence.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, divergence_grad: Tensor) -> tuple[Tensor | None, ...]:
        options: _Options = ctx.options
        logits, local, maxima, sums, notes, *teacher = ctx.saved_tensors
        rows = logits.reshape(-1, logits.shape[-1])
        result = rows if options.reuse_logits else torch.empty_like(rows)
        upstream, factor = grad.reshape(-1), divergence_grad.reshape(-1) * options.temperature
        for chunk_rows in _chunks(*rows.shape):
            # The chunk copies the logits before they are overwritten.
            chunk = _chunk_of(rows, teacher, chunk_rows, options)
            divergence_part = chunk.gradient(*notes[:, chunk_rows]).mul_(factor[chunk_rows, None])
            statistics = (
                rows[chunk_rows],
                local[chunk_rows],
                maxima[chunk_rows],
                sums[chunk_rows],
                upstream[chunk_rows],
            )
            REFERENCE.gradient(*statistics, result[chunk_rows])
            result[chunk_rows, : divergence_part.shape[1]] += divergence_part
        if options.reuse_logits:  # autograd does not see what kernels write
            torch.autograd.graph.increment_version(logits)
        return result.view(logits.shape), None, None, *(None for _ in teacher)


def _chunk_of(
    rows: Tensor, teacher: Any, chunk_rows: slice, options: _Options
) -> _WholeChunk | _TopChunk:
    """Return the fp32 logits of a few tokens, together with the teacher's distribution."""
    axis, size = options.vocabulary.axis, rows.shape[1]
    real = options.vocabulary.real(size)
    x = rows[chunk_rows, :real].float() / options.temperature
    if len(teacher) == 1:
        return _WholeChunk(x, teacher[0][chunk_rows, :real].float() / options.temperature, axis)
    ids, values, rest = (tensor[chunk_rows] for tensor in teacher)
    return _TopChunk(x, TopLogProbs(ids, values, rest), axis, axis.rank * size)


class _WholeChunk:
    """A chunk of tokens, with the teacher's whole distribution."""

    def __init__(self, x: Tensor, teacher: Tensor, axis: Axis) -> None:
        self.x, self.teacher, self.axis = x, teacher, axis

    def divergence(self) -> tuple[Tensor, Tensor, Tensor]:
        student_sum, teacher_sum = _log_sum(self.x, self.axis), _log_sum(self.teacher, self.axis)
        target = self.teacher - teacher_sum[:, None]
        terms = target.exp().mul_(target - (self.x - student_sum[:, None]))
        return all_reduce(terms.sum(1), self.axis), student_sum, teacher_sum

    def gradient(self, student_sum: Tensor, teacher_sum: Tensor) -> Tensor:
        return (
            (self.x - student_sum[:, None])
            .exp_()
            .sub_((self.teacher - teacher_sum[:, None]).exp_())
        )


class _TopChunk:
    """A chunk of tokens, with the teacher's top k."""

    def __init__(self, x: Tensor, teacher: TopLogProbs, axis: Axis, first: int) -> None:
        self.x, self.teacher, self.axis = x, teacher, axis
        self.columns, self.is_top = _locate(teacher.ids, first, x.shape[1])

    def divergence(self) -> tuple[Tensor, Tensor, Tensor]:
        x, (_, target, rest) = self.x, self.teacher
        student_sum = _log_sum(x, self.axis)
        student_rest = _log_sum(x.masked_fill(self.is_top, -torch.inf), self.axis) - student_sum
        # The additional column collects the entries of other ranks.
        predicted = (
            torch.cat((x, x.new_zeros(len(x), 1)), 1).gather(1, self.columns) - student_sum[:, None]
        )
        counts = (self.columns < x.shape[1]) & target.isfinite()
        terms = torch.where(counts, target.exp() * (target - predicted), 0.0).sum(1)
        of_rest = torch.where(rest.isfinite(), rest.exp() * (rest - student_rest), 0.0)
        return all_reduce(terms, self.axis) + of_rest, student_sum, student_rest

    def gradient(self, student_sum: Tensor, student_rest: Tensor) -> Tensor:
        _, target, rest = self.teacher
        probabilities = (self.x - student_sum[:, None]).exp_()
        share = torch.where(rest.isfinite(), (rest - student_rest).exp(), 0.0)
        result = probabilities * torch.where(self.is_top, 1.0, 1.0 - share[:, None])
        result = torch.cat((result, result.new_zeros(len(result), 1)), 1)
        return result.scatter_add_(1, self.columns, -target.exp())[:, :-1]


def _locate(ids: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """Find ids [n, k] among this rank's `real` entries, whose ids begin at `first`.

    Returns:
        The index of each id among the entries, [n, k], or `real` for ids of other ranks; and
        whether each entry is one of its row's ids, [n, real].
    """
    columns = torch.where((ids >= first) & (ids < first + real), ids - first, real)
    hits = torch.zeros(len(ids), real + 1, dtype=torch.bool, device=ids.device)
    return columns, hits.scatter_(1, columns, True)[:, :-1]


def _gather(x: Tensor, filler: float, k: int, axis: Axis) -> Tensor:
    """Gather the columns of all tensor ranks, padded with `filler` to k per rank: [n, t * k]."""
    if axis.size == 1:
        return x
    columns = F.pad(x, (0, k - x.shape[1]), value=filler)
    return all_gather(columns, axis).view(axis.size, *columns.shape).transpose(0, 1).flatten(1)


def _log_sum(x: Tensor, axis: Axis) -> Tensor:
    """Return the log-sum-exp of each row, [n]; -inf for rows without entries."""
    local = x.logsumexp(1)
    if axis.size == 1:
        return local
    maxima = all_reduce(local.clone(), axis, dist.ReduceOp.MAX).clamp(min=torch.finfo(x.dtype).min)
    return maxima + all_reduce((local - maxima).exp(), axis).log()


def _chunks(rows: int, size: int) -> Iterator[slice]:
    """Divide rows of `size` elements each into chunks of at most CHUNK elements, or one row."""
    height = max(1, CHUNK // size)
    return (slice(i, min(i + height, rows)) for i in range(0, rows, height))
