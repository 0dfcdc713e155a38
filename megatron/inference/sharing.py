"""Division of prompts among the copies of a model, and collection of the texts in order.

Every copy claims the next prompt as soon as it has room, so a copy with long texts does not delay
the others. All texts are sent to rank 0, which writes them in the order of their prompts. After an
interruption, the file therefore always contains the first texts, without gaps. A text depends on
the seed and on its prompt's index, so it is the same for any number of copies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from megatron.errors import DataError

_CLAIMED, _START = "claimed", "start"
_POLL_SECONDS = 0.05  # seconds between checks for the texts of other copies


@dataclass(frozen=True)
class GeneratedText:
    """The text generated for one prompt, which is one line of the output.

    Attributes:
        prompt: The prompt, or `None` if there is none.
        text: The text generated after the prompt.
        length: Number of tokens in the text.
        finished: Whether the model ended the text with its end-of-document token.
        error: The reason there is no text, or "" if there is one.
        passages: Fields of each `NeighborPassage` that Retro has read; `None` for other models, and
            if there are none.
    """

    prompt: str | None
    text: str
    length: int
    finished: bool
    error: str = ""
    passages: list[dict[str, Any]] | None = None


class SharedPrompts:
    """The remaining prompts, as seen by one copy of the model.

    Attributes:
        failed: On rank 0, the number of written texts that are errors. 0 on the other ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        prompts: Sequence[str | None],
        done: int = 0,
        write: Callable[[GeneratedText], None] | None = None,
    ) -> None:
        """Start sharing. Each copy's first rank must call this, and waits for rank 0's call.

        Args:
            store: A store that the first ranks share.
            prompts: All prompts, including finished ones.
            done: On rank 0, the number of prompts that have been answered already.
            write: On rank 0, a function that takes the texts in the order of their prompts. `None`
                on the other ranks.

        Raises:
            DataError: Rank 0 found a different number of prompts.
        """
        self._store, self._prompts, self._write = store, prompts, write
        if write is not None:
            store.set(_START, json.dumps([done, len(prompts)]))
        self._next, total = json.loads(store.get(_START))
        if total != len(prompts):
            raise DataError(
                f"this process found {len(prompts)} prompts, and rank 0 found {total}: give all "
                "machines the same file"
            )
        self._first = self._next
        self._texts: dict[int, GeneratedText] = {}  # this copy's texts, waiting for earlier ones
        self.failed = 0

    def claim(self) -> Iterator[tuple[int, str | None]]:
        """Yield the index and text of prompts that no other copy has claimed."""
        while (index := self._first + self._store.add(_CLAIMED, 1) - 1) < len(self._prompts):
            yield index, self._prompts[index]

    def put(self, index: int, text: GeneratedText) -> None:
        """Store the text of a claimed prompt. Rank 0 also writes all texts whose turn it is."""
        if self._write is None:
            self._store.set(f"text/{index}", json.dumps(asdict(text)))
        else:
            self._texts[index] = text
            self._write_complete()

    def finish(self) -> None:
        """Wait on rank 0 until the texts of all copies are written."""
        while self._write is not None and self._next < len(self._prompts):
            self._write_complete()
            time.sleep(_POLL_SECONDS)

    def _write_complete(self) -> None:
        assert self._write is not None, "only rank 0 writes"
        while True:
            text = self._texts.pop(self._next, None)
            if text is None:
                key = f"text/{self._next}"
                if not self._store.check([key]):
                    return
                text = GeneratedText(**json.loads(self._store.get(key)))
                self._store.delete_key(key)
            self.failed += bool(text.error)
            self._write(text)
            self._next += 1
