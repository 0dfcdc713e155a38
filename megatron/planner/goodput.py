"""The fraction of a cluster's time that makes progress, given failures and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Failures:
    """How a run fails and recovers. Times are in seconds.

    Attributes:
        between: Mean time between failures of the whole run.
        checkpoint: Time that training waits for a checkpoint.
        restart: Time from a failure until training continues from the last checkpoint.
    """

    between: float
    checkpoint: float
    restart: float

    def goodput(self, interval: float) -> float:
        """Return the exact expected fraction of time spent on training that is not lost.

        Failures come at a constant rate, during checkpoints and restarts too. A checkpoint follows
        each `interval` of training, and a failure loses the training since the last one. The
        expected time of an interval is then M e^(R/M) (e^((T+C)/M) - 1).
        """
        rate = 1 / self.between
        exponent = rate * (interval + self.checkpoint)
        if exponent + rate * self.restart > 700:  # beyond a float: nothing gets done
            return 0.0
        took = self.between * math.exp(rate * self.restart) * math.expm1(exponent)
        return interval / took

    @property
    def young(self) -> float:
        """Young's interval (1974), sqrt(2 C M)."""
        return math.sqrt(2 * self.checkpoint * self.between)

    @property
    def daly(self) -> float:
        """Daly's interval (2006), of higher order."""
        ratio = self.checkpoint / (2 * self.between)
        if ratio >= 1:
            return self.between
        return self.young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.checkpoint

    @property
    def best(self) -> float:
        """The interval with the highest goodput, found by golden-section search."""
        low, high = min(1e-3, self.checkpoint), 10 * (self.young + self.between)
        shrink = (math.sqrt(5) - 1) / 2
        while high - low > 1e-6 * high:
            step = shrink * (high - low)
            if self.goodput(high - step) >= self.goodput(low + step):
                high = low + step
            else:
                low = high - step
        return (low + high) / 2
