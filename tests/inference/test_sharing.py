"""Prompts that several copies of a model share: each is answered once, and written in order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron.errors import DataError
from megatron.inference import sharing
from megatron.inference.sharing import GeneratedText, SharedPrompts

_PROMPTS = ["a", "b", None, "d", "e", "f"]


def _text(index: int, error: str = "") -> GeneratedText:
    return GeneratedText("prompt", f"text {index}", 3, finished=not error, error=error)


def test_copies_claim_different_prompts_and_rank_0_writes_all_in_order() -> None:
    store, written = dist.HashStore(), list[GeneratedText]()
    main = SharedPrompts(store, _PROMPTS, 1, written.append)
    other = SharedPrompts(store, _PROMPTS)
    mine, others = main.claim(), other.claim()
    assert [next(mine), next(others), next(mine)] == [(1, "b"), (2, None), (3, "d")]
    assert next(others) == (4, "e")
    main.put(3, _text(3))
    other.put(4, _text(4, "too long"))
    assert written == []  # they wait for the first
    main.put(1, _text(1))
    assert written == [_text(1)]
    assert store.check(["text/4"])
    other.put(2, _text(2))
    assert next(mine) == (5, "f")
    main.put(5, _text(5, "no tokens"))
    assert written == [_text(1), _text(2), _text(3), _text(4, "too long"), _text(5, "no tokens")]
    assert (list(mine), list(others)) == ([], [])
    assert (main.failed, other.failed) == (2, 0)
    assert not store.check(["text/4"])  # memory is freed
    main.finish()
    other.finish()


def test_rank_0_waits_for_the_last_texts_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store, written, waits = dist.HashStore(), list[GeneratedText](), list[float]()
    main = SharedPrompts(store, _PROMPTS[:2], 0, written.append)
    other = SharedPrompts(store, _PROMPTS[:2])
    assert [index for index, _ in other.claim()] == [0, 1]

    def answer(seconds: float) -> None:
        if len(waits) < 2:
            other.put(1 - len(waits), _text(1 - len(waits)))
        waits.append(seconds)

    monkeypatch.setattr(sharing, "time", SimpleNamespace(sleep=answer))
    main.finish()
    assert written == [_text(0), _text(1)]
    assert len(waits) == 3  # once more after the last one has arrived


def test_other_prompts_on_another_machine_are_refused() -> None:
    store = dist.HashStore()
    SharedPrompts(store, _PROMPTS, 0, lambda text: None)
    with pytest.raises(DataError, match="this process found 5 prompts, and rank 0 found 6"):
        SharedPrompts(store, _PROMPTS[:5])


def test_what_is_done_already_is_not_claimed() -> None:
    main = SharedPrompts(dist.HashStore(), _PROMPTS, 6, lambda text: None)
    assert list(main.claim()) == []
    main.finish()
