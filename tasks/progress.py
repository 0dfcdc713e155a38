"""How far an evaluation has come."""

from __future__ import annotations

import sys
from typing import Any

from megatron.command import say


class Progress:
    """A bar where the error stream is a terminal, else a line every so often.

    Args:
        shown: whether this process is the one that prints.
        log_interval: batches between lines.
    """

    def __init__(self, *, shown: bool, log_interval: int) -> None:
        """Start at nothing."""
        self._shown = shown
        self._log_interval = log_interval
        self._bar: Any = None

    def __call__(self, batches: int, of: int) -> None:
        """`batches` of `of` are done."""
        if not self._shown:
            return
        if sys.stderr.isatty():
            self._draw(batches, of)
        elif batches % self._log_interval == 0 or batches == of:
            say(f"> batch {batches:,} of {of:,}")

    def _draw(self, batches: int, of: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=of, unit="batch", dynamic_ncols=True, desc="evaluating")
        self._bar.update(batches - self._bar.n)
        if batches == of:
            self._bar.close()
            self._bar = None
