"""Warnings about training data whose content has changed since the checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.changed_settings import changed_corpus


@pytest.mark.parametrize(
    ("corpus", "saved", "warns"),
    [
        ("a", "b", True),
        ("a", "a", False),
        (None, "b", False),
        ("a", None, False),
        (None, None, False),
    ],
)
def test_only_fingerprints_that_are_known_are_compared(
    corpus: str | None, saved: str | None, warns: bool
) -> None:
    reader: Any = SimpleNamespace(meta={} if saved is None else {"corpus": saved})
    lines = list(changed_corpus(corpus, reader))
    assert len(lines) == warns
    beginning = (
        "WARNING: changed since the checkpoint: the training data itself (fingerprint a instead of "
        "b): "
    )
    assert all(line.startswith(beginning) for line in lines)
