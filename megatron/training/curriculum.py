"""The sequence length of every update: curriculum learning as in DeepSpeed."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Protocol

from megatron.config import RunConfig


class Lengths(Protocol):
    """The sequence length of each update, which never decreases.

    Updates are counted from 1. The lengths are those of `CurriculumScheduler` in DeepSpeed 0.19.
    """

    @property
    def final_update(self) -> int:
        """The first update that has the final length."""

    def at(self, update: int) -> int:
        """Return the sequence length of an update."""

    def describe(self) -> str:
        """Return a short description of the lengths."""


@dataclass(frozen=True)
class Growing:
    """A sequence length that grows from `shortest` to `longest` as a root of the update number.

    Attributes:
        shortest: The lower limit of the lengths in tokens. It is rounded up to a multiple of
            `multiple`.
        longest: The last length in tokens, a multiple of `multiple`.
        steps: The first update that has the last length, counted from 1.
        multiple: A divisor of all lengths. Lengths are rounded down to a multiple of it.
        degree: The degree of the root: 1 grows linearly, 2 as the square root.
    """

    shortest: int
    longest: int
    steps: int
    multiple: int
    degree: float

    @property
    def final_update(self) -> int:
        """The first update that has the final length."""
        return self.steps

    def at(self, update: int) -> int:
        """Return the sequence length of an update."""
        done = min(update / self.steps, 1.0) ** (1.0 / self.degree)
        length = math.floor(done * (self.longest - self.shortest) + self.shortest)
        shortest = -(-self.shortest // self.multiple) * self.multiple
        return min(max(length - length % self.multiple, shortest), self.longest)

    def describe(self) -> str:
        """Return a short description of the lengths."""
        growth = "linearly" if self.degree == 1 else f"by the root of degree {self.degree:g}"
        return (
            f"{self.at(1):,} to {self.longest:,} tokens in {self.steps:,} iterations, {growth}, in "
            f"multiples of {self.multiple}"
        )


@dataclass(frozen=True)
class Discrete:
    """A list of sequence lengths in tokens, each used until a given update.

    Attributes:
        lengths: The lengths in tokens.
        until: For each length except the last, the last update that uses it, counted from 1.
    """

    lengths: tuple[int, ...]
    until: tuple[int, ...]

    @property
    def final_update(self) -> int:
        """The first update that has the final length."""
        return self.until[-1] + 1

    def at(self, update: int) -> int:
        """Return the sequence length of an update."""
        return self.lengths[bisect.bisect_left(self.until, update)]

    def describe(self) -> str:
        """Return a short description of the lengths."""
        ends = zip(self.lengths, self.until, strict=False)
        parts = [f"{length:,} tokens up to iteration {end:,}" for length, end in ends]
        return ", ".join([*parts, f"then {self.lengths[-1]:,}"])


def lengths_of(config: RunConfig) -> Lengths | None:
    """Return the curriculum that the flags specify, if any. The rules have checked the flags."""
    options = config.curriculum
    if options.curriculum_schedule is None:
        return None
    if options.curriculum_schedule == "fixed_discrete":
        assert options.curriculum_lengths is not None and options.curriculum_until is not None
        return Discrete(options.curriculum_lengths, options.curriculum_until)
    assert options.curriculum_min_length is not None and options.curriculum_steps is not None
    return Growing(
        options.curriculum_min_length,
        options.curriculum_max_length or config.data.seq_length,
        options.curriculum_steps,
        options.curriculum_length_step,
        options.curriculum_root_degree if options.curriculum_schedule == "fixed_root" else 1,
    )


def updates_of_length(lengths: Lengths, update: int) -> int | None:
    """Return the number of consecutive updates, from `update` on, that have the same length.

    The result is `None` if all later updates have this length. It is found by bisection, because a
    curriculum may have very many updates.

    Args:
        lengths: The curriculum.
        update: The first update, counted from 1.
    """
    if update >= lengths.final_update:
        return None
    length, later = lengths.at(update), range(update + 1, lengths.final_update + 1)
    return 1 + bisect.bisect_right(later, length, key=lengths.at)
