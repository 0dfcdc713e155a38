"""Servers over a fake engine, one per module unless a test needs its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.live import Live, make_settings, running, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def live(tokenizer_folder: Path) -> Iterator[Live]:
    """Return a server with the default settings."""
    engine = FakeEngine()
    with running(engine, make_settings(tokenizer_folder, engine)) as server:
        yield server
