"""No request crashes the server or gets a 5xx."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron.inference.server.settings import ServerLimits
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.fuzz import fuzz
from tests.inference.server.live import make_settings, running


@pytest.mark.slow
def test_nothing_that_is_sent_brings_it_down(tokenizer_folder: Path) -> None:
    count = 5000
    engine = FakeEngine()
    limits = ServerLimits(read_seconds=1.0)
    with running(engine, make_settings(tokenizer_folder, engine, limits=limits)) as live:
        outcome = fuzz("127.0.0.1", live.port, count)
        assert not outcome.faults, "\n".join(outcome.faults[:5])
        assert outcome.statuses.total() == count
        assert outcome.good == count // 50 + 1
        assert outcome.statuses[200] > count / 10
        end = time.monotonic() + 60
        while engine.has_work and time.monotonic() < end:
            time.sleep(0.01)
        assert not engine.has_work  # disconnected clients hold no place
