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
        places: The row of each example, `[N]`, in order of decreasing example length.
        rows: The number of rows in an epoch.
    """

    lengths: NDArray[np.int64]
    seq_length: int
    places: NDArray[np.int64]
    rows: int
    _plans: dict[tuple[int, int], EpochPlan] = field(default_factory=dict, repr=False)

    @property
    def fullness(self) -> float:
        """The fraction of the rows' tokens that belong to examples, 0 to 1."""
        return int(self.lengths.sum()) / (self.rows * self.seq_length)

    def epoch(self, number: int, seed: int) -> EpochPlan:
        """Return the rows of an epoch."""
        random = np.random.RandomState([seed, number])
        mixed = random.permutation(len(self.lengths))
        longest_first = mixed[np.argsort(-self.lengths[mixed], kind="stable")]
        rows = random.permutation(self.rows)[self.places]
        counts = np.bincount(rows, minlength=self.rows)
        return EpochPlan(
            longest_first[np.argsort(rows, kind="stable")], np.concatenate([[0], counts.cumsum()])
        )

    def row(self, i: int, seed: int) -> NDArray[np.int64]:
        """Return the examples of row `i`, counted over all epochs."""
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
    places = np.empty(len(sizes), np.int64)
    rows = done = 0
    open_rows: dict[int, list[int]] = {}  # rows with free space, by the number of free tokens
    rooms: list[int] = []  # the keys of `open_rows`, in ascending order
    found, counts = np.unique(sizes, return_counts=True)
    for length, count in zip(found[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else seq_length
            # A row that takes one of these examples also has the least room for the next one.
            each = min(room // length, left)
            if at < len(rooms):
                candidates = open_rows[room]
                taken = min(len(candidates), left // each)
                used: Sequence[int] = candidates[-taken:]
                del candidates[-taken:]
                if not candidates:
                    del open_rows[room], rooms[at]
            else:
                taken = left // each
                used = range(rows, rows + taken)
                rows += taken
            placed = taken * each
            places[done : done + placed] = np.repeat(used, each)
            done, left = done + placed, left - placed
            if rest := room - each * length:
                if rest not in open_rows:
                    insort(rooms, rest)
                open_rows.setdefault(rest, []).extend(used)
    return Packing(sizes, seq_length, places, rows)


def one_per_row(lengths: Sequence[int] | NDArray[np.int64], seq_length: int) -> Packing:
    """Give each example a separate row. The arguments are the same as for `pack`."""
    sizes = _checked(lengths, seq_length)
    return Packing(sizes, seq_length, np.arange(len(sizes)), len(sizes))


def _checked(lengths: Sequence[int] | NDArray[np.int64], seq_length: int) -> NDArray[np.int64]:
    sizes = np.asarray(lengths, np.int64)
    assert len(sizes) and sizes.min() > 0 and sizes.max() <= seq_length, "an example exceeds a row"
    return sizes
