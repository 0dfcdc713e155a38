"""Which tokens make up sample k of a GPT run: pure functions of lengths, seed and counts.

All documents of a split are repeated for as many epochs as the run needs, shuffled, and laid end to
end. Sample row k covers the tokens from `k * S` to `(k + 1) * S` inclusive (S the sequence length):
S inputs and, one further on, S labels; the last token of a row is the first of the next. A second
shuffle then decides in which order rows are trained on. Three arrays hold the plan:

    documents [E * D]   int32         document of each place, shuffled
    samples   [N + 1, 2] int32        place in `documents` and token offset where each row starts
    shuffle   [N]       uint32/int64  row of sample k

The order of random draws and the array types are those of Megatron-LM, so its caches fit ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.errors import DataError

_INT32_MAX = np.iinfo(np.int32).max
_CHUNK = 1 << 16  # places a step: the work fits a processor's cache, and memory stays flat


class GPTIndex(NamedTuple):
    """The three arrays described at the top of this file."""

    documents: NDArray[np.int32]
    samples: NDArray[np.int32]
    shuffle: NDArray[Any]


@dataclass(frozen=True)
class GPTIndexPlan:
    """What is known before building: sizes of the arrays, and how the last epoch is shuffled.

    Attributes:
        num_documents: documents in the split.
        seq_length: S, in tokens.
        epochs: passes over the split's documents.
        samples: rows of the sample index, at least as many as asked for.
        samples_before_last_epoch: where the separately shuffled last epoch starts; `samples`
            where it is not shuffled separately.
    """

    num_documents: int
    seq_length: int
    epochs: int
    samples: int
    samples_before_last_epoch: int

    @property
    def separate_last_epoch(self) -> bool:
        """Whether the last epoch, of which little is used, is kept apart from the others."""
        return self.samples_before_last_epoch < self.samples

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of the arrays of `GPTIndex`."""
        return (self.epochs * self.num_documents,), (self.samples + 1, 2), (self.samples,)

    @property
    def dtypes(self) -> tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]]:
        """Types of the arrays of `GPTIndex`."""
        wide = self.samples >= np.iinfo(np.uint32).max - 1
        return np.dtype("i4"), np.dtype("i4"), np.dtype("i8" if wide else "u4")


def plan_gpt_index(
    num_documents: int, tokens: int, num_samples: int, seq_length: int
) -> GPTIndexPlan:
    """Find the epochs that `num_samples` samples of `seq_length` take.

    Args:
        num_documents: documents in the split.
        tokens: tokens of one epoch, at least one.

    Raises:
        DataError: the split is so small that its repetitions cannot be counted in 32 bits.
    """
    assert tokens > 0, "an empty split has no index"
    # Least E with (E * tokens - 1) // S >= n.
    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
    if epochs * num_documents > _INT32_MAX:
        raise DataError(
            f"{num_samples} samples of {seq_length} tokens take {epochs} epochs of the split's "
            f"{num_documents} documents ({tokens} tokens), more than {_INT32_MAX} documents in "
            "all: give fewer samples or more data, or cut the dataset into several"
        )
    samples = (epochs * tokens - 1) // seq_length
    return GPTIndexPlan(
        num_documents=num_documents,
        seq_length=seq_length,
        epochs=epochs,
        samples=samples,
        samples_before_last_epoch=_shuffled_together(epochs, tokens, num_samples, seq_length),
    )


def _shuffled_together(epochs: int, tokens: int, num_samples: int, seq_length: int) -> int:
    """Rows that are shuffled as one: all, or those before a last epoch used to less than 80%."""
    if epochs > 1:
        before = ((epochs - 1) * tokens - 1) // seq_length
        per_epoch = (tokens - 1) // seq_length
        if num_samples - before < int(0.80 * per_epoch):
            return before
    return (epochs * tokens - 1) // seq_length


def build_gpt_index(
    plan: GPTIndexPlan, lengths: NDArray[np.int32], first_document: int, seed: int
) -> GPTIndex:
    """Build the three arrays.

    Args:
        plan: of the split that starts at `first_document`.
        lengths: tokens of every sequence of the dataset, `[sequences]`.
        seed: both shuffles draw from one stream of this seed, documents first.
    """
    random = np.random.RandomState(seed)
    documents = _shuffle_documents(plan, first_document, random)
    samples = build_sample_index(lengths, documents, plan.samples, plan.seq_length)
    return GPTIndex(documents, samples, _shuffle_samples(plan, random))


def _shuffle_documents(
    plan: GPTIndexPlan, first: int, random: np.random.RandomState
) -> NDArray[np.int32]:
    """Documents of all epochs, shuffled together or with the last epoch apart."""
    once = np.arange(first, first + plan.num_documents, dtype=np.int32)
    documents = np.tile(once, plan.epochs)
    if plan.separate_last_epoch:
        random.shuffle(documents[: -plan.num_documents])
        random.shuffle(documents[-plan.num_documents :])
    else:
        random.shuffle(documents)
    return documents


def _shuffle_samples(plan: GPTIndexPlan, random: np.random.RandomState) -> NDArray[Any]:
    """Order of the rows, shuffled together or with those of the last epoch apart."""
    order = np.arange(plan.samples, dtype=plan.dtypes[2])
    random.shuffle(order[: plan.samples_before_last_epoch])
    if plan.separate_last_epoch:
        random.shuffle(order[plan.samples_before_last_epoch :])
    return order


def build_sample_index(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], num_samples: int, seq_length: int
) -> NDArray[np.int32]:
    """Where each row starts: place in `documents` and offset in that document, `[N + 1, 2]`.

    Row k starts at token `k * S` of the documents laid end to end. A document that covers the
    tokens `[a, b)` therefore holds the starts of rows `ceil(a / S)` to `ceil(b / S)`: no search is
    needed, and an empty document holds none.

    Args:
        lengths: tokens of every sequence, `[sequences]`.
        documents: sequence at each place, `[places]`.
        num_samples: N; the documents hold at least `N * S + 1` tokens.
        seq_length: S.
    """
    samples = np.empty((num_samples + 1, 2), np.int32)
    token = row = 0
    for first in range(0, len(documents), _CHUNK):
        sizes = lengths[documents[first : first + _CHUNK]].astype(np.int64)
        ends = token + np.cumsum(sizes)
        next_rows = np.minimum((ends + seq_length - 1) // seq_length, num_samples + 1)
        places = np.repeat(np.arange(len(sizes)), np.diff(next_rows, prepend=row))
        end_row = row + len(places)
        starts = np.arange(row, end_row) * seq_length
        samples[row:end_row, 0] = places + first
        samples[row:end_row, 1] = starts - (ends - sizes)[places]
        row, token = end_row, int(ends[-1])
    assert row == num_samples + 1, "fewer tokens than the samples need"
    samples[0] = 0  # as Megatron has it, the first row stands before leading empty documents
    return samples


def is_sound_gpt_index(plan: GPTIndexPlan, index: GPTIndex, first_document: int) -> bool:
    """Whether arrays read from a file can be the plan's, as far as sums and bounds tell.

    A file that was cut and padded with zeros by a crash has the right size; its sums are wrong.
    """
    ends = (first_document, first_document + plan.num_documents - 1)
    documents = plan.epochs * sum(ends) * plan.num_documents // 2
    return (
        int(index.documents.sum(dtype=np.int64)) == documents
        and (int(index.documents.min()), int(index.documents.max())) == ends
        and int(index.shuffle.sum(dtype=np.int64)) == plan.samples * (plan.samples - 1) // 2
        and int(index.shuffle.max(initial=0)) == max(0, plan.samples - 1)
        and bool((np.diff(index.samples[:, 0]) >= 0).all())
        and int(index.samples[-1, 0]) < len(index.documents)
    )


def describe_gpt_index(
    prefix: str, name: str, num_samples: int, seq_length: int, seed: int, split: str
) -> str:
    """The text whose md5 names the cached arrays: Megatron's, so that caches can be shared.

    Args:
        prefix: path of the dataset as the user spelt it.
        name: train, valid or test.
        num_samples: samples asked for.
        split: the --split text as the user spelt it.
    """
    return (
        "GPT Dataset\n\n"
        f"Data prefix {prefix}\n"
        f"Dataset name {name}\n"
        f"Number of samples {num_samples}\n"
        f"Sequence length {seq_length}\n"
        f"Random seed {seed}\n"
        f"Split {split}\n"
    )
