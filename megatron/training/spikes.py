"""Spikes: losses and gradient norms far above their running medians, and the limits they exceed."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from megatron.config.training import TrainingConfig

NORM = "grad norm"
_STD_OVER_MAD = 1.4826  # standard deviation over median absolute deviation of normal values
# Minimum spread as a fraction of the median, so that small deviations from nearly constant values
# are not spikes.
_MIN_SPREAD = 0.01


class SpikeWatch:
    """The recent losses and gradient norms of a run, and the limits that follow from them.

    A limit is the median of the last `--spike-window` applied updates plus a threshold times their
    spread, the standard deviation estimated from the median absolute deviation (at least 1% of the
    median). A few outliers affect neither. There is no limit until the window is full. Limits
    depend on these values alone, which are saved in checkpoints, so a resumed run finds the same
    spikes.
    """

    def __init__(self, options: TrainingConfig) -> None:
        """Start with an empty window."""
        self._window = options.spike_window
        self._loss_threshold = options.spike_loss_threshold
        self._norm_threshold = options.spike_grad_norm_threshold
        self._values: dict[str, deque[float]] = {}

    def limit(self, name: str) -> float:
        """Return the largest value that is not a spike, which is infinity until the window is full.

        Args:
            name: The log name of a loss, or `NORM`.
        """
        values = self._values.get(name, ())
        if len(values) < self._window:
            return math.inf
        median = statistics.median(values)
        spread = _STD_OVER_MAD * statistics.median(abs(value - median) for value in values)
        threshold = self._norm_threshold if name == NORM else self._loss_threshold
        return median + threshold * max(spread, _MIN_SPREAD * abs(median))

    def add(self, values: Mapping[str, float]) -> None:
        """Add the values of an applied update to the window."""
        for name, value in values.items():
            self._values.setdefault(name, deque(maxlen=self._window)).append(value)

    def describe(self, values: Mapping[str, float]) -> str:
        """Describe which values exceed their limits, for the log."""
        return ", ".join(
            f"{name} {value:.6g} exceeds {self.limit(name):.6g} (the median of "
            f"{self._window} updates is {statistics.median(self._values[name]):.6g})"
            for name, value in values.items()
            if value > self.limit(name)
        )

    def state(self) -> dict[str, list[float]]:
        """Return the window as JSON values, for a checkpoint."""
        return {name: list(values) for name, values in self._values.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Replace the window with one that `state` returned, possibly of another length."""
        self._values = {name: deque(values, self._window) for name, values in state.items()}
