"""tools/benchmark_index.py: sizes for which there is a map, and others."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from tools import benchmark_index


def test_sentences_must_give_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["benchmark_index.py", "--repeat", "1", "--documents", "50", "--sentences"]
    monkeypatch.setattr("sys.argv", [*words, "99"])
    with pytest.raises(ConfigError, match="--sentences 99: give at least twice --documents 50"):
        benchmark_index.main()
    monkeypatch.setattr("sys.argv", [*words, "100"])
    benchmark_index.main()
    assert "sentence map:" in capsys.readouterr().out
