"""The benchmark of text generation: a toy, and what it refuses before it builds a model."""

import pytest

from megatron.device import Device
from megatron.errors import StorageError
from tools import benchmark_generation


@pytest.fixture(autouse=True)
def _cpu(monkeypatch) -> None:
    monkeypatch.setattr(Device, "pick", Device.cpu)


def test_large_models_are_refused_on_a_cpu(capsys) -> None:
    assert benchmark_generation.main(["--model", "L"]) == 9
    assert "no GPU: use --model demo or small or small-moe" in capsys.readouterr().err


def test_the_toy_that_the_help_shows_runs(capsys) -> None:
    words = benchmark_generation.__doc__.split("--model demo", 1)[1].split("#", 1)[0].split()
    assert benchmark_generation.main(["--model", "demo", *words]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["1", "4"]


def test_a_window_that_is_too_short_is_named(capsys) -> None:
    assert benchmark_generation.main(["--model", "demo", "--new", "8"]) == 9
    assert "do not fit in the 64 positions of --model demo" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_reported_before_the_measurement(tmp_path, capsys) -> None:
    out = tmp_path / "missing" / "numbers.json"
    words = ["--model", "L", "--out"]  # the model would be refused next
    assert benchmark_generation.main([*words, str(out)]) == StorageError.exit_code
    error = capsys.readouterr().err
    assert error.startswith(f"error: --out {out} cannot be written")
    assert error.endswith(": create the folder, or give another path\n")
    out.parent.mkdir()
    assert benchmark_generation.main([*words, str(out)]) == 9
    assert "--model L would take hours" in capsys.readouterr().err
    assert not out.exists()
    out.write_text("{}")
    assert benchmark_generation.main([*words, str(out)]) == 9
    assert "already exists: choose another name, or give --overwrite" in capsys.readouterr().err
    assert benchmark_generation.main([*words, str(out), "--overwrite"]) == 9
    assert "--model L would take hours" in capsys.readouterr().err
    assert out.read_text() == "{}"
