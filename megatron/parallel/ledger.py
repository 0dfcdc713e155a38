"""The account of memory that ranks write for each other: which part is free, without asking.

The ranks are not in step, but each does the same calls in the same order. So whoever has sent rows
for a use had closed, in its own queue, every use that the program closes before that.
"""

from __future__ import annotations

SLOTS = 3  # of a column's backward two are open; with a third the next use needs no barrier


class Ledger:
    """Which of the slots a use takes, and whether it is known to be free on every rank.

    Uses count from 0; use k takes slot k modulo `slots`. Rows that another rank has sent for use k
    tell that it has closed what this rank had closed when it sent its own for k.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._opened = 0
        self._open: list[int] = []
        self._closed_at_send: dict[int, int] = {}
        self._known = 0

    def open(self) -> int:
        """The next use."""
        assert len(self._open) < self._slots, "uses are not closed"
        use = self._opened
        self._opened += 1
        self._open.append(use)
        return use

    def may_send(self, use: int) -> bool:
        """Whether the others have closed the use that had this one's slot."""
        return use - self._slots < self._known

    def met(self) -> None:
        """The ranks are at a barrier."""
        self._known = self._closed

    def sent(self, use: int) -> None:
        """The first rows of a use are on their way."""
        self._closed_at_send.setdefault(use, self._closed)

    def received(self, use: int) -> None:
        """All others' rows of a use are there."""
        self._known = max(self._known, self._closed_at_send.pop(use))

    def close(self, use: int) -> None:
        """Its slot has been read."""
        self._open.remove(use)

    @property
    def _closed(self) -> int:
        """All uses below are closed."""
        return min(self._open, default=self._opened)
