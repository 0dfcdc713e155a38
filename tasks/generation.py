"""Text that a model writes after prompts, over all processes of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.checkpoint.exchange import JsonExchange
from megatron.device import Device
from megatron.errors import UserError
from megatron.inference.build import EngineOptions, engine_of
from megatron.inference.load import Loaded
from megatron.inference.request import Event, Finished, Request, Sampling, Token
from megatron.parallel.layout import Axis, Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Wish:
    """A prompt and how to go on from it.

    Attributes:
        prompt: tokens; cut at the front where they leave too little of the window.
        max_new_tokens: at most so many.
        until: texts that end the answer, and are no part of it.
        temperature: 0: always the most likely token.
        top_k: only the so many most likely; 0: all.
        top_p: only the most likely that together have this probability; 0: all.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    until: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0


class Generator:
    """Answers wishes with one model; each data-parallel copy of it has an engine and takes a share.

    Making one and `generate` are collective over all processes of the layout.
    """

    def __init__(self, loaded: Loaded, device: Device) -> None:
        """Build an engine for this copy of the model. Collective."""
        self._world = loaded.layout.world
        self._data = loaded.layout.data
        self._is_speaker = loaded.layout.tensor.is_first and loaded.layout.pipeline.is_first
        self._tokenizer = loaded.tokenizer
        self._window = loaded.config.data.seq_length
        self._engine = engine_of(
            loaded, device, EngineOptions(max_sequences=64), copy=ranks_of_copy(loaded.layout)
        )

    def generate(self, wishes: Sequence[Wish]) -> list[str]:
        """One text a wish, in order, on every process. Collective.

        Raises:
            UserError: a request cannot be answered.
        """
        mine = range(self._data.rank, len(wishes), self._data.size)
        texts = self._answer({str(i): wishes[i] for i in mine})
        found: dict[str, str] = {}
        for part in JsonExchange(self._world).gather(texts if self._is_speaker else {}):
            found |= part
        return [found[str(i)] for i in range(len(wishes))]

    def _answer(self, wishes: dict[str, Wish]) -> dict[str, str]:
        for name, wish in wishes.items():
            self._engine.add(self._request(name, wish))
        answers: dict[str, list[int]] = {name: [] for name in wishes}
        texts: dict[str, str] = {}
        while self._engine.has_work:
            for event in self._engine.step():
                if event.request not in texts:
                    self._take(event, wishes[event.request], answers[event.request], texts)
        return texts

    def _take(self, event: Event, wish: Wish, answer: list[int], texts: dict[str, str]) -> None:
        """Add a token to its answer; a finished answer goes to `texts`."""
        if isinstance(event, Token):
            answer.append(event.token)
            text = cut_at(self._tokenizer.detokenize(answer), wish.until)
            if text is not None:
                texts[event.request] = text
                self._engine.cancel(event.request)
        elif isinstance(event, Finished):
            if event.reason == "error":
                raise UserError(event.message)
            if answer and answer[-1] == self._tokenizer.eod:
                answer.pop()
            texts[event.request] = self._tokenizer.detokenize(answer)

    def _request(self, name: str, wish: Wish) -> Request:
        new = min(wish.max_new_tokens, self._window - 1)
        sampling = Sampling(
            max_new_tokens=new,
            temperature=wish.temperature,
            top_k=wish.top_k,
            top_p=wish.top_p,
            stop_tokens=(self._tokenizer.eod,),
        )
        return Request(name, wish.prompt[new - self._window :], sampling)


def cut_at(text: str, ends: Sequence[str]) -> str | None:
    """`text` up to the first of the ends in it; None where there is none."""
    places = [place for end in ends if end and (place := text.find(end)) >= 0]
    return text[: min(places)] if places else None


def ranks_of_copy(layout: Layout) -> Axis:
    """The ranks of this process's copy of the model, stage by stage. Collective over the world."""
    if layout.data.size == 1:
        return layout.world
    ranks = tuple(
        stage - layout.tensor.rank + part
        for stage in layout.pipeline.ranks
        for part in range(layout.tensor.size)
    )
    return Axis(
        size=len(ranks),
        rank=ranks.index(layout.world.rank),
        ranks=ranks,
        group=_group_of(layout, ranks),
        journal=layout.journal,
    )


def _group_of(layout: Layout, ranks: tuple[int, ...]) -> ProcessGroup | None:
    """The process group of these ranks. Every process makes every copy's, in one order."""
    if len(ranks) == 1:
        return None
    import torch.distributed as dist

    step = layout.tensor.size  # data ranks lie so far apart
    first = [rank - layout.data.rank * step for rank in ranks]
    groups = [
        dist.new_group([rank + copy * step for rank in first]) for copy in range(layout.data.size)
    ]
    mine: ProcessGroup = groups[layout.data.rank]
    return mine
