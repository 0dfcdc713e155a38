"""The user's own folders for compiled files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.environment import private_cache


@pytest.mark.parametrize("asked", ["MEGATRON_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_each_user_of_a_shared_cache_gets_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    for name in ("MEGATRON_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(asked, str(tmp_path))
    inside = {"MEGATRON_CACHE": ".", "XDG_CACHE_HOME": "megatron", "HOME": ".cache/megatron"}
    path = private_cache("kernels")
    assert path == tmp_path / inside[asked] / f"kernels-{os.getuid()}"
    assert path.stat().st_mode & 0o777 == 0o700
