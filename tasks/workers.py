"""Rank 0 decides what to compute, all ranks compute it: for libraries that know of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron.checkpoint.entries import Json
from megatron.checkpoint.exchange import JsonExchange
from megatron.parallel.layout import Axis

Work = Callable[[Json], Json]
_END = "end"


class Workers:
    """Calls functions on all ranks at once.

    Args:
        world: all ranks.
        works: by name, what can be called; each is collective, and answers the same on every rank.
    """

    def __init__(self, world: Axis, works: Mapping[str, Work]) -> None:
        """Take what can be called."""
        self._exchange = JsonExchange(world)
        self._works = works

    def call(self, name: str, argument: Json) -> Json:
        """Of rank 0: do this work, the others too; its answer."""
        self._exchange.on_main(lambda: [name, argument])
        return self._works[name](argument)

    def serve(self) -> None:
        """Of the other ranks: do what rank 0 calls, until its end."""
        while True:
            name, argument = self._exchange.on_main(lambda: None)
            if name == _END:
                return
            self._works[name](argument)

    def end(self) -> None:
        """Of rank 0: let the others go on."""
        self._exchange.on_main(lambda: [_END, None])
