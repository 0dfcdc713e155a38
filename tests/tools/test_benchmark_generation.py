"""The benchmark of text generation: what it refuses before it makes a model."""

from types import SimpleNamespace

from megatron.device import Device
from tools import benchmark_generation


def test_large_models_are_refused_on_a_cpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Device, "pick", lambda: SimpleNamespace(type="cpu"))
    assert benchmark_generation.main(["--model", "L"]) == 9
    assert "--model demo runs without one" in capsys.readouterr().err
