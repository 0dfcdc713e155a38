"""Shared fixtures: real data beside the checkout, and small distributed runs on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


def _shared(name: str) -> Path:
    path = SHARED / name
    if not path.is_dir():
        pytest.skip(f"needs ../shared/{name}, which is not beside this checkout")
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real tokenizers, corpora and evaluation sets."""
    return _shared("data")


@pytest.fixture(scope="session")
def golden() -> Path:
    """Recorded runs of Megatron-LM 23.08."""
    return _shared("golden")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """One thread everywhere: bits do not depend on the machine, and forked ranks start clean."""
    import torch

    torch.set_num_threads(1)
