"""Best-fit packing: a plan of which examples share a row of s tokens.

Examples are placed in order of decreasing length. Each goes into the row with the least room in
which it still fits, or into a new row. The number of rows, and the lengths that share a row, are
therefore the same in every epoch. In each epoch, examples of equal length swap positions at random,
and the rows get a new random order, both drawn from the seed. Sample i of a run is row `i % rows`
of epoch `i // rows`, so a resumed run needs only a count of samples.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class EpochPlan(NamedTuple):
    """The rows of one epoch, in the order of training.

    Attributes:
        examples: The indexes of the examples, row after row, `[N]`.
        starts: The index in `examples` at which each row begins, followed by N, `[rows + 1]`.
    """

    examples: NDArray[np.int64]
    starts: NDArray[np.int64]

    def row(self, number: int) -> NDArray[np.int64]:
        """Return the examples of a row, longest first."""
        return self.examples[self.starts[number] : self.starts[number + 1]]


@dataclass(frozen=True, eq=False)
class Packing:
    """The distribution of N examples over rows.

    Attributes:
        lengths: The number of tokens in each example, `[N]`.
        seq_length: The number of tokens in a row, s.
        row_indices: The row of each example, `[N]`, in order of decreasing example length.
        rows: The number of rows in an epoch.
    """

    lengths: NDArray[np.int64]
    seq_length: int
    row_indices: NDArray[np.int64]
    rows: int
    _plans: dict[tuple[int, int], EpochPlan] = field(default_factory=dict, repr=False)

    @property
    def fullness(self) -> float:
        """The fraction of the rows' tokens that belong to examples, 0 to 1."""
        return int(self.lengths.sum()) / (self.rows * self.seq_length)

    def epoch(self, number: int, seed: int) -> EpochPlan:
        """Return the rows of an epoch.

        Args:
            number: The index of the epoch.
            seed: The seed for the order of rows.
        """
        random = np.random.RandomState([seed, number])
        mixed = random.permutation(len(self.lengths))
        longest_first = mixed[np.argsort(-self.lengths[mixed], kind="stable")]
        rows = random.permutation(self.rows)[self.row_indices]
        counts = np.bincount(rows, minlength=self.rows)
        return EpochPlan(
            longest_first[np.argsort(rows, kind="stable")], np.concatenate([[0], counts.cumsum()])
        )

    def row(self, i: int, seed: int) -> NDArray[np.int64]:
        """Return the examples of a row, longest first.

        Args:
            i: The index of the row, counted over all epochs.
            seed: The seed for the order of rows.
        """
        epoch, row = divmod(i, self.rows)
        if (epoch, seed) not in self._plans:
            self._plans.clear()  # samples are read in order, and a plan is large
            self._plans[epoch, seed] = self.epoch(epoch, seed)
        return self._plans[epoch, seed].row(row)


def pack(lengths: Sequence[int] | NDArray[np.int64], seq_length: int) -> Packing:
    """Distribute examples over rows by best fit, in order of decreasing length.

    Examples of the same length are placed together, so a million examples take 0.3 s.

    Args:
        lengths: The number of tokens in each example, 1 to `seq_length`, `[N]`.
        seq_length: The number of tokens in a row.
    """
    sizes = _checked(lengths, seq_length)
    row_indices = np.empty(len(sizes), np.int64)
    rows = num_placed = 0
    open_rows: dict[int, list[int]] = {}  # rows with free space, by the number of free tokens
    free_sizes: list[int] = []  # the keys of `open_rows`, in ascending order
    distinct, counts = np.unique(sizes, return_counts=True)
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        remaining = count
        while remaining:
            position = bisect_left(free_sizes, length)
            free = free_sizes[position] if position < len(free_sizes) else seq_length
            # A row that takes one of these examples also has the least room for the next one.
            per_row = min(free // length, remaining)
            if position < len(free_sizes):
                candidates = open_rows[free]
                num_rows = min(len(candidates), remaining // per_row)
                chosen_rows: Sequence[int] = candidates[-num_rows:]
                del candidates[-num_rows:]
                if not candidates:
                    del open_rows[free], free_sizes[position]
            else:
                num_rows = remaining // per_row
                chosen_rows = range(rows, rows + num_rows)
                rows += num_rows
            placed = num_rows * per_row
            row_indices[num_placed : num_placed + placed] = np.repeat(chosen_rows, per_row)
            num_placed, remaining = num_placed + placed, remaining - placed
            if free_after := free - per_row * length:
                if free_after not in open_rows:
                    insort(free_sizes, free_after)
                open_rows.setdefault(free_after, []).extend(chosen_rows)
    return Packing(sizes, seq_length, row_indices, rows)


def one_per_row(lengths: Sequence[int] | NDArray[np.int64], seq_length: int) -> Packing:
    """Place each example in a separate row. The arguments are the same as for `pack`."""
    sizes = _checked(lengths, seq_length)
    return Packing(sizes, seq_length, np.arange(len(sizes)), len(sizes))


def describe_rows(packings: Sequence[Packing], noun: str) -> str:
    """Describe how full the rows of several datasets are, for the start-up panel.

    Args:
        packings: The rows of each dataset, all of the same length.
        noun: The singular noun for an item in a row.
    """
    count = sum(len(packing.lengths) for packing in packings)
    rows = sum(packing.rows for packing in packings)
    tokens = sum(int(packing.lengths.sum()) for packing in packings)
    fullness = tokens / (rows * packings[0].seq_length)
    return f"{count:,} {noun}s in {rows:,} rows per epoch, {fullness:.1%} full"


def _checked(lengths: Sequence[int] | NDArray[np.int64], seq_length: int) -> NDArray[np.int64]:
    sizes = np.asarray(lengths, np.int64)
    assert len(sizes) and sizes.min() > 0 and sizes.max() <= seq_length, "an example exceeds a row"
    return sizes
